"""A model that is changed after it was compiled: its weights replaced, a part of it compiled on its own."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest
import torch
from models import Custom, Interleaved, cache_for, decode, difference, llama_profile, profile_of, tiny_llama
from torch import nn

import fasa_compile
from fasa_compile import FasaWarning, ProfileError, fasa_backend
from fasa_compile.fingerprint import weights_fingerprint
from fasa_compile.profiles import ModelFacts

IDS = torch.randint(0, 512, (1, 60), generator=torch.Generator().manual_seed(5))
STEPS = 4


def other_weights(model):
    """A model of the same sizes with other values."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1).add_(0.01)
    return other


def in_place(model, other):
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)


def through_data(model, other):
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = theirs.detach().clone()


def assigned(model, other):
    model.load_state_dict(other.state_dict(), assign=True)


def new_modules(model, other):
    for mine, theirs in zip(model.model.layers, other.model.layers, strict=True):
        mine.self_attn.q_proj = copy.deepcopy(theirs.self_attn.q_proj)
        mine.self_attn.k_proj.weight = nn.Parameter(theirs.self_attn.k_proj.weight.detach().clone())


WAYS = [in_place, through_data, assigned, new_modules]


def answers(model, step):
    return decode(model, step, IDS, cache_for(model, "static"), STEPS)


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow])])
def test_weights_that_are_replaced_later(inner):
    """The compiled model answers with the weights that it has now, in a cache in use and in a new one."""
    model = tiny_llama(layers=1)
    backend = fasa_backend(llama_profile(1), n_fac=100, inner=inner, strict=True, check_weights=False)
    step = torch.compile(model, backend=backend)
    cache, twin = cache_for(model, "static"), cache_for(model, "static")
    decode(model, step, IDS, cache, STEPS)
    decode(model, model, IDS, twin, STEPS)
    ways = WAYS if inner == "eager" else [through_data]
    before = answers(model, step)
    for replace in ways:
        replace(model, other_weights(model))
        with torch.no_grad():  # a cache that old weights have filled
            token = IDS[:, :1].clone()
            in_use = step(input_ids=token, past_key_values=cache).logits
            assert difference(in_use, model(input_ids=token, past_key_values=twin).logits) <= 1e-4, replace
        after = answers(model, step)
        assert difference(after, answers(model, model)) <= 1e-4, replace
        assert difference(after, before) > 1e-3, replace
        before = after
    assert fasa_compile.stats()["sparse_steps"] == 2 * STEPS + len(ways) * (STEPS + 1)


def profiled(model):
    """A profile that knows the model's weights."""
    layers = len(model.model.layers)
    facts = ModelFacts("LlamaForCausalLM", weights_fingerprint(model), layers, {})
    return dataclasses.replace(llama_profile(layers), model=facts)


def test_a_profile_of_the_weights_before_is_an_error_at_the_next_prompt():
    model = tiny_llama(layers=1)
    old = copy.deepcopy(model)
    step = torch.compile(model, backend=fasa_backend(profiled(model), n_fac=100, inner="eager"))
    answers(model, step)
    in_place(model, old)  # written, and the same values: still the profile's model
    assert difference(answers(model, step), answers(model, model)) <= 1e-4
    for replace in WAYS:
        replace(model, other_weights(model))
        with pytest.raises(Exception, match="made for other weights") as raised:
            answers(model, step)
        assert isinstance(raised.value, ProfileError) or "ProfileError" in str(raised.value), replace
        replace(model, old)
    assert difference(answers(model, step), answers(model, model)) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == 3 * STEPS


def test_a_profile_of_the_weights_before_is_an_error_at_the_next_graph():
    model = tiny_llama(layers=1)
    step = torch.compile(model, backend=fasa_backend(profiled(model), n_fac=100, inner="eager"), dynamic=False)
    answers(model, step)
    in_place(model, other_weights(model))
    with pytest.raises(Exception, match="made for other weights"):
        decode(model, step, IDS, cache_for(model, "static", 192), STEPS)


# ---- parts that are compiled on their own -----------------------------------------------------------------------------


def attention_alone(model):
    for layer in model.model.layers:
        layer.self_attn = torch.compile(layer.self_attn, backend="eager")


def mlp_and_a_method_alone(model):
    model.model.layers[1].mlp = torch.compile(model.model.layers[1].mlp, backend="eager")
    norm = model.model.layers[0].input_layernorm
    norm.forward = torch.compile(norm.forward, backend="eager")


def layers_in_place(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")


@pytest.mark.parametrize("part", [attention_alone, mlp_and_a_method_alone, layers_in_place], ids=lambda f: f.__name__)
def test_a_part_that_somebody_else_compiled(part):
    """The whole under our backend: its graph takes the part in, and the layers keep their names and the profile its weights."""
    model = tiny_llama(layers=2)
    dense = answers(model, model)
    profile = profiled(model)
    part(model)
    backend = fasa_backend(profile, n_fac=100, inner="eager", strict=True)
    found = answers(model, torch.compile(model, backend=backend))
    assert difference(found, dense) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == STEPS
    assert {row.layer for row in backend.explain().rows} == {f"model.layers.{i}.self_attn" for i in range(2)}


def test_a_part_that_dynamo_leaves_alone():
    """A layer's MLP that is not compiled at all breaks the graph; what is found on either side is right."""
    model = tiny_llama(layers=2)
    dense = answers(model, model)
    mlp = model.model.layers[0].mlp
    mlp.forward = torch._dynamo.disable(mlp.forward)
    backend = fasa_backend(llama_profile(2), n_fac=100, inner="eager", check_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FasaWarning)
        found = answers(model, torch.compile(model, backend=backend))
    assert difference(found, dense) <= 1e-4
    rows = [row for row in backend.explain().rows if row.decision != "prefill"]
    assert len(rows) >= 2
    stats = fasa_compile.stats()
    assert stats["sites"] == stats["rewritten_sites"] + sum(stats["declined"].values())


def test_our_backend_on_the_stack_of_layers_alone():
    """``model.model`` compiled with the profile of the whole model, the head outside."""
    model = tiny_llama(layers=2)
    dense = answers(model, model)
    profile = profiled(model)
    backend = fasa_backend(profile, n_fac=100, inner="eager", strict=True)
    model.model.forward = torch.compile(model.model.forward, backend=backend)
    assert difference(answers(model, model), dense) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == STEPS


def test_our_backend_on_each_layer_stays_dense():
    """One graph may serve all layers, so no layer's entry can be picked for it."""
    model = tiny_llama(layers=2)
    dense = answers(model, model)
    backend = fasa_backend(llama_profile(2), n_fac=20, inner="eager", check_weights=False)
    for layer in model.model.layers:
        layer.compile(backend=backend)
    with pytest.warns(FasaWarning, match="unknown-layer"):
        found = answers(model, model)
    assert difference(found, dense) <= 1e-5
    assert {row.reason for row in backend.explain().rows if row.reason != "prefill"} == {"unknown-layer"}


def test_two_backends_in_one_model():
    """An attention of one's own compiled with exact scores inside a model compiled with a profile: the outer one's graph has it."""
    model = Custom(Interleaved).eval()
    pairs = tuple((2 * i, 2 * i + 1) for i in range(8))
    profile = profile_of([(f"blocks.{i}", 4, 2, 16, pairs) for i in range(2)], 3, n_fac=60)
    inside = fasa_backend("all", n_fac=60, inner="eager")
    model.blocks[0].compile(backend=inside)
    outside = fasa_backend(profile, inner="eager", strict=True, check_weights=False)
    step = torch.compile(model, backend=outside)
    tokens = torch.randint(0, 128, (1, 44), generator=torch.Generator().manual_seed(2))
    plain = Custom(Interleaved).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        plain(tokens[:, :40], torch.arange(40))
        for block, other in zip(model.blocks, plain.blocks, strict=True):
            block.k_cache.copy_(other.k_cache)
            block.v_cache.copy_(other.v_cache)
        for i in range(40, 44):
            token, pos = tokens[:, i : i + 1].clone(), torch.tensor([i])
            assert difference(step(token, pos), plain(token, pos)) <= 1e-4
    assert [row.layer for row in outside.explain().rows] == ["blocks.0", "blocks.1"]
    assert not inside.graphs
