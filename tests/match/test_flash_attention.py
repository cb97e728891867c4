"""The flash-attn package's operators, through stand-ins of the same schemas: what a site says is checked in numbers."""

from __future__ import annotations

import math

import pytest
import torch
from flash_stand_in import flash_attn_func, package, stand_in
from tiny import HKV, HQ, WIDTH, Attention, B, D, S, Static, check_numbers, decode, half_split, prefill
from torch import Tensor, nn


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


@pytest.mark.parametrize("how", [{}, {"window_size": (3, 0)}, {"softcap": 2.0, "softmax_scale": 0.9}])
def test_version_3(how):
    func = package(3).flash_attn_func
    matched = decode(
        Attention(half_split, Grown(), tokens_first(lambda q, k, v, pos: func(q, k, v, causal=True, **how)))
    )
    assert (matched.site.anchor, matched.site.softcap) == ("flash-attn", how.get("softcap", 0.0))
    assert matched.site.mask_kind == ("bool" if "window_size" in how else "none")
    check_numbers(matched)


@pytest.mark.parametrize(
    "how, reason, words",
    [
        ({"k_new": torch.randn(1, 1, 2, D)}, "unknown-cache-write", "writes the new keys itself"),
        ({"attention_chunk": 4}, "unknown-mask", "chunks of 4 tokens"),
        ({"seqused_q": torch.ones(1, dtype=torch.int32)}, "unknown-attention", "queries of which only some are used"),
    ],
)
def test_what_version_3_hides_is_refused(how, reason, words):
    op = torch.ops.flash_attn_3._flash_attn_forward
    attend = tokens_first(lambda q, k, v, pos: op(q, k, v, causal=True, **how)[0])
    refused = decode(Attention(half_split, Static(), attend)).refused
    assert refused.reason == reason
    assert words in refused.detail
    assert refused.trace and "_flash_attn_forward" in refused.trace[0]


@torch.library.custom_op("fasa_tests::flash_attn_with_kvcache", mutates_args=("k_cache", "v_cache"))
def _writing_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor
) -> Tensor:
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[:, int(cache_seqlens) : int(cache_seqlens) + new.shape[1]] = new
    end = cache_seqlens + k.shape[1]
    return stand_in(q, k_cache, v_cache, q.shape[-1] ** -0.5, True, -1, -1, 0.0, end)[0]


@_writing_kvcache.register_fake
def _(q, k_cache, v_cache, k, v, cache_seqlens):
    return torch.empty_like(q)


class Writing(nn.Module):
    """Hands new keys and values to an operator that writes them into the cache and attends."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * D, bias=False) for heads in (HQ, HKV, HKV))
        self.register_buffer("keys", torch.randn(B, S, HKV, D))
        self.register_buffer("values", torch.randn(B, S, HKV, D))

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        q, k, v = (f(x).view(B, x.shape[1], -1, D).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = half_split(q, k, pos)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return _writing_kvcache(q, self.keys, self.values, k, v, pos[:1].to(torch.int32))


def test_an_operator_that_writes_its_cache_is_reported():
    refused = decode(Writing()).refused
    assert (refused.anchor, refused.reason) == ("flash-attn", "unknown-cache-write")
    assert "fasa_tests.flash_attn_with_kvcache writes k_cache, v_cache itself" in refused.detail
    assert refused.source.startswith("test_flash_attention.py:")


def test_a_log_sum_exp_matters_only_where_it_is_used():
    def attend(q, k, v, pos, used):
        op = torch.ops.flash_attn._flash_attn_forward
        out, lse, *_ = op(q, k, v, 0.0, D**-0.5, True, -1, -1, 0.0, None, False)
        weight = lse.to(v.dtype).transpose(1, 2)[..., None]
        return out * weight if used else out

    matched = decode(Attention(half_split, Grown(), tokens_first(lambda *given: attend(*given, used=False))))
    check_numbers(matched)
    refused = decode(Attention(half_split, Grown(), tokens_first(lambda *given: attend(*given, used=True)))).refused
    assert refused.reason == "unknown-attention"
    assert "reads more of" in refused.detail


def test_queries_and_keys_that_arrive_ready_made():
    class Alone(nn.Module):
        def forward(self, x, q, k, v):
            return flash_attn_func(q, k, v, causal=True)

    from tiny import run_matched

    given = (torch.randn(B, n, h, D) for n, h in ((1, HQ), (10, HKV), (10, HKV)))
    refused = run_matched(Alone(), torch.randn(1), *given).refused
    assert refused.reason == "incomplete-pattern"
    assert "before a graph break" in refused.detail
