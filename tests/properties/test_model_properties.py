"""Whole models under the backend: tiny decoders in any spelling, and every check on each; and cache operations in any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from fasa_compile.testing import strategies
from fasa_compile.testing.hypothesis_profiles import examples
from fasa_compile.testing.machine import cache_machine
from fasa_compile.testing.model_checks import MODEL_CHECKS, NotApplicable, Subject
from fasa_compile.testing.tiny import CACHES, Tiny, TinyDriver, TinySpec


def subject(spec: TinySpec) -> Subject:
    return Subject(lambda: Tiny(spec), TinyDriver(spec))


@pytest.mark.parametrize("name", MODEL_CHECKS)
@settings(examples("model"), suppress_health_check=list(HealthCheck))
@given(spec=strategies.tiny_specs(), data=st.data())
def test_a_model(name: str, spec: TinySpec, data: st.DataObject) -> None:
    torch._dynamo.reset()
    one = subject(spec)
    trial = data.draw(strategies.trials(one.driver), label="trial")
    try:
        MODEL_CHECKS[name](one, trial)
    except NotApplicable:
        assume(False)


@settings(examples("model"), suppress_health_check=list(HealthCheck))
@given(spec=strategies.tiny_specs())
def test_what_is_found_is_what_the_model_computes(spec: TinySpec) -> None:
    """Every layer is a site, with the pairs, the magnitude, the scale and the heads that the model was made with."""
    torch._dynamo.reset()
    sites = subject(spec).sites(spec.kind)
    assert [s.layer for s in sites] == [f"blocks.{i}" for i in range(spec.layers)]
    for site in sites:
        assert {tuple(sorted(p)) for p in site.rope.pairs} == set(spec.pairs)
        assert site.rope.magnitude == pytest.approx(spec.magnitude, rel=2e-2 if spec.dtype != torch.float32 else 1e-5)
        assert site.scale == pytest.approx(spec.scale or spec.D**-0.5)
        assert site.softcap == spec.softcap and (site.sinks is not None) == spec.sinks
        assert site.cache.kind == spec.kind
        assert (site.shape[1], site.shape[2], site.shape[5], site.shape[6]) == (
            spec.Hkv * spec.G, spec.Hkv, spec.D, spec.Dv,
        )  # fmt: skip


@pytest.mark.parametrize("cache", CACHES)
def test_cache_operations_in_any_order(cache: str, counted: Callable[[int, int], None]) -> None:
    machine = cache_machine(subject(TinySpec(cache=cache, layers=1)))
    run_state_machine_as_test(machine, settings=settings(examples("machine"), suppress_health_check=list(HealthCheck)))
    counted(machine.runs, machine.compared)
    assert machine.compared > 20 and machine.several_compared > 3
