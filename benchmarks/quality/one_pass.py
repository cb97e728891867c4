"""Teacher-forced decode of many tokens in one forward.

A decode step sees the tokens before it and nothing else, so feeding the last n tokens of a text at once, each query choosing
its own keys, computes what n steps would: the keys and values of a decoded token come from hidden states that sparse attention
made, and errors go through all layers and into later tokens. ``tests/quality/test_compare.py`` holds the two together.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fasa_compile.evaluation import cache_argument
from token_selectors import Method, Scene

NAME = "fasa_one_pass"
VOTERS = 32


@dataclass
class Harness:
    """What the attention of a model does meanwhile. ``method=None``: plain causal prefill, which is shown to ``watch``.

    ``positions [L]`` of all keys, the prompt's and the new ones', and ``allowed [n, L]``; ``lost[layer]`` adds up the attention
    mass that the selection lost, ``[Hq]`` summed over queries.
    """

    model: Any
    layers: dict[Any, str]
    method: Method | None = None
    allowed: Tensor | None = None
    positions: Tensor | None = None
    watch: Any = None
    only: set[str] | None = None  # layers that the method applies to; None: all
    voters: dict[str, Tensor] = field(default_factory=dict)
    lost: dict[str, Tensor] = field(default_factory=dict)
    queries: int = 0

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """``q [1, Hq, n, D]``, ``k [1, Hkv, L, D]``: transformers' attention interface; returns ``[1, n, Hq, Dv]``."""
        name, scale = self.layers[module], kwargs["scaling"]
        window = kwargs.get("sliding_window") or getattr(module, "sliding_window", None)
        group = q.shape[1] // k.shape[1]
        n, length = q.shape[2], k.shape[2]
        if self.method is None:
            at = torch.arange(length, device=q.device)
            allowed = at[None, :] <= at[length - n :, None]
            if window:
                allowed &= at[length - n :, None] - at[None, :] < window
            elif self.watch is not None:
                self.watch(name, q, k, v, scale)
            self.voters[name] = q[0, :, -VOTERS:].float()
        else:
            assert self.allowed is not None and self.positions is not None
            allowed = self.allowed[:, -length:]
            if window:
                at = self.positions
                allowed = allowed & (at[-n:, None] - at[None, -length:] < window)
        heads = allowed[None]
        sparse = self.method is not None and not window and not self.method.attends_all
        if sparse and (self.only is None or name in self.only):
            scene = Scene(q[0].float(), k[0].float(), v[0].float(), allowed, scale, name, length - n, self.voters[name])
            assert self.method is not None
            heads = self.method.select(scene)
            exact = scene.scores().flatten(0, 1)
            kept = exact.masked_fill(~heads, -torch.inf).logsumexp(-1) - exact.logsumexp(-1)
            lost = -kept.expm1().sum(-1)
            self.lost[name] = self.lost.get(name, torch.zeros_like(lost)) + lost
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), attn_mask=heads[None], scale=scale
        )
        return out.transpose(1, 2).contiguous(), None


@contextmanager
def harness(model: Any) -> Iterator[Harness]:
    """``model`` (transformers) with its attention handed to a ``Harness``."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    made = Harness(model, {module: path for path, module in model.named_modules()})
    AttentionInterface.register(NAME, made.attend)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield made
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def prefill(h: Harness, ids: Tensor, watch: Any = None) -> Any:
    """A dynamic cache of ``ids [n]``; ``watch(layer, q, k, v, scale)`` sees each global layer's queries and keys."""
    from transformers import DynamicCache

    cache = DynamicCache(config=h.model.config)
    h.method, h.watch, h.voters = None, watch, {}
    h.model(input_ids=ids[None], use_cache=True, logits_to_keep=1, **{cache_argument(h.model.forward): cache})
    h.watch = None
    return cache


@torch.no_grad()
def forced(
    h: Harness,
    cache: Any,
    prompt: int,
    tokens: Tensor,
    method: Method,
    blocks: Tensor | None = None,
    only: set[str] | None = None,
) -> Tensor:
    """Log-probabilities fp32 ``[n, V]`` after each of ``tokens [n]``, fed behind ``prompt`` cached tokens, which stay as they are.

    ``blocks [n]``: tokens of different blocks continue the prompt independently of each other (questions about one text).
    """
    n, device = len(tokens), tokens.device
    blocks = torch.zeros(n, dtype=torch.long, device=device) if blocks is None else blocks.to(device)
    same = blocks[:, None] == blocks[None, :]
    allowed = same.tril()
    at = prompt + allowed.sum(1) - 1
    h.positions = torch.cat([torch.arange(prompt, device=device), at])
    h.allowed = torch.cat([torch.ones(n, prompt, dtype=torch.bool, device=device), allowed], 1)
    h.method, h.only = method, only
    h.queries += n
    own = copy.deepcopy(cache)
    logits = h.model(
        input_ids=tokens[None], position_ids=at[None], use_cache=True, **{cache_argument(h.model.forward): own}
    ).logits
    h.method = None
    return logits[0].float().log_softmax(-1)
