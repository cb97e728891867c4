"""Regional compilation: each decoder layer compiled on its own, which compiles once for all of them and starts sooner.

One compiled graph then serves every layer, and a profile has an entry per layer. So with a profile such layers stay dense, and
`explain()` says `unknown-layer`; `profile="all"` and `None` ask for the same of every layer and work. Compile the whole model to
have a profile used.

    python examples/regional.py
"""

from __future__ import annotations

import argparse
import warnings

import torch

from custom_model import VOCAB, Model, decode
from fasa_compile import FasaWarning, calibrate, fasa_backend
from fasa_compile.report import Report


def main(arguments: list[str] | None = None) -> dict[str, Report]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (1, args.tokens))
    model = Model().eval().requires_grad_(False)
    profile = calibrate(model, ids, forward=lambda m, x: m(x, torch.arange(x.shape[1])), progress=False)
    reports = {}
    for name, given, budget in (
        ("exact", None, {}),
        ("all", "all", {"n_fac": 64}),
        ("profile", profile, {"n_fac": 64}),
    ):
        torch._dynamo.reset()
        backend = fasa_backend(given, inner=args.inner, **budget)
        for layer in model.layers:
            layer.compile(backend=backend)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FasaWarning)  # the report says it
            decode(model, model, ids, args.steps)
        reports[name] = backend.explain()
        print(f"profile {name}:\n{reports[name]}\n")
        for layer in model.layers:
            layer._compiled_call_impl = None
    return reports


if __name__ == "__main__":
    main()
