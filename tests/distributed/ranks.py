"""What each process of the tests of tensor parallelism runs (``launching.py``). The processes make the same models from the same seeds, so
each can compare what it computed in parallel with what the whole model computes alone.
"""

from __future__ import annotations

import datetime
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
sys.path.insert(0, str(Path(__file__).parent))
import models
from launching import collectives, run
from models import SHARPEN, cache_for, decode, difference, half_split, llama_profile, profile_of, tiny_llama

import fasa_compile.sharding
from fasa_compile import SequenceShard

RANK, WORLD, DEVICE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ.get("FASA_TEST_DEVICE", "cpu")
IDS = torch.randint(0, 512, (2, 90), generator=torch.Generator().manual_seed(1))
STEPS = 4
INNER = "inductor" if DEVICE == "cuda" else "eager"
#: These caches are so short that a GPU's dense kernel would be expected to be faster.
backend = functools.partial(models.backend, dense_below=0)


def told(made: Any, whole: Tensor, parallel: Tensor) -> dict[str, Any]:
    decisions = made.graphs[-1].decisions
    return {
        "difference": difference(whole, parallel),
        "largest": whole.abs().max().item(),
        "actions": [d.action for d in decisions],
        "heads": [d.site.shape[1:3] for d in decisions],
        "fcs": [d.profile.fcs.tolist() for d in decisions if d.profile is not None],
        "norm": [d.profile.norm.tolist() for d in decisions if d.profile is not None],
    }


def transformers_model(folder: Path) -> Any:
    """A tiny Llama from a checkpoint, sharded by its own tensor-parallel plan."""
    from transformers import AutoModelForCausalLM

    path = folder / "llama"
    if RANK == 0:
        tiny_llama(2).save_pretrained(path)
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(path, tp_plan="auto").eval()


def llama(folder: Path) -> dict[str, Any]:
    """Sparse logits against the whole model's, with a covering budget and with a small one; collectives of a step."""
    whole, parallel = tiny_llama(2).to(DEVICE), transformers_model(folder)
    ids, found = IDS.to(DEVICE), {}
    for name, n_fac in (("covering", 88), ("small", 24)):
        logits, counts, made = [], [], None
        for model in (whole, parallel):
            torch._dynamo.reset()
            made = backend(llama_profile(2, n_fac=n_fac), inner=INNER)
            step = torch.compile(model.forward, backend=made)
            logits.append(decode(model, step, ids, cache_for(model, "static", 96), STEPS))
        for compiler in (INNER, made) if name == "small" else ():  # without us and with us
            torch._dynamo.reset()
            step = torch.compile(parallel.forward, backend=compiler)
            cache = cache_for(parallel, "static", 96)
            with torch.no_grad():
                parallel(ids[:, :80], past_key_values=cache)
                step(input_ids=ids[:, 80:81].clone(), past_key_values=cache)  # compiles
                token = ids[:, 81:82].clone()
                counts.append(collectives(lambda s=step, c=cache, t=token: s(input_ids=t, past_key_values=c)))
        found[name] = told(made, *logits) | {"collectives": counts}
    return found


class Attention(nn.Module):
    """8 query and 2 KV heads of 32 dims; each process finds out from its projections how many it has. ``kv_whole``: the KV projections are on
    every process, which takes the KV head that its query heads read."""

    def __init__(self, width: int, length: int, kv_whole: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, n * 32, bias=False) for n in (8, 2, 2))
        self.out = nn.Linear(256, width, bias=False)
        self.length, self.mine = length, slice(RANK * 2 // WORLD, RANK * 2 // WORLD + 1) if kv_whole else slice(None)
        self.cache: tuple[Tensor, Tensor] | None = None
        self.shard: SequenceShard | None = None  # of its tokens, where these lie on several processes

    def forward(self, x: Tensor, pos: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (p(x).view(B, T, -1, 32).transpose(1, 2) for p in (self.q, self.k, self.v))
        cos, sin = table[..., 0].repeat(1, 2), table[..., 1].repeat(1, 2)
        q, k = (t * cos + torch.cat([-t[..., 16:], t[..., :16]], -1) * sin for t in (q, k))
        k, v = k[:, self.mine], v[:, self.mine]
        if self.cache is None:
            rows = self.length if self.shard is None else self.shard.rows + 1
            self.cache = tuple(x.new_zeros(B, k.shape[1], rows, 32) for _ in range(2))
        slots = pos if self.shard is None else self.shard.slots(pos)
        for kept, new in zip(self.cache, (k, v), strict=True):
            kept.index_copy_(2, slots, new)
        keys, values = self.cache if self.shard is None else map(self.shard.gather, self.cache)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class Own(nn.Module):
    """Two such attentions; ``model(ids [B, T], pos [T]) -> logits [B, T, 64]``."""

    def __init__(self, kv_whole: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.head = nn.Embedding(512, 256), nn.Linear(256, 64, bias=False)
        self.blocks = nn.ModuleList(Attention(256, 96, kv_whole) for _ in range(2))
        angle = torch.outer(torch.arange(96.0), 1000.0 ** (-torch.arange(16) / 16))
        self.register_buffer("table", torch.stack([angle.cos(), angle.sin()], -1))
        self.register_buffer("causal", torch.ones(96, 96, dtype=torch.bool).tril())
        for block in self.blocks:
            block.q.weight.data *= SHARPEN
            block.k.weight.data *= SHARPEN

    def forward(self, ids: Tensor, pos: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(F.rms_norm(x, (256,)), pos, self.table[pos], self.causal[pos][None, None])
        return self.head(x)


@torch.no_grad()
def run_own(model: Own, made: Any) -> Tensor:
    torch._dynamo.reset()
    step, ids = torch.compile(model.forward, backend=made), IDS.to(DEVICE)
    model(ids[:, :80], torch.arange(80, device=DEVICE))
    steps = range(80, 80 + STEPS)
    return torch.stack([step(ids[:, i : i + 1].clone(), torch.tensor([i], device=DEVICE))[:, -1] for i in steps], 1)


def own_profile(**how: Any) -> Any:
    return profile_of([(f"blocks.{i}", 8, 2, 32, half_split(32)) for i in range(2)], 8, **how)


def split_groups(model: Own) -> tuple[Own, Any]:
    """The same model, in one process, with each KV head written once for each process that holds it. A process selects for the query heads
    that it has: this is what all of them together must compute."""
    copies = WORLD // 2
    for block in model.blocks:
        for name in "kv":
            weight = getattr(block, name).weight.view(2, 32, -1).repeat_interleave(copies, 0).flatten(0, 1)
            linear = nn.Linear(256, weight.shape[0], bias=False, device=DEVICE)
            linear.weight.data.copy_(weight)
            setattr(block, name, linear)
    whole = own_profile()
    layers = tuple(
        replace(
            p,
            num_kv_heads=WORLD,
            **{f: getattr(p, f).repeat_interleave(copies, 0) for f in ("fcs", "centre", "spread")},
        )
        for p in whole.layers
    )
    return model, backend(replace(whole, layers=layers), inner=INNER)


def own(folder: Path, kv_whole: bool = False) -> dict[str, Any]:
    """``parallelize_module`` on a module of one's own."""
    mesh = init_device_mesh(DEVICE, (WORLD,))
    whole, parallel = Own().to(DEVICE).eval(), Own(kv_whole).to(DEVICE).eval()
    names = ("q",) if kv_whole else ("q", "k", "v")
    parallelize_module(
        parallel,
        mesh,
        {f"blocks.*.{name}": ColwiseParallel() for name in names} | {"blocks.*.out": RowwiseParallel()},
    )
    expected = run_own(*(split_groups(whole) if kv_whole else (whole, backend(own_profile(), inner=INNER))))
    made = backend(own_profile(), inner=INNER)
    layers = own_profile().layers
    unsliced = {"whole_fcs": [p.fcs.tolist() for p in layers], "whole_norm": [p.norm.tolist() for p in layers]}
    return told(made, expected, run_own(parallel, made)) | unsliced


def replicated(folder: Path) -> dict[str, Any]:
    """More processes than KV heads: each KV head is on two of four."""
    return own(folder, kv_whole=True)


def _refused(made: Any) -> dict[str, Any]:
    mesh = init_device_mesh(DEVICE, (WORLD,))
    plan = {f"blocks.*.{name}": ColwiseParallel() for name in "qkv"} | {"blocks.*.out": RowwiseParallel()}
    model = Own().to(DEVICE).eval()
    parallelize_module(model, mesh, plan)
    try:
        run_own(model, made)
    except Exception as error:
        return {"error": type(error).__name__, "says": str(error)}
    return {"error": None}


def other_profile(folder: Path) -> dict[str, Any]:
    return _refused(backend(own_profile(n_fac=24 + 8 * RANK), inner=INNER))


def other_constants(folder: Path) -> dict[str, Any]:
    """The same shapes and budget, other numbers in the profile."""
    made = own_profile()
    first = replace(made.layers[0], centre=made.layers[0].centre + 0.01 * RANK)
    return _refused(backend(replace(made, layers=(first, *made.layers[1:])), inner=INNER))


def other_collectives(folder: Path) -> dict[str, Any]:
    """One process exchanges through the GPUs' memory, where the others would wait for it in vain."""
    return _refused(backend(own_profile(), inner="inductor", peer_memory=RANK == 0))


def failing_step(folder: Path) -> dict[str, Any]:
    """A rewritten graph that fails in its first step: one process cannot run the model's own graph without the others."""

    def inner(gm: Any, examples: Any) -> Callable[..., Any]:
        rewritten = any("fasa" in node.name for node in gm.graph.nodes)

        def run(*arguments: Any) -> Any:
            if rewritten:
                raise RuntimeError("planted")
            return gm.forward(*arguments)

        return run

    return _refused(backend(own_profile(), inner=inner, strict=False))


def lost(folder: Path) -> dict[str, Any]:
    """The last process never compiles: the others stop waiting."""
    fasa_compile.sharding.PATIENCE = datetime.timedelta(seconds=2)
    if RANK == WORLD - 1:
        mesh = init_device_mesh(DEVICE, (WORLD,))
        model = Own().to(DEVICE).eval()
        plan = {f"blocks.*.{name}": ColwiseParallel() for name in "qkv"} | {"blocks.*.out": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
        with torch.no_grad():
            model(IDS[:, :80].to(DEVICE), torch.arange(80, device=DEVICE))
        return {}
    return _refused(backend(own_profile(), inner=INNER))


if __name__ == "__main__":
    run(globals())
