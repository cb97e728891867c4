"""Small readers of a shadow graph: sizes as plain numbers, operator names, arguments.

A symbolic size is read by its hint, the value it had when the graph was traced. Hints serve proofs only; they never become a
guard, and nothing that leaves a pattern (an ``Expr``, a shape) is made from one.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


class Unreadable(Exception):
    """A pattern met something that it cannot read. The message is for people and ends up in ``NoMatch.detail``."""


def hint(x: Any) -> Any:
    """The number behind an int, a SymInt or a SymFloat, without a guard. Raises ``Unreadable`` where there is none."""
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        if (value := x.node.hint) is None:
            raise Unreadable(f"the size {x} has no known value")
        return value
    return x


def shape(node: fx.Node) -> tuple[int, ...]:
    """Sizes of a tensor node, as numbers."""
    return tuple(hint(s) for s in tensor(node).shape)


def tensor(node: fx.Node) -> torch.Tensor:
    """The fake tensor that describes a node's value. Raises ``Unreadable`` for a node that is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise Unreadable(f"{node.name} is not a tensor")
    return value


def args(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a call, free of fx's union of types."""
    return node.args


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def name(node: fx.Node) -> str:
    """``index_copy`` for a node that calls ``aten.index_copy.default``; ``namespace.name`` outside ATen; ``""`` for no call."""
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return op_name(node.target)
    if node.target is operator.getitem:
        return "getitem"
    return getattr(node.target, "__name__", str(node.target))


def op_name(op: torch._ops.OpOverload) -> str:
    """``index_copy`` for ``aten.index_copy.default``; ``namespace.name`` outside ATen."""
    space, _, base = op._schema.name.partition("::")
    return base if space == "aten" else f"{space}.{base}"


def written(node: fx.Node) -> tuple[str, ...]:
    """The arguments that a custom operator writes in place: in a functional graph it is the first argument of another node."""
    op = args(node)[0] if name(node).startswith("auto_functionalized") and args(node) else None
    if not isinstance(op, torch._ops.OpOverload):
        return ()
    return tuple(a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def number(x: Any) -> Any:
    """An argument with every symbolic number in it replaced by its hint; tensors stay nodes."""
    if isinstance(x, fx.Node):
        value = x.meta.get("val")
        return x if isinstance(value, torch.Tensor) or value is None else hint(value)
    if isinstance(x, (list, tuple)):
        return [number(y) for y in x]
    return hint(x)


def argument(node: fx.Node, position: int, key: str, default: Any = None) -> Any:
    """An argument of a call by position or keyword, numbers made plain."""
    if position < len(args(node)):
        return number(args(node)[position])
    return number(node.kwargs.get(key, default))


def inputs(node: fx.Node) -> list[fx.Node]:
    """The tensors a node reads, in the order of its arguments."""
    return [n for n in node.all_input_nodes if is_tensor(n)]


def where(node: fx.Node) -> str:
    """``file.py:line`` of the user's code behind a Dynamo node, or ``""``: the deepest frame of its stack trace outside torch."""
    for line in reversed((node.meta.get("stack_trace") or "").splitlines()):
        line = line.strip()
        if line.startswith('File "') and '", line ' in line:
            path, _, rest = line[6:].partition('", line ')
            if "/site-packages/torch/" in path.replace(chr(92), "/"):
                continue
            return f"{path.replace(chr(92), '/').rsplit('/', 1)[-1]}:{rest.split(',')[0].strip()}"
    return ""
