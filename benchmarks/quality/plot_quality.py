"""Draws what is recorded of quality, as SVG: needs matplotlib (the extra ``plot``) and no model.

python benchmarks/quality/plot_quality.py      reads benchmarks/results/, writes docs/quality-*.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fasa_compile import FCProfile, load_profile

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m-instruct-q4_1"


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}-{MODEL}.json").read_text(encoding="utf-8"))


def overlap_of_sets(axes: Any, stability: Any) -> None:
    """Left: sets by different texts. Right: sets by the first tokens of a text with those by all of it."""
    left, right = axes
    kinds = list(stability["by_text"])
    table = [[stability["by_text"][a][b] for b in kinds] for a in kinds]
    left.imshow(table, vmin=0.5, vmax=1.0, cmap="viridis")
    left.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right")
    left.set_yticks(range(len(kinds)), kinds)
    for i, row in enumerate(table):
        for j, value in enumerate(row):
            left.text(j, i, f"{value:.2f}", ha="center", va="center", color="white" if value < 0.8 else "black")
    left.set_title("FCs that two texts' sets share")
    for kind, by_length in stability["by_length"].items():
        right.plot([int(n) for n in by_length], list(by_length.values()), "o-", markersize=4, linewidth=1, label=kind)
    right.set_xscale("log", base=2)
    right.set_xlabel("tokens of the text")
    right.set_title("shared with the set of the whole text")
    right.legend(fontsize=8)


def frequencies(axes: Any, profile: FCProfile) -> None:
    fcs = torch.cat([layer.fcs for layer in profile.layers])  # [KV heads of all layers, n_tip]
    share = torch.bincount(fcs.flatten(), minlength=len(profile.layers[0].rope.pairs)) / len(fcs)
    axes.bar(range(len(share)), share.tolist(), color="tab:blue")
    axes.axhline(fcs.shape[1] / len(share), color="k", linewidth=0.8, linestyle=":")
    axes.set_xlabel("frequency chunk, fastest rotation first")
    axes.set_ylabel("share of KV heads that chose it")


def halves(axes: Any, profile: FCProfile) -> None:
    axes.plot([layer.stats["stability"] for layer in profile.layers], "o-", markersize=3, linewidth=1)
    axes.set_xlabel("layer")
    axes.set_ylabel("FCs that both halves of the text choose")
    axes.set_ylim(0.5, 1.01)


def mass_by_layer(axes: Any, reductions: Any) -> None:
    for name, lost in reductions["attention_mass_lost"].items():
        axes.plot([1 - x for x in lost.values()], label=name, linewidth=1.2)
    axes.set_xlabel("layer")
    axes.set_ylabel("attention mass of the selected tokens")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8)


def quality_by_budget(axes: Any, compare: Any, reductions: Any) -> None:
    static = {
        int(name.rsplit(" ", 1)[1]): s
        for name, s in compare["variants"].items()
        if name.startswith("flat, static, budget")
    }
    static[128] = compare["methods"]["ours: flat budgets, static"]
    static = dict(sorted(static.items()))
    bars = [[s["kl"] - s["kl_95"][0] for s in static.values()], [s["kl_95"][1] - s["kl"] for s in static.values()]]
    axes.errorbar(
        list(static),
        [s["kl"] for s in static.values()],
        bars,
        fmt="o-",
        capsize=3,
        linewidth=1,
        label="static, one budget",
    )
    for name, marker in (("one budget, affine", "s"), ("oracle, one set per KV head, forced tokens", "^")):
        axes.plot([128], [reductions["methods"][name]["kl"]], marker, label=name)
    for name, label in (
        ("oracle top-k", "oracle: true top 128"),
        ("SparQ", "SparQ"),
        ("Double Sparsity", "Double Sparsity"),
    ):
        axes.plot([128], [compare["methods"][name]["kl"]], "x", label=label)
    axes.set_xlabel("tokens attended to, of 4096")
    axes.set_ylabel("KL to dense, nats per token")
    axes.set_ylim(0)
    axes.legend(fontsize=8)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    args = parser.parse_args(argv)
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fasa"  # the same picture from the same record
    from matplotlib import pyplot

    reductions, compare = (read(args.results, n) for n in ("reductions", "compare"))
    profile = load_profile(MODEL)
    pictures: list[tuple[str, int, Callable[[Any], None]]] = [
        ("halves", 1, lambda axes: halves(axes, profile)),
        ("frequencies", 1, lambda axes: frequencies(axes, profile)),
        ("mass", 1, lambda axes: mass_by_layer(axes, reductions)),
        ("budget", 1, lambda axes: quality_by_budget(axes, compare, reductions)),
    ]
    if (args.results / f"stability-{MODEL}.json").exists():
        pictures.append(("overlap", 2, lambda axes: overlap_of_sets(axes, read(args.results, "stability"))))
    for name, columns, draw in pictures:
        figure, axes = pyplot.subplots(1, columns, figsize=(5 * columns + 1, 4.2))
        draw(axes)
        figure.tight_layout()
        figure.savefig(args.out / f"quality-{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    main()
