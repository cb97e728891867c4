"""What other settings of a shipped profile would do, on the text that it was calibrated on and others that no comparison uses.

    python benchmarks/quality/settings.py --model FILE.gguf --profile gemma-3-270m-q4_k_m --out FILE.json

Budgets by layer are the profile's, scaled to ``--n-fac``, for the oracles too. The last tokens of each text are fed in one forward (``one_pass.py``).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
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
from fasa_compile.plan import Policy  # noqa: E402
from fasa_compile.profiles import Budget, FCProfile  # noqa: E402


def oracle(tokens: dict[str, int], budget: Budget, shared: bool) -> ts.Method:
    """Exact scores, forced tokens, ``tokens`` of each layer; a set per KV head (by softmax-sum) or per query head."""

    def select(scene: ts.Scene) -> Tensor:
        keep, always = tokens[scene.layer], scene.forced(budget.n_sink, budget.n_recent)
        if not shared:
            return scene.best(scene.scores(), keep, always).flatten(0, 1)
        return scene.per_head(scene.best(ts.group_key(scene.scores(), None, "softmax_sum"), keep, always))

    return ts.Method(select, math.nan, "KV head" if shared else "query head")


def settings(profile: FCProfile, found: compare.Calibrated, n_fac: int) -> dict[str, ts.Method]:
    budget = profile.budget.replace(n_fac=n_fac)
    policy = Policy(profile, {"n_fac": n_fac})
    own = {x.layer: replace(x, n_fac=policy.budget_for(x).n_fac) for x in profile.layers if not x.dense}
    tokens = {name: x.n_fac or n_fac for name, x in own.items()}
    fmt, by = profile.fc_format, profile.reduction
    n_fc, n_tip = len(next(iter(own.values())).rope.chunks), next(iter(own.values())).n_tip

    def ranked(method: str, count: int, fmt: str = fmt) -> ts.Method:
        layers = {name: replace(x, n_fac=tokens[name]) for name, x in found.layers(method, count).items()}
        return ts.fasa(layers, budget, fmt, by)

    def forced(sinks: int, recent: int) -> Budget:
        return budget.replace(n_sink=sinks, n_recent=recent)

    return {
        "dense": ts.dense(),
        "the profile": ts.fasa(own, budget, fmt, by),
        "4 first and 4 last tokens": ts.fasa(own, forced(4, 4), fmt, by),
        "4 first and 1 last token": ts.fasa(own, forced(4, 1), fmt, by),
        "1 first and 1 last token": ts.fasa(own, forced(1, 1), fmt, by),
        "no forced tokens": ts.fasa(own, forced(0, 0), fmt, by),
        "a quarter of the FCs, int8": ranked("score_variance", n_fc // 4, "int8"),
        "three quarters of the FCs": ranked("score_variance", 3 * n_fc // 4),
        "greedy_mass": ranked("greedy_mass", n_tip),
        "contextual_agreement": ranked("contextual_agreement", n_tip),
        "oracle, one set per KV head": oracle(tokens, budget, shared=True),
        "oracle, one set per KV head, 4 first and 1 last token": oracle(tokens, forced(4, 1), shared=True),
        "oracle, a set per query head, 4 first and 1 last token": oracle(tokens, forced(4, 1), shared=False),
    }


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, or the path of a GGUF file")
    parser.add_argument("--profile", required=True, help="a profile's file or shipped name")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--last", type=int, default=512)
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="further texts, read from their beginning")
    parser.add_argument("--n-fac", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    name, model, tokenizer = compare.load(args)
    profile = fasa_compile.load_profile(args.profile)
    calibration = corpora.begun(tokenizer, smollm2.windows(tokenizer, args.length, 1)).to(args.device)
    texts = {"calibration": calibration[0]}
    for path in args.more:
        ids = tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"][: args.length]
        texts[path.stem] = corpora.begun(tokenizer, torch.tensor([ids], device=args.device))[0]
    record: dict[str, Any] = {"benchmark": "settings", "model": name, "profile": Path(args.profile).stem}
    record |= {"length": args.length, "last": args.last, "n_fac": args.n_fac, "device": args.device}
    record |= {"versions": compare.versions(), "texts": {}}
    with one_pass.harness(model) as h:
        methods = settings(profile, compare.Calibrated(h, profile, calibration[0]), args.n_fac)
        for kind, text in texts.items():
            start = len(text) - args.last - 1
            cache = one_pass.prefill(h, text[:start])
            dense = one_pass.forced(h, cache, start, text[start:-1], methods["dense"])
            base = compare.per_token(dense, dense, text[start + 1 :])
            found = record["texts"].setdefault(kind, {})
            for setting, method in methods.items():
                logp = one_pass.forced(h, cache, start, text[start:-1], method)
                nll, kl, top1 = compare.per_token(logp, dense, text[start + 1 :]).mean(1).tolist()
                more = nll - float(base[0].mean())
                found[setting] = {"bytes": method.bytes, "kl": kl, "nll_less_dense": more, "top1": top1}
                print(f"{kind:16s} {setting:32s} KL {kl:.4f}  nll {more:+.4f}  top-1 {top1:.3f}", flush=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
