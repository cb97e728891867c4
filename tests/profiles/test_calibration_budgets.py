"""Budgets by layer: the total is kept, and no exchange of tokens between two layers would have been better."""

from __future__ import annotations

import itertools

import pytest
from profile_samples import layer, profile

from fasa_compile.calibration_budgets import STEP, allocate, pyramid
from fasa_compile.errors import CalibrationError
from fasa_compile.plan import Policy
from fasa_compile.profiles import Budget

GRID = (32, 64, 128, 256, 512)


def power_law(scale: float) -> list[float]:
    return [scale / n for n in GRID]


def test_equal_layers_share_alike() -> None:
    assert allocate({"a": power_law(1), "b": power_law(1)}, GRID, 128, least=32) == {"a": 128, "b": 128}


def test_the_mean_is_kept_and_the_costly_layer_gets_more() -> None:
    given = allocate({"a": power_law(1), "b": power_law(4), "c": power_law(16)}, GRID, 128, least=32)
    assert given["a"] < given["b"] < given["c"]
    assert 3 * 128 - STEP < sum(given.values()) <= 3 * 128


def test_no_other_split_in_whole_steps_costs_less() -> None:
    costs = {"a": power_law(1), "b": power_law(5), "c": power_law(2)}
    grid_cost = {  # on the grid's own points, so that no interpolation is shared with the code
        name: dict(zip(GRID, row, strict=True)) for name, row in costs.items()
    }
    given = allocate(costs, GRID, 128, least=32)
    best = min(
        sum(grid_cost[name][n] for name, n in zip(costs, split, strict=True))
        for split in itertools.product(GRID, repeat=3)
        if sum(split) <= 3 * 128
    )
    # Finer steps than the grid's can only be better; by the chord they are never worse than the true 1 / n.
    assert sum(scale / given[name] for name, scale in (("a", 1), ("b", 5), ("c", 2))) <= best + 1e-9


def test_a_layer_that_gains_nothing_gets_the_least() -> None:
    given = allocate({"flat": [1.0] * 5, "steep": power_law(1)}, GRID, 128, least=40)
    assert given == {"flat": 40, "steep": 216}


def test_a_gain_behind_a_plateau_is_found() -> None:
    given = allocate({"late": [1.0, 1.0, 0.0, 0.0, 0.0], "slow": [0.1, 0.09, 0.08, 0.07, 0.06]}, GRID, 80, least=32)
    assert given["late"] > given["slow"]


@pytest.mark.parametrize(
    ("cost", "grid", "mean"),
    [
        ({}, GRID, 128),
        ({"a": power_law(1)}, (64,), 128),
        ({"a": power_law(1)}, GRID[::-1], 128),
        ({"a": power_law(1)[:-1]}, GRID, 128),
        ({"a": [float("nan")] * 5}, GRID, 128),
        ({"a": power_law(1)}, GRID, 16),
    ],
)
def test_what_cannot_be_allocated_is_an_error(cost: dict[str, list[float]], grid: tuple[int, ...], mean: int) -> None:
    with pytest.raises(CalibrationError, match="budgets"):
        allocate(cost, grid, mean)


def test_a_users_budget_scales_the_layers_own() -> None:
    made = profile(budget=Budget(128, 4, 16), layers=(layer("a", n_fac=64), layer("b", n_fac=192), layer("c")))
    twice = Policy(made, {"n_fac": 256})
    assert [twice.budget_for(x).n_fac for x in made.layers] == [128, 384, 256]
    assert [Policy(made).budget_for(x).n_fac for x in made.layers] == [64, 192, 128]
    few = Policy(made, {"n_fac": 24})
    assert [few.budget_for(x).n_fac for x in made.layers] == [20, 36, 24]  # never less than the forced tokens


def test_a_pyramid_falls_evenly_to_a_twentieth() -> None:
    given = pyramid(["a", "b", "c"], 200, least=8)
    assert given == {"a": 390, "b": 200, "c": 10}
    assert pyramid(["a", "b", "c"], 200, least=50) == {"a": 350, "b": 200, "c": 50}
    assert pyramid(["alone"], 200) == {"alone": 200}
    many = pyramid([str(i) for i in range(30)], 128)
    assert sum(many.values()) <= 30 * 128 and sorted(many.values(), reverse=True) == list(many.values())
    assert 30 * 128 - sum(many.values()) < 30, "rounding down only"


def test_a_pyramid_of_nothing_or_below_the_least_is_an_error() -> None:
    with pytest.raises(CalibrationError, match="at least one layer"):
        pyramid([], 128)
    with pytest.raises(CalibrationError, match="at least 48 tokens, found 40"):
        pyramid(["a"], 40)
