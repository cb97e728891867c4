"""The cost model: its bytes against shapes, its times against the recorded ones, and what must hold of any formula of the kind."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fasa_compile import cost
from fasa_compile.cost import NEVER, Shape, card_named, cards, cost_of
from fasa_compile.triton_kernels import ops
from fasa_compile.triton_kernels.formats import bytes_per_token, fc_cache_spec

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import fit_cost  # noqa: E402

RECORDS = {
    card: json.loads((ROOT / "benchmarks" / "results" / f"attention-{card}.json").read_text())
    for card in ("h100", "h200")
}
CARD = card_named(RECORDS["h100"]["card"])
LLAMA = Shape(B=1, L=32768, Hkv=8, G=4, d=128, dv=128, item=2, n_fac=1024, w=64, fc=bytes_per_token(64, "int4"))


def test_bytes_of_a_known_shape():
    c = cost_of(LLAMA, None)
    assert c.dense_bytes == 32768 * 8 * 2 * 128 * 2
    assert c.sparse_bytes == 32768 * 8 * (32 + 4) + 8 * 1024 * 512
    assert (c.dense_us, c.sparse_us, c.break_even) == (None, None, None)


@pytest.mark.parametrize("fmt", ["int4", "int8", "fp8", "bf16", "fp32"])
def test_packed_bytes_are_those_of_the_tensors(fmt):
    shape = replace(LLAMA, B=3, L=40, fc=bytes_per_token(64, fmt))
    specs = (*fc_cache_spec(3, 8, 40, 64, fmt), ops.sparse_decode_state(3, 8))
    held = sum(torch.empty(size, dtype=dtype).nbytes for size, dtype in specs)
    assert cost_of(shape, None).packed_bytes == held
    assert cost_of(shape, None, kept=False).packed_bytes == 0


@pytest.mark.parametrize(
    ("card", "kind", "shape", "measured", "predicted"),
    [
        (card, *error)
        for card, record in RECORDS.items()
        for error in fit_cost.errors(record, card_named(record["card"]))
    ],
    ids=lambda x: f"{x.B}x{x.L}" if isinstance(x, Shape) else x if isinstance(x, str) else "",
)
def test_times_are_those_measured(card, kind, shape, measured, predicted):
    assert predicted == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize("card", RECORDS)
def test_the_shipped_constants_are_the_fit_of_the_shipped_record(card):
    record = RECORDS[card]
    shipped = card_named(record["card"])
    assert shipped.name == record["card"], "not the first card's, which stands in for others"
    for mine, its in zip(shipped.rates(), fit_cost.fit(record).rates(), strict=True):
        assert mine == pytest.approx(its, rel=1e-3)


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_launches_are_those_recorded(record):
    rows = [kernels for row in record["rows"] for name, kernels in row.items() if name.endswith(", kernels")]
    rows += [case["kernels us"] for row in record["rows"] for case in row.get("sparse", []) if "kernels us" in case]
    assert rows
    assert {len(kernels) for kernels in rows} == {int(cost.SPARSE_LAUNCHES)}


def test_counters_are_the_kernels():
    score = pytest.importorskip("fasa_compile.triton_kernels.score")
    assert 32 * score.LINES.value == cost._COUNTERS


@pytest.mark.parametrize("B", [1, 2, 8, 32])
@pytest.mark.parametrize("fmt", ["int4", "fp8", "bf16"])
def test_break_even_is_where_the_times_cross(B, fmt):
    shape = replace(LLAMA, B=B, fc=bytes_per_token(64, fmt))
    even = cost_of(shape, CARD).break_even
    assert even is not None and shape.n_fac < even < NEVER
    at, before = (cost_of(replace(shape, L=n), CARD) for n in (even, even - 1))
    assert at.sparse_us <= at.dense_us
    assert even == shape.n_fac + 1 or before.sparse_us > before.dense_us
    assert at.break_even == even, "the break-even depends on the length"


def test_break_even_of_packing_anew_is_where_the_times_cross():
    even = cost_of(LLAMA, CARD, kept=False, packs=True).break_even
    assert even > cost_of(LLAMA, CARD).break_even
    at, before = (cost_of(replace(LLAMA, L=n), CARD, kept=False, packs=True) for n in (even, even - 1))
    assert at.sparse_us <= at.dense_us and before.sparse_us > before.dense_us


def test_a_packed_cache_as_wide_as_the_keys_and_values_never_pays():
    assert cost_of(replace(LLAMA, fc=512), CARD).break_even == NEVER


def test_a_card_that_is_not_known_takes_the_first():
    assert card_named("Some Other Card") is cards()[0]
    assert cost.card(torch.device("cpu")) is None


hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

SHAPES = st.builds(
    Shape,
    B=st.integers(1, 64),
    L=st.integers(1, 1 << 20),
    Hkv=st.integers(1, 32),
    G=st.integers(1, 16),
    d=st.integers(32, 576),
    dv=st.integers(32, 576),
    item=st.sampled_from([2, 4]),
    n_fac=st.integers(16, 4096),
    w=st.integers(2, 128),
    fc=st.integers(2, 256),
)


@hypothesis.given(SHAPES, st.sampled_from(["B", "L", "Hkv", "d", "dv", "fc", "n_fac"]), st.integers(1, 4096))
def test_more_of_anything_costs_no_less(shape, letter, more):
    """At a given shape, one size larger: no bytes and no time less, neither dense nor sparse."""
    larger = replace(shape, **{letter: getattr(shape, letter) + more})
    a, b = cost_of(shape, CARD), cost_of(larger, CARD)
    for name in ("dense_bytes", "sparse_bytes", "packed_bytes", "dense_us", "sparse_us"):
        assert getattr(b, name) >= getattr(a, name), name


@hypothesis.given(SHAPES)
def test_costs_are_sound(shape):
    c = cost_of(shape, CARD)
    assert all(math.isfinite(x) and x > 0 for x in (c.dense_us, c.sparse_us))
    assert min(c.dense_bytes, c.sparse_bytes, c.packed_bytes, c.dense_scratch, c.sparse_scratch) > 0
    assert c.break_even > shape.n_fac
    if shape.n_fac < shape.L:
        assert (c.break_even <= shape.L) == (c.sparse_us <= c.dense_us)
