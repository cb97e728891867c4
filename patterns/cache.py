"""Cache writes: how the keys of this call got among the keys that an attention reads.

A spelling is one function in ``WRITES``, under the name of the operator that joins old and new: it tells which operand is the
old content, which rows of L are new, and (for a buffer written in place) the tensor that holds those rows. Writes through views
need no spelling of their own: the walk has followed the views before it asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import fx

from fasa_compile.patterns import graph, movement
from fasa_compile.patterns.movement import Evaluate
from fasa_compile.sites import Expr

aten = torch.ops.aten


@dataclass(frozen=True)
class Write:
    """A node that joins old keys with new ones along L.

    ``new`` is needed where the operator is not one of ATen's: the operand that holds the new keys, with the dims of the result
    and T in place of L.
    """

    name: str
    old: fx.Node
    rows: np.ndarray  # the canonical rows of L that hold the new tokens, in order of the tokens: [T]
    slots: Expr | None  # the same as a tensor of the graph
    new: fx.Node | None = None


@dataclass(frozen=True)
class Where:
    """Which dim of a write node is L, where row 0 of the canonical L stands in it, how long L is, and how many tokens are new."""

    dim: int
    offset: int
    batch_dim: int | None
    length: int
    tokens: int


Reader = Callable[[fx.Node, Where, Evaluate], Write | None]
WRITES: dict[str, Reader] = {}


def register(*names: str) -> Callable[[Reader], Reader]:
    """Add a spelling: the reader of a write made by the operator ``names`` (``index_copy`` or ``mylib.write``)."""

    def add(reader: Reader) -> Reader:
        for name in names:
            WRITES[name] = reader
        return reader

    return add


def _rows(node: fx.Node, places: np.ndarray, at: Where) -> np.ndarray:
    """Indices along the write's dim, negative ones included, as canonical rows of L."""
    return places % graph.shape(node)[at.dim] - at.offset


def _slots(index: fx.Node, places: np.ndarray, at: Where) -> Expr | None:
    """A one-dimensional index of rows as slots: int64 and counted from the canonical row 0. None where it counts from the end."""
    if at.offset or len(graph.shape(index)) > 1 or (places < 0).any():
        return None
    expr = Expr(index)
    if len(graph.shape(index)) == 0:
        expr = expr.then(aten.unsqueeze.default, 0)
    return expr if graph.tensor(index).dtype == torch.int64 else expr.then(aten.to.dtype, torch.int64)


@register("index_copy")
def _index_copy(node: fx.Node, at: Where, evaluate: Evaluate) -> Write | None:
    """``cache.index_copy_(2, cache_position, k)``: HF static cache."""
    old, dim, index = graph.args(node)[:3]
    if graph.number(dim) % len(graph.shape(node)) != at.dim:
        return None
    places = evaluate(index).reshape(-1).numpy()
    return Write("index_copy", old, _rows(node, places, at), _slots(index, places, at))


@register("index_put")
def _index_put(node: fx.Node, at: Where, evaluate: Evaluate) -> Write | None:
    """``cache[:, :, input_pos] = k`` (gpt-fast) and ``cache[batch, :, pos] = k`` with a row of slots per sequence."""
    old, indices = graph.args(node)[:2]
    if graph.argument(node, 3, "accumulate", False) or at.dim >= len(indices) or indices[at.dim] is None:
        return None
    used = [i for i, x in enumerate(indices) if x is not None]
    index: fx.Node = indices[at.dim]
    places = evaluate(index).numpy()
    rows = _rows(node, places, at)
    if used == [at.dim]:
        return Write("index_put", old, rows.reshape(-1), _slots(index, places, at))
    if at.batch_dim is None or sorted(used) != sorted([at.dim, at.batch_dim]):
        return None
    batch = evaluate(indices[at.batch_dim]).numpy()
    batch, rows = np.broadcast_arrays(batch, rows)
    if rows.ndim == 1:
        batch, rows = batch[:, None], rows[:, None]
    count = graph.shape(node)[at.batch_dim]
    if rows.ndim != 2 or len(rows) != count or (batch != np.arange(count)[:, None]).any():
        return None
    slots = None
    own = graph.shape(index)
    if _reads_tensors(indices[at.batch_dim]):
        pass  # which row goes to which sequence may differ in the next call: proven for this one only
    elif not at.offset and graph.tensor(index).dtype == torch.int64 and (places >= 0).all():
        if own == rows.shape:
            slots = Expr(index)
        elif own == (count,) and rows.shape[1] == 1:
            slots = Expr(index).then(aten.unsqueeze.default, 1)
    return Write("index_put", old, rows[0], slots)


@register("slice_scatter")
def _slice_assignment(node: fx.Node, at: Where, evaluate: Evaluate) -> Write | None:
    """``cache[:, start : start + T] = k``: the start is a number of the graph, so there is no tensor of slots."""
    dim, start, stop, step = movement.span(movement.arguments(node)[1:], graph.shape(node))
    if dim != at.dim:
        return None
    return Write("slice_scatter", graph.args(node)[0], np.arange(start, stop, step) - at.offset, None)


@register("select_scatter")
def _select_assignment(node: fx.Node, at: Where, evaluate: Evaluate) -> Write | None:
    """``cache[:, :, pos] = k`` at a number: one token."""
    _, dim, index = movement.arguments(node)
    size = graph.shape(node)
    if dim % len(size) != at.dim:
        return None
    row = index % size[at.dim]
    return Write("select_scatter", graph.args(node)[0], np.array([row - at.offset]), None)


@register("scatter")
def _scatter(node: fx.Node, at: Where, evaluate: Evaluate) -> Write | None:
    """``cache.scatter_(2, pos[:, None, :, None].expand_as(k), k)``."""
    old, dim, index = graph.args(node)[:3]
    size = graph.shape(node)
    if graph.number(dim) % len(size) != at.dim or "reduce" in node.kwargs:
        return None
    places = evaluate(index).numpy()
    keep = [d for d in range(len(size)) if d in (at.dim, at.batch_dim)]
    first = places[tuple(slice(None) if d in keep else slice(0, 1) for d in range(len(size)))]
    if (places != first).any():
        return None
    slots, expr = None, Expr(index)
    dropped = [d for d in range(len(size)) if d not in keep]
    if not at.offset and (at.batch_dim is None or at.batch_dim < at.dim) and _alike(index, dropped):
        for d in reversed(range(len(size))):
            if d not in keep:
                expr = expr.then(aten.select.int, d, 0)
        slots = expr
    return Write("scatter", old, first.reshape(-1, places.shape[at.dim])[0] - at.offset, slots)


def _reads_tensors(node: fx.Node) -> bool:
    """Whether a value is computed from tensors that the caller gives, and not only from sizes and numbers of the graph."""
    todo, seen = [node], set()
    while todo:
        head = todo.pop()
        if head in seen:
            continue
        seen.add(head)
        if head.op in ("placeholder", "get_attr") and graph.is_tensor(head):
            return True
        todo.extend(head.all_input_nodes)
    return False


def _alike(index: fx.Node, dims: list[int]) -> bool:
    """Whether a tensor of indices is the same along these dims by how it was made, and not by the values it has now."""
    size = graph.shape(index)
    base = graph.shape(graph.args(index)[0]) if graph.name(index) == "expand" else size
    aligned = [1] * (len(size) - len(base)) + list(base)
    return all(isinstance(aligned[d], int) and aligned[d] == 1 for d in dims)


@register("cat", "concat")
def _cat(node: fx.Node, at: Where, evaluate: Evaluate) -> Write | None:
    """``k = torch.cat([past_k, k], dim=2)``: HF dynamic cache, the new tokens come last. More pieces may be joined (compressed
    keys, say): the new tokens are then the one piece of their number that is no input of the graph."""
    pieces, start = _pieces(node, at.dim), 0
    if len(pieces) < 2:
        return None
    found = []
    for piece in pieces:
        extent = graph.shape(piece)[at.dim]
        if extent == at.tokens and piece.op != "placeholder":
            found.append((piece, start))
        start += extent
    if len(pieces) > 2 and len(found) > 1:
        return None
    if not found:
        return None
    first = found[-1][1] - at.offset
    old = next(p for p in pieces if p is not found[-1][0])
    return Write("cat", old, np.arange(first, first + at.tokens), None)


def _pieces(node: fx.Node, dim: int) -> list[fx.Node]:
    """What a cat along ``dim`` joins, cats within it taken apart, empty tensors left out."""
    if graph.name(node) not in ("cat", "concat") or graph.argument(node, 1, "dim", 0) % len(graph.shape(node)) != dim:
        return [node] if graph.shape(node) != (0,) and graph.shape(node)[dim] else []
    return [piece for part in graph.args(node)[0] for piece in _pieces(part, dim)]


@register("where")
def _where(node: fx.Node, at: Where, evaluate: Evaluate) -> Write | None:
    """``cache = torch.where(slot == arange(L)[:, None], k, cache)``: one token, chosen by a mask."""
    if len(graph.args(node)) != 3 or not graph.is_tensor(graph.args(node)[2]):
        return None
    condition, _, old = graph.args(node)
    picked = evaluate(condition).numpy()
    picked = np.broadcast_to(picked, graph.shape(node))
    other = tuple(d for d in range(picked.ndim) if d != at.dim)
    line = picked.any(axis=other)
    rows = np.flatnonzero(line)
    if len(rows) != 1 or not (picked.all(axis=other) == line).all():
        return None
    return Write("where", old, rows - at.offset, None)
