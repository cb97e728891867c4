"""``benchmarks/distributed.py`` runs to its end with small sizes, and compares what is equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="its sizes on a GPU take minutes"),
]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "distributed.py"


def test_small_sizes_on_two_processes(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    command = [
        sys.executable,
        "-P",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(SCRIPT),
    ]
    command += ["--tiny", "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    record = json.loads(out.read_text(encoding="utf-8"))
    heads = record["heads"]
    assert heads["sites"] == heads["one process, sites"] == {"sparse": 1}
    for kind in ("sparse", "flash"):
        assert heads[f"{kind} logits: largest difference to one process, relative"] < 1e-4
    assert [row["context"] for row in record["tokens"]] == [512, 768]
    for row in record["tokens"]:
        assert row["sparse: largest difference to the reference"] < 1e-4
        assert row["dense: largest difference to the reference"] < 1e-4
    assert [row["rows"] for row in record["exchanges"]["rows"]] == [1, 4, 16]
    assert set(record["asked for"]) == {"heads: sparse over one process's", "heads: sparse over dense"}
    assert set(record["asked for"]) < set(record["ratios"]) and min(record["ratios"].values()) > 0
