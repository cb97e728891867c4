"""Real weights: every site of SmolLM2 is found in static and growing caches, and a covering budget is dense."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models import cache_for, decode, difference

import fasa_compile
from fasa_compile import calibrate, fasa_backend

pytest.importorskip("transformers")
pytest.importorskip("gguf")

pytestmark = pytest.mark.slow

STEPS = 4


@pytest.fixture(scope="module")
def ids(smollm2: SimpleNamespace) -> torch.Tensor:
    import smollm2 as helper

    return helper.windows(smollm2.tokenizer, 320, 1)


@pytest.fixture(scope="module")
def profile(smollm2: SimpleNamespace, ids: torch.Tensor):
    return calibrate(smollm2.model, ids, progress=False)


def test_calibration_finds_every_layer_and_is_stable(profile):
    assert [layer.layer for layer in profile.layers] == [f"model.layers.{i}.self_attn" for i in range(30)]
    for layer in profile.layers:
        assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (9, 3, 64)
        assert layer.rope.pairs == tuple((i, i + 32) for i in range(32))
        assert layer.n_tip == 16
        # A half of the FCs chosen at random would hold half of the score variance.
        assert layer.stats["energy_kept"] > 0.75


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_covering_budget_is_dense_at_every_site(smollm2, ids, profile, kind, dtype):
    model = smollm2.model.to(dtype)
    try:
        dense = decode(model, model, ids, cache_for(model, kind, 512), STEPS)
        backend = fasa_backend(profile, n_fac=400, inner="eager", strict=True)
        step = torch.compile(model, backend=backend)
        sparse = decode(model, step, ids, cache_for(model, kind, 512), STEPS)
    finally:
        smollm2.model.to(torch.float32)
    rows = backend.explain().rows
    assert {row.layer for row in rows if row.decision == "sparse"} == {f"model.layers.{i}.self_attn" for i in range(30)}
    # A growing cache's first step has a graph of its own, for 317 tokens: known to be within the budget, so left dense.
    assert fasa_compile.stats()["sparse_steps"] == (STEPS if kind == "static" else STEPS - 1)
    limit = 1e-4 if dtype is torch.float32 else 3e-2 * dense.abs().max().item()
    assert difference(sparse, dense) <= limit
