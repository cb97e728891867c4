"""Models sharded over processes: each rewrites its own heads, and the logits are the whole model's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from launching import Found, check_slices, launch

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")]
RANKS = Path(__file__).with_name("ranks.py")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return launch(
        RANKS,
        tmp_path_factory.mktemp("two"),
        2,
        "llama",
        "own",
        "other_profile",
        "other_constants",
        "other_collectives",
        "failing_step",
        "lost",
    )


@pytest.mark.parametrize("budget", ["covering", "small"])
def test_a_sharded_transformers_model_gives_the_whole_models_logits(two: Found, budget: str) -> None:
    for found in two["llama"]:
        assert found[budget]["actions"] == ["sparse"] * 2 and found[budget]["heads"] == [[4, 1]] * 2
        assert found[budget]["difference"] < 1e-4 * max(1.0, found[budget]["largest"])


def test_a_sparse_step_communicates_no_more_than_a_dense_one(two: Found) -> None:
    for found in two["llama"]:
        dense, sparse = found["small"]["collectives"]
        assert dense == sparse > 0


def test_a_module_of_ones_own_sharded_by_parallelize_module(two: Found) -> None:
    check_slices(two["own"], lambda r: (slice(r, r + 1), slice(4 * r, 4 * r + 4)))


@pytest.mark.parametrize(
    ("scenario", "field"), [("other_profile", "budget: .*n_fac=24.*n_fac=32|n_fac=32.*n_fac=24"), ("other_constants", "profile: "),
     ("other_collectives", "peer_memory: ")]
)  # fmt: skip
def test_ranks_that_would_run_different_things_are_named(two: Found, scenario: str, field: str) -> None:
    for rank, found in enumerate(two[scenario]):
        assert f"rank {1 - rank} and rank {rank} of a tensor-parallel group differ in " in found["says"]
        assert re.search(field, found["says"]), found["says"]


def test_a_step_that_fails_is_an_error_where_other_ranks_take_part(two: Found) -> None:
    for found in two["failing_step"]:
        assert found["error"] and "planted" in found["says"]


def test_a_rank_that_never_comes_is_named_in_bounded_time(two: Found) -> None:
    found = two["lost"][0]
    assert found["error"] and "rank 1 has not come to make a graph" in found["says"] and "within 2 s" in found["says"]


def test_the_example_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "tensor_parallel.py"
    command = [
        sys.executable,
        "-P",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(example),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "2 of 2 attention sites decode sparsely" in done.stdout and "4/2 x 32" in done.stdout
