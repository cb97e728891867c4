"""Teach fasa_compile a spelling of attention that it does not know, without a change to the package.

``mylib::blend`` is an attention behind an operator of one's own, as a model with a hand-written kernel would have it: nothing in a
graph says what it computes, so it stays dense until a reader says which of its arguments are what. The reader also says what it must
not be taken for: with another ``power`` the operator is no softmax attention, and the reader refuses it (the negative twin).

    python examples/register_attention.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fasa_compile import fasa_backend, patterns
from fasa_compile.patterns import graph

HEADS, DIM, LENGTH = 4, 16, 64


@torch.library.custom_op("mylib::blend", mutates_args=())
def blend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sharpness: float, power: int = 1) -> Tensor:
    """q [B, H, T, D], k and v [B, H, L, D], seen bool [T, L] -> [B, H, T, D]."""
    scores = (q @ k.mT * sharpness).pow(power).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v


@blend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sharpness: float, power: int = 1) -> Tensor:
    return torch.empty_like(q)


def read_blend(node, tables):
    """``mylib::blend(q, k, v, seen, sharpness)``: softmax attention where ``power`` is 1."""
    q, k, v, seen, sharpness = graph.args(node)[:5]
    if graph.argument(node, 5, "power", 1) != 1:
        raise patterns.Refused("unknown-attention", "mylib::blend with a power is no softmax attention")
    e = patterns.Expr
    return patterns.Found("blend", node, e(q), e(k), e(v), scale=float(sharpness), mask=e(seen), mask_kind="bool")


class Model(nn.Module):
    """One attention with a rotary embedding and a cache of LENGTH tokens. x [B, 1, HEADS * DIM], pos int64 [1]."""

    def __init__(self, power: int = 1) -> None:
        super().__init__()
        self.power = power
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM, bias=False)
        self.register_buffer("k", torch.zeros(1, HEADS, LENGTH, DIM))
        self.register_buffer("v", torch.zeros(1, HEADS, LENGTH, DIM))
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, DIM, 2) / DIM))

    def turn(self, x: Tensor, pos: Tensor) -> Tensor:
        angles = pos[:, None] * self.frequencies
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, -1, 3, HEADS, DIM).permute(2, 0, 3, 1, 4)
        self.k.index_copy_(2, pos, self.turn(k, pos))
        self.v.index_copy_(2, pos, v)
        seen = torch.arange(LENGTH, device=x.device) <= pos[:, None]
        return torch.ops.mylib.blend(self.turn(q, pos), self.k, self.v, seen, 2.0, self.power)


@torch.no_grad()
def decode(model: Model, backend=None, steps: int = 40) -> Tensor:
    """``steps`` tokens one by one from an empty cache; with a backend, compiled with it."""
    model.k.zero_(), model.v.zero_()
    torch._dynamo.reset()
    step = model if backend is None else torch.compile(model, backend=backend)
    tokens = torch.randn(steps, 1, 1, HEADS * DIM, generator=torch.Generator().manual_seed(0))
    return torch.stack([step(token, torch.tensor([i])) for i, token in enumerate(tokens)])


def main() -> None:
    torch.manual_seed(0)
    patterns.register("attention", "blend", "mylib.blend")(read_blend)
    for power in (1, 2):
        backend = fasa_backend("all", n_fac=8, n_sink=1, n_recent=2, inner="eager")
        decode(Model(power), backend)
        print(f"power {power}:\n{backend.explain()}\n")


if __name__ == "__main__":
    main()
