"""A model of one's own, from zero to sparse. Nothing here imports transformers, and nothing is registered anywhere.

What the backend needs to see is ordinary PyTorch: a rotation of queries and keys, a cache that the new key is written into, a softmax
over the scores. It follows the values through the graph and proves the rotation by running it.

    python examples/custom_model.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasa_compile import calibrate, fasa_backend

WIDTH, HEADS, KV_HEADS, DIM, VOCAB, LENGTH = 64, 4, 2, 16, 128, 512


class Attention(nn.Module):
    """Grouped-query attention with a rotary embedding and a cache of LENGTH tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, DIM, 2) / DIM))
        self.register_buffer("k", torch.zeros(1, KV_HEADS, LENGTH, DIM))
        self.register_buffer("v", torch.zeros(1, KV_HEADS, LENGTH, DIM))

    def turn(self, x: Tensor, pos: Tensor) -> Tensor:
        angles = pos[:, None] * self.frequencies  # [T, DIM / 2]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        B, T, _ = x.shape
        heads = self.qkv(x).view(B, T, HEADS + 2 * KV_HEADS, DIM).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        self.k.index_copy_(2, pos, self.turn(k, pos))
        self.v.index_copy_(2, pos, v)
        seen = torch.arange(LENGTH, device=x.device) <= pos[:, None]  # [T, LENGTH]
        y = F.scaled_dot_product_attention(self.turn(q, pos), self.k, self.v, attn_mask=seen, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class Model(nn.Module):
    """``model(ids [1, T], pos [T]) -> logits [1, T, VOCAB]``."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, pos: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(F.rms_norm(x, (WIDTH,)), pos)
        return self.head(x)


@torch.no_grad()
def decode(model: Model, step: Callable[[Tensor, Tensor], Tensor], ids: Tensor, steps: int) -> Tensor:
    """Prefill with the model as it is, then ``steps`` likeliest tokens one by one by ``step``: int64 ``[steps]``."""
    n = ids.shape[1]
    token = model(ids, torch.arange(n))[:, -1:].argmax(-1)
    out = []
    for i in range(steps):
        out.append(token)
        token = step(token, torch.tensor([n + i]))[:, -1:].argmax(-1)
    return torch.cat(out, dim=1)[0]


def main(arguments: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=300, help="length of the prompt")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--n-fac", type=int, default=64)
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Model().eval().requires_grad_(False)
    ids = torch.randint(0, VOCAB, (1, args.tokens))

    # Calibration calls model(ids) by default; this one takes positions too.
    profile = calibrate(model, ids, forward=lambda m, x: m(x, torch.arange(x.shape[1])), progress=False)

    backend = fasa_backend(profile, n_fac=args.n_fac, inner=args.inner)
    sparse = decode(model, torch.compile(model, backend=backend), ids, args.steps)
    dense = decode(model, model, ids, args.steps)
    print(backend.explain())
    print(f"{int((sparse == dense).sum())} of {args.steps} tokens are those of dense attention")
    return backend.explain()


if __name__ == "__main__":
    main()
