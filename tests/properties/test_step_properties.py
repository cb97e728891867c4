"""Decode steps, packing and masks: any shapes, formats and masks, the plain-torch reference against float64 and against itself."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import example, given
from hypothesis import strategies as st

from fasa_compile.testing import step_checks, strategies
from fasa_compile.testing.hypothesis_profiles import examples
from fasa_compile.testing.steps import make_case
from fasa_compile.triton_kernels import ops, reference

STEP = examples("step")
#: More tokens are forced than there are.
FORCED = strategies.Step(
    0, (("fmt", "fp32"), ("B", 1), ("Hkv", 1), ("G", 1), ("L", 1), ("D", 2), ("W", 2), ("n_fac", 9), ("n_sink", 4), ("n_recent", 5))
)  # fmt: skip


@pytest.mark.parametrize("name", step_checks.STEP_CHECKS)
@STEP
@given(step=strategies.steps(), seed=strategies.seeds)
@example(step=FORCED, seed=0)
def test_a_step(name: str, step: strategies.Step, seed: int) -> None:
    step_checks.STEP_CHECKS[name](step.case(), seed, reference)


@STEP
@given(step=strategies.steps())
def test_keys(step: strategies.Step) -> None:
    step_checks.check_keys(step.case())


@STEP
@given(step=strategies.steps(G=1, softcap=0.0, mask=""), power=st.integers(-6, 6))
def test_scores_grow_with_the_query(step: strategies.Step, power: int) -> None:
    step_checks.check_scores_scale(step.case(), power)


@STEP
@given(keys=strategies.keys(), fmt=strategies.formats)
def test_packing(keys: strategies.Keys, fmt: str) -> None:
    step_checks.check_pack(*keys.tensors(), fmt)


@STEP
@given(keys=strategies.keys(), fmt=strategies.formats, seed=strategies.seeds, shared=st.booleans())
def test_refreshing_rows(keys: strategies.Keys, fmt: str, seed: int, shared: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    rows = torch.stack([torch.randperm(keys.L, generator=g)[:3] for _ in range(keys.B)])
    step_checks.check_refresh(*keys.tensors(), fmt, rows[0] if shared else rows)


@STEP
@given(step=strategies.steps(), data=st.data())
def test_mask_bounds(step: strategies.Step, data: st.DataObject) -> None:
    mask = step.case(mask=data.draw(strategies.masks.filter(bool))).mask
    assert mask is not None
    step_checks.check_bounds(mask, mask.shape[-1])


@STEP
@given(step=strategies.steps(all_dims=False), seed=strategies.seeds)
def test_the_operator_refreshes_rows_before_it_scores(step: strategies.Step, seed: int) -> None:
    """``fasa::sparse_decode`` with ``slots`` is the step on a packed FC cache that was made anew."""
    case = step.case()
    B, _, L = case.k.shape[:3]
    slots = torch.randint(0, L, (B, 1), generator=torch.Generator().manual_seed(seed))
    data, meta, *constants = (x.clone() for x in case.cache if x is not None)
    expected = step_checks.run(reference, case)
    for b in range(B):
        data[b, :, slots[b, 0]], meta[b, :, slots[b, 0]] = 0, 0
    out = torch.ops.fasa.sparse_decode(
        case.q, case.k, case.v, data, meta, *constants, case.norm, case.mask, None, slots, None,
        version=ops.KERNEL_VERSION, **case.how,
    )  # fmt: skip
    assert step_checks.same(out, expected)


def test_a_failing_step_prints_what_it_was_made_from() -> None:
    step = strategies.Step(7, (("L", 5), ("fmt", "int8")))
    assert "L" in repr(step) and "int8" in repr(step)
    again = eval(repr(step), {"Step": strategies.Step})
    assert torch.equal(again.case().q, step.case().q)
    torch.manual_seed(7)
    assert torch.equal(make_case(L=5, fmt="int8").q, step.case().q)
