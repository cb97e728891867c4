"""What each process of the tests of a KV cache over several processes runs (``launching.py``). Every process also computes what it compares
with: the same model with a whole cache, alone, on a CPU."""

from __future__ import annotations

import copy
import datetime
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
sys.path.insert(0, str(Path(__file__).parent))
from launching import collectives, run
from models import cache_for, decode, difference, llama_profile, tiny_llama
from ranks import Own, backend, own_profile, replicated, run_own  # noqa: F401  replicated is a scenario too

import fasa_compile.rewrite
import fasa_compile.sharding
from fasa_compile import SequenceShard
from fasa_compile.rewrite import uses_kernels

RANK, WORLD, DEVICE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ.get("FASA_TEST_DEVICE", "cpu")
INNER = os.environ.get("FASA_TEST_INNER") or ("inductor" if DEVICE == "cuda" else "eager")
IDS = torch.randint(0, 512, (2, 90), generator=torch.Generator().manual_seed(1))
LENGTH, STEPS = 94, 8  # 2 x 47, 4 x 24


def pair(layers: int) -> tuple[Any, Any]:
    """One model on a CPU and on this process's device."""
    whole = tiny_llama(layers)
    return whole, copy.deepcopy(whole).to(DEVICE)


def logits_of(model: Any, made: Any, ids: Tensor, cache: Any, **how: Any) -> Tensor:
    torch._dynamo.reset()
    there = {name: x.to(model.device) for name, x in how.items()}
    return decode(model, torch.compile(model.forward, backend=made), ids.to(model.device), cache, STEPS, **there)


def compared(whole: Tensor, here: Tensor, made: Any = None) -> dict[str, Any]:
    everyones = [torch.empty_like(here) for _ in range(WORLD)]
    dist.all_gather(everyones, here)
    rows = [] if made is None else [r for r in made.explain().rows if r.reason != "prefill"]
    return {
        "difference": difference(whole.cpu(), here.cpu()),
        "largest": whole.abs().max().item(),
        "alike": all(torch.equal(x, here) for x in everyones),
        "decisions": [row.decision for row in rows],
        "reasons": [row.reason for row in rows],
        "caches": [row.cache for row in rows],
        "states": [row.state for row in rows],
    }


def sharded(model: Any, length: int = LENGTH, group: Any = None) -> Any:
    from fasa_compile import SequenceShardedCache

    return SequenceShardedCache(model.config, length, group)


def llama(folder: Path) -> dict[str, Any]:
    """Sparse logits against one process's, while tokens go from one process's part to the next one's."""
    (whole, here), found = pair(1), {}
    crossing = IDS[:, : LENGTH // 2 + 4]  # the eight last tokens: four before, four after the middle
    padded = torch.ones(crossing.shape, dtype=torch.int64)
    padded[1, :9] = 0
    for reduction, fc_format, n_fac, how in (
        ("affine", "int4", LENGTH // WORLD + 3, {}),  # more than one process has
        ("softmax_sum", "int8", 24, {"attention_mask": padded}),
    ):
        profile = replace(llama_profile(1, fc_format=fc_format, n_fac=n_fac), reduction=reduction)
        logits, made = [], None
        for model, cache, inner in (
            (whole, cache_for(whole, "static", LENGTH), "eager"),
            (here, sharded(here), INNER),
        ):
            made = backend(profile, inner=inner)
            logits.append(logits_of(model, made, crossing, cache, **how))
        found[reduction] = compared(*logits, made)
    return found


def whole_attention(folder: Path) -> dict[str, Any]:
    """Dense: without this package, and with a budget that covers the cache; a prompt in one piece and in two, compiled and not."""
    (whole, model), found, ids = pair(1), {}, IDS.to(DEVICE)
    expected = decode(whole, whole, IDS, cache_for(whole, "static", LENGTH), STEPS)
    found["uncompiled"] = compared(expected, decode(model, model, ids, sharded(model), STEPS))
    found["compiled by others"] = compared(expected, logits_of(model, INNER, IDS, sharded(model)))
    made = backend(llama_profile(1, n_fac=LENGTH + WORLD), inner=INNER)
    found["covering"] = compared(expected, logits_of(model, made, IDS, sharded(model)), made)
    for name, compiler in (("pieces", None), ("pieces, compiled", INNER)):
        torch._dynamo.reset()
        cache = sharded(model)
        with torch.no_grad():
            if compiler is not None:  # as transformers asks for where a prompt is compiled
                cache.early_initialization(2, 2, 32, torch.float32, torch.device(DEVICE))
            call = model if compiler is None else torch.compile(model.forward, backend=compiler)
            for piece in ids[:, :82].split(41, 1):
                call(input_ids=piece, past_key_values=cache)
            out = [model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(82, 90)]
        found[name] = compared(expected, torch.stack(out, 1))
    return found


def exchanges(folder: Path) -> dict[str, Any]:
    """How often a layer's step communicates: as the model has it, exact, and sparse by two reductions."""
    model, found, made, ids = tiny_llama(1).to(DEVICE), {}, llama_profile(1), IDS.to(DEVICE)
    for name, compiler in (
        ("gathered", INNER),
        ("exact", backend(None, inner=INNER)),
        ("static", backend(made, inner=INNER)),
        ("softmax_sum", backend(replace(made, reduction="softmax_sum"), inner=INNER)),
    ):
        torch._dynamo.reset()
        step, cache = torch.compile(model.forward, backend=compiler), sharded(model)
        with torch.no_grad():
            model(ids[:, :80], past_key_values=cache)
            step(input_ids=ids[:, 80:81].clone(), past_key_values=cache)  # compiles
            token = ids[:, 81:82].clone()
            found[name] = collectives(lambda s=step, c=cache, t=token: s(input_ids=t, past_key_values=c))
    return found


class Parted(Own):
    """The module of the tests of tensor parallelism, with its cache over several processes: what a module of one's own has to change."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        for block in self.blocks:
            block.shard = SequenceShard.of(96, group)


def own(folder: Path) -> dict[str, Any]:
    whole, parted = Own().to(DEVICE).eval(), Parted().to(DEVICE).eval()
    made = backend(own_profile(), inner=INNER)
    return compared(run_own(whole, backend(own_profile(), inner=INNER)), run_own(parted, made), made)


def operators(folder: Path) -> dict[str, Any]:
    """As a GPU's graphs are written: masks, packing and refreshed rows by custom operators."""
    fasa_compile.rewrite.uses_kernels = lambda device: True
    found = own(folder)
    fasa_compile.rewrite.uses_kernels = uses_kernels
    return found


def mesh(folder: Path) -> dict[str, Any]:
    """Heads over two processes and tokens over two, of four."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    both = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("tokens", "heads"))
    whole, parted = Own().to(DEVICE).eval(), Parted(both.get_group("tokens")).to(DEVICE).eval()
    plan = {f"blocks.*.{name}": ColwiseParallel() for name in "qkv"} | {"blocks.*.out": RowwiseParallel()}
    parallelize_module(parted, both["heads"], plan)
    made = backend(own_profile(), inner=INNER)
    return compared(run_own(whole, backend(own_profile(), inner=INNER)), run_own(parted, made), made)


# ---- what must not go unnoticed ---------------------------------------------------------------------------------------


def refused(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        with torch.no_grad():
            work()
    except Exception as error:
        return {"error": type(error).__name__, "says": str(error)}
    return {"error": None}


def other_cache(folder: Path) -> dict[str, Any]:
    model = tiny_llama(1).to(DEVICE)
    return refused(lambda: model(IDS.to(DEVICE), past_key_values=sharded(model, 96 + 10 * RANK)))


def other_profile(folder: Path) -> dict[str, Any]:
    model = tiny_llama(1).to(DEVICE)
    made = backend(llama_profile(1, n_fac=24 + 8 * RANK), inner=INNER)
    return refused(lambda: logits_of(model, made, IDS, sharded(model)))


def failing_step(folder: Path) -> dict[str, Any]:
    """A rewritten graph that fails in its first step is not handed to the model's own: the other processes do not run that."""

    def inner(gm: Any, examples: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            raise RuntimeError("planted")

        return run if any("fasa" in node.name for node in gm.graph.nodes) else gm.forward

    model = tiny_llama(1).to(DEVICE)
    return refused(lambda: logits_of(model, backend(llama_profile(1), inner=inner, strict=False), IDS, sharded(model)))


def absent(folder: Path) -> dict[str, Any]:
    """The last process makes no cache."""
    model, patience = tiny_llama(1).to(DEVICE), fasa_compile.sharding.PATIENCE
    if RANK == WORLD - 1:
        fasa_compile.sharding._met[tuple(range(WORLD))] += 1  # the next scenario's meetings are counted on
        return {}
    fasa_compile.sharding.PATIENCE = datetime.timedelta(seconds=2)
    found = refused(lambda: model(IDS.to(DEVICE), past_key_values=sharded(model)))
    fasa_compile.sharding.PATIENCE = patience
    return found


def too_long(folder: Path) -> dict[str, Any]:
    """Tokens beyond the cache's end are an error on every process, as with a whole cache."""
    model = tiny_llama(1).to(DEVICE)
    cache = sharded(model, 88)
    return refused(
        lambda: decode(model, torch.compile(model.forward, backend=backend("all")), IDS.to(DEVICE), cache, STEPS)
    )


def _decoding(lost: Callable[[], None], group: Any = None) -> dict[str, Any]:
    model = tiny_llama(1).to(DEVICE)
    made, cache = backend(llama_profile(1), inner=INNER), sharded(model, group=group)

    came = time.monotonic()

    def each(i: int) -> None:
        nonlocal came
        came = time.monotonic()
        if i == 3 and RANK == WORLD - 1:
            lost()

    torch._dynamo.reset()
    step = torch.compile(model.forward, backend=made)
    found = refused(lambda: decode(model, step, IDS.to(DEVICE), cache, STEPS, each=each))
    return found | {"alone": True, "waited": time.monotonic() - came}


def killed(folder: Path) -> dict[str, Any]:
    """The last process dies between two steps."""
    return _decoding(lambda: os.kill(os.getpid(), signal.SIGKILL))


def stuck(folder: Path) -> dict[str, Any]:
    """The last process stays away for longer than the group's collectives wait."""
    return _decoding(lambda: time.sleep(9), dist.new_group(timeout=datetime.timedelta(seconds=3)))


if __name__ == "__main__":
    run(globals())
