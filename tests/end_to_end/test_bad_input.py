"""Bad input: each case one clear error, or dense attention with the reason in explain()."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import warnings
from types import SimpleNamespace

import models
import pytest
import torch
from models import (
    Custom,
    Interleaved,
    cache_for,
    decode,
    decode_custom,
    difference,
    half_split,
    llama_profile,
    profile_of,
    tiny_llama,
)

import fasa_compile
from fasa_compile import BudgetError, FasaWarning, NoSitesError, ProfileError, fasa_backend
from fasa_compile.fingerprint import weights_fingerprint
from fasa_compile.profiles import ModelFacts

IDS = torch.randint(0, 512, (1, 44), generator=torch.Generator().manual_seed(3))


def first_step(model, profile, kind: str = "static", **how):
    """One decode step; what it raises inside the compiler comes out as Dynamo wraps it."""
    made = fasa_backend(profile, **({"inner": "eager", "check_weights": False} | how))
    out = decode(model, torch.compile(model, backend=made), IDS, cache_for(model, kind), 4)
    return made, out


def reasons(made) -> set[str]:
    return {row.reason for row in made.explain().rows}


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"n_fac": 0}, "n_fac"),
        ({"n_fac": -1}, "n_fac"),
        ({"n_fac": 2.5}, "n_fac"),
        ({"n_fac": "64"}, "n_fac"),
        ({"n_fac": True}, "n_fac"),
        ({"n_fac": 8, "n_sink": 4, "n_recent": 8}, "n_sink"),
        ({"n_sink": -1}, "n_sink"),
    ],
)
def test_impossible_budgets(budget, message):  # trial J7
    with pytest.raises(BudgetError, match=message):
        fasa_backend("all", **budget)


def test_unknown_inner_compiler():
    with pytest.raises(TypeError, match=r"inner.*'nvfuser'"):
        fasa_backend("all", inner="nvfuser")


def test_missing_profile_file():
    with pytest.raises((ProfileError, FileNotFoundError), match="no_such_profile"):
        fasa_backend("no_such_profile.json")


def test_profile_from_a_newer_schema(tmp_path):
    path = tmp_path / "profile.json"
    llama_profile().save(path)
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"schema_version": document["schema_version"] + 1}))
    with pytest.raises(ProfileError, match="newer"):
        fasa_backend(path)


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (llama_profile(2), "'model.layers.2.self_attn'.*not in the profile"),
        (llama_profile(4), "1 of them are not in .*'model.layers.3.self_attn'"),
        (profile_of([(f"model.layers.{i}.self_attn", 8, 2, 64, half_split(64)) for i in range(3)], 8), "head_dim"),
        (profile_of([(f"model.layers.{i}.self_attn", 8, 4, 32, half_split(32)) for i in range(3)], 8), "num_kv_heads"),
        (profile_of([(f"model.layers.{i}.self_attn", 8, 2, 32, half_split(16)) for i in range(3)], 8), "rope"),
        (
            profile_of(
                [
                    (f"model.layers.{i}.self_attn", 8, 2, 32, tuple((2 * j, 2 * j + 1) for j in range(16)))
                    for i in range(3)
                ],
                8,
            ),
            "rope",
        ),
    ],
    ids=["fewer layers", "more layers", "head_dim", "kv heads", "rotary width", "pairing"],
)
def test_profile_of_another_model(profile, message):  # trial Q3
    model = tiny_llama()
    with pytest.raises(Exception, match=message) as raised:
        first_step(model, profile)
    assert re.search("(Profile|Field)Error", str(raised.value))
    assert fasa_compile.stats()["sparse_steps"] == 0


def test_profile_of_other_weights():
    model = tiny_llama()
    profile = llama_profile()
    mine = dataclasses.replace(profile, model=ModelFacts("LlamaForCausalLM", weights_fingerprint(model), 3, {}))
    first_step(model, mine, check_weights=True)
    assert fasa_compile.stats()["sparse_steps"] == 4
    torch._dynamo.reset()
    model.model.layers[1].self_attn.q_proj.weight.data.mul_(-1)
    with pytest.raises(Exception, match=r"made for other weights.*check_weights=False"):
        first_step(model, mine, check_weights=True)


def test_a_model_without_rope_is_left_alone_and_says_so():  # trial C9
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=128, n_embd=64, n_layer=2, n_head=4)).eval()
    with pytest.warns(FasaWarning, match="no-rope"):
        made, out = first_step(model, "all", n_fac=8, n_sink=1, n_recent=1)
    assert difference(out, decode(model, model, IDS, cache_for(model, "static"), 4)) <= 1e-4
    assert reasons(made) == {"no-rope"}
    stats = fasa_compile.stats()
    assert stats["rewritten_sites"] == 0
    assert stats["sites"] == sum(stats["declined"].values()) == 2
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"NoSitesError|no attention site"):
        first_step(model, "all", n_fac=8, n_sink=1, n_recent=1, strict=True)
    assert issubclass(NoSitesError, fasa_compile.FasaError)


@pytest.mark.parametrize("length", [1, 12])
def test_training_gives_the_ordinary_gradients(length):  # trial P1
    model = tiny_llama(layers=2).train()
    ids = IDS[:, :length]
    cache = cache_for(model, "dynamic") if length == 1 else None
    if cache is not None:
        with torch.no_grad():
            model(IDS[:, 1:20], past_key_values=cache)

    def gradients(step):
        model.zero_grad()
        given = {} if cache is None else {"past_key_values": copy.deepcopy(cache)}
        step(input_ids=ids, **given).logits.float().logsumexp(-1).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients(model)
    made = fasa_backend("all", n_fac=8, n_sink=1, n_recent=1, inner="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FasaWarning)
        found = gradients(torch.compile(model, backend=made))
    assert any("torch.no_grad()" in str(w.message) for w in caught) == (length == 1)
    assert fasa_compile.stats()["sparse_steps"] == 0
    for a, b in zip(expected, found, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    if length == 1:
        assert reasons(made) == {"requires-grad"}


def test_a_cache_within_the_budget_stays_dense_without_a_warning():
    model = tiny_llama()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FasaWarning)
        made, out = first_step(model, llama_profile(), n_fac=128)
    assert reasons(made) == {"within-budget"}
    assert difference(out, decode(model, model, IDS, cache_for(model, "static"), 4)) <= 1e-5


def test_layers_that_the_profile_calls_dense_stay_dense():
    model = tiny_llama()
    profile = llama_profile()
    layers = (dataclasses.replace(profile.layers[0], dense=True), *profile.layers[1:])
    made, _ = first_step(model, dataclasses.replace(profile, layers=layers))
    assert [row.decision for row in made.explain().rows] == ["dense", "sparse", "sparse"]
    assert made.explain().rows[0].reason == "profile-dense"


@pytest.mark.parametrize("stage", ["capture", "match", "rewrite", "inner"])
def test_a_failing_stage_leaves_the_model_dense(stage, monkeypatch):  # trial I8
    from fasa_compile import backend as module

    model = tiny_llama()
    expected = decode(model, model, IDS, cache_for(model, "static"), 4)

    def broken(*args, **kwargs):
        raise RuntimeError("planted failure")

    how = {}
    if stage == "inner":
        how["inner"] = lambda gm, inputs: broken() if any("fasa" in n.name for n in gm.graph.nodes) else gm.forward
    elif stage == "rewrite":
        # After half of the graph has been changed.
        from fasa_compile import rewrite as rewriting

        whole, calls = rewriting._emit_site, iter(range(9))
        monkeypatch.setattr(rewriting, "_emit_site", lambda *a: whole(*a) if next(calls) < 1 else broken())
    else:
        monkeypatch.setattr(module, stage, broken)
    with pytest.warns(FasaWarning, match="planted failure"):
        made, out = first_step(model, llama_profile(), **how)
    assert difference(out, expected) <= 1e-5
    assert fasa_compile.stats()["sparse_steps"] == 0
    assert reasons(made) <= {"capture-failed", "rewrite-failed"}
    stats = fasa_compile.stats()
    assert stats["sites"] == sum(stats["declined"].values()) > 0


def test_a_gpu_without_triton_stays_dense(monkeypatch):
    from fasa_compile import plan

    assert not plan.kernels_missing(torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(plan.importlib.util, "find_spec", lambda name: None)
        assert plan.kernels_missing(torch.device("cuda"))
        assert not plan.kernels_missing(torch.device("cpu"))
    monkeypatch.setattr(plan, "kernels_missing", lambda device: True)
    with pytest.warns(FasaWarning, match="triton"):
        made, out = first_step(tiny_llama(), llama_profile())
    assert reasons(made) == {"no-triton"}
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("problem", "raised"),
    [
        (KeyboardInterrupt("planted"), KeyboardInterrupt),
        (ProfileError("planted"), torch._dynamo.exc.BackendCompilerFailed),  # Dynamo's, around ours
    ],
    ids=["interrupt", "ours"],
)
def test_interrupts_are_not_swallowed(problem, raised, monkeypatch):
    """Nor is an error that this package raises on purpose."""
    from fasa_compile import backend as module

    def stop(*args, **kwargs):
        raise problem

    monkeypatch.setattr(module, "match", stop)
    with pytest.raises(raised, match="planted"):
        first_step(tiny_llama(), llama_profile())


@pytest.mark.parametrize("place", ["rope", "cache", "mlp"])
def test_graph_breaks(place, monkeypatch):  # trial A4
    class Broken(Interleaved):
        @staticmethod
        def rotate(x, table):
            turned = Interleaved.rotate(x, table)
            if place == "rope":
                torch._dynamo.graph_break()
            return turned

        def forward(self, x, pos, table, mask):
            out = super().forward(x, pos, table, mask)
            if place == "mlp":
                torch._dynamo.graph_break()
            return out

    whole = torch.nn.functional.scaled_dot_product_attention

    def attention(*args, **kwargs):
        torch._dynamo.graph_break()
        return whole(*args, **kwargs)

    if place == "cache":
        monkeypatch.setattr(models, "F", SimpleNamespace(scaled_dot_product_attention=attention))
    model = Custom(Broken).eval()
    ids = torch.randint(0, 128, (1, 30), generator=torch.Generator().manual_seed(2))
    dense = decode_custom(model, model, ids, 4)
    pairs = tuple((2 * i, 2 * i + 1) for i in range(8))
    mine = profile_of([(f"blocks.{i}", 4, 2, 16, pairs) for i in range(2)], 3)
    for profile in ("all", mine):
        torch._dynamo.reset()
        made = fasa_backend(profile, n_fac=64, inner="eager", check_weights=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FasaWarning)
            out = decode_custom(model, torch.compile(model, backend=made), ids, 4)
        assert difference(out, dense) <= 1e-4
        rows = made.explain().rows
        assert rows, "an attention is missing from the report"
        if place != "mlp":
            assert {row.reason for row in rows} <= {"incomplete-pattern", "no-rope", "cross-attention"}
        elif profile == "all":
            assert all(row.decision == "sparse" for row in rows)
        else:
            # One graph serves both blocks, so neither block's entry may be used for it.
            assert {row.reason for row in rows} == {"unknown-layer"}
