"""Checks of a model of one's own, in a test of three lines.

``Own`` stands for a model that you wrote: it keeps its cache in buffers, and takes token ids and the position of the first. How to
run it is what ``OwnDriver`` says; a transformers model needs no driver.

    pytest examples/correctness_in_ci.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasa_compile.testing import Driver, check_model

HEADS, KV_HEADS, DIM, LENGTH, VOCABULARY = 4, 2, 16, 64, 50


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, HEADS * DIM, bias=False)
        self.register_buffer("k", torch.zeros(1, KV_HEADS, LENGTH, DIM))
        self.register_buffer("v", torch.zeros(1, KV_HEADS, LENGTH, DIM))
        self.register_buffer("frequencies", 100.0 ** (-torch.arange(0, DIM, 2) / DIM))

    def turn(self, x: Tensor, pos: Tensor) -> Tensor:
        angle = pos[:, None] * self.frequencies
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        B, T, _ = x.shape
        heads = self.qkv(x).view(B, T, -1, DIM).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        self.k.index_copy_(2, pos, self.turn(k, pos))
        self.v.index_copy_(2, pos, v)
        seen = torch.arange(LENGTH) <= pos[:, None]
        y = F.scaled_dot_product_attention(self.turn(q, pos), self.k, self.v, attn_mask=seen, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class Own(nn.Module):
    """ids [1, T], pos int64 [T] -> logits [1, T, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HEADS * DIM)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(HEADS * DIM, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, pos: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, pos)
        return self.head(x)


class OwnDriver(Driver):
    vocabulary, length = VOCABULARY, LENGTH

    def new_cache(self, model, kind, rows):
        for layer in model.layers:
            layer.k, layer.v = torch.zeros_like(layer.k), torch.zeros_like(layer.v)

    def call(self, step, ids, start, cache, keep=None):
        return step(ids.clone(), torch.arange(start, start + ids.shape[1]))

    def keys_values(self, model, cache):  # for the checks that write into a cache; may be left out
        return [(layer.k, layer.v) for layer in model.layers]


def make() -> Own:
    torch.manual_seed(0)
    return Own()


def test_own() -> None:
    check_model(make, driver=OwnDriver())


if __name__ == "__main__":
    for check, outcome in check_model(make, driver=OwnDriver()).items():
        print(f"{check}: {outcome}")
