"""FASA-M on a GPU: K and V in pinned host memory, beside the same sparse decode with K and V on the card (FASA-C).

    python benchmarks/offload.py link --out benchmarks/results/offload-h100.json
    python benchmarks/offload.py layer --shape 1x32768 --shape 8x32768 --out ...
    python benchmarks/offload.py step --case 1x32768 --case 8x32768 --out ...
    python benchmarks/offload.py long --length 524288 --out ...
    python benchmarks/offload.py soak --out ...

Each part adds its rows to the record. ``link``: what pinning costs and what the link to the host gives. ``layer``: attention of one
layer in CUDA graphs, four sites in turn, queries that walk around a circle in ``n`` steps: the fewer, the more of the selection changes
in each, down to independent queries; how much was fetched is counted, not assumed. ``step``: a whole model of Llama-3.1-8B geometry
(``decode.py``). ``long``: a context whose K and V the card cannot hold. ``soak``: 2,000 steps, compared with FASA-C bit for bit.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _timing import environment, graph_time
from torch import Tensor

from fasa_compile import offloaded_cache, staged
from fasa_compile.offload import rows_of
from fasa_compile.triton_kernels import ops, pack
from fasa_compile.triton_kernels.hot_slots import ATTENDED, FETCHED, UNKEPT, HotSize, fac_parts, hot_spec
from fasa_compile.triton_kernels.sparse_decode import sparse_decode

HQ, HKV, D, N_FAC = 32, 8, 128, 1024
SITES = 4


def seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


# ---- the link ---------------------------------------------------------------------------------------------------------


def link() -> dict[str, Any]:
    """Pinning, copies of a layer to the card, and gathered rows of K and V together."""
    torch.zeros(1, device="cuda")
    made: list[Any] = []
    tokens = 1 << 18  # 2 GiB at 16 KiB a token... of one layer: 4 KiB a token
    pin = seconds(lambda: made.append(offloaded_cache((1, HKV, tokens, D), torch.bfloat16, "cuda")))
    k, v = made[0]
    rows = rows_of(k)
    assert rows is not None
    size = rows.bytes
    fill = seconds(lambda: (k.fill_(1), v.fill_(1)))
    stage = statistics.median(seconds(lambda: staged(k, v, tokens)) for _ in range(3))
    read = statistics.median(seconds(lambda: k.contiguous()) for _ in range(3))
    out: dict[str, Any] = {
        "bytes": size,
        "seconds_to_allocate_and_pin": pin,
        "gb_per_s": {
            "written by a kernel": size / fill / 1e9,
            "copied to the card (staged)": size / stage / 1e9,
            "K read by a kernel": size / 2 / read / 1e9,
        },
        "gathered": {},
    }
    both = torch.as_strided(k, (HKV * tokens, 2 * D), (2 * D, 1))
    for number in (64, 512, 2048, 4096, 8192, 32768):
        index = [torch.randint(0, HKV * tokens, (number,), device="cuda") for _ in range(4)]
        us = graph_time([lambda i=i: both.index_select(0, i) for i in index])  # type: ignore[misc]
        out["gathered"][number] = {"us": us, "gb_per_s": number * 4 * D / us / 1e3}
    return out


# ---- one layer --------------------------------------------------------------------------------------------------------


class Site:
    """One layer's K and V on the card and in host memory, and what the steps keep."""

    def __init__(self, B: int, L: int, fmt: str, n_tip: int) -> None:
        shape = (B, HKV, L, D)
        self.k, self.v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.host_k, self.host_v = offloaded_cache(shape, torch.bfloat16, "cuda")
        self.host_k.copy_(self.k), self.host_v.copy_(self.v)
        W = 2 * n_tip
        self.dims = torch.stack([torch.randperm(D)[:W] for _ in range(HKV)]).int().cuda()
        self.centre, self.spread = torch.zeros(HKV, W, device="cuda"), torch.ones(HKV, W, device="cuda")
        self.norm = torch.zeros(HQ, device="cuda")
        self.data, self.meta = pack.pack(self.k, self.dims, self.centre, self.spread, fmt)
        self.bounds = torch.tensor([[0, L]], device="cuda", dtype=torch.int32)
        self.slots = torch.tensor([L - 1], device="cuda")
        self.planes = [torch.randn(B, HQ, 1, D, device="cuda") for _ in range(2)]
        self.fmt = fmt

    def queries(self, n: int) -> list[Tensor]:
        """``n`` queries around a circle; 0: six independent ones."""
        if n == 0:
            return [torch.randn_like(self.planes[0]).bfloat16() for _ in range(6)]
        angles = [2 * math.pi * i / n for i in range(n)]
        return [(math.cos(a) * self.planes[0] + math.sin(a) * self.planes[1]).bfloat16() for a in angles]

    def state(self, hot_tokens: int | None) -> list[Tensor]:
        """Threshold and, unless ``hot_tokens`` is None or 0, a hot buffer."""
        B = self.k.shape[0]
        shape, dtype = ops.sparse_decode_state(B, HKV)
        made = [torch.zeros(shape, dtype=dtype, device="cuda")]
        if hot_tokens:
            parts = fac_parts(B * HKV, N_FAC, torch.cuda.get_device_properties(0).multi_processor_count)
            for shape, dtype in hot_spec(B, HKV, HotSize(parts, -(-hot_tokens // parts)), D, D, torch.bfloat16):
                made.append(torch.zeros(shape, dtype=dtype, device="cuda"))
        return made

    def step(self, q: Tensor, hosted: bool, state: list[Tensor]) -> Callable[[], Tensor]:
        k, v = (self.host_k, self.host_v) if hosted else (self.k, self.v)
        return lambda: sparse_decode(
            q, k, v, self.data, self.meta, self.dims, self.centre, self.spread, self.norm, None, self.bounds, self.slots,
            *state, scale=D**-0.5, n_fac=N_FAC, n_sink=4, n_recent=16, fmt=self.fmt,
        )  # fmt: skip


def layer(shape: str, hot: list[int], turns: list[int], fmt: str = "int4", n_tip: int = 32) -> list[dict[str, Any]]:
    """Microseconds a layer, with K and V on the card, in host memory without a hot buffer (0), and with hot buffers."""
    B, L = map(int, shape.split("x"))
    sites = [Site(B, L, fmt, n_tip) for _ in range(SITES)]
    rows = []
    for n in turns:
        paths = [site.queries(n) for site in sites]

        def steps(
            hosted: bool, states: list[list[Tensor]], paths: list[list[Tensor]] = paths
        ) -> list[Callable[[], Tensor]]:
            return [
                site.step(path[j], hosted, state)
                for j in range(len(paths[0]))
                for site, path, state in zip(sites, paths, states, strict=True)
            ]

        states = [site.state(None) for site in sites]
        row: dict[str, Any] = {"shape": shape, "turns": n, "on the card": graph_time(steps(False, states))}
        for tokens in hot:
            states = [site.state(tokens) for site in sites]
            us = graph_time(steps(True, states))
            found: dict[str, float] = {"us": us}
            if tokens:
                before = sum(x[3].sum((0, 1, 2)).double() for x in states)
                calls = steps(True, states)
                for call in calls:
                    call()
                delta = (sum(x[3].sum((0, 1, 2)).double() for x in states) - before).tolist()  # type: ignore[operator]
                found |= {
                    "fetched": delta[FETCHED] / delta[ATTENDED],
                    "without a slot": delta[UNKEPT] / delta[ATTENDED],
                }
                bytes_a_call = delta[FETCHED] / len(calls) * 4 * D
                found |= {"fetched_bytes": bytes_a_call, "bound_us_at_55_gb_s": bytes_a_call / 55e3}
            row[f"hot {tokens}"] = found
        print(row, flush=True)
        rows.append(row)
    return rows


# ---- the record -------------------------------------------------------------------------------------------------------


def add(out: Path | None, part: str, rows: Any) -> None:
    """Puts a part into the record, which keeps the others'."""
    record = (
        json.loads(out.read_text())
        if out is not None and out.exists()
        else {"benchmark": "FASA-M, Llama-3.1-8B geometry"}
    )
    record[part] = {**environment(), "rows": rows}
    print(part, json.dumps(rows), flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["link", "layer"])
    parser.add_argument("--shape", action="append", help="BATCHxLENGTH, of layer")
    parser.add_argument("--hot", type=int, action="append", help="tokens of the hot buffer, of layer; 0: none")
    parser.add_argument("--turns", type=int, action="append", help="steps around the circle, of layer")
    parser.add_argument("--out", type=Path, help="write the record here (JSON)")
    options = parser.parse_args()
    if options.part == "link":
        add(options.out, "link", link())
    elif options.part == "layer":
        rows: list[Any] = []
        for shape in options.shape or ["1x32768"]:
            rows += layer(shape, options.hot or [0, 1024, 1536, 2048], options.turns or [48, 20, 12, 0])
            torch.cuda.empty_cache()
        add(options.out, "layer", rows)


if __name__ == "__main__":
    main()
