"""Data as linear forms: what an element of q or k is made of, read off the graph.

``Forms.of(node, points)`` writes each of the given elements of a node as a sum of coefficients times *atoms*. An atom is an
element of a node that the reader does not look into: a projection's result, a norm that is not a plain scaling, an input.
Moves, casts, sums, and products with tables are looked through, so that a rotated head comes out as

    lane i = c * a_i - s * a_j          lane j = s * a_i + c * a_j

with the numbers that the graph's own tables hold, however the rotation was spelled: split in halves, stacked, complex, rolled,
multiplied by a matrix, written into slices. Nothing is executed but the tables, and no size matters.

A factor that all lanes of a token share and that depends on the data (the reciprocal norm of a head) is kept as a name, not as
a number. A learned weight per lane that does not depend on the position (a norm's weight) is left out: it scales the atom, or
the finished lane, and turns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import fx

from fasa_compile.patterns import graph, movement
from fasa_compile.patterns.graph import Unreadable
from fasa_compile.patterns.movement import Points
from fasa_compile.patterns.tables import PARAMETER, Tables

_MAX_TERMS = 4096
_CONSTANT = 0  # the atom of terms that hold no data


@dataclass(frozen=True)
class Form:
    """N elements as sums of up to K terms: ``coefficient[n, k] * atom[n, k]``, the atom scaled by ``factor[n, k]`` (0: none)."""

    coefficient: np.ndarray  # [N, K] float64 or complex128
    atom: np.ndarray  # [N, K] int64
    factor: np.ndarray  # [N, K] int64

    @property
    def constant(self) -> bool:
        return not self.atom.any()

    def pattern(self) -> tuple[bytes, bytes, bytes]:
        """The form with its atoms and factors numbered by their order: equal for forms that differ in nothing else."""
        atoms, factors = (np.unique(x, return_inverse=True)[1].astype(np.int32) for x in (self.atom, self.factor))
        constant = (self.atom == _CONSTANT).tobytes()
        return self.coefficient.tobytes() + constant, atoms.tobytes(), factors.tobytes()

    def sources(self) -> set[int]:
        """Numbers of the nodes whose elements are the atoms."""
        return set((self.atom[self.atom != _CONSTANT] >> 40).tolist())

    def times(self, by: np.ndarray | float | complex) -> Form:
        return Form(self.coefficient * (by[:, None] if isinstance(by, np.ndarray) else by), self.atom, self.factor)

    def plus(self, other: Form) -> Form:
        return Form(
            np.concatenate([self.coefficient, other.coefficient], 1),
            np.concatenate([self.atom, other.atom], 1),
            np.concatenate([self.factor, other.factor], 1),
        )

    def real(self) -> Form:
        return Form(self.coefficient.real, self.atom, self.factor)

    def imag(self) -> Form:
        c = self.coefficient
        return Form(c.imag if np.iscomplexobj(c) else np.zeros_like(c), self.atom, self.factor)


def _constant(values: np.ndarray) -> Form:
    zeros = np.zeros((len(values), 1), dtype=np.int64)
    return Form(values[:, None], zeros, zeros)


Split = Callable[[Points], list[movement.Part]]


class Forms:
    """Reads linear forms off one shadow graph.

    With ``through_sums`` false, a sum of tensors that come from different places (an adapter's output and the projection it
    corrects) is an atom of its own; a rotation sums dims of one tensor. ``writes`` are cache writes by operators that only their
    registered readers know.
    """

    def __init__(self, tables: Tables, through_sums: bool = True, writes: dict[fx.Node, Split] | None = None) -> None:
        self.tables, self.through_sums, self.writes = tables, through_sums, writes or {}
        self.numbers = {n: i + 1 for i, n in enumerate(tables.shadow.gm.graph.nodes)}
        self.nodes = {i: n for n, i in self.numbers.items()}
        self.seen: dict[fx.Node, None] = {}  # data nodes looked through, in order
        self.precision = torch.float64  # the coarsest dtype of a table that was multiplied in
        self.used: dict[fx.Node, None] = {}  # the tables that were read
        self.weighted = False  # a learned weight per lane was left out

    def node_of(self, atom: int) -> fx.Node:
        """The node that an atom is an element of."""
        return self.nodes[atom >> 40]

    def of(self, node: fx.Node, points: Points) -> Form:
        """The given elements of a node. Raises ``Unreadable`` where a table cannot be computed."""
        if not self.tables.marks.is_data(node):
            return self._table(node, points)
        if (split := self.writes.get(node)) is not None:
            parts: list[movement.Part] | None = split(points)
        else:
            parts = movement.partition(node, points, self.tables.value)
        if parts is not None:
            self.seen[node] = None
            return self._assemble(parts, len(points[0]))
        rule = _RULES.get(graph.name(node))
        form = rule(self, node, points) if rule is not None else None
        if form is None:
            return self._atom(node, points)
        self.seen[node] = None
        return _merge(form)

    def _atom(self, node: fx.Node, points: Points) -> Form:
        size = graph.shape(node)
        flat = np.ravel_multi_index(points, size) if size else np.zeros(len(points[0]) if points else 1, dtype=np.int64)
        ids = (self.numbers[node] << 40) + np.asarray(flat, dtype=np.int64)[:, None]
        return Form(np.ones(ids.shape), ids, np.zeros_like(ids))

    def _table(self, node: fx.Node, points: Points) -> Form:
        if node not in self.used:
            self.used[node] = None
            self._round(node)
        values = self.tables.array(node)[points]
        return _constant(np.atleast_1d(values))

    def _round(self, table: fx.Node) -> None:
        """Takes note of the coarsest dtype that a table, or anything it was made of, was rounded to."""
        todo, seen = [table], set()
        while todo:
            node = todo.pop()
            if node in seen or not graph.is_tensor(node):
                continue
            seen.add(node)
            todo.extend(node.all_input_nodes)
            dtype = graph.tensor(node).dtype
            if dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(self.precision).eps:
                self.precision = dtype

    def _assemble(self, parts: list[movement.Part], count: int) -> Form:
        if len(parts) == 1 and parts[0].select is None and parts[0].node is not None:
            return self.of(parts[0].node, parts[0].points)
        forms = [
            (
                p.select,
                self.of(p.node, p.points) if p.node is not None else _constant(np.full(_count(p, count), p.fill)),
            )
            for p in parts
        ]
        width = max(f.coefficient.shape[1] for _, f in forms)
        dtype = np.result_type(*[f.coefficient.dtype for _, f in forms])
        coefficient = np.zeros((count, width), dtype=dtype)
        atom, factor = np.zeros((2, count, width), dtype=np.int64)
        for select, form in forms:
            rows = slice(None) if select is None else select
            k = form.coefficient.shape[1]
            coefficient[rows, :k], atom[rows, :k], factor[rows, :k] = form.coefficient, form.atom, form.factor
        return Form(coefficient, atom, factor)

    def operand(self, node: fx.Node, position: int, points: Points) -> Form:
        """An argument of an elementwise call, at the points of its result; a number is a constant."""
        x = graph.args(node)[position]
        if graph.is_tensor(x):
            return self.of(x, movement.broadcast(points, graph.shape(x)))
        x = graph.number(x)
        if isinstance(x, fx.Node) or not isinstance(x, (int, float, complex)):
            raise Unreadable(f"argument {position} of {node.name} is not a number")
        return _constant(np.full(len(points[0]), x))

    def _per_token(self, node: fx.Node, position: int) -> bool:
        """Whether an argument has one element where the result has a row of lanes."""
        x = graph.args(node)[position]
        return graph.is_tensor(x) and graph.shape(x)[-1:] == (1,) != graph.shape(node)[-1:]

    def product(self, node: fx.Node, a: Form, b: Form, invert: bool = False) -> Form | None:
        """a * b (or a / b), for arguments 0 and 1 of ``node``; None where both are data and neither is shared by the lanes."""
        if not b.constant and (invert or not a.constant):
            shared = _shared(b, self._per_token(node, 1))
            if shared is not None:
                return Form(
                    a.coefficient, a.atom, np.where(a.atom != _CONSTANT, a.factor + (-shared if invert else shared), 0)
                )
            if invert or (shared := _shared(a, self._per_token(node, 0))) is None:
                return None
            return Form(b.coefficient, b.atom, np.where(b.atom != _CONSTANT, b.factor + shared, 0))
        data, by, source = (a, b, graph.args(node)[1]) if b.constant else (b, a, graph.args(node)[0])
        if not data.constant and isinstance(source, fx.Node) and self.tables.marks.is_lane_weight(source):
            self.weighted = True
            return data
        scale = by.coefficient.sum(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return data.times(1.0 / scale if invert else scale)


def _count(part: movement.Part, count: int) -> int:
    return count if part.select is None else int(part.select.sum())


def _shared(form: Form, per_token: bool) -> int | None:
    """The name of a data factor that is the same for all N elements, or None. One element alone does not tell."""
    if len(form.atom) < 2 and not per_token:
        return None
    first = (form.coefficient[:1], form.atom[:1], form.factor[:1])
    if all((x == y).all() for x, y in zip((form.coefficient, form.atom, form.factor), first, strict=True)):
        return hash((form.coefficient[0].tobytes(), form.atom[0].tobytes(), form.factor[0].tobytes())) >> 2
    return None


def _merge(form: Form) -> Form:
    """Sums the terms of an element that name one atom. Zero coefficients stay: at position 0 they still tell what is paired."""
    n, k = form.atom.shape
    if k <= 2 and (k < 2 or not (form.atom[:, 0] == form.atom[:, 1]).any()):
        return form
    if k > _MAX_TERMS:
        raise Unreadable(f"an element made of {k} terms")
    order = np.lexsort((form.factor, form.atom), axis=1)
    c, a, f = (np.take_along_axis(x, order, 1) for x in (form.coefficient, form.atom, form.factor))
    fresh = np.ones((n, k), dtype=bool)
    fresh[:, 1:] = (a[:, 1:] != a[:, :-1]) | (f[:, 1:] != f[:, :-1])
    place = np.cumsum(fresh, 1) - 1
    width = int(place.max()) + 1
    rows = np.broadcast_to(np.arange(n)[:, None], (n, k))
    coefficient = np.zeros((n, width), dtype=c.dtype)
    np.add.at(coefficient, (rows, place), c)
    atom, factor = np.zeros((2, n, width), dtype=np.int64)
    atom[rows, place], factor[rows, place] = a, f
    used = (atom != _CONSTANT).any(0) | (coefficient != 0).any(0)
    if not used.any():
        used[0] = True
    return Form(coefficient[:, used], atom[:, used], factor[:, used])


Rule = Callable[[Forms, fx.Node, Points], Form | None]


def _add(sign: float, swapped: bool = False) -> Rule:
    def rule(forms: Forms, node: fx.Node, points: Points) -> Form | None:
        a, b = forms.operand(node, 0, points), forms.operand(node, 1, points)
        if swapped:
            a, b = b, a
        alpha = graph.argument(node, 2, "alpha", 1)
        a, b = (a, b.times(sign * alpha)) if not swapped else (a, b.times(-alpha))
        for constant in (a, b):
            if constant.constant and constant.coefficient.any():
                return None  # a bias: not a linear map of what it was added to
        if a.constant or b.constant:
            return b if a.constant else a
        if not forms.through_sums and not (a.sources() & b.sources()):
            return None
        return a.plus(b)

    return rule


def _mul(forms: Forms, node: fx.Node, points: Points) -> Form | None:
    return forms.product(node, forms.operand(node, 0, points), forms.operand(node, 1, points))


def _div(forms: Forms, node: fx.Node, points: Points) -> Form | None:
    if graph.argument(node, 2, "rounding_mode") is not None:
        return None
    return forms.product(node, forms.operand(node, 0, points), forms.operand(node, 1, points), invert=True)


def _neg(forms: Forms, node: fx.Node, points: Points) -> Form | None:
    return forms.operand(node, 0, points).times(-1.0)


def _addcmul(forms: Forms, node: fx.Node, points: Points) -> Form | None:
    base, left, right = (forms.operand(node, i, points) for i in range(3))
    if not left.constant and not right.constant:
        return None
    data, by = (left, right) if right.constant else (right, left)
    moved = data.times(by.coefficient.sum(1) * graph.argument(node, 3, "value", 1))
    return None if base.constant and base.coefficient.any() else base.plus(moved)


def _masked_fill(forms: Forms, node: fx.Node, points: Points) -> Form | None:
    hidden = forms.operand(node, 1, points).coefficient.sum(1).astype(bool)
    fill = graph.argument(node, 2, "value")
    if isinstance(fill, fx.Node) or (fill != 0 and hidden.any()):
        return None
    return forms.operand(node, 0, points).times((~hidden).astype(float))


def _view_as_complex(forms: Forms, node: fx.Node, points: Points) -> Form | None:
    src: fx.Node = graph.args(node)[0]
    zero = np.zeros_like(points[0])
    return forms.of(src, (*points, zero)).plus(forms.of(src, (*points, zero + 1)).times(1j))


def _view_as_real(forms: Forms, node: fx.Node, points: Points) -> Form | None:
    form = forms.of(graph.args(node)[0], points[:-1])
    second = points[-1] == 1
    return Form(np.where(second[:, None], form.imag().coefficient, form.real().coefficient), form.atom, form.factor)


def _complex(forms: Forms, node: fx.Node, points: Points) -> Form | None:
    return forms.operand(node, 0, points).plus(forms.operand(node, 1, points).times(1j))


def _real(forms: Forms, node: fx.Node, points: Points) -> Form | None:
    return forms.operand(node, 0, points).real()


def _imag(forms: Forms, node: fx.Node, points: Points) -> Form | None:
    return forms.operand(node, 0, points).imag()


def _conj(forms: Forms, node: fx.Node, points: Points) -> Form | None:
    form = forms.operand(node, 0, points)
    return Form(form.coefficient.conj(), form.atom, form.factor)


def _rms_norm(forms: Forms, node: fx.Node, points: Points) -> Form | None:
    """x * weight / rms(x): the reciprocal norm is shared by the normalised dims, so it is a factor with the token's name."""
    src: fx.Node = graph.args(node)[0]
    dims = len(graph.argument(node, 1, "normalized_shape"))
    weight = graph.argument(node, 2, "weight")
    form = forms.of(src, points)
    row = points[: len(points) - dims]
    size = graph.shape(src)[: len(row)]
    token = np.ravel_multi_index(row, size) if row else np.zeros(len(points[0]), dtype=np.int64)
    name = (forms.numbers[node] << 40) + token
    form = Form(form.coefficient, form.atom, form.factor + name[:, None])
    if weight is None:
        return form
    if forms.tables.marks.is_lane_weight(weight):
        forms.weighted = True
        return form
    return form.times(forms.of(weight, points[len(row) :]).coefficient.sum(1))


def _rotation_matrix(forms: Forms, node: fx.Node, points: Points) -> Form | None:
    """data @ table: one term per row of the matrix. A matrix that depends on no weight is looked into, a projection is not."""
    a, b = graph.args(node)[:2]
    marks = forms.tables.marks
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or marks.is_data(a) == marks.is_data(b):
        return None
    table = b if marks.is_data(a) else a
    size_a, size_b = graph.shape(a), graph.shape(b)
    if marks.bits[table] & PARAMETER or len(size_a) < 2 or len(size_b) < 2:
        return None
    lead, (i, j) = points[:-2], points[-2:]
    total: Form | None = None
    for k in range(size_a[-1]):
        at_k = np.full_like(i, k)
        left = forms.of(a, (*movement.broadcast(lead, size_a[:-2]), i, at_k))
        right = forms.of(b, (*movement.broadcast(lead, size_b[:-2]), at_k, j))
        data, by = (left, right) if right.constant else (right, left)
        scale = by.coefficient.sum(1)
        if scale.any():
            # Structural zeros of a matrix say nothing about pairs: only what is there counts.
            kept = data.times(scale)
            kept = Form(kept.coefficient, np.where(scale[:, None] != 0, kept.atom, _CONSTANT), kept.factor)
            total = kept if total is None else _merge(total.plus(kept))
    return total


_RULES: dict[str, Rule] = {
    "add": _add(1.0),
    "sub": _add(-1.0),
    "subtract": _add(-1.0),
    "rsub": _add(0.0, swapped=True),
    "mul": _mul,
    "multiply": _mul,
    "div": _div,
    "true_divide": _div,
    "divide": _div,
    "neg": _neg,
    "negative": _neg,
    "addcmul": _addcmul,
    "masked_fill": _masked_fill,
    "view_as_complex": _view_as_complex,
    "view_as_real": _view_as_real,
    "complex": _complex,
    "real": _real,
    "imag": _imag,
    "conj": _conj,
    "_conj": _conj,
    "conj_physical": _conj,
    "resolve_conj": lambda forms, node, points: forms.operand(node, 0, points),
    "rms_norm": _rms_norm,
    "matmul": _rotation_matrix,
    "bmm": _rotation_matrix,
}
