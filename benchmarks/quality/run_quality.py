"""Measures what sparse decode costs a model in quality, and writes one JSON record to benchmarks/results/.

    python benchmarks/quality/run_quality.py                             SmolLM2, the text in examples/, compiled and hooked
    python benchmarks/quality/run_quality.py --text FILE --label NAME    another text; calibration stays on the one in examples/
    python benchmarks/quality/run_quality.py --model DIR --device cuda   another model

Paths that are measured, all from one dense prefill per text:

    dense      the model's own forward, uncompiled: what the others are compared with
    hooked     FASA by a plain hook (hooked_attention.py), uncompiled
    compiled   torch.compile(model.forward, backend=fasa_backend(profile))
    oracle     the true best tokens per KV head, by the hook: what a perfect profile would give
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Not the root itself, whose folder triton_kernels/ would answer for the package of that name.
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import fasa_compile  # noqa: E402
import smollm2  # noqa: E402
from fasa_compile.evaluation import Step, perplexity, retrieval, step_of  # noqa: E402
from fasa_compile.profiles import Budget  # noqa: E402
from hooked_attention import hooked  # noqa: E402

PATHS = ("hooked", "compiled", "oracle")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", type=Path, help="a folder with a transformers model (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--text", type=Path, default=smollm2.TEXT, help="English text to evaluate on")
    parser.add_argument("--label", help="what the record calls the text (default: its file name)")
    parser.add_argument("--texts", type=int, default=3, help="stretches of the text")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a stretch")
    parser.add_argument("--last", type=int, default=512, help="tokens at its end that are predicted")
    parser.add_argument("--paths", default="hooked,compiled", help=f"comma-separated, of {', '.join(PATHS)}")
    parser.add_argument("--profile", help="a profile's file or shipped name (default: calibrate now)")
    parser.add_argument("--calibration-tokens", type=int, default=4096)
    parser.add_argument("--n-tip", type=int, help="dominant FCs per KV head (default: calibrate()'s)")
    parser.add_argument("--fc-format")
    parser.add_argument("--reduction")
    parser.add_argument("--n-fac", type=int, default=128)
    parser.add_argument("--n-sink", type=int, default=4)
    parser.add_argument("--n-recent", type=int, default=16)
    parser.add_argument("--inner", default="inductor", help="inner compiler of the compiled path")
    parser.add_argument("--passkeys", type=int, default=8, help="facts buried per stretch; 0 leaves retrieval out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--out", type=Path, help="record to write (default: benchmarks/results/quality-MODEL-TEXT.json)"
    )
    args = parser.parse_args(argv)
    args.paths = args.paths.split(",")
    if unknown := set(args.paths) - set(PATHS):
        parser.error(f"--paths: {', '.join(sorted(unknown))} is not one of {', '.join(PATHS)}")
    if not 2 < args.last < args.length - args.n_fac:
        parser.error("--last: expected more than 2 and less than --length minus --n-fac tokens")
    return args


def load(args: argparse.Namespace) -> tuple[str, Any, Any]:
    """``(name, model, tokenizer)``."""
    if args.model is None:
        return "smollm2-135m-instruct-q4_1", *smollm2.load(smollm2.fetch(), args.device)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
    return args.model.name, model, AutoTokenizer.from_pretrained(args.model)


def windows(args: argparse.Namespace, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """``(calibration [1, n], evaluation [texts, length])``, without a token in common."""
    if args.text.resolve() == smollm2.TEXT:
        both = smollm2.windows(tokenizer, max(args.length, args.calibration_tokens), args.texts + 1)
        return both[:1, : args.calibration_tokens], both[1:, : args.length]
    calibration = smollm2.windows(tokenizer, args.calibration_tokens, 1)
    return calibration, smollm2.windows(tokenizer, args.length, args.texts, args.text)


def profile_for(args: argparse.Namespace, model: Any, calibration: Tensor) -> Any:
    if args.profile:
        return fasa_compile.load_profile(args.profile)
    given = {"n_tip": args.n_tip, "fc_format": args.fc_format, "reduction": args.reduction}
    given = {name: value for name, value in given.items() if value is not None}
    return fasa_compile.calibrate(model, calibration.to(args.device), **given)


class DecodePath:
    """A decode path under evaluation: its step, and what has to hold while it runs."""

    def __init__(self, name: str, model: Any, profile: Any, args: argparse.Namespace) -> None:
        self.name, self._model, self._profile = name, model, profile
        self._budget = Budget(args.n_fac, args.n_sink, args.n_recent)
        forward = model.forward
        if name == "compiled":
            backend = fasa_compile.fasa_backend(
                profile, n_fac=args.n_fac, n_sink=args.n_sink, n_recent=args.n_recent, dense_below=0, inner=args.inner
            )
            forward = torch.compile(model.forward, backend=backend)
        self._step = step_of(forward)

    def step(self, token: Tensor, cache: Any) -> Tensor:
        with self._context():
            return self._step(token, cache)

    def _context(self) -> Any:
        if self.name in ("hooked", "oracle"):
            return hooked(self._model, self._profile if self.name == "hooked" else None, self._budget)
        return nullcontext()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("fasa-compile", "torch", "transformers", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    name, model, tokenizer = load(args)
    calibration, texts = windows(args, tokenizer)
    profile = profile_for(args, model, calibration)
    label = args.label or args.text.stem
    fasa_compile.reset_stats()
    paths: dict[str, Step] = {"dense": step_of(model.forward)}
    paths |= {path: DecodePath(path, model, profile, args).step for path in args.paths}
    record = {
        "benchmark": "quality",
        "model": name,
        "text": {"name": label, "sha256": hashlib.sha256(args.text.read_bytes()).hexdigest()},
        "setting": {
            "texts": args.texts,
            "length": args.length,
            "last": args.last,
            "n_fac": args.n_fac,
            "n_sink": args.n_sink,
            "n_recent": args.n_recent,
            "n_tip": profile.layers[0].n_tip,
            "fc_format": profile.fc_format,
            "reduction": profile.reduction,
            "method": profile.method,
            "profile": args.profile or "calibrated for this run",
            "calibration_tokens": args.calibration_tokens,
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu",
            "threads": args.threads,
            "inner": args.inner,
        },
        "versions": versions(),
        "decode": perplexity(model, paths, texts, args.last),
        "stats": fasa_compile.stats(),
    }
    out = args.out or ROOT / "benchmarks" / "results" / f"quality-{name}-{label}.json"
    for path, entry in record["decode"].items():
        print(f"{path:9s} perplexity {entry['perplexity']:.3f} = {entry['perplexity_ratio']:.4f} x dense")
    write(out, record)  # retrieval takes as long again
    if args.passkeys:
        record["pass_keys"] = {"per_text": args.passkeys, **retrieval(model, tokenizer, paths, texts, args.passkeys)}
        record["stats"] = fasa_compile.stats()
        write(out, record)


def write(out: Path, record: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"record: {out}")


if __name__ == "__main__":
    main()
