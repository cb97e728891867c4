"""What Python costs a decode step whose weights are DTensors: a call of a compiled model whose kernels do nothing.

    python benchmarks/sharded_inputs.py --out benchmarks/results/sharded-inputs-cpu.json

Llama's 32 layers in a tiny geometry, whole and sharded by ``parallelize_module`` over one process, compiled by Inductor up to where kernels would
be made. Microseconds of a call: the median of 200, with the weights as PyTorch passes them, and as ``fasa_backend`` does (``local_weights``),
each with all of Dynamo's guards and without those on the weights.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed import shard_heads
from torch._inductor.compile_fx import compile_fx

from fasa_compile.local_weights import local_weights

TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
}
CALLS = 200


def no_kernels(gm: Any, examples: Any, **_: Any) -> Callable[..., Any]:
    """Stands for what Inductor compiles: returns outputs of the right sizes."""
    (outputs,) = next(iter(gm.graph.find_nodes(op="output"))).args
    made = [None if node is None else torch.zeros_like(node.meta["val"], device="cpu") for node in outputs]

    def run(arguments: list[Any]) -> list[Any]:
        arguments.clear()
        return list(made)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def inductor(gm: Any, examples: Any) -> Any:
    return compile_fx(gm, examples, inner_compile=no_kernels)


@torch.no_grad()
def call_us(model: Any, compiler: Any, guarded: bool) -> float:
    from transformers import StaticCache

    torch._dynamo.reset()
    options = {} if guarded else {"guard_filter_fn": torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe}

    def backend(gm: Any, examples: Any, **_: Any) -> Any:
        return compiler(gm, examples)

    compiled = torch.compile(model, backend=backend, dynamic=False, options=options or None)
    cache, token = StaticCache(config=model.config, max_cache_len=CALLS + 16), torch.zeros((1, 1), dtype=torch.long)
    model(token, past_key_values=cache)
    times = []
    for _ in range(CALLS + 4):
        began = time.perf_counter()
        compiled(input_ids=token, past_key_values=cache)
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times[4:])


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record here (JSON)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=32, **TINY)).eval()
        rows = {}
        for name, compiler in (("whole", inductor), ("DTensors", inductor), ("local tensors", local_weights(inductor))):
            if name == "DTensors":
                model = shard_heads(model, torch.device("cpu"))
            for guarded in (True, False):
                rows[f"{name}, {'all guards' if guarded else 'no guards on weights'}"] = call_us(
                    model, compiler, guarded
                )
                print(list(rows.items())[-1], flush=True)
        dist.destroy_process_group()
    record = {
        "benchmark": "microseconds of Python in a call, 32 layers of Llama, 224 sharded weights",
        "cpu": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "us": rows,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
