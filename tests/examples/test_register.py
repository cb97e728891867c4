"""The example of a registered attention: dense before, sparse after, and its negative twin refused."""

from __future__ import annotations

import warnings

import pytest
import torch

import register_attention as example
from fasa_compile import fasa_backend, patterns


@pytest.fixture
def registered():
    patterns.register("attention", "blend", "mylib.blend")(example.read_blend)
    yield
    patterns.unregister("attention", "blend")


def run(model, n_fac):
    backend = fasa_backend("all", n_fac=n_fac, n_sink=0, n_recent=1, inner="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return example.decode(model, backend), backend.explain()


def test_the_operator_is_unknown_until_it_is_registered():
    _, report = run(example.Model(), 8)
    assert not report.sparse


def test_the_reader_makes_it_sparse(registered):
    torch.manual_seed(0)
    model = example.Model()
    dense = example.decode(model)
    found, report = run(model, 8)
    assert [(row.anchor, row.decision) for row in report.rows] == [("blend", "sparse")]
    assert (found[:8] - dense[:8]).abs().max() < 1e-5, "no more tokens than the budget: dense"
    assert (found[20:] - dense[20:]).abs().max() > 1e-4
    covering, _ = run(model, 48)
    assert (covering - dense).abs().max() < 1e-5


def test_the_negative_twin_is_refused(registered):
    _, report = run(example.Model(power=2), 8)
    assert [(row.decision, row.reason) for row in report.rows] == [("dense", "unknown-attention")]
    assert "mylib::blend with a power" in report.rows[0].why
