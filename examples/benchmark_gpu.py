"""How fast is it on this machine? A decode step of a model's shapes against the length of the context, with a plot.

The same as `fasa-compile bench CONFIG`, called from Python. By default four layers of Llama-3 8B's shapes with random weights on a GPU
(70 s on an H100, compiling included), and a model of two small layers on a CPU, where sparse steps run the plain-torch reference and
are not fast.

    python examples/benchmark_gpu.py --out bench.json --plot bench.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from fasa_compile import bench, loading
from fasa_compile.backend import fasa_backend
from fasa_compile.profiles.stand_in import random_profile

SHAPES = dict(
    hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336, vocab_size=128256
)
SMALL = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256, vocab_size=512)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768, 65536] if on_gpu else [512, 2048])
    parser.add_argument("--n-fac", type=int, default=1024 if on_gpu else 128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor" if on_gpu else "eager")
    parser.add_argument("--out", type=Path, help="the record, as JSON")
    parser.add_argument("--plot", type=Path, help="the plot, as SVG")
    args = parser.parse_args(arguments)
    from transformers import LlamaConfig

    layers = 4 if on_gpu else 2
    config = LlamaConfig(num_hidden_layers=layers, max_position_embeddings=131072 + 64, **(SHAPES if on_gpu else SMALL))
    # Which attentions would be sparse is known from the shapes; a stand-in profile of them is enough to measure time.
    seen = fasa_backend("all", n_fac=16, n_sink=1, n_recent=1, inner="eager")
    loading.survey(loading.skeleton(config), seen, length=1024)
    profile = random_profile([d.site for graph in seen.graphs for d in graph.decisions if d.action == "sparse"])
    setting = bench.Setting(
        tuple(args.contexts),
        steps=args.steps,
        inner=args.inner,
        mode="reduce-overhead" if args.inner == "inductor" and on_gpu else None,
        budget=(("n_fac", args.n_fac),),
    )
    model = loading.random_model(config, "cuda" if on_gpu else "cpu")
    record = bench.bench(model, profile, setting, note=print)
    for case in record["cases"]:
        times = {name: f"{row['ms_per_step']:.2f} ms" for name, row in case.get("variants", {}).items()}
        print(f"{case['context']:7d} tokens: {times or case['error']}")
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        args.plot.write_text(bench.plot(record), encoding="utf-8")
    return record


if __name__ == "__main__":
    main()
