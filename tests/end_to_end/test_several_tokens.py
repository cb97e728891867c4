"""Decode steps of several query tokens: each selects for itself, so a step of S tokens equals S steps of one."""

from __future__ import annotations

import pytest
import torch
from models import (
    Custom,
    Interleaved,
    PartialHalfSplit,
    backend,
    cache_for,
    compiled,
    decode,
    difference,
    half_split,
    llama_profile,
    profile_of,
    tiny_gemma3,
    tiny_llama,
)

import fasa_compile
from fasa_compile import FasaStaticCache
from fasa_compile.plan import STEP_TOKENS

IDS = torch.randint(1, 512, (2, 128), generator=torch.Generator().manual_seed(5))
START = 60
HOW = dict(max_new_tokens=16, do_sample=False, pad_token_id=0)


@torch.no_grad()
def blocks(model, step, cache, sizes, ids=IDS, keep=None):
    """Logits of ``sum(sizes)`` tokens behind a prefill of ``START``, ``sizes`` of them at a time."""

    def masks(first, stop):
        if keep is None:
            return {}
        positions = (keep.cumsum(1) - 1).clamp(min=0)
        return {"attention_mask": keep[:, :stop], "position_ids": positions[:, first:stop].clone()}

    model(ids[:, :START], past_key_values=cache, **masks(0, START))
    found, at = [], START
    for n in sizes:
        token = ids[:, at : at + n].clone()
        found.append(step(input_ids=token, past_key_values=cache, **masks(at, at + n)).logits)
        at += n
    return torch.cat(found, 1)


@pytest.mark.parametrize("fc_format", ["int4", "fp32"])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_step_of_several_equals_steps_of_one(kind, fc_format):
    model = tiny_llama(layers=2)
    engine = backend(llama_profile(2, fc_format=fc_format))
    step = torch.compile(model, backend=engine)
    together = blocks(model, step, cache_for(model, kind), (3, 3, 3))
    stats = fasa_compile.stats()
    assert stats["sparse_steps"] == stats["multi_token_steps"] == 3
    assert stats["selected_tokens"] == 3 * 3 * 2 * 2 * 2 * 24  # steps, tokens, sequences, KV heads, layers, n_fac
    assert "sparse, 3 tokens at once" in str(engine.explain())
    assert {row.tokens for row in engine.explain().rows} == {3}
    one = blocks(model, step, cache_for(model, kind), (1,) * 9)
    assert fasa_compile.stats()["multi_token_steps"] == 3
    assert difference(together, one) <= 1e-5
    dense = blocks(model, model, cache_for(model, kind), (3, 3, 3))
    assert difference(together, dense) > 0.05, "the budget has no effect: this cannot fail"


def test_with_left_padding_and_every_reduction():
    model = tiny_llama(layers=2)
    keep = torch.ones_like(IDS)
    keep[1, :25] = 0
    for reduction in ("static", "softmax_sum", "max"):
        rows = [(f"model.layers.{i}.self_attn", 8, 2, 32, half_split(32)) for i in range(2)]
        step = compiled(model, profile_of(rows, 8, "int4", reduction))
        together, one = (
            blocks(model, step, cache_for(model, "static"), sizes, keep=keep) for sizes in ((5, 5), (1,) * 10)
        )
        assert difference(together, one) <= 1e-5, reduction
    assert fasa_compile.stats()["multi_token_steps"] == 6


def test_a_budget_that_leaves_out_one_token_of_the_last_query():
    """Up to the last token everything is within the budget, and equals dense attention."""
    model = tiny_llama(layers=2)
    step = compiled(model, n_fac=START + 5)
    found, dense = (blocks(model, run, cache_for(model, "static"), (6,)) for run in (step, model))
    assert fasa_compile.stats()["multi_token_steps"] == 1
    assert difference(found[:, :-1], dense[:, :-1]) <= 1e-5
    assert difference(found[:, -1], dense[:, -1]) > 1e-4


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_one_graph_serves_all_numbers_of_tokens_and_a_prompt_has_another(kind):
    model = tiny_llama(layers=1)
    engine = backend(llama_profile(1))
    step = torch.compile(model, backend=engine)
    cache = cache_for(model, kind)
    sizes = (3, 5, 1, 2, STEP_TOKENS, 7, STEP_TOKENS + 1, 4)
    found = blocks(model, step, cache, sizes)
    assert [graph.kind for graph in engine.graphs] == ["decode"] * 3 + ["no cached decode"]
    assert engine.graphs[-1].decisions[0].detail == f"{STEP_TOKENS + 1} query tokens"
    stats = fasa_compile.stats()
    assert (stats["sparse_steps"], stats["multi_token_steps"], stats["dense_steps"]) == (7, 6, 1)
    one = blocks(model, step, cache_for(model, kind), (1,) * 34)
    assert difference(found[:, :34], one) <= 1e-5


def test_kinds_of_steps_in_turn_share_the_packed_cache():
    model = tiny_llama(layers=2)
    step = compiled(model, llama_profile(2, fc_format="int4"))
    sizes = (3, 1, 3, 1, 1, 3)
    found = blocks(model, step, cache_for(model, "static"), sizes)
    assert fasa_compile.stats()["graphs"] == 2
    assert fasa_compile.stats()["rebuilt"] == {"new-cache": 2}, "one for each layer, and none for a change of step"
    torch._dynamo.reset()
    assert torch.equal(found[:, :3], blocks(model, step, cache_for(model, "static"), (3,)))
    one = blocks(model, step, cache_for(model, "static"), (1,) * 12)
    assert difference(found, one) <= 1e-5


def test_tokens_that_are_rejected_are_written_over():
    """What speculative decoding does: four tokens, of which one is right, then four from the next place on."""
    torch.manual_seed(0)
    model = Custom(Interleaved)
    rows = [(f"blocks.{i}", 4, 2, 16, tuple((2 * j, 2 * j + 1) for j in range(8))) for i in range(2)]
    step = compiled(model, profile_of(rows, 4, "int4", n_fac=12))
    right = torch.randint(0, model.VOCAB, (1, 60), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def run(n):
        model.reset()
        model(right[:, :40], torch.arange(40))
        found = []
        for at in range(40, 56):
            guess = right[:, at : at + n].clone()
            guess[:, 1:] = (guess[:, 1:] + 1 + at) % model.VOCAB
            found.append(step(guess, torch.arange(at, at + n))[:, :1])
        return torch.cat(found, 1)

    assert difference(run(4), run(1)) <= 1e-5
    stats = fasa_compile.stats()
    assert (stats["sparse_steps"], stats["multi_token_steps"]) == (32, 16)


def test_what_is_no_step():
    """Exact attention, and a causal flag that does not know where the new tokens stand."""
    ids = torch.randint(0, Custom.VOCAB, (1, 44), generator=torch.Generator().manual_seed(1))
    model = Custom(PartialHalfSplit)
    for profile, detail in (("all", "is_causal=True"), (None, "exact attention of several")):
        torch._dynamo.reset()
        engine = backend(profile, n_fac=24 if profile else None, strict=False)
        outs = []
        for step in (torch.compile(model, backend=engine), model):
            model.reset()
            with torch.no_grad():
                model(ids[:, :40], torch.arange(40))
                outs.append(step(ids[:, 40:].clone(), torch.arange(40, 44)))
        assert difference(*outs) <= 1e-5
        found = {(d.action, d.reason) for g in engine.graphs for d in g.decisions}
        assert found == {("dense", "prefill")}
        assert all(detail in d.detail for g in engine.graphs for d in g.decisions)
    assert fasa_compile.stats()["sparse_steps"] == 0


def test_layers_with_a_window():
    """Gemma 3: sliding layers of a hybrid static cache, longer than the window."""
    model = tiny_gemma3()
    step = compiled(model, n_fac=24)
    together, one = (blocks(model, step, cache_for(model, "static"), sizes) for sizes in ((3, 3), (1,) * 6))
    assert fasa_compile.stats()["multi_token_steps"] == 2
    assert difference(together, one) <= 1e-5


def test_k_and_v_in_host_memory():
    """Steps of several read their rows past the hot buffer, and what it holds afterwards is not stale. (The first graph is for three
    tokens, and later ones for any number: where that is a symbol, a hot buffer would be left out anyway.)"""
    model = tiny_llama(layers=2)
    profile, sizes = llama_profile(2, fc_format="int4"), (3, 1, 1, 3, 1, 1, 4, 1, 1)
    expected = blocks(model, compiled(model, profile), cache_for(model, "static"), sizes)
    fasa_compile.reset_stats()
    step = compiled(model, profile, offload="cpu", hot_tokens=40)
    assert torch.equal(blocks(model, step, FasaStaticCache(model.config, max_cache_len=128), sizes), expected)
    stats = fasa_compile.stats()
    assert (stats["sparse_steps"], stats["multi_token_steps"]) == (9, 3)
    assert sum(row["attended"] for row in stats["hot"].values()) == 6 * 2 * 2 * 2 * 24, "single steps alone use it"


@pytest.mark.parametrize("drafts", ["a model", "the prompt"])
def test_assisted_decoding(drafts):
    """Verified tokens are those that sparse decoding alone makes, and with a budget for all of the context those of the model."""
    model, draft = tiny_llama(layers=2), tiny_llama(layers=1)
    text = IDS[:1, :20].repeat(1, 3)
    how = HOW | ({"assistant_model": draft} if drafts == "a model" else {"prompt_lookup_num_tokens": 4})
    alone = model.generate(text, **HOW)
    plain = model.forward
    for n_fac in (24, 200):
        torch._dynamo.reset()
        model.forward = torch.compile(plain, backend=backend(llama_profile(2), n_fac=n_fac))
        greedy = model.generate(text, **HOW)
        fasa_compile.reset_stats()
        assert torch.equal(model.generate(text, **how), greedy)
        assert fasa_compile.stats()["multi_token_steps"] > 0
        assert torch.equal(greedy, alone) == (n_fac == 200)


@pytest.mark.inductor
def test_inductor_compiles_one_graph_for_all_numbers_of_tokens():
    model = tiny_llama(layers=1)
    step = compiled(model, llama_profile(1, fc_format="int4"), inner="inductor")
    found = blocks(model, step, cache_for(model, "static"), (2, 3, 5, 4))
    assert fasa_compile.stats()["graphs"] == 2
    plain = compiled(model, llama_profile(1, fc_format="int4"))
    assert difference(found, blocks(model, plain, cache_for(model, "static"), (1,) * 14)) <= 1e-4


def test_the_audit_looks_at_single_steps():
    model = tiny_llama(layers=2)
    step = compiled(model, llama_profile(2), audit=1)
    blocks(model, step, cache_for(model, "static"), (3, 3))
    assert not fasa_compile.stats().get("lost_mass")
    decode(model, step, IDS[:, :64], cache_for(model, "static"), 2)
    assert fasa_compile.stats()["lost_mass"]
