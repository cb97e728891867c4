"""Budgets by layer: a given mean number of tokens, spent where fewer would cost the model most."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from fasa_compile.errors import CalibrationError

STEP = 8  # tokens that are given out at a time
STEEPNESS = 20  # the paper's beta
AHEAD = (1, 2, 4, 8)  # steps looked ahead: a layer may gain nothing from one step and much from several


def allocate(
    cost: Mapping[str, Sequence[float]], grid: Sequence[int], mean: int, *, least: int = 48, most: int | None = None
) -> dict[str, int]:
    """Tokens of each layer, ``mean`` on average and never more.

    ``cost[layer][i]`` is what the model loses when that layer alone attends to ``grid[i]`` tokens (KL to dense, say); costs
    of layers are taken to add up, and to be linear in log(tokens) between the grid's points. Every layer gets ``least``; the
    rest goes, ``STEP`` at a time, to the layer whose cost falls most per token, up to ``most`` (by default the grid's last).

    Raises ``CalibrationError`` where no layer is given, the grid does not ascend, a cost is missing or not finite, or ``mean``
    is below ``least``.
    """
    if not cost:
        raise CalibrationError("budgets: expected the cost of at least one layer, found none")
    if len(grid) < 2 or any(b <= a for a, b in itertools.pairwise(grid)) or grid[0] < 1:
        raise CalibrationError(f"budgets: expected at least 2 ascending numbers of tokens, found {list(grid)}")
    for layer, row in cost.items():
        if len(row) != len(grid) or not all(math.isfinite(x) for x in row):
            raise CalibrationError(f"budgets: {layer}: expected {len(grid)} finite costs, found {list(row)}")
    if mean < least:
        raise CalibrationError(f"budgets: expected a mean of at least {least} tokens, found {mean}")
    most = grid[-1] if most is None else most
    given = dict.fromkeys(cost, least)

    def gain(layer: str) -> float:
        """Fall of the cost per step, at its best over the steps ahead."""
        now, row = given[layer], cost[layer]
        return max((_at(row, grid, now) - _at(row, grid, now + m * STEP)) / m for m in AHEAD)

    left = (mean - least) * len(cost)
    while left >= STEP:
        open_to_more = [layer for layer in cost if given[layer] + STEP <= most]
        if not open_to_more:
            break
        given[max(open_to_more, key=gain)] += STEP
        left -= STEP
    return given


def pyramid(layers: Sequence[str], mean: int, *, least: int = 48) -> dict[str, int]:
    """Tokens of each layer, ``mean`` on average and never more: falling evenly from the first layer to the last, which gets a
    ``STEEPNESS``-th of the mean, or ``least`` (PyramidKV, arXiv 2406.02069, which finds attention narrower in later layers).

    Raises ``CalibrationError`` where no layer is given or ``mean`` is below ``least``.
    """
    if not layers:
        raise CalibrationError("budgets: expected at least one layer, found none")
    if mean < least:
        raise CalibrationError(f"budgets: expected a mean of at least {least} tokens, found {mean}")
    last = max(mean // STEEPNESS, least)
    fall = 2 * (mean - last) / max(len(layers) - 1, 1)  # from layer to layer
    first = last + fall * (len(layers) - 1) if len(layers) > 1 else mean
    return {layer: int(first - i * fall) for i, layer in enumerate(layers)}


def _at(row: Sequence[float], grid: Sequence[int], tokens: int) -> float:
    tokens = min(max(tokens, grid[0]), grid[-1])
    i = min(bisect_right(grid, tokens) - 1, len(grid) - 2)
    share = math.log(tokens / grid[i]) / math.log(grid[i + 1] / grid[i])
    return row[i] * (1 - share) + row[i + 1] * share
