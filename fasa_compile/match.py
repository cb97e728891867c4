"""Match: a shadow graph -> one ``AttentionSite`` or ``NoMatch`` per attention, in the order of the graph.

Each attention is found by an anchor (``patterns/attention.py``), its keys are walked back through views to the cache write
(``patterns/layout.py``, ``patterns/cache.py``), and its rotary embedding is proven by what it computes (``patterns/rope.py``).
Nothing is edited, no guard is made, and no model is known by name.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis

from fasa_compile.capture import Shadow
from fasa_compile.patterns import attention, cache, graph, layout, movement, rope
from fasa_compile.patterns.attention import Found, Refused
from fasa_compile.patterns.forms import Forms, Split
from fasa_compile.patterns.graph import Unreadable
from fasa_compile.patterns.movement import Points
from fasa_compile.patterns.rope import NotProven, Turn
from fasa_compile.patterns.tables import POSITION, Marks, Tables, is_size, mark
from fasa_compile.sites import AttentionSite, Cache, Expr, NoMatch, Rope, Shard


def match(shadow: Shadow, *, prove: bool = True, no_rope: bool = False) -> list[AttentionSite | NoMatch]:
    """Every attention of the graph, matched or not: one that cannot be read is a ``NoMatch``.

    ``prove=False`` asks for no rotary embedding of attentions over a cache, for exact attention: their ``rope`` has no pairs.
    ``no_rope=True`` takes attention that has none as it is, also with no pairs; one that cannot be proven is refused all the same.

    Raises ``TensorifyScalarRestartAnalysis`` where a scale is a Python float that Dynamo made a symbol of (``dynamic=True``): the
    backend lets it pass, and Dynamo traces the graph again with the float as a guarded number.
    """
    reader = _Reader(shadow, prove, no_rope)
    found: list[AttentionSite | NoMatch] = []
    for node in shadow.gm.graph.nodes:
        for name, anchor in attention.anchors_at(node):
            result = reader.site(node, name, anchor, len(found))
            if result is not None:
                found.append(result)
                break
    return found


@dataclass(frozen=True)
class _Keys:
    """Where an attention's keys come from: the walk from the operand to the write, and the write."""

    chain: layout.Chain
    canonical: Points
    size: tuple[int, ...]  # (B, Hq, L, D)
    group: int
    symbolic: frozenset[int]  # the axes of size that are symbols
    tokens: int  # T
    write: cache.Write | None
    where: cache.Where | None
    part: _Keys | None = None  # what a cache holds of keys that are computed at every step (from a latent, say)


class _Reader:
    """What is read once per graph, and the walk of one attention."""

    def __init__(self, shadow: Shadow, prove: bool = True, no_rope: bool = False) -> None:
        self.shadow = shadow
        self.prove = prove
        self.no_rope = no_rope
        self.marks: Marks = mark(shadow)
        self.tables = Tables(shadow, self.marks)
        self.data_inputs: frozenset[fx.Node] = frozenset()
        self.dynamo = {node.name: node for node in shadow.dynamo.graph.nodes}
        self.runs: Counter[str] = Counter()
        self.twins = _twins(shadow.gm)
        self.turns: dict[Any, Turn] = {}

    def site(self, node: fx.Node, name: str, anchor: attention.Anchor, index: int) -> AttentionSite | NoMatch | None:
        trace: list[str] = []
        try:
            found = anchor(node, self.tables)
            if found is not None:
                self._take_as_data(found)
            return self._read(found, index, trace) if found is not None else None
        except (Refused, NotProven) as error:
            return self._refuse(node, name, index, error.reason, str(error), trace)
        except Unreadable as error:
            return self._refuse(node, name, index, "failed", str(error), trace)
        except TensorifyScalarRestartAnalysis:
            raise
        except Exception as error:
            # One attention that breaks a reader must not take the others with it: it is reported.
            return self._refuse(node, name, index, "failed", f"{type(error).__name__}: {error}", trace)

    def _take_as_data(self, found: Found) -> None:
        """Queries and new keys that were projected in another graph arrive as inputs: of the size of a projection's result."""
        b, hq, t, d = layout.size_of(found.q)
        sizes = {b * h * t * d for h in range(1, hq + 1) if hq % h == 0 and b * h > 1}  # a table of angles has t * d
        inputs = set()
        for root in (found.q.node, found.k.node):
            todo, seen = [] if self.marks.is_data(root) else [root], set()
            while todo:
                node = todo.pop()
                if node in seen:
                    continue
                seen.add(node)
                todo.extend(node.all_input_nodes)
                if node.op == "placeholder" and self.marks.is_input(node) and int(np.prod(graph.shape(node))) in sizes:
                    inputs.add(node)
        if inputs:
            self.data_inputs |= inputs
            self.marks = mark(self.shadow, self.data_inputs)
            self.tables = Tables(self.shadow, self.marks)

    def _refuse(self, node: fx.Node, name: str, index: int, reason: str, detail: str, trace: list[str]) -> NoMatch:
        layer, source = self._place(self.shadow.origin.get(node, ""))
        return NoMatch(index, layer, source, name, reason, detail, tuple(trace) or (f"{name}: {self._line(node)}",))

    def _place(self, dynamo_name: str) -> tuple[str, str]:
        """(layer, source) of a Dynamo node; a layer that was there before in this graph gets a number."""
        node = self.dynamo.get(dynamo_name)
        layer = layer_of(node) if node is not None else ""
        self.runs[layer] += 1
        if self.runs[layer] > 1:
            layer = f"{layer}#{self.runs[layer]}"
        return layer, graph.where(node) if node is not None else ""

    def _read(self, found: Found, index: int, trace: list[str]) -> AttentionSite:
        output = self._output(found.output)
        trace.append(f"{found.anchor}: {self._line(found.output)}")
        b, hq, t, d = layout.size_of(found.q)
        length, dv = layout.size_of(found.k)[2], layout.size_of(found.v)[3]
        found = self._regrouped(found, (b, hq, length, d))
        found, shard = self._own_part(found, (b, hq, length, d, dv), trace)
        length = layout.size_of(found.k)[2]
        keys = self._keys(found, (b, hq, length, d), trace)
        cached = keys.write is not None and length != t
        proven = self._embedding(found, keys, t, trace) if self.prove or not cached else Rope((), d)

        def held(node: fx.Node) -> fx.Node | None:
            return self._held(node, output)

        k = layout.settle(
            keys.chain, keys.canonical, keys.size, keys.group, held, graph.tensor(found.k.node).dtype, keys.symbolic
        )
        if k is None:
            raise Refused(
                "heads", "the keys could not be brought to [B, Hkv, L, D] by views of a value that the graph holds"
            )
        v = self._values(found, (b, hq, length, dv), keys.group, held)
        origin = self._origin(keys, output, trace)
        q = self._emitted(found.q, output)
        mask = self._emitted(found.mask, output) if found.mask else None
        sinks = self._emitted(found.sinks, output) if found.sinks else None
        layer, source = self._place(output)
        return AttentionSite(
            index=index,
            layer=layer,
            source=source,
            anchor=found.anchor,
            output=output,
            q=q,
            k=k,
            v=v,
            scale=found.scale,
            cache=origin,
            rope=proven,
            shape=self._shape(found, keys.group),
            mask=mask,
            mask_kind=found.mask_kind,
            is_causal=found.is_causal,
            softcap=found.softcap,
            sinks=sinks,
            output_steps=found.output_steps,
            notes=found.notes,
            shard=shard,
        )

    def _output(self, node: fx.Node) -> str:
        """The Dynamo node whose value is a shadow node's."""
        first = self.shadow.origin.get(node)
        for name in (first, *self.shadow._holders.get(node, ())):
            history = self.shadow.history.get(name or "", ())
            if name is not None and history and history[0][1] is node:
                return name
        raise Refused("incomplete-pattern", f"no node of the traced graph holds the attention's result {node.name}")

    def _held(self, node: fx.Node, output: str) -> fx.Node | None:
        """The node, or one that computes the same by the same views, whose value the Dynamo graph holds at ``output``."""
        for twin in (node, *self.twins.get(node, ())):
            if self.shadow.holder(twin, output) is not None:
                return twin
        return None

    def _emitted(self, expr: Expr, output: str) -> Expr:
        if expr.node.meta.get("fasa_made"):  # a mask that an anchor wrote into the shadow: it is to be written out
            return expr
        node = self._held(expr.node, output)
        if node is None:
            raise Refused("incomplete-pattern", f"{expr.node.name} has no node of its own in the traced graph")
        return Expr(node, expr.steps)

    def _line(self, node: fx.Node) -> str:
        name = self.shadow.origin.get(node, "")
        dynamo = self.dynamo.get(name)
        place = graph.where(dynamo) if dynamo is not None else ""
        return f"{graph.name(node) or node.op} {node.name} <- {name or '?'} {place}".rstrip()

    def _shape(self, found: Found, group: int) -> tuple[Any, ...]:
        q, k, v = (layout.symbolic_size(e) for e in (found.q, found.k, found.v))
        heads = k[1] * found.repeat // group if isinstance(k[1], int) else k[1]
        return (q[0], q[1], heads, q[2], k[2], q[3], v[3])

    def _own_part(
        self, found: Found, size: tuple[int, int, int, int, int], trace: list[str]
    ) -> tuple[Found, Shard | None]:
        """Where keys and values are gathered from several processes (``fasa::gather_sequence``): the attention with what this process
        holds in their place, for the rest to be read as if that were all, and which part of the tokens it is.

        Raises ``Refused`` where something else than views stands between the gathered values and the attention.
        """
        b, hq, length, d, dv = size
        chain, canonical = self._walk(found.k, (b, hq, length, d), found.repeat)
        if graph.name(chain.end) != GATHER:
            return found, None
        group = layout.group_of(chain, canonical, hq)
        own: list[Expr] = []
        parts: list[tuple[Any, ...]] = []
        for expr, width in ((found.k, d), (found.v, dv)):
            whole = (b, hq, length, width)
            chain, canonical = self._walk(expr, whole, found.repeat)
            plain = layout.solve(chain.end, chain.points[-1], canonical, whole, group, _symbolic(expr)) == ()
            if graph.name(chain.end) != GATHER or not plain:
                raise Refused(
                    "unknown-cache-write",
                    f"expected the gathered [B, Hkv, L, D] of every process, found {self._line(chain.end)}",
                )
            trace.append(f"gathered: {self._line(chain.end)}")
            local, *part = graph.args(chain.end)
            own.append(Expr(local))
            parts.append(tuple(part))
        if parts[0] != parts[1]:
            raise Refused(
                "unknown-cache-write", f"keys and values are shared out in different ways: {parts[0]}, {parts[1]}"
            )
        return dataclasses.replace(found, k=own[0], v=own[1], repeat=group), Shard(*parts[0])

    # ---- keys and values ------------------------------------------------------------------------------------------

    def _walk(self, expr: Expr, size: tuple[int, ...], repeat: int) -> tuple[layout.Chain, Points]:
        canonical = layout.sample(size)
        grouped = (canonical[0], canonical[1] // repeat, *canonical[2:])
        node, points = layout.follow(expr, grouped)
        return layout.walk(node, points, self.tables.value), canonical

    def _regrouped(self, found: Found, size: tuple[int, ...]) -> Found:
        """The attention with its query heads in the order of the KV heads, where heads were tiled (``k.repeat(1, G, 1, 1)``).

        Raises ``Refused`` where query heads read KV heads in any other way than in equal consecutive groups or tiles.
        """
        heads = size[1]
        chain, canonical = self._walk(found.k, size, found.repeat)
        read = layout.heads_read(chain, canonical, heads)
        count = len(set(read))
        if heads % count == 0 and read == [h // (heads // count) for h in range(heads)]:
            return found
        if heads % count or read != [h % count for h in range(heads)] or found.repeat != 1:
            raise Refused("heads", f"query heads read the KV heads {read}, not equal consecutive groups of them")
        if found.sinks is not None or (found.mask is not None and layout.size_of(found.mask)[-3:-2] not in ((), (1,))):
            raise Refused("heads", "heads are tiled, and the mask or the sinks tell them apart")
        aten, group = torch.ops.aten, heads // count

        def sort(expr: Expr) -> Expr:
            parted = expr.then(aten.unflatten.int, 1, [group, count]).then(aten.permute.default, [0, 2, 1, 3, 4])
            return parted.then(aten.flatten.using_ints, 1, 2)

        back = (
            (aten.unflatten.int, (1, [count, group])),
            (aten.permute.default, ([0, 2, 1, 3, 4],)),
            (aten.flatten.using_ints, (1, 2)),
        )
        return dataclasses.replace(
            found, q=sort(found.q), k=sort(found.k), v=sort(found.v), output_steps=(*back, *found.output_steps)
        )

    def _keys(self, found: Found, size: tuple[int, ...], trace: list[str]) -> _Keys:
        chain, canonical = self._walk(found.k, size, found.repeat)
        trace.extend(f"keys: {self._line(node)}" for node in chain.nodes)
        group = layout.group_of(chain, canonical, size[1])
        tokens = layout.size_of(found.q)[2]
        keys = self._join(_Keys(chain, canonical, size, group, _symbolic(found.k), tokens, None, None), self.tables)
        if keys.write is None:
            for low, high in layout.joined(chain, canonical, self.tables.value):
                dims = dataclasses.replace(found, k=found.k.then(torch.ops.aten.slice.Tensor, 3, low, high))
                part = self._keys(dims, (*size[:3], high - low), trace)
                if part.write is not None:
                    return dataclasses.replace(keys, write=part.write, where=part.where, part=part)
            behind = self._behind(keys) if size[2] != tokens else None
            if behind is not None:
                trace.extend(f"keys, computed from: {self._line(node)}" for node in behind.chain.nodes)
                return dataclasses.replace(keys, write=behind.write, where=behind.where, part=behind)
        return keys

    def _behind(self, keys: _Keys, depth: int = 12) -> _Keys | None:
        """The cache write behind keys that are computed from it dim by dim at every step, such as a rotation of cached keys."""
        for node, points, chosen in layout.operands(keys.chain, keys.canonical, self.marks.is_data, self.tables.value):
            canonical = tuple(p[chosen] for p in keys.canonical)
            chain = layout.walk(node, points, self.tables.value)
            behind = self._join(dataclasses.replace(keys, chain=chain, canonical=canonical), self.tables)
            found = behind if behind.write is not None else self._behind(behind, depth - 1) if depth else None
            if found is not None:
                return found
        return None

    def _join(self, keys: _Keys, tables: Tables) -> _Keys:
        """Reads the node at which the walk ended as a cache write, if it is one."""
        reader = cache.WRITES.get(graph.name(keys.chain.end))
        where = layout.dim_of(keys.chain, keys.canonical, keys.size, keys.tokens) if reader is not None else None
        write = reader(keys.chain.end, where, tables.value) if reader is not None and where is not None else None
        return dataclasses.replace(keys, write=write, where=where)

    def _values(self, found: Found, size: tuple[int, ...], group: int, held: Any) -> Expr:
        chain, canonical = self._walk(found.v, size, found.repeat)
        if size[1] % group or layout.group_of(chain, canonical, size[1]) % group:
            raise Refused("heads", "the values are shared by other groups of query heads than the keys")
        v = layout.settle(chain, canonical, size, group, held, graph.tensor(found.v.node).dtype, _symbolic(found.v))
        if v is None:
            raise Refused(
                "heads", "the values could not be brought to [B, Hkv, L, Dv] by views of a value the graph holds"
            )
        return v

    def _origin(self, keys: _Keys, output: str, trace: list[str]) -> Cache:
        """The cache behind the keys: which input it is, and whether the graph writes it again."""
        if keys.write is None or keys.where is None:
            return Cache("none")
        if keys.part is not None:  # no buffer holds the keys: some dims are computed from the cache at every step
            return Cache(self._origin(keys.part, output, trace).kind, "computed")
        name = keys.write.name
        inputs = self.shadow.dynamo.graph.find_nodes(op="placeholder")
        held = {self.shadow.value(p.name, output): i for i, p in enumerate(inputs) if self.shadow.is_written(i)}
        for node, points in zip(keys.chain.nodes, keys.chain.points, strict=True):
            if node in held:
                steps = layout.solve(node, points, keys.canonical, keys.size, keys.group, keys.symbolic)
                if steps is None:
                    return Cache("static", name)
                i = held[node]
                return Cache(
                    "static",
                    name,
                    k_input=i,
                    k_steps=steps,
                    slots=self._slots(keys, i, steps, output, trace),
                    rewritten_later=node is not self.shadow.final[i],
                )
        return Cache("dynamic", name)

    def _slots(self, keys: _Keys, i: int, steps: Any, output: str, trace: list[str]) -> Expr | None:
        """The rows written, where all other rows stayed what and where they were when the graph began."""
        assert keys.write is not None
        slots = keys.write.slots
        ahead = layout.walk(keys.write.old, keys.chain.points[-1], self.tables.value)
        trace.extend(f"cache: {self._line(node)}" for node in ahead.nodes)
        if slots is None or ahead.end is not self.shadow.inputs[i]:
            return None
        before = layout.solve(ahead.end, ahead.points[-1], keys.canonical, keys.size, keys.group, keys.symbolic)
        if before != steps:
            return None
        node = self._held(slots.node, output)
        return Expr(node, slots.steps) if node is not None else None

    # ---- the rotary embedding -------------------------------------------------------------------------------------

    def _embedding(self, found: Found, keys: _Keys, t: int, trace: list[str]) -> Rope:
        try:
            return self._prove(found, keys, t, trace)
        except NotProven as error:
            if error.reason != "no-rope" or not self.no_rope:
                raise
            return Rope((), keys.size[3])

    def _prove(self, found: Found, keys: _Keys, t: int, trace: list[str]) -> Rope:
        """Proves queries and keys at the last new token, for the first and last head, then at another position."""
        if keys.write is None and keys.chain.end.op == "placeholder":
            return self._ready_made(found, keys, t)
        if keys.write is None and keys.size[2] != t:
            if movement.joins(keys.chain.end):
                raise Refused(
                    "unknown-cache-write", f"expected old and new keys along L, found {self._line(keys.chain.end)}"
                )
            raise Refused("cross-attention", f"{t} queries, {keys.size[2]} keys, none of them from a cache")
        rows = keys.write.rows if keys.write is not None else np.arange(keys.size[2])
        if len(rows) != t:
            raise Refused("incomplete-pattern", f"{t} queries, {len(rows)} new keys")
        forms = Forms(self.tables, writes=_splits(keys))
        try:
            here = self._turns(forms, found, keys, t - 1, int(rows[-1]), trace)
        except NotProven:
            # Sums ahead of the rotation (adapters, convolutions beside a mean) are no part of it: read again without them.
            forms = Forms(self.tables, through_sums=False, writes=_splits(keys))
            here = self._turns(forms, found, keys, t - 1, int(rows[-1]), trace)
        tol = rope.tolerance(forms.precision)
        self._moves(found, keys, forms, here, rows, t, tol)
        return rope.rope(here, keys.size[3], forms.precision)

    def _ready_made(self, found: Found, keys: _Keys, t: int) -> Rope:
        name = keys.chain.end.name
        queries = self._walk(found.q, layout.size_of(found.q), 1)[0].end
        if queries.op == "placeholder":
            raise Refused(
                "incomplete-pattern",
                f"queries and keys are the inputs {queries.name} and {name} of this graph: where they are projected and turned is "
                "another one, before a graph break",
            )
        q = self._turn(Forms(self.tables), found.q, (0, 0, t - 1), keys.size[3], 1, "queries")
        kind = "incomplete-pattern" if q.pairs else "cross-attention"
        raise Refused(kind, f"the keys are the input {name} of this graph, and the graph does not write it")

    def _turn(
        self,
        forms: Forms,
        expr: Expr,
        at: tuple[int, int, int],
        d: int,
        repeat: int,
        who: str,
        trace: list[str] | None = None,
    ) -> Turn:
        b, h, row = at
        points = (*(np.full(d, x, dtype=np.int64) for x in (b, h // repeat, row)), np.arange(d))
        node, inner = layout.follow(expr, points)
        form = forms.of(node, inner)
        if trace is not None:
            made_of = [self._line(forms.node_of(number << 40)) for number in sorted(form.sources())]
            trace.append(f"head {h}: {who} are read as far as {', '.join(made_of[:2]) or 'constants'}")
        tol = rope.tolerance(forms.precision)
        # Heads and layers that are rotated alike differ in their atoms only: what those are does not matter to a turn.
        key = (form.pattern(), tol)
        if (turn := self.turns.get(key)) is None:
            turn = self.turns[key] = rope.turn(form, who, tol)
        return turn

    def _turns(self, forms: Forms, found: Found, keys: _Keys, t: int, row: int, trace: list[str] | None = None) -> Turn:
        """The turn of queries and keys of new token t, which must agree in the heads that are looked at: three of them, and
        all (of a few) where keys are put together anew at every step."""
        d, heads = keys.size[3], keys.size[1]
        k = None
        for h in sorted({0, heads // 2, heads - 1} if keys.part is None else set(range(0, heads, -(-heads // 16)))):
            q = self._turn(forms, found.q, (0, h, t), d, 1, "queries", trace)
            k = self._turn(forms, found.k, (0, h, row), d, found.repeat, "keys", trace)
            if trace is not None:
                trace.append(f"head {h}: queries turn {len(q.pairs)} pairs, keys {len(k.pairs)}")
            rope.agree(q, k, rope.tolerance(forms.precision))
        assert k is not None
        return k

    def _moves(self, found: Found, keys: _Keys, forms: Forms, here: Turn, rows: np.ndarray, t: int, tol: float) -> None:
        """Proves that the rotation turns with the position and starts unturned: at other new tokens, then at other values of
        the graph's integer inputs. Raises ``NotProven``."""
        leaves = self._positions(forms)
        largest = keys.size[2] + max((int(np.max(np.asarray(v))) for v in leaves.values() if np.size(v)), default=0)
        if t > 1:
            first = self._turns(forms, found, keys, 0, int(rows[0]))
            if rope.moves(here, first, tol):
                return rope.starts_unturned(here, first, t - 1, largest, tol)
        moved_any = False
        tensors = {leaf: value for leaf, value in leaves.items() if isinstance(value, torch.Tensor)}
        numbers = {leaf: value for leaf, value in leaves.items() if leaf not in tensors}
        for some, shift in itertools.product((leaves, tensors, numbers), (1, -1)):
            if not some:
                continue
            tables = Tables(self.shadow, self.marks, {leaf: value + shift for leaf, value in some.items()})
            try:
                there = self._there(found, keys, forms, here, tables, t, rows, shift)
            except (Unreadable, ValueError, IndexError):
                continue  # an index out of its table, sizes that no longer fit
            moved_any = True
            if rope.moves(here, there, tol):
                return rope.starts_unturned(here, there, 1, largest, tol)
        # Positions that are literals of the graph cannot be moved; a turn that is not the identity was made by a table then.
        if moved_any or np.abs(here.angles).max() <= 4 * tol:
            raise NotProven("rope-not-proven", "the rotation is the same at every position that was tried")

    def _there(
        self, found: Found, keys: _Keys, forms: Forms, here: Turn, tables: Tables, t: int, rows: np.ndarray, shift: int
    ) -> Turn:
        """The turn at a position that is ``shift`` away, with the graph's inputs moved as ``tables`` has them."""
        moved = self._moved(keys, tables)
        forms_there = Forms(tables, forms.through_sums, _splits(moved))
        try:
            row = int(moved.write.rows[-1]) if moved.write is not None else int(rows[-1])
            return self._turns(forms_there, found, keys, t - 1, row)
        except NotProven:
            if keys.part is None or rows[-1] == 0:
                raise
        # Cached keys that are turned at every step stand at the positions of their rows, whatever the queries' position is:
        # a row before must be turned by as much less as the queries are.
        d = keys.size[3]
        q = self._turn(forms_there, found.q, (0, 0, t - 1), d, 1, "queries")
        k = self._turn(self._cached(keys, forms), found.k, (0, 0, int(rows[-1]) - 1), d, found.repeat, "keys")
        rope.steps_alike(here, q, k, shift, rope.tolerance(forms.precision))
        return q

    def _cached(self, keys: _Keys, forms: Forms) -> Forms:
        """Forms that read what the cache held before as data."""
        while keys.part is not None:
            keys = keys.part
        assert keys.write is not None
        held = layout.walk(keys.write.old, keys.chain.points[-1], self.tables.value).end
        marks = mark(self.shadow, self.data_inputs | {held})
        return Forms(Tables(self.shadow, marks), forms.through_sums, _splits(keys))

    def _moved(self, keys: _Keys, tables: Tables) -> _Keys:
        """The cache write where the graph's inputs have other values."""
        while keys.part is not None:
            keys = keys.part
        return self._join(keys, tables)

    def _positions(self, forms: Forms) -> dict[fx.Node, Any]:
        """Integer inputs that the rotation's tables were computed from, with their example values."""
        todo, seen = list(forms.used), set()
        leaves: dict[fx.Node, Any] = {}
        while todo:
            node = todo.pop()
            if node in seen or not self.marks.bits.get(node, 0) & POSITION:
                continue
            seen.add(node)
            if node.op == "placeholder" or is_size(node):
                value = self.tables.example(node)
                if not (isinstance(value, torch.Tensor) and value.dtype == torch.bool):
                    leaves[node] = value
            else:
                todo.extend(node.all_input_nodes)
        return leaves


def _splits(keys: _Keys) -> dict[fx.Node, Split]:
    """How the cache write splits points into old and new ones, where only its reader knows the operator."""
    while keys.part is not None:
        keys = keys.part
    write, where = keys.write, keys.where
    if write is None or where is None or write.new is None:
        return {}
    rows, new = write.rows + where.offset, write.new
    return {keys.chain.end: lambda points: movement.rows_written(points, where.dim, rows, new, write.old)}


def _twins(gm: fx.GraphModule) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Nodes that move the same values alike. A view of a written tensor is made anew at each of its uses."""
    first: dict[Any, fx.Node] = {}
    alike: dict[fx.Node, list[fx.Node]] = {}
    representative: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if graph.name(node) not in movement.PULL:
            continue
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: representative.get(n, n))
        key = (node.target, repr(args), repr(kwargs))
        leader = representative[node] = first.setdefault(key, node)
        alike.setdefault(leader, []).append(node)
    return {node: tuple(group) for group in alike.values() if len(group) > 1 for node in group}


def _symbolic(expr: Expr) -> frozenset[int]:
    return frozenset(i for i, s in enumerate(layout.symbolic_size(expr)) if not isinstance(s, int))


#: The operator that gathers a KV cache from several processes (``sequence.py``).
GATHER = "fasa.gather_sequence"

#: What Dynamo puts before the path of a module: ``L['self']``, ``L['args'][0]``, ``G['model']``.
_ROOT = re.compile(r"^[LG]\['\w+'\](\[\d+\])?")


def layer_of(node: fx.Node) -> str:
    """The deepest module a Dynamo node was traced in: ``model.layers.3.self_attn``."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = _ROOT.sub("", str(list(stack.values())[-1][0]))
    for old, new in (
        (".forward.__self__", ""),
        ("_orig_mod", ""),
        ("._modules", ""),
        ("['", "."),
        ("']", ""),
        ("[", "."),
        ("]", ""),
    ):
        path = path.replace(old, new)
    return ".".join(part for part in path.split(".") if part)
