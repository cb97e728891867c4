"""Reading the report: what explain() says about a model that decodes sparsely in one layer, densely in another, and why.

The second layer's attention applies dropout, which a sparse decode does not. Every row has a decision and, where it is not sparse, a
reason with a stable key; the same rows are data (`report.rows`), JSON and HTML.

    python examples/read_report.py --html report.html
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from custom_model import HEADS, KV_HEADS, LENGTH, VOCAB, Attention, Model, decode
from fasa_compile import fasa_backend
from fasa_compile.report import Report


class Dropping(Attention):
    """The attention of ``custom_model`` with dropout that nobody turned off."""

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        B, T, _ = x.shape
        heads = self.qkv(x).view(B, T, HEADS + 2 * KV_HEADS, -1).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        self.k.index_copy_(2, pos, self.turn(k, pos))
        self.v.index_copy_(2, pos, v)
        seen = torch.arange(LENGTH, device=x.device) <= pos[:, None]
        y = F.scaled_dot_product_attention(self.turn(q, pos), self.k, self.v, seen, dropout_p=0.1, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


def main(arguments: list[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--html", type=Path, help="write the report there as one HTML file")
    parser.add_argument("--inner", choices=("inductor", "eager"), default="eager")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Model().eval().requires_grad_(False)
    model.layers[1] = Dropping()
    backend = fasa_backend("all", n_fac=64, inner=args.inner)
    decode(model, torch.compile(model, backend=backend), torch.randint(0, VOCAB, (1, 100)), 4)
    report = backend.explain()

    print(report, end="\n\n")
    for row in report.rows:
        print(f"{row.layer}: {row.decision}" + (f", because {row.why}" if row.reason else f", {row.budget} tokens"))
    print("\nJSON:", sorted(json.loads(report.json())))
    if args.html:
        args.html.write_text(report.html(), encoding="utf-8")
        print("wrote", args.html)
    return report


if __name__ == "__main__":
    main()
