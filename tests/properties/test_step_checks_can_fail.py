"""Each check of a decode step catches an implementation that is wrong in the way it looks for."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, Phase, find, settings

from fasa_compile.testing import step_checks, strategies
from fasa_compile.triton_kernels import reference

#: Enough examples to meet the fault; the first one found is enough, so nothing is shrunk.
SEARCH = settings(
    max_examples=400, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def broken(*changes: tuple[str, str]) -> Any:
    """The reference with parts of its source replaced."""
    source = inspect.getsource(reference)
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    module = types.ModuleType("broken")
    module.__package__ = reference.__package__
    exec(compile(source, "broken", "exec"), module.__dict__)
    return module


def caught(strategy: Any, check: Callable[[Any], None]) -> bool:
    def fails(example: Any) -> bool:
        try:
            check(example)
        except AssertionError:
            return True
        return False

    find(strategy, fails, settings=SEARCH)  # raises NoSuchExample where no example fails
    return True


TIES = (("(2**31 - position)", "position"), ("2**31 - (picked & 0xFFFFFFFF)", "picked & 0xFFFFFFFF"))
BREAKS: dict[str, list[tuple[tuple[str, str], ...]]] = {
    "selection": [
        (("t >= stop - n_recent", "t >= stop - n_recent + 1"),),
        (("chosen = best(key, n_fac)", "chosen = best(key, n_fac)[..., : max(1, n_fac - 1)].repeat(1, 1, 2)[..., :n_fac]"),),
        (("token_zero * rounded.sum(-1, keepdim=True)", "token_zero"),),
        TIES,
    ],
    "covering budget": [(("s = capped(scale * _matmul(qg, k), softcap)", "s = scale * _matmul(qg, k)"),)],
    "hidden tokens": [(("v = torch.where(allowed.any(2)[..., None], v, 0.0)", "v = v"),)],
    "neighbours": [(("torch.where(s == s, s, -_FLOAT_MAX)", "(s + 0 * s.sum())"),)],
    "padding": [(("t < first + n_sink", "t < n_sink"),), (("& inside[:, None, None, :], bias", ", bias"), ("t >= stop", "t >= key.shape[-1]"))],
    "permutation": [(("key = torch.where(key == 0, 0.0, key)", "key = key + 0.1 * torch.arange(key.shape[-1])"),)],
    "scale": [(("(scale * step) * (token", "step * (token"),)],
    "duplicates": [TIES],
    "growing budget": [
        (("chosen = best(key, n_fac)", "chosen = best(torch.where(key.isfinite(), key * (-1) ** n_fac, key), n_fac)"),)
    ],
    "heads": [(("norm.float().reshape(1, Hkv, G, 1)", "norm.float().flip(0).reshape(1, Hkv, G, 1)"),)],
    "repeat": [(("return qg @ k.float().transpose(2, 3)", "return qg @ k.float().transpose(2, 3) + torch.rand(1)"),)],
}  # fmt: skip


def test_every_check_has_a_fault() -> None:
    assert set(BREAKS) == set(step_checks.STEP_CHECKS)


@pytest.mark.parametrize("name, changes", [(name, c) for name, all_of_it in BREAKS.items() for c in all_of_it])
def test_a_fault_is_caught(name: str, changes: tuple[tuple[str, str], ...]) -> None:
    impl, check = broken(*changes), step_checks.STEP_CHECKS[name]
    assert caught(strategies.steps(), lambda step: check(step.case(), step.seed, impl))


def test_wrong_keys_are_caught() -> None:
    impl = broken(("guarded_logsumexp(s, 2)", "s.amax(2, keepdim=True)"))
    assert caught(strategies.steps(), lambda step: step_checks.check_keys(step.case(), impl))


def test_an_ignored_query_scale_is_caught() -> None:
    impl = broken(("(scale * step) * (token", "scale * (token"))
    strategy = strategies.steps(G=1, softcap=0.0, mask="")
    assert caught(strategy, lambda step: step_checks.check_scores_scale(step.case(), 3, impl))


@pytest.mark.parametrize(
    "changes",
    [("float(2**info.bits - 1)", "float(2**info.bits)"), ("q[..., half:] << 4", "q[..., half:] << 3"), ("x == x, x, 0.0", "x == x, x, 1.0")],
)  # fmt: skip
def test_wrong_bytes_are_caught(changes: tuple[str, str]) -> None:
    impl = broken(changes)
    for fmt in ("int8", "int4"):
        if changes[1] != "q[..., half:] << 3" or fmt == "int4":
            assert caught(strategies.keys(), lambda keys, fmt=fmt: step_checks.check_pack(*keys.tensors(), fmt, impl))


def test_a_row_that_depends_on_others_is_caught() -> None:
    impl = broken(
        ("x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)", "x.amin((1, 2, 3), True), x.amax((1, 2, 3), True)")
    )
    assert caught(strategies.keys(), lambda keys: step_checks.check_pack(*keys.tensors(), "int8", impl))


def test_a_wrong_slot_is_caught() -> None:
    impl = broken(("row = slots.reshape(-1, slots.shape[-1])", "row = (slots.reshape(-1, slots.shape[-1]) - 1)"))
    slots = torch.tensor([0])
    assert caught(strategies.keys(), lambda keys: step_checks.check_refresh(*keys.tensors(), "fp16", slots, impl))


def test_wrong_bounds_are_caught() -> None:
    impl = broken(("t + 1, 0).amax", "t, 0).amax"))
    mask = torch.tensor([[True, False, True]])
    with pytest.raises(AssertionError):
        step_checks.check_bounds(mask, 3, impl)
    step_checks.check_bounds(mask, 3)
