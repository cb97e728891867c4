"""Whole models whose attention is FlexAttention: dense when the budget covers the context, the plain reference below."""

from __future__ import annotations

import pytest
import torch
from models import cache_for, decode, difference, eager_fasa, llama_profile, tiny_llama
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fasa_compile
from fasa_compile import fasa_backend

IDS = torch.randint(0, 512, (2, 50), generator=torch.Generator().manual_seed(3))


def check(model, kind, anchor, steps=6):
    plain = tiny_llama(layers=2)  # the same weights; what it computes does not pass through this anchor
    dense = decode(plain, plain, IDS, cache_for(plain, kind), steps)
    with eager_fasa(plain, llama_profile(2)):
        reference = decode(plain, plain, IDS, cache_for(plain, kind), steps)
    for n_fac, expected in ((64, dense), (None, reference)):
        torch._dynamo.reset()
        fasa_compile.reset_stats()
        backend = fasa_backend(llama_profile(2), n_fac=n_fac, inner="eager", strict=True, check_weights=False)
        found = decode(plain, torch.compile(model, backend=backend), IDS, cache_for(model, kind), steps)
        assert fasa_compile.stats()["sparse_steps"] >= steps - 1, str(backend.explain())
        assert {row.anchor for row in backend.explain().rows} == {anchor}
        assert difference(found, expected) <= 2e-4
    assert difference(reference, dense) > 0.05, "the budget has no effect: this test could not fail"


def through_flex(module, query, key, value, attention_mask, scaling, **_):
    """A transformers attention function: its boolean mask as a mask_mod."""

    def visible(b, h, q, kv):
        return attention_mask[b, 0, q, kv]

    def causal(b, h, q, kv):
        return kv <= q

    block_mask = None
    if attention_mask is not None or query.shape[2] > 1:
        sizes = (query.shape[0], None, query.shape[2], key.shape[2])
        mask_mod = causal if attention_mask is None else visible
        block_mask = create_block_mask(mask_mod, *sizes, device=query.device.type)
    result = flex_attention(query, key, value, block_mask=block_mask, scale=scaling, enable_gqa=True)
    return result.transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_flex_attention(kind):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("through_flex", through_flex)
    AttentionMaskInterface.register("through_flex", sdpa_mask)
    model = tiny_llama(layers=2)
    model.config._attn_implementation = "through_flex"
    check(model, kind, "flex-attention")


def test_transformers_flex_attention():
    """transformers makes its block mask outside the graph: the layers stand in a graph that begins inside the model.

    Compared with the same model uncompiled, which itself is 1e-3 away from SDPA.
    """
    model = tiny_llama(layers=2, attn_implementation="flex_attention")
    dense = decode(model, model, IDS, cache_for(model, "static"), 6)
    found = {}
    for n_fac in (64, 24):
        torch._dynamo.reset()
        backend = fasa_backend(llama_profile(2), n_fac=n_fac, inner="eager", strict=True, check_weights=False)
        step = torch.compile(model, backend=backend)
        found[n_fac] = decode(model, step, IDS, cache_for(model, "static"), 6)
        assert [(row.anchor, row.decision) for row in backend.explain().rows] == [("flex-attention", "sparse")] * 2
    assert fasa_compile.stats()["sparse_steps"] == 12
    assert difference(found[64], dense) <= 1e-4
    assert difference(found[24], dense) > 0.05
