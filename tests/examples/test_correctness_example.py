"""The example of a model of one's own in CI: what it checks, and that it fails where the model is wrong."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")

import correctness_in_ci as example
from fasa_compile.testing import CHECKS, check_model
from fasa_compile.triton_kernels import reference


def test_every_check_runs_that_the_driver_allows() -> None:
    outcome = check_model(example.make, driver=example.OwnDriver())
    assert set(outcome) == set(CHECKS)
    idle = {name for name, examples in outcome.items() if not examples["ran"]}
    assert idle == {"neighbours", "padding", "host memory"}, outcome  # batches of one row, one kind of cache


def test_a_wrong_backend_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference.sparse_decode
    monkeypatch.setattr(reference, "sparse_decode", lambda *args, **how: 1.01 * whole(*args, **how))
    with pytest.raises(AssertionError, match="logits differ"):
        check_model(example.make, driver=example.OwnDriver(), checks=["dense parity"])
