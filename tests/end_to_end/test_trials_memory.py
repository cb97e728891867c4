"""Whether the code that Inductor makes of a rewritten step copies a cache, read off the buffers that it allocates."""

from __future__ import annotations

import math
import re

import pytest
import torch
from models import Custom, Interleaved, profile_of
from torch.nn import functional as F

import fasa_compile
from fasa_compile import fasa_backend

PAIRS = tuple((2 * i, 2 * i + 1) for i in range(8))


class Fused(Interleaved):
    """K and V are views of one buffer."""

    def __init__(self, width, length):
        super().__init__(width, length)
        del self.k_cache, self.v_cache
        self.register_buffer("both", torch.randn(2, 1, self.HKV, length, self.D))

    def forward(self, x, pos, table, mask):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, -1, self.D).split([self.H, self.HKV, self.HKV], dim=2)
        q, k = self.rotate(q, table), self.rotate(k, table)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        keys, values = self.both[0], self.both[1]
        keys[:, :, pos] = k
        values[:, :, pos] = v
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.3, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


def buffers_of_a_caches_size(model, backend) -> int:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    with torch.no_grad():
        _, codes = run_and_get_code(
            torch.compile(model, backend=backend), torch.tensor([[7]]), torch.tensor([model.LENGTH - 2])
        )
    shapes = re.findall(r"empty_strided_cpu\(\(([\d, ]*)\)", "\n".join(codes))
    assert shapes, "Inductor's code allocates in another way now"
    sizes = [math.prod(int(n) for n in shape.split(",") if n.strip()) for shape in shapes]
    return sum(size >= Interleaved.HKV * model.LENGTH * Interleaved.D for size in sizes)


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize("attention", [Interleaved, Fused])
def test_the_code_of_a_step_copies_no_cache(attention, monkeypatch):  # trial F4
    """Buffers apart are copied by nobody. One that K and V share is copied by Inductor itself, without us too; we add nothing."""
    from fasa_compile import rewrite

    monkeypatch.setattr(Custom, "LENGTH", 2048)
    model = Custom(attention).eval()
    alone = buffers_of_a_caches_size(model, "inductor") if attention is Fused else 0
    monkeypatch.setattr(rewrite, "uses_kernels", lambda device: True)
    profile = profile_of([(f"blocks.{i}", 4, 2, 16, PAIRS) for i in range(2)], 3, "int4", n_fac=64)
    ours = buffers_of_a_caches_size(model, fasa_backend(profile, strict=True, check_weights=False))
    assert fasa_compile.stats()["sparse_steps"] == 1
    assert ours <= alone
