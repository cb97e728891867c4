"""Budgets by layer and dense layers, as ``calibrate`` finds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fasa_compile
from fasa_compile.calibration_budgets import STEP
from fasa_compile.calibration_stats import LayerStats
from fasa_compile.errors import CalibrationError
from fasa_compile.profiles import Budget

pytest.importorskip("transformers")

IDS = torch.randint(1, 128, (1, 240), generator=torch.Generator().manual_seed(1))
BUDGET = Budget(24, 2, 3)
FLAT, SHARP = "model.layers.0.self_attn", "model.layers.1.self_attn"


@pytest.fixture
def uneven(model: Any) -> Any:
    """Layer 0 attends to everything alike, layer 1 to few tokens."""
    with torch.no_grad():
        model.get_submodule(FLAT).q_proj.weight.mul_(0.05)
    return model


def calibrated(model: Any, **how: Any) -> Any:
    return fasa_compile.calibrate(model, IDS, progress=False, budget=BUDGET, **how)


def true_loss(model: Any, layer: int) -> float:
    """By transformers' own attention weights: mass outside the best ``BUDGET.n_fac`` tokens (forced ones among them) of a query head,
    mean over the later three quarters of the queries that see enough of them."""
    model.set_attn_implementation("eager")
    weights = model(IDS, output_attentions=True).attentions[layer][0]  # [Hq, T, T]
    model.set_attn_implementation("sdpa")
    return float(1 - weights[:, 180:].topk(BUDGET.n_fac, -1).values.sum(-1).mean())


def test_the_mass_that_layers_lose_is_near_the_true_weights(uneven: Any) -> None:
    profile = calibrated(uneven, n_tip=8, reduction="softmax_sum", dense_above=0.99)  # all FCs: scores are exact
    lost = {layer.layer: layer.stats["mass_lost"] for layer in profile.layers}
    best = [true_loss(uneven, 0), true_loss(uneven, 1)]
    for true, layer in zip(
        best, (FLAT, SHARP), strict=True
    ):  # one set for two query heads: a little worse than each head's best
        assert true - 0.02 < lost[layer] < true + 0.15
    assert lost[SHARP] < lost[FLAT] - 0.2


def test_tokens_go_where_they_keep_the_most_mass(uneven: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, LayerStats] = {}
    real = LayerStats.layer_profile

    def spy(stats: LayerStats, name: str, *rest: Any, **how: Any) -> Any:
        kept[name] = stats
        return real(stats, name, *rest, **how)

    monkeypatch.setattr(LayerStats, "layer_profile", spy)
    profile = calibrated(uneven, layer_budgets="mass")
    given = {layer.layer: layer.n_fac for layer in profile.layers}
    assert sum(given.values()) <= 2 * BUDGET.n_fac and min(given.values()) >= 6
    assert given[FLAT] != given[SHARP]

    def lost(shares: dict[str, int]) -> float:
        rows = {x.layer: x for x in profile.layers}
        return sum(1 - kept[n].mass_kept(rows[n], BUDGET, [shares[n]])[profile.reduction][0] for n in shares)

    assert lost(given) < lost(dict.fromkeys(given, BUDGET.n_fac)) < lost({FLAT: given[SHARP], SHARP: given[FLAT]})


def test_a_pyramid_falls_with_depth_and_keeps_the_mean(uneven: Any) -> None:
    first, last = (layer.n_fac for layer in calibrated(uneven, layer_budgets="pyramid").layers)
    assert (first, last) == (42, 6)  # a quarter of the mean at least, twice the mean together


def test_layers_that_lose_too_much_are_dense(uneven: Any) -> None:
    flat, sharp = calibrated(uneven, dense_above=0.6).layers
    assert flat.dense and flat.stats["mass_lost"] > 0.6
    assert not sharp.dense and sharp.stats["mass_lost"] <= 0.6
    alone = calibrated(uneven, dense_above=0.6, layer_budgets="mass").layers
    assert alone[0].n_fac is None
    assert BUDGET.n_fac - STEP < alone[1].n_fac <= BUDGET.n_fac, "the layer that is left has the whole mean"


def test_without_asking_all_layers_have_the_same(uneven: Any) -> None:
    assert [(x.n_fac, x.dense) for x in calibrated(uneven).layers] == [(None, False)] * 2


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"layer_budgets": "fitted"}, "layer_budgets: expected one of equal, mass, pyramid, found 'fitted'"),
        ({"dense_above": 1.0}, "dense_above: expected a share"),
        ({"dense_above": -0.1}, "dense_above: expected a share"),
    ],
)
def test_what_cannot_be_asked_for_is_an_error(model: Any, how: dict[str, Any], error: str) -> None:
    with pytest.raises(CalibrationError, match=error):
        calibrated(model, **how)
