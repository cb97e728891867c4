"""Profiles for tests."""

from __future__ import annotations

from typing import Any

import torch

from fasa_compile.profiles import Budget, FCProfile, LayerProfile, ModelFacts, RopeFacts


def half_split(head_dim: int, rotary_dim: int | None = None, magnitude: float = 1.0) -> RopeFacts:
    n = (rotary_dim or head_dim) // 2
    return RopeFacts(head_dim, tuple((i, i + n) for i in range(n)), magnitude)


def layer(name: str = "model.layers.0.self_attn", **given: Any) -> LayerProfile:
    """A valid layer: 4 query heads, 2 KV heads, head_dim 8, FCs {0, 2} and {1, 3}; every value of every head differs."""
    fields: dict[str, Any] = {
        "layer": name,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rope": half_split(8),
        "dense": False,
        "fcs": torch.tensor([[0, 2], [1, 3]], dtype=torch.int32),
        "centre": torch.arange(16, dtype=torch.float32).view(2, 8) / 3 - 2,
        "spread": torch.arange(1, 17, dtype=torch.float32).view(2, 8) / 7,
        "norm": torch.tensor([0.1, -2.5, 3.25, 1e-9]),
        "affine": torch.arange(36, dtype=torch.float32).view(4, 9) / 11 - 1,
        "stats": {"energy_kept": 0.75},
    }
    return LayerProfile(**(fields | given))


def profile(**given: Any) -> FCProfile:
    fields: dict[str, Any] = {
        "layers": (layer(), layer("model.layers.1.self_attn", dense=True, n_fac=64)),
        "budget": Budget(128, 4, 16),
        "fc_format": "int4",
        "reduction": "static",
        "method": "score_variance",
        "model": ModelFacts("TestForCausalLM", "1-0123-4567", 2, {"revision": "main"}),
        "data": {"tokens": 512, "context_lengths": [256, 512], "fingerprint": "00ff"},
        "stats": {"stability": {"256": 0.9}},
    }
    return FCProfile(**(fields | given))
