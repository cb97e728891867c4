"""What bounds the kernels of a sparse step: Nsight Compute over one step of each shape and format.

    python benchmarks/bounds.py --out benchmarks/results/bounds-h200.json

Inputs of ``attention.py``, after steps that have taught the prediction. Each kernel runs alone, its caches flushed and the
clocks as they are, so that its time is somewhat more than in a step. Needs ``ncu`` and the right to read the counters.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import attention
import torch
from _timing import environment

#: What a kernel's row says -> (the counter, what it is multiplied with).
COUNTERS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "MB read": ("dram__bytes_read.sum", 1e-6),
    "MB written": ("dram__bytes_write.sum", 1e-6),
    "memory, % of peak": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "registers": ("launch__registers_per_thread", 1),
    "programs": ("launch__grid_size", 1),
    "programs a multiprocessor holds, by registers": ("launch__occupancy_limit_registers", 1),
    "warps resident": ("sm__warps_active.avg.per_cycle_active", 1),
    "million instructions of warps": ("smsp__inst_executed.sum", 1e-6),
    "schedulers issue, % of cycles": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1),
    "warps waiting for memory": ("smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio", 1),
    "warps waiting at barriers": ("smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio", 1),
    "warps waiting for shared memory": (
        "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio",
        1,
    ),
}  # fmt: skip


def step(shape: str, cache: str) -> None:
    """What is profiled: the last of several steps."""
    B, L = map(int, shape.split("x"))
    torch.manual_seed(0)
    calls = attention.sparse_calls(attention.make_buffers(B, L)[:2], cache)
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    calls[0]()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def measure(shape: str, cache: str) -> list[dict[str, object]]:
    command = [
        "ncu", "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off", "--clock-control",
        "none", "--kernel-name", f"regex:{'|'.join(attention.KERNELS)}", "--metrics", ",".join(name for name, _ in COUNTERS.values()),
        sys.executable, *(["-P"] if sys.flags.safe_path else []), __file__, "--step", shape, cache,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    start = done.stdout.find('"ID"')
    if done.returncode or start < 0:
        raise SystemExit(f"ncu failed for {shape}, {cache}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows = list(csv.DictReader(io.StringIO(done.stdout[start:])))[1:]  # the second line has units
    return [
        {"kernel": row["Kernel Name"].split("(")[0]}
        | {name: round(float(row[counter].replace(",", "")) * by, 2) for name, (counter, by) in COUNTERS.items()}
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record here (JSON)")
    parser.add_argument(
        "--case", action="append", help="BxL:cache, as '8x32768:fp8 n_tip 16'; all of attention.py's shapes and caches without"
    )  # fmt: skip
    parser.add_argument("--step", nargs=2, metavar=("BxL", "CACHE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        step(*options.step)
        return
    cases = options.case or [f"{B}x{L}:{cache}" for B, L in attention.SHAPES for cache in attention.CACHES]
    record: dict[str, object] = {**environment(), "rows": (rows := [])}
    for case in cases:
        shape, cache = case.split(":")
        rows.append({"shape": shape, "cache": cache, "kernels": measure(shape, cache)})
        print(json.dumps(rows[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
