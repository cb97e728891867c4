"""``check_model`` on a transformers model, which needs no driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")
pytest.importorskip("transformers")

from fasa_compile.testing import check_model


def make() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, vocab_size=96
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 20
        layer.self_attn.k_proj.weight.data *= 20
    return model


@pytest.mark.parametrize("check", ["plain reference", "padding", "host memory", "cache operations"])
def test_a_llama(check: str, counted: Callable[[int, int], None]) -> None:
    outcome = check_model(make, checks=[check])
    counted(0, outcome[check]["ran"]) if check == "cache operations" else counted(outcome[check]["ran"], 0)
    assert outcome[check]["ran"] > 0, outcome
