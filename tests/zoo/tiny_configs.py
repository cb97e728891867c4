"""Configurations of a few thousand parameters for any causal-LM architecture of transformers, made from its defaults.

A field is recognised by its name (``SIZES``), lists with an entry per layer are cut so that every kind of layer stays, and what an
architecture needs beyond that is in ``CHANGES``. Nothing here knows what an attention looks like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

WINDOW, LAYERS = 32, 2

#: size -> names of fields, as one regular expression. The first that matches the whole name counts.
SIZES: list[tuple[int, str]] = [
    (0, r"num_nextn_predict_layers|num_mtp_layers|first_k_dense_replace"),
    (1, r"n_group|topk_group|num_expert_group|(n|num|moe_num)_shared_experts"),
    (LAYERS, r"(num_|n_)?(hidden_|encoder_|decoder_)?layers?|n_layer|depth|num_(en|de)coder_layers"),
    (2, r"(swa_|num_)*(num_)?(global_)?(key_value|kv)_heads|kv_n_heads|num_global_key_value_heads|index_n_heads"),
    (2, r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts"),
    (4, r"(swa_)?(num_|n_)?(encoder_|decoder_)?(attention_)?heads?|n_heads?|linear_num_(key_|value_)?heads"),
    (4, r"(num_|n_|moe_num_)?(local_|routed_)?experts|zero_expert_num"),
    (8, r"qk_rope_head_dim|rotary_dim|linear_(key|value)_head_dim|time_step_rank|mamba_dt_rank|rel_extent"),
    (8, r"(mamba_d_state|ssm_state_size|state_size)|patch_size|laurel_rank|altup_dim|loop_gate_rank|gated_norm_rank"),
    (8, r"hidden_size_per_layer_input|attention_chunk_size_unused"),
    (16, r"(swa_|global_|linear_)?(v_)?head_dim|dim_head|kv_channels|attention_head_size|d_kv|qk_nope_head_dim"),
    (16, r"chunk_size|mamba_chunk_size|moe_latent_size"),
    (24, r"qk_head_dim|index_topk"),
    (32, r"(kv|q|o)_lora_rank|index_head_dim|hc_lowrank|ple_embed_dim|image_size|block_multiple_of"),
    (
        WINDOW,
        r"(sliding|attention|local_attention|keep)?_?window(_size)?|sliding_window_size|local_attention(_window_len)?|attention_chunk_size",
    ),
    (64, r"hidden_size|d_model|n_embd|(emb_|embed_|hidden_)?dim|embedding_size|word_embed_proj_dim|lru_width"),
    (64, r"(input|output)_embedding_size|(attention|backbone)_hidden_size|audio_embed_dim|vision_output_dim"),
    (32, r"(moe|expert|shared)[a-z_]*(intermediate|ffn)[a-z_]*"),
    (128, r"(?!chunk_)[a-z_]*(intermediate|ffn|feed_forward)[a-z_]*|dim_ff|dff|d_ff|d_inner"),
    (128, r"(?!type_)[a-z_]*vocab(_[a-z_]*)?"),
    (256, r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions|context_length"),
    (256, r"model_max_length|seq_length"),
]

LAYER_KINDS = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "indexer_types",
    "block_types",
    "attention_layers",
)
HYBRID = ["linear_attention", "full_attention"]
SHARING = {"global_head_dim": 32, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
SHARING["num_kv_shared_layers"] = 2

#: What an architecture needs beyond ``SIZES``. ``"text_config"`` holds changes to the configuration of that name.
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dory": {
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [128] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": SHARING,
    "gemma4_unified_text": SHARING,
    "granitemoehybrid": {"layer_types": HYBRID, "position_embedding_type": "rope"},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {
        "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"],
        "moe_layers": [1],
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 2},
    # A linear layer first would report a cache length of 0, and every step would decode at position 0.
    "minimax": {"layer_types": ["full_attention", "linear_attention"]},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 24,
        "indexer_compress_ratio": 2,
        "split_ngram_parts": 1,
    },
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [32, 32],
        "num_buckets": 2,
    },
    "smollm3": {"no_rope_layers": [1, 0], "num_hidden_layers": 2},
    "xlstm": {"hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "n_mamba_heads": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "use_mem_rope": True,
        "num_hidden_layers": 4,
        "num_mem_blocks": 1,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
    },
    "zaya": {"num_experts_per_tok": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
        "swa_qk_rope_head_dim": 8,
        "num_key_value_heads": 4,
        "head_dim": 24,
    },
}


def _size(name: str) -> int | None:
    return next((size for size, names in SIZES if re.fullmatch(names, name)), None)


def _kinds(values: Iterable[Any]) -> list[Any]:
    """The distinct entries, in order."""
    return list({json.dumps(v, default=str): v for v in values}.values())


def _scaling(parameters: Any, rotated: int) -> Any:
    """RoPE parameters that fit ``rotated`` dims and 256 positions."""
    if not isinstance(parameters, dict):
        return parameters
    fitted = {}
    for name, value in parameters.items():
        if name == "mrope_section":
            value = [rotated // 2 - 2 * (rotated // 6), rotated // 6, rotated // 6]
        elif name in ("short_factor", "long_factor") and value:
            value = [1.0 + 0.1 * i for i in range(rotated // 2)]
        elif name == "original_max_position_embeddings" and value:
            value = 64
        elif name == "max_position_embeddings" and value:
            value = 256
        fitted[name] = _scaling(value, rotated)
    return fitted


def shrunk(kind: type) -> dict[str, Any]:
    """Keyword arguments of a configuration class for a tiny model."""
    from transformers import PreTrainedConfig

    default: Any = kind()
    fields = default.to_dict()
    changes = CHANGES.get(getattr(kind, "model_type", ""), {})
    deep = fields.get("num_hidden_layers")
    lists = {k: v for k, v in fields.items() if isinstance(v, list) and v and (k in LAYER_KINDS or len(v) == deep)}
    layers = changes.get("num_hidden_layers") or max(
        LAYERS, *(min(4, len(_kinds(v))) for k, v in lists.items() if k in LAYER_KINDS), LAYERS
    )
    given: dict[str, Any] = {}
    for name, value in fields.items():
        size = _size(name)
        nested = getattr(default, name, None) if isinstance(value, dict) else None
        if isinstance(nested, PreTrainedConfig):
            given[name] = type(nested)(**shrunk(type(nested)))
        elif name in lists:
            kinds = [size] if size else _kinds(lists[name])
            given[name] = [kinds[i % len(kinds)] for i in range(layers)]
        elif name == "pad_token_id":
            given[name] = 0
        elif name in ("bos_token_id", "eos_token_id") and value is not None:
            given[name] = 1 if name == "bos_token_id" else 2
        elif (name.endswith(("token_id", "token_index"))) and isinstance(value, int):
            given[name] = 100 + len(given) % 20
        elif size is not None and isinstance(value, int) and not isinstance(value, bool):
            given[name] = layers if size == LAYERS and "layer" in name else size
    if "kv_lora_rank" in fields:  # one latent serves all heads
        given["num_key_value_heads"] = 4
        if "head_dim" in fields:
            given["head_dim"] = 8
    if "is_decoder" in fields:
        given["is_decoder"] = True
    given |= changes
    if isinstance(fields.get("rope_parameters"), dict) and "rope_parameters" not in changes:
        rotated = given.get("qk_rope_head_dim") or given.get("head_dim") or 16
        given["rope_parameters"] = _scaling(fields["rope_parameters"], rotated)
    return given


def build(model_type: str) -> nn.Module:
    """A tiny model of an architecture, random weights, float32. Raises what transformers raises where it has none."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    config_class = getattr(model_class, "config_class", None) or CONFIG_MAPPING[model_type]
    config = config_class(**shrunk(config_class))
    if model_type == "dbrx":
        config.attn_config.rope_theta, config.attn_config.clip_qkv = 1e4, 8.0
    for implementation in ("sdpa", "eager", None):
        torch.manual_seed(0)
        try:
            model = model_class._from_config(
                config, **({"attn_implementation": implementation} if implementation else {})
            )
        except (ValueError, ImportError, AttributeError) as error:
            if implementation is None or ("attention" not in str(error).lower() and "attn" not in str(error).lower()):
                raise
        else:
            return _alive(model.eval().float())
    raise AssertionError


SHARPEN = 6.0


@torch.no_grad()
def _alive(model: nn.Module) -> nn.Module:
    """Weights that are zero or not finite by initialisation get values, and queries and keys are made to differ: nearly flat
    attention would hide a wrong mask, scale or selection."""
    g = torch.Generator().manual_seed(2)
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if x.is_floating_point() and not name.endswith("mask"):
            dead = isinstance(x, nn.Parameter) and x.dim() > 1 and not x.any()
            if dead or not torch.isfinite(x).all():
                x.copy_(torch.randn(x.shape, generator=g) * 0.02)
    for name, x in model.named_parameters():
        if not name.endswith("weight") or x.dim() != 2:
            continue
        if re.search(r"\.(q_proj|k_proj|query|key|wq|wk|q_b_proj|kv_b_proj|q_lin|k_lin)\.weight$", name):
            x *= SHARPEN
        elif re.search(r"\.(qkv|qkv_proj|query_key_value|Wqkv|qkv_fused|c_attn)\.weight$", name):
            x *= SHARPEN**0.5
    return model
