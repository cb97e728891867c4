"""Hypothesis profiles of the property tests: ``ci`` draws the same few examples every time, ``nightly`` many and new ones.

The environment's ``HYPOTHESIS_PROFILE`` chooses; without it, it is ``ci``. Levels share one number of examples: a decode step costs
milliseconds, a model that is compiled anew about a second. Compiling makes single examples slow, so there is no deadline. ``nightly``
prints a blob with which a failing example can be run again (``@reproduce_failure``); both print the example itself. Needs ``hypothesis``.
"""

from __future__ import annotations

import os
from typing import Literal

import hypothesis

_QUIET = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
# All but "explain", which traces every line of Python that runs: compiling under it takes minutes.
_PHASES = [p for p in hypothesis.Phase if p is not hypothesis.Phase.explain]
# Shrinking a model's example takes minutes: under `ci`, whose examples are the same in every run, it is left to `nightly`.
_PHASES_WITHOUT_SHRINKING = [p for p in _PHASES if p is not hypothesis.Phase.shrink]
_LEAST = 4  # examples of any level

#: How many examples of a decode step one example of a level costs, roughly.
COSTS = {"step": 1, "model": 25, "machine": 25}

hypothesis.settings.register_profile(
    "ci", max_examples=25, deadline=None, derandomize=True, suppress_health_check=_QUIET
)
hypothesis.settings.register_profile(
    "nightly", max_examples=1250, deadline=None, print_blob=True, suppress_health_check=_QUIET
)


def chosen(name: str | None = None) -> hypothesis.settings:
    """The profile ``name``, by default the environment's ``HYPOTHESIS_PROFILE``, or ``ci``."""
    return hypothesis.settings.get_profile(name or os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def examples(level: Literal["step", "model", "machine"], name: str | None = None) -> hypothesis.settings:
    """Settings of a level under a profile: at least 4 examples, runs of at most 25 operations."""
    profile = chosen(name)
    most = max(_LEAST, profile.max_examples // COSTS[level])
    phases = _PHASES if level == "step" or most > _LEAST else _PHASES_WITHOUT_SHRINKING
    return hypothesis.settings(profile, max_examples=most, stateful_step_count=25, phases=phases)
