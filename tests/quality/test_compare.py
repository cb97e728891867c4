"""The comparison of selection methods: one pass is many decode steps, and each method selects what its definition says."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import fasa_compile
from fasa_compile.profiles import Budget

pytest.importorskip("transformers")

import compare
import one_pass
import token_selectors as ts
from fasa_compile.evaluation import decode, like, prefill, step_of
from hooked_attention import hooked

LENGTH, LAST, BUDGET = 96, 24, Budget(12, 2, 3)


@pytest.mark.parametrize("reduction", ["static", "affine", "softmax_sum", "max"])
def test_one_pass_is_decode_step_by_step(model: Any, reduction: str) -> None:
    ids = torch.randint(1, 128, (1, LENGTH))
    start, profile = LENGTH - LAST - 1, fasa_compile.calibrate(model, ids, progress=False)
    tokens = ids[0, start:-1]
    with hooked(model, profile, BUDGET, reduction=reduction):
        steps = decode(step_of(model.forward), like(model, prefill(model, ids[:, :start], LENGTH)), tokens).log_probs
    layers = {layer.layer: layer for layer in profile.layers}
    with one_pass.harness(model) as h:
        cache = one_pass.prefill(h, ids[0, :start])
        sparse = one_pass.forced(h, cache, start, tokens, ts.fasa(layers, BUDGET, profile.fc_format, reduction))
        dense = one_pass.forced(h, cache, start, tokens, ts.dense())
    torch.testing.assert_close(sparse, steps, atol=1e-4, rtol=1e-4)
    assert (sparse - dense).abs().max() > 0.05  # else the selection changed nothing and the test shows nothing
    torch.testing.assert_close(dense, model(ids).logits[0, start:-1].log_softmax(-1), atol=1e-4, rtol=1e-4)


def test_blocks_do_not_see_each_other(model: Any) -> None:
    text, asked = torch.randint(1, 128, (40,)), torch.randint(1, 128, (2, 5))
    with one_pass.harness(model) as h:
        cache = one_pass.prefill(h, text)
        blocks = torch.tensor([0] * 5 + [1] * 5)
        both = one_pass.forced(h, cache, 40, asked.flatten(), ts.streaming(BUDGET), blocks)
        alone = [one_pass.forced(h, cache, 40, one, ts.streaming(BUDGET)) for one in asked]
    torch.testing.assert_close(both, torch.cat(alone), atol=1e-4, rtol=1e-4)


@pytest.fixture
def scene() -> ts.Scene:
    n, length = 3, 64
    allowed = torch.arange(length)[None, :] <= length - n + torch.arange(n)[:, None]
    q, k = torch.randn(4, n, 8), torch.randn(2, length, 8)
    return ts.Scene(q, k, torch.randn(2, length, 8), allowed, 0.5, "a", length - n, torch.randn(4, 4, 8))


def exact(scene: ts.Scene, head: int, query: int) -> list[float]:
    k = scene.k[head // 2]
    return [
        scene.scale * float(scene.q[head, query] @ k[t]) if scene.allowed[query, t] else -math.inf
        for t in range(k.shape[0])
    ]


def test_oracle_takes_the_highest_true_scores(scene: ts.Scene) -> None:
    chosen = ts.oracle(5).select(scene)
    for head in range(4):
        for query in range(3):
            scores = exact(scene, head, query)
            assert sorted(scores)[-5:] == sorted(scores[t] for t in chosen[head, query].nonzero().flatten())


def test_streaming_keeps_first_and_last(scene: ts.Scene) -> None:
    chosen = ts.streaming(Budget(8, 2, 4)).select(scene)
    assert chosen[0, 0].nonzero().flatten().tolist() == [0, 1, 56, 57, 58, 59, 60, 61]
    assert chosen[3, 2].nonzero().flatten().tolist() == [0, 1, 58, 59, 60, 61, 62, 63]


def test_quest_takes_whole_pages_by_their_bound(scene: ts.Scene) -> None:
    chosen = ts.quest(Budget(32, 0, 0), 8).select(scene)
    for head in range(4):
        q, k = scene.q[head, 2], scene.k[head // 2].view(4, ts.PAGE, 8)
        bounds = [sum(max(float(q[d] * x) for x in page[:, d]) for d in range(8)) for page in k]
        best = sorted(range(4), key=lambda p: bounds[p])[-2:]
        assert {t // ts.PAGE for t in chosen[head, 2].nonzero().flatten().tolist()} == set(best)
        assert int(chosen[head, 2].sum()) == 32


def test_snapkv_keeps_what_its_window_voted_for(scene: ts.Scene) -> None:
    chosen = ts.snapkv(Budget(10, 0, 0)).select(scene)
    assert torch.equal(chosen[0], chosen[1])  # one set per KV head
    kept = chosen[:, 2]
    assert kept[:, 57:].all()  # the window (4 tokens) and what was decoded
    assert (kept[:, :61].sum(1) == 10).all()


def test_sparq_with_all_dims_is_exact(scene: ts.Scene) -> None:
    assert torch.equal(ts.sparq(Budget(6, 0, 0), 8).select(scene), ts.oracle(6).select(scene))


def test_every_method_stays_within_its_budget_and_the_past(scene: ts.Scene) -> None:
    budget = Budget(16, 2, 4)
    channels = {"a": torch.arange(8).expand(4, 8)}
    for method in (ts.oracle(16), ts.oracle_shared(budget), ts.streaming(budget), ts.sparq(budget, 3)):
        chosen = method.select(scene)
        assert (chosen.sum(-1) == 16).all() and not (chosen & ~scene.allowed).any()
    double = ts.double_sparsity(channels, budget).select(scene)
    assert (double.sum(-1) == 16).all() and not (double & ~scene.allowed).any()


def test_paired_differences_tell_what_pooled_bars_hide() -> None:
    """Texts differ by far more than the methods do; on the same tokens one is always better."""
    ours = torch.rand(3, 4, 64, dtype=torch.float64) + torch.arange(4.0).view(1, 4, 1)
    other = ours + 0.1
    found = compare.paired(other - ours)
    assert found["kl"] == pytest.approx(0.1) and found["nll_95"] == pytest.approx([0.1, 0.1])
    assert found["texts_ours_better"] == 4 and found["blocks_ours_better"] == 1.0
    assert found["kl_by_text"] == pytest.approx([0.1] * 4)
    mixed = torch.full((3, 4, 64), 0.1, dtype=torch.float64)
    mixed[:, :2] = -0.1
    low, high = compare.paired(mixed)["kl_95"]
    assert low < 0 < high and compare.paired(mixed)["texts_ours_better"] == 2


def test_budgets_by_layer_are_scaled_to_the_budget(model: Any) -> None:
    ids = torch.randint(1, 128, (1, LENGTH))
    profile = fasa_compile.calibrate(model, ids, progress=False, budget=Budget(48, 2, 3))
    layers = tuple(replace(x, n_fac=n) for x, n in zip(profile.layers, (32, 64), strict=True))
    with one_pass.harness(model) as h:
        found = compare.Calibrated(h, profile, ids[0])
        compared = compare.methods(replace(profile, layers=layers), Budget(24, 2, 3), found)
        cache, sizes = one_pass.prefill(h, ids[0, :-9]), []
        select = compared[compare.OURS].select
        spy = replace(compared[compare.OURS], select=lambda s: sizes.append(int(select(s)[0, -1].sum())) or select(s))
        one_pass.forced(h, cache, LENGTH - 9, ids[0, -9:], spy)
    assert sizes == [16, 32]


def test_every_method_keeps_to_the_budget(model: Any) -> None:
    ids, budget = torch.randint(1, 128, (1, LENGTH)), Budget(32, 2, 3)
    profile = fasa_compile.calibrate(model, ids, progress=False, budget=Budget(64, 2, 3))
    layers = tuple(
        replace(x, n_fac=n) for x, n in zip(profile.layers, (32, 96), strict=True)
    )  # halved here, to a mean of 32
    with one_pass.harness(model) as h:
        found = compare.Calibrated(h, profile := replace(profile, layers=layers), ids[0])
        cache, most = one_pass.prefill(h, ids[0, :-9]), {}
        for name, method in compare.methods(profile, budget, found).items():

            def counted(scene: ts.Scene, name: str = name, select: ts.Selector = method.select) -> torch.Tensor:
                chosen = select(scene)
                most.setdefault(name, []).append(int(chosen.sum(-1).max()))
                return chosen

            one_pass.forced(h, cache, LENGTH - 9, ids[0, -9:], replace(method, select=counted))
    assert set(compare.ASKED) - {"dense"} <= set(most)
    by_layer = {
        compare.OURS,
        *(f"ours, FC cache in {x}" for x in ("bf16", "fp8", "int8")),
        "ours, a quarter of the FCs in bf16",
    }
    decoded = {"SnapKV": 9}  # as published, decoded tokens come on top
    assert by_layer < set(most) and "dense" not in most
    for name, sizes in most.items():
        assert sizes == ([16, 48] if name in by_layer else [32 + decoded.get(name, 0)] * 2), name


def test_records_of_several_runs_join() -> None:
    one = {"model": "m", "budgets": {"128": {"n_sink": 4, "methods": {"dense": 1}}}}
    two = {"model": "m", "budgets": {"128": {"n_sink": 4, "pass_keys_2048": {"dense": 2}}, "256": {"methods": {}}}}
    assert compare.merged([one, two])["budgets"] == {
        "128": {"n_sink": 4, "methods": {"dense": 1}, "pass_keys_2048": {"dense": 2}},
        "256": {"methods": {}},
    }
    with pytest.raises(ValueError, match="differ in model"):
        compare.merged([one, {**two, "model": "another"}])
    with pytest.raises(ValueError, match="budget 128 has been measured twice: methods"):
        compare.merged([one, {"model": "m", "budgets": {"128": {"methods": {"dense": 3}}}}])


def test_calibration_leaves_local_layers_dense() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(
        vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=24, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.Gemma3ForCausalLM(config).eval()
    profile = fasa_compile.calibrate(model, torch.randint(1, 128, (1, LENGTH)), progress=False)
    local, whole = profile.layers
    assert local.dense and local.stats["window"] == 24
    assert not whole.dense and "window" not in whole.stats
    mass = profile.stats["mass_kept"]
    assert sorted(mass) == ["affine", "softmax_sum", "static"] and all(0 < x <= 1 for x in mass.values())
    assert profile.reduction in mass


def test_error_bars_hold_the_mean_and_shrink_with_the_noise() -> None:
    dense = torch.zeros(3, 4, 64, dtype=torch.float64)
    noisy = dense.clone()
    noisy[1] = torch.rand(4, 64, dtype=torch.float64) + torch.tensor([0.0, 1.0, 2.0, 3.0])[:, None]
    found = compare.summary(noisy, dense)
    low, high = found["kl_95"]
    assert low < found["kl"] < high and abs(found["kl"] - float(noisy[1].mean())) < 1e-12
    assert high - low > 1.0  # the texts differ, and that is in the bars
    same = noisy.clone()
    same[1] = 0.5
    assert compare.summary(same, dense)["kl_95"] == pytest.approx([0.5, 0.5])
