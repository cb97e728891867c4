"""What calibrating costs: seconds, where they go, and peak memory, beside the model's own forward over the same tokens.

    python benchmarks/calibration.py --device cuda --out benchmarks/results/calibration-h100.json       SmolLM2-135M, 4096 tokens

``first`` is a call in a fresh process; ``again`` the median of ``--repeats`` more, Dynamo's caches emptied before each, as for another
model. ``core s`` is processor time, which a busy machine tells nearly as an idle one does. Memory is compared with the leanest forward that
the model has (no cache, one row of logits): what is allocated at most meanwhile on a GPU, on a CPU (Linux) what the process holds at most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks" / "quality")]

import torch  # noqa: E402

import compare  # noqa: E402
import corpora  # noqa: E402
import fasa_compile  # noqa: E402
import smollm2  # noqa: E402
from fasa_compile import calibration  # noqa: E402
from fasa_compile.calibration_stats import LayerStats  # noqa: E402

PARTS = {
    "forward, traced": (calibration, "_forward"),
    "of it reading the graph": (calibration._Observer, "__call__"),
    "of it statistics": (calibration._Observer, "record"),
    "profiles of layers": (LayerStats, "layer_profile"),
    "choosing the reduction": (LayerStats, "mass_kept"),
    "hash of the weights": (calibration, "weights_fingerprint"),
}


@contextmanager
def timed_parts(sync: Callable[[], None]) -> Iterator[dict[str, float]]:
    """Seconds spent in each of ``PARTS`` meanwhile."""
    spent = dict.fromkeys(PARTS, 0.0)
    kept = {name: getattr(*where) for name, where in PARTS.items()}

    def timed(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = kept[name](*args, **kwargs)
            sync()
            spent[name] += time.perf_counter() - began
            return result

        return call

    for name, (owner, attribute) in PARTS.items():
        setattr(owner, attribute, timed(name))
    try:
        yield spent
    finally:
        for name, (owner, attribute) in PARTS.items():
            setattr(owner, attribute, kept[name])


def resident_peak() -> float:
    """MiB that this process has held at most since ``/proc/self/clear_refs`` was last written."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, or the path of a GGUF file")
    parser.add_argument("--threads", type=int, help="of a CPU (default: PyTorch's)")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    name, model, tokenizer = compare.load(args)
    ids = corpora.begun(tokenizer, smollm2.windows(tokenizer, args.length, 1)).to(args.device)
    cuda = args.device.startswith("cuda")

    def sync() -> None:
        if cuda:
            torch.cuda.synchronize()

    def peak(call: Callable[[], Any]) -> tuple[float, float, float]:
        """Seconds, of all cores' time too, and MiB at most meanwhile."""
        sync()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak, of proc(5)
        began, spent = time.perf_counter(), time.process_time()
        call()
        sync()
        seconds, spent = time.perf_counter() - began, time.process_time() - spent
        most = torch.cuda.max_memory_allocated() / 2**20 if cuda else resident_peak()
        return seconds, spent, most

    def run() -> None:
        torch._dynamo.reset()
        fasa_compile.calibrate(model, ids, progress=False)

    lean = {"use_cache": False, "logits_to_keep": 1}
    with torch.no_grad():
        model(ids[:, :64], **lean)
        forward = peak(lambda: model(ids, **lean))
    first = peak(run)
    again = [peak(run) for _ in range(args.repeats)]
    with timed_parts(sync) as parts:
        run()
    record = {
        "benchmark": "calibration",
        "model": name,
        "tokens": ids.numel(),
        "device": torch.cuda.get_device_name()
        if cuda
        else f"cpu, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}",
        "versions": compare.versions(),
        "forward s": round(forward[0], 2),
        "first s": round(first[0], 2),
        "again s": round(statistics.median(run[0] for run in again), 2) if again else None,
        "core s": {"forward": round(forward[1], 2), "first": round(first[1], 2)},
        "parts s": {part: round(s, 2) for part, s in parts.items()},
        "peak MiB": round(max(run[2] for run in (first, *again))),
        "forward peak MiB": round(forward[2]),
    }
    print(json.dumps(record, indent=1))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
