"""Decode attention of one layer on a GPU: sparse (FASA) and dense kernels beside what torch offers.

    python benchmarks/attention.py --out benchmarks/results/attention-h100.json

Medians in CUDA graphs, buffers rotated past the L2. Three queries a buffer take turns, so that the state which predicts the
threshold is one step old, as in generation. ``jump``: the state is wiped before every step, so that each one searches.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from _timing import environment, graph_time, kernel_times
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fasa_compile.triton_kernels import ops  # noqa: F401  (registers fasa::)
from fasa_compile.triton_kernels.formats import bytes_per_token
from fasa_compile.triton_kernels.ops import KERNEL_VERSION, sparse_decode_state

HQ, HKV, D, N_FAC = 32, 8, 128, 1024
SCALE = 1 / math.sqrt(D)
#: name -> (format, dominant dims): a quarter of the FCs in fp8 and bf16, half of them in int4.
CACHES = {"fp8 n_tip 16": ("fp8", 32), "int4 n_tip 32": ("int4", 64), "bf16 n_tip 16": ("bf16", 32)}
SHAPES = [(1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768), (32, 8192)]
FASA = torch.ops.fasa


@dataclass
class Buffers:
    """One set of inputs of one layer."""

    k: Tensor
    v: Tensor
    queries: list[Tensor]
    bounds: Tensor
    slots: Tensor
    dims: dict[int, Tensor]
    caches: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    hints: dict[str, Tensor] = field(default_factory=dict)


def make_buffers(B: int, L: int) -> list[Buffers]:
    touched = B * HKV * (L * 32 + N_FAC * 4 * D)
    size = B * HKV * L * (4 * D + 150)
    number = max(2, min(int(24e9 // size), -(-160_000_000 // touched)))
    sets = []
    for _ in range(number):
        k, v = (torch.randn(B, HKV, L, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        base = 2 * torch.randn(B, HQ, 1, D, device="cuda")
        queries = [(0.95 * base + 0.6 * torch.randn_like(base)).to(torch.bfloat16) for _ in range(3)]
        dims = {W: torch.stack([torch.randperm(D)[:W] for _ in range(HKV)]).int().cuda() for W in (32, 64)}
        s = Buffers(
            k, v, queries, torch.tensor([[0, L]] * B, dtype=torch.int32).cuda(), torch.tensor([L - 1]).cuda(), dims
        )
        for name, (fmt, W) in CACHES.items():
            zeros, ones = torch.zeros(HKV, W, device="cuda"), torch.ones(HKV, W, device="cuda")
            s.caches[name] = FASA.pack(k, dims[W], zeros, ones, fmt, KERNEL_VERSION)
            shape, dtype = sparse_decode_state(B, HKV)
            s.hints[name] = torch.zeros(shape, dtype=dtype, device="cuda")
        sets.append(s)
    return sets


def sparse_calls(sets: list[Buffers], name: str, jump: bool = False) -> list[Callable[[], Tensor]]:
    fmt, W = CACHES[name]
    zeros, ones = torch.zeros(HKV, W, device="cuda"), torch.ones(HKV, W, device="cuda")
    norm = torch.zeros(HQ, device="cuda")
    return [
        lambda s=s, q=s.queries[turn]: FASA.sparse_decode(
            q, s.k, s.v, *s.caches[name], s.dims[W], zeros, ones, norm, None, s.bounds, s.slots,
            None if jump else s.hints[name], scale=SCALE, n_fac=N_FAC, n_sink=4, n_recent=16, softcap=0.0, sinks=None,
            fmt=fmt, reduction="static", version=KERNEL_VERSION,
        )
        for turn in range(3)
        for s in sets
    ]  # fmt: skip


def dense_calls(sets: list[Buffers]) -> list[Callable[[], Tensor]]:
    return [
        lambda s=s: FASA.dense_decode(
            s.queries[0], s.k, s.v, None, s.bounds, scale=SCALE, softcap=0.0, sinks=None, version=KERNEL_VERSION
        )
        for s in sets
    ]  # fmt: skip


def torch_calls(sets: list[Buffers], backend: SDPBackend) -> list[Callable[[], Tensor]]:
    def call(s: Buffers) -> Tensor:
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(s.queries[0], s.k, s.v, enable_gqa=True)

    return [lambda s=s: call(s) for s in sets]


def static_cache_calls(sets: list[Buffers]) -> list[Callable[[], Tensor]]:
    """What Hugging Face runs with a static cache: repeat_kv, then SDPA with a mask."""

    def call(s: Buffers) -> Tensor:
        B, L = s.k.shape[0], s.k.shape[2]
        k, v = (x[:, :, None].expand(B, HKV, HQ // HKV, L, D).reshape(B, HQ, L, D) for x in (s.k, s.v))
        mask = (torch.arange(L, device="cuda") < L)[None, None, None]
        return scaled_dot_product_attention(s.queries[0], k, v, attn_mask=mask)

    return [lambda s=s: call(s) for s in sets]


def measure(B: int, L: int) -> dict[str, object]:
    sets = make_buffers(B, L)
    row: dict[str, object] = {"batch": B, "context": L, "buffer sets": len(sets)}

    def timed(name: str, calls: list[Callable[[], Tensor]]) -> None:
        try:
            row[name] = round(graph_time(calls), 1)
        except RuntimeError as error:  # a backend that refuses the shape
            row[name] = f"does not run: {str(error).splitlines()[0][:80]}"
            torch.cuda.synchronize()

    timed("SDPA flash", torch_calls(sets, SDPBackend.FLASH_ATTENTION))
    timed("SDPA cuDNN", torch_calls(sets, SDPBackend.CUDNN_ATTENTION))
    timed("dense kernel", dense_calls(sets))
    if (B, L) == (1, 32768):
        timed("HF static cache", static_cache_calls(sets))
    if L > N_FAC:
        for name, (fmt, W) in CACHES.items():
            timed(name, sparse_calls(sets, name))
            row[f"{name}, kernels"] = {
                kernel: round(us, 1)
                for kernel, us in kernel_times(sparse_calls(sets, name)).items()
                if "_kernel" in kernel
            }
            floor = B * HKV * (L * bytes_per_token(W, fmt) + N_FAC * 4 * D) / 3.0e6
            row[f"{name}, floor at 3.0 TB/s"] = round(floor, 1)
        timed("int4 n_tip 32, jump", sparse_calls(sets, "int4 n_tip 32", jump=True))
    else:
        timed("int4 n_tip 32", sparse_calls(sets, "int4 n_tip 32"))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record here (JSON)")
    options = parser.parse_args()
    torch.manual_seed(0)
    geometry = {
        "query heads": HQ,
        "kv heads": HKV,
        "head_dim": D,
        "n_fac": N_FAC,
        "kv": "bfloat16",
        "unit": "microseconds",
    }
    record = {**environment(), **geometry, "rows": []}
    for B, L in [*SHAPES, (1, N_FAC), (8, N_FAC)]:
        row = measure(B, L)
        record["rows"].append(row)  # type: ignore[attr-defined]
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
