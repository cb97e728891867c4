"""Whole models whose attention is FlexAttention or the flash-attn package's: dense when the budget covers the context, the plain reference below."""

from __future__ import annotations

import flash_stand_in
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


def test_transformers_flex_attention_with_a_growing_cache():
    """The block mask holds the cache's length, a symbol of the graph that begins inside the model."""
    check(tiny_llama(layers=2, attn_implementation="flex_attention"), "dynamic", "flex-attention")


def flash_model(monkeypatch, version):
    model = tiny_llama(layers=2)
    model.config._attn_implementation = flash_stand_in.install(monkeypatch, version)
    return model


@pytest.mark.parametrize("version", [2, 3])
def test_transformers_flash_attention(version, monkeypatch):
    check(flash_model(monkeypatch, version), "dynamic", "flash-attn")


@pytest.mark.parametrize("version", [2, 3])
def test_transformers_flash_attention_with_offsets(version, monkeypatch):
    """One sequence by its offsets (``cu_seq_lens_q``): transformers' route through flash_attn_varlen_func."""
    model, ids, steps = flash_model(monkeypatch, version), IDS[:1], 6

    def step(**given):
        length = given["past_key_values"].get_seq_length() + 1
        offsets = {f"cu_seq_lens_{x}": torch.tensor([0, n], dtype=torch.int32) for x, n in (("q", 1), ("k", length))}
        return compiled(**given, **offsets, max_length_q=1, max_length_k=length)

    plain = tiny_llama(layers=2)
    dense = decode(plain, plain, ids, cache_for(plain, "dynamic"), steps)
    with eager_fasa(plain, llama_profile(2)):
        reference = decode(plain, plain, ids, cache_for(plain, "dynamic"), steps)
    for n_fac, expected in ((64, dense), (None, reference)):
        torch._dynamo.reset()
        backend = fasa_backend(llama_profile(2), n_fac=n_fac, inner="eager", strict=True, check_weights=False)
        compiled = torch.compile(model, backend=backend, dynamic=True)
        assert difference(decode(plain, step, ids, cache_for(plain, "dynamic"), steps), expected) <= 2e-4
        assert {(row.anchor, row.decision) for row in backend.explain().rows} == {("flash-attn", "sparse")}


@pytest.mark.parametrize("version", [2, 3])
def test_transformers_flash_attention_with_a_full_static_cache(version, monkeypatch):
    """Without a mask transformers attends to every slot of a static cache, filled or not: here all are."""
    model, plain = flash_model(monkeypatch, version), tiny_llama(layers=2)

    def run(step):
        return decode(plain, step, IDS, cache_for(plain, "static", IDS.shape[1]), 1)

    with eager_fasa(plain, llama_profile(2)):
        reference = run(plain)
    for profile, expected, decision in ((None, run(plain), "dense-kernel"), (llama_profile(2), reference, "sparse")):
        torch._dynamo.reset()
        backend = fasa_backend(profile, inner="eager", strict=True, check_weights=False)
        assert difference(run(torch.compile(model, backend=backend)), expected) <= 2e-4
        assert [(row.anchor, row.decision) for row in backend.explain().rows] == [("flash-attn", decision)] * 2
    assert difference(reference, run(plain)) > 0.05


def test_transformers_flash_attention_with_a_mask_runs_as_it_was(monkeypatch):
    """transformers takes hidden tokens out of q, k and v before the call, which breaks the graph in every layer."""
    model, mask = flash_model(monkeypatch, 2), torch.ones_like(IDS)
    mask[1, :7] = 0
    expected = decode(model, model, IDS, cache_for(model, "static"), 2, attention_mask=mask)
    torch._dynamo.reset()
    backend = fasa_backend(llama_profile(2), inner="eager", check_weights=False)
    found = decode(
        model, torch.compile(model, backend=backend), IDS, cache_for(model, "static"), 2, attention_mask=mask
    )
    assert difference(found, expected) <= 2e-5
    rows = backend.explain().rows
    assert {(row.anchor, row.decision, row.reason) for row in rows} == {("flash-attn", "dense", "unknown-attention")}
    assert all("packed one after another" in row.why for row in rows)
