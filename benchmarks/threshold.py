"""How often last step's threshold tells this step's: the kernels' prediction, replayed on a real model's queries and keys.

    python benchmarks/threshold.py --out benchmarks/results/threshold-smollm2.json

SmolLM2-135M reads a text once on the CPU; its rotated queries and keys at consecutive positions are then the steps of a
generation. What ``fac_kernel`` does with its bins is repeated here step by step, in plain torch. A *search* is a step of one
row (layer and KV head) where the bins did not tell. The first step of a row always searches and is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import smollm2
from fasa_compile.triton_kernels import reference

LOG2E = 1.4426950408889634
BINS, BELOW, LAST = 256, 32, 252
FIRST, STEPS, N_FAC, N_TIP = 2048, 96, 256, 16


def capture() -> list[tuple[Tensor, Tensor]]:
    """Rotated ``q [1, Hq, T, D]`` and ``k [1, Hkv, T, D]`` of every layer, T = FIRST + STEPS."""
    from transformers.models.llama import modeling_llama

    model, tokenizer = smollm2.load(smollm2.fetch())
    ids = smollm2.windows(tokenizer, FIRST + STEPS, 1)
    layers: list[tuple[Tensor, Tensor]] = []
    rotate = modeling_llama.apply_rotary_pos_emb

    def record(*args: Tensor, **kwargs: Tensor) -> tuple[Tensor, Tensor]:
        layers.append(rotate(*args, **kwargs))
        return layers[-1]

    modeling_llama.apply_rotary_pos_emb = record
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        modeling_llama.apply_rotary_pos_emb = rotate
    return layers


def profile_of_layer(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dims [Hkv, 2 N_TIP]``, ``centre`` and ``spread`` of as many, ``norm [Hq]``, from the first FIRST positions."""
    Hq, T, D = q.shape[1:]
    Hkv = k.shape[1]
    G = Hq // Hkv
    # Score variance ranks the FCs (pairs i, i + D/2), as calibration does.
    early = slice(0, FIRST)
    power = q[0, :, early].square().mean(1).view(Hkv, G, D).mean(1) * k[0, :, early].var(1)
    best = (power[:, : D // 2] + power[:, D // 2 :]).topk(N_TIP, -1).indices
    dims = torch.cat([best, best + D // 2], -1).int()
    chosen = k[0].gather(2, dims.long()[:, None].expand(Hkv, T, 2 * N_TIP))[:, early]
    centre = chosen.mean(1)
    rms = q[0, :, early].square().mean(1).view(Hkv, G, D).mean(1).gather(1, dims.long()).sqrt()
    spread = (chosen.std(1) / rms.clamp(min=1e-6)).sqrt().clamp(min=1e-4)
    # A head's normaliser: the mean log-sum-exp of its own scores over some positions.
    norm = torch.zeros(Hq)
    for head in range(Hq):
        alone = [FIRST // 2 + 64 * i for i in range(8)]
        index, h = dims[head // G].long(), head // G
        x = (k[0, h][:, index] - centre[h]).float()
        s = torch.stack([(q[0, head, p, index] * x[: p + 1]).sum(-1).mul(D**-0.5).logsumexp(0) for p in alone])
        norm[head] = s.mean()
    return dims, centre, spread, norm


def keys_of_layer(q: Tensor, k: Tensor, profile: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """TIP's keys of the last STEPS positions, base-2 logs: ``[STEPS, Hkv, T]``, -inf for tokens yet to come."""
    dims, centre, spread, norm = profile
    packed = reference.pack(k, dims, centre, spread, "int4")
    how = {"scale": q.shape[3] ** -0.5, "n_sink": 4, "n_recent": 16, "fmt": "int4"}

    def keys(position: int) -> Tensor:
        bounds = torch.tensor([[0, position + 1]], dtype=torch.int32)
        at = slice(position, position + 1)
        return reference.tip_keys(q[:, :, at], k, *packed, dims, spread, norm, None, bounds, **how)[0]  # type: ignore[arg-type]

    return torch.stack([keys(FIRST + i) for i in range(STEPS)]) * LOG2E


def sizes_of_layer(q: Tensor, profile: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """``query_kernel``'s sizes of the last STEPS positions: ``[STEPS, Hkv]``."""
    dims, _, spread, _ = profile
    Hkv, W = dims.shape
    grouped = q[0, :, -STEPS:].unflatten(0, (Hkv, -1))  # [Hkv, G, STEPS, D]
    y = grouped.gather(3, dims.long()[:, None, None].expand(*grouped.shape[:3], W)) * spread[:, None, None]
    return 0.5 * y.square().sum((1, 3)).clamp(min=1e-36).log2().T


def learned_slope(slope: float, growth: float, error: float) -> float:
    """``attend.learned_slope``."""
    return slope + 0.25 * growth * error / (growth * growth + 0.01)


def factor(cell: int, moved: int) -> float:
    """``attend.width_factor``."""
    if cell * 12 > N_FAC:
        return 0.25 if cell * 4 > N_FAC else 0.7
    if moved > 8 and cell * 24 <= N_FAC:
        return 1.5
    if cell * 80 < N_FAC:
        return 2.0 if cell * 160 < N_FAC else 1.0
    return 0.9 if moved < 4 else 1.0


def replay(
    keys: Tensor, sizes: Tensor | None = None, level: float = 0.0, width: float = 0.0625
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps of one row ``[STEPS, T]`` whose queries have ``sizes [STEPS]`` (None: all alike): which searched; of the others, kept tokens over
    n_fac; threshold moves (nats); and, of all, counted tokens over n_fac. ``level`` and ``width``: the state that the first step finds."""
    searches, kept, thresholds, counted = [], [], [], []
    size, slope = 0.0, 0.0
    for i, key in enumerate(keys):
        own_size = 0.0 if sizes is None else float(sizes[i])
        growth = own_size - size if abs(own_size - size) < 2 else 0.0
        origin = level + slope * growth - BELOW * width
        number = ((key - origin) / width).clamp(max=LAST)
        counts = torch.bincount(number[number >= 0].int(), minlength=BINS)
        reach = counts.flip(0).cumsum(0).flip(0)
        enough = (reach >= N_FAC).nonzero()
        place = int(enough.max()) if len(enough) else -1
        found = place >= 0 and int(reach[place]) <= N_FAC + N_FAC * 3 // 25
        threshold = float(key.sort(descending=True).values[N_FAC - 1])
        thresholds.append(threshold / LOG2E)
        if i:
            counted.append(int(reach[0]) / N_FAC)
            if found:
                kept.append(int(reach[place]) / N_FAC)
            else:
                searches.append(i)
        cell = int(counts[place]) if place >= 0 else 0
        inside = 0 <= place < LAST
        level = origin + (place + 0.5) * width if inside else threshold if not found else origin + BELOW * width
        if not found:
            slope *= 0.5
        elif inside:
            slope = learned_slope(slope, growth, (place - BELOW + 0.5) * width)
        size = own_size
        width *= factor(cell, abs(place - BELOW)) if inside else 1.0 if found else 2.0
        width = min(max(width, 0.0625 if not (inside or found) else 2**-12), 16.0)
    moves = [abs(a - b) for a, b in itertools.pairwise(thresholds)]
    return searches, kept, moves, counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record here (JSON)")
    parser.add_argument("--keep", type=Path, help="keep the queries and keys here, for benchmarks/replay.py")
    options = parser.parse_args()
    layers = [(q.float(), k.float()) for q, k in capture()]
    profiles = [profile_of_layer(q, k) for q, k in layers]
    if options.keep:
        kept: dict[str, Any] = {"q": torch.cat([q[0, :, -STEPS:] for q, _ in layers]).half(), "first": FIRST}
        kept["k"] = torch.cat([k[0] for _, k in layers]).half()
        for name, parts in zip(("dims", "centre", "spread", "norm"), zip(*profiles, strict=True), strict=True):
            kept[name] = torch.cat(parts)
        torch.save(kept, options.keep)
    searches: list[int] = []
    steps, kept, moves, counted = 0, [], [], []
    searches_unsized, counted_unsized = 0, []
    worst: dict[str, float] = {}
    for number, (q, k) in enumerate(layers):
        keys, sizes = keys_of_layer(q, k, profiles[number]), sizes_of_layer(q, profiles[number])
        for h in range(keys.shape[1]):
            s, over, moved, ranked = replay(keys[:, h], sizes[:, h])
            unsized = replay(keys[:, h])
            searches_unsized += len(unsized[0])
            counted_unsized += unsized[3]
            searches += s
            steps += len(keys) - 1
            kept += over
            moves += moved
            counted += ranked
            worst[f"layer {number}, kv head {h}"] = len(s) / (len(keys) - 1)
    hard = sorted(worst, key=lambda name: -worst[name])[:3]
    record = {
        "model": "SmolLM2-135M-Instruct", "n_fac": N_FAC, "n_tip": f"{N_TIP} of 32, int4", "context": FIRST, "row steps": steps,
        "searches per row step": round(len(searches) / steps, 5),
        "steps of all rows together": STEPS - 1, "of these with a row that searches": len(set(searches)),
        "kept over n_fac, mean": round(sum(kept) / len(kept), 4), "kept over n_fac, largest": round(max(kept), 4),
        "counted over n_fac, mean": round(sum(counted) / len(counted), 3),
        "were no level to follow the query's size: searches per row step": round(searches_unsized / steps, 5),
        "were no level to follow the query's size: counted over n_fac, mean": round(sum(counted_unsized) / len(counted_unsized), 3),
        "threshold move, mean nats": round(sum(moves) / len(moves), 4),
        "threshold move, 99th percentile": round(sorted(moves)[math.floor(0.99 * len(moves))], 3),
        "rows that search most": {name: round(worst[name], 3) for name in hard},
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
