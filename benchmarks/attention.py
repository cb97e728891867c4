"""Decode attention of one layer on a GPU: sparse (FASA) and dense kernels beside what torch offers.

    python benchmarks/attention.py --out benchmarks/results/attention-h100.json

Medians in CUDA graphs, buffers rotated past the L2. Three queries a buffer take turns, so that the state which predicts the
threshold is one step old, as in generation. ``jump``: the state is wiped before every step, so that each one searches.
FlashInfer is a baseline where it can be imported; the record has its version, or why it can't.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _flashinfer
import torch
from _timing import environment, graph_time, kernel_times
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fasa_compile.triton_kernels import ops  # noqa: F401  (registers fasa::)
from fasa_compile.triton_kernels.formats import bytes_per_token
from fasa_compile.triton_kernels.ops import KERNEL_VERSION, sparse_decode_state
from fasa_compile.triton_kernels.sparse_decode import sparse_decode

HQ, HKV, D, N_FAC = 32, 8, 128, 1024
SCALE = 1 / math.sqrt(D)
#: name -> (format, dominant dims): a quarter of the FCs in fp8 and bf16, half of them in int4.
CACHES = {"fp8 n_tip 16": ("fp8", 32), "int4 n_tip 32": ("int4", 64), "bf16 n_tip 16": ("bf16", 32)}
BYTES_PER_US = 3.0e6  # what a copy reaches on an H100
#: Dense kernels of others that this one is compared with.
BASELINES = ("SDPA flash us", "SDPA cuDNN us", *_flashinfer.KERNELS)
#: Kernels of a sparse step.
KERNELS = ("query_kernel", "tip_kernel", "fac_kernel", "merge_kernel")
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


def without_selecting(sets: list[Buffers], name: str) -> list[Callable[[], Tensor]]:
    """The same steps over a selection that is given: no keys are counted and none chosen."""
    fmt, W = CACHES[name]
    zeros, ones = torch.zeros(HKV, W, device="cuda"), torch.ones(HKV, W, device="cuda")
    norm = torch.zeros(HQ, device="cuda")

    def call(s: Buffers, q: Tensor, **how: object) -> Tensor:
        return sparse_decode(
            q, s.k, s.v, *s.caches[name], s.dims[W], zeros, ones, norm, None, s.bounds, s.slots, s.hints[name],
            scale=SCALE, n_fac=N_FAC, n_sink=4, n_recent=16, fmt=fmt, **how,
        )  # type: ignore[arg-type]  # fmt: skip

    calls = []
    for turn in range(3):
        for s in sets:
            chosen: list[tuple[Tensor, Tensor]] = []
            call(s, s.queries[turn], selection=chosen)
            calls.append(lambda s=s, q=s.queries[turn], given=chosen[0]: call(s, q, given=given))
    return calls


def flex_calls(sets: list[Buffers]) -> list[Callable[[], Tensor]]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    return [lambda s=s: compiled(s.queries[0], s.k, s.v, enable_gqa=True) for s in sets]


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


def flashinfer_calls(sets: list[Buffers], kernel: str) -> list[Callable[[], Tensor]]:
    """Checked before they are timed: they compute on these buffers what SDPA does."""
    calls = _flashinfer.KERNELS[kernel]([(s.queries[0], s.k, s.v) for s in sets])
    expected = scaled_dot_product_attention(sets[0].queries[0], sets[0].k, sets[0].v, enable_gqa=True)
    torch.testing.assert_close(calls[0]().unsqueeze(2), expected, atol=1e-2, rtol=2e-2)
    return calls


def static_cache_calls(sets: list[Buffers]) -> list[Callable[[], Tensor]]:
    """What Hugging Face runs with a static cache: repeat_kv, then SDPA with a mask."""

    def call(s: Buffers) -> Tensor:
        B, L = s.k.shape[0], s.k.shape[2]
        k, v = (x[:, :, None].expand(B, HKV, HQ // HKV, L, D).reshape(B, HQ, L, D) for x in (s.k, s.v))
        mask = (torch.arange(L, device="cuda") < L)[None, None, None]
        return scaled_dot_product_attention(s.queries[0], k, v, attn_mask=mask)

    return [lambda s=s: call(s) for s in sets]


def measure(B: int, L: int, flex: bool) -> dict[str, Any]:
    sets = make_buffers(B, L)
    row: dict[str, Any] = {
        "B": B,
        "L": L,
        "Hkv": HKV,
        "G": HQ // HKV,
        "d": D,
        "buffer sets": len(sets),
        "sparse": [],
    }

    def timed(name: str, make: Callable[..., list[Callable[[], Tensor]]], *how: object) -> None:
        try:
            row[name] = round(graph_time(make(sets, *how)), 1)
        except RuntimeError as error:  # a backend that refuses the shape
            row[name] = f"does not run: {str(error).splitlines()[0][:80]}"
            torch.cuda.synchronize()

    timed("SDPA flash us", torch_calls, SDPBackend.FLASH_ATTENTION)
    timed("SDPA cuDNN us", torch_calls, SDPBackend.CUDNN_ATTENTION)
    if flex:
        timed("FlexAttention us", flex_calls)
    if _flashinfer.available():
        for kernel in _flashinfer.KERNELS:
            timed(kernel, flashinfer_calls, kernel)
    timed("dense kernel us", dense_calls)
    row["dense floor us"] = round(B * HKV * L * 4 * D / BYTES_PER_US, 1)
    if (B, L) == (1, 32768):
        timed("HF static cache us", static_cache_calls)
    for name, (fmt, W) in CACHES.items():
        us = graph_time(sparse_calls(sets, name))
        case: dict[str, object] = {"fmt": fmt, "n_tip": W // 2, "n_fac": N_FAC, "us": round(us, 1)}
        if L > N_FAC:
            case["floor us"] = round(B * HKV * (L * bytes_per_token(W, fmt) + N_FAC * 4 * D) / BYTES_PER_US, 1)
            case["with a given selection us"] = round(graph_time(without_selecting(sets, name)), 1)
            case["every step searches us"] = round(graph_time(sparse_calls(sets, name, jump=True)), 1)
        row["sparse"].append(case)
    return row


def add_kernels(row: dict[str, Any]) -> None:
    """Each kernel alone, as the profiler sees it: in a graph they overlap. A row that searches is slow in FAC."""
    sets = make_buffers(row["B"], row["L"])
    for name, case in zip(CACHES, row["sparse"], strict=True):
        calls = sparse_calls(sets, name)
        for call in 30 * calls:  # the state which predicts the threshold learns as it does before the times above
            call()
        times = kernel_times(calls)
        case["kernels us"] = {k: round(statistics.median(us), 1) for k, us in times.items() if k in KERNELS}
        case["slowest kernels us"] = {k: round(max(us), 1) for k, us in times.items() if k in KERNELS}


def draw(record: dict[str, object], file: Path) -> None:
    """Achieved times against the floor that the bytes set, and how much faster than the best of the dense baselines; needs
    matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (axes, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    faster: dict[str, list[tuple[float, float]]] = {}
    series: dict[str, list[tuple[float, float]]] = {}
    for row in record["rows"]:  # type: ignore[attr-defined]
        for case in row["sparse"]:
            if "floor us" in case:
                name = f"sparse, {case['fmt']}, n_tip {case['n_tip']}"
                series.setdefault(name, []).append((case["floor us"], case["us"]))
                dense = [row[name] for name in BASELINES if isinstance(row.get(name), float)]
                if row["B"] in (1, 8):
                    name = f"{case['fmt']}, n_tip {case['n_tip']}, batch {row['B']}"
                    faster.setdefault(name, []).append((row["L"], min(dense) / case["us"]))
        for name in (*BASELINES, "dense kernel us"):
            if isinstance(row.get(name), float):
                series.setdefault(name.removesuffix(" us"), []).append((row["dense floor us"], row[name]))
    for name, points in series.items():
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, "o-" if name.startswith("sparse") else "s--", label=name, markersize=4, linewidth=1)
    ends = (1, 500)
    axes.plot(ends, ends, "k", linewidth=1, label="floor: bytes at 3.0 TB/s")
    axes.set(xscale="log", yscale="log", xlabel="bytes at 3.0 TB/s (us)", ylabel="measured (us)", title=record["card"])
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, which="both")
    for name, points in faster.items():
        x, y = zip(*sorted(points), strict=True)
        right.plot(x, y, "o-" if name.endswith(" 1") else "s--", label=name, markersize=4, linewidth=1)
    right.set(xscale="log", xlabel="context (tokens)", ylabel="times faster than the best of the dense baselines")
    right.set_xticks(ticks := [8192, 32768, 131072], [f"{n // 1024}k" for n in ticks])
    right.legend(fontsize=8)
    right.grid(alpha=0.3)
    figure.savefig(file, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record here (JSON)")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too, compiled for every shape")
    parser.add_argument("--draw", type=Path, help="draw the record into this file (SVG or PNG) and measure nothing")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.out.read_text()), options.draw)
        return
    torch.manual_seed(0)
    geometry = {
        "query heads": HQ,
        "kv heads": HKV,
        "head_dim": D,
        "n_fac": N_FAC,
        "kv": "bfloat16",
        "unit": "microseconds",
    }
    rows: list[dict[str, Any]] = []
    record = {**environment(), "flashinfer": _flashinfer.version(), **geometry, "rows": rows}

    def save() -> None:
        torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps(record, indent=1) + "\n")

    for B, L in [*SHAPES, (1, N_FAC), (8, N_FAC)]:
        rows.append(measure(B, L, options.flex))
        print(json.dumps(rows[-1]), flush=True)
        save()
    for row in rows[: len(SHAPES)]:  # last: what is timed after the profiler takes longer
        add_kernels(row)
        save()


if __name__ == "__main__":
    main()
