"""The flash-attn package's operators. The package needs CUDA: stand-ins of its schemas compute the documented result in plain torch.

``flash_attn::_flash_attn_forward`` and ``_flash_attn_varlen_forward`` have the argument lists of flash-attn 2.8; the wrappers of
``flash_attn_func`` and ``flash_attn_with_kvcache`` those of its public functions.
"""

from __future__ import annotations

import math

import pytest
import torch
from tiny import Attention, D, S, Static, check_numbers, decode, half_split, prefill
from torch import Tensor

_LIBRARY = torch.library.Library("flash_attn", "DEF")
_WRAPPED = torch.library.Library("flash_attn_wrapped", "DEF")


def stand_in(q, k, v, scale, causal, left, right, softcap, lengths=None):
    """q [B, T, Hq, D], k and v [B, L, Hkv, D]: (result, log-sum-exp), masks aligned to the last key, as the package documents."""
    T, L, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    s = torch.einsum("bthd,blhd->bhtl", q.float(), k.float()) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    end = torch.full((q.shape[0],), L) if lengths is None else lengths
    last = torch.arange(T)[:, None] + (end - T)[:, None, None, None]
    column = torch.arange(L)
    hidden = (column >= end[:, None, None, None]).expand(-1, -1, T, L).clone()
    if left >= 0:
        hidden |= column < last - left
    if causal:
        right = 0
    if right >= 0:
        hidden |= column > last + right
    s = s.masked_fill(hidden, float("-inf"))
    result = torch.einsum("bhtl,blhd->bthd", s.softmax(-1).to(v.dtype), v)
    return torch.empty_like(q).copy_(result), s.logsumexp(-1)


def _forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi, lse):
    out, lse = stand_in(q, k, v, softmax_scale, causal, window_size_left, window_size_right, softcap)
    return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


def _varlen(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, scale, causal, left=-1, right=-1, softcap=0.0, alibi=None,
    return_softmax=False, block_table=None,
):  # fmt: skip
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])
    rows, columns = cu_q.tolist(), cu_k.tolist()
    for a, b, c, d in zip(rows, rows[1:], columns, columns[1:], strict=False):
        if b > a:
            one, one_lse = stand_in(q[None, a:b], k[None, c:d], v[None, c:d], scale, causal, left, right, softcap)
            out[a:b], lse[:, a:b] = one[0], one_lse[0]
    return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


def _with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
):  # fmt: skip
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return stand_in(q, k_cache, v_cache, scale, causal, *window_size, softcap, cache_seqlens)[0]


def _fakes(q, k, v, *_, **__):
    heads, tokens = q.shape[-2], q.shape[:-2]
    lse = q.new_empty((*tokens[:-1], heads, tokens[-1]), dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


_LIBRARY.define(
    "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left,"
    " SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q,"
    " SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1,"
    " SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False,"
    " Tensor? block_table=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
_WRAPPED.define(
    "flash_attn_with_kvcache(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? k=None, Tensor? v=None, Tensor? rotary_cos=None,"
    " Tensor? rotary_sin=None, Tensor? cache_seqlens=None, float? softmax_scale=None, bool causal=False,"
    " int[] window_size=[-1, -1], float softcap=0.0, Tensor? alibi_slopes=None) -> Tensor"
)
_LIBRARY.impl("_flash_attn_forward", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("_flash_attn_varlen_forward", _varlen, "CompositeExplicitAutograd")
_WRAPPED.impl("flash_attn_with_kvcache", _with_kvcache, "CompositeExplicitAutograd")
torch.library.register_fake("flash_attn::_flash_attn_forward", _fakes)
torch.library.register_fake("flash_attn::_flash_attn_varlen_forward", _fakes)
torch.library.register_fake("flash_attn_wrapped::flash_attn_with_kvcache", lambda q, *_, **__: torch.empty_like(q))


def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, softmax_scale=None, alibi_slopes=None):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    op = torch.ops.flash_attn._flash_attn_forward
    return op(q, k, v, 0.0, scale, causal, *window_size, softcap, alibi_slopes, False)[0]


class Grown(torch.nn.Module):
    """A cache that grows by concatenation, as transformers' DynamicCache."""

    def __init__(self, length: int = 9) -> None:
        super().__init__()
        self.register_buffer("keys", torch.randn(1, 2, length, D))
        self.register_buffer("values", torch.randn(1, 2, length, D))

    def forward(self, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)


def tokens_first(attend):
    """``attend(q, k, v, pos)`` on [B, T, H, D] as one on [B, H, T, D]."""

    def swapped(q, k, v, pos):
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), pos).transpose(1, 2)

    return swapped


@pytest.mark.parametrize(
    "how, masked",
    [
        ({"causal": True}, False),
        ({}, False),
        ({"causal": True, "softcap": 2.0, "softmax_scale": 0.9}, False),
        ({"causal": True, "window_size": (3, 3)}, True),
        ({"causal": True, "window_size": (4, 0)}, True),
    ],
)
def test_flash_attn_func(how, masked):
    matched = decode(Attention(half_split, Grown(), tokens_first(lambda q, k, v, pos: flash_attn_func(q, k, v, **how))))
    site = matched.site
    assert (site.anchor, site.mask_kind) == ("flash-attn", "bool" if masked else "none")
    assert not site.is_causal, "one query stands at the last key"
    assert site.shape == (1, 4, 2, 1, 10, D, D)
    assert site.softcap == how.get("softcap", 0.0)
    assert site.scale == pytest.approx(how.get("softmax_scale", D**-0.5))
    check_numbers(matched)


def test_prefill_is_causal_from_the_last_key():
    attend = tokens_first(lambda q, k, v, pos: flash_attn_func(q, k, v, causal=True))
    matched = prefill(Attention(half_split, Grown(3), attend))
    assert matched.site.shape[3:5] == (6, 9)
    check_numbers(matched)


def test_varlen_of_one_sequence():
    def attend(q, k, v, pos):
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        cu_q = torch.arange(2, dtype=torch.int32) * q.shape[0]
        cu_k = torch.arange(2, dtype=torch.int32) * k.shape[0]
        op = torch.ops.flash_attn._flash_attn_varlen_forward
        out = op(q, k, v, cu_q, cu_k, q.shape[0], k.shape[0], 0.0, D**-0.5, True)[0]
        return out[None].transpose(1, 2)

    matched = decode(Attention(half_split, Grown(), attend))
    assert matched.site.shape[:5] == (1, 4, 2, 1, 10)
    check_numbers(matched)


def test_several_packed_sequences_are_refused():
    def attend(q, k, v, pos):
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        cu = torch.tensor([0, 1, 1], dtype=torch.int32)
        op = torch.ops.flash_attn._flash_attn_varlen_forward
        return op(q, k, v, cu, cu * 10, 1, 10, 0.0, D**-0.5, True)[0][None].transpose(1, 2)

    refused = decode(Attention(half_split, Grown(), attend)).refused
    assert refused.reason == "unknown-attention"
    assert "packed one after another" in refused.detail


def kvcache(**how):
    def attend(q, k, v, pos):
        lengths = (pos[-1:] + 1).to(torch.int32)
        return torch.ops.flash_attn_wrapped.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, **how)

    return tokens_first(attend)


@pytest.mark.parametrize("how", [{}, {"window_size": [3, 0]}, {"softcap": 1.5, "softmax_scale": 0.5}])
def test_with_kvcache_on_a_written_cache(how):
    matched = decode(Attention(half_split, Static(), kvcache(**how)))
    site = matched.site
    assert (site.cache.kind, site.mask_kind, site.shape[4]) == ("static", "bool", S)
    check_numbers(matched)
    assert int(matched.value(site.mask).sum()) == (4 if "window_size" in how else 10)


@pytest.mark.parametrize(
    "argument, reason, words",
    [
        ("rotary_cos", "unknown-attention", "rotary embedding inside the operator"),
        ("alibi_slopes", "unknown-attention", "ALiBi"),
        ("k", "unknown-cache-write", "writes the new keys itself"),
    ],
)
def test_what_the_operator_hides_is_refused(argument, reason, words):
    attend = kvcache(**{argument: torch.randn(1, 1, 2, D)})
    refused = decode(Attention(half_split, Static(), attend)).refused
    assert refused.reason == reason
    assert words in refused.detail


def test_the_default_scale_is_that_of_the_head():
    site = decode(Attention(half_split, Static(), kvcache())).site
    assert site.scale == pytest.approx(1 / math.sqrt(D))
