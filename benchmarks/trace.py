"""What reading and rewriting a graph costs: seconds of one core for capture, match and rewrite, per layer.

A tiny Llama is enough, since the work goes by nodes, not by sizes: decode graphs of 2, 8 and 32 layers, static and dynamic cache. The
first graph of a process pays for imports and caches inside torch, so one is traced ahead. ``python benchmarks/trace.py``
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers import __version__ as transformers_version

from fasa_compile import backend as stages
from fasa_compile import fasa_backend

HERE = Path(__file__).parent


def seconds(layers: int, kind: str) -> dict[str, float]:
    """CPU seconds of each stage for one decode graph."""
    torch._dynamo.reset()
    spent: dict[str, float] = {}

    def timed(name: str) -> tuple[Any, Any]:
        stage = getattr(stages, name)

        def run(*arguments: Any, **options: Any) -> Any:
            began = time.process_time()
            try:
                return stage(*arguments, **options)
            finally:
                spent[name] = spent.get(name, 0.0) + time.process_time() - began

        return stage, run

    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=128,
        )
    ).eval()
    config: Any = model.config
    cache = StaticCache(config=config, max_cache_len=64) if kind == "static" else DynamicCache(config=config)
    originals = {}
    for name in ("capture", "match", "rewrite"):
        originals[name], replaced = timed(name)
        setattr(stages, name, replaced)
    try:
        backend = fasa_backend("all", n_fac=8, n_sink=1, n_recent=1, inner="eager")
        with torch.no_grad():
            model(input_ids=torch.arange(3, 15)[None], past_key_values=cache)
            step = torch.compile(model, backend=backend, dynamic=kind == "dynamic")
            step(input_ids=torch.tensor([[5]]), past_key_values=cache)
    finally:
        for name, stage in originals.items():
            setattr(stages, name, stage)
    rewritten = sum(d.action == "sparse" for graph in backend.graphs for d in graph.decisions)
    assert rewritten == layers, f"{rewritten} of {layers} layers rewritten"
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "trace-cpu.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seconds(2, "static")
    rows = []
    for kind in ("static", "dynamic"):
        for layers in given.layers:
            best = min((seconds(layers, kind) for _ in range(given.repeats)), key=lambda s: sum(s.values()))
            row = {"cache": kind, "layers": layers, **{name: round(s, 4) for name, s in best.items()}}
            row["per_layer"] = round(sum(best.values()) / layers, 4)
            rows.append(row)
            print(row, flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers_version, "python": platform.python_version()}
    record = {"unit": "CPU seconds, one thread", "repeats": given.repeats, **versions, "rows": rows}
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
