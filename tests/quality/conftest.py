"""The model of the tests that need no real weights."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def model() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight.mul_(12.0)  # attention of an untrained model is flat: no token would matter more than another
    return model
