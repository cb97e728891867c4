"""FASA decode in a model that runs uncompiled, by calls that torch itself hands over: a plain reference for any model.

A ``TorchFunctionMode`` sees every SDPA call and every softmax of a decode step, whatever the model. Where the module at hand has an
entry, the tokens that the specification (``triton_kernels/reference.py``) ranks lowest are hidden from it. Nothing is read from a
graph: queries, keys and scores are those of the call, the number of KV heads is the profile's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fasa_compile.profiles import Budget, FCProfile, LayerProfile
from fasa_compile.triton_kernels import reference

#: (profile entry or None for all dims, query heads, KV heads, softcap) of an attention.
Entry = tuple[LayerProfile | None, int, int, float]

_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
_SOFTMAX = {torch.softmax, Tensor.softmax, F.softmax}


class PlainFasa(TorchFunctionMode):
    """``entries[(module, n)]`` is for the n-th attention (from 1) that a module computes in one call of the model."""

    def __init__(
        self, model: nn.Module, entries: dict[tuple[nn.Module, int], Entry], profile: FCProfile | None, budget: Budget
    ):
        super().__init__()
        self.model, self.entries, self.profile, self.budget = model, entries, profile, budget
        self.stack: list[nn.Module] = []
        self.runs: Counter[nn.Module] = Counter()
        self.product: tuple[Tensor, Tensor, Tensor] | None = None
        self.applied = 0  # attentions that hid tokens, in the call at hand
        self.closest = float(
            "inf"
        )  # smallest gap between the keys of the last token kept and the first one hidden, since start

    @contextmanager
    def following(self) -> Iterator[None]:
        """Inside, the module whose ``forward`` runs is known."""
        hooks = []
        for module in self.model.modules():
            hooks.append(module.register_forward_pre_hook(lambda m, _: self.stack.append(m)))
            hooks.append(module.register_forward_hook(lambda *_: self.stack.pop() and None, always_call=False))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._sdpa(func, *args, **kwargs)
        if func in _SOFTMAX and args[0].dim() >= 3:
            return func(self._scores(args[0]), *args[1:], **kwargs)
        result = func(*args, **kwargs)
        if func in _PRODUCTS and args[0].dim() >= 3:
            self.product = (args[0], args[1], result)
        elif func is torch.baddbmm or func is Tensor.baddbmm:
            self.product = (args[1], args[2], result)
        elif func is torch.einsum and len(args) == 3:
            self.product = _as_product(*args, result) or self.product
        return result

    def _entry(self) -> Entry | None:
        module = self.stack[-1] if self.stack else self.model
        self.runs[module] += 1
        return self.entries.get((module, self.runs[module]))

    def start(self) -> None:
        self.runs.clear()
        self.applied = 0
        self.closest = float("inf")

    def _kept(self, entry: Entry, q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """``q [B, Hq, 1, D]``, ``k [B, H, L, D]`` with H the KV heads, 1, or Hq of them repeated: bool ``[B, Hq, 1, L]``."""
        layer, _, heads, softcap = entry
        group = q.shape[1] // heads
        tiled = False
        if k.shape[1] == q.shape[1] and group > 1:
            tiled = not torch.equal(k[:, 0], k[:, 1])
            k = k[:, :heads] if tiled else k[:, ::group]
        if tiled:
            q = q.unflatten(1, (group, heads)).transpose(1, 2).flatten(1, 2)
        b = self.budget
        options: dict[str, Any] = dict(scale=scale, n_sink=b.n_sink, n_recent=b.n_recent, softcap=softcap)
        if layer is None:
            key = reference.tip_keys(q, k, None, None, None, None, None, mask, **options, reduction="softmax_sum")
        else:
            assert self.profile is not None
            centre, spread = layer.gathered()
            fmt, dims = self.profile.fc_format, layer.dims()
            data, meta = reference.pack(k, dims, centre, spread, fmt)
            norm, slopes = layer.normaliser(self.profile.reduction)
            key = reference.tip_keys(
                q, k, data, meta, dims, spread, norm, mask, **options, fmt=fmt, reduction=self.profile.reduction,
                slopes=slopes,
            )  # fmt: skip
        order = key.argsort(dim=-1, descending=True, stable=True)
        if b.n_fac < key.shape[-1]:
            edge = order[..., b.n_fac - 1 : b.n_fac + 1]
            last, following = key.gather(-1, edge).unbind(-1)
            # Equal rows of K have equal keys, whoever computes them: their index decides and no rounding.
            rows = k.gather(2, edge[..., None].expand(-1, -1, -1, k.shape[-1]))
            twins = (rows[:, :, 0] == rows[:, :, 1]).all(-1) & (last == following)
            gaps = (last - following)[last.isfinite() & following.isfinite() & ~twins]
            self.closest = min([self.closest, *gaps.tolist()])
        kept = torch.zeros_like(key, dtype=torch.bool).scatter_(-1, order[..., : b.n_fac], True) & (key > -torch.inf)
        kept = kept.repeat(1, group, 1) if tiled else kept.repeat_interleave(group, 1)
        self.applied += 1
        return kept[:, :, None]

    def _sdpa(
        self, func: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, *args: Any, **kw: Any
    ) -> Tensor:
        entry = self._entry()
        if entry is None or q.shape[1] * q.shape[2] != entry[1]:
            return func(q, k, v, attn_mask, *args, **kw)
        scale = kw.get("scale") or q.shape[-1] ** -0.5
        # transformers may hand over the query heads of a group in place of tokens: [B, Hkv, G, D].
        one = q.reshape(q.shape[0], entry[1], 1, q.shape[3])
        seen = attn_mask
        if seen is not None and q.shape[2] > 1:
            each = seen.expand(-1, q.shape[1], q.shape[2], -1).flatten(1, 2)[:, :, None]
            seen = each if seen.dim() == 4 and seen.shape[1:3] != (1, 1) else seen
        kept = self._kept(entry, one, k, seen, scale)
        if q.shape[2] > 1:
            kept = kept[:, :: q.shape[2]]
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            mask = torch.where(kept, attn_mask, -torch.inf)
        else:
            mask = kept if attn_mask is None else kept & attn_mask
        return func(q, k, v, mask, *args, **{**kw, "is_causal": False})

    def _scores(self, x: Tensor) -> Tensor:
        """The input of a softmax ``[..., 1, L or L + 1]``, where it is an attention's with an entry: -inf at tokens not kept."""
        if self.product is None:
            return x
        q, k, product = self.product
        length = k.shape[-1]
        if k.dim() < 3 or q.shape[-2] != 1 or x.shape[-1] not in (length, length + 1) or x.shape[-2] != 1:
            return x
        self.product = None
        entry = self._entry()
        if entry is None:
            return x
        s = x[..., :length].float()
        batch, heads = x.shape[0], entry[1]
        q, k = q.reshape(batch, heads, 1, -1), k.reshape(batch, -1, *k.shape[-2:])
        visible = s.reshape(batch, heads, 1, length) > -1e8
        bare = entry[3] * (s / entry[3]).clamp(-1 + 1e-6, 1 - 1e-6).atanh() if entry[3] else s
        # The scale is the slope of the scores over the products, in one head: some models subtract the largest score first.
        seen = visible.reshape(batch, heads, length)[0, 0]
        xs, ys = (
            product.reshape(batch, heads, length)[0, 0][seen].double(),
            bare.reshape(batch, heads, length)[0, 0][seen].double(),
        )
        scale = float((xs - xs.mean()) @ (ys - ys.mean()) / (xs - xs.mean()).square().sum())
        kept = self._kept(entry, q, k.mT, visible, scale)
        hidden = x[..., :length].masked_fill(~kept.reshape(s.shape), -torch.inf)
        return torch.cat([hidden, x[..., length:]], -1)


def _as_product(equation: str, a: Tensor, b: Tensor, result: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Scores by einsum as ``q [..., 1, D]``, ``k [..., D, L]`` and the result, where one letter is summed and the last is L."""
    left, out = equation.replace(" ", "").split("->")
    of_a, of_b = left.split(",")
    summed = [c for c in of_a if c in of_b and c not in out]
    length = out[-1]
    if len(summed) != 1 or length not in of_b or length in of_a:
        return None
    q = a.permute([of_a.index(c) for c in (*out[:-1], *summed)])
    k = b.permute([of_b.index(c) for c in (*(c for c in out[:-1] if c in of_b), *summed, length)])
    return q, k, result
