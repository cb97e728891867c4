"""The blocks of docs/distributed.md run, in two processes on a CPU; those about peer memory and ``device_map`` need two GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from launching import launch

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")]


def test_blocks_run(tmp_path: Path) -> None:
    for found in launch(Path(__file__).with_name("docs_ranks.py"), tmp_path, 2, "blocks")["blocks"]:
        assert found.pop("module") < 1e-6
        # Of five tokens the prompt gives the first; a block that comes new to the page must be run too.
        assert found == {"tensor parallel": 4, "without guards": 4, "tokens": 4, "python blocks": 6}
