"""Several processes on as many GPUs, over NCCL: what tests/distributed shows with gloo. Skipped where there is one GPU.

make test-gpu PYTEST_ARGS="tests/gpu/test_distributed_gpus.py tests/gpu/test_two_gpus.py"
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from launching import Found, launch

HERE = Path(__file__).parents[1] / "distributed"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")]
#: With tensor cores and kernels that attend to a few tokens more than asked for.
LOOSE = 3e-2
SEQUENCE = ("llama", "whole_attention", "exchanges", "own", "other_cache", "other_profile", "failing_step")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Found:
    names = ("llama", "own", "other_profile", "other_constants", "failing_step", "lost")
    return launch(HERE / "ranks.py", tmp_path_factory.mktemp("heads"), 2, *names, device="cuda", limit=900)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return launch(HERE / "sequence_ranks.py", tmp_path_factory.mktemp("tokens"), 2, *SEQUENCE, device="cuda", limit=900)


def close(found: dict[str, Any], tolerance: float) -> None:
    assert found["difference"] < tolerance * max(1.0, found["largest"])


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("budget", ["covering", "small"])
def test_heads_over_two_gpus(heads: Found, budget: str) -> None:
    for found in heads["llama"]:
        assert found[budget]["actions"] == ["sparse"] * 2 and found[budget]["heads"] == [[4, 1]] * 2
        close(found[budget], LOOSE)
        dense, sparse = found["small"]["collectives"]
        assert dense == sparse > 0
    for found in heads["own"]:
        close(found, LOOSE)


@pytest.mark.timeout(1000)
def test_heads_that_would_run_different_things(heads: Found) -> None:
    for name, says in (
        ("other_profile", "differ in budget"),
        ("other_constants", "differ in profile"),
        ("failing_step", "planted"),
    ):
        assert all(says in found["says"] for found in heads[name])
    assert "rank 1 has not come" in heads["lost"][0]["says"]


@pytest.mark.timeout(1000)
def test_tokens_over_two_gpus(tokens: Found) -> None:
    """Against one process on a CPU, which selects exactly the same tokens."""
    for found in tokens["llama"]:
        for reduction in ("affine", "softmax_sum"):
            assert set(found[reduction]["decisions"]) == {"sparse"} and found[reduction]["alike"]
            close(found[reduction], 1e-3)
    for found in tokens["own"]:
        assert found["alike"] and set(found["decisions"]) == {"sparse"}
    for found in tokens["whole_attention"]:
        assert set(found["covering"]["decisions"]) == {"dense-kernel"}
        for how in found.values():
            close(how, 1e-3)
    for found in tokens["exchanges"]:
        assert found == {"gathered": 2, "exact": 1, "static": 2, "softmax_sum": 3}
    assert all("planted" in found["says"] for found in tokens["failing_step"])
    for name in ("other_cache", "other_profile"):
        assert all("of a sequence group differ in" in found["says"] for found in tokens[name])


@pytest.mark.timeout(1000)
def test_a_process_that_dies_ends_the_others(tmp_path: Path) -> None:
    """By an error, or by NCCL's watchdog, within the group's 20 seconds and what it takes to start and compile."""
    ends = {0: [0, 1, -signal.SIGABRT], 1: [-signal.SIGKILL]}
    launch(HERE / "sequence_ranks.py", tmp_path, 2, "killed", device="cuda", limit=300, ends=ends, timeout=20)


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """With exchanges through the GPUs' memory in place of NCCL's."""
    names = ("numbers", "heads", "tokens", "late")
    return launch(
        HERE / "peer_ranks.py", tmp_path_factory.mktemp("peers"), 2, *names, device="cuda", limit=900, timeout=8.0,
        ends={0: [0], 1: [0, 1, -signal.SIGABRT]},
    )  # fmt: skip


@pytest.mark.timeout(1000)
def test_exchanges_through_the_gpus_memory_have_the_bits_of_the_groups(peers: Found) -> None:
    for found in peers["numbers"]:
        assert found["wrong"] == 0 and found["rounds"] == 12 * 5 * 3 * 2 + 100 * 15


@pytest.mark.timeout(1000)
def test_models_that_exchange_through_the_gpus_memory(peers: Found) -> None:
    for found in peers["heads"]:
        close(found, LOOSE)
    for found in peers["tokens"]:
        assert found["by the group"] == 0
        for graphs in (False, True):
            told = found[f"graphs {graphs}"]
            assert told["alike"] and set(told["decisions"]) == {"sparse"}
            close(told, 1e-3)


@pytest.mark.timeout(1000)
def test_a_process_that_does_not_come_ends_the_others_kernels(peers: Found) -> None:
    found = peers["late"][0]
    assert found["error"] is not None and 6 < found["waited"] < 11
