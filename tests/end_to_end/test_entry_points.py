"""The ways people really start it, each with a counter that proves that our graph ran."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from models import cache_for, decode, difference, llama_profile, tiny_llama

import fasa_compile
from fasa_compile import backend as backend_module
from fasa_compile import fasa_backend

IDS = torch.randint(4, 500, (1, 40), generator=torch.Generator().manual_seed(3))
NEW = 6


def backend(**how):
    profile = llama_profile(2)
    # generate() makes a cache of 45 slots. A budget of 45 would leave it dense; 44 tokens are all there are but in the last step.
    return fasa_backend(profile, **({"n_fac": 44, "inner": "eager", "check_weights": False} | how))


def greedy(model, **how):
    out = model.generate(IDS, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0, **how)
    assert out.shape[1] == IDS.shape[1] + NEW
    return out[:, :-1]


def test_calling_the_compiled_model():  # trial A1 (a)
    model = tiny_llama(layers=2)
    expected = decode(model, model, IDS, cache_for(model, "static"), 4)
    out = decode(model, torch.compile(model, backend=backend()), IDS, cache_for(model, "static"), 4)
    assert fasa_compile.stats()["sparse_steps"] == 4
    assert difference(out, expected) <= 1e-4


def test_generate_with_a_compiled_forward():  # trial A1 (c)
    model = tiny_llama(layers=2)
    expected = greedy(model, cache_implementation="static", disable_compile=True)
    model.forward = torch.compile(model.forward, backend=backend())
    out = greedy(model, cache_implementation="static", disable_compile=True)
    assert fasa_compile.stats()["sparse_steps"] == NEW - 1
    assert torch.equal(out, expected)


def test_generate_after_model_compile():  # trial A1 (d)
    model = tiny_llama(layers=2)
    expected = greedy(model, cache_implementation="static", disable_compile=True)
    model.compile(backend=backend())
    out = greedy(model, cache_implementation="static", disable_compile=True)
    assert fasa_compile.stats()["sparse_steps"] == NEW - 1
    assert torch.equal(out, expected)


def test_generate_with_a_compile_config(monkeypatch):
    from transformers import CompileConfig

    model = tiny_llama(layers=2)
    # On a CPU transformers compiles only when told that it should.
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *args, **kwargs: True)
    expected = greedy(model, cache_implementation="static", disable_compile=True)
    config = CompileConfig(backend=backend(), fullgraph=False, dynamic=None, mode=None)
    out = greedy(model, cache_implementation="static", compile_config=config)
    assert fasa_compile.stats()["sparse_steps"] >= NEW - 2
    assert torch.equal(out, expected)


def test_generate_of_the_compiled_wrapper_says_that_it_did_nothing(caplog):  # trial A1 (b)
    model = tiny_llama(layers=2)
    made = backend()
    greedy(torch.compile(model, backend=made), cache_implementation="static", disable_compile=True)
    assert fasa_compile.stats()["graphs"] == 0, "transformers compiles generate() now: update the README"
    assert "model.forward = torch.compile(model.forward" in str(made.explain())
    with caplog.at_level(logging.WARNING, logger="fasa_compile"):
        backend_module.warn_unused()
    assert "never called" in caplog.text


def test_by_registered_name():
    model = tiny_llama(layers=2)
    options = {"profile": "all", "n_fac": 64, "inner": "eager"}
    out = decode(model, torch.compile(model, backend="fasa", options=options), IDS, cache_for(model, "static"), 3)
    assert fasa_compile.stats()["sparse_steps"] == 3
    assert difference(out, decode(model, model, IDS, cache_for(model, "static"), 3)) <= 1e-4


def test_a_profile_file_that_is_written_anew_is_another_profile(tmp_path):
    path, model = tmp_path / "profile.json", tiny_llama(layers=2)
    options = {"profile": str(path), "n_fac": 64, "inner": "eager", "check_weights": False}
    for n_tip in (4, 12):
        torch._dynamo.reset()
        llama_profile(2, n_tip=n_tip).save(path)
        decode(model, torch.compile(model, backend="fasa", options=options), IDS, cache_for(model, "static"), 3)
        made = list(backend_module._named.values())[-1]
        assert {d.profile.n_tip for d in made.graphs[-1].decisions} == {n_tip}


def test_registered_name_without_a_profile_is_an_error():
    with pytest.raises(Exception, match=r"needs options=.*profile"):
        torch.compile(lambda x: x + 1, backend="fasa")(torch.ones(2))


def test_a_copy_reports_to_the_original():
    made = backend()
    assert copy.deepcopy(made) is made
    assert copy.copy(made) is made


def test_mode_and_options_reach_the_inner_compiler():
    seen = []

    def inner(gm, example_inputs, **given):
        seen.append(given)
        return gm.forward

    function = lambda x: torch.softmax(x, -1)  # noqa: E731
    torch.compile(function, backend=backend(inner=inner), mode="reduce-overhead")(torch.ones(4))
    torch._dynamo.reset()
    torch.compile(function, backend=backend(inner=inner), options={"max_autotune": True})(torch.ones(4))
    assert seen == [{"mode": "reduce-overhead"}, {"options": {"max_autotune": True}}]


@pytest.mark.inductor
def test_options_reach_inductor():
    function = lambda x: x * 2 + 1  # noqa: E731
    torch.compile(function, backend=backend(inner="inductor"), options={"epilogue_fusion": False})(torch.ones(4))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no_such_option"):
        torch.compile(function, backend=backend(inner="inductor"), options={"no_such_option": 1})(torch.ones(4))


def test_compiling_generate_itself():  # trial A3
    model = tiny_llama(layers=1)
    expected = greedy(model)
    backend_all = fasa_backend("all", n_fac=64, inner="eager")
    how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    out = torch.compile(model.generate, backend=backend_all)(IDS, **how)[:, :-1]
    assert torch.equal(out, expected)


def test_graph_count_stays_constant():  # O-graphs, trial B2
    model = tiny_llama(layers=1)
    made = fasa_backend("all", n_fac=12, n_sink=1, n_recent=1, inner="eager")
    ids = torch.randint(0, 500, (1, 17 + 64), generator=torch.Generator().manual_seed(1))
    decode(model, torch.compile(model, backend=made), ids, cache_for(model, "dynamic"), 64)
    assert fasa_compile.stats()["graphs"] <= 2
    assert fasa_compile.stats()["sparse_steps"] == 64
