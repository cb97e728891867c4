"""Correctness checks for models under ``fasa_compile``: point ``check_model`` at a model of your own, and know. See docs/testing.md.

``suite``                ``check_model``
``drivers``              how the checks run a model: ``Driver``
``model_checks``         what must hold for a model: each check takes a ``Subject`` and a ``Trial``
``machine``              cache operations in any order
``step_checks``          what must hold for one decode step, for any implementation of it
``steps``, ``oracle``    random decode steps, and one in float64 NumPy
``plain``                sparse decode in an uncompiled model: the plain reference
``tiny``                 tiny decoders in many spellings
``strategies``           Hypothesis strategies
``hypothesis_profiles``  ``ci`` and ``nightly``

``suite``, ``machine``, ``strategies`` and ``hypothesis_profiles`` need ``hypothesis`` (``pip install fasa-compile[testing]``); the
others do not, and nothing imports it until it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fasa_compile.testing.drivers import Driver, TransformersDriver
    from fasa_compile.testing.model_checks import NotApplicable, Subject, Trial
    from fasa_compile.testing.suite import CHECKS, check_model

_LAZY = {
    "CHECKS": "suite",
    "Driver": "drivers",
    "NotApplicable": "model_checks",
    "Subject": "model_checks",
    "TransformersDriver": "drivers",
    "Trial": "model_checks",
    "check_model": "suite",
}

__all__ = ["CHECKS", "Driver", "NotApplicable", "Subject", "TransformersDriver", "Trial", "check_model"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"fasa_compile.testing.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
