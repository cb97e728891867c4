"""Attention written out: products of queries and keys, softmax, products with values.

The scores are followed from the softmax back to the product of queries and keys, then read forwards, so that every step in
between is either understood (a scale, a soft cap, a mask, sinks, a cast, a view) or named in a refusal. The weights are
followed from the softmax to the product with the values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState

from fasa_compile.patterns import graph, movement
from fasa_compile.patterns.attention import Found, MaskKind, Refused, register
from fasa_compile.patterns.contraction import Atoms, Dim, Product, product
from fasa_compile.patterns.scores import KEEPS, TURNS, VIEWS, scores, straight, weights
from fasa_compile.patterns.tables import DATA, INPUT, Tables
from fasa_compile.patterns.traced import traced
from fasa_compile.sites import Expr

aten = torch.ops.aten
_HIDDEN = -1e3  # a value that a softmax turns into nothing: -inf, finfo.min, -1e9, -1e4


@register("written-out", "softmax", "_softmax", "special_softmax")
def written_out(node: fx.Node, tables: Tables) -> Found | None:
    """``softmax(q @ k.T * scale + mask) @ v``: matmul, bmm, baddbmm or einsum; soft cap; sinks as one more column.

    None for a softmax that is no attention (a router, a sampler): one whose scores are no product of two tensors that depend
    on the tokens, or whose result is not multiplied with a third.
    """
    after = weights(node, tables)
    if after is None:
        return None
    before = scores(graph.args(node)[0], tables)
    if before is None:
        return None
    atoms = Atoms()
    qk = product(before[-1], atoms)
    if qk is None:
        raise Refused("unknown-attention", f"the product {before[-1].name} could not be read")
    return _Reading(node, tables, atoms, qk, before, after).found()


def constant(x: Any, tables: Tables) -> float:
    """A factor that is a number of the graph; a tensor of one element counts where it is a buffer."""
    if isinstance(x, fx.Node):
        value = x.meta.get("val")
        if isinstance(value, torch.SymFloat):
            return _fixed(x, tables)
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not tables.marks.bits.get(x, DATA) & ~INPUT:
            rely(x, tables)
            return float(tables.value(x))
        raise Refused("unsupported-value", f"{x.name} is not a constant of the graph")
    return float(x)


def rely(node: fx.Node, tables: Tables) -> None:
    """Note the inputs that a number was read from: Dynamo does not guard a tensor's values, so the runtime watches them."""
    place = {n: i for i, n in enumerate(tables.shadow.inputs)}
    todo, seen = [node], set()
    while todo:
        head = todo.pop()
        if head not in seen:
            seen.add(head)
            todo.extend(head.all_input_nodes)
            if head in place:
                tables.shadow.relied.add(place[head])


def _fixed(node: fx.Node, tables: Tables) -> float:
    """The number behind a Python float that Dynamo traced as a symbol, which it does with ``dynamic=True``.

    A number in a site has to be a number of the graph. Dynamo is told to take the floats that this one was computed from as
    such, guarded, and to trace again: raises ``TensorifyScalarRestartAnalysis``, which a backend must let pass. Raises
    ``Refused`` where that did not help.
    """
    shadow = tables.shadow
    of = dict(zip(shadow.inputs, shadow.dynamo.graph.find_nodes(op="placeholder"), strict=True))
    names, todo = set(), [node]
    while todo:
        head = todo.pop()
        if head.op != "placeholder":
            todo.extend(head.all_input_nodes)
            continue
        symbol = getattr(of[head].meta.get("example_value"), "item_memo", None)
        name = getattr(getattr(getattr(symbol, "node", None), "_expr", None), "name", None)
        if name is None or TensorifyState.should_specialize(name):
            raise Refused(
                "unsupported-value", f"{node.name} is a symbol, and Dynamo makes no constant of {of[head].name}"
            )
        names.add(name)
    for name in names:
        TensorifyState.specialize(name)
    raise TensorifyScalarRestartAnalysis


@dataclass
class _Reading:
    """One attention while it is read forwards, from the product of queries and keys to the product with the values."""

    softmax: fx.Node
    tables: Tables
    atoms: Atoms
    scores: Product
    before: list[fx.Node]  # from the softmax's input back to the product
    after: list[fx.Node]  # from the softmax to the product with the values
    scale: float = 1.0
    softcap: float = 0.0
    # node, dims of the scores there, "bool" | "hidden" | "additive", factor
    masks: list[tuple[fx.Node, tuple[Dim, ...], str, float]] = field(default_factory=list)
    sinks: tuple[fx.Node, tuple[Dim, ...]] | None = None
    shifted: str = ""  # a node that moved all scores of a query alike: a softmax does not see it, a tanh or a sink does
    notes: list[str] = field(default_factory=list)

    def found(self) -> Found:
        right_dims = {a for d in self.scores.right_dims for a in d}
        last = self._softmax_atom()
        q, k, qd, kd = (
            (self.scores.left, self.scores.right, self.scores.left_dims, self.scores.right_dims)
            if last in right_dims
            else (self.scores.right, self.scores.left, self.scores.right_dims, self.scores.left_dims)
        )
        dims = self._read_scores()
        weights = self._read_weights(dims)
        value = product(self.after[-1], self.atoms)
        if value is None:
            raise Refused("unknown-attention", f"the product {self.after[-1].name} could not be read")
        v, vd, out = self._unify(value, weights, self.before_last)
        return self._canonical(last, q, qd, k, kd, v, vd, out)

    # ---- forwards from the scores to the softmax ------------------------------------------------------------------

    def _softmax_atom(self) -> str:
        """The atom of the keys: the softmax's dim of the product. Views before the softmax leave the last dim alone."""
        rank = len(graph.shape(graph.args(self.softmax)[0]))
        dim = graph.argument(self.softmax, 1, "dim", -1)
        if dim % rank != rank - 1 or len(self.scores.dims[-1]) != 1:
            raise Refused("unknown-attention", f"expected a softmax over the last dim, found dim {dim} of {rank}")
        return self.scores.dims[-1][0]

    def _read_scores(self) -> tuple[Dim, ...]:
        dims = self.scores.dims
        self.scale = constant(self.scores.factor, self.tables)
        if self.scores.added is not None and not self._zero(self.scores.added):
            self._masked(self.scores.added, dims, "additive", constant(self.scores.added_factor, self.tables))
        tanh: float | None = None
        for node, source in zip(reversed(self.before[:-1]), reversed(self.before), strict=False):
            kind = graph.name(node)
            if kind in KEEPS:
                self._no_dropout(node)
            elif kind in VIEWS:
                dims = self._regroup(dims, node)
            elif kind in TURNS:
                dims = self._turn(dims, node)
            elif kind in ("mul", "div", "true_divide"):
                by = self._factor(node, source)
                if tanh is not None and not self.softcap:
                    self.softcap, self.scale = by, tanh * by
                elif self.masks or self.sinks is not None or self.softcap:
                    raise Refused("unknown-attention", f"{node.name} scales scores that are masked or capped already")
                else:
                    self.scale *= by
            elif kind == "tanh":
                if self.shifted:
                    raise Refused("unknown-attention", f"{self.shifted} shifts the scores before {node.name}")
                if tanh is not None or self.masks:
                    raise Refused("unknown-attention", f"{node.name}: tanh of scores that are masked or capped already")
                tanh = self.scale
            elif kind in ("add", "sub"):
                self._added(node, source, dims)
            elif kind == "masked_fill":
                self._fill(node, graph.args(node)[1], graph.args(node)[2], dims, "hidden")
            elif kind == "where":
                first = graph.args(node)[1] is source
                self._fill(
                    node, graph.args(node)[0], graph.args(node)[2 if first else 1], dims, "bool" if first else "hidden"
                )
            elif kind in ("cat", "concat"):
                self._column(node, dims)
            else:
                raise Refused("unknown-attention", f"expected scores, found {kind} ({node.name})")
        if tanh is not None and not self.softcap:
            self.softcap, self.scale = 1.0, tanh
        return dims

    @staticmethod
    def _zero(node: fx.Node) -> bool:
        """Whether a node holds zeros whatever the inputs are: baddbmm used as a scaled product adds them."""
        while graph.name(node) in movement.PULL and isinstance(graph.args(node)[0], fx.Node):
            node = graph.args(node)[0]
        return graph.name(node) in ("zeros", "zeros_like", "new_zeros")

    def _no_dropout(self, node: fx.Node) -> None:
        if (
            graph.name(node) == "dropout"
            and graph.argument(node, 1, "p", 0.5)
            and graph.argument(node, 2, "train", True)
        ):
            raise Refused("dropout", f"{node.name}: p={graph.argument(node, 1, 'p')}")

    def _regroup(self, dims: tuple[Dim, ...], node: fx.Node) -> tuple[Dim, ...]:
        new = self.atoms.regroup(dims, graph.shape(node))
        if new is None:
            raise Refused("unknown-attention", f"{node.name} regroups the scores to {graph.shape(node)}")
        return new

    @staticmethod
    def _turn(dims: tuple[Dim, ...], node: fx.Node) -> tuple[Dim, ...]:
        if graph.name(node) == "permute":
            return tuple(dims[d] for d in movement.arguments(node)[0])
        a, b = (d % len(dims) for d in movement.arguments(node)[:2])
        turned = list(dims)
        turned[a], turned[b] = turned[b], turned[a]
        return tuple(turned)

    def _factor(self, node: fx.Node, source: fx.Node) -> float:
        a, b = graph.args(node)[:2]
        if graph.name(node) == "mul":
            return constant(b if a is source else a, self.tables)
        if a is not source:
            raise Refused("unknown-attention", f"{node.name} divides by the scores")
        return 1.0 / constant(b, self.tables)

    def _added(self, node: fx.Node, source: fx.Node, dims: tuple[Dim, ...]) -> None:
        a, b = graph.args(node)[:2]
        other = b if a is source else a
        sign = float(graph.argument(node, 2, "alpha", 1)) * (-1.0 if graph.name(node) == "sub" else 1.0)
        if graph.name(node) == "sub" and a is not source:
            raise Refused("unknown-attention", f"{node.name} subtracts the scores")
        if not isinstance(other, fx.Node) or not graph.is_tensor(other):
            if self.sinks is None:
                self.shifted = node.name  # one number more for every score
                return
            raise Refused("unknown-attention", f"{node.name} shifts scores and sinks")
        size = graph.shape(other)
        if not size or size[-1] == 1:
            self.shifted = node.name  # the same for all keys of a query (their maximum, say)
            return
        self._masked(other, dims, "additive", sign)

    def _masked(self, mask: fx.Node, dims: tuple[Dim, ...], kind: str, factor: float = 1.0) -> None:
        if self.sinks is not None:
            raise Refused("unknown-mask", f"{mask.name} masks scores and sinks")
        if straight(mask, self.tables):
            raise Refused("unknown-attention", f"the scores are a sum of products ({mask.name})")
        self.masks.append((mask, dims, kind, factor))

    def _fill(self, node: fx.Node, condition: Any, value: Any, dims: tuple[Dim, ...], kind: str) -> None:
        if isinstance(value, fx.Node) and graph.is_tensor(value):
            rely(value, self.tables)
            value = float(self.tables.value(value).max())
        elif isinstance(value, fx.Node):
            value = constant(value, self.tables)
        if not isinstance(condition, fx.Node) or float(value) > _HIDDEN:
            raise Refused("unknown-mask", f"{node.name} fills scores with {value}")
        self._masked(condition, dims, kind)

    def _column(self, node: fx.Node, dims: tuple[Dim, ...]) -> None:
        """``cat([scores, sinks], -1)``: one more column that takes part in the softmax and is cut off after it."""
        if self.shifted:
            raise Refused("unknown-attention", f"{self.shifted} shifts the scores and not the sinks of {node.name}")
        pieces: Any = graph.args(node)[0]
        dim = graph.argument(node, 1, "dim", 0)
        if len(pieces) != 2 or dim % len(dims) != len(dims) - 1 or graph.shape(pieces[1])[-1] != 1 or self.sinks:
            raise Refused(
                "unknown-attention", f"{node.name} joins scores with something that is not one column of sinks"
            )
        self.sinks = (pieces[1], dims)

    # ---- forwards from the softmax to the values ------------------------------------------------------------------

    def _read_weights(self, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        cut = self.sinks is None
        self.before_last = self.softmax
        for node in self.after[:-1]:
            kind = graph.name(node)
            if kind in KEEPS:
                self._no_dropout(node)
            elif kind in VIEWS and cut:
                dims = self._regroup(dims, node)
            elif kind in TURNS and cut:
                dims = self._turn(dims, node)
            elif kind == "slice" and not self._cuts_nothing(node, dims):
                dim, start, stop, step = movement.span(movement.arguments(node), graph.shape(graph.args(node)[0]))
                extent = self.atoms.extent(dims[-1])
                if cut or dim != len(dims) - 1 or (start, stop, step) != (0, extent, 1):
                    raise Refused("unknown-attention", f"{node.name} cuts the weights")
                cut = True
            elif kind not in ("slice", "expand"):
                raise Refused("unknown-attention", f"expected weights, found {kind} ({node.name})")
            self.before_last = node
        if not cut:
            raise Refused("unknown-attention", "the column of sinks is not cut off before the product with the values")
        return dims

    def _cuts_nothing(self, node: fx.Node, dims: tuple[Dim, ...]) -> bool:
        return graph.shape(node) == graph.shape(graph.args(node)[0])

    def _unify(
        self, value: Product, weights: tuple[Dim, ...], operand: fx.Node
    ) -> tuple[fx.Node, tuple[Dim, ...], tuple[Dim, ...]]:
        """The values' operand, its dims and the result's dims, in the atoms of the scores."""
        if value.added is not None or value.factor != 1:
            raise Refused("unknown-attention", f"{value.node.name} adds to the weighted values")
        on_left = value.left is operand
        mine, other = (value.left_dims, value.right_dims) if on_left else (value.right_dims, value.left_dims)
        names: dict[str, Dim] = {}
        for dim, known in zip(mine, weights, strict=True):
            known = self.atoms.leaves(known)
            if len(dim) == 1:
                names[dim[0]] = known
            elif self.atoms.extent(known) != 1:
                raise Refused("unknown-attention", f"the weights are broadcast in {value.node.name}")

        def renamed(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
            return tuple(tuple(x for a in dim for x in names.get(a, (a,))) for dim in dims)

        return (value.right if on_left else value.left), renamed(other), renamed(value.dims)

    # ---- canonical layouts ----------------------------------------------------------------------------------------

    def _canonical(
        self,
        last: str,
        q: fx.Node,
        qd: tuple[Dim, ...],
        k: fx.Node,
        kd: tuple[Dim, ...],
        v: fx.Node,
        vd: tuple[Dim, ...],
        out: tuple[Dim, ...],
    ) -> Found:
        leaves = self.atoms.leaves
        in_q = [a for d in qd for a in leaves(d)]
        in_k = [a for d in kd for a in leaves(d)]
        in_out = [a for d in self.scores.dims for a in leaves(d)]
        summed = [a for a in in_q if a in in_k and a not in in_out]
        if len(summed) != 1 or leaves((last,)) != (last,):
            raise Refused("unknown-attention", f"{self.scores.node.name} does not sum over one dim of a head")
        row = self._row(in_q, in_k, in_out)
        lead = [a for a in in_out if a not in (row, last)]
        batch, heads = self._batch_and_heads(lead, q)
        width = [a for d in vd for a in leaves(d) if a != last and a not in in_out and a not in heads and a != batch]
        if len(width) != 1:
            raise Refused("unknown-attention", f"the values {v.name} do not hold one vector a key")
        arrange = self._arrange
        steps = self._output(out, batch, heads, row, width[0])
        mask, kind = self._mask(batch, heads, row, last)
        return Found(
            anchor="written-out",
            output=self.after[-1],
            q=arrange(Expr(q), qd, batch, heads, row, summed[0]),
            k=arrange(Expr(k), kd, batch, heads, last, summed[0]),
            v=arrange(Expr(v), vd, batch, heads, last, width[0]),
            scale=self.scale,
            mask=mask,
            mask_kind=kind,
            softcap=self.softcap,
            sinks=self._sinks(batch, heads, row),
            output_steps=steps,
            notes=tuple(self.notes),
        )

    def _row(self, in_q: list[str], in_k: list[str], in_out: list[str]) -> str:
        """The atom of the queries' tokens: of the dims that only queries have, the one that is no group of heads."""
        own = [a for a in in_out if a in in_q and a not in in_k]
        if not own:
            raise Refused("unknown-attention", f"{self.scores.node.name} has no dim of query tokens")
        if graph.name(self.scores.node) != "einsum" or len(own) == 1:
            return own[-1]
        shared = [a for a in in_q if a in in_k]
        heads = shared[1:-1]
        groups = [a for a in own if in_q.index(a) and in_q[in_q.index(a) - 1] in heads]
        rest = [a for a in own if a not in groups]
        if len(rest) == 1:
            return rest[0]
        if not heads:  # keys without heads: scores are written heads, query tokens, keys
            return rest[-1]
        raise Refused("unknown-attention", f"{self.scores.node.name}: which dim holds the query tokens cannot be told")

    def _batch_and_heads(self, lead: list[str], q: fx.Node) -> tuple[str | None, list[str]]:
        if len(lead) >= 2:
            return lead[0], lead[1:]
        if not lead:
            return None, []
        if len(graph.shape(self.softmax)) > 3:
            return None, lead
        node = q
        for _ in range(8):  # a fused batch of heads: the view that fused it tells where to split
            size = graph.shape(node)
            if len(size) == 4 and size[0] * size[1] == self.atoms.size[lead[0]]:
                first, second = self.atoms.split(lead[0], [size[0], size[1]])
                return first, [second]
            step = movement.pull(node, tuple(torch.zeros(1, dtype=torch.long).numpy() for _ in size))
            if step is None:
                break
            node = step[0]
        return None, lead

    def _arrange(
        self, expr: Expr, dims: tuple[Dim, ...], batch: str | None, heads: list[str], row: str, column: str
    ) -> Expr:
        """An operand as [B, Hq, row, column]; heads that it lacks are expanded."""
        heads = list(self.atoms.leaves(tuple(heads)))
        layout: list[str | None] = []
        for dim in dims:
            parts = self.atoms.leaves(dim)
            if len(parts) > 1:
                expr = expr.then(aten.unflatten.int, len(layout), [self._static(a) for a in parts])
            layout.extend(parts or (None,))
        for at in reversed([i for i, a in enumerate(layout) if a is None]):
            expr = expr.then(aten.select.int, at, 0)
            del layout[at]
        want = [*([batch] if batch else []), *heads, row, column]
        if set(layout) - set(want):
            raise Refused(
                "unknown-attention", f"{expr.node.name} has a dim that is neither batch, head, token nor width"
            )
        missing = [a for a in want if a not in layout]
        for _ in missing:
            expr = expr.then(aten.unsqueeze.default, len(layout))
            layout.append(missing[len(layout) - len(want) + len(missing)])
        order = [layout.index(a) for a in want]
        if order != list(range(len(order))):
            expr = expr.then(aten.permute.default, order)
        if any(self.atoms.size[a] > 1 for a in missing):
            expr = expr.then(aten.expand.default, [self._static(a) if a in missing else -1 for a in want])
        if batch is None:
            expr = expr.then(aten.unsqueeze.default, 0)
        if not heads:
            expr = expr.then(aten.unsqueeze.default, 1)
        elif len(heads) > 1:
            expr = expr.then(aten.flatten.using_ints, 1, len(heads))
        return expr

    def _static(self, atom: str) -> int:
        return self.atoms.size[atom]

    def _output(
        self, out: tuple[Dim, ...], batch: str | None, heads: list[str], row: str, width: str
    ) -> tuple[tuple[Any, tuple[Any, ...]], ...]:
        """Views from [B, Hq, T, Dv] to the result's own layout."""
        heads = list(self.atoms.leaves(tuple(heads)))
        steps: list[tuple[Any, tuple[Any, ...]]] = []
        if not heads:
            steps.append((aten.select.int, (1, 0)))
        elif len(heads) > 1:
            steps.append((aten.unflatten.int, (1, [self._static(a) for a in heads])))
        if batch is None:
            steps.append((aten.select.int, (0, 0)))
        have = [*([batch] if batch else []), *heads, row, width]
        dims = [self.atoms.leaves(d) for d in out]
        flat = [a for d in dims for a in d]
        for atom in reversed([a for a in have if a not in flat]):
            if self.atoms.size[atom] != 1:
                raise Refused("unknown-attention", "the result lacks a dim of the scores")
            steps.append((aten.select.int, (have.index(atom), 0)))
            have.remove(atom)
        if set(flat) != set(have):
            raise Refused("unknown-attention", "the result has a dim that the scores lack")
        order = [have.index(a) for a in flat]
        if order != list(range(len(order))):
            steps.append((aten.permute.default, (order,)))
        for at, dim in enumerate(dims):
            if len(dim) > 1:
                steps.append((aten.flatten.using_ints, (at, at + len(dim) - 1)))
            elif not dim:
                steps.append((aten.unsqueeze.default, (at,)))
        return tuple(steps)

    def _mask(self, batch: str | None, heads: list[str], row: str, last: str) -> tuple[Expr | None, MaskKind]:
        """The mask as an ``Expr`` that broadcasts to [B, Hq, T, L]."""
        read = [(*self._one_mask(m, batch, heads, row, last), m[3]) for m in self.masks]
        if not read:
            return None, "none"
        if len(read) == 1 and read[0][2] == 1.0:
            return read[0][:2]
        kinds = [(expr.steps, kind, factor) for expr, kind, factor in read]

        def together(*masks: torch.Tensor) -> torch.Tensor:
            seen: torch.Tensor | None = None
            added: torch.Tensor | None = None
            for mask, (steps, kind, factor) in zip(masks, kinds, strict=True):
                for op, arguments in steps:
                    mask = op(mask, *arguments)
                if kind == "bool":
                    seen = mask if seen is None else seen & mask
                else:
                    added = mask.float() * factor if added is None else added + mask.float() * factor
            if added is None:
                assert seen is not None
                return seen
            return added if seen is None else torch.where(seen, added, float("-inf"))

        made = traced(self.tables.shadow, self.softmax, together, [expr.node for expr, _, _ in read])
        return Expr(made), "bool" if all(kind == "bool" for _, kind, _ in read) else "additive"

    def _one_mask(
        self,
        mask: tuple[fx.Node, tuple[Dim, ...], str, float],
        batch: str | None,
        heads: list[str],
        row: str,
        last: str,
    ) -> tuple[Expr, MaskKind]:
        node, dims, kind, _ = mask
        expr = self._broadcast(node, dims, batch, heads, row, last)
        if kind == "additive":
            if graph.tensor(node).dtype == torch.bool:
                raise Refused("unknown-mask", f"the mask {node.name} is added, but it is boolean")
            return expr, "additive"
        if graph.tensor(node).dtype != torch.bool:
            expr = expr.then(aten.to.dtype, torch.bool)
        return expr.then(aten.logical_not.default) if kind == "hidden" else expr, "bool"

    def _broadcast(
        self, node: fx.Node, dims: tuple[Dim, ...], batch: str | None, heads: list[str], row: str, last: str
    ) -> Expr:
        size, expr = graph.shape(node), Expr(node)
        dims = tuple(self.atoms.leaves(d) for d in dims)[len(dims) - len(size) :]
        heads = list(self.atoms.leaves(tuple(heads)))
        layout: list[tuple[str | None, int]] = []  # (atom, size) per dim of the mask
        for dim, extent in zip(dims, size, strict=True):
            if len(dim) > 1 and extent > 1:
                expr = expr.then(aten.unflatten.int, len(layout), [self._static(a) for a in dim])
                layout.extend((a, self.atoms.size[a]) for a in dim)
            else:
                layout.append((dim[0] if len(dim) == 1 else None, extent))
        for at in reversed([i for i, (a, s) in enumerate(layout) if a is None or (s == 1 and a in heads)]):
            expr = expr.then(aten.select.int, at, 0)
            del layout[at]
        names = [a for a, _ in layout]
        if any(a not in (batch, row, last, *heads) for a in names):
            raise Refused("unknown-mask", f"{node.name} has a dim that the scores lack")
        kept = [a for a in heads if a in names]
        if kept and len(kept) != len(heads):
            raise Refused("unknown-mask", f"{node.name} tells apart some head dims only")
        want = [a for a in (batch, *heads, row, last) if a in names]
        order = [names.index(a) for a in want]
        if order != list(range(len(order))):
            expr = expr.then(aten.permute.default, order)
        if batch not in want:
            expr = expr.then(aten.unsqueeze.default, 0)
        if not kept:
            expr = expr.then(aten.unsqueeze.default, 1)
        elif len(kept) > 1:
            expr = expr.then(aten.flatten.using_ints, 1, len(kept))
        for at, atom in ((2, row), (3, last)):
            if atom not in want:
                expr = expr.then(aten.unsqueeze.default, at)
        return expr

    def _sinks(self, batch: str | None, heads: list[str], row: str) -> Expr | None:
        """The sinks' column as [Hq]; it must be the same for every sequence and query."""
        if self.sinks is None:
            return None
        node, dims = self.sinks
        if self.tables.marks.is_data(node):
            raise Refused("unsupported-value", f"the sinks {node.name} depend on the tokens")
        heads = list(self.atoms.leaves(tuple(heads)))
        expr, at = Expr(node), 0
        kept: list[str] = []
        value = self.tables.value(node)
        for dim in (*(self.atoms.leaves(d) for d in dims[:-1]), ()):
            if dim and all(a in heads for a in dim):
                kept.extend(dim)
                at += 1
            else:
                if not bool((value == value.select(at, 0).unsqueeze(at)).all()):
                    raise Refused("unsupported-value", f"the sinks {node.name} differ between queries")
                value = value.select(at, 0)
                expr = expr.then(aten.select.int, at, 0)
        if kept != heads:
            raise Refused("unsupported-value", f"the sinks {node.name} are not one number a head")
        return expr.then(aten.flatten.using_ints, 0, -1) if len(heads) > 1 else expr
