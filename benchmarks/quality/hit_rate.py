"""How often the hot buffer has what a real model selects: SmolLM2 decoding 8k tokens of text with K and V in host memory.

    python benchmarks/quality/hit_rate.py --n-fac 256 --n-fac 1024 --out benchmarks/results/hit-rate-smollm2.json

Teacher forced, on a CPU or a GPU. Prefill is dense; the last tokens of each text are decoded through the compiled model, for each budget
and size of the hot buffer (as multiples of n_fac) again from the same cache. What is reported is counted by the buffer itself, after
the first eight steps, which fill it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import fasa_compile
import smollm2
from corpora import stretches
from fasa_compile import FasaStaticCache, fasa_backend, load_profile, plan
from fasa_compile.counters import reset_stats, stats
from fasa_compile.triton_kernels.hot_slots import fac_parts

WARM = 8


@torch.no_grad()
def prefilled(model: Any, ids: torch.Tensor, room: int, chunk: int = 1024) -> Any:
    cache = FasaStaticCache(model.config, max_cache_len=ids.shape[1])
    for part in ids[:, :-room].split(chunk, dim=1):
        model(part, past_key_values=cache, logits_to_keep=1)
    return cache


@torch.no_grad()
def fetched(
    model: Any, cache: Any, ids: torch.Tensor, room: int, n_fac: int, hot: int, profile: Any
) -> dict[str, float]:
    torch._dynamo.reset()
    on_gpu = ids.is_cuda
    backend = fasa_backend(
        profile,
        n_fac=n_fac,
        offload="cpu",
        hot_tokens=hot,
        strict=True,
        dense_below=0,
        inner="inductor" if on_gpu else "eager",
    )
    step = torch.compile(model, backend=backend)
    start = ids.shape[1] - room
    for layer in cache.layers:
        layer.cumulative_length.fill_(start)
    for i in range(start, ids.shape[1]):
        if i == start + WARM:
            reset_stats()
        step(ids[:, i : i + 1].clone(), past_key_values=cache)
    rows = stats()["hot"].values()
    sums = {name: sum(row[name] for row in rows) for name in ("attended", "fetched", "unkept")}
    worst = max(row["fetched"] / row["attended"] for row in rows)
    return {
        "hit_rate": 1 - sums["fetched"] / sums["attended"],
        "hit_rate_worst_layer": 1 - worst,
        "without_a_slot": sums["unkept"] / sums["attended"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--n-fac", type=int, action="append")
    parser.add_argument("--hot", type=float, action="append", help="tokens of the hot buffer, in multiples of n_fac")
    parser.add_argument("--text", action="append", help="fiction, code, manual or records")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--sms", type=int, default=132, help="deal out the slots as for a card with so many multiprocessors"
    )
    parser.add_argument("--out", type=Path, help="write the record here (JSON)")
    options = parser.parse_args()
    plan.fac_parts = lambda rows, n_fac, _: fac_parts(rows, n_fac, options.sms)
    model, tokenizer = smollm2.load(smollm2.fetch(), device=options.device)
    profile = load_profile("smollm2-135m-instruct-q4_1")
    texts = stretches(tokenizer, None, options.length, 1, 0)
    record: dict[str, Any] = {
        "benchmark": "Hit rate of the hot buffer, SmolLM2-135M-Instruct (4-bit weights), the shipped profile",
        "length": options.length,
        "steps": options.steps - WARM,
        "multiprocessors": options.sms,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "fasa_compile": fasa_compile.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "rows": [],
    }
    for text in options.text or ["fiction", "code"]:
        ids = texts[text].to(options.device)
        cache = prefilled(model, ids, options.steps)
        for n_fac in options.n_fac or [256, 1024]:
            for times in options.hot or [1.0, 1.5, 2.0]:
                row = {"text": text, "n_fac": n_fac, "hot_tokens": int(times * n_fac)}
                row |= fetched(model, cache, ids, options.steps, n_fac, int(times * n_fac), profile)
                print(row, flush=True)
                record["rows"].append(row)
                if options.out:
                    options.out.parent.mkdir(parents=True, exist_ok=True)
                    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
