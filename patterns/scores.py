"""Ways through a graph around a softmax: back to the product of queries and keys, on to the product with the values."""

from __future__ import annotations

from torch import fx

from fasa_compile.patterns import graph, movement
from fasa_compile.patterns.attention import Refused
from fasa_compile.patterns.contraction import of_data
from fasa_compile.patterns.tables import Tables

_LONGEST = 24  # steps between a product and its softmax
VIEWS = frozenset({"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"})
KEEPS = frozenset({"clone", "alias", "contiguous", "detach", "_to_copy", "to", "type_as", "dropout"})
TURNS = frozenset({"transpose", "permute", "swapaxes"})


def weights(softmax: fx.Node, tables: Tables) -> list[fx.Node] | None:
    """Nodes from the softmax's first user to the product with the values; None where there is no such product."""
    todo: list[list[fx.Node]] = [[user] for user in softmax.users]
    while todo:
        path = todo.pop(0)
        head = path[-1]
        if of_data(head, tables):
            return path
        if graph.is_tensor(head) and (
            graph.name(head) in movement.PULL or graph.name(head) in ("mul", "where", "masked_fill", "div", "add")
        ):
            todo.extend([*path, user] for user in head.users if len(path) < 12)
    return None


def scores(node: fx.Node, tables: Tables) -> list[fx.Node] | None:
    """Nodes from the softmax's input back to the product of queries and keys.

    None where no product of two tensors that depend on the tokens leads there; raises ``Refused`` where one does, on a way that
    cannot be read.
    """
    path, head = [node], node
    while not of_data(head, tables):
        operand = _scored(head, tables)
        if operand is None:
            if _leads(head, tables):
                raise Refused(
                    "unknown-attention", f"expected scores, found {graph.name(head) or head.op} ({head.name})"
                )
            return None
        head = operand
        path.append(head)
    return path


def _scored(node: fx.Node, tables: Tables) -> fx.Node | None:
    """The operand of an elementwise or moving node that holds the scores."""
    kind = graph.name(node)
    if kind in ("cat", "concat"):
        return graph.args(node)[0][0]
    if kind in VIEWS | KEEPS | TURNS | {"slice", "expand", "tanh", "masked_fill", "neg"}:
        return graph.args(node)[0] if isinstance(graph.args(node)[0], fx.Node) else None
    if kind in ("add", "sub", "mul", "div", "where", "true_divide"):
        operands = [
            x for x in graph.args(node) if isinstance(x, fx.Node) and graph.is_tensor(x) and straight(x, tables)
        ]
        return operands[0] if len(operands) == 1 else None
    return None


def straight(node: fx.Node, tables: Tables) -> bool:
    """Whether one way that can be read leads back to a product of two tensors that depend on the tokens."""
    known = tables.straight
    way: list[fx.Node] = []
    head: fx.Node | None = node
    while head is not None and head not in known and tables.marks.is_data(head) and not of_data(head, tables):
        known[head] = False  # until shown otherwise; and an end to the search where it comes by again
        way.append(head)
        head = _scored(head, tables) if len(way) < _LONGEST else None
    found = head is not None and (known.get(head, False) or (tables.marks.is_data(head) and of_data(head, tables)))
    for passed in way:
        known[passed] = found
    return found


def _leads(node: fx.Node, tables: Tables, depth: int = 24) -> bool:
    """Whether a product of two tensors that depend on the tokens is near, through anything but another product or a softmax."""
    todo, seen = [(node, 0)], set()
    while todo:
        head, at = todo.pop()
        if head in seen or at > depth or not tables.marks.is_data(head):
            continue
        seen.add(head)
        if of_data(head, tables):
            return True
        if graph.name(head) in (
            "linear",
            "addmm",
            "softmax",
            "_softmax",
            "scaled_dot_product_attention",
            "mm",
            "embedding",
        ):
            continue
        todo.extend((n, at + 1) for n in head.all_input_nodes)
    return False
