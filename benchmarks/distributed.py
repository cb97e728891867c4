"""Decoding on several GPUs: a model's heads over processes, and a long cache's tokens over processes.

    torchrun --nproc_per_node 2 benchmarks/distributed.py --out distributed.json

``heads``: a whole step of Llama-3.1-8B's geometry with random weights, its static cache full of random keys and values, 4 x 64k tokens: the
sparse step on one GPU, and sharded by heads the sparse step and one whose attention is SDPA's flash kernel over the whole cache (the best
that dense attention has). All compiled by Inductor, with CUDA graphs on a GPU; logits of one step are compared.
``tokens``: the attention of one layer over 1 x 256k and 1 x 1024k tokens: sparse and dense on one GPU, and with the tokens over all processes.
Both with NCCL's collectives and, on GPUs, with ``peer_memory``.
``exchanges``: an all-reduce of a few rows, by the process group and through the GPUs' memory, alone and after the product it sums.

Times are medians of steps that all processes begin together; of the processes the slowest counts. ``tokens`` is timed inside CUDA graphs,
a dozen queries to each, the collectives among them. ``--tiny`` runs all of it with small
sizes, on CPUs with gloo where there is no GPU: for a look at whether it works, not for its times.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _timing import captured
from decode import GEOMETRY, flash_attention, rewind
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fasa_compile
from fasa_compile import SequenceShard, fasa_backend
from fasa_compile.local_weights import local_weights
from fasa_compile.peer_memory import with_peer_memory
from fasa_compile.profiles import Budget, FCProfile, LayerProfile, ModelFacts, RopeFacts
from fasa_compile.triton_kernels import ops, reference, sharded_decode

PEERS = "sparse, peer memory"
#: What is asked of two H100 of one host (ratios of times).
TARGETS = {
    "heads: sparse over one process's": 0.70,
    "heads: sparse over dense": 0.60,
    "tokens, 262144: sparse over one process's": 0.60,
}


@dataclass(frozen=True)
class Sizes:
    layers: int
    batch: int
    length: int  # of the cache of ``heads``
    contexts: tuple[int, ...]  # of ``tokens``
    n_fac: int
    steps: int
    geometry: dict[str, Any]

    @property
    def room(self) -> int:
        """Slots at the cache's end that timed steps write."""
        return max(self.steps, 64) + 8

    @property
    def heads(self) -> tuple[int, int, int]:
        """Hq, Hkv, D."""
        hidden, heads = self.geometry["hidden_size"], self.geometry["num_attention_heads"]
        return heads, self.geometry["num_key_value_heads"], hidden // heads


FULL = Sizes(32, 4, 65536, (262144, 1048576), 1024, 30, GEOMETRY)
TINY = Sizes(
    1,
    2,
    256,
    (512, 768),
    32,
    3,
    dict(
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=256,
        vocab_size=256,
        max_position_embeddings=1024,
    ),
)


def timed(device: torch.device, calls: list[Callable[[], Any]], steps: int, group: Any = None) -> float:
    """Microseconds of a call of the slowest process of ``group``: the median of ``steps``, the calls in turn, after three."""
    times: list[float] = []
    for i in range(steps + 3):
        if group is not None:
            dist.barrier(group)
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            calls[i % len(calls)]()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end))
        else:
            began = time.perf_counter()
            calls[i % len(calls)]()
            times.append(1e6 * (time.perf_counter() - began))
    median = torch.tensor(statistics.median(times[3:]), device=device)
    if group is not None:
        dist.all_reduce(median, dist.ReduceOp.MAX, group)
    return median.item()


def layer_time(
    device: torch.device, call: Callable[[Tensor], Tensor], queries: list[Tensor], steps: int, group: Any = None
) -> float:
    """Microseconds of ``call`` on one of ``queries``, as ``timed``; on a GPU all queries' calls are one CUDA graph,
    collectives too, which every process of the group captures."""
    calls = [lambda q=q: call(q) for q in queries]
    if device.type != "cuda":
        return timed(device, calls, steps, group)
    return timed(device, [captured(calls).replay], steps, group) / len(calls)


# --- heads --------------------------------------------------------------------------------------------------------------


def build(sizes: Sizes, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            return LlamaForCausalLM(LlamaConfig(num_hidden_layers=sizes.layers, **sizes.geometry)).eval()
    finally:
        torch.set_default_dtype(before)


def shard_heads(model: Any, device: torch.device) -> Any:
    """The model's attentions and MLPs over all processes."""
    plan = {f"model.layers.*.self_attn.{p}_proj": ColwiseParallel() for p in "qkv"}
    plan |= {f"model.layers.*.mlp.{p}_proj": ColwiseParallel() for p in ("gate", "up")}
    plan |= {"model.layers.*.self_attn.o_proj": RowwiseParallel(), "model.layers.*.mlp.down_proj": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh(device.type, (dist.get_world_size(),)), plan)


def filled(model: Any, sizes: Sizes, device: torch.device, share: slice) -> Any:
    """A full static cache of random keys and values: those of the heads ``share`` of what all processes draw alike."""
    from transformers import StaticCache

    Hkv, D = sizes.heads[1:]
    cache = StaticCache(config=model.config, max_cache_len=sizes.length)
    g = torch.Generator(device).manual_seed(1)
    for layer in cache.layers:
        whole = torch.empty((sizes.batch, Hkv, sizes.length, D), device=device, dtype=model.dtype)
        empty = whole[:, share, :1]
        layer.lazy_initialization(empty, empty)
        for kept in (layer.keys, layer.values):
            kept.copy_(whole.normal_(generator=g)[:, share])
    return cache


@torch.no_grad()
def step_time(
    model: Any, kind: str, sizes: Sizes, device: torch.device, share: slice, group: Any
) -> tuple[dict[str, float], Tensor, list[str]]:
    """Microseconds of a step that is waited for, and of one that is not; its first logits; what became of the attention sites."""
    torch._dynamo.reset()
    model.set_attn_implementation("bench_grouped" if kind == "flash" else "sdpa")
    cache = filled(model, sizes, device, share)
    rewind(cache, sizes.length - sizes.room)
    inner = "inductor" if device.type == "cuda" else "eager"
    made = None
    if kind != "flash":
        profile = random_profile(sizes)
        made = fasa_backend(
            profile, n_fac=sizes.n_fac, check_weights=False, strict=True, dense_below=0, inner=inner,
            peer_memory=kind == PEERS,
        )  # fmt: skip
    how: dict[str, Any] = {}
    if device.type == "cuda":  # CUDA graphs, and no guards on the weights: on DTensors these are slow Python
        skip = torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe
        how["options"] = {"triton.cudagraphs": True, "guard_filter_fn": skip}
    compiled = torch.compile(model, backend=made or flash_compiler, dynamic=False, **how)
    token = torch.zeros((sizes.batch, 1), dtype=torch.long, device=device)
    first = compiled(input_ids=token, past_key_values=cache).logits[:, -1].float().clone()

    def step() -> None:
        compiled(input_ids=token, past_key_values=cache)

    us = timed(device, [step], sizes.steps, group)
    rewind(cache, sizes.length - sizes.room)
    ahead = timed(device, [lambda: [step() for _ in range(8)]], 5, group) / 8
    return (
        {"us": us, "us without waiting": ahead},
        first,
        [] if made is None else [row.decision for row in made.explain().rows if row.reason != "prefill"],
    )


@torch.no_grad()
def dense_logits(model: Any, sizes: Sizes, device: torch.device) -> Tensor:
    """The logits of the first step as the whole model's own attention has them, not compiled."""
    model.set_attn_implementation("bench_grouped")
    cache = filled(model, sizes, device, slice(None))
    rewind(cache, sizes.length - sizes.room)
    token = torch.zeros((sizes.batch, 1), dtype=torch.long, device=device)
    logits: Tensor = model(input_ids=token, past_key_values=cache).logits[:, -1].float()
    return logits


def flash_compiler(gm: Any, example_inputs: Any, **how: Any) -> Any:
    """The inner compiler alone, for a baseline that is also spared what DTensors cost in each call."""
    if not how:
        return gm.forward
    from torch._inductor.compile_fx import compile_fx

    return local_weights(lambda graph, inputs: compile_fx(graph, inputs, config_patches=how["options"]))(
        gm, example_inputs
    )


def random_profile(sizes: Sizes) -> FCProfile:
    """Half of the frequencies in int4, the first of them: on random keys every choice is alike."""
    Hq, Hkv, D = sizes.heads
    pairs = tuple((i, i + D // 2) for i in range(D // 2))
    rows = tuple(
        LayerProfile(
            layer=f"model.layers.{i}.self_attn",
            num_heads=Hq,
            num_kv_heads=Hkv,
            head_dim=D,
            rope=RopeFacts(D, pairs, 1.0),
            dense=False,
            fcs=torch.arange(D // 4, dtype=torch.int32).expand(Hkv, -1).contiguous(),
            centre=torch.zeros(Hkv, D),
            spread=torch.ones(Hkv, D),
            norm=torch.zeros(Hq),
        )
        for i in range(sizes.layers)
    )
    return FCProfile(rows, Budget(), "int4", "static", "random", ModelFacts("Llama", "random", sizes.layers, {}))


def heads(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Step times of one GPU and of all."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register("bench_grouped", flash_attention if device.type == "cuda" else grouped_attention)
    AttentionMaskInterface.register("bench_grouped", lambda *args, **kwargs: None)
    rank, world = dist.get_rank(), dist.get_world_size()
    row: dict[str, Any] = {"batch": sizes.batch, "length": sizes.length, "layers": sizes.layers}
    model, alone = build(sizes, device), torch.zeros((sizes.batch, sizes.geometry["vocab_size"]), device=device)
    dense_alone = torch.zeros_like(alone)
    if rank == 0:
        times, alone, decisions = step_time(model, "sparse", sizes, device, slice(None), None)
        row |= {f"one process, sparse, {name}": t for name, t in times.items()}
        dense_alone = dense_logits(model, sizes, device)
        row["one process, sites"] = {d: decisions.count(d) for d in decisions}
    dist.broadcast(alone, 0)
    dist.broadcast(dense_alone, 0)
    model = shard_heads(model, device)
    Hkv = sizes.heads[1]
    share = slice(rank * Hkv // world, (rank + 1) * Hkv // world)
    for kind in ("sparse", "flash", *([PEERS] if device.type == "cuda" else [])):
        times, logits, decisions = step_time(model, kind, sizes, device, share, dist.group.WORLD)
        row |= {f"{world} processes, {kind}, {name}": t for name, t in times.items()}
        if decisions:
            row["sites"] = {d: decisions.count(d) for d in decisions}
        expected = dense_alone if kind == "flash" else alone
        row[f"{kind} logits: largest difference to one process, relative"] = (
            (logits - expected).abs().max() / expected.abs().max()
        ).item()
    return row


def grouped_attention(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float | None = None, **_: Any) -> Any:
    out = F.scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


# --- tokens -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def tokens(sizes: Sizes, context: int, device: torch.device) -> dict[str, Any]:
    """Attention times of one layer, and the largest difference of the results."""
    rank, world = dist.get_rank(), dist.get_world_size()
    Hq, Hkv, D = sizes.heads
    shard = SequenceShard.of(context)
    L, W, dtype = shard.length, D // 2, torch.bfloat16 if device.type == "cuda" else torch.float32
    g = torch.Generator(device).manual_seed(2)
    k, v = (torch.randn((1, Hkv, L, D), generator=g, device=device, dtype=dtype) for _ in range(2))
    base, *noise = (torch.randn((1, Hq, 1, D), generator=g, device=device) for _ in range(13))
    queries = [(1.9 * base + 0.6 * x).to(dtype) for x in noise]  # alike from step to step, as in generation
    dims = torch.stack([torch.randperm(D, generator=g, device=device)[:W] for _ in range(Hkv)]).int()
    constants = (dims, torch.zeros(Hkv, W, device=device), torch.ones(Hkv, W, device=device))
    norm = torch.zeros(Hq, device=device)
    data, meta = torch.ops.fasa.pack(k, *constants, "int4", ops.KERNEL_VERSION)
    how = {"scale": 1 / math.sqrt(D), "softcap": 0.0, "sinks": None}
    select = {"n_fac": sizes.n_fac, "n_sink": 4, "n_recent": 16, "fmt": "int4", "reduction": "static"}
    shape, hint_dtype = ops.sparse_decode_state(1, Hkv)
    hint = torch.zeros(shape, dtype=hint_dtype, device=device)

    def one_sparse(q: Tensor) -> Tensor:
        return torch.ops.fasa.sparse_decode(
            q, k, v, data, meta, *constants, norm, None, None, None, hint, **how, **select, version=ops.KERNEL_VERSION
        )  # fmt: skip

    def one_dense(q: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if device.type == "cuda" else SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, scale=how["scale"], enable_gqa=True)

    row: dict[str, Any] = {"batch": 1, "context": L, "n_fac": sizes.n_fac}
    if rank == 0:
        for name, call in (("sparse", one_sparse), ("dense", one_dense)):
            row[f"one process, {name}, us"] = layer_time(device, call, queries, sizes.steps)
    exact = {
        "sparse": reference.sparse_decode(queries[0], k, v, data, meta, *constants, norm, **how, **select),
        "dense": reference.dense_decode(queries[0], k, v, **how),
    }
    mine = slice(rank * shard.rows, (rank + 1) * shard.rows)
    k, v, data, meta = (x[:, :, mine].contiguous() for x in (k, v, data, meta))

    kernels = {"version": ops.KERNEL_VERSION} if device.type == "cuda" else {}
    own_hint = {"hint": torch.zeros_like(hint)} if kernels else {}

    def all_sparse(q: Tensor) -> Tensor:
        return sharded_decode.sparse_decode(
            q, k, v, data, meta, *constants, norm, **asdict(shard), **how, **select, **kernels, **own_hint
        )

    def all_dense(q: Tensor) -> Tensor:
        return sharded_decode.dense_decode(q, k, v, **asdict(shard), **how, **kernels)

    ways = [("sparse", all_sparse, {}), ("dense", all_dense, {})]
    if device.type == "cuda":
        ways += [(f"{name}, peer memory", call, with_peer_memory({})) for name, call, _ in ways]
    for name, call, options in ways:
        torch._dynamo.reset()
        run = torch.compile(call, dynamic=False, options=options) if device.type == "cuda" else call
        found = run(queries[0]).float()
        wanted = exact[name.partition(",")[0]].float()
        row[f"{name}: largest difference to the reference"] = (found - wanted).abs().max().item()
        row[f"{world} processes, {name}, us"] = layer_time(device, run, queries, sizes.steps, dist.group.WORLD)
    return row


# --- exchanges ----------------------------------------------------------------------------------------------------------


def exchanges(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Microseconds of an all-reduce of ``rows`` rows, where each waits for the one before."""
    number, width = 40, sizes.geometry["hidden_size"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    group, c10d = str(dist.group.WORLD.group_name), torch.ops._c10d_functional
    weight = torch.randn((width, width), device=device, dtype=dtype)

    def by_group(x: Tensor) -> Tensor:
        total: Tensor = c10d.wait_tensor(c10d.all_reduce(x, "sum", group))
        return total

    def by_peers(x: Tensor) -> Tensor:
        total: Tensor = torch.ops.fasa.peer_all_reduce(x, group, version=ops.KERNEL_VERSION)
        return total

    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "by the group": by_group, "peer memory": by_peers, "product": lambda x: x @ weight,
        "product, by the group": lambda x: by_group(x @ weight), "product, peer memory": lambda x: by_peers(x @ weight),
    }  # fmt: skip
    rows = []
    for batch in (1, 4, 16):
        x = torch.randn((batch, width), device=device, dtype=dtype)
        row: dict[str, Any] = {"rows": batch}
        for name, way in ways.items():

            def chain(way: Callable[[Tensor], Tensor] = way, x: Tensor = x) -> Tensor:
                return functools.reduce(lambda y, _: way(y), range(number), x)

            call = captured([chain]).replay if device.type == "cuda" else chain
            row[name] = timed(device, [call], 10, dist.group.WORLD) / number
        rows.append(row)
    return {
        "unit": f"microseconds a call, {number} one after another in a CUDA graph",
        "elements a row": width, "dtype": str(dtype).removeprefix("torch."), "rows": rows,
    }  # fmt: skip


# --- the record ---------------------------------------------------------------------------------------------------------


def ratios(record: dict[str, Any], world: int) -> dict[str, float]:
    h, every, found = record["heads"], f"{world} processes", {}
    kinds = [kind for kind in ("sparse", PEERS) if f"{every}, {kind}, us" in h]
    for how, unit in (("heads", "us"), ("heads, without waiting", "us without waiting")):
        for kind in kinds:
            found[f"{how}: {kind} over one process's"] = (
                h[f"{every}, {kind}, {unit}"] / h[f"one process, sparse, {unit}"]
            )
            found[f"{how}: {kind} over dense"] = h[f"{every}, {kind}, {unit}"] / h[f"{every}, flash, {unit}"]
    for t in record["tokens"]:
        for kind in ("sparse", "dense"):
            for peers in ("", ", peer memory"):
                if (us := t.get(f"{every}, {kind}{peers}, us")) is not None:
                    found[f"tokens, {t['context']}: {kind}{peers} over one process's"] = (
                        us / t[f"one process, {kind}, us"]
                    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the record goes, in JSON")
    parser.add_argument("--layers", type=int, help="of the model (32)")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    given = parser.parse_args()
    gpu = torch.cuda.is_available()
    sizes = TINY if given.tiny or not gpu else FULL
    if given.layers:
        sizes = replace(sizes, layers=given.layers)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=datetime.timedelta(minutes=30))
    device = torch.device("cuda", dist.get_rank()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    world = dist.get_world_size()
    record: dict[str, Any] = {
        "device": f"{world} x {torch.cuda.get_device_name() if gpu else 'CPU'}",
        "torch": torch.__version__,
        "fasa_compile": fasa_compile.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }

    def save() -> None:
        if dist.get_rank() == 0 and given.out is not None:
            given.out.write_text(json.dumps(record, indent=1) + "\n")

    record["heads"] = heads(sizes, device)
    save()
    record["tokens"] = [tokens(sizes, context, device) for context in sizes.contexts]
    record["exchanges"] = exchanges(sizes, device)
    if dist.get_rank() == 0:  # which alone has one process's times
        record["ratios"] = ratios(record, world)
        record["asked for"] = {name: target for name, target in TARGETS.items() if name in record["ratios"]}
        save()
        print(json.dumps(record, indent=1))
    dist.barrier()
    torch._dynamo.reset()  # NCCL waits for CUDA graphs that hold its kernels
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
