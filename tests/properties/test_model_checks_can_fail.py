"""Each check of a model catches a backend, or a model, that is wrong in the way it looks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import run_state_machine_as_test

from fasa_compile import backend, rewrite, runtime
from fasa_compile.testing import Driver, check_model
from fasa_compile.testing.machine import cache_machine
from fasa_compile.testing.model_checks import MODEL_CHECKS, NotApplicable, Subject, Trial
from fasa_compile.testing.tiny import Tiny, TinyDriver, TinySpec
from fasa_compile.triton_kernels import reference

SPEC = TinySpec(layers=1)
TRIAL = Trial(rows=2)


def subject(model: type[Tiny] = Tiny) -> Subject:
    return Subject(lambda: model(SPEC), TinyDriver(SPEC))


def emitted(change: Callable[[list[Any], dict[str, Any]], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """A backend that changes the arguments of the step it emits; what is left out of them is ``None``."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        whole = rewrite._Kernels.sparse_decode

        def sparse_decode(self: Any, arguments: Any, slots: Any, *state: Any, **how: Any) -> Any:
            given, named = list(arguments), {"slots": slots, **how}
            change(given, named)
            return whole(self, tuple(given), named.pop("slots"), *state, **named)

        monkeypatch.setattr(rewrite._Kernels, "sparse_decode", sparse_decode)

    return patch


def computed(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """A backend whose step returns ``change(out, v)``."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        whole = reference.sparse_decode
        monkeypatch.setattr(reference, "sparse_decode", lambda q, k, v, *a, **h: change(whole(q, k, v, *a, **h), v))

    return patch


def dropped(place: int) -> Callable[[list[Any], dict[str, Any]], None]:
    return lambda given, named: given.__setitem__(place, None)


def set_to(**values: Any) -> Callable[[list[Any], dict[str, Any]], None]:
    return lambda given, named: named.update({n: v(named[n]) for n, v in values.items()})


def never_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.PackedCache, "agrees", lambda self, k: self.key() is k and self.version != -1)


def blind_to_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_records_gradients", lambda example_inputs: False)


def rows_fetched_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference.rows_through_

    def rows_through_(*args: Any) -> tuple[Tensor, Tensor]:
        k, v = whole(*args)
        return k, v.roll(1, 2)

    monkeypatch.setattr(reference, "rows_through_", rows_through_)


def first_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference.mask_bounds
    monkeypatch.setattr(
        reference, "mask_bounds", lambda mask, L: whole(mask, L) * torch.tensor([0, 1], dtype=torch.int32)
    )


def ties_to_the_higher_index(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference.best

    def best(key: Tensor, n: int) -> Tensor:
        return key.shape[-1] - 1 - whole(key.flip(-1), n)

    monkeypatch.setattr(reference, "best", best)


STALE = emitted(set_to(slots=lambda _: None))
FAULTS: list[tuple[str, str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("dense parity", "no mask", emitted(lambda given, named: given.__setitem__(slice(9, 11), [None, None]))),
    ("dense parity", "another scale", emitted(set_to(scale=lambda s: 1.5 * s))),
    ("plain reference", "one token fewer", emitted(set_to(n_fac=lambda n: n - 1))),
    ("plain reference", "no first token", emitted(set_to(n_sink=lambda n: 0, n_recent=lambda n: n + 1))),
    ("plain reference", "no norm", emitted(dropped(8))),
    ("plain reference", "another reduction", emitted(set_to(reduction=lambda r: "softmax_sum"))),
    ("kept state", "rows not refreshed", STALE),
    ("repeat", "noise", computed(lambda out, v: out + 1e-3 * torch.rand_like(out))),
    ("neighbours", "rows mixed", computed(lambda out, v: out + 0.1 * out.roll(1, 0))),
    ("padding", "first tokens by slot", first_by_slot),
    ("permutation", "weight by slot", computed(lambda out, v: out + 0.01 * v[..., :1, :].repeat_interleave(2, 1))),
    ("duplicates", "ties to the higher index", ties_to_the_higher_index),
    ("host memory", "values of other tokens", rows_fetched_wrongly),
    ("gradients", "sparse while training", blind_to_gradients),
]


@pytest.mark.parametrize("check", MODEL_CHECKS)
def test_without_a_fault_the_check_holds(check: str) -> None:
    MODEL_CHECKS[check](subject(), TRIAL)


def test_every_check_has_a_fault() -> None:
    assert {check for check, _, _ in FAULTS} == set(MODEL_CHECKS)


@pytest.mark.parametrize("check, name, patch", FAULTS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_fault_is_caught(check: str, name: str, patch: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)
    with pytest.raises(AssertionError):
        MODEL_CHECKS[check](subject(), TRIAL)


@pytest.mark.parametrize("patch", [never_stale, STALE], ids=["writes not counted", "rows not refreshed"])
def test_stale_state_is_caught_in_some_order_of_operations(patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)
    few = settings(
        max_examples=30, stateful_step_count=25, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    with pytest.raises(AssertionError, match="kept, against made anew"):
        run_state_machine_as_test(cache_machine(subject()), settings=few)


class Mixed(Tiny):
    """A model in which rows see each other."""

    def forward(self, ids: Tensor, positions: Tensor, slots: Tensor, cache: Any, keep: Tensor | None = None) -> Tensor:
        logits = super().forward(ids, positions, slots, cache, keep)
        return logits + 0.1 * logits.mean(0)


class Forgetful(Tiny):
    """A model that starts to answer otherwise after a few calls."""

    calls = 0

    def forward(self, ids: Tensor, positions: Tensor, slots: Tensor, cache: Any, keep: Tensor | None = None) -> Tensor:
        type(self).calls += 1
        return super().forward(ids, positions, slots, cache, keep) * (1 + self.calls // 9)


class Unrotated(Tiny):
    """A model without positions."""

    def __init__(self, spec: TinySpec) -> None:
        super().__init__(spec)
        self.angles.zero_()


def test_a_model_whose_rows_mix_is_caught() -> None:
    with pytest.raises(AssertionError, match="beside other rows"):
        check_model(lambda: Mixed(SPEC), driver=TinyDriver(SPEC), checks=["neighbours"])


def test_a_model_that_changes_its_mind_is_caught() -> None:
    # Where it has the same answer when Hypothesis asks again, it is the asking again that fails.
    with pytest.raises((AssertionError, FlakyFailure)) as caught:
        check_model(lambda: Forgetful(SPEC), driver=TinyDriver(SPEC), checks=["repeat"])
    found = caught.value.exceptions if isinstance(caught.value, FlakyFailure) else [caught.value]
    assert all(isinstance(problem, AssertionError) and "run" in str(problem) for problem in found)


def test_a_model_with_nothing_to_rewrite_is_a_failure_and_says_why() -> None:
    with pytest.raises(AssertionError, match="no attention decodes sparsely with a static cache"):
        check_model(lambda: Unrotated(SPEC), driver=TinyDriver(SPEC), checks=["repeat"])


def test_unknown_checks_and_models_without_a_driver_are_named() -> None:
    with pytest.raises(KeyError, match="unknown check 'speed'; there are: dense parity"):
        check_model(lambda: Tiny(SPEC), driver=TinyDriver(SPEC), checks=["speed"])
    with pytest.raises(TypeError, match="Linear is no transformers model: pass driver="):
        check_model(lambda: nn.Linear(2, 2))


def test_what_cannot_be_asked_is_not_applicable() -> None:
    class Poor(TinyDriver):
        rows, padding = 1, False

        def keys_values(self, model: nn.Module, cache: Any) -> list[tuple[Tensor, Tensor]]:
            return Driver.keys_values(self, model, cache)

    poor = Subject(lambda: Tiny(SPEC), Poor(SPEC))
    for name in ("neighbours", "padding", "permutation"):
        with pytest.raises(NotApplicable):
            MODEL_CHECKS[name](poor, Trial())
