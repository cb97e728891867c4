"""What RoPE, attention, cache writes and masks look like in a graph: one file a family, one entry a spelling.

``attention`` and ``written`` find attentions, ``cache`` reads how keys got into a cache, ``rope`` proves a rotary embedding from
what ``forms`` reads off the graph. None of them edits anything, and none knows a model.

A spelling that is missing can be registered from outside, without a change to the package::

    from fasa_compile import patterns

    @patterns.register("attention", "my-attention", "mylib.attention")
    def read(node, tables):
        q, k, v = graph.args(node)[:3]
        return patterns.Found("my-attention", node, patterns.Expr(q), patterns.Expr(k), patterns.Expr(v), scale=1.0)

    @patterns.register("cache", "my-write", "mylib.write_rows")
    def write(node, where, evaluate):
        buffer, rows, new = graph.args(node)
        return patterns.Write("my-write", buffer, evaluate(rows).numpy(), patterns.Expr(rows), new)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from fasa_compile.patterns import attention, cache
from fasa_compile.patterns import flash as _flash  # noqa: F401  (anchors register themselves)
from fasa_compile.patterns import flex as _flex  # noqa: F401
from fasa_compile.patterns import written as _written  # noqa: F401
from fasa_compile.patterns.attention import Found, Refused
from fasa_compile.patterns.cache import Where, Write
from fasa_compile.patterns.graph import Unreadable
from fasa_compile.sites import Expr

__all__ = ["Expr", "Found", "Refused", "Unreadable", "Where", "Write", "register", "unregister"]

Kind = Literal["attention", "cache"]


def register(kind: Kind, name: str, *operators: str) -> Callable[[Any], Any]:
    """Register a reader for nodes that call one of ``operators``; use as a decorator.

    ``operators`` are names such as ``softmax`` (ATen) or ``mylib.attention`` (``torch.ops.mylib.attention``), for an attention also
    with ``*`` in them; without any, ``name`` is the operator.

    ``kind="attention"``: ``reader(node, tables) -> Found | None``; ``node`` is a node of the functional ATen graph. It may raise
    ``Refused(reason, detail)``. ``kind="cache"``: ``reader(node, where, evaluate) -> Write | None``; ``where`` tells which dim of
    the node is L, ``evaluate(index_node)`` gives the value of a tensor of indices.

    Raises ValueError for another kind, and for a name that is taken.
    """
    if kind == "attention":
        if name in attention.ANCHORS:
            raise ValueError(
                f"an attention called {name!r} is registered already; unregister it first, or choose another name"
            )
        return attention.register(name, *(operators or (name,)))
    if kind == "cache":
        taken = [o for o in operators or (name,) if o in cache.WRITES]
        if taken:
            raise ValueError(f"a cache write by {taken[0]!r} is registered already; unregister it first")
        return cache.register(*(operators or (name,)))
    raise ValueError(f"kind is 'attention' or 'cache', not {kind!r}")


def unregister(kind: Kind, name: str) -> None:
    """Take back a registration: an attention by its name, a cache write by its operator. Raises KeyError where there is none."""
    if kind == "attention":
        del attention.ANCHORS[name]
    else:
        del cache.WRITES[name]
