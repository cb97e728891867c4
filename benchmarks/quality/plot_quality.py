"""Draws what is recorded of quality, as SVG: needs matplotlib (the extra ``plot``) and no model.

python benchmarks/quality/plot_quality.py      reads benchmarks/results/, writes docs/quality-*.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fasa_compile import FCProfile, load_profile

ROOT = Path(__file__).resolve().parents[2]
MODELS = {"SmolLM2-135M": "smollm2-135m-instruct-q4_1", "Gemma-3-270m": "gemma-3-270m-q4_k_m"}
HIDDEN = ("dense", "ours, one budget", "ours, FC cache", "ours, a quarter")  # not in the picture of methods


def read(folder: Path, name: str) -> list[tuple[str, Any]]:
    """The records of that name, by model."""
    found = {model: folder / f"{name}-{file}.json" for model, file in MODELS.items()}
    return [(model, json.loads(path.read_text(encoding="utf-8"))) for model, path in found.items()]


def methods(axes: Any, record: Any, title: str) -> None:
    """KL to dense of every method, at each budget, with its interval."""
    budgets = record["budgets"]
    first = next(iter(budgets.values()))["methods"]
    names = [n for n in first if not n.startswith(HIDDEN) or n == "ours, one budget for every layer"]
    names.sort(key=lambda n: -first[n]["kl"])
    for (n_fac, entry), marker, shift in zip(budgets.items(), "os", (0.12, -0.12), strict=False):
        scores = [entry["methods"][n] for n in names]
        bars = [[s["kl"] - s["kl_95"][0] for s in scores], [s["kl_95"][1] - s["kl"] for s in scores]]
        at = [i + shift for i in range(len(names))]
        axes.errorbar([s["kl"] for s in scores], at, xerr=bars, fmt=marker, markersize=4, capsize=2, label=n_fac)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text().startswith("ours") else "normal")
    axes.set_xscale("log")
    axes.set_xlabel("KL to dense, nats per token")
    axes.set_title(title)
    axes.legend(title="tokens of 4,096", fontsize=8)


def overlap_by_text(axes: Any, stability: Any, title: str) -> None:
    kinds = list(stability["by_text"])
    table = [[stability["by_text"][a][b] for b in kinds] for a in kinds]
    axes.imshow(table, vmin=0.5, vmax=1.0, cmap="viridis")
    axes.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right")
    axes.set_yticks(range(len(kinds)), kinds)
    for i, row in enumerate(table):
        for j, value in enumerate(row):
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", color="white" if value < 0.8 else "black")
    axes.set_title(f"{title}: FCs that two texts' sets share")


def overlap_by_length(axes: Any, stability: Any, title: str) -> None:
    for kind, by_length in stability["by_length"].items():
        axes.plot([int(n) for n in by_length], list(by_length.values()), "o-", markersize=4, linewidth=1, label=kind)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0.5, 1.02)
    axes.set_xlabel("tokens of the text")
    axes.set_title(f"{title}: shared with the whole text's set")
    axes.legend(fontsize=8)


def frequencies(axes: Any, stability: Any, title: str) -> None:
    share, setting = stability["share_of_heads_by_fc"], stability["setting"]
    axes.bar(range(len(share)), share, width=1.0, color="tab:blue")
    axes.axhline(setting["n_tip"] / setting["n_fc"], color="k", linewidth=0.8, linestyle=":")
    axes.set_xlabel("frequency chunk, fastest rotation first")
    axes.set_ylabel("share of KV heads that choose it")
    axes.set_title(title)


def halves(axes: Any, profile: FCProfile, title: str) -> None:
    sparse = [(i, layer.stats["stability"]) for i, layer in enumerate(profile.layers) if not layer.dense]
    axes.plot(*zip(*sparse, strict=True), "o-", markersize=3, linewidth=1)
    axes.set_xlabel("layer")
    axes.set_ylabel("FCs that both halves of the text choose")
    axes.set_ylim(0.5, 1.01)
    axes.set_title(title)


def mass_by_layer(axes: Any, record: Any, title: str) -> None:
    """Of the first budget."""
    n_fac, entry = next(iter(record["budgets"].items()))
    for name, lost in entry["lost"].items():
        at = [int(next(part for part in layer.split(".") if part.isdigit())) for layer in lost]
        axes.plot(at, [1 - x for x in lost.values()], "o-", markersize=3, linewidth=1.2, label=name)
    axes.set_xlabel("layer")
    axes.set_ylabel(f"attention mass of {n_fac} tokens")
    axes.set_ylim(0, 1.02)
    axes.set_title(title)
    axes.legend(fontsize=8, loc="lower right")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    args = parser.parse_args(argv)
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fasa"  # the same picture from the same record
    from matplotlib import pyplot

    compare, stability = (read(args.results, name) for name in ("compare", "stability"))
    profiles = [(model, load_profile(name)) for model, name in MODELS.items()]
    #: Picture -> its panels (what draws it, from what), row by row, and the size of a panel in inches.
    pictures: dict[str, tuple[list[tuple[Callable[..., None], list[tuple[str, Any]]]], tuple[float, float]]] = {
        "methods": ([(methods, compare)], (6.5, 4.6)),
        "mass": ([(mass_by_layer, compare)], (5.5, 4.0)),
        "frequencies": ([(frequencies, stability)], (5.5, 3.4)),
        "halves": ([(halves, profiles)], (5.5, 3.2)),
        "overlap": ([(overlap_by_text, stability), (overlap_by_length, stability)], (5.8, 4.6)),
    }
    for name, (rows, (width, height)) in pictures.items():
        size = (width * len(MODELS), height * len(rows))
        figure, axes = pyplot.subplots(len(rows), len(MODELS), figsize=size, squeeze=False)
        for (draw, records), row in zip(rows, axes, strict=True):
            for (model, record), panel in zip(records, row, strict=True):
                draw(panel, record, model)
        figure.tight_layout()
        figure.savefig(args.out / f"quality-{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    main()
