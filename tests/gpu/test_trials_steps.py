"""Memory of a whole step, and kernels that really fail, on a GPU."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))

from models import cache_for, decode, difference, half_split, llama_profile, profile_of, tiny_llama

import fasa_compile
from fasa_compile import FasaWarning, fasa_backend

pytestmark = pytest.mark.gpu
MIB = 1 << 20


class Attention(nn.Module):
    """Attention over 64 MiB of K and V in bf16: a buffer each, or ``fused`` one ``[2, 1, 8, 16384, 128]`` of which they are views."""

    H, HKV, D, L = 32, 8, 128, 16384

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.q, self.kv = nn.Linear(256, self.H * self.D), nn.Linear(256, 2 * self.HKV * self.D)
        both = torch.randn(2, 1, self.HKV, self.L, self.D)
        if fused:
            self.register_buffer("cache", both)
        else:
            self.register_buffer("keys", both[0].clone())
            self.register_buffer("values", both[1].clone())
        angle = torch.outer(torch.arange(self.L).float(), 1000.0 ** (-torch.arange(0, self.D, 2) / self.D))
        self.register_buffer("cos", angle.cos().repeat(1, 2))
        self.register_buffer("sin", angle.sin().repeat(1, 2))

    def turn(self, x, pos):
        a, b = x.chunk(2, -1)
        return x * self.cos[pos].to(x.dtype) + torch.cat([-b, a], -1) * self.sin[pos].to(x.dtype)

    def forward(self, x, pos):
        q = self.turn(self.q(x).view(1, 1, self.H, self.D).transpose(1, 2), pos)
        k, v = self.kv(x).view(1, 1, 2, self.HKV, self.D).permute(2, 0, 3, 1, 4)
        keys, values = (self.cache[0], self.cache[1]) if self.fused else (self.keys, self.values)
        keys.index_copy_(2, pos, self.turn(k, pos))
        values.index_copy_(2, pos, v)
        mask = (torch.arange(self.L, device=x.device) <= pos)[None, None, None]
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return y.transpose(1, 2).reshape(1, 1, -1)


class Model(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(fused) for _ in range(2))

    def forward(self, x, pos):
        return sum(layer(x, pos) for layer in self.layers)


def peak_of_a_step(model, backend) -> int:
    """Bytes that the fourth step needs beyond what is kept from step to step."""
    torch._dynamo.reset()
    step = torch.compile(model, backend=backend)
    x = torch.randn(1, 1, 256, device="cuda", dtype=torch.bfloat16)
    positions = [torch.tensor([15000 + i], device="cuda") for i in range(4)]
    with torch.no_grad():
        for position in positions[:3]:
            step(x, position)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(x, positions[3])
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_copies_no_cache(fused):  # trial F4
    """Inductor itself copies a buffer that K and V share, with us or without; we add nothing. Apart they are never copied."""
    torch.manual_seed(0)
    model = Model(fused).eval().to("cuda", torch.bfloat16)
    profile = profile_of([(f"layers.{i}", 32, 8, 128, half_split(128)) for i in range(2)], 32, "int4", n_fac=512)
    ours = peak_of_a_step(model, fasa_backend(profile, strict=True, check_weights=False, dense_below=0))
    assert fasa_compile.stats()["sparse_steps"] == 4
    assert fasa_compile.stats()["state_rebuilds"] == 2
    alone = peak_of_a_step(model, "inductor") if fused else 0
    print(f"peak of a step beyond what it keeps: {ours / MIB:.2f} MiB, without us {alone / MIB:.2f} MiB")
    assert ours < alone + 4 * MIB


def test_quantised_weights_in_cuda_graphs():  # trial N2
    ao = pytest.importorskip("torchao.quantization")
    model = tiny_llama(layers=2).to("cuda", torch.bfloat16)
    ao.quantize_(model.model.layers, ao.Int8WeightOnlyConfig())
    ids = torch.randint(0, 512, (2, 100), generator=torch.Generator().manual_seed(3)).cuda()
    dense = decode(model, model, ids, cache_for(model, "static", 256), 8)
    profile = llama_profile(2, fc_format="int4")
    made = fasa_backend(profile, strict=True, check_weights=False, dense_below=0, n_fac=128)
    step = torch.compile(model, backend=made, mode="reduce-overhead")
    found = decode(
        model, step, ids, cache_for(model, "static", 256), 8
    )  # the third step and those after it are replays
    assert difference(found, dense) <= 3e-2 * dense.abs().max().item()
    assert fasa_compile.stats()["sparse_steps"] == 8


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_kernel_that_asks_for_more_than_the_gpu_has(kind, monkeypatch):
    """Tiles that fit no shared memory: Triton refuses to launch, after the first layer's keys were written."""
    from fasa_compile.triton_kernels import sparse_decode

    whole = sparse_decode.configuration

    def too_large(*arguments):
        return dataclasses.replace(whole(*arguments), block_n=512, fac_stages=16)

    monkeypatch.setattr(sparse_decode, "configuration", too_large)
    model = tiny_llama(layers=2).to("cuda", torch.bfloat16)
    ids = torch.randint(0, 512, (1, 100), generator=torch.Generator().manual_seed(3)).cuda()
    dense_cache, cache = cache_for(model, kind, 256), cache_for(model, kind, 256)
    dense = decode(model, model, ids, dense_cache, 6)
    made = fasa_backend(llama_profile(2, fc_format="int4"), check_weights=False, dense_below=0)
    with pytest.warns(FasaWarning, match="first step of a rewritten graph failed"):
        found = decode(model, torch.compile(model, backend=made), ids, cache, 6)
    assert difference(found, dense) <= 3e-2 * dense.abs().max().item()
    for mine, theirs in zip(cache.layers, dense_cache.layers, strict=True):
        assert difference(mine.keys, theirs.keys) <= 3e-2 * theirs.keys.abs().max().item()
    assert {row.reason for row in made.explain().rows} == {"step-failed"}
    assert fasa_compile.stats()["sparse_steps"] == 0
