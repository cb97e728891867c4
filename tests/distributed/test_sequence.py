"""A KV cache whose tokens lie on several processes: the logits are one process's, the same on each; what goes wrong is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from launching import Found, launch, same

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")]
RANKS = Path(__file__).with_name("sequence_ranks.py")
TWO = (
    "llama",
    "whole_attention",
    "exchanges",
    "other_cache",
    "other_profile",
    "failing_step",
    "too_long",
    "absent",
    "stuck",
    "killed",
)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return launch(RANKS, tmp_path_factory.mktemp("two"), 2, *TWO, ends={1: [-signal.SIGKILL]}, limit=500)


@pytest.mark.parametrize("reduction", ["affine", "softmax_sum"])
def test_a_transformers_model_decodes_as_in_one_process(two: Found, reduction: str) -> None:
    """Over the end of one process's part and into the next one's; with a budget larger than a part, and with padding."""
    for found in two["llama"]:
        same(found[reduction], "sparse")
        assert set(found[reduction]["states"]) == {"packed"}


@pytest.mark.parametrize("how", ["uncompiled", "compiled by others", "pieces", "pieces, compiled"])
def test_the_cache_is_right_without_this_package(two: Found, how: str) -> None:
    for found in two["whole_attention"]:
        same(found[how])


def test_exact_attention_is_merged_and_not_gathered(two: Found) -> None:
    for found in two["whole_attention"]:
        same(found["covering"], "dense-kernel")
        assert set(found["covering"]["reasons"]) == {"within-budget"}


def test_what_a_layers_step_exchanges(two: Found) -> None:
    """Gathered: K and V. Exact: the merge. Sparse: the best keys too, and for softmax_sum the heads' log-sum-exps."""
    for found in two["exchanges"]:
        assert found == {"gathered": 2, "exact": 1, "static": 2, "softmax_sum": 3}


@pytest.mark.parametrize(
    ("scenario", "field"), [("other_cache", r"KV cache: '2 x \[2, 2, (48|53), "), ("other_profile", "budget: .*n_fac=")]
)
def test_processes_that_would_run_different_things_are_named(two: Found, scenario: str, field: str) -> None:
    for rank, found in enumerate(two[scenario]):
        assert f"rank {1 - rank} and rank {rank} of a sequence group differ in " in found["says"]
        assert re.search(field, found["says"]), found["says"]


def test_a_step_that_fails_is_an_error_where_others_take_part(two: Found) -> None:
    assert all(found["error"] and "planted" in found["says"] for found in two["failing_step"])


def test_tokens_beyond_the_end_are_an_error_everywhere(two: Found) -> None:
    for found in two["too_long"]:
        assert found["error"] == "IndexError" or "out of range" in found["says"] or "out of bounds" in found["says"], (
            found
        )


def test_a_process_that_makes_no_cache_is_named_in_bounded_time(two: Found) -> None:
    found = two["absent"][0]
    assert found["error"] == "Disagreement" and "rank 1 has not come to make a KV cache's layer" in found["says"]


def test_a_process_that_dies_between_steps_is_an_error_for_the_others(two: Found) -> None:
    (found,) = two["killed"]
    assert found["error"] and found["waited"] < 10


def test_a_process_that_hangs_is_an_error_when_the_groups_time_is_up(two: Found) -> None:
    """3 seconds there; the one that hung finds the others gone."""
    first, last = two["stuck"]
    assert first["error"] and last["error"] and first["waited"] < 8


def test_the_example_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "sequence_parallel.py"
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
        command, capture_output=True, text=True, timeout=500, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "on every process" in done.stdout and "holds 256 of 512 tokens" in done.stdout
    assert "2 of 2 attention sites decode sparsely" in done.stdout and "over 2 processes" in done.stdout
