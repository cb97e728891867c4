"""The cost model's memory plan against what the kernels allocate."""

from __future__ import annotations

import pytest
import torch

from fasa_compile.cost import Shape, card, cost_of
from fasa_compile.triton_kernels import ops
from fasa_compile.triton_kernels.formats import bytes_per_token

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("B", "L"), [(1, 32768), (8, 8192), (32, 4096)])
def test_scratch_is_what_the_kernels_allocate(B, L):
    Hkv, G, D, W, n_fac = 8, 4, 128, 64, 1024
    k, v = (torch.randn(B, Hkv, L, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(B, Hkv * G, 1, D, device="cuda", dtype=torch.bfloat16)
    dims = torch.stack([torch.randperm(D)[:W] for _ in range(Hkv)]).int().cuda()
    zeros, ones = torch.zeros(Hkv, W, device="cuda"), torch.ones(Hkv, W, device="cuda")
    data, meta = torch.ops.fasa.pack(k, dims, zeros, ones, "int4", ops.KERNEL_VERSION)
    norm, slots = torch.zeros(Hkv * G, device="cuda"), torch.tensor([L - 1], device="cuda")
    shape, dtype = ops.sparse_decode_state(B, Hkv)
    state = torch.zeros(shape, dtype=dtype, device="cuda")
    how = dict(scale=D**-0.5, softcap=0.0, sinks=None, version=ops.KERNEL_VERSION)

    def sparse():
        return torch.ops.fasa.sparse_decode(
            q, k, v, data, meta, dims, zeros, ones, norm, None, None, slots, state, n_fac=n_fac, n_sink=4, n_recent=16,
            fmt="int4", reduction="static", **how,
        )  # fmt: skip

    def dense():
        return torch.ops.fasa.dense_decode(q, k, v, None, None, **how)

    site = Shape(B, L, Hkv, G, D, D, 2, n_fac, W, bytes_per_token(W, "int4"))
    cost = cost_of(site, card(k.device))
    assert cost.packed_bytes == sum(t.nbytes for t in (data, meta, state))
    for call, predicted in ((sparse, cost.sparse_scratch), (dense, cost.dense_scratch)):
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = call()
        used = torch.cuda.max_memory_allocated() - before - out.nbytes
        assert 0.5 * used <= predicted + 4096 and predicted <= 2.0 * used + 65536, f"{used} used, {predicted} predicted"
