"""Cache writes: kind, buffer, slots, and the canonical views of keys and values, recomputed in numbers."""

from __future__ import annotations

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
    angles,
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
from torch.nn.functional import scaled_dot_product_attention


class IndexPut(Static):
    def forward(self, k, v, pos):
        self.keys[:, :, pos] = k
        self.values[:, :, pos] = v
        return self.keys, self.values


class Scatter(Static):
    def forward(self, k, v, pos):
        index = pos[:, None].expand_as(k)
        self.keys.scatter_(2, index, k)
        self.values.scatter_(2, index, v)
        return self.keys, self.values


class Int32Slots(IndexPut):
    def forward(self, k, v, pos):
        return super().forward(k, v, pos.to(torch.int32))


class TokensFirst(nn.Module):
    """[B, S, HKV, D], as the projections leave them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.randn(B, S, HKV, D))
        self.register_buffer("values", torch.randn(B, S, HKV, D))

    def forward(self, k, v, pos):
        self.keys.index_copy_(1, pos, k.transpose(1, 2))
        self.values.index_copy_(1, pos, v.transpose(1, 2))
        return self.keys.transpose(1, 2), self.values.transpose(1, 2)


class HeadsFused(nn.Module):
    """[B, S, HKV * D]"""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.randn(B, S, HKV * D))
        self.register_buffer("values", torch.randn(B, S, HKV * D))

    def forward(self, k, v, pos):
        self.keys.index_copy_(1, pos, k.transpose(1, 2).flatten(2))
        self.values.index_copy_(1, pos, v.transpose(1, 2).flatten(2))
        return self.keys.view(B, S, HKV, D).transpose(1, 2), self.values.view(B, S, HKV, D).transpose(1, 2)


class OneBuffer(nn.Module):
    """Keys and values in one buffer [2, B, HKV, S, D], written through views of it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("both", torch.randn(2, B, HKV, S, D))

    def forward(self, k, v, pos):
        self.both[1].index_copy_(2, pos, v)
        self.both[0].index_copy_(2, pos, k)
        return self.both[0], self.both[1]


class SideBySide(nn.Module):
    """Keys and values of a token side by side, [B, HKV, S, 2 * D]."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.randn(B, HKV, S, 2 * D))

    def forward(self, k, v, pos):
        self.rows.index_copy_(2, pos, torch.cat([k, v], -1))
        return self.rows[..., :D], self.rows[..., D:]


@pytest.mark.parametrize(
    "cache, write, buffer",
    [
        (Static, "index_copy", "keys"),
        (IndexPut, "index_put", "keys"),
        (Scatter, "scatter", "keys"),
        (Int32Slots, "index_put", "keys"),
        (TokensFirst, "index_copy", "keys"),
        (HeadsFused, "index_copy", "keys"),
        (OneBuffer, "index_copy", "both"),
        (SideBySide, "index_copy", "rows"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_static_with_slots(cache, write, buffer):
    matched = decode(Attention(half_split, cache(), sdpa))
    site = matched.site
    assert (site.cache.kind, site.cache.write) == ("static", write)
    assert site.shape == (B, HQ, HKV, 1, S, D, D)
    placeholders = matched.shadow.dynamo.graph.find_nodes(op="placeholder")
    assert placeholders[site.cache.k_input].name.endswith(f"{buffer}_")
    assert site.cache.slots is not None and matched.value(site.cache.slots).tolist() in ([9], [[9]])
    assert not site.cache.rewritten_later
    check_numbers(matched)


class SliceAssignment(Static):
    def forward(self, k, v, pos):
        self.keys[:, :, 9 : 9 + k.shape[2]] = k
        self.values[:, :, 9 : 9 + k.shape[2]] = v
        return self.keys[:, :, :10], self.values[:, :, :10]


class SelectAssignment(Static):
    def forward(self, k, v, pos):
        self.keys[:, :, 9] = k[:, :, 0]
        self.values[:, :, 9] = v[:, :, 0]
        return self.keys, self.values


class Rolled(Static):
    """A sliding window: everything moves up by one, the new token is the last."""

    def forward(self, k, v, pos):
        last = torch.tensor([-1])
        keys, values = self.keys.roll(-1, 2), self.values.roll(-1, 2)
        keys[:, :, last], values[:, :, last] = k, v
        self.keys.copy_(keys)
        self.values.copy_(values)
        return self.keys, self.values


class WhereSlot(Static):
    def forward(self, k, v, pos):
        here = (torch.arange(S) == pos)[None, None, :, None]
        self.keys.copy_(torch.where(here, k, self.keys))
        self.values.copy_(torch.where(here, v, self.values))
        return self.keys, self.values


def all_keys(q, k, v, pos):
    return scaled_dot_product_attention(q, repeated(k), repeated(v))


@pytest.mark.parametrize(
    "cache, write, length",
    [
        (SliceAssignment, "slice_scatter", 10),
        (SelectAssignment, "select_scatter", S),
        (Rolled, "index_put", S),
        (WhereSlot, "where", S),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_static_without_slots(cache, write, length):
    matched = decode(Attention(half_split, cache(), all_keys))
    site = matched.site
    assert (site.cache.kind, site.cache.write, site.cache.slots) == ("static", write, None)
    assert site.cache.k_input is not None and site.shape[4] == length
    check_numbers(matched)


class RowPerSequence(nn.Module):
    """Every sequence at a position of its own: keys[batch, :, pos] = k."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch
        self.register_buffer("keys", torch.randn(batch, HKV, S, D))
        self.register_buffer("values", torch.randn(batch, HKV, S, D))
        self.q, self.kv = nn.Linear(WIDTH, HQ * D), nn.Linear(WIDTH, 2 * HKV * D)

    def forward(self, x, pos):
        q = self.q(x).view(self.batch, 1, HQ, D).transpose(1, 2)
        k, v = self.kv(x).view(self.batch, 1, 2 * HKV, D).transpose(1, 2).chunk(2, 1)
        q, k = half_split(
            q[:, :, 0].transpose(0, 1), k[:, :, 0].transpose(0, 1), pos
        )  # [H, B, D]: positions are per sequence
        q, k = q.transpose(0, 1)[:, :, None], k.transpose(0, 1)
        every = torch.arange(self.batch)
        self.keys[every, :, pos] = k
        self.values[every, :, pos] = v[:, :, 0]
        mask = (torch.arange(S) <= pos[:, None])[:, None, None]
        return scaled_dot_product_attention(q, repeated_batch(self.keys), repeated_batch(self.values), attn_mask=mask)


def repeated_batch(x):
    return x.repeat_interleave(HQ // HKV, 1)


def test_slots_of_a_batch():
    matched = run_matched(RowPerSequence(3), torch.randn(3, 1, WIDTH), torch.tensor([9, 4, 11]))
    assert matched.site.cache.write == "index_put"
    assert matched.value(matched.site.cache.slots).tolist() == [[9], [4], [11]]
    assert matched.site.mask_kind == "bool"
    check_numbers(matched)


class Grown(nn.Module):
    """A new tensor each step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.randn(B, HKV, 9, D))
        self.register_buffer("values", torch.randn(B, HKV, 9, D))

    def forward(self, k, v, pos):
        return torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)


def grouped(q, k, v, pos):
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("attend", [grouped, all_keys])
@pytest.mark.parametrize("dynamic", [False, True])
def test_dynamic(attend, dynamic):
    matched = decode(Attention(half_split, Grown(), attend), dynamic=dynamic)
    site = matched.site
    assert (site.cache.kind, site.cache.write, site.cache.k_input, site.cache.slots) == ("dynamic", "cat", None, None)
    assert site.k.steps == () and site.v.steps == ()
    check_numbers(matched)


class PastGiven(nn.Module):
    """The keys so far are inputs, as a cache object's tensors are: their length is a symbol under dynamic=True."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x, keys, values):
        self.attention.cache = lambda k, v, pos: (torch.cat([keys, k], 2), torch.cat([values, v], 2))
        return self.attention(x, torch.arange(x.shape[1]) + keys.shape[2])


def test_length_is_a_symbol():
    attention = Attention(half_split, nn.Identity(), grouped)
    del attention.cache
    past = torch.randn(2, B, HKV, 9, D)
    matched = run_matched(
        PastGiven(attention), torch.randn(B, 1, WIDTH), past[0].clone(), past[1].clone(), dynamic=True
    )
    length = matched.site.shape[4]
    assert isinstance(length, torch.SymInt) and length.node.hint == 10
    assert not any(
        isinstance(a, torch.SymInt) for _, args in (*matched.site.k.steps, *matched.site.v.steps) for a in args
    )
    check_numbers(matched)


class NoCache(nn.Module):
    def forward(self, k, v, pos):
        return k, v


def test_no_cache():
    def attend(q, k, v, pos):
        return scaled_dot_product_attention(q, repeated(k), repeated(v), is_causal=True)

    matched = prefill(Attention(half_split, NoCache(), attend))
    assert matched.site.cache.kind == "none" and matched.site.is_causal
    assert matched.site.shape == (B, HQ, HKV, 6, 6, D, D)
    check_numbers(matched)


def test_prefill_into_a_static_cache():
    matched = prefill(Attention(half_split, Static(), sdpa))
    assert matched.site.cache.kind == "static"
    assert matched.value(matched.site.cache.slots).tolist() == list(range(6))
    check_numbers(matched)


class AttendsThenClears(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(half_split, Static(), sdpa)

    def forward(self, x, pos):
        out = self.attention(x, pos)
        self.attention.cache.keys.index_fill_(2, pos, 0.0)
        return out


def test_buffer_written_again_after_it_was_read():
    matched = decode(AttendsThenClears())
    assert matched.site.cache.rewritten_later
    check_numbers(matched)


class TwoReaders(nn.Module):
    """Two attentions on one K: the second one's queries come from a projection of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.other = Attention(half_split, Static(), sdpa), nn.Linear(WIDTH, HQ * D)

    def forward(self, x, pos):
        out = self.first(x, pos)
        q = self.other(x).view(B, 1, HQ, D).transpose(1, 2)
        q, _ = half_split(q, q, pos)
        return out, sdpa(q, self.first.cache.keys, self.first.cache.values, pos)


def test_two_attentions_on_one_cache():
    matched = decode(TwoReaders())
    assert [s.index for s in matched.sites] == [0, 1]
    assert matched.sites[0].cache == matched.sites[1].cache
    for site in matched.sites:
        check_numbers(matched, site)


class Queries(nn.Module):
    def __init__(self, rope):
        super().__init__()
        self.q, self.rope = nn.Linear(WIDTH, HQ * D), rope

    def forward(self, x, pos, keys, values):
        q = self.q(x).view(B, 1, HQ, D).transpose(1, 2)
        return sdpa(self.rope(q, q, pos)[0], keys, values, pos)


@pytest.mark.parametrize(
    "rope, reason",
    [(half_split, "incomplete-pattern"), (lambda q, k, pos: (q, k), "cross-attention")],
    ids=["rope", "none"],
)
def test_keys_that_arrive_ready_made(rope, reason):
    past = torch.randn(2, B, HKV, S, D)
    matched = run_matched(Queries(rope), torch.randn(B, 1, WIDTH), torch.tensor([9]), past[0], past[1])
    assert matched.refused.reason == reason


class CrossAttention(nn.Module):
    """Keys made in this graph, but of other tokens."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, HQ * D), nn.Linear(WIDTH, HQ * D)

    def forward(self, x, other, pos):
        q = self.q(x).view(B, 1, HQ, D).transpose(1, 2)
        k = self.k(other).view(B, 7, HQ, D).transpose(1, 2)
        return scaled_dot_product_attention(half_split(q, q, pos)[0], k, k)


def test_cross_attention():
    matched = run_matched(CrossAttention(), torch.randn(B, 1, WIDTH), torch.randn(B, 7, WIDTH), torch.tensor([9]))
    assert matched.refused.reason == "cross-attention"


class Latent(nn.Module):
    """Keys made at every step from a cached latent, beside a rotated part that all heads share."""

    def __init__(self):
        super().__init__()
        self.q, self.down, self.up = (
            nn.Linear(WIDTH, HQ * (D + 8)),
            nn.Linear(WIDTH, 12 + D),
            nn.Linear(12, HQ * (8 + D)),
        )
        self.register_buffer("latent", torch.randn(B, S, 12))
        self.register_buffer("turned", torch.randn(B, 1, S, D))

    def forward(self, x, pos):
        q = self.q(x).view(B, -1, HQ, D + 8).transpose(1, 2)
        latent, k = self.down(x).split([12, D], -1)
        turned, k = half_split(q[..., 8:], k[:, None], pos)
        self.latent.index_copy_(1, pos, latent)
        self.turned.index_copy_(2, pos, k)
        plain, values = self.up(self.latent).view(B, S, HQ, 8 + D).transpose(1, 2).split([8, D], -1)
        keys = torch.cat([plain, self.turned.expand(B, HQ, S, D)], -1)
        mask = (torch.arange(S) <= pos[:, None])[None, None]
        return scaled_dot_product_attention(torch.cat([q[..., :8], turned], -1), keys, values, attn_mask=mask)


def test_latent_cache():
    matched = decode(Latent())
    site = matched.site
    assert (site.cache.kind, site.cache.write, site.cache.k_input) == ("static", "computed", None)
    assert site.rope.pairs == tuple((i, i + D // 2) for i in range(8, 8 + D // 2))
    assert site.shape == (B, HQ, HQ, 1, S, D + 8, D)
    check_numbers(matched)


class HalfPrecision(Static):
    """A cache in bfloat16 that an attention in float32 reads."""

    def __init__(self):
        super().__init__()
        self.keys, self.values = self.keys.bfloat16(), self.values.bfloat16()

    def forward(self, k, v, pos):
        keys, values = super().forward(k.bfloat16(), v.bfloat16(), pos)
        return keys.float(), values.float()


def test_widening_cast_is_left_to_the_reader():
    matched = decode(Attention(half_split, HalfPrecision(), sdpa))
    assert matched.value(matched.site.k).dtype == torch.bfloat16 and matched.site.k.steps == ()
    check_numbers(matched)


class WithCompressedKeys(Grown):
    """Sliding keys, then the new ones, then a summary of older ones."""

    def __init__(self):
        super().__init__()
        self.summary = nn.Linear(D, D)

    def forward(self, k, v, pos):
        keys, values = super().forward(k, v, pos)
        old = self.summary(self.keys[:, :, :3])
        return torch.cat([keys, old], 2), torch.cat([values, old], 2)


def test_new_keys_between_others():
    matched = decode(Attention(half_split, WithCompressedKeys(), grouped))
    assert (matched.site.cache.kind, matched.site.shape[4]) == ("dynamic", 13)
    check_numbers(matched)


class JoinedOfSummaries(Grown):
    """Neither piece holds just the new token."""

    def forward(self, k, v, pos):
        keys, values = super().forward(k, v, pos)
        return torch.cat([keys[:, :, :4] * 2, keys[:, :, 4:] * 2], 2), values


def test_keys_that_are_joined_in_no_known_way():
    refused = decode(Attention(half_split, JoinedOfSummaries(), grouped)).refused
    assert refused.reason == "unknown-cache-write"
    assert "cat" in refused.detail and "test_cache.py:" in refused.detail


class TurnedLate(nn.Module):
    """The cache holds keys as they were projected; all of them are turned at every step."""

    def __init__(self, spelling, static):
        super().__init__()
        self.spelling = spelling
        self.cache = Static() if static else Grown()
        self.q, self.kv = nn.Linear(WIDTH, HQ * D), nn.Linear(WIDTH, 2 * HKV * D)

    def forward(self, x, pos):
        q = self.q(x).view(B, 1, HQ, D).transpose(1, 2)
        k, v = self.kv(x).view(B, 1, 2 * HKV, D).transpose(1, 2).chunk(2, 1)
        keys, values = self.cache(k, v, pos)
        q, keys = self.spelling(q, pos), self.spelling(keys, torch.arange(keys.shape[2]))
        return scaled_dot_product_attention(q, repeated(keys), repeated(values), attn_mask=visible(pos, keys.shape[2]))


def whole(x, pos):
    return half_split(x, x, pos)[0]


def in_halves(x, pos):
    a = angles(pos)
    first, second = x.chunk(2, -1)
    return torch.cat([first * a.cos() - second * a.sin(), second * a.cos() + first * a.sin()], -1)


def as_complex(x, pos):
    y = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angles(pos)), angles(pos))
    return torch.view_as_real(y).flatten(-2)


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("spelling", [whole, in_halves, as_complex])
def test_keys_turned_after_the_cache(spelling, static):
    matched = decode(TurnedLate(spelling, static))
    assert (matched.site.cache.kind, matched.site.cache.write) == ("static" if static else "dynamic", "computed")
    assert matched.site.cache.k_input is None and matched.site.cache.slots is None
    assert matched.site.rope.kind == ("interleaved" if spelling is as_complex else "half-split")
    check_numbers(matched)


def test_keys_turned_after_the_cache_by_other_positions():
    class Shifted(TurnedLate):
        def forward(self, x, pos):
            spelling = self.spelling
            self.spelling = lambda y, at: spelling(y, at + 1 if y.shape[2] > 1 else at)
            return super().forward(x, pos)

    assert decode(Shifted(whole, False)).refused.reason == "rope-mismatch"
