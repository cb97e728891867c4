"""Quality of a decode path, teacher forced: the tokens of a text go through it one at a time, behind a dense prefill.

Every prediction that is scored comes from a decode step (one query token against a filled static cache), none from a
prefill: an evaluation that runs the text through in one pass would never touch what decode attention does.

Dimension letters: L tokens of the text and slots of the cache, N tokens at its end that are predicted, V the vocabulary.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: One decode step: ``(token ids [1, 1], cache) -> logits [1, V]``; the cache grows by one token.
Step = Callable[[Tensor, Any], Tensor]


def cache_argument(forward: Callable[..., Any]) -> str:
    """What a model's ``forward`` calls its KV cache: transformers renames ``past_key_values`` to ``cache``."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def step_of(forward: Callable[..., Any]) -> Step:
    """A decode step out of a model's ``forward``, as it is or compiled."""
    name = cache_argument(forward)

    def step(token: Tensor, cache: Any) -> Tensor:
        return forward(input_ids=token, use_cache=True, **{name: cache}).logits[:, -1]

    return step


@torch.no_grad()
def prefill(model: Any, ids: Tensor, slots: int) -> Any:
    """A static cache of ``slots`` tokens that holds those of ``ids [1, n]``, n <= slots, as dense attention left them."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=slots)
    model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_argument(model.forward): cache})
    return cache


def like(model: Any, source: Any) -> Any:
    """Another cache with the content of ``source``; decode on it, and ``restore`` it, while ``source`` stays as it is."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=source.layers[0].max_cache_len)
    for new, old in zip(cache.layers, source.layers, strict=True):
        new.lazy_initialization(old.keys, old.values)
    restore(cache, source)
    return cache


def restore(cache: Any, source: Any) -> None:
    """Gives ``cache`` the content of ``source`` again, in place: the tensors stay the ones that a compiled graph knows."""
    for new, old in zip(cache.layers, source.layers, strict=True):
        new.keys.copy_(old.keys)
        new.values.copy_(old.values)
        new.cumulative_length.copy_(old.cumulative_length)


@dataclass(frozen=True)
class Decoded:
    """``log_probs`` fp32 ``[N, V]`` on the CPU: of each of the N tokens, given the text before it.

    ``seconds`` is the time of the N steps, less the first two (they compile).
    """

    log_probs: Tensor
    seconds: float

    @property
    def steps_per_second(self) -> float:
        return max(len(self.log_probs) - 2, 0) / self.seconds if self.seconds else float("nan")


@torch.no_grad()
def decode(step: Step, cache: Any, tokens: Tensor) -> Decoded:
    """Feeds ``tokens [N]`` one by one; the cache holds what comes before them. Row i predicts the token after ``tokens[i]``."""
    out, started = [], time.perf_counter()
    for i, token in enumerate(tokens):
        if i == 2:
            started = time.perf_counter()
        logits = step(token.reshape(1, 1), cache)
        out.append(logits[0].float().log_softmax(-1).cpu())
    return Decoded(torch.stack(out), time.perf_counter() - started if len(tokens) > 2 else 0.0)


@dataclass(frozen=True)
class Scores:
    """Of N predictions. ``nll`` in nats per token; ``kl`` is KL(dense || this), nats; ``top1`` the share of equal argmaxes."""

    nll: float
    kl: float
    top1: float

    @property
    def perplexity(self) -> float:
        return float(torch.tensor(self.nll).exp())


def score(log_probs: Tensor, dense: Tensor, targets: Tensor) -> Scores:
    """``log_probs`` and ``dense`` fp32 ``[N, V]``, ``targets`` int64 ``[N]``, the tokens that came."""
    targets = targets.cpu()
    nll = -log_probs.gather(1, targets[:, None]).double().mean()
    kl = (dense.exp() * (dense - log_probs)).sum(-1).double().mean()
    top1 = (log_probs.argmax(-1) == dense.argmax(-1)).double().mean()
    return Scores(float(nll), float(kl), float(top1))
