"""Hypothesis profiles of the property tests: ``ci`` draws the same few examples every time, ``nightly`` many and new ones.

Levels share one number of examples: a decode step costs milliseconds, a model that is compiled anew a second. Needs ``hypothesis``.
"""

from __future__ import annotations

import os
from typing import Literal

import hypothesis

#: Of how many examples of a decode step one example of a level is worth.
WORTH = {"step": 1, "model": 25, "machine": 25}


def load(name: str | None = None) -> None:
    """Register ``ci`` and ``nightly`` and load ``name``, by default what the environment's ``HYPOTHESIS_PROFILE`` says, or ``ci``.

    Compiling makes single examples slow, so neither has a deadline. ``nightly`` prints a blob with which a failing example can be
    run again (``@reproduce_failure``), and both print the example itself.
    """
    slow = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
    hypothesis.settings.register_profile(
        "ci", max_examples=25, deadline=None, derandomize=True, suppress_health_check=slow
    )
    hypothesis.settings.register_profile(
        "nightly", max_examples=1250, deadline=None, print_blob=True, suppress_health_check=slow
    )
    hypothesis.settings.load_profile(name or os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def examples(level: Literal["step", "model", "machine"]) -> hypothesis.settings:
    """Settings of a level under the profile that is loaded: at least 2 examples, runs of at most 25 operations."""
    most = max(2, hypothesis.settings.default.max_examples // WORTH[level])  # type: ignore[union-attr]
    return hypothesis.settings(max_examples=most, stateful_step_count=25)
