"""fasa_backend(None): exact attention at every decode site with a cache, with or without a rotary embedding; and the same kernel
at sites that a profile leaves dense on a GPU."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from models import (
    TRANSFORMERS_5_17,
    Custom,
    Interleaved,
    PartialHalfSplit,
    backend,
    cache_for,
    decode,
    decode_custom,
    difference,
    llama_profile,
    tiny_llama,
)

import fasa_compile
from fasa_compile import BudgetError, FasaWarning, fasa_backend
from fasa_compile import plan as planning
from fasa_compile import rewrite as rewriting
from fasa_compile.cost import cards

IDS = torch.randint(0, 512, (2, 60), generator=torch.Generator().manual_seed(3))


def compiled(model, profile=None, **how):
    torch._dynamo.reset()
    made = backend(profile, **how)
    return made, torch.compile(model, backend=made)


def decisions(made) -> list[tuple[str, str]]:
    return [(row.decision, row.reason) for row in made.explain().rows]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Decisions and graphs as on an H100: custom operators, which compute by the reference on a CPU."""
    monkeypatch.setattr(planning, "on_gpu", lambda site: True)
    monkeypatch.setattr(planning, "card", lambda device: cards()[0])
    monkeypatch.setattr(rewriting, "uses_kernels", lambda device: True)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_every_site_is_exact(kind):
    model = tiny_llama(layers=2)
    dense = decode(model, model, IDS, cache_for(model, kind), 6)
    made, step = compiled(model)
    found = decode(model, step, IDS, cache_for(model, kind), 6)
    assert difference(found, dense) <= 1e-4
    assert set(decisions(made)) == {("dense-kernel", "dense-mode")}
    stats = fasa_compile.stats()
    assert stats["dense_kernel_sites"] == stats["rewritten_sites"] == stats["sites"] >= 2
    assert (stats["dense_steps"], stats["sparse_steps"], stats["state_rebuilds"], stats["declined"]) == (6, 0, 0, {})
    assert "0 of 2 attention sites decode sparsely, 2 exactly by the dense kernel" in str(made.explain())


@pytest.mark.inductor
def test_inductor_computes_the_same():
    model = tiny_llama(layers=1)
    dense = decode(model, model, IDS, cache_for(model, "static"), 4)
    _, step = compiled(model, inner="inductor")
    assert difference(decode(model, step, IDS, cache_for(model, "static"), 4), dense) <= 1e-4
    assert fasa_compile.stats()["dense_kernel_sites"] == 1


@pytest.mark.parametrize("attention", [Interleaved, PartialHalfSplit])
def test_custom_modules(attention):
    model = Custom(attention).eval()
    ids = torch.randint(0, 128, (1, 30), generator=torch.Generator().manual_seed(2))
    dense = decode_custom(model, model, ids, 5)
    _, step = compiled(model)
    assert difference(decode_custom(model, step, ids, 5), dense) <= 1e-4
    assert fasa_compile.stats()["dense_kernel_sites"] >= 2


def test_no_rotary_embedding_is_needed():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=128, n_embd=64, n_layer=2, n_head=4)).eval()
    dense = decode(model, model, IDS, cache_for(model, "static"), 4)
    made, step = compiled(model)
    assert difference(decode(model, step, IDS, cache_for(model, "static"), 4), dense) <= 1e-4
    assert decisions(made) == [("dense-kernel", "dense-mode")] * 2


def test_a_mask_with_holes_and_left_padding():
    model = tiny_llama(layers=2)
    keep = torch.ones(2, 60, dtype=torch.long)
    keep[0, :17] = 0
    dense = decode(model, model, IDS, cache_for(model, "static"), 4, attention_mask=keep)
    made, step = compiled(model)
    found = decode(model, step, IDS, cache_for(model, "static"), 4, attention_mask=keep)
    assert difference(found, dense) <= 1e-4
    assert set(decisions(made)) == {("dense-kernel", "dense-mode")}


def test_softcap_and_sliding_layers():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=128,
        vocab_size=512, sliding_window=16, attn_logit_softcapping=5.0, query_pre_attn_scalar=1,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = Gemma2ForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 40
        layer.self_attn.k_proj.weight.data *= 40
    dense = decode(model, model, IDS, cache_for(model, "static"), 4)
    made, step = compiled(model, strict=False)
    assert difference(decode(model, step, IDS, cache_for(model, "static"), 4), dense) <= 1e-4
    assert ("dense-kernel", "dense-mode") in decisions(made)
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    uncapped = decode(model, model, IDS, cache_for(model, "static"), 4)
    assert difference(uncapped, dense) > 1e-2, "the soft cap has no effect: this cannot fail"


def test_attention_sinks():
    class WithSinks(Interleaved):
        def forward(self, x, pos, table, mask):
            B, T, _ = x.shape
            q, k, v = self.qkv(x).view(B, T, -1, self.D).split([self.H, self.HKV, self.HKV], dim=2)
            q, k = self.rotate(q, table), self.rotate(k, table)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            self.k_cache[:, :, pos] = k
            self.v_cache[:, :, pos] = v
            keys, values = (c.repeat_interleave(self.H // self.HKV, 1) for c in (self.k_cache, self.v_cache))
            scores = (q @ keys.transpose(2, 3) * 0.3).masked_fill(~mask, -torch.inf)
            logit = self.sink[None, :, None, None].expand(B, self.H, T, 1)
            weights = torch.cat([scores, logit], dim=-1).softmax(-1)[..., :-1]
            return self.out((weights @ values).transpose(1, 2).reshape(B, T, -1))

        def __init__(self, width, length):
            super().__init__(width, length)
            self.sink = torch.nn.Parameter(torch.tensor([0.5, 2.0, -1.0, 4.0]))

    model = Custom(WithSinks).eval()
    ids = torch.randint(0, 128, (1, 30), generator=torch.Generator().manual_seed(2))
    dense = decode_custom(model, model, ids, 4)
    made, step = compiled(model)
    assert difference(decode_custom(model, step, ids, 4), dense) <= 1e-4
    assert set(decisions(made)) == {("dense-kernel", "dense-mode")}
    with torch.no_grad():
        for block in model.blocks:
            block.sink.fill_(-50.0)
    assert difference(decode_custom(model, model, ids, 4), dense) > 1e-2, "the sinks have no effect: this cannot fail"


def test_several_tokens_at_once_stay_as_they_are():
    model = tiny_llama(layers=2)
    _, step = compiled(model, strict=False)
    cache, plain = cache_for(model, "static"), cache_for(model, "static")
    with torch.no_grad():
        for kept in (cache, plain):
            model(IDS[:, :20], past_key_values=kept)
        found = step(input_ids=IDS[:, 20:24].clone(), past_key_values=cache).logits
        assert difference(found, model(IDS[:, 20:24], past_key_values=plain).logits) <= 1e-5
    assert fasa_compile.stats()["rewritten_sites"] == 0


@pytest.mark.parametrize("dense_below", [-1, 2.5, True, "64"])
def test_impossible_lengths(dense_below):
    with pytest.raises(BudgetError, match="dense_below"):
        fasa_backend("all", dense_below=dense_below)


@pytest.mark.parametrize(("dense_below", "expected"), [(0, "sparse"), (128, "sparse"), (129, "dense")])
def test_a_length_that_the_user_sets(dense_below, expected):
    model = tiny_llama(layers=1)
    made, step = compiled(model, llama_profile(1), dense_below=dense_below)
    decode(model, step, IDS, cache_for(model, "static"), 2)
    assert [d for d, _ in decisions(made)] == [expected]


def test_on_a_gpu_what_is_not_worth_it_sparsely_is_read_by_the_dense_kernel(as_on_a_gpu):
    model = tiny_llama()
    profile = llama_profile()
    layers = (dataclasses.replace(profile.layers[0], dense=True), *profile.layers[1:])
    profile = dataclasses.replace(profile, layers=layers)
    dense = decode(model, model, IDS, cache_for(model, "static"), 3)
    for how, expected in (
        ({"dense_below": 0}, [("dense-kernel", "profile-dense"), ("sparse", ""), ("sparse", "")]),
        ({"n_fac": 128}, [("dense-kernel", "profile-dense")] + 2 * [("dense-kernel", "within-budget")]),
        ({}, [("dense-kernel", "profile-dense")] + 2 * [("dense-kernel", "below-break-even")]),
    ):
        fasa_compile.reset_stats()
        made, step = compiled(model, profile, **how)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FasaWarning)
            found = decode(model, step, IDS, cache_for(model, "static"), 3)
        assert decisions(made) == expected
        exact = all(decision == "dense-kernel" for decision, _ in expected)
        assert (difference(found, dense) <= 1e-4) == exact
        stats = fasa_compile.stats()
        assert stats["sites"] == stats["rewritten_sites"] + sum(stats["declined"].values()) == 3
        assert stats["dense_kernel_sites"] == sum(decision == "dense-kernel" for decision, _ in expected)
        assert (stats["dense_steps"], stats["sparse_steps"]) == ((3, 0) if exact else (0, 3))
        assert "break-even" in str(made.explain()) and "constants of NVIDIA H100" in str(made.explain())


def test_on_a_gpu_plain_multi_head_attention_keeps_the_kernel_of_the_model(as_on_a_gpu):
    model = tiny_llama(layers=1, num_key_value_heads=8)
    made, step = compiled(model)
    decode(model, step, IDS[:1], cache_for(model, "dynamic"), 3)
    # transformers 5.17 gives a step over a growing cache a mask, which the model's kernel reads in full.
    assert set(decisions(made)) == {("dense-kernel", "dense-mode") if TRANSFORMERS_5_17 else ("dense", "no-gain")}
