"""The example of K and V in host memory, on a CPU."""

from __future__ import annotations

import runpy
from pathlib import Path


def test_the_same_tokens_from_host_memory():
    # By its path: a benchmark has the same name.
    main = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "offload.py"))["main"]
    on_card, in_host_memory, hits, report = main("cpu", inner="eager")
    assert on_card == in_host_memory and len(set(on_card)) > 1
    assert "K and V of 2 sites in host memory" in report
    assert 0 < hits < 1
