"""Small attentions put together from a rotary embedding, a cache and a way to attend, and what matching says about them.

B 1    Hq 4    Hkv 2    D 16    S 24 (size of a static cache)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fasa_compile.capture import Shadow, capture
from fasa_compile.match import match
from fasa_compile.sites import AttentionSite, Expr, NoMatch

B, HQ, HKV, D, S, WIDTH = 1, 4, 2, 16, 24, 32
INVERSE_FREQUENCY = 10000.0 ** (-torch.arange(0, D, 2).float() / D)


class Attention(nn.Module):
    """x [B, T, WIDTH], pos int64 [T] -> [B, T, HQ * D]. ``rope(q, k, pos)`` gets and gives [B, H, T, D]."""

    def __init__(
        self,
        rope: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
        cache: nn.Module,
        attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        kv_heads: int = HKV,
    ) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.q = nn.Linear(WIDTH, HQ * D, bias=False)
        self.k = nn.Linear(WIDTH, kv_heads * D, bias=False)
        self.v = nn.Linear(WIDTH, kv_heads * D, bias=False)
        self.rope, self.cache, self.attend = rope, cache, attend

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, HQ, D).transpose(1, 2)
        k = self.k(x).view(b, t, self.kv_heads, D).transpose(1, 2)
        v = self.v(x).view(b, t, self.kv_heads, D).transpose(1, 2)
        q, k = self.rope(q, k, pos)
        k, v = self.cache(k, v, pos)
        return self.attend(q, k, v, pos).transpose(1, 2).reshape(b, t, HQ * D)


def angles(pos: Tensor) -> Tensor:
    """[T, D / 2]"""
    return pos.float()[:, None] * INVERSE_FREQUENCY.to(pos.device)


def half_split(q: Tensor, k: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    a = angles(pos)
    cos, sin = torch.cat([a, a], -1).cos(), torch.cat([a, a], -1).sin()

    def turn(x: Tensor) -> Tensor:
        return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin

    return turn(q), turn(k)


class Static(nn.Module):
    """K and V in buffers [B, HKV, S, D], written by index_copy_."""

    def __init__(self, heads: int = HKV) -> None:
        super().__init__()
        self.register_buffer("keys", torch.randn(B, heads, S, D))
        self.register_buffer("values", torch.randn(B, heads, S, D))

    def forward(self, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, pos, k)
        self.values.index_copy_(2, pos, v)
        return self.keys, self.values


def repeated(x: Tensor) -> Tensor:
    b, h, length, d = x.shape
    return x[:, :, None].expand(b, h, HQ // h, length, d).reshape(b, HQ, length, d)


def visible(pos: Tensor, length: int) -> Tensor:
    """Boolean [1, 1, T, L]: the keys up to the query's own position."""
    return (torch.arange(length, device=pos.device) <= pos[:, None])[None, None]


def sdpa(q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    mask = visible(pos, k.shape[2])
    return nn.functional.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)


@dataclass
class Matched:
    """What matching found in one graph, and the values of the graph's nodes on the inputs it was traced with."""

    shadow: Shadow
    sites: list[AttentionSite | NoMatch]
    values: dict[fx.Node, Any]

    @property
    def site(self) -> AttentionSite:
        (site,) = self.sites
        assert isinstance(site, AttentionSite), site
        return site

    @property
    def refused(self) -> NoMatch:
        (refused,) = self.sites
        assert isinstance(refused, NoMatch), refused
        return refused

    def value(self, expr: Expr) -> Tensor:
        return applied(self.values[expr.node], expr.steps)


def applied(x: Tensor, steps: Any) -> Tensor:
    for op, args in steps:
        x = op(x, *args)
    return x


class _Values(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.seen: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.seen[n] = result = super().run_node(n)
        return result


def run_matched(module: nn.Module, *inputs: Any, dynamic: bool = False) -> Matched:
    """Compile a module with a backend that only captures and matches, and run it once."""
    found: list[Matched] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Callable[..., Any]:
        shadow = capture(gm, example_inputs)
        sites = match(shadow)
        values = _Values(shadow.gm)
        with torch.no_grad():
            values.run(
                *(
                    x.clone() if isinstance(x, Tensor) else x.node.hint if isinstance(x, torch.SymInt) else x
                    for x in example_inputs
                )
            )
        found.append(Matched(shadow, sites, values.seen))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    (matched,) = found
    return matched


def decode(module: nn.Module, position: int = 9, dynamic: bool = False) -> Matched:
    """One decode step of an ``Attention``: one token at ``position``."""
    torch.manual_seed(1)
    return run_matched(module, torch.randn(B, 1, WIDTH), torch.tensor([position]), dynamic=dynamic)


def prefill(module: nn.Module, tokens: int = 6) -> Matched:
    torch.manual_seed(1)
    return run_matched(module, torch.randn(B, tokens, WIDTH), torch.arange(tokens))


def check_numbers(matched: Matched, site: AttentionSite | None = None) -> None:
    """Recompute the attention in plain torch from what the site says, and compare with the graph's own result.

    Where the cache is a written buffer, also: the buffer brought to [B, Hkv, L, D] is ``k``, and all rows but ``slots`` are what
    they were before.
    """
    site = site or matched.site
    q, k, v = (matched.value(e).double() for e in (site.q, site.k, site.v))
    b, hq, hkv, t, length, d, dv = (int(s.node.hint) if isinstance(s, torch.SymInt) else s for s in site.shape)
    assert q.shape == (b, hq, t, d) and k.shape == (b, hkv, length, d) and v.shape == (b, hkv, length, dv)
    k, v = k.repeat_interleave(hq // hkv, 1), v.repeat_interleave(hq // hkv, 1)
    scores = q @ k.mT * site.scale
    if site.softcap:
        scores = site.softcap * torch.tanh(scores / site.softcap)
    if site.is_causal:
        scores = scores.masked_fill(~torch.ones(t, length, dtype=torch.bool).tril(), float("-inf"))
    if site.mask is not None:
        mask = matched.value(site.mask)
        assert (mask.dtype == torch.bool) == (site.mask_kind == "bool")
        torch.broadcast_shapes(mask.shape, scores.shape)
        scores = scores.masked_fill(~mask, float("-inf")) if site.mask_kind == "bool" else scores + mask
    if site.sinks is not None:
        sinks = matched.value(site.sinks)
        assert sinks.shape == (hq,)
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(b, hq, t, 1)], -1)
    weights = scores.softmax(-1)[..., :length]
    expected = matched.values[matched.shadow.history[site.output][0][1]]
    got = applied(weights @ v, site.output_steps)
    assert got.shape == expected.shape
    torch.testing.assert_close(
        got, expected.double(), atol=2e-2 if expected.dtype == torch.bfloat16 else 1e-5, rtol=1e-3
    )
    if site.cache.k_input is not None:
        _check_buffer(matched, site)


def _check_buffer(matched: Matched, site: AttentionSite) -> None:
    i = site.cache.k_input
    assert i is not None
    now = matched.values[matched.shadow.final[i]]
    if not site.cache.rewritten_later:
        torch.testing.assert_close(
            applied(now, site.cache.k_steps).to(matched.value(site.k).dtype), matched.value(site.k)
        )
    if site.cache.slots is not None:
        slots = matched.value(site.cache.slots)
        assert slots.dtype == torch.int64 and slots.shape[-1] == site.shape[3]
        before = applied(matched.values[matched.shadow.inputs[i]], site.cache.k_steps)
        after = matched.value(site.k)
        changed = (before != after).any(-1).any(1)  # [B, L]
        rows = torch.zeros_like(changed).scatter_(1, slots.expand(changed.shape[0], -1), True)
        assert (changed == rows).all()
