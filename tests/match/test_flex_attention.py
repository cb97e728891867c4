"""FlexAttention's higher-order operator: what its mask_mod and score_mod say is checked in numbers."""

from __future__ import annotations

import pytest
import torch
from tiny import HQ, Attention, B, D, S, Static, check_numbers, decode, half_split, prefill
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

WINDOW = 4


def attend_with(mask_mod=None, score_mod=None, block_size=8, **how):
    """An attention through flex_attention. ``mask_mod(pos)`` and ``score_mod(pos)`` give the functions of indices."""

    def attend(q, k, v, pos):
        block_mask = None
        if mask_mod is not None:
            block_mask = create_block_mask(
                mask_mod(pos), B, None, q.shape[2], k.shape[2], device="cpu", BLOCK_SIZE=block_size
            )
        score = score_mod(pos) if score_mod is not None else None
        return flex_attention(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=True, **how)

    return attend


def causal(pos):
    return lambda b, h, q, kv: kv <= pos[q]


def sliding(pos):
    return lambda b, h, q, kv: (kv <= pos[q]) & (kv > pos[q] - WINDOW)


def padded(pos):
    keep = torch.arange(S).remainder(5) != 1
    return lambda b, h, q, kv: keep[kv] & (kv <= pos[q])


def per_head(pos):
    return lambda b, h, q, kv: (kv <= pos[q]) & (kv >= h)


@pytest.mark.parametrize("mask_mod", [causal, sliding, padded, per_head])
def test_masks(mask_mod):
    matched = decode(Attention(half_split, Static(), attend_with(mask_mod)))
    assert (matched.site.anchor, matched.site.mask_kind) == ("flex-attention", "bool")
    check_numbers(matched)
    mask = matched.value(matched.site.mask)
    assert mask.shape == (1, HQ if mask_mod is per_head else 1, 1, S)
    assert 0 < mask.sum() < mask.numel()


def test_no_mask_is_none():
    site = decode(Attention(half_split, Static(), attend_with()))
    assert site.site.mask_kind == "none"
    check_numbers(site)


def capped(pos):
    return lambda s, b, h, q, kv: 2.0 * torch.tanh(s / 2.0)


def capped_and_scaled(pos):
    return lambda s, b, h, q, kv: torch.tanh(s * 0.3) * 4


def alibi(pos):
    return lambda s, b, h, q, kv: s + (kv - pos[q]) * torch.exp2(-(h + 1.0))


def biased_and_capped(pos):
    bias = torch.linspace(-1, 1, S)
    return lambda s, b, h, q, kv: 3.0 * torch.tanh(s / 3.0) - bias[kv] + 0.25 * h


@pytest.mark.parametrize("score_mod", [capped, capped_and_scaled, alibi, biased_and_capped])
def test_score_mods(score_mod):
    matched = decode(Attention(half_split, Static(), attend_with(causal, score_mod, scale=0.7)))
    check_numbers(matched)
    assert bool(matched.site.softcap) == ("capped" in score_mod.__name__)
    assert matched.site.mask_kind == ("additive" if score_mod in (alibi, biased_and_capped) else "bool")


def squared(pos):
    return lambda s, b, h, q, kv: s * s


def forgets(pos):
    return lambda s, b, h, q, kv: kv * 1.0


def gated(pos):
    return lambda s, b, h, q, kv: torch.where(kv > 3, s, s * 2)


@pytest.mark.parametrize("score_mod", [squared, forgets, gated])
def test_other_score_mods_are_refused(score_mod):
    refused = decode(Attention(half_split, Static(), attend_with(causal, score_mod))).refused
    assert refused.reason == "unknown-attention"
    assert "score_mod" in refused.detail


def test_a_log_sum_exp_that_is_used_is_refused():
    def attend(q, k, v, pos):
        out, lse = flex_attention(q, k, v, enable_gqa=True, return_lse=True)
        return out * torch.sigmoid(lse)[..., None]

    try:
        refused = decode(Attention(half_split, Static(), attend)).refused
    except NotImplementedError:
        pytest.skip("this torch returns no log-sum-exp on the CPU")
    assert (refused.reason, refused.anchor) == ("unknown-attention", "flex-attention")


def test_blocks_that_are_not_listed_are_hidden():
    """A BlockMask made from blocks alone masks by its blocks; its mask_mod hides nothing."""

    def attend(q, k, v, pos):
        num = torch.full((1, 1, 1), 2, dtype=torch.int32)
        blocks = torch.tensor([[[[2, 0, 1]]]], dtype=torch.int32)  # blocks 2 and 0 are read, 1 is not
        block_mask = BlockMask.from_kv_blocks(num, blocks, BLOCK_SIZE=(8, 8), seq_lengths=(1, S))
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)

    matched = decode(Attention(half_split, Static(), attend))
    expected = torch.ones(S, dtype=torch.bool)
    expected[8:16] = False
    assert (matched.value(matched.site.mask) == expected).all()


def test_a_symbolic_length():
    matched = decode(Attention(half_split, Static(), attend_with(sliding)), dynamic=True)
    check_numbers(matched)


def test_prefill_matches():
    matched = prefill(Attention(half_split, Static(), attend_with(causal)))
    assert matched.site.shape[3] == 6
    check_numbers(matched)
    assert matched.site.scale == pytest.approx(D**-0.5)
