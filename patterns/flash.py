"""The flash-attn package's operators: tokens before heads ([B, T, H, D]), causal masks aligned to the last token.

Arguments are read by the names in the operator's schema, so that versions 2 and 3, builds under hashed namespaces and a user's own
wrapper of ``flash_attn_with_kvcache`` are one reader. Read against the package's documentation; it is not needed to match.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from fasa_compile.patterns import graph
from fasa_compile.patterns.attention import Found, Refused, first_result, register
from fasa_compile.patterns.tables import Tables
from fasa_compile.patterns.traced import traced
from fasa_compile.sites import Expr

aten = torch.ops.aten
#: Arguments that change what is computed in a way no site can say. Each is refused by its name.
_REFUSED = {
    "alibi_slopes": "a bias by distance (ALiBi)",
    "block_table": "a paged cache",
    "page_table": "a paged cache",
    "leftpad_k": "keys that start at another row per sequence",
    "cache_leftpad": "keys that start at another row per sequence",
    "cache_batch_idx": "sequences that read other rows of the cache's batch",
    "kv_batch_idx": "sequences that read other rows of the cache's batch",
    "rotary_cos": "a rotary embedding inside the operator, whose keys are never seen unturned",
    "rotary_sin": "a rotary embedding inside the operator, whose keys are never seen unturned",
    "qv": "a second product with the queries",
    "q_v": "a second product with the queries",
    "q_descale": "quantised queries",
    "k_descale": "quantised keys",
    "v_descale": "quantised values",
    "seqused_q": "queries of which only some are used",
    "out": "a result that is written into a tensor given",
    "out_": "a result that is written into a tensor given",
}


@register(
    "flash-attn",
    "*.flash_attn_func",
    "*.flash_attn_varlen_func",
    "*.flash_attn_with_kvcache",
    "*._flash_attn_forward",
    "*._flash_attn_varlen_forward",
    "*flash_attn*.fwd",
    "*flash_attn*.varlen_fwd",
    "*flash_attn*.fwd_kvcache",
)
def flash_attn(node: fx.Node, tables: Tables) -> Found | None:
    """``flash_attn_func(q, k, v)``, ``flash_attn_varlen_func`` of one sequence, ``flash_attn_with_kvcache`` of a written cache."""
    given = _named(node)
    q, k, v = (_first(given, *names) for names in (("q",), ("k_cache", "kcache", "k"), ("v_cache", "vcache", "v")))
    if not all(graph.is_tensor(x) for x in (q, k, v)):
        return None
    for name, what in _REFUSED.items():
        if isinstance(given.get(name), fx.Node):
            raise Refused("unknown-attention", f"{name}: {what}")
    cached = "k_cache" in given or "kcache" in given
    new = ("k", "v", "k_new", "v_new") if cached else ("k_new", "v_new")
    if any(isinstance(given.get(name), fx.Node) for name in new):
        raise Refused(
            "unknown-cache-write",
            f"{node.name} writes the new keys itself: write them into the cache before the call, and pass none to it",
        )
    if chunk := _number(given, "attention_chunk", default=0):
        raise Refused("unknown-mask", f"attention in chunks of {chunk:.0f} tokens")
    if dropout := _number(given, "dropout_p", "p_dropout", default=0.0):
        raise Refused("dropout", f"dropout_p={dropout}")
    packed = len(graph.shape(q)) == 3
    offsets = [_first(given, f"cu_seqlens_{x}") for x in "qk"] if packed else []
    if packed and any(not graph.is_tensor(x) or graph.shape(x) != (2,) for x in offsets):
        sizes = [graph.shape(x) if graph.is_tensor(x) else None for x in offsets]
        raise Refused(
            "unknown-attention", f"sequences packed one after another, with offsets of {sizes}; only one is read"
        )
    qs, ks, vs = (_heads_first(x, packed) for x in (q, k, v))
    size_q, size_k = graph.shape(q), graph.shape(k)
    hq, hk, hv = (graph.shape(x)[-2] for x in (q, k, v))
    if not packed and size_q[0] != size_k[0]:
        raise Refused("unknown-attention", f"the batch is broadcast: q {size_q}, k {size_k}")
    if hk != hv or hq % hk:
        raise Refused("heads", f"{hq} query heads, {hk} key heads, {hv} value heads")
    scale = _first(given, "softmax_scale")
    if isinstance(scale, fx.Node):
        raise Refused("unsupported-value", f"softmax_scale is computed by {scale.name}")
    sinks = _first(given, "s_aux", "learnable_sink", "sinks")
    mask = _mask(node, tables, given, q, k, offsets, packed)
    back = [(aten.permute.default, ([0, 2, 1, 3],))] + ([(aten.squeeze.dim, (0,))] if packed else [])
    return Found(
        anchor="flash-attn",
        output=first_result(node, tables) if not isinstance(node.meta["val"], torch.Tensor) else node,
        q=qs,
        k=ks,
        v=vs,
        scale=1.0 / math.sqrt(size_q[-1]) if scale is None else float(scale),
        mask=Expr(mask) if mask is not None else None,
        mask_kind="none" if mask is None else "bool",
        softcap=float(_number(given, "softcap", default=0.0)),
        sinks=Expr(sinks) if isinstance(sinks, fx.Node) else None,
        repeat=hq // hk,
        output_steps=tuple(back),
    )


def _named(node: fx.Node) -> dict[str, Any]:
    """The call's arguments by name, defaults filled in."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    given.update(zip((a.name for a in schema.arguments), graph.args(node), strict=False))
    return {**given, **node.kwargs}


def _first(given: dict[str, Any], *names: str) -> Any:
    return next((given[name] for name in names if given.get(name) is not None), None)


def _number(given: dict[str, Any], *names: str, default: float) -> float:
    found = _first(given, *names)
    if isinstance(found, fx.Node):
        raise Refused("unsupported-value", f"{names[0]} is computed by {found.name}")
    return default if found is None else float(found)


def _heads_first(x: fx.Node, packed: bool) -> Expr:
    """[B, T, H, D], or [T, H, D] of one sequence, as [B, H, T, D]."""
    expr = Expr(x).then(aten.unsqueeze.default, 0) if packed else Expr(x)
    return expr.then(aten.permute.default, [0, 2, 1, 3])


def _window(given: dict[str, Any]) -> tuple[int, int]:
    """How many tokens to the left and right are seen; -1 is all of them."""
    both = given.get("window_size")
    if isinstance(both, (list, tuple)):
        left, right = both
    else:
        left, right = (_first(given, f"window_size_{side}") for side in ("left", "right"))
    if any(isinstance(x, fx.Node) for x in (left, right)):
        raise Refused("unsupported-value", "the window's size is computed by the graph")
    left, right = (-1 if x is None else int(x) for x in (left, right))
    return left, right


def _mask(
    node: fx.Node, tables: Tables, given: dict[str, Any], q: fx.Node, k: fx.Node, offsets: list[Any], packed: bool
) -> fx.Node | None:
    """A boolean mask [B or 1, 1, T, L], or None where every query sees every key."""
    left, right = _window(given)
    causal = bool(_first(given, "causal", "is_causal"))
    if causal:
        right = 0
    lengths = _first(given, "cache_seqlens", "seqlens_k", "seqused_k")
    one = isinstance(graph.tensor(q).shape[0 if packed else 1], int) and graph.shape(q)[0 if packed else 1] == 1
    if isinstance(lengths, int):
        raise Refused(
            "unsupported-value", "cache_seqlens is a number, which would change with each step: pass a tensor"
        )
    # One query stands at the last key: nothing is to its right.
    if lengths is None and not packed and left < 0 and (right < 0 or one):
        return None
    tokens = 0 if packed else 1

    def make(q: Tensor, k: Tensor, *rest: Tensor) -> Tensor:
        T, L = q.shape[tokens], k.shape[tokens]
        row = torch.arange(T, device=q.device)[:, None]
        column = torch.arange(L, device=q.device)
        begin: Any = 0
        end: Any = L
        if offsets:
            begin, end = rest[1][0], rest[1][1]
        if lengths is not None:
            end = begin + rest[-1].reshape(-1, 1, 1, 1)
        seen = (column >= begin) & (column < end) & (row >= 0)
        last = row + (end - T)  # the key at which a query stands
        if left >= 0:
            seen = seen & (column >= last - left)
        if right >= 0:
            seen = seen & (column <= last + right)
        return seen.expand(torch.broadcast_shapes(seen.shape, (1, 1, T, L)))

    inputs = (q, k, *offsets, *((lengths,) if isinstance(lengths, fx.Node) else ()))
    return traced(tables.shadow, node, make, inputs)
