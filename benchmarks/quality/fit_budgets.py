"""Gives every layer of a profile the share of a budget that it needs, by what the model loses where that layer alone is sparse.

    python benchmarks/quality/fit_budgets.py --device cuda --profile smollm2-135m-instruct-q4_1 --out FILE.safetensors
    python benchmarks/quality/fit_budgets.py --device cuda --model FILE.gguf --out FILE.safetensors       calibrates first

The last tokens of the calibration text are decoded once per layer and number of tokens, in one forward each (one_pass.py);
the costs, KL to dense, go into a JSON record, from which ``--costs`` makes the same profile again without a model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import compare  # noqa: E402
import corpora  # noqa: E402
import fasa_compile  # noqa: E402
import one_pass  # noqa: E402
import smollm2  # noqa: E402
import token_selectors as ts  # noqa: E402
from fasa_compile.calibration_budgets import allocate  # noqa: E402
from fasa_compile.profiles import FCProfile  # noqa: E402


@torch.no_grad()
def costs(
    h: one_pass.Harness, profile: FCProfile, text: Tensor, last: int, grid: Sequence[int]
) -> dict[str, list[float]]:
    """KL to dense over the last ``last`` tokens of ``text [n]``, by layer and number of tokens, that layer alone being sparse."""
    start = len(text) - last - 1
    cache, tokens = one_pass.prefill(h, text[:start]), text[start:-1]
    dense = one_pass.forced(h, cache, start, tokens, ts.dense())
    found: dict[str, list[float]] = {}
    for layer in profile.layers:
        if layer.dense:
            continue
        found[layer.layer] = []
        for n_fac in grid:
            own = {layer.layer: replace(layer, n_fac=None)}
            method = ts.fasa(own, profile.budget.replace(n_fac=n_fac), profile.fc_format, profile.reduction)
            sparse = one_pass.forced(h, cache, start, tokens, method, only={layer.layer})
            found[layer.layer].append(float((dense.exp() * (dense - sparse)).sum(-1).mean()))
        print(layer.layer, " ".join(f"{x:.5f}" for x in found[layer.layer]), flush=True)
    return found


def fitted(profile: FCProfile, cost: dict[str, list[float]], grid: Sequence[int], mean: int) -> FCProfile:
    """``profile`` with each layer's share of a budget of ``mean`` tokens, scaled to the budget that the profile has."""
    scale = profile.budget.n_fac / mean
    given = {name: round(n * scale) for name, n in allocate(cost, grid, mean).items()}
    layers = tuple(replace(layer, n_fac=given.get(layer.layer)) for layer in profile.layers)
    return replace(profile, layers=layers, stats={**profile.stats, "budgets_fitted_at": mean})


def regrouped(profile: FCProfile, reduction: str | None) -> FCProfile:
    return replace(profile, reduction=reduction) if reduction else profile


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--profile", help="a profile's file or shipped name (default: calibrate on the same text)")
    parser.add_argument("--model", default="smollm2", help="smollm2, or the path of a GGUF file")
    parser.add_argument("--reduction", help="changes the profile's group reduction, before anything is measured")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--last", type=int, default=512)
    parser.add_argument("--grid", type=int, nargs="+", default=[48, 96, 128, 192, 384])
    parser.add_argument("--mean", type=int, default=128, help="mean tokens of a layer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--costs", type=Path, help="a record of costs to use instead of measuring them")
    parser.add_argument("--record", type=Path, help="where to write the costs")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.costs and not args.profile:
        parser.error("--costs needs the profile that they are of")
    if args.costs:
        profile = regrouped(fasa_compile.load_profile(args.profile), args.reduction)
        known: dict[str, Any] = json.loads(args.costs.read_text(encoding="utf-8"))
        grid, cost = known["grid"], known["cost"]
    else:
        _, model, tokenizer = compare.load(args)
        text = corpora.begun(tokenizer, smollm2.windows(tokenizer, args.length, 1)).to(args.device)
        profile = fasa_compile.load_profile(args.profile) if args.profile else fasa_compile.calibrate(model, text)
        profile, grid = regrouped(profile, args.reduction), args.grid
        with one_pass.harness(model) as h:
            cost = costs(h, profile, text[0], args.last, grid)
    if args.record:
        device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
        setting = {"last": args.last, "length": args.length, "reduction": profile.reduction, "device": device}
        made = {"grid": grid, "cost": cost, "setting": setting, "versions": compare.versions()}
        args.record.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    made = fitted(profile, cost, grid, args.mean)
    made.save(args.out)
    print({layer.layer: layer.n_fac for layer in made.layers})


if __name__ == "__main__":
    main()
