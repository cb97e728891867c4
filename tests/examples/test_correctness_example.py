"""The example of a model of one's own in CI: what it checks, and that it fails where the model is wrong."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")

import correctness_in_ci as example
from fasa_compile.testing import CHECKS, check_model


def test_every_check_runs_that_the_driver_allows() -> None:
    outcome = check_model(example.make, driver=example.OwnDriver())
    assert set(outcome) == set(CHECKS)
    idle = {name for name, examples in outcome.items() if not examples["ran"]}
    assert idle == {"neighbours", "padding"}, outcome  # it has batches of one row


def test_a_cache_that_is_not_emptied_is_caught() -> None:
    class Keeps(example.OwnDriver):
        def new_cache(self, model, kind, rows):
            for layer in model.layers:
                layer.k.add_(0.05)

    with pytest.raises(AssertionError):
        check_model(example.make, driver=Keeps(), checks=["repeat"])
