"""The ways in which ``calibrate`` shares a budget between layers, side by side: one mean, the same FCs, the same texts.

    python benchmarks/quality/layer_budgets.py --profile smollm2-135m-instruct-q4_1 --wikitext FILE --out FILE.json

The profile's own budgets by layer are compared too (``fit_budgets.py`` made those of the shipped ones). Calibration sees the text that
it always does, with the shares asked for; scores are those of ``compare.py``, ``less_equal`` being a method less equal budgets on the same
tokens, drawn the same way.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import torch  # noqa: E402

import compare  # noqa: E402
import corpora  # noqa: E402
import fasa_compile  # noqa: E402
import one_pass  # noqa: E402
import smollm2  # noqa: E402
import token_selectors as ts  # noqa: E402
from fasa_compile.profiles import FCProfile  # noqa: E402

ASKED = ("mass", "pyramid")


def shared(model: Any, ids: torch.Tensor, profile: FCProfile, n_fac: int, dense_above: float) -> dict[str, Any]:
    """Way -> tokens of each sparse layer of ``profile``, None where the layer is dense; a mean of ``n_fac``, but for dense layers."""
    sparse = [x.layer for x in profile.layers if not x.dense]
    scale = n_fac / profile.budget.n_fac
    ways: dict[str, Any] = {
        "equal": dict.fromkeys(sparse, n_fac),
        "the profile's own": {
            x.layer: round((x.n_fac or profile.budget.n_fac) * scale) for x in profile.layers if not x.dense
        },
    }
    for way in ASKED:
        made = fasa_compile.calibrate(
            model,
            ids,
            reduction=profile.reduction,
            budget=profile.budget.replace(n_fac=n_fac),
            layer_budgets=way,
            progress=False,
        )
        ways[way] = {x.layer: x.n_fac for x in made.layers if x.layer in sparse}
        if way == "mass":
            lost = {x.layer: x.stats["mass_lost"] for x in made.layers if x.layer in sparse}
    ways[f"equal, dense_above={dense_above}"] = {x: None if lost[x] > dense_above else n_fac for x in sparse}
    return ways


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, or the path of a GGUF file")
    parser.add_argument("--profile", required=True, help="a profile's file or shipped name")
    parser.add_argument("--wikitext", type=Path, help="WikiText-2's test split as text; left out where not given")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--last", type=int, default=512, help="tokens to predict")
    parser.add_argument("--each", type=int, default=1, help="stretches of each kind of text")
    parser.add_argument("--kinds", nargs="+", help="only texts of these kinds (all)")
    parser.add_argument("--n-fac", type=int, default=128)
    parser.add_argument("--dense-above", type=float, default=0.5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    name, model, tokenizer = compare.load(args)
    profile = fasa_compile.load_profile(args.profile)
    ids = corpora.begun(tokenizer, smollm2.windows(tokenizer, args.length, 1)).to(args.device)
    texts = corpora.stretches(tokenizer, args.wikitext, args.length, args.each, args.length)
    texts = {kind: found for kind, found in texts.items() if kind in (args.kinds or texts)}
    ways = compare.clock("calibrate", lambda: shared(model, ids, profile, args.n_fac, args.dense_above))
    budget = profile.budget.replace(n_fac=args.n_fac)
    compared = {"dense": ts.dense()}
    for way, tokens in ways.items():
        layers = {
            x.layer: replace(x, n_fac=tokens[x.layer] or args.length) for x in profile.layers if x.layer in tokens
        }
        # ``compare`` sets every method beside the one of that name.
        compared[compare.OURS if way == "equal" else way] = ts.fasa(
            layers, budget, profile.fc_format, profile.reduction
        )
    with one_pass.harness(model) as h:
        scores, _ = compare.clock("evaluate", lambda: compare.evaluate(h, texts, args.last, compared))
    print(compare.table(scores))
    for row in scores.values():
        row |= {"less_equal": row.pop("less_ours")} if "less_ours" in row else {}
    scores["equal"] = scores.pop(compare.OURS)
    record = {
        "benchmark": "layer_budgets",
        "model": name,
        "texts": {k: hashlib.sha256(v.numpy().tobytes()).hexdigest() for k, v in texts.items()},
        "setting": {
            "length": args.length,
            "last": args.last,
            "each": args.each,
            "n_fac": args.n_fac,
            "profile": Path(args.profile).stem,
            "fc_format": profile.fc_format,
            "reduction": profile.reduction,
            "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu",
        },
        "versions": compare.versions(),
        "tokens": ways,
        "methods": scores,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
