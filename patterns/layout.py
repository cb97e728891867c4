"""Canonical layouts: from where the elements of a head come, to the views that bring a node to ``[B, H, L, D]``.

Points of the canonical tensor are followed back through the graph (``movement.py``); where each dim of a node turns out to be
``offset + stride * axis`` the views follow from the numbers. Spelling does not matter, and no size is written into a view
unless a fused dim has to be split.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from fasa_compile.patterns import graph, movement
from fasa_compile.patterns.cache import Where
from fasa_compile.patterns.graph import Unreadable
from fasa_compile.patterns.movement import Points, Size
from fasa_compile.sites import Expr

aten = torch.ops.aten
Steps = tuple[tuple[Any, tuple[Any, ...]], ...]


@functools.lru_cache(maxsize=64)
def sample(size: Size) -> Points:
    """Points of a canonical [B, H, L, D] that show a layout: each axis alone, then all of them at random."""
    rng = np.random.default_rng(0)
    b, h, length, d = size
    rows = np.unique(np.concatenate([np.arange(min(length, 8)), rng.integers(0, length, 24), [length - 1]]))
    lines = []
    for axis, values in enumerate((np.arange(b), np.arange(h), rows, np.arange(d))):
        line = np.zeros((4, len(values)), dtype=np.int64)
        line[axis] = values
        lines.append(line)
    lines.append(np.stack([rng.integers(0, n, 512) for n in size]))
    return tuple(np.concatenate(lines, 1))


def follow(expr: Expr, points: Points) -> tuple[fx.Node, Points]:
    """Points of an ``Expr``, as points of its node."""
    sizes = [graph.shape(expr.node)]
    value = torch.empty(sizes[0], device="meta", dtype=graph.tensor(expr.node).dtype)
    for op, args in expr.steps:
        value = op(value, *args)
        sizes.append(tuple(value.shape))
    for (op, args), src, out in zip(reversed(expr.steps), reversed(sizes[:-1]), reversed(sizes[1:]), strict=True):
        name = op._schema.name.split("::")[1]
        points = movement.PULL[name](args, src, out, points)
    return expr.node, points


def size_of(expr: Expr) -> Size:
    """Sizes of an ``Expr``'s value, as numbers."""
    value = torch.empty(graph.shape(expr.node), device="meta")
    for op, args in expr.steps:
        value = op(value, *args) if op is not aten.to.dtype else value
    return tuple(value.shape)


def symbolic_size(expr: Expr) -> tuple[Any, ...]:
    """Sizes of an ``Expr``'s value with the graph's own symbols; one that Dynamo knows to be a number is that number."""
    value = graph.tensor(expr.node)
    known: dict[str, tuple[Any, ...]] = expr.node.meta.setdefault("fasa_sizes", {})  # symbols are slow to reason about
    steps = repr(expr.steps)
    if steps not in known:
        with torch.no_grad():
            for op, args in expr.steps:
                value = op(value, *args)
        known[steps] = tuple(_known(s) for s in value.shape)
    return known[steps]


def _known(size: Any) -> Any:
    number = size if isinstance(size, int) else size.node.maybe_as_int()
    return size if number is None else number


@dataclass(frozen=True)
class Chain:
    """A walk through moves: the nodes from an attention's operand down to the node that made the values."""

    nodes: tuple[fx.Node, ...]
    points: tuple[Points, ...]  # of the canonical sample, one per node

    @property
    def end(self) -> fx.Node:
        return self.nodes[-1]


def walk(node: fx.Node, points: Points, evaluate: movement.Evaluate) -> Chain:
    """Follow moves, and writes that leave the points alone or make all of them, as far as they go."""
    nodes, at = [node], [points]
    while (step := _step(nodes[-1], at[-1], evaluate)) is not None:
        nodes.append(step[0])
        at.append(step[1])
    return Chain(tuple(nodes), tuple(at))


def _step(node: fx.Node, points: Points, evaluate: movement.Evaluate) -> tuple[fx.Node, Points] | None:
    if (moved := movement.pull(node, points)) is not None:
        return moved
    kind = graph.name(node)
    if kind not in ("slice_scatter", "select_scatter", "copy", "cat", "concat"):
        return None
    if kind == "slice_scatter" and not _settled(node, points):
        return None
    if kind == "select_scatter":
        _, dim, index = movement.arguments(node)
        size = graph.shape(node)
        at, row = points[dim % len(size)], index % size[dim % len(size)]
        if at.min() <= row <= at.max() and not (at == row).all():
            return None  # the sample may have missed the row that is written
    parts = movement.partition(node, points, evaluate)
    if parts and len(parts) == 1 and parts[0].select is None and parts[0].node is not None:
        return parts[0].node, parts[0].points
    if kind in ("cat", "concat") and parts and len(parts) == 1 and parts[0].node is not None:
        return parts[0].node, parts[0].points
    return None


def _settled(node: fx.Node, points: Points) -> bool:
    """Whether the rows that a slice_scatter writes hold all of the points or none: told by their range, not by the sample."""
    dim, start, stop, step = movement.span(movement.arguments(node)[1:], graph.shape(node))
    low, high = int(points[dim].min()), int(points[dim].max())
    return (start <= low and high < stop and step == 1) or stop <= low or high < start


def group_of(chain: Chain, canonical: Points, heads: int) -> int:
    """How many consecutive query heads read one KV head, told by where the heads' first elements come from.

    Raises ``Unreadable`` where the query heads do not read KV heads in equal consecutive groups.
    """
    read = heads_read(chain, canonical, heads)
    group = heads // len(set(read))
    if read != [h // group for h in range(heads)]:
        raise Unreadable(f"query heads read the KV heads {read}, not equal consecutive groups of them")
    return group


def dim_of(chain: Chain, canonical: Points, size: Size, tokens: int) -> Where | None:
    """Where L stands in the node at the end of a walk; None where it is not one dim of it, read in order."""
    points = chain.points[-1]
    along = _line(canonical, 2)
    if size[2] == 1:
        return None
    moving = [i for i, p in enumerate(points) if (p[along] != p[along[0]]).any()]
    if len(moving) != 1:
        return None
    offset = int(points[moving[0]][along[0]])
    if (points[moving[0]][along] != canonical[2][along] + offset).any():
        return None
    batch = _line(canonical, 0)
    batch_dims = [i for i, p in enumerate(points) if (p[batch] != p[batch[0]]).any()]
    if size[0] == 1:
        sizes = graph.shape(chain.end)
        batch_dims = [i for i, s in enumerate(sizes) if s == 1 and i != moving[0]][:1]
    return Where(moving[0], offset, batch_dims[0] if len(batch_dims) == 1 else None, size[2], tokens)


def joined(chain: Chain, canonical: Points, evaluate: movement.Evaluate) -> list[tuple[int, int]]:
    """Ranges of D that the node at the end of a walk takes from different places; empty where it does not join along D."""
    along = _line(canonical, 3)
    parts = movement.partition(chain.end, tuple(p[along] for p in chain.points[-1]), evaluate)
    ranges = []
    for part in parts or ():
        if part.select is None or part.node is None:
            return []
        dims = np.flatnonzero(part.select)
        if len(dims) != dims[-1] - dims[0] + 1:
            return []
        ranges.append((int(dims[0]), int(dims[-1]) + 1))
    return sorted(ranges) if len(ranges) > 1 else []


#: Operators whose result at a point depends on their operands at that point.
_POINTWISE = frozenset({"add", "sub", "mul", "div", "neg", "addcmul", "view_as_real", "view_as_complex"})


def operands(
    chain: Chain, canonical: Points, is_data: Callable[[fx.Node], bool], evaluate: movement.Evaluate
) -> list[tuple[fx.Node, Points, np.ndarray]]:
    """Where the node at the end of a walk reads the elements it computes or joins: (node, points, which of the sample's).

    Of a join along D the part with dim 0, which holds the sample's axes.
    """
    node, points = chain.end, chain.points[-1]
    every = np.ones(len(canonical[0]), dtype=bool)
    kind = graph.name(node)
    if kind == "view_as_real":
        return [(graph.args(node)[0], points[:-1], every)]
    if kind == "view_as_complex":
        return [(graph.args(node)[0], (*points, np.zeros_like(points[0])), every)]
    if kind in _POINTWISE:
        data = [x for x in graph.inputs(node) if is_data(x)]
        return [(x, movement.broadcast(points, graph.shape(x)), every) for x in data]
    origin = int(_line(canonical, 3)[0])
    for part in movement.partition(node, points, evaluate) or ():
        chosen = every if part.select is None else part.select
        if part.node is not None and chosen[origin] and chosen[_line(canonical, 2)].all():
            return [(part.node, part.points, chosen)]
    return []


def heads_read(chain: Chain, canonical: Points, heads: int) -> list[int]:
    """For each query head the number of the KV head it reads, counted by first appearance."""
    line = _line(canonical, 1)
    places = list(zip(*(p[line].tolist() for p in chain.points[-1]), strict=True))
    first: dict[tuple[int, ...], int] = {}
    return [first.setdefault(place, len(first)) for place in places][:heads]


def _line(canonical: Points, axis: int) -> np.ndarray:
    """Indices of the sample's points that lie on one axis, in order of that axis."""
    on = np.ones(len(canonical[0]), dtype=bool)
    for i, p in enumerate(canonical):
        if i != axis:
            on &= p == 0
    index = np.flatnonzero(on)
    return index[np.unique(canonical[axis][index], return_index=True)[1]]


def solve(
    node: fx.Node, points: Points, canonical: Points, size: Size, group: int = 1, symbolic: frozenset[int] = frozenset()
) -> Steps | None:
    """Views from ``node`` to the canonical [B, H / group, L, D], or None where no views do it.

    ``points`` are the sample's points in the node; ``size`` is the canonical [B, H, L, D] that the sample was drawn from, and
    ``symbolic`` are the axes whose sizes are symbols: no view may hold a number in their place.
    """
    own = graph.shape(node)
    grouped = (canonical[0], canonical[1] // group, canonical[2], canonical[3])
    extents = (size[0], size[1] // group, size[2], size[3])
    strides: list[dict[int, int]] = []  # per dim: axis -> stride
    offsets: list[int] = []
    origin = int(_line(canonical, 3)[0])
    units = [_unit(grouped, axis) if extents[axis] > 1 else None for axis in range(4)]
    for p in points:
        offset = int(p[origin])
        moved = {axis: int(p[u]) - offset for axis, u in enumerate(units) if u is not None}
        stride = {axis: s for axis, s in moved.items() if s != 0}
        told = offset + sum((s * grouped[axis] for axis, s in stride.items()), np.zeros_like(p))
        if (told != p).any() or any(s < 0 for s in stride.values()):
            return None
        strides.append(stride)
        offsets.append(offset)
    return _views(node, own, strides, offsets, extents, symbolic)


def _unit(grouped: Points, axis: int) -> int:
    on = grouped[axis] == 1
    for i, p in enumerate(grouped):
        if i != axis:
            on = on & (p == 0)
    return int(np.flatnonzero(on)[0])


def _views(
    node: fx.Node,
    own: Size,
    strides: list[dict[int, int]],
    offsets: list[int],
    extents: Size,
    symbolic: frozenset[int],
) -> Steps | None:
    steps: list[tuple[Any, tuple[Any, ...]]] = []
    layout: list[int | None] = []  # the axis of each dim after the views so far; None: to be dropped
    drop: list[int] = []  # the index to take of those
    true = [_known(s) for s in graph.tensor(node).shape]
    taken = [axis for stride in strides for axis in stride]
    if len(taken) != len(set(taken)):
        return None  # an axis that runs through two dims
    missing = [axis for axis in range(4) if axis not in taken]
    for dim, (stride, offset) in enumerate(zip(strides, offsets, strict=True)):
        axes = sorted(stride, key=lambda a: -stride[a])
        inner = 1
        for axis in reversed(axes):
            if stride[axis] != inner:
                return None
            inner *= extents[axis]
        if not axes:
            if own[dim] == 1 and missing and extents[missing[0]] == 1:
                layout.append(missing.pop(0))
                drop.append(0)
            else:
                layout.append(None)
                drop.append(offset)
            continue
        cut = bool(offset) or inner != own[dim] or isinstance(true[dim], int) != symbolic.isdisjoint(axes)
        if cut:
            if not (isinstance(true[dim], int) and symbolic.isdisjoint(axes)):
                return None  # a slice whose end is a symbol: another node of the chain has it applied already
            steps.append((aten.slice.Tensor, (len(layout), offset, offset + inner)))
        if len(axes) > 1:
            if not symbolic.isdisjoint(axes):
                return None
            steps.append((aten.unflatten.int, (len(layout), [extents[a] for a in axes])))
        layout.extend(axes)
        drop.extend([0] * len(axes))
    for at in reversed([i for i, axis in enumerate(layout) if axis is None]):
        steps.append((aten.select.int, (at, drop[at])))
        del layout[at]
    for axis in missing:
        if extents[axis] != 1:
            return None
        steps.append((aten.unsqueeze.default, (len(layout),)))
        layout.append(axis)
    order = [layout.index(axis) for axis in range(4)]
    if order != [0, 1, 2, 3]:
        steps.append((aten.permute.default, (order,)))
    return tuple(steps)


def settle(
    chain: Chain,
    canonical: Points,
    size: Size,
    group: int,
    held: Callable[[fx.Node], fx.Node | None],
    dtype: torch.dtype,
    symbolic: frozenset[int],
) -> Expr | None:
    """The node of the chain that the Dynamo graph holds and that the fewest views bring to the canonical layout.

    A cast that widens is left out: whoever reads the values computes in float32 anyway, and a cast cache would be a copied
    cache. One that narrows is a step.
    """
    best: Expr | None = None
    for node, points in zip(reversed(chain.nodes), reversed(chain.points), strict=True):
        kept = held(node)
        steps = solve(node, points, canonical, size, group, symbolic) if kept is not None else None
        if kept is not None and steps is not None:
            own = graph.tensor(node).dtype
            if torch.finfo(own).eps < torch.finfo(dtype).eps:
                steps = (*steps, (aten.to.dtype, (dtype,)))
            if best is None or len(steps) < len(best.steps):
                best = Expr(kept, steps)
    return best
