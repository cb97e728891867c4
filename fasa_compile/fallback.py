"""Fallback: what a step needs to be run again by the model's own graph, when a rewritten graph fails the first time it runs.

A kernel that cannot be compiled or launched shows itself in a graph's first step, after the model has written this step's token to
some of its caches. The model's own graph runs the step again from the start. What it finds must be what the failed step found:

- rows of a cache that the graph overwrites before it reads them need nothing, since they are overwritten alike;
- every other input that the graph writes (a position that it counts up, a window that it shifts) is copied before the first step
  and put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fasa_compile.capture import Shadow
from fasa_compile.sharding import communicates

#: Bytes of inputs that are copied before a graph's first step. A cache that needs more is not copied: then a failure is an error.
LARGEST_COPY = 256 << 20

aten = torch.ops.aten
_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.alias.default,
    aten.unbind.int,
}
#: Writes of rows: the first argument's other elements pass through. By operator, the arguments that say which rows.
_ROW_WRITES: dict[Any, slice] = {
    aten.index_copy.default: slice(1, 3),
    aten.index_put.default: slice(1, 2),
    aten.slice_scatter.default: slice(2, None),
    aten.select_scatter.default: slice(2, None),
    aten.scatter.src: slice(1, 3),
    aten.copy.default: slice(0, 0),
}


@dataclass(frozen=True)
class Fallback:
    """The model's own graph, and what it takes to run it in place of a failed step.

    ``saved``: inputs to copy before the first step, None where that would be too much. ``report(problem)`` tells the user, or
    raises.
    """

    dense: Callable[..., Any]
    saved: tuple[int, ...] | None
    report: Callable[[Exception], None]


def inputs_to_save(shadow: Shadow) -> tuple[int, ...] | None:
    """Inputs that a second run of the graph would find changed by the first; None where they are too large to copy, where inputs
    share memory, or where the graph communicates: other processes would not run it a second time."""
    if communicates(shadow):
        return None
    written = [i for i in range(len(shadow.inputs)) if shadow.is_written(i)]
    if any(shadow.overlaps_a_written_input(i) for i, x in enumerate(shadow.example_inputs) if _is_tensor(x)):
        return None
    by_rows = [i for i in written if _writes(shadow.inputs[i])]
    moving = _made_of(shadow.inputs[i] for i in by_rows)
    kept = [i for i in written if i not in by_rows or _rows_told_by(shadow.inputs[i]) & moving]
    size = sum(x.numel() * x.element_size() for i in kept if _is_tensor(x := shadow.example_inputs[i]))
    return tuple(kept) if size <= LARGEST_COPY else None


def copies(arguments: Sequence[Any], places: Sequence[int]) -> dict[int, torch.Tensor]:
    """Copies of these arguments, by place."""
    return {i: arguments[i].detach().clone() for i in places}


def put_back(arguments: Sequence[Any], saved: dict[int, torch.Tensor]) -> None:
    with torch.no_grad():
        for i, value in saved.items():
            arguments[i].copy_(value)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _writes(node: fx.Node) -> list[fx.Node] | None:
    """The writes of rows that read ``node`` or views of it; None where anything else reads it."""
    found: list[fx.Node] = []
    for user in node.users:
        if user.target in _ROW_WRITES and user.all_input_nodes.count(node) == 1 and user.args[0] is node:
            if user.target is aten.index_put.default and any(user.args[3:]):
                return None  # it adds
            found.append(user)
        elif user.target in _VIEWS:
            below = _writes(user)
            if below is None:
                return None
            found += below
        else:
            return None
    return found


def _made_of(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes whose values are computed from these."""
    made: set[fx.Node] = set()
    todo = [user for root in roots for user in root.users]
    while todo:
        node = todo.pop()
        if node not in made:
            made.add(node)
            todo.extend(node.users)
    return made


def _rows_told_by(node: fx.Node) -> set[fx.Node]:
    """What tells which rows of ``node`` are written."""
    found: set[fx.Node] = set()
    for write in _writes(node) or ():
        fx.map_arg(write.args[_ROW_WRITES[write.target]], found.add)
    return found
