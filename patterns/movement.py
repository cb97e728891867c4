"""Where a value comes from, element by element: every operator that moves values and does not compute any.

Instead of running views on tensors, points are followed backwards. A point is one index per dim; ``partition`` tells, for
points of a node's output, which input each of them was read from and at which index there. It is exact, costs nothing in
memory however long the cache is, and does not care how a view was spelled: what a chain of views does is what it does to
points. The head mapping, the layout of a cache and the lanes of a rotary embedding are all proven with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from fasa_compile.patterns import graph
from fasa_compile.patterns.graph import Unreadable

Points = tuple[np.ndarray, ...]  # one int64 [N] per dim
Size = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Points that were read from one place: ``select`` picks them among all (None: all of them), ``node`` is None for ``fill``."""

    select: np.ndarray | None
    node: fx.Node | None
    points: Points
    fill: float = 0.0


def _axis(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def broadcast(points: Points, size: Size) -> Points:
    """Points of an elementwise result, as points of an operand of the given size that was broadcast into it."""
    tail = points[len(points) - len(size) :]
    return tuple(np.zeros_like(p) if s == 1 else p for p, s in zip(tail, size, strict=True))


def _reshape(args: Sequence[Any], src: Size, out: Size, points: Points) -> Points:
    count = len(points[0]) if points else 1
    flat = np.ravel_multi_index(points, out) if out else np.zeros(count, dtype=np.int64)
    return tuple(np.asarray(p) for p in np.unravel_index(flat, src)) if src else ()


def _same(args: Sequence[Any], src: Size, out: Size, points: Points) -> Points:
    return points


def _expand(args: Sequence[Any], src: Size, out: Size, points: Points) -> Points:
    return broadcast(points, src)


def _permute(args: Sequence[Any], src: Size, out: Size, points: Points) -> Points:
    back: list[np.ndarray] = list(points)
    for i, dim in enumerate(args[0]):
        back[_axis(dim, len(src))] = points[i]
    return tuple(back)


def _transpose(args: Sequence[Any], src: Size, out: Size, points: Points) -> Points:
    back = list(points)
    if len(src) > 1:
        a, b = (_axis(d, len(src)) for d in (args[:2] if len(args) >= 2 else (0, 1)))
        back[a], back[b] = back[b], back[a]
    return tuple(back)


def _reverse_dims(args: Sequence[Any], src: Size, out: Size, points: Points) -> Points:
    return (*points[:-2], points[-1], points[-2])


def _slice(args: Sequence[Any], src: Size, out: Size, points: Points) -> Points:
    dim, start, _, step = span(args, src)
    return tuple(p * step + start if i == dim else p for i, p in enumerate(points))


def span(args: Sequence[Any], src: Size) -> tuple[int, int, int, int]:
    """(dim, start, stop, step) of a slice's or slice_scatter's arguments, clamped as ATen clamps them."""
    dim = _axis(args[0] if args else 0, len(src))
    start, stop = args[1] if len(args) > 1 else None, args[2] if len(args) > 2 else None
    step = args[3] if len(args) > 3 else 1
    first, last, _ = slice(start, stop).indices(src[dim])
    return dim, first, max(first, last), step


def _select(args: Sequence[Any], src: Size, out: Size, points: Points) -> Points:
    dim, index = _axis(args[0], len(src)), args[1]
    if isinstance(index, fx.Node):
        raise Unreadable("a select at a computed index")
    count = len(points[0]) if points else 1
    at = np.full(count, index + src[dim] if index < 0 else index, dtype=np.int64)
    return (*points[:dim], at, *points[dim:])


def _repeat(args: Sequence[Any], src: Size, out: Size, points: Points) -> Points:
    tail = points[len(points) - len(src) :]
    return tuple(p % s for p, s in zip(tail, src, strict=True))


def _repeat_interleave(args: Sequence[Any], src: Size, out: Size, points: Points) -> Points:
    if not isinstance(args[0], int):
        raise Unreadable("repeat_interleave with a count per element")
    if len(args) < 2 or args[1] is None:
        return _reshape(args, src, (int(np.prod(src)),), (points[0] // args[0],))
    dim = _axis(args[1], len(src))
    return tuple(p // args[0] if i == dim else p for i, p in enumerate(points))


def _roll(args: Sequence[Any], src: Size, out: Size, points: Points) -> Points:
    shifts = args[0] if isinstance(args[0], list) else [args[0]]
    dims = args[1] if len(args) > 1 else []
    if not dims:
        flat = (np.ravel_multi_index(points, src) - shifts[0]) % int(np.prod(src))
        return tuple(np.asarray(p) for p in np.unravel_index(flat, src))
    back = list(points)
    for shift, d in zip(shifts, dims if isinstance(dims, list) else [dims], strict=True):
        d = _axis(d, len(src))
        back[d] = (back[d] - shift) % src[d]
    return tuple(back)


def _flip(args: Sequence[Any], src: Size, out: Size, points: Points) -> Points:
    dims = {_axis(d, len(src)) for d in args[0]}
    return tuple(src[i] - 1 - p if i in dims else p for i, p in enumerate(points))


Pull = Callable[[Sequence[Any], Size, Size, Points], Points]

#: Operators of one tensor that only move: arguments after the tensor, input size, output size, points -> points of the input.
PULL: dict[str, Pull] = {
    **dict.fromkeys(
        [
            "view",
            "_unsafe_view",
            "reshape",
            "unsqueeze",
            "squeeze",
            "flatten",
            "unflatten",
            "view_as",
            "reshape_as",
            "_reshape_alias",
        ],
        _reshape,
    ),
    **dict.fromkeys(
        [
            "clone",
            "alias",
            "contiguous",
            "detach",
            "lift_fresh",
            "lift_fresh_copy",
            "_to_copy",
            "to",
            "type_as",
            "dropout",
            "positive",
            "view_copy",
        ],
        _same,
    ),
    **dict.fromkeys(["expand", "expand_as", "broadcast_to"], _expand),
    **dict.fromkeys(["permute"], _permute),
    **dict.fromkeys(["transpose", "swapaxes", "swapdims", "t"], _transpose),
    **dict.fromkeys(["mT", "adjoint", "matrix_H"], _reverse_dims),
    "numpy_T": lambda args, src, out, points: points[::-1],
    "slice": _slice,
    "narrow": lambda args, src, out, points: _slice([args[0], args[1], args[1] + args[2]], src, out, points),
    "select": _select,
    **dict.fromkeys(["repeat", "tile"], _repeat),
    "repeat_interleave": _repeat_interleave,
    "roll": _roll,
    "flip": _flip,
}

#: Of those, the ones that may round: they change the dtype.
CASTS = frozenset(["_to_copy", "to", "type_as"])


def _rounds_to_integers(node: fx.Node) -> bool:
    src = graph.args(node)[0]
    return graph.tensor(src).dtype.is_floating_point and not graph.tensor(node).dtype.is_floating_point


def pull(node: fx.Node, points: Points) -> tuple[fx.Node, Points] | None:
    """The one input that a node merely rearranges, and where in it the given points of its output came from; else None."""
    kind = graph.name(node)
    if kind == "getitem":
        return _pull_piece(node, points)
    move = PULL.get(kind)
    if move is None or not graph.args(node) or not graph.is_tensor(graph.args(node)[0]) or not graph.is_tensor(node):
        return None
    if kind == "dropout" and graph.argument(node, 2, "train", True) and graph.argument(node, 1, "p", 0.5):
        return None
    if kind in CASTS and _rounds_to_integers(node):
        return None
    src: fx.Node = graph.args(node)[0]
    args = arguments(node)
    return src, move(args, graph.shape(src), graph.shape(node), points)


def arguments(node: fx.Node) -> list[Any]:
    """A call's arguments after its first tensor, in the order of the schema, keyword arguments put in their place."""
    out: list[Any] = graph.number(list(graph.args(node)[1:]))
    if node.kwargs and isinstance(node.target, torch._ops.OpOverload):
        for position, item in enumerate(node.target._schema.arguments[1:]):
            if position >= len(out) and not item.kwarg_only:
                out.append(graph.number(node.kwargs.get(item.name, item.default_value)))
    return out


def _pull_piece(node: fx.Node, points: Points) -> tuple[fx.Node, Points] | None:
    """One piece of a split, a chunk or an unbind."""
    whole, piece = graph.args(node)
    if not isinstance(whole, fx.Node) or not isinstance(piece, int):
        return None
    kind, src = graph.name(whole), graph.args(whole)[0] if graph.args(whole) else None
    if kind not in ("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split", "unsafe_chunk"):
        return None
    if not isinstance(src, fx.Node) or not graph.is_tensor(src):
        return None
    size = graph.shape(src)
    if kind == "unbind":
        return src, _select([graph.argument(whole, 1, "dim", 0), piece], size, (), points)
    dim = _axis(graph.argument(whole, 2, "dim", 0), len(size))
    pieces = [int(graph.hint(v.shape[dim])) for v in whole.meta["val"]]
    start = sum(pieces[: piece % len(pieces)])
    return src, tuple(p + start if i == dim else p for i, p in enumerate(points))


Evaluate = Callable[[fx.Node], torch.Tensor]


def _take(points: Points, chosen: np.ndarray) -> Points:
    return tuple(p[chosen] for p in points)


def _two(inside: np.ndarray, first: fx.Node, at_first: Points, second: fx.Node, at_second: Points) -> list[Part]:
    """Points that are ``inside`` come from ``first``, the others from ``second``."""
    parts = []
    if inside.any():
        parts.append(Part(None if inside.all() else inside, first, _take(at_first, inside)))
    if not inside.all():
        parts.append(Part(~inside if inside.any() else None, second, _take(at_second, ~inside)))
    return parts


def partition(node: fx.Node, points: Points, evaluate: Evaluate) -> list[Part] | None:
    """Where each of the given points of a node's output was read from; None for a node that computes values.

    ``evaluate`` gives the value of a node that holds indices (it may raise ``Unreadable``).
    """
    if (single := pull(node, points)) is not None:
        return [Part(None, single[0], single[1])]
    kind = graph.name(node)
    reader = _PARTS.get(kind)
    return reader(node, points, evaluate) if reader is not None and graph.is_tensor(node) else None


def joins(node: fx.Node) -> bool:
    """Whether a node puts values of several tensors together, as a cache write does, or may do so (operators outside ATen)."""
    kind = graph.name(node)
    return kind in _PARTS or "." in kind


def _cat(node: fx.Node, points: Points, evaluate: Evaluate) -> list[Part]:
    tensors = [t for t in graph.args(node)[0] if graph.shape(t) != (0,)]
    dim = _axis(graph.argument(node, 1, "dim", 0), len(points))
    parts, start = [], 0
    for piece in tensors:
        stop = start + graph.shape(piece)[dim]
        inside = (points[dim] >= start) & (points[dim] < stop)
        if inside.any():
            at = tuple(p - start if i == dim else p for i, p in enumerate(_take(points, inside)))
            parts.append(Part(inside, piece, at))
        start = stop
    return parts


def _stack(node: fx.Node, points: Points, evaluate: Evaluate) -> list[Part]:
    dim = _axis(graph.argument(node, 1, "dim", 0), len(points))
    parts = []
    for i, piece in enumerate(graph.args(node)[0]):
        inside = points[dim] == i
        if inside.any():
            at = _take(points, inside)
            parts.append(Part(inside, piece, at[:dim] + at[dim + 1 :]))
    return parts


def _slice_scatter(node: fx.Node, points: Points, evaluate: Evaluate) -> list[Part]:
    base, src = graph.args(node)[:2]
    dim, start, stop, step = span(arguments(node)[1:], graph.shape(node))
    p = points[dim]
    inside = (p >= start) & (p < stop) & ((p - start) % step == 0)
    moved = tuple((q - start) // step if i == dim else q for i, q in enumerate(points))
    return _two(inside, src, moved, base, points)


def _select_scatter(node: fx.Node, points: Points, evaluate: Evaluate) -> list[Part]:
    base, src = graph.args(node)[:2]
    _, dim, index = arguments(node)
    dim, size = _axis(dim, len(points)), graph.shape(node)
    inside = points[dim] == (index + size[dim] if index < 0 else index)
    return _two(inside, src, points[:dim] + points[dim + 1 :], base, points)


def _copy(node: fx.Node, points: Points, evaluate: Evaluate) -> list[Part]:
    src: fx.Node = graph.args(node)[1]
    return [Part(None, src, broadcast(points, graph.shape(src)))]


def _index_copy(node: fx.Node, points: Points, evaluate: Evaluate) -> list[Part]:
    base, dim, index, src = graph.args(node)[:4]
    rows = evaluate(index).reshape(-1).numpy()
    dim = _axis(graph.number(dim), len(points))
    return rows_written(points, dim, rows % graph.shape(node)[dim], src, base)


def rows_written(points: Points, dim: int, rows: np.ndarray, new: fx.Node, old: fx.Node) -> list[Part]:
    """Points of a write of ``new`` to the given rows of ``old`` along ``dim``."""
    inside, at = _lookup(points[dim], rows)
    return _two(inside, new, tuple(at if i == dim else p for i, p in enumerate(points)), old, points)


def _lookup(wanted: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of ``wanted`` occur in ``rows``, and at which place (the last one wins, as a later write does)."""
    order = np.argsort(rows, kind="stable")
    place = np.searchsorted(rows[order], wanted, side="right") - 1
    found = (place >= 0) & (rows[order][np.maximum(place, 0)] == wanted)
    return found, order[np.maximum(place, 0)]


def _index_put(node: fx.Node, points: Points, evaluate: Evaluate) -> list[Part] | None:
    if graph.argument(node, 3, "accumulate", False):
        return None
    base, indices, src = graph.args(node)[:3]
    read = Indexed.of(graph.shape(node), list(indices), evaluate)
    if read is None:
        return None
    inside, at = read.find(points)
    return _two(inside, src, broadcast(at, graph.shape(src)), base, points)


@dataclass(frozen=True)
class Indexed:
    """Advanced indexing with tensors on neighbouring dims: ``x[:, :, pos]``, ``x[batch, :, pos]`` (then the indices lead)."""

    dims: tuple[int, ...]  # indexed dims of x
    index: np.ndarray  # [number of indexed dims, M]: the indexed places, flattened
    size: Size  # broadcast size of the index tensors, M elements
    place: int  # where the index dims stand in the result
    rank: int
    extent: Size  # sizes of x

    @staticmethod
    def of(extent: Size, indices: list[Any], evaluate: Evaluate) -> Indexed | None:
        dims = tuple(i for i, x in enumerate(indices) if x is not None)
        values = [evaluate(indices[d]) for d in dims]
        if not dims or any(v.dtype == torch.bool for v in values):
            return None
        together = np.broadcast_arrays(*[v.numpy() for v in values])
        index = np.stack([t.reshape(-1) % extent[d] for t, d in zip(together, dims, strict=True)])
        adjacent = dims == tuple(range(dims[0], dims[0] + len(dims)))
        return Indexed(dims, index, together[0].shape, dims[0] if adjacent else 0, len(extent), extent)

    def find(self, points: Points) -> tuple[np.ndarray, Points]:
        """Which points of x are indexed, and where they stand in the indexed result ``x[...]``."""
        sizes = [self.extent[d] for d in self.dims]
        wanted = np.ravel_multi_index(tuple(points[d] for d in self.dims), sizes)
        inside, flat = _lookup(wanted, np.ravel_multi_index(tuple(self.index), sizes))
        at = tuple(np.asarray(p) for p in np.unravel_index(flat, self.size)) if self.size else ()
        rest = [p for d, p in enumerate(points) if d not in self.dims]
        return inside, (*rest[: self.place], *at, *rest[self.place :])

    def source(self, points: Points) -> Points:
        """Points of the indexed result, as points of x."""
        count = len(self.size)
        at = points[self.place : self.place + count]
        flat = np.ravel_multi_index(at, self.size) if count else np.zeros(len(points[0]), dtype=np.int64)
        rest = iter(points[: self.place] + points[self.place + count :])
        return tuple(self.index[self.dims.index(d)][flat] if d in self.dims else next(rest) for d in range(self.rank))


def _index(node: fx.Node, points: Points, evaluate: Evaluate) -> list[Part] | None:
    src, indices = graph.args(node)[:2]
    read = Indexed.of(graph.shape(src), list(indices), evaluate)
    return None if read is None else [Part(None, src, read.source(points))]


def _index_select(node: fx.Node, points: Points, evaluate: Evaluate) -> list[Part]:
    src, dim, index = graph.args(node)[:3]
    dim = _axis(graph.number(dim), len(points))
    rows = evaluate(index).reshape(-1).numpy()
    return [Part(None, src, tuple(rows[p] if i == dim else p for i, p in enumerate(points)))]


def _gather(node: fx.Node, points: Points, evaluate: Evaluate) -> list[Part]:
    src, dim, index = graph.args(node)[:3]
    dim = _axis(graph.number(dim), len(points))
    rows = evaluate(index).numpy()[points]
    return [Part(None, src, tuple(rows if i == dim else p for i, p in enumerate(points)))]


def _scatter(node: fx.Node, points: Points, evaluate: Evaluate) -> list[Part] | None:
    base, dim, index, src = graph.args(node)[:4]
    if not isinstance(src, fx.Node) or "reduce" in node.kwargs:
        return None
    dim, rows = _axis(graph.number(dim), len(points)), evaluate(index).numpy()
    inside, at = np.zeros(len(points[0]), dtype=bool), np.zeros(len(points[0]), dtype=np.int64)
    within = np.ones(len(points[0]), dtype=bool)
    for i, p in enumerate(points):
        if i != dim:
            within &= p < rows.shape[i]
    for t in range(rows.shape[dim]):
        line = tuple(np.full_like(p, t) if i == dim else np.minimum(p, rows.shape[i] - 1) for i, p in enumerate(points))
        hit = within & (rows[line] == points[dim])
        inside |= hit
        at[hit] = t
    return _two(inside, src, tuple(at if i == dim else p for i, p in enumerate(points)), base, points)


def _where(node: fx.Node, points: Points, evaluate: Evaluate) -> list[Part] | None:
    if len(graph.args(node)) != 3 or not all(graph.is_tensor(a) for a in graph.args(node)):
        return None
    condition, yes, no = graph.args(node)
    picked = evaluate(condition).numpy()[broadcast(points, graph.shape(condition))]
    return _two(
        picked.astype(bool),
        yes,
        broadcast(points, graph.shape(yes)),
        no,
        broadcast(points, graph.shape(no)),
    )


def _pad(node: fx.Node, points: Points, evaluate: Evaluate) -> list[Part] | None:
    src: fx.Node = graph.args(node)[0]
    pads = graph.argument(node, 1, "pad")
    value = graph.argument(node, 3 if graph.name(node) == "pad" else 2, "value", 0) or 0
    if graph.name(node) == "pad" and graph.argument(node, 2, "mode", "constant") != "constant":
        return None
    size, moved, inside = graph.shape(src), list(points), np.ones(len(points[0]), dtype=bool)
    for i in range(len(pads) // 2):
        dim = len(size) - 1 - i
        moved[dim] = points[dim] - pads[2 * i]
        inside &= (moved[dim] >= 0) & (moved[dim] < size[dim])
    parts = []
    if inside.any():
        parts.append(Part(None if inside.all() else inside, src, _take(tuple(moved), inside)))
    if not inside.all():
        parts.append(Part(~inside, None, (), float(value)))
    return parts


_PARTS: dict[str, Callable[[fx.Node, Points, Evaluate], list[Part] | None]] = {
    "cat": _cat,
    "concat": _cat,
    "concatenate": _cat,
    "stack": _stack,
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    "copy": _copy,
    "index_copy": _index_copy,
    "index_put": _index_put,
    "index": _index,
    "index_select": _index_select,
    "gather": _gather,
    "scatter": _scatter,
    "where": _where,
    "constant_pad_nd": _pad,
    "pad": _pad,
}
