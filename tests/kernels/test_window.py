"""The window that TIP's bins lie in, from step to step: ``benchmarks/threshold.py``, which replays it, and what it leads to."""

from __future__ import annotations

import importlib.util
import itertools
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch

#: Keys of three queries that took turns on an H200 (random, 32k tokens, n_fac 1024): the key of rank share * n_fac. With bins that
#: doubled where the threshold had moved by more than 10 of them, one of every three steps found its bin too full and searched.
SHARES = (0.004, 0.04, 0.1, 0.25, 0.5, 0.75, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 3.0, 5.0, 8.0)
TURNS = (
    (6.225, 5.725, 5.06, 4.681, 4.382, 4.189, 4.129, 4.102, 4.083, 4.051, 4.022, 4.0, 3.979, 3.962, 3.922, 3.857, 3.717, 3.511, 3.228, 2.944),
    (5.869, 5.369, 4.95, 4.602, 4.306, 4.127, 4.072, 4.049, 4.026, 4.004, 3.989, 3.969, 3.947, 3.932, 3.891, 3.827, 3.693, 3.501, 3.24, 2.956),
    (5.476, 4.976, 4.596, 4.245, 3.978, 3.816, 3.767, 3.745, 3.726, 3.707, 3.69, 3.672, 3.655, 3.64, 3.611, 3.555, 3.444, 3.274, 3.046, 2.808),
)  # fmt: skip


@pytest.fixture(scope="module")
def threshold() -> ModuleType:
    file = Path(__file__).resolve().parents[2] / "benchmarks" / "threshold.py"
    spec = importlib.util.spec_from_file_location("threshold", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter (TRITON_INTERPRET=1)")
def test_the_replay_has_the_kernels_rule(threshold: ModuleType) -> None:
    from search_kernel import factors, slopes

    from fasa_compile.triton_kernels.score import BELOW, BINS, LAST

    assert (BINS.value, BELOW.value, LAST.value) == (threshold.BINS, threshold.BELOW, threshold.LAST)
    cells, moves = torch.cartesian_prod(torch.arange(1, 129), torch.arange(0, 16)).int().T.contiguous()
    out = torch.empty(cells.shape)
    factors[(2,)](cells, moves, out, threshold.N_FAC, 1024)
    expected = [threshold.factor(c, m) for c, m in zip(cells.tolist(), moves.tolist(), strict=True)]
    torch.testing.assert_close(out, torch.tensor(expected))
    assert len(set(expected)) == 6, "every branch is compared"
    states = torch.randn(3, 64)
    slopes[(1,)](*states, out, 64)
    torch.testing.assert_close(out[:64], torch.tensor([threshold.learned_slope(*s) for s in states.T.tolist()]))


def test_queries_that_take_turns_do_not_search(threshold: ModuleType) -> None:
    """From wherever they start, at most while they settle."""
    ranks = torch.arange(1, 8 * threshold.N_FAC + 1) / threshold.N_FAC
    shares = torch.tensor(SHARES)
    at = torch.searchsorted(shares, ranks).clamp(1, len(SHARES) - 1)
    part = (ranks - shares[at - 1]) / (shares[at] - shares[at - 1])
    turns = [torch.lerp(y[at - 1], y[at], part) for y in map(torch.tensor, TURNS)]
    steps = torch.stack([turns[i % 3] for i in range(90)])
    for level, width in itertools.product((3.7, 3.8, 3.9, 4.0, 4.1), torch.logspace(-9, -2, 29, base=2).tolist()):
        all_of_them, *_ = threshold.replay(steps, None, level, width)
        at_first, *_ = threshold.replay(steps[:30], None, level, width)
        assert all_of_them == at_first, (level, width)
