"""What each process of the tests of exchanges through the GPUs' memory runs, on two GPUs of a host (``launching.py``)."""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
import ranks
import sequence_ranks
from launching import collectives, run
from models import cache_for, decode, llama_profile

from fasa_compile.triton_kernels import ops, peers

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SIZES = ((1, 2), (4, 4096), (3, 1, 130), (peers.MOST_BYTES // 4,), (257, 6))
FASA = torch.ops.fasa


def group() -> str:
    return str(dist.group.WORLD.group_name)


def expected(x: Tensor, add: bool) -> Tensor:
    """By the process group's own gather; a sum in the order of the ranks."""
    everyones = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(everyones, x)
    if not add:
        return torch.cat(everyones)
    return functools.reduce(torch.add, [e.float() for e in everyones]).to(x.dtype)


def exchanged(x: Tensor, add: bool) -> Tensor:
    if add:
        return FASA.peer_all_reduce(x, group(), version=ops.KERNEL_VERSION)
    return FASA.peer_all_gather(x, WORLD, group(), version=ops.KERNEL_VERSION)


def numbers(folder: Path) -> dict[str, Any]:
    """Bits of sums and gathers of several sizes and dtypes, one process late at random; then the same as one CUDA graph, replayed."""
    torch.manual_seed(RANK)
    wrong, rounds = 0, 0
    for _ in range(12):
        for shape in SIZES:
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                x = torch.randn(shape, device="cuda").to(dtype)
                for add in (True, False):
                    torch.cuda._sleep(int(torch.randint(0, 100_000, ()).item()))
                    got = exchanged(x, add)
                    wrong += not torch.equal(got, expected(x, add))
                    rounds += 1
    inputs = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in SIZES]
    calls = [(x, add) for x in inputs for add in (True, False, True)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = [exchanged(x, add) for x, add in calls]
    for _ in range(100):
        for x in inputs:
            x.normal_()
        graph.replay()
        for (x, add), out in zip(calls, outs, strict=True):
            wrong += not torch.equal(out, expected(x, add))
            rounds += 1
    graph.reset()
    return {"wrong": wrong, "rounds": rounds}


def _backend(profile: Any) -> Any:
    return ranks.backend(profile, inner="inductor", peer_memory=True)


def heads(folder: Path) -> dict[str, Any]:
    """A module of one's own sharded by heads, as in ``ranks.own``."""
    plain = ranks.backend
    ranks.backend = functools.partial(plain, peer_memory=True)
    try:
        return ranks.own(folder)
    finally:
        ranks.backend = plain


def tokens(folder: Path) -> dict[str, Any]:
    """A tiny Llama whose cache's tokens are on both GPUs, with CUDA graphs and without."""
    whole, here = sequence_ranks.pair(1)
    ids, length = sequence_ranks.IDS, sequence_ranks.LENGTH
    profile, found = llama_profile(1, n_fac=24), {}
    wanted = decode(whole, torch.compile(whole.forward, backend=ranks.backend(profile, inner="eager")), ids,
                    cache_for(whole, "static", length), sequence_ranks.STEPS)  # fmt: skip
    for graphs in (False, True):
        torch._dynamo.reset()
        made = _backend(profile)
        step = torch.compile(here.forward, backend=made, dynamic=False, options={"triton.cudagraphs": graphs})
        cache = sequence_ranks.sharded(here)
        logits = decode(here, step, ids.to(here.device), cache, sequence_ranks.STEPS)
        found[f"graphs {graphs}"] = sequence_ranks.compared(wanted, logits, made)
        if not graphs:
            cache = sequence_ranks.sharded(here)
            with torch.no_grad():
                here(ids[:, :80].to(here.device), past_key_values=cache)
                first, second = (ids[:, i : i + 1].to(here.device) for i in (80, 81))
                step(input_ids=first, past_key_values=cache)
                found["by the group"] = collectives(functools.partial(step, input_ids=second, past_key_values=cache))
    torch._dynamo.reset()
    return found


def late(folder: Path) -> dict[str, Any]:
    """The last process does not come to an exchange: the others' kernels end with an error, in the group's time."""
    x = torch.ones(64, device="cuda")
    exchanged(x, True)
    torch.cuda.synchronize()
    began = time.monotonic()
    if RANK == WORLD - 1:
        time.sleep(12)
        return {"alone": True}
    try:
        exchanged(x, True)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return {"alone": True, "error": type(error).__name__, "waited": time.monotonic() - began}
    return {"alone": True, "error": None}


if __name__ == "__main__":
    run(globals())
