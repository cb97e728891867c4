"""Step time of a whole model decoding: dense as Hugging Face runs it, dense with the best attention kernel, and sparse.

Llama-3.1-8B geometry (32 layers, 32/8 heads of 128, bf16) with random weights; the static cache is full of random keys and
values. All variants are compiled by Inductor with CUDA graphs and decode from the same cache, in one process on one card:

- ``hf``: transformers' own static-cache path (repeat_kv and a mask), ``torch.compile(mode="reduce-overhead")``;
- ``flash``: the same model whose attention is SDPA's flash kernel, grouped, over exactly the cache, without a mask;
- ``fasa-*``: the unmodified model with ``fasa_backend``.

    python benchmarks/decode.py --case 1x32768 --case 8x32768 --out benchmarks/results/decode.json

The profile's FCs are drawn at random: on random keys every choice is alike, and the time does not depend on it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fasa_compile
from fasa_compile import fasa_backend
from fasa_compile.profiles import Budget, FCProfile, LayerProfile, ModelFacts, RopeFacts

GEOMETRY = dict(
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=131072 + 4096,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)


def build(layers: int) -> Any:
    """The model with random weights, made on the GPU. Query and key weights are sharpened so that attention is not flat."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=layers, **GEOMETRY)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    return model


def random_profile(layers: int, n_tip: int, fc_format: str) -> FCProfile:
    """A profile of the geometry with random FCs, zero centre and unit spread."""
    g = torch.Generator().manual_seed(0)
    pairs = tuple((i, i + 64) for i in range(64))
    rows = tuple(
        LayerProfile(
            layer=f"model.layers.{i}.self_attn",
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rope=RopeFacts(128, pairs, 1.0),
            dense=False,
            fcs=torch.stack([torch.randperm(64, generator=g)[:n_tip].sort().values for _ in range(8)]).to(torch.int32),
            centre=torch.zeros(8, 128),
            spread=torch.ones(8, 128),
            norm=torch.zeros(32),
        )
        for i in range(layers)
    )
    return FCProfile(rows, Budget(), fc_format, "static", "random", ModelFacts("Llama", "random", layers, {}))


def full_cache(model: Any, batch: int, length: int, room: int) -> Any:
    """A static cache of ``length`` slots, all holding random keys and values, whose next write goes to ``length - room``."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=length)
    with torch.no_grad():
        model(torch.zeros((batch, 1), dtype=torch.long, device="cuda"), past_key_values=cache)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    rewind(cache, length - room)
    return cache


def rewind(cache: Any, position: int) -> None:
    for layer in cache.layers:
        layer.cumulative_length.fill_(position)


def flash_attention(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float | None = None, **_: Any) -> Any:
    """transformers' attention interface: SDPA's flash kernel over the whole cache, query heads grouped, no mask."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


@torch.no_grad()
def step_times(model: Any, step: Any, cache: Any, batch: int, length: int, room: int) -> tuple[list[float], float]:
    """Milliseconds of each step once CUDA graphs are recorded, and seconds until then (compilation)."""
    token = torch.zeros((batch, 1), dtype=torch.long, device="cuda")
    rewind(cache, length - room)
    began = time.perf_counter()
    for _ in range(4):
        step(input_ids=token, past_key_values=cache)
        torch.cuda.synchronize()
    warm = time.perf_counter() - began
    times = []
    for _ in range(room - 8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step(input_ids=token, past_key_values=cache)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times, warm


def variant(model: Any, name: str, n_fac: int, layers: int) -> Any:
    """A compiled step: ``hf``, ``flash`` or ``fasa-<format>-<n_tip>``."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    torch._dynamo.reset()
    if name == "flash":
        AttentionInterface.register("bench_grouped", flash_attention)
        AttentionMaskInterface.register("bench_grouped", lambda *args, **kwargs: None)
    model.set_attn_implementation("bench_grouped" if name == "flash" else "sdpa")
    if not name.startswith("fasa"):
        return torch.compile(model, mode="reduce-overhead", dynamic=False)
    _, fmt, n_tip = name.split("-")
    backend = fasa_backend(random_profile(layers, int(n_tip), fmt), n_fac=n_fac, check_weights=False, strict=True)
    return torch.compile(model, backend=backend, mode="reduce-overhead", dynamic=False)


def main() -> None:
    import transformers
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="BATCHxLENGTH, e.g. 1x32768")
    parser.add_argument("--variant", action="append", help="hf, flash, fasa-int4-32, fasa-fp8-16, ...")
    parser.add_argument("--n-fac", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = [tuple(map(int, c.split("x"))) for c in options.case or ["1x32768"]]
    variants = options.variant or ["hf", "flash", "fasa-int4-32", "fasa-fp8-16"]
    model = build(options.layers)
    record: dict[str, Any] = {
        "benchmark": "decode step, Llama-3.1-8B geometry, random weights, bf16",
        "layers": options.layers,
        "n_fac": options.n_fac,
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "cases": {},
    }
    for batch, length in cases:
        room = options.steps + 8
        cache = full_cache(model, batch, length, room)
        rows = record["cases"][f"{batch}x{length}"] = {}
        for name in variants:
            fasa_compile.reset_stats()
            torch._dynamo.utils.counters.clear()
            times, warm = step_times(
                model, variant(model, name, options.n_fac, options.layers), cache, batch, length, room
            )
            rows[name] = {
                "ms_per_step": statistics.median(times),
                "fastest": min(times),
                "slowest": max(times),
                "seconds_to_warm": warm,
                "cudagraph_skips": torch._dynamo.utils.counters["inductor"]["cudagraph_skips"],
                "sparse_steps": fasa_compile.stats()["sparse_steps"],
                "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
            }
            ratio = rows["hf"]["ms_per_step"] / rows[name]["ms_per_step"] if "hf" in rows else float("nan")
            print(
                f"{batch}x{length} {name:14s} {rows[name]['ms_per_step']:8.2f} ms  {ratio:5.2f}x hf  {rows[name]}",
                flush=True,
            )
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(record, indent=1))
        torch._dynamo.reset()
        del cache
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
