"""Attention: SDPA and written out. The mask, scale, soft cap, sinks and layouts that a site tells are checked in numbers."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import (
    HKV,
    HQ,
    WIDTH,
    Attention,
    B,
    D,
    S,
    Static,
    check_numbers,
    decode,
    half_split,
    prefill,
    repeated,
    run_matched,
    sdpa,
    visible,
)
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention, softmax

from fasa_compile.capture import capture
from fasa_compile.match import match
from fasa_compile.sites import AttentionSite

NEGATIVE = torch.finfo(torch.float32).min


def additive(pos, length):
    return torch.where(visible(pos, length), 0.0, NEGATIVE)


# ---- SDPA -------------------------------------------------------------------------------------------------------------


def no_mask(q, k, v, pos):
    return scaled_dot_product_attention(q, repeated(k), repeated(v))


def additive_mask(q, k, v, pos):
    return scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=additive(pos, S))


def mask_of_two_dims(q, k, v, pos):
    return scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=visible(pos, S)[0, 0])


def mask_per_head(q, k, v, pos):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    return scaled_dot_product_attention(
        q, repeated(k), repeated(v), attn_mask=additive(pos, S) - slopes * torch.arange(S)
    )


def grouped(q, k, v, pos):
    return scaled_dot_product_attention(q, k, v, attn_mask=visible(pos, S), enable_gqa=True)


def repeat_interleaved(q, k, v, pos):
    k, v = k.repeat_interleave(HQ // HKV, 1), v.repeat_interleave(HQ // HKV, 1)
    return scaled_dot_product_attention(q, k, v, attn_mask=visible(pos, S))


def tiled(q, k, v, pos):
    """Query head h reads KV head h % HKV."""
    k, v = k.repeat(1, HQ // HKV, 1, 1), v.repeat(1, HQ // HKV, 1, 1)
    return scaled_dot_product_attention(q, k, v, attn_mask=visible(pos, S))


@pytest.mark.parametrize(
    "attend, mask_kind",
    [
        (sdpa, "bool"),
        (no_mask, "none"),
        (additive_mask, "additive"),
        (mask_of_two_dims, "bool"),
        (mask_per_head, "additive"),
        (grouped, "bool"),
        (repeat_interleaved, "bool"),
        (tiled, "bool"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_sdpa(attend, mask_kind):
    matched = decode(Attention(half_split, Static(), attend))
    assert (matched.site.anchor, matched.site.mask_kind) == ("sdpa", mask_kind)
    assert matched.site.shape[:3] == (B, HQ, HKV)
    assert matched.site.scale == pytest.approx(D**-0.5)
    check_numbers(matched)


def test_one_head_of_keys_is_broadcast():
    def attend(q, k, v, pos):
        return scaled_dot_product_attention(q, k, v, attn_mask=visible(pos, S))

    matched = decode(Attention(half_split, Static(1), attend, kv_heads=1))
    assert matched.site.shape[:3] == (B, HQ, 1)
    check_numbers(matched)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_scale_is_the_graphs(scale):
    def attend(q, k, v, pos):
        return scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=visible(pos, S), scale=scale)

    matched = decode(Attention(half_split, Static(), attend))
    assert matched.site.scale == scale
    check_numbers(matched)


def test_causal_with_one_query_is_refused():
    def attend(q, k, v, pos):
        return scaled_dot_product_attention(q, repeated(k), repeated(v), is_causal=True)

    assert decode(Attention(half_split, Static(), attend)).refused.reason == "causal-single-query"


def test_dropout_is_refused():
    def attend(q, k, v, pos):
        return scaled_dot_product_attention(q, repeated(k), repeated(v), dropout_p=0.1)

    assert decode(Attention(half_split, Static(), attend)).refused.reason == "dropout"


def gathered(x):
    return x[:, torch.tensor([0, 1, 1, 0])]


def joined(x):
    return torch.cat([x, x.flip(1)], 1)


@pytest.mark.parametrize("heads", [gathered, joined])
def test_heads_out_of_order_are_heads_of_their_own(heads):
    """Query heads 0 and 3 read KV head 0, heads 1 and 2 read KV head 1: no groups, but four heads made at every step."""

    def attend(q, k, v, pos):
        return scaled_dot_product_attention(q, heads(k), heads(v), attn_mask=visible(pos, S))

    matched = decode(Attention(half_split, Static(), attend))
    assert (matched.site.cache.write, matched.site.shape[:3]) == ("computed", (B, HQ, HQ))
    check_numbers(matched)


def test_a_head_that_is_not_rotated_is_refused():
    def attend(q, k, v, pos):
        plain = torch.roll(k[:, :1], 3, 2)
        return scaled_dot_product_attention(
            q, torch.cat([k, plain, k[:, 1:]], 1), repeated(v), attn_mask=visible(pos, S)
        )

    refused = decode(Attention(half_split, Static(), attend)).refused
    assert refused.reason == "rope-mismatch"


def test_keys_reversed_along_the_head_are_refused():
    """A view chain that mixes up the dims of a head is no layout of a cache."""

    def attend(q, k, v, pos):
        return scaled_dot_product_attention(q, repeated(k.flip(-1)), repeated(v), attn_mask=visible(pos, S))

    refused = decode(Attention(half_split, Static(), attend)).refused
    assert refused.reason == "rope-mismatch"


# ---- written out ------------------------------------------------------------------------------------------------------


def matmul_softmax(q, k, v, pos):
    scores = q @ repeated(k).transpose(2, 3) * D**-0.5 + additive(pos, S)
    return softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ repeated(v)


def divided_and_filled(q, k, v, pos):
    scores = torch.matmul(q, repeated(k).mT) / math.sqrt(D)
    weights = scores.masked_fill(~visible(pos, S), float("-inf")).softmax(-1)
    return dropout(weights, 0.1, training=False) @ repeated(v)


def chosen_by_where(q, k, v, pos):
    scores = q @ repeated(k).mT / D**0.5
    return torch.where(visible(pos, S), scores, torch.tensor(NEGATIVE)).softmax(-1) @ repeated(v)


def soft_capped(q, k, v, pos):
    scores = q @ repeated(k).mT * 0.2
    scores = torch.tanh(scores / 30.0) * 30.0
    return softmax(scores + additive(pos, S), -1) @ repeated(v)


def minus_the_maximum(q, k, v, pos):
    scores = q @ repeated(k).mT * D**-0.5 + additive(pos, S)
    return softmax(scores - scores.amax(-1, keepdim=True), -1) @ repeated(v)


def no_repeat_five_dims(q, k, v, pos):
    q = q.reshape(B, HKV, HQ // HKV, -1, D)
    scores = (q * D**-0.5) @ k.unsqueeze(2).transpose(-1, -2)
    scores = scores.masked_fill(~visible(pos, S)[0, 0], float("-inf"))
    return (scores.softmax(-1) @ v.unsqueeze(2)).reshape(B, HQ, -1, D)


def einsum_heads_first(q, k, v, pos):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, repeated(k)) * D**-0.5 + additive(pos, S)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), repeated(v))


def einsum_grouped_tokens_first(q, k, v, pos):
    q = q.transpose(1, 2).reshape(B, -1, HKV, HQ // HKV, D)
    scores = torch.einsum("btkgd,bskd->bkgts", q, k.transpose(1, 2)) / D**0.5
    scores = scores + torch.where(torch.arange(S) <= pos[:, None], 0.0, -1e9)
    return torch.einsum("bkgts,bskd->btkgd", scores.softmax(-1), v.transpose(1, 2)).flatten(2, 3).transpose(1, 2)


def einsum_one_head_of_keys(q, k, v, pos):
    scores = torch.einsum("bhtd,bsd->bhts", q, k[:, 0]) * D**-0.5 + additive(pos, S)
    return torch.einsum("bhts,bsd->bhtd", scores.softmax(-1), v[:, 0])


def batched_product(q, k, v, pos):
    t = q.shape[2]
    q, k, v = q.reshape(B * HQ, t, D), repeated(k).reshape(B * HQ, S, D), repeated(v).reshape(B * HQ, S, D)
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, HQ, t, S) * D**-0.5 + additive(pos, S)
    return torch.bmm(scores.softmax(-1).view(B * HQ, t, S), v).view(B, HQ, t, D)


def scaled_by_baddbmm(q, k, v, pos):
    t = q.shape[2]
    q, k = q.reshape(B * HQ, t, D), repeated(k).reshape(B * HQ, S, D)
    scores = torch.baddbmm(torch.zeros(B * HQ, t, S), q, k.transpose(1, 2), beta=1.0, alpha=0.3)
    return (scores.view(B, HQ, t, S) + additive(pos, S)).softmax(-1) @ repeated(v)


WRITTEN = [
    (matmul_softmax, D**-0.5, "additive"),
    (divided_and_filled, D**-0.5, "bool"),
    (chosen_by_where, D**-0.5, "bool"),
    (soft_capped, 0.2, "additive"),
    (minus_the_maximum, D**-0.5, "additive"),
    (no_repeat_five_dims, 1.0, "bool"),
    (einsum_heads_first, D**-0.5, "additive"),
    (einsum_grouped_tokens_first, D**-0.5, "additive"),
    (batched_product, D**-0.5, "additive"),
    (scaled_by_baddbmm, 0.3, "additive"),
]


@pytest.mark.parametrize("run", [decode, prefill], ids=["decode", "prefill"])
@pytest.mark.parametrize("attend, scale, mask_kind", WRITTEN, ids=lambda x: getattr(x, "__name__", ""))
def test_written_out(attend, scale, mask_kind, run):
    matched = run(Attention(half_split, Static(), attend))
    assert (matched.site.anchor, matched.site.mask_kind) == ("written-out", mask_kind)
    assert matched.site.scale == pytest.approx(scale)
    assert matched.site.softcap == (30.0 if attend is soft_capped else 0.0)
    assert matched.site.shape[:3] == (B, HQ, HKV)
    check_numbers(matched)


def test_one_head_of_keys_by_einsum():
    matched = decode(Attention(half_split, Static(1), einsum_one_head_of_keys, kv_heads=1))
    assert matched.site.shape[:3] == (B, HQ, 1)
    check_numbers(matched)


class WithSinks(nn.Module):
    def __init__(self, groups: bool):
        super().__init__()
        self.sinks, self.groups = nn.Parameter(torch.randn(HQ)), groups

    def forward(self, q, k, v, pos):
        if not self.groups:
            scores = q @ repeated(k).mT * D**-0.5 + additive(pos, S)
            scores = torch.cat([scores, self.sinks.reshape(1, -1, 1, 1).expand(B, -1, q.shape[2], -1)], -1)
            scores = scores - scores.max(-1, keepdim=True).values
            return softmax(scores, -1)[..., :-1] @ repeated(v)
        q = q.reshape(B, HKV, HQ // HKV, -1, D)
        scores = q @ k.unsqueeze(2).mT * D**-0.5 + additive(pos, S)[:, :, None]
        column = self.sinks.view(1, HKV, HQ // HKV, 1, 1).expand(B, -1, -1, q.shape[3], -1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :S]
        return (weights @ v.unsqueeze(2)).reshape(B, HQ, -1, D)


@pytest.mark.parametrize("groups", [False, True])
def test_sinks(groups):
    module = Attention(half_split, Static(), WithSinks(groups))
    matched = decode(module)
    torch.testing.assert_close(matched.value(matched.site.sinks), module.attend.sinks.detach())
    check_numbers(matched)


# ---- what written-out anchors refuse, and what they do not take for an attention -----------------------------------------


def relative_positions(q, k, v, pos):
    """A sum of two products with the queries."""
    scores = q @ repeated(k).mT + (q * 2) @ repeated(k).mT
    return scores.softmax(-1) @ repeated(v)


def scaled_by_a_weight(q, k, v, pos):
    return (q @ repeated(k).mT * q.mean()).softmax(-1) @ repeated(v)


def weights_cut_short(q, k, v, pos):
    return (q @ repeated(k).mT).softmax(-1)[..., :8] @ repeated(v)[:, :, :8]


def weights_changed(q, k, v, pos):
    return ((q @ repeated(k).mT).softmax(-1) * 0.5) @ repeated(v)


def capped_after_the_mask(q, k, v, pos):
    return torch.tanh(q @ repeated(k).mT + additive(pos, S)).softmax(-1) @ repeated(v)


def scaled_after_the_mask(q, k, v, pos):
    return ((q @ repeated(k).mT + additive(pos, S)) * 0.5).softmax(-1) @ repeated(v)


def softmax_over_queries(q, k, v, pos):
    return (q @ repeated(k).mT).softmax(2) @ repeated(v)


def clamped(q, k, v, pos):
    return (q @ repeated(k).mT).clamp(max=5.0).softmax(-1) @ repeated(v)


def filled_with_little(q, k, v, pos):
    return (q @ repeated(k).mT).masked_fill(~visible(pos, S), -2.0).softmax(-1) @ repeated(v)


@pytest.mark.parametrize(
    "attend, reason",
    [
        (relative_positions, "unknown-attention"),
        (scaled_by_a_weight, "unsupported-value"),
        (weights_cut_short, "unknown-attention"),
        (weights_changed, "unknown-attention"),
        (capped_after_the_mask, "unknown-attention"),
        (scaled_after_the_mask, "unknown-attention"),
        (softmax_over_queries, "unknown-attention"),
        (clamped, "unknown-attention"),
        (filled_with_little, "unknown-mask"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_cannot_be_read_is_refused_by_name(attend, reason):
    refused = decode(Attention(half_split, Static(), attend)).refused
    assert (refused.anchor, refused.reason) == ("written-out", reason), refused
    assert refused.detail and refused.source.startswith("test_attention.py:")


class Router(nn.Module):
    """Softmaxes that are no attention: a router over experts and a mixture of their results."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, 8))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return torch.einsum("bte,bteo->bto", weights, torch.einsum("bti,eio->bteo", x, self.experts))


def test_a_router_is_no_attention():
    assert run_matched(Router(), torch.randn(B, 3, WIDTH)).sites == []


class ScaleOfTheModule(nn.Module):
    """With dynamic=True Dynamo makes a symbol of the float; the site's scale is the number, so it has to be guarded."""

    def __init__(self):
        super().__init__()
        self.scaling = 0.3

    def forward(self, q, k, v, pos):
        return softmax(q @ repeated(k).mT * self.scaling + additive(pos, S), -1) @ repeated(v)


def test_a_symbolic_scale_is_guarded():
    scales = []

    def backend(gm, example_inputs, **_):
        sites = match(capture(gm, example_inputs))
        assert all(isinstance(s, AttentionSite) for s in sites), sites
        scales.extend(s.scale for s in sites)
        return gm.forward

    torch._dynamo.reset()
    module = Attention(half_split, Static(), ScaleOfTheModule())
    compiled = torch.compile(module, backend=backend, dynamic=True)
    x, pos = torch.randn(B, 1, WIDTH), torch.tensor([9])
    with torch.no_grad():
        for scaling in (0.3, 0.3, 0.7):
            module.attend.scaling = scaling
            torch.testing.assert_close(compiled(x, pos), module(x, pos))
    assert scales == pytest.approx([0.3, 0.7])


# ---- several masks on one score -----------------------------------------------------------------------------------------


def padding(length):
    return torch.arange(length).remainder(4) != 2


def two_masks(q, k, v, pos):
    scores = q @ repeated(k).mT * D**-0.5 + additive(pos, S) + torch.linspace(0, 1, S)
    return scores.softmax(-1) @ repeated(v)


def two_added(q, k, v, pos):
    hidden = torch.where(padding(S), 0.0, NEGATIVE)
    scores = q @ repeated(k).mT * 0.5 + additive(pos, S) + hidden
    return softmax(scores, -1) @ repeated(v)


def filled_and_added(q, k, v, pos):
    scores = (q @ repeated(k).mT * 0.5).masked_fill(~padding(S), NEGATIVE) + additive(pos, S)
    return softmax(scores, -1) @ repeated(v)


def filled_twice(q, k, v, pos):
    scores = (q @ repeated(k).mT * 0.5).masked_fill(~padding(S), float("-inf"))
    return softmax(scores.masked_fill(~visible(pos, S), float("-inf")), -1) @ repeated(v)


def subtracted(q, k, v, pos):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    scores = q @ repeated(k).mT * 0.5 - slopes * (pos[-1] - torch.arange(S)).abs()
    return softmax(scores + additive(pos, S), -1) @ repeated(v)


@pytest.mark.parametrize(
    "attend, kind",
    [
        (two_masks, "additive"),
        (two_added, "additive"),
        (filled_and_added, "additive"),
        (filled_twice, "bool"),
        (subtracted, "additive"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_several_masks_are_one(attend, kind):
    matched = decode(Attention(half_split, Static(), attend))
    assert matched.site.mask_kind == kind
    check_numbers(matched)
