"""Four processes: KV heads that several hold, tokens over all, and heads and tokens shared out at once. One launch for all of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from launching import Found, check_slices, launch, same

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    script = Path(__file__).with_name("sequence_ranks.py")
    return launch(script, tmp_path_factory.mktemp("four"), 4, "replicated", "operators", "mesh", limit=500)


def test_kv_heads_that_several_ranks_hold(four: Found) -> None:
    check_slices(four["replicated"], lambda r: (slice(r // 2, r // 2 + 1), slice(2 * r, 2 * r + 2)))


def test_a_module_of_ones_own_with_the_operators_of_a_gpus_graphs(four: Found) -> None:
    for found in four["operators"]:
        same(found, "sparse", 4)


def test_heads_and_tokens_shared_out_at_once(four: Found) -> None:
    for found in four["mesh"]:
        same(found, "sparse")
