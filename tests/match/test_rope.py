"""The rotary embedding: every spelling is recognised by what it computes, and its negative twins are refused."""

from __future__ import annotations

import pytest
import torch
from tiny import INVERSE_FREQUENCY, Attention, D, Static, angles, check_numbers, decode, half_split, prefill, sdpa
from torch import Tensor, nn

HALF = tuple((i, i + D // 2) for i in range(D // 2))
NEXT = tuple((2 * i, 2 * i + 1) for i in range(D // 2))


def both(turn):
    return lambda q, k, pos: (turn(q, pos), turn(k, pos))


def cos_sin(pos: Tensor, repeat=lambda a: torch.cat([a, a], -1)) -> tuple[Tensor, Tensor]:
    a = repeat(angles(pos))
    return a.cos(), a.sin()


def rotate_half(x: Tensor) -> Tensor:
    n = x.shape[-1] // 2
    return torch.cat([-x[..., n:], x[..., :n]], -1)


def reversed_sign(x, pos):
    cos, sin = cos_sin(pos)
    return x * cos - rotate_half(x) * sin


def halves(x, pos):
    c, s = angles(pos).cos(), angles(pos).sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def stacked(x, pos):
    cos, sin = cos_sin(pos, lambda a: a.repeat_interleave(2, -1))
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin


def interleaved_in_float32(x, pos):
    c, s = angles(pos).cos(), angles(pos).sin()
    y = x.float().reshape(*x.shape[:-1], -1, 2)
    return torch.stack([y[..., 0] * c - y[..., 1] * s, y[..., 1] * c + y[..., 0] * s], -1).flatten(3).type_as(x)


def complex_product(x, pos):
    turn = torch.polar(torch.ones_like(angles(pos)), angles(pos))
    y = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(y * turn).flatten(3).type_as(x)


def deinterleaved(x, pos):
    c, s = angles(pos).cos(), angles(pos).sin()
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.cat([even * c - odd * s, odd * c + even * s], -1)


def rolled(x, pos):
    cos, sin = cos_sin(pos)
    sign = torch.cat([-torch.ones(D // 2), torch.ones(D // 2)])
    return x * cos + torch.roll(x, D // 2, -1) * sign * sin


def by_matrix(x, pos):
    cos, sin = cos_sin(pos)
    swap = torch.zeros(D, D)
    swap[torch.arange(D // 2) + D // 2, torch.arange(D // 2)] = -1
    swap[torch.arange(D // 2), torch.arange(D // 2) + D // 2] = 1
    return x * cos + (x @ swap) * sin


def written_into_slices(x, pos):
    c, s = angles(pos).cos(), angles(pos).sin()
    out = torch.empty_like(x)
    out[..., : D // 2] = x[..., : D // 2] * c - x[..., D // 2 :] * s
    out[..., D // 2 :] = x[..., D // 2 :] * c + x[..., : D // 2] * s
    return out


def by_addcmul(x, pos):
    cos, sin = cos_sin(pos)
    return torch.addcmul(x * cos, rotate_half(x), sin)


@pytest.mark.parametrize(
    "turn, pairs",
    [
        (reversed_sign, HALF),
        (halves, HALF),
        (deinterleaved, HALF),
        (rolled, HALF),
        (by_matrix, HALF),
        (written_into_slices, HALF),
        (by_addcmul, HALF),
        (stacked, NEXT),
        (interleaved_in_float32, NEXT),
        (complex_product, NEXT),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_full_rotation(turn, pairs):
    matched = decode(Attention(both(turn), Static(), sdpa))
    assert matched.site.rope.pairs == pairs
    assert matched.site.rope.rotary_dim == matched.site.rope.head_dim == D
    assert matched.site.rope.magnitude == 1.0
    check_numbers(matched)


def test_kinds_are_named_for_people():
    assert decode(Attention(both(halves), Static(), sdpa)).site.rope.kind == "half-split"
    assert decode(Attention(both(stacked), Static(), sdpa)).site.rope.kind == "interleaved"


def first_half_of_the_dims(x, pos):
    c, s = angles(pos)[:, : D // 4].cos(), angles(pos)[:, : D // 4].sin()
    a, b, rest = x[..., : D // 4], x[..., D // 4 : D // 2], x[..., D // 2 :]
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1)


def last_half_of_the_dims(x, pos):
    c, s = angles(pos)[:, : D // 4].cos(), angles(pos)[:, : D // 4].sin()
    rest, a, b = x[..., : D // 2], x[..., D // 2 : 3 * D // 4], x[..., 3 * D // 4 :]
    return torch.cat([rest, a * c - b * s, b * c + a * s], -1)


def slowest_half_has_frequency_zero(x, pos):
    """Proportional partial rotation: the table covers all dims, and turns the last of them by nothing."""
    a = angles(pos) * (torch.arange(D // 2) < D // 4)
    cos, sin = torch.cat([a, a], -1).cos(), torch.cat([a, a], -1).sin()
    return x * cos + rotate_half(x) * sin


@pytest.mark.parametrize(
    "turn, pairs",
    [
        (first_half_of_the_dims, tuple((i, i + D // 4) for i in range(D // 4))),
        (last_half_of_the_dims, tuple((i, i + D // 4) for i in range(D // 2, 3 * D // 4))),
        (slowest_half_has_frequency_zero, HALF),
    ],
    ids=["first", "last", "proportional"],
)
def test_partial_rotation(turn, pairs):
    matched = decode(Attention(both(turn), Static(), sdpa))
    assert matched.site.rope.pairs == pairs
    check_numbers(matched)


def test_magnitude_of_scaled_tables():
    def turn(x, pos):
        cos, sin = cos_sin(pos)
        return x * (cos * 1.25) + rotate_half(x) * (sin * 1.25)

    matched = decode(Attention(both(turn), Static(), sdpa))
    assert matched.site.rope.magnitude == pytest.approx(1.25, rel=1e-5)
    check_numbers(matched)


def test_scaled_query_stays_in_the_query():
    def rope(q, k, pos):
        q, k = half_split(q, k, pos)
        return q * (pos.float() / 8 + 1).log()[:, None], k

    matched = decode(Attention(rope, Static(), sdpa))
    assert matched.site.rope.pairs == HALF and matched.site.rope.magnitude == 1.0
    assert matched.site.scale == pytest.approx(D**-0.5)
    check_numbers(matched)


class Normed(nn.Module):
    """An RMS norm of the head with a weight per dim, before or after the rotation."""

    def __init__(self, after: bool, fused: bool) -> None:
        super().__init__()
        self.after, self.fused = after, fused
        self.weight = nn.Parameter(torch.rand(D) + 0.5)

    def norm(self, x):
        if self.fused:
            return nn.functional.rms_norm(x, (D,), self.weight)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight

    def forward(self, q, k, pos):
        if not self.after:
            return half_split(self.norm(q), self.norm(k), pos)
        q, k = half_split(q, k, pos)
        return self.norm(q), self.norm(k)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_norm_before_or_after(after, fused):
    matched = decode(Attention(Normed(after, fused), Static(), sdpa))
    assert matched.site.rope.pairs == HALF
    check_numbers(matched)


class Adapter(nn.Module):
    """A low-rank correction added to the query ahead of the rotation."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, q, k, pos):
        return half_split(q + self.up(self.down(q)), k, pos)


def test_sum_ahead_of_the_rotation():
    matched = decode(Attention(Adapter(), Static(), sdpa))
    assert matched.site.rope.pairs == HALF
    check_numbers(matched)


class FromBuffer(nn.Module):
    """cos and sin gathered from a table of positions."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        a = torch.outer(torch.arange(64).float(), INVERSE_FREQUENCY)
        self.register_buffer("cos", torch.cat([a, a], -1).cos().to(dtype))
        self.register_buffer("sin", torch.cat([a, a], -1).sin().to(dtype))

    def forward(self, q, k, pos):
        cos, sin = self.cos[pos].to(q.dtype), self.sin[pos].to(q.dtype)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_table_in_a_buffer(dtype):
    matched = decode(Attention(FromBuffer(dtype), Static(), sdpa))
    assert matched.site.rope.pairs == HALF
    assert matched.site.rope.magnitude == pytest.approx(1.0, abs=1e-6 if dtype == torch.float32 else 1e-2)
    check_numbers(matched)


@pytest.mark.parametrize("position", [0, 1, 23])
def test_every_position(position):
    """At position 0 the rotation is the identity: another position is looked at."""
    assert decode(Attention(half_split, Static(), sdpa), position).site.rope.pairs == HALF


def test_prefill_of_several_tokens():
    matched = prefill(Attention(half_split, Static(), sdpa))
    assert matched.site.rope.pairs == HALF
    check_numbers(matched)


# ---- negative twins: each differs from a rotation above in one thing ---------------------------------------------------


def no_rotation(x, pos):
    return x


def cos_and_sin_exchanged(x, pos):
    cos, sin = cos_sin(pos)
    return x * sin + rotate_half(x) * cos


def wrong_permutation(x, pos):
    """Interleaved partners with half-split tables: partners are turned by different angles."""
    cos, sin = cos_sin(pos)
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin


def shear(x, pos):
    cos, sin = cos_sin(pos)
    stretch = torch.cat([torch.full((D // 2,), 1.3), torch.ones(D // 2)])
    return x * cos + rotate_half(x) * sin * stretch


def planes_scaled_unequally(x, pos):
    cos, sin = cos_sin(pos)
    gain = torch.linspace(1, 2, D // 2).repeat(2)
    return (x * cos + rotate_half(x) * sin) * gain


def missing_sign(x, pos):
    cos, sin = cos_sin(pos)
    return x * cos + torch.cat([x[..., D // 2 :], x[..., : D // 2]], -1) * sin


def three_dims_mixed(x, pos):
    return halves(x, pos) + 0.1 * torch.roll(x, 1, -1)


def same_at_every_position(x, pos):
    return halves(x, torch.full_like(pos, 5))


def bias_after_the_rotation(x, pos):
    return halves(x, pos) + torch.linspace(0, 1, D)


@pytest.mark.parametrize(
    "turn, reason",
    [
        (no_rotation, "no-rope"),
        (cos_and_sin_exchanged, "rope-not-proven"),
        (wrong_permutation, "rope-not-proven"),
        (shear, "rope-not-proven"),
        (planes_scaled_unequally, "rope-not-proven"),
        (missing_sign, "rope-not-proven"),
        (three_dims_mixed, "rope-not-proven"),
        (same_at_every_position, "rope-not-proven"),
        (bias_after_the_rotation, "no-rope"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_no_rotation_is_refused(turn, reason):
    refused = decode(Attention(both(turn), Static(), sdpa)).refused
    assert refused.reason == reason, refused
    assert refused.detail


def queries_only(q, k, pos):
    return half_split(q, k, pos)[0], k


def keys_only(q, k, pos):
    return q, half_split(q, k, pos)[1]


def keys_one_position_behind(q, k, pos):
    return half_split(q, k, pos)[0], half_split(q, k, pos - 1)[1]


def keys_paired_otherwise(q, k, pos):
    return halves(q, pos), stacked(k, pos)


def keys_turned_back(q, k, pos):
    return halves(q, pos), reversed_sign(k, pos)


def keys_scaled_where_turned(q, k, pos):
    q, k = first_half_of_the_dims(q, pos), first_half_of_the_dims(k, pos)
    return q, torch.cat([k[..., : D // 2] * 1.2, k[..., D // 2 :]], -1)


@pytest.mark.parametrize(
    "rope",
    [
        queries_only,
        keys_only,
        keys_one_position_behind,
        keys_paired_otherwise,
        keys_turned_back,
        keys_scaled_where_turned,
    ],
    ids=lambda x: x.__name__,
)
def test_queries_and_keys_that_differ_are_refused(rope):
    refused = decode(Attention(rope, Static(), sdpa)).refused
    assert refused.reason == "rope-mismatch", refused


class LooksLikeRope(nn.Module):
    """The arithmetic of a rotation on the residual stream, ahead of the projections: a feed-forward, not a RoPE."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x, pos):
        a = pos.float()[:, None] * 10000.0 ** (-torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
        cos, sin = torch.cat([a, a], -1).cos(), torch.cat([a, a], -1).sin()
        return self.attention(x * cos + rotate_half(x) * sin, pos)


def test_rotation_ahead_of_the_projections_is_no_rope():
    assert decode(LooksLikeRope(Attention(both(no_rotation), Static(), sdpa))).refused.reason == "no-rope"
