"""How much the chosen FCs depend on the calibration text and its length: JSON, from which ``plot_quality.py`` draws.

    python benchmarks/quality/stability.py --wikitext FILE       SmolLM2-135M; 4k tokens of each kind of text, and parts of them

One forward a text (one_pass.py). The sets are those of ``LayerStats.rank`` with half of the FCs; an overlap of two sets is the
share of the FCs that both have, mean over layers and KV heads.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compare
import corpora
import fasa_compile
import one_pass
from fasa_compile.calibration_stats import LayerStats
from fasa_compile.profiles import FCProfile


def sets(h: one_pass.Harness, profile: FCProfile, ids: Tensor, lengths: list[int]) -> dict[int, dict[str, Tensor]]:
    """Length -> layer -> int64 ``[Hkv, n_fc]``, FCs best first, by the first ``length`` tokens of ``ids [n]``."""
    found: dict[int, dict[str, Tensor]] = {n: {} for n in lengths}
    known = {layer.layer: layer for layer in profile.layers if not layer.dense}

    def watch(name: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        for n in lengths if name in known else ():
            stats = LayerStats(q.shape[1], k.shape[1], q.shape[3], known[name].rope, q.device, name)
            stats.update(q[:, :, :n], k[:, :, :n], scale)
            found[n][name] = stats.rank().cpu()

    one_pass.prefill(h, ids, watch)
    return found


def overlap(a: dict[str, Tensor], b: dict[str, Tensor], n_tip: int) -> float:
    same = [(a[name][:, :n_tip, None] == b[name][:, None, :n_tip]).any(2).double().mean() for name in a]
    return float(torch.stack(same).mean())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, or the path of a GGUF file")
    parser.add_argument("--profile", default="smollm2-135m-instruct-q4_1", help="its layers, and n_tip")
    parser.add_argument("--wikitext", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    name, model, tokenizer = compare.load(args)
    profile = fasa_compile.load_profile(args.profile)
    longest, n_tip = max(args.lengths), next(x.n_tip for x in profile.layers if not x.dense)
    texts = corpora.stretches(tokenizer, args.wikitext, longest, 1, 0)
    with one_pass.harness(model) as h:
        found = {kind: sets(h, profile, text[0].to(args.device), args.lengths) for kind, text in texts.items()}
    kinds = list(found)
    n_fc = next(iter(found[kinds[0]][longest].values())).shape[1]
    used = torch.zeros(n_fc, dtype=torch.float64)
    for ranked in found[kinds[0]][longest].values():
        used += torch.bincount(ranked[:, :n_tip].flatten(), minlength=n_fc) / ranked.shape[0]
    record: dict[str, Any] = {
        "benchmark": "stability",
        "model": name,
        "setting": {"n_tip": n_tip, "n_fc": n_fc, "lengths": args.lengths, "device": str(args.device)},
        "versions": compare.versions(),
        "by_text": {a: {b: overlap(found[a][longest], found[b][longest], n_tip) for b in kinds} for a in kinds},
        "by_length": {
            kind: {str(n): overlap(found[kind][n], found[kind][longest], n_tip) for n in args.lengths} for kind in kinds
        },
        "share_of_heads_by_fc": (used / len(found[kinds[0]][longest])).tolist(),
    }
    out = args.out or compare.ROOT / "benchmarks" / "results" / f"stability-{name}.json"
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(
        json.dumps(record["by_text"], indent=1), json.dumps(record["by_length"], indent=1), f"record: {out}", sep="\n"
    )


if __name__ == "__main__":
    main()
