"""Whole models whose attention is FlexAttention or the flash-attn package's: dense when the budget covers the context, sparse below."""

from __future__ import annotations

import pytest
import torch
from models import cache_for, decode, difference, eager_fasa, llama_profile, tiny_llama

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
        found = decode(model, torch.compile(model, backend=backend), IDS, cache_for(model, kind), steps)
        assert fasa_compile.stats()["sparse_steps"] >= steps - 1
        assert {row.anchor for row in backend.explain().rows} == {anchor}
        assert difference(found, expected) <= 2e-4
    assert difference(reference, dense) > 0.05, "the budget has no effect: this test could not fail"


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_transformers_flex_attention(kind):
    model = tiny_llama(layers=2, attn_implementation="flex_attention")
    check(model, kind, "flex-attention")


def test_transformers_flash_attention(monkeypatch):
    """The route of attn_implementation="flash_attention_2", with a stand-in where the package would be."""
    from transformers import AttentionInterface, modeling_flash_attention_utils as flash
    from transformers.integrations.flash_attention import flash_attention_forward

    import test_flash_attention as stand_in

    def varlen(*_, **__):
        raise AssertionError("no padding: nothing is packed")

    made = (stand_in.flash_attn_func, varlen, None, None, None)
    monkeypatch.setattr(
        flash,
        "lazy_import_flash_attention",
        lambda *_, **__: (made, (flash._lazy_define_process_function(made[0]), dict)),
    )
    AttentionInterface.register("flash_stand_in", flash_attention_forward)
    model = tiny_llama(layers=2)
    model.config._attn_implementation = "flash_stand_in"
    check(model, "dynamic", "flash-attn")
