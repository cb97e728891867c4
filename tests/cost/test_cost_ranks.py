"""The costs of several GPUs: the documentation's tables are the formulas', and the formulas' bytes are what a step sends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fasa_compile import cost_ranks
from fasa_compile.cost import cards, evaluate
from fasa_compile.cost_ranks import HOSTS, NVLINK, P, collective_us, layer_time, llama
from fasa_compile.triton_kernels import sharded_decode

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def test_the_tables_of_the_documentation_are_these() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for table in (cost_ranks.table(), cost_ranks.thresholds_table()):
        assert table in text, f"python -m fasa_compile.cost_ranks prints\n{table}"


def test_bytes_are_what_a_step_sends() -> None:
    """The numbers of tests/kernels/test_sharded_decode.py::test_what_a_step_sends, from the formulas, with the kernels' longer lists."""
    shape = replace(llama(2, 240), Hkv=2, G=3, dv=16, n_fac=40)
    sizes = (cost_ranks.LSE_BYTES, cost_ranks.KEY_BYTES, cost_ranks.PART_BYTES)
    found = [evaluate(size.subs(P, 4), shape, cards()[0]) for size in sizes]
    assert found == [4 * 2 * 2 * 3, 4 * 2 * 2 * sharded_decode.candidate_width(40, 60), 4 * 2 * 2 * 3 * 17]
    # No process sends more keys than it has.
    assert evaluate(cost_ranks.KEY_BYTES.subs(P, 4), replace(shape, n_fac=100), cards()[0]) == 4 * 2 * 2 * 60


def test_times_by_hand() -> None:
    shape = llama(1, 1 << 20)
    keys = 4 * 8 * 1148
    gathered = collective_us(cost_ranks.GATHER_US, cost_ranks.KEY_BYTES, shape, 4, NVLINK)
    assert gathered == pytest.approx(18.0 + 3 * (1.5 + keys / 350e3))
    reduced = collective_us(cost_ranks.REDUCE_US, cost_ranks.HISTOGRAM_BYTES, shape, 64, HOSTS)
    assert reduced == pytest.approx(22.0 + 12 * (5.0 + 8 * 1024 / 40e3))
    one, two = layer_time(shape), layer_time(shape, tokens=2)
    assert one.exchanges == 0 and two.exchanges > 0 and one.kernels / 2 < two.kernels < one.kernels
    summed = layer_time(shape, tokens=2, reduction="softmax_sum")
    assert (
        summed.kernels == two.kernels
        and summed.exchanges > two.exchanges > layer_time(shape, tokens=2, dense=True).exchanges
    )
    assert layer_time(shape, heads=8).exchanges == 0 and layer_time(shape, heads=8).us < one.us / 4
