"""Our selection beside other methods at the same budget, on texts of different kinds: JSON with error bars, and a picture.

    python benchmarks/quality/compare.py --device cuda --wikitext FILE            SmolLM2-135M, 4k tokens, budgets 128 and 256
    python benchmarks/quality/compare.py --model FILE.gguf --profile NAME --n-fac 256 --passkeys 0
    python benchmarks/quality/compare.py --merge A.json B.json --out C.json       one record of runs on the same texts

Every method runs through ``one_pass.py``: the last tokens of each text are fed to the model, errors propagate through all
layers and into later tokens, and the method chooses the keys of each query. Ours runs on the profile and the packed FC cache
of the package. ``run_quality.py`` measures the compiled path, token by token; the two agree (tests/quality/test_compare.py).
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import corpora  # noqa: E402
import fasa_compile  # noqa: E402
import one_pass  # noqa: E402
import smollm2  # noqa: E402
import token_selectors as ts  # noqa: E402
from fasa_compile import evaluation  # noqa: E402
from fasa_compile.calibration_stats import LayerStats  # noqa: E402
from fasa_compile.plan import Policy  # noqa: E402
from fasa_compile.profiles import Budget, FCProfile, LayerProfile  # noqa: E402
from fasa_compile.profiles.schema import REDUCTIONS, RopeFacts  # noqa: E402
from run_quality import versions  # noqa: E402

BLOCK = 32  # tokens that the bootstrap draws together: neighbours are not independent
RESAMPLES = 1000
CITIES_PER_TEXT = 8


class Calibrated:
    """Statistics of every global layer of ``model`` over ``ids``, for the methods that need some of their own.

    ``true`` uses the model's pairs, ``shifted`` pairs ``(2i, 2i+1)`` as the paper's published code does.
    """

    def __init__(self, h: one_pass.Harness, profile: FCProfile, ids: Tensor) -> None:
        self.true: dict[str, LayerStats] = {}
        self.shifted: dict[str, LayerStats] = {}
        self.channels: dict[str, Tensor] = {}
        # Budgets by layer are ours alone: other methods have the same in each.
        self.known = {layer.layer: replace(layer, n_fac=None) for layer in profile.layers if not layer.dense}

        def watch(name: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
            if name not in self.known:
                return
            layer = self.known[name]
            n = len(layer.rope.pairs)
            wrong = RopeFacts(layer.head_dim, tuple((2 * i, 2 * i + 1) for i in range(n)), layer.rope.magnitude)
            for into, rope in ((self.true, layer.rope), (self.shifted, wrong)):
                stats = LayerStats(q.shape[1], k.shape[1], q.shape[3], rope, q.device, name)
                stats.update(q, k, scale)
                into[name] = stats
            group = q.shape[1] // k.shape[1]
            self.channels[name] = q[0].abs().mean(1) * k[0].abs().mean(1).repeat_interleave(group, 0)

        one_pass.prefill(h, ids, watch)

    def layers(self, method: str, n_tip: int) -> dict[str, LayerProfile]:
        return {name: s.layer_profile(name, n_tip, method) for name, s in self.true.items()}

    def agreeing(self, pairs: str, top: int) -> dict[str, Tensor]:
        """By layer int64 ``[Hkv, n_fc]``: FCs by contextual agreement (the paper's), best first; ``pairs`` is true or shifted."""
        stats = self.true if pairs == "true" else self.shifted
        return {name: s.rank("contextual_agreement", top=top) for name, s in stats.items()}

    def with_fcs(self, ranked: dict[str, Tensor], n_tip: int, pairs: str = "true") -> dict[str, LayerProfile]:
        """Layers with the first ``n_tip`` of ``ranked``: for sets per query head, which need no normaliser."""
        rope = {name: (self.true if pairs == "true" else self.shifted)[name].rope for name in ranked}
        return {
            name: replace(self.known[name], rope=rope[name], fcs=fcs[:, :n_tip].sort(1).values.int().cpu())
            for name, fcs in ranked.items()
        }

    def random(self, n_tip: int) -> dict[str, LayerProfile]:
        generator = torch.Generator().manual_seed(0)

        def drawn(layer: LayerProfile) -> LayerProfile:
            n = len(layer.rope.pairs)
            fcs = torch.stack([torch.randperm(n, generator=generator)[:n_tip] for _ in range(layer.num_kv_heads)])
            return replace(layer, fcs=fcs.sort(1).values.int())

        return {name: drawn(layer) for name, layer in self.known.items()}


OURS = "ours"
#: Kinds of facts -> what the record calls them.
FACTS = {"passkey": "pass_keys", "key_value": "key_values"}
#: Of these, facts are asked for: one of each kind of method.
ASKED = (
    "dense",
    OURS,
    "ours, one budget for every layer",
    "oracle top-k",
    "paper (CA)",
    "paper's code: pairs (2i, 2i+1)",
    "Quest",
    "SnapKV",
    "StreamingLLM",
    "SparQ",
    "Double Sparsity",
    "random FCs",
)
#: Of these, the record has the attention mass that each layer lost.
BY_LAYER = (
    OURS,
    "ours, one budget for every layer",
    "oracle top-k",
    "oracle, one set per KV head, forced tokens",
)


def methods(profile: FCProfile, budget: Budget, found: Calibrated) -> dict[str, ts.Method]:
    """Name -> method. ``same bytes``: the published recipe with our packed FC cache instead of bf16 of a quarter of the FCs.

    ``profile``'s budgets by layer are scaled to ``budget``, as ``fasa_backend(profile, n_fac=...)`` does.
    """
    first = next(layer for layer in profile.layers if not layer.dense)
    n_fc, n_tip, d = len(first.rope.pairs), first.n_tip, first.head_dim
    quarter = max(n_fc // 4, 1)
    policy = Policy(profile, {name: getattr(budget, name) for name in ("n_fac", "n_sink", "n_recent")})
    ours = {x.layer: replace(x, n_fac=policy.budget_for(x).n_fac) for x in profile.layers if not x.dense}
    flat = {name: replace(x, n_fac=None) for name, x in ours.items()}
    bare = Budget(budget.n_fac, 0, 0)
    # A profile of schema 1 has no slopes: ``affine`` would be ``static`` by another name.
    sloped = any(bool(x.affine[:, 1:].any()) for x in flat.values())
    fmt, by = profile.fc_format, profile.reduction
    agreeing = {pairs: found.agreeing(pairs, budget.n_fac) for pairs in ("true", "shifted")}
    agree = found.with_fcs(agreeing["true"], n_tip)
    top = {name: c.topk(min(2 * n_tip, d), dim=-1).indices for name, c in found.channels.items()}
    bits = ts.bytes_per_token(2 * n_tip, fmt)
    quarters = {pairs: found.with_fcs(ranked, quarter, pairs) for pairs, ranked in agreeing.items()}
    return {
        "dense": ts.dense(),
        OURS: ts.fasa(ours, budget, fmt, by),
        "ours, one budget for every layer": ts.fasa(flat, budget, fmt, by),
        **{
            f"ours, one budget, {name}": ts.fasa(flat, budget, fmt, name)
            for name in REDUCTIONS
            if name != by and (name != "affine" or sloped)
        },
        **{f"ours, FC cache in {x}": ts.fasa(ours, budget, x, by) for x in ("bf16", "fp8", "int8", "int4") if x != fmt},
        "ours, a quarter of the FCs in bf16": ts.fasa(
            {n: replace(x, n_fac=ours[n].n_fac) for n, x in found.layers("score_variance", quarter).items()},
            budget,
            "bf16",
            by,
        ),
        "oracle top-k": ts.oracle(budget.n_fac),
        "oracle, one set per KV head, forced tokens": ts.oracle_shared(budget),
        "paper (CA)": ts.fasa(quarters["true"], bare, "bf16", None, forced=False),
        "paper (CA), same bytes": ts.fasa(agree, bare, fmt, None, forced=False),
        "paper (CA), same bytes, forced tokens": ts.fasa(agree, budget, fmt, None),
        "paper's code: pairs (2i, 2i+1)": ts.fasa(quarters["shifted"], bare, "bf16", None, forced=False),
        "Quest": ts.quest(budget, d),
        "SnapKV": ts.snapkv(budget),
        "StreamingLLM": ts.streaming(budget),
        "SparQ": ts.sparq(budget, int(bits // 2)),
        "Double Sparsity": ts.double_sparsity(top, budget),
        # No constants of their own: softmax-sum needs none.
        "random FCs": ts.fasa(found.random(n_tip), budget, fmt, "softmax_sum"),
    }


def per_token(logp: Tensor, dense: Tensor, targets: Tensor) -> Tensor:
    """fp64 ``[3, n]``: negative log-likelihood, KL(dense || this), equal top-1."""
    nll = -logp.gather(1, targets[:, None])[:, 0]
    kl = (dense.exp() * (dense - logp)).sum(-1)
    return torch.stack([nll, kl, (logp.argmax(-1) == dense.argmax(-1)).float()]).double().cpu()


def resampled(n_texts: int, n: int) -> Tensor:
    """int64 ``[RESAMPLES, n_texts * n]``: texts drawn with replacement, and of each text blocks of neighbours."""
    g = torch.Generator().manual_seed(0)
    blocks = n // BLOCK
    which = torch.randint(n_texts, (RESAMPLES, n_texts, 1, 1), generator=g)
    block = torch.randint(blocks, (RESAMPLES, n_texts, blocks, 1), generator=g)
    return (which * n + block * BLOCK + torch.arange(BLOCK)).flatten(1)


def interval(values: Tensor) -> list[float]:
    return [float(x) for x in values.quantile(torch.tensor([0.025, 0.975], dtype=values.dtype))]


def summary(rows: Tensor, base: Tensor) -> dict[str, Any]:
    """``rows, base [3, texts, n]`` of a method and of dense: means with 95 % bootstrap intervals."""
    _, texts, n = rows.shape
    draw = resampled(texts, n)
    flat, dense = rows.flatten(1), base.flatten(1)
    difference = flat[0] - dense[0]
    return {
        "kl": float(flat[1].mean()),
        "kl_95": interval(flat[1][draw].mean(1)),
        "perplexity": math.exp(float(flat[0].mean())),
        "perplexity_ratio": math.exp(float(difference.mean())),
        "perplexity_ratio_95": [math.exp(x) for x in interval(difference[draw].mean(1))],
        "top1": float(flat[2].mean()),
        "top1_95": interval(flat[2][draw].mean(1)),
    }


def paired(difference: Tensor) -> dict[str, Any]:
    """``[3, texts, n]``, a method's scores less ours on the same tokens: means with 95 % bootstrap intervals, and the number of
    texts (and of blocks of ``BLOCK`` tokens) where ours has the lower KL."""
    _, texts, n = difference.shape
    nll, kl, _ = difference
    draw = resampled(texts, n)
    return {
        "kl": float(kl.mean()),
        "kl_95": interval(kl.flatten()[draw].mean(1)),
        "nll": float(nll.mean()),
        "nll_95": interval(nll.flatten()[draw].mean(1)),
        "kl_by_text": kl.mean(1).tolist(),
        "texts_ours_better": int((kl.mean(1) > 0).sum()),
        "blocks_ours_better": float(
            (kl[:, : n // BLOCK * BLOCK].unflatten(1, (-1, BLOCK)).mean(2) > 0).double().mean()
        ),
    }


@torch.no_grad()
def evaluate(
    h: one_pass.Harness, texts: dict[str, Tensor], last: int, compared: dict[str, ts.Method]
) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Scores by method, and of some the attention mass lost by layer (mean over heads and queries)."""
    device = next(h.model.parameters()).device
    rows: dict[str, list[Tensor]] = {name: [] for name in compared}
    kinds: list[str] = []
    lost: dict[str, dict[str, float]] = {name: {} for name in compared}
    for kind, some in texts.items():
        for text in some.to(device):
            start = len(text) - last - 1
            cache = one_pass.prefill(h, text[:start])
            kinds.append(kind)
            dense = None
            for name, method in compared.items():
                h.lost, h.queries = {}, 0
                logp = one_pass.forced(h, cache, start, text[start:-1], method)
                dense = logp if dense is None else dense
                rows[name].append(per_token(logp, dense, text[start + 1 :]))
                for layer, value in h.lost.items():
                    lost[name][layer] = lost[name].get(layer, 0.0) + float(value.mean()) / h.queries
    out = {}
    for name, per_text in rows.items():
        stacked, base = torch.stack(per_text, 1), torch.stack(rows["dense"], 1)
        out[name] = {
            "bytes": compared[name].bytes,
            "sets": compared[name].sets,
            "note": compared[name].note,
            **summary(stacked, base),
            "kinds": {
                kind: {
                    "kl": float(stacked[1, pick].mean()),
                    "perplexity_ratio": math.exp(float((stacked - base)[0, pick].mean())),
                    "top1": float(stacked[2, pick].mean()),
                }
                for kind in texts
                for pick in [torch.tensor([k == kind for k in kinds])]
            },
        }
        if OURS in rows and name != OURS:
            out[name]["less_ours"] = paired(stacked - torch.stack(rows[OURS], 1))
    mass = {
        name: {layer: total / len(kinds) for layer, total in lost[name].items()} for name in BY_LAYER if name in lost
    }
    return out, mass


@torch.no_grad()
def digits(
    h: one_pass.Harness,
    tokenizer: Any,
    filler: Iterable[Tensor],
    keys: int,
    compared: dict[str, ts.Method],
    kind: str = "passkey",
) -> dict[str, Any]:
    """Share of digits of facts of a ``kind`` predicted, by method: ``keys`` questions in all, ``CITIES_PER_TEXT`` a text."""
    device = next(h.model.parameters()).device
    shares: dict[str, list[float]] = {name: [] for name in compared}
    pieces = list(filler)
    for seed in range(-(-keys // CITIES_PER_TEXT)):
        hay = evaluation.haystack(tokenizer, pieces[seed % len(pieces)], CITIES_PER_TEXT, seed, kind)
        cache = one_pass.prefill(h, hay.text[0].to(device))
        asked = [torch.cat([q, a[:-1]]) for q, a in zip(hay.questions, hay.answers, strict=True)]
        blocks = torch.repeat_interleave(torch.arange(len(asked)), torch.tensor([len(a) for a in asked]))
        for name, method in compared.items():
            logp = one_pass.forced(h, cache, hay.text.shape[1], torch.cat(asked).to(device), method, blocks)
            predicted = logp.argmax(-1).cpu().split([len(a) for a in asked])
            for answer, got in zip(hay.answers, predicted, strict=True):
                shares[name].append(float((got[-len(answer) :] == answer).double().mean()))
    out = {}
    for name, found in shares.items():
        x = torch.tensor(found, dtype=torch.float64)
        draw = torch.randint(len(x), (RESAMPLES, len(x)), generator=torch.Generator().manual_seed(0))
        less = torch.tensor(shares["dense"], dtype=torch.float64) - x
        out[name] = {
            "keys": len(x),
            "digits": float(x.mean()),
            "digits_95": interval(x[draw].mean(1)),
            "below_dense": float(less.mean()),
            "below_dense_95": interval(less[draw].mean(1)),
        }
    return out


def table(scores: dict[str, Any]) -> str:
    head = f"{'method':44s} {'bytes':>6s}  {'KL':>6s} {'95 %':15s}  {'ppl x':>6s} {'95 %':13s}  top-1  KL less ours, lower end, texts"
    lines = [head]
    for name, s in scores.items():
        low, high = s["kl_95"]
        less = s.get("less_ours")
        against = f"  {less['kl']:+.4f} {less['kl_95'][0]:+.4f} {less['texts_ours_better']}" if less else ""
        lines.append(
            f"{name:44s} {s['bytes']:6.1f}  {s['kl']:6.4f} {low:.4f}-{high:.4f}    {s['perplexity_ratio']:6.4f} "
            f"{s['perplexity_ratio_95'][0]:.3f}-{s['perplexity_ratio_95'][1]:.3f}  {s['top1']:.3f}{against}"
        )
    return "\n".join(lines)


def load(args: argparse.Namespace) -> tuple[str, Any, Any]:
    if args.model == "smollm2":
        return "smollm2-135m-instruct-q4_1", *smollm2.load(smollm2.fetch(), args.device, torch.float32)
    gguf = Path(args.model)
    return gguf.stem, *smollm2.load(gguf, args.device, torch.float32)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, or the path of a GGUF file")
    parser.add_argument("--wikitext", type=Path, help="WikiText-2's test split as text; left out where not given")
    parser.add_argument("--profile", help="a profile's file or shipped name (default: calibrate on the shipped text)")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--last", type=int, default=512, help="tokens to predict; 0: pass keys only")
    parser.add_argument("--each", type=int, default=2, help="stretches of each kind of text")
    parser.add_argument("--n-fac", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--methods", nargs="*", help="only these, beside dense and ours")
    parser.add_argument("--n-sink", type=int)
    parser.add_argument("--n-recent", type=int)
    parser.add_argument(
        "--passkeys", type=int, default=200, help="questions of each kind and length; 0 leaves them out"
    )
    parser.add_argument(
        "--key-lengths", type=int, nargs="+", default=[2048, 4096], help="tokens of the texts that hold facts"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--merge", type=Path, nargs="+", help="only join the records of several runs, and write --out")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def merged(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of several runs on the same texts: their budgets, and the parts of each, together.

    Raises ``ValueError`` where runs differ in anything but budgets, or measured the same thing twice.
    """
    whole = {**records[0], "budgets": {}}
    for record in records:
        other = sorted(key for key in whole if key != "budgets" and record.get(key) != whole[key])
        if other:
            raise ValueError(f"these records are not of one comparison: they differ in {', '.join(other)}")
        for n_fac, entry in record["budgets"].items():
            into = whole["budgets"].setdefault(n_fac, {})
            twice = sorted(key for key in entry if into.get(key, entry[key]) != entry[key])
            if twice:
                raise ValueError(f"budget {n_fac} has been measured twice: {', '.join(twice)}")
            into.update(entry)
    return whole


def clock(what: str, do: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    result = do()
    print(f"{what}: {time.perf_counter() - started:.1f} s", flush=True)
    return result


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.merge:
        records = [json.loads(path.read_text(encoding="utf-8")) for path in args.merge]
        args.out.write_text(json.dumps(merged(records), indent=1) + "\n", encoding="utf-8")
        return
    name, model, tokenizer = clock("load", lambda: load(args))
    calibration = corpora.begun(tokenizer, smollm2.windows(tokenizer, args.length, 1))
    texts = corpora.stretches(tokenizer, args.wikitext, args.length, args.each, args.length)
    if args.profile:
        profile = fasa_compile.load_profile(args.profile)
    else:
        profile = clock("calibrate", lambda: fasa_compile.calibrate(model, calibration, progress=False))
    given = {"n_sink": args.n_sink, "n_recent": args.n_recent}
    given = {k: v for k, v in given.items() if v is not None}
    record: dict[str, Any] = {
        "benchmark": "compare",
        "model": name,
        "texts": {k: hashlib.sha256(v.numpy().tobytes()).hexdigest() for k, v in texts.items()},
        "setting": {
            "length": args.length,
            "each": args.each,
            "n_tip": profile.layers[-1].n_tip,
            "sparse_layers": sum(not layer.dense for layer in profile.layers),
            "fc_format": profile.fc_format,
            "reduction": profile.reduction,
            "method": profile.method,
            "profile": Path(args.profile).stem if args.profile else "calibrated for this run",
            "bootstrap": f"{RESAMPLES} resamples of texts and of blocks of {BLOCK} tokens",
            "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu",
            "dtype": "float32",
        },
        "versions": versions(),
        "budgets": {},
    }
    out = args.out or ROOT / "benchmarks" / "results" / f"compare-{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:  # as it goes: what was measured stays, whatever comes after it
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    with one_pass.harness(model) as h:
        found = clock("statistics", lambda: Calibrated(h, profile, calibration[0].to(args.device)))
        for n_fac in args.n_fac:
            budget = profile.budget.replace(n_fac=n_fac, **given)
            compared = clock("methods", lambda b=budget: methods(profile, b, found))
            if args.methods is not None:
                chosen = ("dense", OURS, *args.methods)
                compared = {name: method for name, method in compared.items() if name in chosen}
            entry: dict[str, Any] = {"n_sink": budget.n_sink, "n_recent": budget.n_recent}
            record["budgets"][str(n_fac)] = entry
            if args.last:
                scores, lost = clock("evaluate", lambda c=compared: evaluate(h, texts, args.last, c))
                print(f"budget {n_fac}\n{table(scores)}", flush=True)
                entry |= {"last": args.last, "methods": scores, "lost": lost}
                save()
            if args.passkeys and n_fac == args.n_fac[0]:
                few = {name: compared[name] for name in ASKED if name in compared}
                for length, (kind, field) in itertools.product(args.key_lengths, FACTS.items()):
                    filler = [t[:length] for t in texts["fiction"]]
                    ask = functools.partial(digits, h, tokenizer, filler, args.passkeys, few, kind)
                    found_digits = clock(f"{kind} at {length}", ask)
                    for method, d in found_digits.items():
                        print(f"  {method:44s} {d['digits']:.3f}  {d['below_dense']:+.3f} below dense")
                    entry[f"{field}_{length}"] = found_digits
                    save()
    print(f"record: {out}")


if __name__ == "__main__":
    main()
