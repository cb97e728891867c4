"""Attention of a verification step of S query tokens over one layer's cache: sparse at once, sparse one by one, and as Hugging Face runs it.

python benchmarks/several_tokens.py --out benchmarks/results/several-tokens-h100.json      on a GPU

Microseconds per step, inside a CUDA graph over buffers that together exceed the L2 (``_timing``). int4, half of the frequencies,
n_fac 1024, 32 query and 8 KV heads of 128 dims; every token has a mask of its own, whose bounds are read outside, once for all layers, as
in a rewritten model. The dense column repeats KV heads and passes the mask, as transformers' static cache has it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from _timing import environment, graph_time
from attention import FASA, HKV, HQ, KERNEL_VERSION, N_FAC, SCALE, Buffers, D, make_buffers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

CASES = ((1, 8192), (1, 32768), (1, 131072), (8, 32768))
TOKENS = (1, 2, 4, 8, 16)
CACHE = "int4 n_tip 32"


def inputs(B: int, L: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[B, Hq, S, D]`` that resemble each other, the mask ``[B, 1, S, L]`` of the cache's last S rows, and their slots."""
    base = 2 * torch.randn(B, HQ, 1, D, device="cuda")
    q = (0.95 * base + 0.6 * torch.randn(B, HQ, S, D, device="cuda")).to(torch.bfloat16)
    slots = torch.arange(L - S, L, device="cuda")
    mask = (torch.arange(L, device="cuda") <= slots[:, None]).expand(B, 1, S, L).contiguous()
    return q, mask, slots


def sparse(s: Buffers, width: int, q: Tensor, mask: Tensor, bounds: Tensor, slots: Tensor) -> Tensor:
    zeros, ones = torch.zeros(HKV, width, device="cuda"), torch.ones(HKV, width, device="cuda")
    return FASA.sparse_decode(
        q, s.k, s.v, *s.caches[CACHE], s.dims[width], zeros, ones, None, mask, bounds, slots, s.hints[CACHE], scale=SCALE,
        n_fac=N_FAC, n_sink=4, n_recent=16, softcap=0.0, sinks=None, fmt="int4", reduction="static", version=KERNEL_VERSION,
    )  # fmt: skip


def dense(s: Buffers, q: Tensor, mask: Tensor) -> Tensor:
    B, _, L, _ = s.k.shape
    k, v = (x[:, :, None].expand(B, HKV, HQ // HKV, L, D).reshape(B, HQ, L, D) for x in (s.k, s.v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def measure(B: int, L: int, S: int, sets: list[Buffers]) -> dict[str, float]:
    width = 64
    q, mask, slots = inputs(B, L, S)
    bounds = FASA.mask_bounds(mask, L, KERNEL_VERSION)
    each = [
        (q[:, :, i : i + 1].contiguous(), mask[:, :, i : i + 1].contiguous(), bounds.view(B, S, 2)[:, i].contiguous(), slots[i : i + 1])
        for i in range(S)
    ]  # fmt: skip

    def one_by_one(s: Buffers) -> Tensor:
        return torch.cat([sparse(s, width, *one) for one in each], 2)

    ways: dict[str, Callable[[Buffers], Tensor]] = {
        "sparse at once": lambda s: sparse(s, width, q, mask, bounds, slots),
        "sparse one by one": one_by_one,
        "Hugging Face static cache": lambda s: dense(s, q, mask),
    }
    return {name: round(graph_time([lambda s=s, way=way: way(s) for s in sets]), 1) for name, way in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record here (JSON)")
    options = parser.parse_args()
    torch.manual_seed(0)
    record = {**environment(), "n_fac": N_FAC, "unit": "microseconds", "rows": []}
    for B, L in CASES:
        sets = make_buffers(B, L)
        for S in TOKENS:
            row = {"B": B, "L": L, "tokens": S, **measure(B, L, S, sets)}
            record["rows"].append(row)  # type: ignore[attr-defined]
            print(json.dumps(row), flush=True)
            if options.out:
                options.out.write_text(json.dumps(record, indent=1) + "\n")
        del sets
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
