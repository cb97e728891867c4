"""Draws the pictures of the README from what is recorded in ``benchmarks/results``; needs no GPU, no model and no plotting library.

python benchmarks/pictures.py      writes docs/speed-attention.svg, docs/speed-step.svg and docs/quality-perplexity.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fasa_compile.charts import lines

ROOT = Path(__file__).resolve().parents[1]
FORMAT, N_TIP = "int4", 32  # the default: half of the frequencies of a head of 128 dims
Lines = dict[str, list[tuple[float, float]]]


def attention(record: dict[str, Any]) -> str:
    """One layer's attention: sparse against the best dense kernel in torch, by context and batch."""
    found: Lines = {}
    for row in record["rows"]:
        sparse = [c["us"] for c in row["sparse"] if (c["fmt"], c["n_tip"]) == (FORMAT, N_TIP)]
        dense = [row[f"SDPA {name} us"] for name in ("flash", "cuDNN") if isinstance(row[f"SDPA {name} us"], float)]
        if sparse and dense:
            found.setdefault(f"batch {row['B']}", []).append((row["L"], min(dense) / sparse[0]))
    return lines(
        f"Attention of one decode step, n_fac {record['n_fac']} ({record['card']})",
        found,
        x_label="tokens in the cache",
        y_label="times faster than flash / cuDNN",
    )


STEPS = {"hf": "Hugging Face", "flash": "dense, flash", "fasa-int4-32": "sparse"}


def step(record: dict[str, Any]) -> str:
    """A whole model's decode step by context, for each way and batch that was measured."""
    found: Lines = {}
    for case, ways in record["cases"].items():
        batch, length = map(int, case.split("x"))
        for name, label in STEPS.items():
            if "ms_per_step" in ways.get(name, {}):
                found.setdefault(f"{label}, batch {batch}", []).append((length, ways[name]["ms_per_step"]))
    return lines(
        f"Decode step of Llama-3.1-8B's shapes, n_fac {record['n_fac']} ({record['card']})",
        {name: found[name] for name in sorted(found)},
        x_label="tokens in the cache",
        y_label="ms per step",
    )


#: Method of the comparison -> its name in the picture. docs/quality.md has them all.
METHODS = {
    "ours": "ours",
    "SparQ": "SparQ",
    "oracle top-k": "oracle: true top",
    "paper (CA), same bytes": "paper's ranking",
    "Quest": "Quest",
}


def quality(record: dict[str, Any]) -> str:
    """Perplexity against that of dense, by budget: ours and other ways of selecting."""
    found: Lines = {}
    for budget, entry in record["budgets"].items():
        for name, label in METHODS.items():
            found.setdefault(label, []).append((float(budget), entry["methods"][name]["perplexity_ratio"]))
    return lines(
        f"{record['model']}, {record['setting']['length']} tokens of context",
        found,
        x_label="tokens attended to (n_fac)",
        y_label="perplexity, times that of dense",
        zero=False,
    )


PICTURES = {
    "speed-attention": (attention, "attention-h200"),
    "speed-step": (step, "decode-h200"),
    "quality-perplexity": (quality, "compare-smollm2-135m-instruct-q4_1"),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    args = parser.parse_args(argv)
    for name, (draw, record) in PICTURES.items():
        found = json.loads((args.results / f"{record}.json").read_text(encoding="utf-8"))
        (args.out / f"{name}.svg").write_text(draw(found), encoding="utf-8")


if __name__ == "__main__":
    main()
