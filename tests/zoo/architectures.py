"""Tiny random models of published architectures, by transformers' own classes, and one decode step of each.

``SAMPLE`` spans what architectures differ in: spelling of the rotation, partial rotation, norms, grouped heads, windows, soft
cap, sinks, latent caches, mixture layers, layers without positions, and attention without any.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

PROMPT, CACHE, WINDOW = 12, 64, 8
COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}


@dataclass(frozen=True)
class Architecture:
    """``sites`` is how many attentions of a decode step carry a rotary embedding and read a cache.

    ``broken`` names, per kind of cache, the last minor release of transformers known in which the model itself, uncompiled, fails.
    """

    model_type: str
    sites: int
    config: dict[str, Any]
    attention: str | None = None  # the implementation asked of transformers; None: its default
    kinds: tuple[str, ...] = ("static", "dynamic")
    broken: dict[str, tuple[int, int]] = field(default_factory=dict)

    def runs(self, kind: str) -> bool:
        """Whether the model itself runs with that kind of cache in the release of transformers that is installed."""
        import transformers

        major, minor = transformers.__version__.split(".")[:2]
        return (int(major), int(minor)) > self.broken.get(kind, (0, 0))


SAMPLE = [
    Architecture("llama", 2, GROUPED),
    Architecture("llama", 2, GROUPED, attention="eager"),
    Architecture("mistral", 2, {**GROUPED, "sliding_window": WINDOW}),
    Architecture("qwen3", 2, {**GROUPED, "head_dim": 16}),
    Architecture("gemma2", 2, {**GROUPED, "head_dim": 16, "sliding_window": WINDOW}, attention="eager"),
    Architecture("gpt_oss", 2, {**GROUPED, "head_dim": 16, "num_local_experts": 4, "sliding_window": WINDOW}),
    Architecture("phi", 2, {"partial_rotary_factor": 0.5}),
    Architecture("glm", 2, {**GROUPED, "head_dim": 16}),
    Architecture("cohere", 2, GROUPED),
    Architecture("nanochat", 2, GROUPED),
    Architecture("jetmoe", 2, {"num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 4}, kinds=("static",)),
    Architecture("smollm3", 1, {**GROUPED, "no_rope_layers": [1, 0]}),
    Architecture("deepseek_v3", 2, {**LATENT, **EXPERTS, "first_k_dense_replace": 1}),
    Architecture(
        "gptj", 2, {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 8, "n_inner": 64}
    ),
    Architecture("gpt2", 0, {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    Architecture(
        "bloom", 0, {"n_layer": 2, "n_head": 4}, broken={"static": (5, 17)}
    ),  # its ALiBi has the prompt's length
]


def name_of(architecture: Architecture) -> str:
    return architecture.model_type + (f"-{architecture.attention}" if architecture.attention else "")


def build(architecture: Architecture) -> nn.Module:
    """The model with random weights, in float32. Raises ImportError or KeyError where transformers lacks it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture.model_type, **{**COMMON, **architecture.config})
    options = {"attn_implementation": architecture.attention} if architecture.attention else {}
    return AutoModelForCausalLM.from_config(config, **options).eval()


def new_cache(model: nn.Module, kind: str) -> Any:
    from transformers import DynamicCache, StaticCache

    config: Any = model.config
    return StaticCache(config=config, max_cache_len=CACHE) if kind == "static" else DynamicCache(config=config)


def decode_steps(
    model: nn.Module, kind: str, backend: Callable[..., Any], steps: int = 1
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of some decode steps after a prompt: by plain torch, and compiled with ``backend``."""
    torch._dynamo.reset()
    ids = torch.randint(3, 128, (1, PROMPT + steps), generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model, backend=backend, dynamic=kind == "dynamic")
    expected, got = [], []
    with torch.no_grad():
        ours = new_cache(model, kind)
        model(input_ids=ids[:, :PROMPT], past_key_values=ours)
        plain = copy.deepcopy(ours)
        for i in range(PROMPT, PROMPT + steps):
            token = ids[:, i : i + 1].clone()
            expected.append(model(input_ids=token, past_key_values=plain).logits)
            got.append(compiled(input_ids=token, past_key_values=ours).logits)
    return expected, got
