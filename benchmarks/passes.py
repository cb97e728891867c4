"""What reading and rewriting a decode graph costs: CPU seconds of capture, match, plan and rewrite, whole and per layer.

    python benchmarks/passes.py              every architecture below at 2 and 8 layers, into benchmarks/results/passes-cpu.json

Tiny models are enough, since the work goes by nodes, not by sizes. The first graph of a process pays for imports and caches inside torch, so
one is traced ahead. Beside it stands what ``torch.compile`` takes for the same step without us: Dynamo alone (backend "eager"), and, for
the most layers, with Inductor and its C++ compiler, nothing cached. All of it is processor time (children included). Beside other work
cores that share caches and execution units take longer for the same: ``load`` is the machine's, over the last minute of a case.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "zoo"))
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else other processes compile, whose time is not seen

import tiny_configs  # noqa: E402
import torch  # noqa: E402
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, StaticCache  # noqa: E402

from fasa_compile import backend as stages  # noqa: E402
from fasa_compile import fasa_backend  # noqa: E402
from fasa_compile.doctor import environment  # noqa: E402

STAGES = ("capture", "match", "plan", "rewrite")
#: Architecture and cache: a plain one, fused qkv, a hybrid with Mamba, local and global layers, MLA; two of them with a growing cache.
CASES = [
    ("llama", "static"),
    ("gpt_neox", "static"),
    ("falcon_h1", "static"),
    ("gemma3_text", "static"),
    ("deepseek_v3", "static"),
    ("llama", "dynamic"),
    ("deepseek_v3", "dynamic"),
]


def tiny(model_type: str, layers: int) -> Any:
    """The zoo's tiny model of an architecture, with that many layers: its kinds of layers take turns."""
    kind = CONFIG_MAPPING[model_type]
    given = tiny_configs.shrunk(kind)
    given = {
        k: [v[i % len(v)] for i in range(layers)] if k in tiny_configs.LAYER_KINDS else v for k, v in given.items()
    }
    config = kind(**given | {"num_hidden_layers": layers})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)


def first_step(model: Any, kind: str, backend: Any) -> Callable[[], Any]:
    """A first decode step of ``model`` compiled with ``backend``, behind a prompt of 12 tokens; nothing is compiled before."""
    torch._dynamo.reset()
    cache = (
        StaticCache(config=model.config, max_cache_len=64) if kind == "static" else DynamicCache(config=model.config)
    )
    model(input_ids=torch.arange(4, 16)[None], past_key_values=cache, use_cache=True)
    step = torch.compile(model, backend=backend, dynamic=kind == "dynamic")
    return lambda: step(input_ids=torch.tensor([[5]]), past_key_values=cache, use_cache=True)


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Of this process and of those that it waited for (C++ compilers)."""
    began, others = time.process_time(), os.times()
    call()
    children = os.times()
    waited = children.children_user + children.children_system - others.children_user - others.children_system
    return time.process_time() - began + waited


@contextmanager
def timed_stages() -> Iterator[dict[str, float]]:
    """CPU seconds spent in each of ``STAGES`` meanwhile."""
    spent = dict.fromkeys(STAGES, 0.0)
    kept = {name: getattr(stages, name) for name in STAGES}

    def timed(name: str) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            found: list[Any] = []
            spent[name] += cpu_seconds(lambda: found.append(kept[name](*arguments, **options)))
            return found[0]

        return run

    for name in STAGES:
        setattr(stages, name, timed(name))
    try:
        yield spent
    finally:
        for name, stage in kept.items():
            setattr(stages, name, stage)


def passes(model: Any, kind: str, layers: int) -> dict[str, float]:
    """CPU seconds of our passes for one decode step: all of them, and each stage."""
    backend = fasa_backend("all", n_fac=8, n_sink=1, n_recent=1, inner="eager")
    step = first_step(model, kind, backend)
    with timed_stages() as spent:
        step()
    found = sum(d.action == "sparse" for graph in backend.graphs for d in graph.decisions)
    assert found == layers, f"{found} of {layers} layers rewritten"
    return {"passes": sum(graph.seconds for graph in backend.graphs), **spent, "graphs": float(len(backend.graphs))}


def case(model_type: str, kind: str, layers: int, repeats: int, inductor: bool) -> dict[str, Any]:
    model = tiny(model_type, layers)
    runs = [passes(model, kind, layers) for _ in range(repeats)]
    row: dict[str, Any] = {"model": model_type, "cache": kind, "layers": layers, "graphs": int(runs[0]["graphs"])}
    row |= {name: round(statistics.median(run[name] for run in runs), 4) for name in ("passes", *STAGES)}
    row["runs"] = [round(run["passes"], 4) for run in runs]
    row["per_layer"] = round(row["passes"] / layers, 4)
    row["dynamo"] = round(cpu_seconds(first_step(model, kind, "eager")), 3)
    if inductor:
        with torch._inductor.config.patch(force_disable_caches=True):
            row["torch_compile"] = round(cpu_seconds(first_step(model, kind, "inductor")), 3)
        row["of_torch_compile"] = round(row["passes"] / row["torch_compile"], 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="architectures (all)")
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 8])
    parser.add_argument("--repeats", type=int, default=5, help="runs of which the median is taken")
    parser.add_argument("--no-inductor", action="store_true", help="our passes and Dynamo alone")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "passes-cpu.json")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    with torch.no_grad():
        passes(tiny("llama", 2), "static", 2)
        for model_type, kind in CASES:
            for layers in given.layers if not given.only or model_type in given.only else ():
                inductor = layers == max(given.layers) and not given.no_inductor
                rows.append(case(model_type, kind, layers, given.repeats, inductor) | {"load": os.getloadavg()[0]})
                print(json.dumps(rows[-1]), flush=True)
                record = {"unit": "CPU seconds, one thread", "repeats": given.repeats, **environment(), "rows": rows}
                given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
