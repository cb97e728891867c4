"""Decoders written as people write them, with nothing from a model library: what is rewritten, what is left, and the logits.

Two more are in ``tests/end_to_end/models.py``: gpt-fast's (fused projection, interleaved, slots by position) and GPT-NeoX's (partial,
grown by concatenation). The table there is [LENGTH, ...]; here too, a static cache has LENGTH slots.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasa_compile import fasa_backend
from fasa_compile.profiles import Budget
from fasa_compile.testing.plain import PlainFasa

WIDTH, VOCAB, LENGTH, H, HKV, D = 64, 96, 48, 4, 2, 16
PROMPT, STEPS = 14, 3
FREQUENCY = 500.0 ** (-torch.arange(D // 2) / (D // 2))


class Projections(nn.Module):
    """Separate projections, and two buffers of the layout a subclass asks for."""

    shape = (1, HKV, LENGTH, D)
    heads = HKV

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(WIDTH, H * D)
        self.to_k = nn.Linear(WIDTH, self.heads * D)
        self.to_v = nn.Linear(WIDTH, self.heads * D)
        self.out = nn.Linear(H * D, WIDTH)
        self.register_buffer("past_k", torch.zeros(self.shape))
        self.register_buffer("past_v", torch.zeros(self.shape))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, heads, D] each."""
        b, t, _ = x.shape
        return (
            self.to_q(x).view(b, t, H, D),
            self.to_k(x).view(b, t, self.heads, D),
            self.to_v(x).view(b, t, self.heads, D),
        )


class ComplexNumbers(Projections):
    """Meta's Llama: complex factors, tokens ahead of heads, rows written and read by a Python start position."""

    shape = (1, LENGTH, HKV, D)

    def forward(self, x: Tensor, pos: Tensor, start: int) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.project(x)
        angle = pos[:, None] * FREQUENCY
        factor = torch.polar(torch.ones_like(angle), angle)[:, None]

        def turn(y: Tensor) -> Tensor:
            return torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * factor).flatten(-2)

        self.past_k[:b, start : start + t] = turn(k)
        self.past_v[:b, start : start + t] = v
        keys, values = (c[:b, : start + t].repeat_interleave(H // HKV, 2) for c in (self.past_k, self.past_v))
        scores = turn(q).transpose(1, 2) @ keys.permute(0, 2, 3, 1) / math.sqrt(D)
        if t > 1:
            scores = scores + torch.full((t, t), -torch.inf).triu(1)
        y = scores.float().softmax(-1) @ values.transpose(1, 2)
        return self.out(y.transpose(1, 2).flatten(2))


class GroupedProducts(Projections):
    """Written out: groups as an axis of their own, scaled queries, index_copy_, masked_fill, softmax in float32."""

    def forward(self, x: Tensor, pos: Tensor, start: int) -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in self.project(x))
        angle = pos[:, None] * FREQUENCY
        cos, sin = angle.cos(), angle.sin()

        def turn(y: Tensor) -> Tensor:
            low, high = y.split(D // 2, -1)
            return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

        self.past_k.index_copy_(2, pos, turn(k))
        self.past_v.index_copy_(2, pos, v)
        grouped = (turn(q) * D**-0.5).unflatten(1, (HKV, H // HKV))
        scores = grouped @ self.past_k[:, :, None].mT
        scores = scores.masked_fill(torch.arange(LENGTH) > pos[:, None], -torch.inf)
        weights = torch.softmax(scores, -1, dtype=torch.float32)
        return self.out((weights @ self.past_v[:, :, None]).flatten(1, 2).transpose(1, 2).flatten(2))


class Einsums(Projections):
    """Einsum for tables, scores and values; tokens ahead of heads; the two halves as an axis; an additive mask."""

    shape = (1, LENGTH, HKV, D)

    def forward(self, x: Tensor, pos: Tensor, start: int) -> Tensor:
        q, k, v = self.project(x)
        angle = torch.einsum("t,f->tf", pos.float(), FREQUENCY)[:, None]

        def turn(y: Tensor) -> Tensor:
            low, high = y.unflatten(-1, (2, D // 2)).unbind(-2)
            return torch.stack(
                [low * angle.cos() - high * angle.sin(), low * angle.sin() + high * angle.cos()], -2
            ).flatten(-2)

        self.past_k.index_copy_(1, pos, turn(k))
        self.past_v.index_copy_(1, pos, v)
        scores = torch.einsum("btkgd,bskd->bkgts", turn(q).unflatten(2, (HKV, H // HKV)), self.past_k) / D**0.5
        scores = scores + torch.where(torch.arange(LENGTH) <= pos[:, None], 0.0, -torch.inf)
        y = torch.einsum("bkgts,bskd->btkgd", scores.softmax(-1), self.past_v)
        return self.out(y.flatten(2))


class TablesOutsideAutocast(Projections):
    """Tables made with autocast turned off for another device, as many embeddings do: that is not autocast."""

    def forward(self, x: Tensor, pos: Tensor, start: int) -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in self.project(x))
        with torch.autocast("cuda", enabled=False):
            angle = (pos[:, None] * FREQUENCY).repeat_interleave(2, -1)
            cos, sin = angle.cos(), angle.sin()

        def turn(y: Tensor) -> Tensor:
            return y * cos + torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2) * sin

        self.past_k[:, :, pos] = turn(k)
        self.past_v[:, :, pos] = v
        mask = torch.arange(LENGTH) <= pos[:, None]
        y = F.scaled_dot_product_attention(turn(q), self.past_k, self.past_v, mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class LinearBias(Projections):
    """ALiBi: a bias by distance, no rotation."""

    heads, shape = H, (1, H, LENGTH, D)

    def bias(self, pos: Tensor) -> Tensor:
        distance = torch.arange(LENGTH) - pos[:, None]
        slopes = 2.0 ** -(2.0 * torch.arange(H) + 2)
        return (slopes[:, None, None] * distance).masked_fill(distance > 0, -torch.inf)[None]

    def forward(self, x: Tensor, pos: Tensor, start: int) -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in self.project(x))
        self.past_k.index_copy_(2, pos, k)
        self.past_v.index_copy_(2, pos, v)
        y = F.scaled_dot_product_attention(q, self.past_k, self.past_v, attn_mask=self.bias(pos))
        return self.out(y.transpose(1, 2).flatten(2))


class Decoy(LinearBias):
    """Cached attention without rotation, beside the arithmetic of one on the residual stream."""

    def bias(self, pos: Tensor) -> Tensor:
        return torch.arange(LENGTH) <= pos[:, None]

    def forward(self, x: Tensor, pos: Tensor, start: int) -> Tensor:
        angle = pos[:, None] * 500.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2))
        low, high = x.chunk(2, -1)
        turned = torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], -1)
        return super().forward(x, pos, start) + 0.1 * turned


class Encoder(Projections):
    """Rotated, in both directions, no cache."""

    def forward(self, x: Tensor, pos: Tensor, start: int) -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in self.project(x))
        angle = (pos[:, None] * FREQUENCY).repeat(1, 2)

        def turn(y: Tensor) -> Tensor:
            return y * angle.cos() + torch.cat([-y[..., D // 2 :], y[..., : D // 2]], -1) * angle.sin()

        y = F.scaled_dot_product_attention(turn(q), turn(k), v, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """``model(ids [1, T], pos [T], start) -> logits [1, T, V]``, two blocks."""

    def __init__(self, kind: type[Projections]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        for block in self.blocks:
            block.to_q.weight.data *= 6
            block.to_k.weight.data *= 6

    def forward(self, ids: Tensor, pos: Tensor, start: int) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(self.norm(x), pos, start)
        return self.head(self.norm(x))


def run(model: Decoder, step: Any, ids: Tensor, each: Any = None) -> Tensor:
    for block in model.blocks:
        block.past_k.zero_()
        block.past_v.zero_()
    model(ids[:, :PROMPT], torch.arange(PROMPT), 0)
    out = []
    for i in range(PROMPT, PROMPT + STEPS):
        if each is not None:
            each()
        out.append(step(ids[:, i : i + 1].clone(), torch.tensor([i]), i)[:, -1])
    return torch.stack(out, 1)


@pytest.mark.parametrize(
    "kind", [ComplexNumbers, GroupedProducts, Einsums, TablesOutsideAutocast], ids=lambda k: k.__name__
)
@torch.no_grad()
def test_rewritten(kind: type[Projections]) -> None:
    model = Decoder(kind).eval()
    ids = torch.randint(0, VOCAB, (1, PROMPT + STEPS))
    dense = run(model, model, ids)
    for n_fac in (24, 6):
        budget = Budget(n_fac=n_fac, n_sink=1, n_recent=2)
        torch._dynamo.reset()
        backend = fasa_backend("all", n_fac=n_fac, n_sink=1, n_recent=2, inner="eager", strict=True)
        got = run(model, torch.compile(model, backend=backend, dynamic=kind is ComplexNumbers), ids)
        assert all(d.action == "sparse" for g in backend.graphs for d in g.decisions), str(backend.explain())
        assert len(backend.graphs[0].decisions) == 2
        if n_fac >= PROMPT + STEPS:
            torch.testing.assert_close(got, dense, atol=1e-4, rtol=1e-4)
            continue
        entries = {(block, 1): (None, H, HKV, 0.0) for block in model.blocks}
        reference = PlainFasa(model, entries, None, budget)
        with reference.following():
            want = run(model, model, ids, each=reference.start)
        assert reference.applied == 2
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        assert (got - dense).abs().max() > 1e-3  # the budget was small enough to matter


@pytest.mark.parametrize("kind, reason", [(LinearBias, "no-rope"), (Decoy, "no-rope"), (Encoder, "no-cache")])
@torch.no_grad()
def test_left_alone(kind: type[Projections], reason: str) -> None:
    model = Decoder(kind).eval()
    ids = torch.randint(0, VOCAB, (1, PROMPT + STEPS))
    dense = run(model, model, ids)
    backend = fasa_backend("all", n_fac=6, n_sink=1, n_recent=2, inner="eager")
    with pytest.warns(Warning) if reason != "no-cache" else pytest.MonkeyPatch.context():
        got = run(model, torch.compile(model, backend=backend), ids)
    decisions = [d for g in backend.graphs for d in g.decisions]
    assert decisions and {(d.action, d.reason) for d in decisions} == {("dense", reason)}
    torch.testing.assert_close(got, dense, atol=1e-5, rtol=1e-5)
