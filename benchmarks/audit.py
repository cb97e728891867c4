"""What auditing costs a decoding model: whole steps in CUDA graphs, with ``audit=n`` and without.

    python benchmarks/audit.py --out benchmarks/results/audit-h100.json          Llama-3.1-8B geometry, 8 layers, 1 x 32k, n = 64

Two compiled copies of one model decode over one full cache in turns, ``--rounds`` blocks of ``--steps`` steps each; a block's time
is taken from its start to the device's last kernel, so that what an audit launches between steps counts, whether or not the host
hides it. The record has each block, the difference of the medians, and what says that CUDA graphs went on: Inductor's counters of
graphs that were skipped, and the number of audited steps that ``stats()`` reports.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from _timing import environment
from decode import STEPS, build, flash_attention, full_cache, random_profile, rewind

import fasa_compile
from fasa_compile import fasa_backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--every", type=int, default=64)
    parser.add_argument(
        "--bound", type=float, help="audit_bound too: one that no layer reaches, so that only watching costs"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=256, help="of a block; a multiple of --every")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register("bench_grouped", flash_attention)
    AttentionMaskInterface.register("bench_grouped", lambda *args, **kwargs: None)
    model = build(options.layers)
    cache = full_cache(model, 1, options.context, STEPS + 8)
    model.set_attn_implementation("sdpa")
    profile = random_profile(options.layers, 32, "int4")
    token = torch.zeros((1, 1), dtype=torch.long, device="cuda")
    variants: dict[str, Any] = {}
    bound = {} if options.bound is None else {"audit_bound": options.bound}
    for name, how in (("without", {}), ("with", {"audit": options.every, **bound})):
        backend = fasa_backend(profile, check_weights=False, strict=True, **how)
        variants[name] = torch.compile(model, backend=backend, mode="reduce-overhead", dynamic=False)

    def block(name: str, steps: int) -> float:
        """Milliseconds of a step."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for i in range(steps):
            if i % STEPS == 0:
                rewind(cache, options.context - STEPS - 8)
            variants[name](input_ids=token, past_key_values=cache, use_cache=True)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / steps

    with torch.no_grad():
        began = time.perf_counter()
        for name in variants:
            block(name, 2 * options.every)  # compiles, records its graph, audits
        seconds = time.perf_counter() - began
        fasa_compile.reset_stats()
        taken: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(options.rounds):
            for name, times in taken.items():
                times.append(block(name, options.steps))
    found = fasa_compile.stats()
    before, after = (statistics.median(taken[name]) for name in ("without", "with"))
    audits = options.rounds * options.steps // options.every
    record = {
        **environment(),
        "benchmark": "audit",
        "model": f"Llama-3.1-8B geometry, {options.layers} layers, random weights, bfloat16",
        "context": options.context,
        "audit": options.every,
        **bound,
        "seconds until both had run": round(seconds, 1),
        "ms per step": {name: [round(x, 4) for x in times] for name, times in taken.items()},
        "median ms": {"without": round(before, 4), "with": round(after, 4)},
        "cost": round(after / before - 1, 5),
        "us per audited step": round(1e3 * (after - before) * options.every, 1),
        "cudagraph skips": torch._dynamo.utils.counters["inductor"]["cudagraph_skips"],
        "graphs compiled meanwhile": found["graphs"],
        "audited steps": audits,
        "audits by layer": {layer: entry["steps"] for layer, entry in found["lost_mass"].items()},
    }
    print(json.dumps(record, indent=1))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
