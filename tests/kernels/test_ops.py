"""The ``fasa::`` operators on CPU: what they promise to the compiler, and that they are the reference."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fasa_compile.triton_kernels import ops, reference

VERSION = ops.KERNEL_VERSION
FASA = torch.ops.fasa
B, HKV, G, L, D, W = 2, 2, 3, 70, 16, 8
HOW = {
    "scale": 0.25,
    "n_fac": 20,
    "n_sink": 2,
    "n_recent": 4,
    "softcap": 0.0,
    "sinks": None,
    "fmt": "int4",
    "reduction": "static",
}


def inputs() -> tuple[torch.Tensor, ...]:
    dims = torch.stack([torch.randperm(D)[:W] for _ in range(HKV)]).int()
    q, k = torch.randn(B, HKV * G, 1, D), torch.randn(B, L, HKV, D).transpose(1, 2)
    return q, k, torch.randn(B, HKV, L, 12), dims, torch.randn(HKV, W), torch.rand(HKV, W) + 0.5


def test_operators_keep_their_promises() -> None:
    q, k, v, dims, centre, spread = inputs()
    check = torch.library.opcheck
    for fmt in ("int4", "fp8", "fp32"):
        check(FASA.pack.default, (k, dims, centre, spread, fmt, VERSION))
    data, meta = FASA.pack(k, dims, centre, spread, "int4", VERSION)
    slots, hint = torch.tensor([3]), torch.zeros(ops.sparse_decode_state(B, HKV)[0])
    mask = torch.rand(B, 1, 1, L) > 0.5
    check(FASA.pack_rows_.default, (data, meta, k, slots, dims, centre, spread, "int4", VERSION))
    check(FASA.mask_bounds.default, (mask, L, VERSION))
    check(
        FASA.dense_decode.default,
        (q, k, v, mask, None),
        {"scale": 0.25, "softcap": 0.0, "sinks": None, "version": VERSION},
    )
    how = {**HOW, "version": VERSION}
    check(FASA.sparse_decode.default, (q, k, v, data, meta, dims, centre, spread, None, mask, None, slots, hint), how)
    check(FASA.sparse_decode.default, (q, k, v, *(None,) * 10), how)


def test_slots_are_refreshed_first() -> None:
    q, k, v, dims, centre, spread = inputs()
    data, meta = FASA.pack(k, dims, centre, spread, "int4", VERSION)
    expected = reference.sparse_decode(q, k, v, data, meta, dims, centre, spread, None, **HOW)
    whole, whole_meta = data.clone(), meta.clone()
    data[:, :, 9], meta[:, :, 9] = 0, 0
    slots = torch.tensor([9])
    out = FASA.sparse_decode(
        q, k, v, data, meta, dims, centre, spread, None, None, None, slots, None, version=VERSION, **HOW
    )
    assert torch.equal(data, whole) and torch.equal(meta, whole_meta) and torch.equal(out, expected)


def test_the_package_imports_without_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import fasa_compile.triton_kernels.ops as ops, torch\n"
        "q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 1, 5, 8)\n"
        "how = dict(scale=1.0, softcap=0.0, sinks=None, version=ops.KERNEL_VERSION)\n"
        "assert torch.ops.fasa.dense_decode(q, k, k, None, None, **how).shape == q.shape\n"
        "assert not [m for m in sys.modules if m.startswith('triton.')]\n"
    )
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.inductor
@pytest.mark.parametrize("operator", ["dense", "sparse"])
def test_a_cache_with_gaps_is_read_where_it_lies(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V of a token side by side, as an offloaded cache has them: functionalisation makes dense tensors of both, and Inductor
    would copy the whole of either to those strides before every step."""
    q, _, _, dims, centre, spread = inputs()
    both = torch.randn(B, HKV, L, 2 * D)
    k, v = both[..., :D], both[..., D:].clone()[..., :12]
    assert not k.is_contiguous() and not v.is_contiguous()
    data, meta = FASA.pack(k, dims, centre, spread, "int4", VERSION)
    hint = torch.zeros(ops.sparse_decode_state(B, HKV)[0])
    read: list[tuple[int, int]] = []
    name = f"{operator}_decode"
    real = getattr(reference, name)

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: object, **how: object) -> torch.Tensor:
        read.append((k.data_ptr(), v.data_ptr()))
        return real(q, k, v, *more, **how)

    monkeypatch.setattr(reference, name, watched)

    def step(q, k, v, new_k, new_v, position):  # type: ignore[no-untyped-def]
        k.index_copy_(2, position, new_k)
        v.index_copy_(2, position, new_v)
        if operator == "dense":
            how = {"scale": 0.25, "softcap": 0.0, "sinks": None, "version": VERSION}
            return FASA.dense_decode(q, k, v, None, None, **how)
        state = (data, meta, dims, centre, spread, None, None, None, position, hint)
        return FASA.sparse_decode(q, k, v, *state, version=VERSION, **HOW)

    new = torch.randn(B, HKV, 1, D), torch.randn(B, HKV, 1, 12)
    torch.compile(step, dynamic=False)(q, k, v, *new, torch.tensor([5]))
    assert read == [(k.data_ptr(), v.data_ptr())]
