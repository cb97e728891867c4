"""What a rewritten model computes: dense attention when the budget covers the context, the plain reference when it does not."""

from __future__ import annotations

import pytest
import torch
from models import (
    Custom,
    Interleaved,
    PartialHalfSplit,
    cache_for,
    compiled,
    decode,
    decode_custom,
    difference,
    eager_fasa,
    half_split,
    llama_profile,
    profile_of,
    tiny_llama,
)

import fasa_compile

IDS = torch.randint(0, 512, (2, 60), generator=torch.Generator().manual_seed(3))


def custom_profile(attention: type, n_tip: int = 3, **budget: int):
    pairs = tuple((2 * i, 2 * i + 1) for i in range(8)) if attention is Interleaved else half_split(8)
    return profile_of([(f"blocks.{i}", 4, 2, 16, pairs) for i in range(2)], n_tip, **budget)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("fc_format", ["all", "fp32", "bf16", "fp8", "int8", "int4"])
def test_budget_covering_the_context_is_dense(kind, fc_format):
    model = tiny_llama()
    dense = decode(model, model, IDS, cache_for(model, kind), 12)
    profile = "all" if fc_format == "all" else llama_profile(fc_format=fc_format)
    sparse = decode(model, compiled(model, profile, n_fac=64), IDS, cache_for(model, kind), 12)
    assert fasa_compile.stats()["sparse_steps"] >= 11, "the rewritten graph did not run"
    assert difference(sparse, dense) <= 1e-4


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("fc_format", ["all", "fp32", "int4"])
def test_sparse_equals_the_plain_reference(kind, fc_format):
    model = tiny_llama()
    profile = None if fc_format == "all" else llama_profile(fc_format=fc_format)
    with eager_fasa(model, profile, n_fac=16, n_sink=2, n_recent=4):
        reference = decode(model, model, IDS, cache_for(model, kind), 12)
    dense = decode(model, model, IDS, cache_for(model, kind), 12)
    step = compiled(model, profile or "all", n_fac=16, n_sink=2, n_recent=4)
    sparse = decode(model, step, IDS, cache_for(model, kind), 12)
    assert fasa_compile.stats()["sparse_steps"] == 12
    assert difference(sparse, reference) <= 1e-4
    assert difference(sparse, dense) > 0.05, "the budget has no effect: this test could not fail"


@pytest.mark.inductor
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_inductor_computes_what_eager_computes(kind):
    model = tiny_llama(layers=2)
    profile = llama_profile(layers=2, fc_format="int4")
    with eager_fasa(model, profile):
        reference = decode(model, model, IDS, cache_for(model, kind), 8)
    sparse = decode(model, compiled(model, profile, inner="inductor"), IDS, cache_for(model, kind), 8)
    assert fasa_compile.stats()["sparse_steps"] == 8
    assert difference(sparse, reference) <= 1e-4


def test_half_precision_with_a_covering_budget_is_dense():
    model = tiny_llama().to(torch.bfloat16)
    dense = decode(model, model, IDS, cache_for(model, "static"), 12)
    sparse = decode(model, compiled(model, llama_profile(), n_fac=64), IDS, cache_for(model, "static"), 12)
    assert fasa_compile.stats()["sparse_steps"] == 12
    assert difference(sparse, dense) <= 3e-2 * dense.abs().max().item()


@pytest.mark.parametrize("n_fac", [64, 8])
def test_left_padded_rows_equal_their_own_run(n_fac):  # trials C1 and C2
    model = tiny_llama(layers=2)
    lengths, steps, width = (5, 19, 40), 4, 44
    ids = torch.randint(0, 512, (3, width), generator=torch.Generator().manual_seed(5))
    keep = torch.zeros(3, width, dtype=torch.long)
    for row, n in enumerate(lengths):
        keep[row, width - steps - n :] = 1
    step = compiled(model, llama_profile(2), n_fac=n_fac, n_sink=1, n_recent=2)
    together = decode(model, step, ids, cache_for(model, "static"), steps, attention_mask=keep)
    for row, n in enumerate(lengths):
        own = ids[row : row + 1, width - steps - n :]
        alone = decode(model, step, own, cache_for(model, "static"), steps)
        assert difference(together[row : row + 1], alone) <= 2e-4, f"row {row}"
    assert fasa_compile.stats()["sparse_steps"] == steps * 4


@pytest.mark.parametrize("attention", [Interleaved, PartialHalfSplit])
def test_custom_modules_are_rewritten(attention):
    model = Custom(attention).eval()
    ids = torch.randint(0, 128, (1, 50), generator=torch.Generator().manual_seed(2))
    dense = decode_custom(model, model, ids, 10)
    covering = decode_custom(model, compiled(model, custom_profile(attention), n_fac=60), ids, 10)
    assert fasa_compile.stats()["sparse_steps"] >= 9
    assert difference(covering, dense) <= 1e-4
    fasa_compile.reset_stats()
    step = compiled(model, custom_profile(attention, n_fac=12, n_sink=1, n_recent=2))
    sparse = decode_custom(model, step, ids, 10)
    assert fasa_compile.stats()["rewritten_sites"] >= 2
    assert fasa_compile.stats()["sparse_steps"] == 10
    assert difference(sparse, dense) > 0.01


@pytest.mark.parametrize("attention", [Interleaved, PartialHalfSplit])
def test_exact_scores_select_the_largest_weights(attention):
    """With profile "all" a budget of n keeps the n largest attention weights: the result is near dense and nears it with n."""
    model = Custom(attention).eval()
    ids = torch.randint(0, 128, (1, 50), generator=torch.Generator().manual_seed(2))
    dense = decode_custom(model, model, ids, 10)
    errors = [
        (decode_custom(model, compiled(model, "all", n_fac=n, n_sink=0, n_recent=0), ids, 10) - dense)
        .pow(2)
        .mean()
        .item()
        for n in (2, 8, 24, 60)
    ]
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 1e-9


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_scale_comes_from_the_graph(scale):  # trial I1
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.scaling = scale
    dense = decode(model, model, IDS, cache_for(model, "static"), 6)
    sparse = decode(model, compiled(model, llama_profile(), n_fac=64), IDS, cache_for(model, "static"), 6)
    assert fasa_compile.stats()["sparse_steps"] == 6
    assert difference(sparse, dense) <= 1e-4


@pytest.mark.parametrize("context", [1, 2, 3, 5, 9, 31, 33])
def test_budget_larger_than_what_is_there(context):  # trial J7
    model = tiny_llama(layers=1)
    ids = IDS[:1, : context + 3]
    dense = decode(model, model, ids, cache_for(model, "static"), 3)
    for n_fac in (40, 100):
        sparse = decode(model, compiled(model, llama_profile(1), n_fac=n_fac), ids, cache_for(model, "static"), 3)
        assert difference(sparse, dense) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == 6


def test_row_without_a_valid_token_does_not_spread():  # trial C4
    model = tiny_llama()
    kind = cache_for(model, "static")
    with torch.no_grad():
        model(torch.cat([IDS, IDS[:1]]), past_key_values=kind)
    allowed = torch.ones(3, 1, 1, 128, dtype=torch.bool)
    allowed[..., 61:] = False
    allowed[1] = False
    token = torch.tensor([[7], [8], [9]])
    with torch.no_grad():
        sparse = compiled(model, llama_profile())(
            input_ids=token, past_key_values=kind, attention_mask=allowed, position_ids=torch.full((3, 1), 60)
        ).logits
    assert fasa_compile.stats()["sparse_steps"] == 1
    assert sparse.isfinite().all()


def test_an_explicit_mask_with_holes_is_obeyed():  # trial B8
    model = tiny_llama()
    allowed = torch.rand(2, 1, 1, 128, generator=torch.Generator().manual_seed(0)) < 0.6
    allowed[..., 55] = True
    allowed[..., 60:] = False
    token = torch.tensor([[7], [8]])
    outcomes = []
    for n_fac in (None, 70, 8):
        cache = cache_for(model, "static")
        with torch.no_grad():
            model(IDS[:, :55], past_key_values=cache)
            step = model if n_fac is None else compiled(model, "all", n_fac=n_fac, n_sink=1, n_recent=1)
            outcomes.append(step(input_ids=token, past_key_values=cache, attention_mask=allowed).logits)
    assert difference(outcomes[1], outcomes[0]) <= 1e-4
    assert difference(outcomes[2], outcomes[0]) > 1e-3
    assert fasa_compile.stats()["sparse_steps"] == 2


def test_half_precision_tables_far_into_a_long_context():  # trial H9
    """At position 16,001 a slow plane of a bf16 table does not move between two positions; the rotation is proven all the same."""
    model = tiny_llama(layers=1, max_position_embeddings=40000).to(torch.bfloat16)
    cache = cache_for(model, "static", 16400)
    with torch.no_grad():
        model(IDS[:1, :4], past_key_values=cache)
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(16001)
        token = IDS[:1, :1].clone()
        dense = model(input_ids=token, past_key_values=cache).logits
        for layer in cache.layers:
            layer.cumulative_length.fill_(16001)
        sparse = compiled(model, llama_profile(1), n_fac=16384)(input_ids=token, past_key_values=cache).logits
    assert fasa_compile.stats()["sparse_steps"] == 1
    assert difference(sparse, dense) <= 3e-2 * dense.abs().max().item()


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_the_operators_are_wired_as_the_traced_reference_is(kind, inner, monkeypatch):
    """On a GPU the graph calls custom operators. They exist on the CPU too, so their place in the graph is tested here."""
    from fasa_compile import rewrite

    model = tiny_llama(layers=2)
    profile = llama_profile(2, fc_format="int4")
    expected = decode(model, compiled(model, profile), IDS, cache_for(model, kind), 8)
    fasa_compile.reset_stats()
    monkeypatch.setattr(rewrite, "uses_kernels", lambda device: True)
    found = decode(model, compiled(model, profile, inner=inner), IDS, cache_for(model, kind), 8)
    assert fasa_compile.stats()["sparse_steps"] == 8
    assert difference(found, expected) <= 1e-5


def test_a_mask_over_a_cache_of_symbolic_length():
    """Two static caches of other lengths: Dynamo makes the length a symbol, with a mask over it."""
    model = tiny_llama(layers=2)
    step = compiled(model, llama_profile(2, fc_format="int4"), n_fac=64)
    for length in (128, 160, 200):
        dense = decode(model, model, IDS, cache_for(model, "static", length), 3)
        assert difference(decode(model, step, IDS, cache_for(model, "static", length), 3), dense) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == 9
    assert fasa_compile.stats()["graphs"] == 2
