"""Ways to choose the tokens that a decode step attends to: ours, an oracle, and small reference implementations of others.

Each takes a ``Scene`` (one layer, every new query) and gives a bool mask ``[Hq, n, L]``: which keys each query head attends to.
They are written for clarity and for equal terms: one budget of tokens, and the bytes that each reads per token and KV head to
choose them (``Method.bytes``). Where a published method has a choice, it gets the kinder one; that is said at the method.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fasa_compile.profiles import Budget, LayerProfile
from fasa_compile.triton_kernels import reference
from fasa_compile.triton_kernels.formats import bytes_per_token

PAGE = 16  # tokens of a page (Quest)
WINDOW = 32  # last queries of the prompt that vote (SnapKV)
POOL = 7  # width of the pooling of their votes (SnapKV)


@dataclass(frozen=True)
class Scene:
    """One layer: ``q [Hq, n, D]`` and ``k [Hkv, L, D]`` fp32 after RoPE; ``allowed`` bool ``[n, L]``.

    ``prompt`` counts the keys that were there before the first query; ``voters [Hq, w, D]`` are the prompt's last queries,
    query ``i`` of them at position ``prompt - w + i``. ``v [Hkv, L, Dv]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    allowed: Tensor
    scale: float
    layer: str
    prompt: int
    voters: Tensor

    @property
    def group(self) -> int:
        return self.q.shape[0] // self.k.shape[0]

    def scores(self) -> Tensor:
        """Exact scores ``[Hkv, G, n, L]``, -inf where not allowed."""
        q = self.q.unflatten(0, (-1, self.group))
        return (self.scale * (q @ self.k[:, None].transpose(2, 3))).masked_fill(~self.allowed, -math.inf)

    def forced(self, n_sink: int, n_recent: int) -> Tensor:
        """bool ``[n, L]``: the first ``n_sink`` and the last ``n_recent`` keys that a query may see."""
        rank = self.allowed.cumsum(1)
        return self.allowed & ((rank <= n_sink) | (rank > rank[:, -1:] - n_recent))

    def best(self, key: Tensor, keep: int, forced: Tensor | None = None) -> Tensor:
        """bool like ``key [..., n, L]``: the ``keep`` highest allowed keys, the forced ones first of all."""
        key = key.masked_fill(~self.allowed, -math.inf)
        if forced is not None:
            key = key.masked_fill(forced, math.inf)
        top = key.topk(min(keep, key.shape[-1]), dim=-1).indices
        return torch.zeros_like(key, dtype=torch.bool).scatter_(-1, top, True) & self.allowed

    def per_head(self, chosen: Tensor) -> Tensor:
        """A choice per KV head ``[Hkv, n, L]`` for each of its query heads."""
        return chosen.repeat_interleave(self.group, 0)


Selector = Callable[[Scene], Tensor]


@dataclass(frozen=True)
class Method:
    """A selector, the bytes it reads per token and KV head to choose, and its set: per query head or per KV head."""

    select: Selector
    bytes: float
    sets: str
    note: str = ""
    attends_all: bool = field(default=False)  # exact attention over everything, selection ignored


def group_key(scores: Tensor, level: Tensor | None, reduction: str) -> Tensor:
    """``[Hkv, G, n, L]`` -> ``[Hkv, n, L]``: the one key by which a group ranks tokens (``reference.sparse_decode``).

    ``level``: what is taken from a head's scores first, broadcastable to ``[Hkv, G, n, 1]``."""
    if reduction == "softmax_sum":
        scores = scores - scores.logsumexp(-1, keepdim=True)
    elif level is not None:
        scores = scores - level
    return scores.amax(1) if reduction == "max" else scores.logsumexp(1)


def tip_scores(scene: Scene, layer: LayerProfile, fmt: str) -> Tensor:
    """Scores by the layer's dominant FCs from the packed FC cache: ``[Hkv, G, n, L]``, -inf where not allowed."""
    centre, spread = (x.to(scene.k.device) for x in layer.gathered())
    dims = layer.dims().to(scene.k.device)
    data, meta = reference.pack(scene.k[None], dims, centre, spread, fmt)
    rows = scene.q.reshape(1, scene.k.shape[0], -1, scene.q.shape[2])  # a query's rounding is its own
    found = reference._tip_scores(rows, data, meta, dims, spread, scene.scale, fmt)
    return found.view(scene.k.shape[0], scene.group, *scene.allowed.shape).masked_fill(~scene.allowed, -math.inf)


def level(scene: Scene, layer: LayerProfile, reduction: str) -> Tensor:
    """The constant of each query head, or its affine normaliser: ``[Hkv, G, n or 1, 1]``."""
    heads = (scene.k.shape[0], scene.group)
    if reduction != "affine":
        return layer.norm.to(scene.q.device).view(*heads, 1, 1)
    affine = layer.affine.to(scene.q.device)
    at = affine[:, :1] + scene.scale * (scene.q * affine[:, None, 1:]).sum(-1)  # [Hq, n]
    return at.view(*heads, -1, 1)


def fasa(
    layers: dict[str, LayerProfile],
    budget: Budget,
    fmt: str = "int4",
    reduction: str | None = "static",
    forced: bool = True,
) -> Method:
    """Selection by dominant FCs. ``reduction=None``: a set per query head, as the paper has it."""

    def select(scene: Scene) -> Tensor:
        layer = layers[scene.layer]
        keep = budget.n_fac if layer.n_fac is None else layer.n_fac
        scores = tip_scores(scene, layer, fmt)
        always = scene.forced(budget.n_sink, budget.n_recent) if forced else None
        if reduction is None:
            return scene.best(scores, keep, always).flatten(0, 1)
        return scene.per_head(scene.best(group_key(scores, level(scene, layer, reduction), reduction), keep, always))

    width = max(2 * layer.n_tip for layer in layers.values())
    return Method(select, bytes_per_token(width, fmt), "query head" if reduction is None else "KV head")


def dense() -> Method:
    return Method(lambda scene: scene.allowed.expand(scene.q.shape[0], -1, -1), 0, "-", attends_all=True)


def oracle(n_fac: int) -> Method:
    """The true ``n_fac`` highest scores of every query head; reads every K row."""
    return Method(lambda s: s.best(s.scores(), n_fac).flatten(0, 1), math.nan, "query head", "reads all of K")


def oracle_shared(budget: Budget) -> Method:
    """One set per KV head by exact softmax-sum, with forced tokens: what perfect FCs would give us."""

    def select(scene: Scene) -> Tensor:
        key = group_key(scene.scores(), None, "softmax_sum")
        return scene.per_head(scene.best(key, budget.n_fac, scene.forced(budget.n_sink, budget.n_recent)))

    return Method(select, math.nan, "KV head", "reads all of K")


def streaming(budget: Budget) -> Method:
    """StreamingLLM: the first ``n_sink`` tokens and the last ones."""
    keep = budget.n_fac - budget.n_sink
    return Method(lambda s: s.forced(budget.n_sink, keep).expand(s.q.shape[0], -1, -1), 0, "all heads")


def quest(budget: Budget, head_dim: int, key_bytes: int = 2) -> Method:
    """Quest (arXiv 2406.10774): pages of 16 by their keys' least and greatest values per dim, per query head.

    The kinder choice: sinks and recent tokens as ours (their pages come first).
    """

    def select(scene: Scene) -> Tensor:
        length = scene.k.shape[1]
        pages = -(-length // PAGE)
        padded = torch.nn.functional.pad(scene.k, (0, 0, 0, pages * PAGE - length), value=math.nan)
        padded = padded.view(scene.k.shape[0], pages, PAGE, -1)
        low = padded.nan_to_num(nan=math.inf).amin(2)
        high = padded.nan_to_num(nan=-math.inf).amax(2)
        q = scene.q.unflatten(0, (-1, scene.group))
        bound = q.clamp(min=0) @ high[:, None].transpose(2, 3) + q.clamp(max=0) @ low[:, None].transpose(2, 3)

        def paged(mask: Tensor) -> Tensor:
            return torch.nn.functional.pad(mask, (0, pages * PAGE - length)).view(-1, pages, PAGE).any(2)

        bound = bound.masked_fill(~paged(scene.allowed), -math.inf)
        bound = bound.masked_fill(paged(scene.forced(budget.n_sink, budget.n_recent)), math.inf)
        top = bound.topk(min(budget.n_fac // PAGE, pages), dim=-1).indices
        chosen = torch.zeros_like(bound, dtype=torch.bool).scatter_(-1, top, True)
        return (chosen.repeat_interleave(PAGE, -1)[..., :length] & scene.allowed).flatten(0, 1)

    cost = 2 * head_dim * key_bytes / PAGE
    return Method(select, cost, "query head", f"{PAGE} tokens a page, 2 x D values a page")


def snapkv(budget: Budget) -> Method:
    """SnapKV (arXiv 2404.14469): the last queries of the prompt vote, pooled, once; what is decoded is kept besides.

    One set per KV head (votes summed over its query heads). As published, decoded tokens come on top of the budget.
    """

    def select(scene: Scene) -> Tensor:
        w = scene.voters.shape[1]
        prompt = scene.prompt
        q = scene.voters.unflatten(0, (-1, scene.group))
        scores = scene.scale * (q @ scene.k[:, None, :prompt].transpose(2, 3))
        at = torch.arange(prompt, device=scores.device)
        scores = scores.masked_fill(at[None, :] > prompt - w + torch.arange(w, device=at.device)[:, None], -math.inf)
        votes = scores.softmax(-1).sum((1, 2))  # [Hkv, prompt]
        votes = torch.nn.functional.avg_pool1d(votes[:, None], POOL, 1, POOL // 2)[:, 0]
        votes[:, prompt - w :] = math.inf
        kept = torch.zeros_like(votes, dtype=torch.bool)
        kept.scatter_(-1, votes.topk(min(budget.n_fac, prompt), dim=-1).indices, True)
        mask = torch.cat([kept, kept.new_ones(len(kept), scene.k.shape[1] - prompt)], 1)
        return scene.per_head(mask[:, None, :] & scene.allowed)

    return Method(select, 0, "KV head", "drops tokens for good; decoded tokens on top of the budget")


def sparq(budget: Budget, dims: int) -> Method:
    """SparQ (arXiv 2312.04985): the ``dims`` largest |q| of each query choose the dims of K to read, per query head.

    Scores are rescaled as published, which changes no ranking within a head; without the mean-value correction. The kinder
    choice: sinks and recent tokens as ours.
    """

    def select(scene: Scene) -> Tensor:
        top = scene.q.abs().topk(dims, dim=-1).indices
        thin = torch.zeros_like(scene.q).scatter_(-1, top, scene.q.gather(-1, top)).unflatten(0, (-1, scene.group))
        scores = thin @ scene.k[:, None].transpose(2, 3)
        return scene.best(scores, budget.n_fac, scene.forced(budget.n_sink, budget.n_recent)).flatten(0, 1)

    return Method(select, 2 * dims, "query head", f"{dims} dims of K in bf16, picked per query")


def double_sparsity(channels: dict[str, Tensor], budget: Budget) -> Method:
    """Double Sparsity (arXiv 2408.07092): fixed channels per query head, by calibrated mean |q_d k_d|, labels in 4 bits.

    ``channels`` int64 ``[Hq, r]`` by layer. The kinder choice: sinks and recent tokens as ours, and labels centred and scaled
    by nothing but their own token's range, as our int4 is.
    """

    def select(scene: Scene) -> Tensor:
        picked = channels[scene.layer].to(scene.q.device)
        k = scene.per_head(scene.k).gather(2, picked[:, None, :].expand(-1, scene.k.shape[1], -1))
        q = scene.q.gather(2, picked[:, None, :].expand(-1, scene.q.shape[1], -1))
        low, high = k.amin(-1, keepdim=True), k.amax(-1, keepdim=True)
        step = ((high - low) / 15).clamp(min=1e-12)
        k = ((k - low) / step).round() * step + low
        return scene.best(q @ k.transpose(1, 2), budget.n_fac, scene.forced(budget.n_sink, budget.n_recent))

    width = next(iter(channels.values())).shape[1]
    return Method(select, bytes_per_token(width, "int4"), "query head")
