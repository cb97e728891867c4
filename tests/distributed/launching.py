"""Runs scenarios in several processes, each a script that is given a folder and names: both sides of it.

A script ends with ``run(globals())``; each of its scenarios is a function ``(folder) -> data`` whose data, in JSON, ``launch`` returns.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Found = dict[str, list[dict[str, Any]]]


def launch(
    script: Path,
    folder: Path,
    world: int,
    *scenarios: str,
    device: str = "cpu",
    limit: int = 240,
    ends: Mapping[int, Collection[int]] | None = None,
    timeout: float = 120.0,
) -> Found:
    """What each rank returned, by scenario. ``ends``: exit codes of ranks that end otherwise than well; what they did not return in the last
    scenario is left out. ``timeout``: seconds that collectives wait."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    processes = []
    for rank in range(world):
        env = os.environ | {k: str(v) for k, v in given.items()} | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-P", str(script), str(folder), *scenarios],
                env=env
                | {"FASA_TEST_DEVICE": device, "FASA_TEST_TIMEOUT": str(timeout), "TOKENIZERS_PARALLELISM": "false"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [p.communicate(timeout=limit)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    ends = ends or {}
    for rank, p in enumerate(processes):
        expected = ends.get(rank, [0])
        assert p.returncode in expected, f"rank {rank} of {world} ended with {p.returncode}:\n{said[rank][-4000:]}"
    files = {s: [folder / f"{s}-{rank}.json" for rank in range(world)] for s in scenarios}
    return {
        s: [json.loads(f.read_text()) for r, f in enumerate(fs) if r not in ends or f.exists()]
        for s, fs in files.items()
    }


def check_slices(found: list[dict[str, Any]], heads: Callable[[int], tuple[slice, slice]]) -> None:
    """Each rank has its slices of KV and query heads, and the whole model's logits."""
    for rank, mine in enumerate(found):
        kv, q = heads(rank)
        assert mine["actions"] == ["sparse"] * 2
        assert mine["fcs"] == [layer[kv] for layer in mine["whole_fcs"]]
        assert mine["norm"] == [layer[q] for layer in mine["whole_norm"]]
        assert mine["difference"] < 1e-4 * max(1.0, mine["largest"])


def same(found: dict[str, Any], decision: str | None = None, processes: int = 2) -> None:
    """One process's logits, alike on all, and where asked for what became of the attention sites."""
    assert found["alike"], "processes differ"
    assert found["difference"] < 1e-4 * max(1.0, found["largest"])
    if decision is not None:
        assert set(found["decisions"]) == {decision}
        assert set(found["caches"]) == {f"static (index_copy), over {processes} processes"}


def collectives(run: Callable[[], Any]) -> int:
    """How often a call communicates, as PyTorch's profiler sees it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        run()
    families = (("c10d::",), ("_c10d_functional::all_", "_c10d_functional::reduce"))  # one calls the other, or does not
    return max(sum(e.count for e in seen.key_averages() if e.key.startswith(family)) for family in families)


def run(scenarios: dict[str, Any]) -> None:
    """What a script does: the scenarios it was asked for, in one process group."""
    timeout = float(os.environ["FASA_TEST_TIMEOUT"])
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    rank, gpu = int(os.environ["RANK"]), os.environ.get("FASA_TEST_DEVICE", "cpu") == "cuda"
    if gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=datetime.timedelta(seconds=timeout))
    for name in names:
        found = scenarios[name](folder)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
        if not found.get("alone"):
            dist.barrier()
    if names and found.get("alone"):  # others are gone: nothing to take leave of
        sys.stdout.flush()
        os._exit(0)
    dist.destroy_process_group()
