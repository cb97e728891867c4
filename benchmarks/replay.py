"""What selecting costs over a real model's consecutive steps: SmolLM2's own queries and keys, replayed on a GPU.

    python benchmarks/threshold.py --keep trace.pt     # on a CPU: the queries and keys
    python benchmarks/replay.py trace.pt --out benchmarks/results/replay-h100.json

Every layer is one sequence of a batch, so all of the model's KV heads take each step together, as rows of one launch; values are
random. Steps follow each other in one CUDA graph; where one begins anew at the first, its state is that of the last. What
selecting costs is the difference to the same steps over selections that are given, searches included.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from _timing import environment, graph_time
from torch import Tensor

from fasa_compile.triton_kernels import ops
from fasa_compile.triton_kernels.sparse_decode import sparse_decode

N_FAC, N_TIP = 256, 16


def steps(trace: dict[str, Tensor | int], device: str) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, ...]]:
    """``(query, bounds)`` of each step, and ``k, v, data, meta, dims, centre, spread`` of the only layer that there is: KV heads
    have dims of their own, sequences have not, so all layers share the dims that matter most over all of them."""
    q, k = (trace[name].to(device).bfloat16() for name in ("q", "k"))  # type: ignore[union-attr]
    first = int(trace["first"])  # type: ignore[arg-type]
    layers, Hq, number, D = q.shape
    Hkv = k.shape[1]
    early = k[:, :, :first].float()
    power = q.float().square().mean((0, 2)).view(Hkv, Hq // Hkv, D).mean(1) * early.var((0, 2))
    best = (power[:, : D // 2] + power[:, D // 2 :]).topk(N_TIP, -1).indices
    dims = torch.cat([best, best + D // 2], -1).int()
    chosen = early.gather(3, dims.long()[None, :, None].expand(layers, Hkv, first, 2 * N_TIP))
    centre, spread = chosen.mean((0, 2)), chosen.std((0, 2)).clamp(min=1e-4)
    data, meta = torch.ops.fasa.pack(k, dims, centre, spread, "int4", ops.KERNEL_VERSION)
    taken = []
    for t in range(number):
        bounds = torch.tensor([[0, first + t + 1]] * layers, dtype=torch.int32, device=device)
        taken.append((q[:, :, t : t + 1].contiguous(), bounds))
    return taken, (k, torch.randn_like(k), data, meta, dims, centre, spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, help="write the record here (JSON)")
    options = parser.parse_args()
    taken, (k, v, *cache) = steps(torch.load(options.trace), "cuda")
    B, Hkv, L, D = k.shape
    shape, dtype = ops.sparse_decode_state(B, Hkv)
    hint = torch.zeros(shape, dtype=dtype, device="cuda")
    norm = torch.zeros(taken[0][0].shape[1], device="cuda")
    how = {"scale": D**-0.5, "n_fac": N_FAC, "n_sink": 4, "n_recent": 16, "fmt": "int4"}

    def call(q: Tensor, bounds: Tensor, hint: Tensor | None = hint, **more: object) -> Tensor:
        return sparse_decode(q, k, v, *cache, norm, None, bounds, None, hint, **how, **more)  # type: ignore[arg-type]

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
