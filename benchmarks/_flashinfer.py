"""FlashInfer's decode as a baseline: its kernels read the same static cache as the others, in place, through a page table.

Optional: where ``flashinfer`` can't be imported, `version` says why. It compiles its kernels with nvcc at first use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PAGE = 16  # tokens: vLLM's default
WORKSPACE = 256 << 20  # bytes, which all calls share: they run one after another
#: q [B, Hq, 1, D], k and v [B, Hkv, L, D] -> [B, Hq, D]
Inputs = tuple[Tensor, Tensor, Tensor]
Calls = list[Callable[[], Tensor]]


@functools.cache
def version() -> str:
    """FlashInfer's version, or ``not measured: `` and why it can't be imported."""
    try:
        import flashinfer
    except (ImportError, OSError, RuntimeError) as error:  # not installed, a library is missing, no nvcc
        return f"not measured: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return str(flashinfer.__version__)


def available() -> bool:
    return not version().startswith("not measured")


def pages(cache: Tensor) -> Tensor:
    """A contiguous cache ``[B, H, L, D]`` as pages ``[P, H, PAGE, D]``, without a copy: pages begin every ``PAGE * D``
    elements and the heads of one lie ``L * D`` apart. `page_table` names the pages that are tokens of one row."""
    B, H, L, D = cache.shape
    row = L // PAGE
    return cache.as_strided((((B - 1) * H + 1) * row, H, PAGE, D), (PAGE * D, L * D, D, 1))


def page_table(cache: Tensor) -> Tensor:
    """``[B, L / PAGE]`` (int32): the pages of each row of ``cache``, in order."""
    B, H, L, _ = cache.shape
    first = torch.arange(B, device=cache.device, dtype=torch.int32) * (H * (L // PAGE))
    return first[:, None] + torch.arange(L // PAGE, device=cache.device, dtype=torch.int32)


def workspace(device: torch.device) -> Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


def wrapper_calls(sets: Sequence[Inputs], tensor_cores: bool) -> Calls:
    """``BatchDecodeWithPagedKVCacheWrapper``, planned once, as for all layers of a model."""
    import flashinfer

    q, k, _ = sets[0]
    indices = page_table(k)
    indptr = torch.arange(len(k) + 1, dtype=torch.int32, device=k.device) * indices.shape[1]
    last = torch.full((len(k),), PAGE, dtype=torch.int32, device=k.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(k.device),
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=indices.flatten().clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    wrapper.plan(
        indptr, indices.flatten(), last, q.shape[1], k.shape[1], k.shape[3], PAGE,
        q_data_type=q.dtype, kv_data_type=k.dtype,
    )  # fmt: skip
    return [functools.partial(wrapper.run, q.squeeze(2), (pages(k), pages(v))) for q, k, v in sets]


def xqa_calls(sets: Sequence[Inputs]) -> Calls:
    """``xqa_batch_decode_with_kv_cache``, TensorRT-LLM's decode kernel."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    B, _, L, D = sets[0][1].shape
    how = {
        "workspace_buffer": workspace(sets[0][1].device),
        "block_tables": page_table(sets[0][1]),
        "seq_lens": torch.full((B,), L, dtype=torch.int32, device=sets[0][1].device).view(torch.uint32),
        "max_seq_len": L,
        "bmm1_scale": D**-0.5,
        "bmm2_scale": 1.0,
        "kv_layout": "HND",
    }
    return [
        functools.partial(xqa_batch_decode_with_kv_cache, q.squeeze(2), (pages(k), pages(v)), **how)
        for q, k, v in sets
    ]  # fmt: skip


#: By the names in a record: its decode on tensor cores (as advised for grouped queries) and without, and TensorRT-LLM's.
KERNELS: dict[str, Callable[[Sequence[Inputs]], Calls]] = {
    "FlashInfer tensor cores us": functools.partial(wrapper_calls, tensor_cores=True),
    "FlashInfer CUDA cores us": functools.partial(wrapper_calls, tensor_cores=False),
    "FlashInfer XQA us": xqa_calls,
}
