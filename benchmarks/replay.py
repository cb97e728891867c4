"""What selecting costs over a real model's consecutive steps: SmolLM2's own queries and keys, replayed on a GPU.

    python benchmarks/threshold.py --keep trace.pt     # on a CPU: the queries and keys
    python benchmarks/replay.py trace.pt --out benchmarks/results/replay-h100.json

The KV heads of all layers are those of one layer, each with its own frequencies, so that all take each step together, as rows of one launch; values are
random. Steps follow each other in one CUDA graph; where one begins anew at the first, its state is that of the last. What
selecting costs is the difference to the same steps over selections that are given, searches included.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from _timing import environment, graph_time
from torch import Tensor

from fasa_compile.triton_kernels import ops
from fasa_compile.triton_kernels.sparse_decode import sparse_decode

N_FAC = 256


def steps(trace: dict[str, Any], device: str) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, ...]]:
    """``(query, bounds)`` of each step, and ``k, v, data, meta, dims, centre, spread, norm`` of the only layer that there is."""
    q, k = (trace[name].to(device)[None].bfloat16() for name in ("q", "k"))
    dims, centre, spread, norm = (trace[name].to(device) for name in ("dims", "centre", "spread", "norm"))
    data, meta = torch.ops.fasa.pack(k, dims, centre, spread, "int4", ops.KERNEL_VERSION)
    taken = []
    for t in range(q.shape[2]):
        bounds = torch.tensor([[0, trace["first"] + t + 1]], dtype=torch.int32, device=device)
        taken.append((q[:, :, t : t + 1].contiguous(), bounds))
    return taken, (k, torch.randn_like(k), data, meta, dims, centre, spread, norm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, help="write the record here (JSON)")
    options = parser.parse_args()
    taken, (k, v, *cache) = steps(torch.load(options.trace), "cuda")
    B, Hkv, L, D = k.shape
    shape, dtype = ops.sparse_decode_state(B, Hkv)
    hint = torch.zeros(shape, dtype=dtype, device="cuda")
    how = {"scale": D**-0.5, "n_fac": N_FAC, "n_sink": 4, "n_recent": 16, "fmt": "int4"}

    def call(q: Tensor, bounds: Tensor, hint: Tensor | None = hint, **more: object) -> Tensor:
        return sparse_decode(q, k, v, *cache, None, bounds, None, hint, **how, **more)  # type: ignore[arg-type]

    chosen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in taken]
    for (q, bounds), selection in zip(taken, chosen, strict=True):
        call(q, bounds, selection=selection)
    kept = torch.stack([selection[0][1].sum(1).float().mean() for selection in chosen]).mean().item()
    whole = graph_time([lambda q=q, b=b: call(q, b) for q, b in taken])
    given = graph_time([
        lambda q=q, b=b, s=s: call(q, b, given=s[0]) for (q, b), s in zip(taken, chosen, strict=True)
    ])  # fmt: skip
    wiped = graph_time([lambda q=q, b=b: call(q, b, None) for q, b in taken])
    record = {
        **environment(), "model": "SmolLM2-135M-Instruct", "rows": B * Hkv, "context": L, "n_fac": N_FAC, "steps": len(taken),
        "step us": round(whole, 2), "with a given selection us": round(given, 2), "selecting us": round(whole - given, 2),
        "every step searches us": round(wiped, 2), "kept over n_fac, mean": round(kept / N_FAC, 4),
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
