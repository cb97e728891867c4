"""Matrix products by what they sum over: matmul, bmm, baddbmm and einsum as one thing.

A dim is a tuple of *atoms*: named extents that may be fused in one dim (batch and heads in ``bmm``) and that views split and
merge. Two operands share an atom where the product pairs it up, and the atoms that the result lacks are summed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fasa_compile.patterns import graph
from fasa_compile.patterns.tables import Tables

Dim = tuple[str, ...]
_fresh = itertools.count()


@dataclass(frozen=True)
class Product:
    """``left`` and ``right`` are the operands with the atoms of their dims; ``added`` is what baddbmm adds."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    left_dims: tuple[Dim, ...]
    right_dims: tuple[Dim, ...]
    dims: tuple[Dim, ...]
    added: fx.Node | None = None
    factor: Any = 1.0  # a number, or the node of a symbolic one
    added_factor: Any = 1.0


class Atoms:
    """Sizes of the atoms of one attention, and which atom was split into which."""

    def __init__(self) -> None:
        self.size: dict[str, int] = {}
        self.parts: dict[str, Dim] = {}

    def new(self, size: int) -> str:
        name = f"a{next(_fresh)}"
        self.size[name] = size
        return name

    def split(self, atom: str, sizes: list[int]) -> Dim:
        self.parts[atom] = tuple(self.new(s) for s in sizes)
        return self.parts[atom]

    def leaves(self, dim: Dim) -> Dim:
        """A dim's atoms, each replaced by what it was split into."""
        out: list[str] = []
        for atom in dim:
            out.extend(self.leaves(self.parts[atom]) if atom in self.parts else (atom,))
        return tuple(out)

    def extent(self, dim: Dim) -> int:
        n = 1
        for atom in dim:
            n *= self.size[atom]
        return n

    def regroup(self, dims: tuple[Dim, ...], shape: tuple[int, ...]) -> tuple[Dim, ...] | None:
        """The dims after a view to ``shape``; atoms are split where the view splits them. None where it cuts across."""
        left = [a for dim in dims for a in self.leaves(dim) if self.size[a] > 1]
        out: list[Dim] = []
        for extent in shape:
            got: list[str] = []
            while self.extent(tuple(got)) < extent:
                if not left:
                    return None
                atom = left.pop(0)
                need = extent // self.extent(tuple(got))
                if self.size[atom] > need:
                    if self.size[atom] % need:
                        return None
                    first, rest = self.split(atom, [need, self.size[atom] // need])
                    atom, left = first, [rest, *left]
                got.append(atom)
            if self.extent(tuple(got)) != extent:
                return None
            out.append(tuple(got))
        return tuple(out) if not left else None


def product(node: fx.Node, atoms: Atoms) -> Product | None:
    """Reads a node as a product of two tensors; None where it is none."""
    kind = graph.name(node)
    if kind in ("matmul", "bmm", "mm"):
        return _matmul(node, graph.args(node)[0], graph.args(node)[1], atoms)
    if kind == "baddbmm":
        added, left, right = graph.args(node)[:3]
        plain = _matmul(node, left, right, atoms)
        if plain is None:
            return None
        beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
        return replace(plain, added=added if beta != 0 else None, factor=alpha, added_factor=beta)
    if kind == "einsum":
        return _einsum(node, atoms)
    return None


def _matmul(node: fx.Node, left: fx.Node, right: fx.Node, atoms: Atoms) -> Product | None:
    a, b = graph.shape(left), graph.shape(right)
    if len(a) < 2 or len(b) < 2:
        return None
    summed, row, column = atoms.new(a[-1]), atoms.new(a[-2]), atoms.new(b[-1])
    lead_a, lead_b, lead = [], [], []
    for i in range(max(len(a), len(b)) - 2, 0, -1):
        sa = a[-2 - i] if len(a) - 2 >= i else None
        sb = b[-2 - i] if len(b) - 2 >= i else None
        atom = atoms.new(max(sa or 1, sb or 1))
        lead.append((atom,))
        if sa is not None:
            lead_a.append((atom,) if sa == atoms.size[atom] else ())
        if sb is not None:
            lead_b.append((atom,) if sb == atoms.size[atom] else ())
    return Product(
        node,
        left,
        right,
        (*lead_a, (row,), (summed,)),
        (*lead_b, (summed,), (column,)),
        (*lead, (row,), (column,)),
    )


def _einsum(node: fx.Node, atoms: Atoms) -> Product | None:
    equation, operands = graph.args(node)[:2]
    text = str(equation).replace(" ", "")
    if len(operands) != 2 or "..." in text:
        return None
    sides, _, out = text.partition("->")
    terms = sides.split(",")
    if "->" not in text:
        out = "".join(sorted(c for c in set(sides) - {","} if sides.count(c) == 1))
    if any(len(set(t)) != len(t) for t in (*terms, out)):
        return None  # a diagonal
    letter: dict[str, str] = {}
    dims: list[tuple[Dim, ...]] = []
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        for c, s in zip(term, graph.shape(operand), strict=True):
            sizes[c] = max(sizes.get(c, 1), s)
    for c, s in sizes.items():
        letter[c] = atoms.new(s)
    for term, operand in zip(terms, operands, strict=True):
        shape = graph.shape(operand)
        dims.append(tuple((letter[c],) if s == sizes[c] else () for c, s in zip(term, shape, strict=True)))
    left, right = operands
    return Product(node, left, right, dims[0], dims[1], tuple((letter[c],) for c in out))


def of_data(node: fx.Node, tables: Tables) -> bool:
    """Whether a node is a product of two tensors that both depend on the tokens: scores, or weights times values."""
    kind = graph.name(node)
    operands: list[object] = []
    if kind in ("matmul", "bmm"):
        operands = list(graph.args(node)[:2])
    elif kind == "baddbmm":
        operands = list(graph.args(node)[1:3])
    elif kind == "einsum":
        operands = list(graph.args(node)[1])
    return len(operands) == 2 and all(
        isinstance(x, fx.Node) and (tables.marks.is_data(x) or tables.marks.is_input(x)) for x in operands
    )
