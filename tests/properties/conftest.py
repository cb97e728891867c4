"""Counts the examples of each property test; ``FASA_EXAMPLES=file`` has the table written there as JSON."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

EXAMPLES: Counter[str] = Counter()
STEPS: Counter[str] = Counter()  # steps that runs of cache operations compared


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Hypothesis lets a plugin put a function around the test that it calls with each example."""
    handle = getattr(pyfuncitem.obj, "hypothesis", None)
    if handle is None:
        yield
        return
    whole = handle.inner_test
    name = pyfuncitem.nodeid.split("::", 1)[-1]

    @functools.wraps(whole)
    def counting(*args: Any, **kwargs: Any) -> Any:
        result = whole(*args, **kwargs)
        EXAMPLES[name] += 1  # an example that `assume` rejects raises, and is not counted
        return result

    handle.inner_test = counting
    try:
        yield
    finally:
        handle.inner_test = whole


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Callable[[int, int], None]:
    """``counted(examples, steps)``, for a test whose examples Hypothesis does not draw for the function itself."""
    name = request.node.nodeid.split("::", 1)[-1]

    def add(examples: int, steps: int) -> None:
        EXAMPLES[name] += examples
        STEPS[name] += steps

    return add


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get("FASA_EXAMPLES")
    if path and not hasattr(session.config, "workerinput"):
        table: dict[str, Any] = {"total": sum(EXAMPLES.values()), "by_test": dict(sorted(EXAMPLES.items()))}
        if STEPS:
            table["steps_compared"] = dict(sorted(STEPS.items()))
        Path(path).write_text(json.dumps(table, indent=1) + "\n")
        print(f"\n{table['total']} examples")
