"""Attention: what a softmax over scores looks like, and which of its values are queries, keys and values.

An anchor is a reader registered by name for the operator in which it recognises an attention. It returns a ``Found``; it
raises ``Refused`` where it sees an attention that must be left alone, or returns None where the node is none of its own.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from fasa_compile.patterns import graph
from fasa_compile.patterns.tables import Tables
from fasa_compile.sites import Expr

aten = torch.ops.aten
MaskKind = Literal["none", "bool", "additive"]


class Refused(Exception):
    """An attention that is left as it was. ``reason`` is one of ``sites.REASONS``."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Found:
    """An attention as its anchor reads it, before anything is known about its keys.

    ``q``, ``k`` and ``v`` are ``[B, Hq, T, D]``, ``[B, Hq, L, D]`` and ``[B, Hq, L, Dv]``: heads of k and v repeated as the
    attention reads them (by views; heads that are broadcast are expanded). ``output`` is the shadow node of the result and
    ``output_steps`` lead from ``[B, Hq, T, Dv]`` to its layout.
    """

    anchor: str
    output: fx.Node
    q: Expr
    k: Expr
    v: Expr
    scale: float
    mask: Expr | None = None
    mask_kind: MaskKind = "none"
    is_causal: bool = False
    softcap: float = 0.0
    sinks: Expr | None = None
    output_steps: tuple[tuple[Any, tuple[Any, ...]], ...] = ()
    repeat: int = 1  # query heads per head of k, v where the operator itself groups them (enable_gqa)
    notes: tuple[str, ...] = ()


Anchor = Callable[[fx.Node, Tables], Found | None]
ANCHORS: dict[str, tuple[frozenset[str], Anchor]] = {}


def register(name: str, *operators: str) -> Callable[[Anchor], Anchor]:
    """Add an anchor called ``name`` for nodes that call one of ``operators`` (``softmax``, ``mylib.attention``, ``*.attention``)."""

    def add(anchor: Anchor) -> Anchor:
        ANCHORS[name] = (frozenset(operators), anchor)
        return anchor

    return add


def heads_of(expr: Expr, size: tuple[int, ...], heads: int) -> Expr:
    """[B, 1, L, D] of broadcast heads, as [B, heads, L, D]; anything else unchanged."""
    return expr.then(aten.expand.default, [-1, heads, -1, -1]) if size[1] == 1 and heads > 1 else expr


@register("sdpa", "scaled_dot_product_attention")
def _sdpa(node: fx.Node, tables: Tables) -> Found | None:
    """``F.scaled_dot_product_attention(q, k, v, mask, ...)`` on [B, H, T, D]: one head of k may serve all (broadcasting)."""
    q, k, v = graph.args(node)[:3]
    if not all(graph.is_tensor(x) for x in (q, k, v)):
        return None
    mask = graph.args(node)[3] if len(graph.args(node)) > 3 else node.kwargs.get("attn_mask")
    dropout = graph.argument(node, 4, "dropout_p", 0.0)
    is_causal = bool(graph.argument(node, 5, "is_causal", False))
    scale: Any = graph.args(node)[6] if len(graph.args(node)) > 6 else node.kwargs.get("scale")
    grouped = bool(graph.argument(node, 7, "enable_gqa", False))
    qs, ks, vs = (graph.shape(x) for x in (q, k, v))
    if not len(qs) == len(ks) == len(vs) == 4:
        raise Refused("unknown-attention", f"expected q, k, v of 4 dims, found {len(qs)}, {len(ks)}, {len(vs)}")
    if qs[0] != ks[0] or ks[0] != vs[0]:
        raise Refused("unknown-attention", f"the batch is broadcast: q {qs}, k {ks}, v {vs}")
    if dropout:
        raise Refused("dropout", f"dropout_p={dropout}")
    if is_causal and qs[2] == 1 and ks[2] > 1:
        raise Refused("causal-single-query", f"1 query, {ks[2]} keys")
    if scale is None:
        if not isinstance(graph.tensor(q).shape[-1], int):
            raise Refused("unsupported-value", "the default scale of a head whose size is a symbol")
        scale = 1.0 / math.sqrt(qs[-1])
    if isinstance(scale, fx.Node):
        raise Refused("unsupported-value", f"scale is computed by {scale.name}")
    repeat = qs[1] // ks[1] if grouped and ks[1] else 1
    if grouped and (ks[1] != vs[1] or repeat * ks[1] != qs[1]):
        raise Refused("heads", f"enable_gqa with {qs[1]} query heads, {ks[1]} key heads, {vs[1]} value heads")
    key, value = Expr(k), Expr(v)
    if not grouped:
        key, value = heads_of(key, ks, qs[1]), heads_of(value, vs, qs[1])
        if (ks[1] not in (1, qs[1])) or (vs[1] not in (1, qs[1])) or qs[1] == 1 != ks[1]:
            raise Refused("heads", f"{qs[1]} query heads, {ks[1]} key heads, {vs[1]} value heads")
    masked, kind = mask_of(mask, qs, ks)
    return Found(
        anchor="sdpa",
        output=node,
        q=Expr(q),
        k=key,
        v=value,
        scale=float(scale),
        mask=masked,
        mask_kind=kind,
        is_causal=is_causal,
        repeat=repeat,
    )


def mask_of(mask: Any, q: tuple[int, ...], k: tuple[int, ...]) -> tuple[Expr | None, MaskKind]:
    """A mask argument as an ``Expr`` that broadcasts to [B, Hq, T, L], and its kind by dtype."""
    if mask is None:
        return None, "none"
    size, full = graph.shape(mask), (q[0], q[1], q[2], k[2])
    if len(size) > 4 or any(s not in (1, f) for s, f in zip(reversed(size), reversed(full), strict=False)):
        raise Refused("unknown-mask", f"a mask of {size} for scores of {full}")
    return Expr(mask), "bool" if graph.tensor(mask).dtype == torch.bool else "additive"


def first_result(node: fx.Node, tables: Tables) -> fx.Node:
    """The attention's result among several; raises ``Refused`` where another one (a log-sum-exp) matters to what the graph gives."""
    results = {graph.args(user)[1]: user for user in node.users if graph.name(user) == "getitem"}
    if 0 not in results:
        raise Refused("unknown-attention", f"the result of {node.name} is not used")
    for user in node.users:
        if user is not results[0] and user in tables.shadow.needed:
            raise Refused("unknown-attention", f"{user.name} reads more of {node.name} than the attention's result")
    return results[0]


def anchors_at(node: fx.Node) -> list[tuple[str, Anchor]]:
    """The anchors registered for a node's operator, first registered first."""
    kind, written = graph.name(node), graph.written(node)
    if written:
        kind = graph.op_name(graph.args(node)[0])
    return [
        (name, _writer if written else anchor)
        for name, (operators, anchor) in ANCHORS.items()
        if kind and (kind in operators or any("*" in o and fnmatch.fnmatchcase(kind, o) for o in operators))
    ]


def _writer(node: fx.Node, tables: Tables) -> Found | None:
    """An attention that also writes its arguments: replaced, the write would be lost."""
    names = ", ".join(graph.written(node))
    raise Refused(
        "unknown-cache-write",
        f"{graph.op_name(graph.args(node)[0])} writes {names} itself: write the new keys and values into the cache before the call, "
        "by an operator that only reads it",
    )
