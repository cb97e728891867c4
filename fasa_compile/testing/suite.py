"""``check_model``: every check on a model of one's own. Needs ``hypothesis``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, given
from hypothesis.stateful import run_state_machine_as_test
from torch import nn

from fasa_compile.testing.drivers import Driver
from fasa_compile.testing.hypothesis_profiles import examples
from fasa_compile.testing.machine import cache_machine
from fasa_compile.testing.model_checks import MODEL_CHECKS, NotApplicable, Subject, Trial
from fasa_compile.testing.strategies import trials

#: Names of all checks: those of ``MODEL_CHECKS``, and the state machine.
CHECKS = (*MODEL_CHECKS, "cache operations")


def run_check(name: str, subject: Subject, profile: str | None = None) -> dict[str, int]:
    """Run one check on a subject; returns how many examples it ran, by outcome: ``ran``, and reasons why it did not apply.

    Raises ``AssertionError``, with the failing ``Trial`` (or the operations) shrunk and printed by Hypothesis.
    """
    outcomes: dict[str, int] = {"ran": 0}
    if name == "cache operations":
        machine = cache_machine(subject)
        chosen = hypothesis.settings(examples("machine", profile), suppress_health_check=list(HealthCheck))
        try:
            run_state_machine_as_test(machine, settings=chosen)
        except NotApplicable as problem:
            return {"ran": 0, str(problem): 1}
        return {"ran": machine.compared}
    check = MODEL_CHECKS[name]
    chosen = hypothesis.settings(examples("model", profile), suppress_health_check=list(HealthCheck))

    @chosen
    @given(trial=trials(subject.driver))
    def one(trial: Trial) -> None:
        torch._dynamo.reset()
        try:
            check(subject, trial)
        except NotApplicable as problem:
            outcomes[str(problem)] = outcomes.get(str(problem), 0) + 1
        else:
            outcomes["ran"] += 1

    one()
    return outcomes


def check_model(
    make: Callable[[], nn.Module],
    *,
    driver: Driver | None = None,
    checks: Iterable[str] = CHECKS,
    profile: str | None = None,
    inner: Any = "eager",
) -> dict[str, dict[str, int]]:
    """Check that a model decodes under ``fasa_backend`` as it must. Returns the number of examples that each check ran.

    ``make()``: a small instance of the model, in float32 for the strictest comparison (a few layers and hidden sizes of 32 to 256
    are fast and hide nothing). ``driver``: how to run it; transformers models need none. ``checks``: names out of ``CHECKS``.
    ``profile``: the Hypothesis profile, ``"ci"`` or ``"nightly"`` or one of yours; by default the environment's
    ``HYPOTHESIS_PROFILE``, or ``ci`` (``hypothesis_profiles``). ``inner``: the compiler of
    the rewritten graphs, ``"inductor"`` for what users run.

    Raises ``AssertionError`` at the first check that fails, with the smallest example that Hypothesis found; ``KeyError`` for an
    unknown name. A check that does not apply (neighbours without batches, say) is told apart by ``ran`` being 0.
    """
    checks = tuple(checks)
    subject = Subject(make, driver, inner)
    for kind in subject.driver.kinds:
        subject.decisions(kind)  # nothing sparse is a failure, whichever checks are asked for
    unknown = sorted(set(checks) - set(CHECKS))
    if unknown:
        raise KeyError(f"unknown check {unknown[0]!r}; there are: {', '.join(CHECKS)}")
    return {name: run_check(name, subject, profile) for name in checks}
