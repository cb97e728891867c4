"""Numbers over a long run: errors against float64 do not grow, and what is kept is what would be made anew."""

from __future__ import annotations

import copy

import pytest
import torch

from fasa_compile.testing import oracle
from fasa_compile.testing.drivers import tokens
from fasa_compile.testing.model_checks import Subject, Trial
from fasa_compile.testing.step_checks import same
from fasa_compile.testing.tiny import Tiny, TinyDriver, TinySpec

STEPS = 2000


@pytest.mark.slow
def test_errors_do_not_grow_over_two_thousand_steps() -> None:
    spec = TinySpec(length=STEPS + 20, D=8, Dv=8, layers=1)
    one = Subject(lambda: Tiny(spec), TinyDriver(spec))
    trial = Trial(prompt=10, steps=STEPS, n_fac=STEPS + 12, fc_format="int4")
    ids = tokens(one.driver, 1, trial.context, seed=5)
    made = one.compiled(one.profile(trial), trial.budget)
    caches = []
    got = one.decode(made, trial, ids, each=lambda i, cache: caches.append(cache) if i == STEPS - 1 else None)

    exact = copy.deepcopy(one.model).double()
    exact.frequency, exact.angles = exact.frequency.float(), exact.angles.float()  # the same angles
    cache = one.driver.new_cache(exact, trial.kind, 1)
    cache.k, cache.v = [k.double() for k in cache.k], [v.double() for v in cache.v]
    with torch.no_grad():
        expected = one.driver.call(exact, ids, 0, cache)[:, trial.prompt :]
    error = (got.double() - expected).abs().amax(-1)[0]
    assert expected.abs().max() > 0.5
    first, last = error[:200].max(), error[-200:].max()
    assert error.max() < 2e-5 and last < 3 * first + 1e-6, (first, last, error.max())

    # The packed FC cache that was kept for 2,000 steps holds the bytes that its definition gives for the keys as they are.
    (runtime,) = made.runtimes
    (keeper,) = runtime._keepers
    packed, c = keeper.current, keeper.constants
    assert packed is not None
    k = caches[0].k[0]
    expected_bytes = oracle.packed(k, c["dims"], c["centre"], c["spread"], "int4")
    assert same(packed.data, expected_bytes[0]) and same(packed.meta, expected_bytes[1])
