"""Small models and decode loops for the end-to-end tests.

Random models have nearly flat attention, which hides a wrong mask, scale or selection: query and key projections are
multiplied by 6 (attention logits with a standard deviation of about 4), and logits are compared, not tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasa_compile import fasa_backend
from fasa_compile.backend import FasaBackend
from fasa_compile.doctor import version
from fasa_compile.profiles import Budget, FCProfile, LayerProfile, ModelFacts, RopeFacts

SHARPEN = 6.0
#: What it gives a step, and what its models cannot do by themselves, differs from later versions in some tests.
TRANSFORMERS_5_17 = version("transformers").startswith("5.17.")


@contextmanager
def the_model_itself(known: str) -> Iterator[None]:
    """Where an unmodified model runs: skips if it cannot in transformers 5.17, where the error says ``known``."""
    try:
        yield
    except RuntimeError as problem:
        if not (TRANSFORMERS_5_17 and known in str(problem)):
            raise
        pytest.skip(f"the model itself cannot in transformers 5.17: {problem}")


def tiny_llama(layers: int = 3, **changes: Any) -> Any:
    """A transformers Llama: 8 query and 2 KV heads of 32 dims, sharpened."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    given = dict(
        hidden_size=256,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=512,
        vocab_size=512,
        max_position_embeddings=8192,
    )
    model = LlamaForCausalLM(LlamaConfig(**(given | changes))).eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= SHARPEN
        layer.self_attn.k_proj.weight.data *= SHARPEN
    return model


def tiny_gemma3() -> Any:
    """A transformers Gemma 3 of a sliding layer, whose window is 32, and a full one; 4 query and 2 KV heads of 16 dims, sharpened."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=512,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data += 1.0
        layer.self_attn.k_norm.weight.data += 1.0
    return model


def profile_of(
    layers: list[tuple[str, int, int, int, tuple[tuple[int, int], ...]]],
    n_tip: int,
    fc_format: str = "fp32",
    reduction: str = "static",
    magnitude: float = 1.0,
    **budget: int,
) -> FCProfile:
    """A profile with random FCs and constants: ``(name, Hq, Hkv, D, pairs)`` per layer; ``magnitude`` of cos and sin."""
    g = torch.Generator().manual_seed(1)
    made = []
    for name, Hq, Hkv, D, pairs in layers:
        fcs = torch.stack([torch.randperm(len(pairs), generator=g)[:n_tip].sort().values for _ in range(Hkv)])
        made.append(
            LayerProfile(
                layer=name,
                num_heads=Hq,
                num_kv_heads=Hkv,
                head_dim=D,
                rope=RopeFacts(D, pairs, magnitude),
                dense=False,
                fcs=fcs.to(torch.int32),
                centre=torch.randn(Hkv, D, generator=g) * 0.1,
                spread=torch.rand(Hkv, D, generator=g) + 0.5,
                norm=torch.randn(Hq, generator=g),
            )
        )
    facts = ModelFacts("Test", "0" * 16, len(made), {})
    return FCProfile(
        tuple(made),
        Budget(**({"n_fac": 24, "n_sink": 2, "n_recent": 4} | budget)),
        fc_format,
        reduction,
        "random",
        facts,
    )


def half_split(R: int, first: int = 0) -> tuple[tuple[int, int], ...]:
    return tuple((first + i, first + i + R // 2) for i in range(R // 2))


def llama_profile(layers: int = 3, n_tip: int = 8, fc_format: str = "fp32", **budget: int) -> FCProfile:
    rows = [(f"model.layers.{i}.self_attn", 8, 2, 32, half_split(32)) for i in range(layers)]
    return profile_of(rows, n_tip, fc_format, **budget)


def backend(profile: Any = "all", **how: Any) -> FasaBackend:
    """A strict backend on Dynamo's graph as it is; random profiles know no weights."""
    return fasa_backend(profile, **({"inner": "eager", "strict": True, "check_weights": False} | how))


def compiled(model: Any, profile: Any = "all", **how: Any) -> Any:
    """``model`` under a fresh ``torch.compile`` with ``backend(profile, **how)``."""
    torch._dynamo.reset()
    return torch.compile(model, backend=backend(profile, **how))


def cache_for(model: Any, kind: str, length: int = 128) -> Any:
    from transformers import DynamicCache, StaticCache

    return (
        StaticCache(config=model.config, max_cache_len=length)
        if kind == "static"
        else DynamicCache(config=model.config)
    )


@torch.no_grad()
def decode(
    model: Any,
    step: Callable[..., Any],
    ids: Tensor,
    cache: Any,
    steps: int,
    *,
    attention_mask: Tensor | None = None,
    each: Callable[[int], None] | None = None,
) -> Tensor:
    """Prefill ``model`` (uncompiled) with all but the last ``steps`` tokens of ``ids [B, n]``, then ``step`` one token at a time.

    Teacher-forced. Returns logits ``[B, steps, V]``. ``each(i)`` runs before step i.
    """
    start = ids.shape[1] - steps

    def masks(first: int, stop: int) -> dict[str, Any]:
        if attention_mask is None:
            return {}
        positions = (attention_mask.cumsum(1) - 1).clamp(
            min=0
        )  # what generate() passes: each row counts its own tokens
        return {"attention_mask": attention_mask[:, :stop], "position_ids": positions[:, first:stop].clone()}

    model(ids[:, :start], past_key_values=cache, **masks(0, start))
    out = []
    for i in range(steps):
        if each is not None:
            each(i)
        token = ids[:, start + i : start + i + 1].clone()
        out.append(
            step(input_ids=token, past_key_values=cache, **masks(start + i, start + i + 1)).logits[:, -1].clone()
        )
    return torch.stack(out, dim=1)


def difference(a: Tensor, b: Tensor) -> float:
    return (a.float() - b.float()).abs().max().item()


# --- models that import nothing from transformers -----------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Interleaved(nn.Module):
    """Fused qkv, interleaved RoPE from a table, a static cache indexed by position, repeat_interleave, a mask from a table."""

    H, HKV, D = 4, 2, 16

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, (self.H + 2 * self.HKV) * self.D, bias=False)
        self.out = nn.Linear(self.H * self.D, width, bias=False)
        self.register_buffer("k_cache", torch.zeros(1, self.HKV, length, self.D))
        self.register_buffer("v_cache", torch.zeros(1, self.HKV, length, self.D))

    @staticmethod
    def rotate(x: Tensor, table: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = table[:, None, :, 0], table[:, None, :, 1]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)

    def forward(self, x: Tensor, pos: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, -1, self.D).split([self.H, self.HKV, self.HKV], dim=2)
        q, k = self.rotate(q, table), self.rotate(k, table)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        self.k_cache[:, :, pos] = k
        self.v_cache[:, :, pos] = v
        G = self.H // self.HKV
        keys, values = self.k_cache.repeat_interleave(G, 1), self.v_cache.repeat_interleave(G, 1)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.3)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class PartialHalfSplit(nn.Module):
    """Per-head fused qkv, the first half of the dims rotated half-split, keys concatenated, MHA, grouped by enable_gqa."""

    H, HKV, D, R = 4, 2, 16, 8

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, self.H * self.D)
        self.kv = nn.Linear(width, 2 * self.HKV * self.D)
        self.out = nn.Linear(self.H * self.D, width)
        self.k_past: Tensor | None = None
        self.v_past: Tensor | None = None

    def rotate(self, x: Tensor, table: Tensor) -> Tensor:
        cos, sin = table[..., 0].repeat(1, 2), table[..., 1].repeat(1, 2)
        turned, kept = x[..., : self.R], x[..., self.R :]
        a, b = turned.chunk(2, dim=-1)
        return torch.cat([turned * cos + torch.cat([-b, a], -1) * sin, kept], dim=-1)

    def forward(self, x: Tensor, pos: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.q(x).view(B, T, self.H, self.D).transpose(1, 2)
        k, v = self.kv(x).view(B, T, 2, self.HKV, self.D).permute(2, 0, 3, 1, 4)
        q, k = self.rotate(q, table), self.rotate(k, table)
        if self.k_past is not None and self.v_past is not None:
            k, v = torch.cat([self.k_past, k], 2), torch.cat([self.v_past, v], 2)
        self.k_past, self.v_past = k, v
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class Custom(nn.Module):
    """A decoder of two such attentions; ``model(ids [1, T], pos [T]) -> logits [1, T, V]``."""

    WIDTH, VOCAB, LENGTH = 64, 128, 96

    def __init__(self, attention: type[Interleaved] | type[PartialHalfSplit]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(self.VOCAB, self.WIDTH)
        self.blocks = nn.ModuleList(attention(self.WIDTH, self.LENGTH) for _ in range(2))
        self.norms = nn.ModuleList(RMSNorm(self.WIDTH) for _ in range(3))
        self.head = nn.Linear(self.WIDTH, self.VOCAB, bias=False)
        R = getattr(attention, "R", attention.D)
        angle = torch.outer(torch.arange(self.LENGTH).float(), 1000.0 ** (-torch.arange(0, R, 2) / R))
        self.register_buffer("table", torch.stack([angle.cos(), angle.sin()], dim=-1))
        self.register_buffer("causal", torch.ones(self.LENGTH, self.LENGTH, dtype=torch.bool).tril())
        for name, parameter in self.named_parameters():
            if "qkv" in name or ".q." in name or ".kv." in name:
                parameter.data *= math.sqrt(SHARPEN)

    def forward(self, ids: Tensor, pos: Tensor) -> Tensor:
        x = self.embed(ids)
        table, mask = self.table[pos], self.causal[pos][None, None]
        for block, norm in zip(self.blocks, self.norms, strict=False):
            x = x + block(norm(x), pos, table, mask)
        return self.head(self.norms[-1](x))

    def reset(self) -> None:
        for block in self.blocks:
            if isinstance(block, Interleaved):
                block.k_cache.zero_()
                block.v_cache.zero_()
            else:
                block.k_past = block.v_past = None


@torch.no_grad()
def decode_custom(model: Custom, step: Callable[..., Tensor], ids: Tensor, steps: int) -> Tensor:
    """As ``decode``, for ``Custom``: logits ``[1, steps, V]``."""
    model.reset()
    start = ids.shape[1] - steps
    model(ids[:, :start], torch.arange(start))
    out = [step(ids[:, i : i + 1].clone(), torch.tensor([i]))[:, -1].clone() for i in range(start, ids.shape[1])]
    return torch.stack(out, dim=1)


# --- the plain reference ------------------------------------------------------------------------------------------------


@contextmanager
def eager_fasa(model: Any, profile: FCProfile | None, **budget: int) -> Iterator[None]:
    """Inside, a transformers model decodes through the plain-torch reference, called by an attention hook and no compiler.

    It is told scale, mask and cache by transformers, packs the FC cache anew from K in every step and knows nothing of
    graphs: an independent path to what the backend must compute. ``profile=None`` scores with all dims of K.
    """
    from hooked_attention import hooked

    base = Budget() if profile is None else profile.budget
    with hooked(model, profile, base.replace(**budget)):
        yield
