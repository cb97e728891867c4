"""FlexAttention: ``flex_attention(q, k, v, score_mod, block_mask)``, as Dynamo and the shadow hold it, one node.

What it masks is a program (``mask_mod`` on indices) beside a table of blocks: both are written into the graph as one boolean mask.
A ``score_mod`` is read where it is ``cap(score * number) + bias(indices)`` with any part missing, and refused otherwise.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import Tensor, fx

from fasa_compile.patterns import graph
from fasa_compile.patterns.attention import Found, Refused, first_result, register
from fasa_compile.patterns.tables import Tables
from fasa_compile.patterns.traced import over_indices, traced
from fasa_compile.sites import Expr

_EVERY_BLOCK = 1 << 20  # from this block size on, one block holds all keys: the mask of a call without a block mask


@register("flex-attention", "flex_attention")
def flex_attention(node: fx.Node, tables: Tables) -> Found | None:
    """``torch.ops.higher_order.flex_attention``: q [B, Hq, T, D], k and v of as many heads or of Hq / G."""
    q, k, v, score_mod, block_mask, scale = graph.args(node)[:6]
    score_buffers, mask_buffers = graph.args(node)[7:9]
    qs, ks, vs = (graph.shape(x) for x in (q, k, v))
    if qs[0] != ks[0] or ks[0] != vs[0]:
        raise Refused("unknown-attention", f"the batch is broadcast: q {qs}, k {ks}, v {vs}")
    if ks[1] != vs[1] or qs[1] % ks[1]:
        raise Refused("heads", f"{qs[1]} query heads, {ks[1]} key heads, {vs[1]} value heads")
    if isinstance(scale, fx.Node):
        raise Refused("unsupported-value", f"scale is computed by {scale.name}")
    score = _Score(_module(tables, score_mod))
    mask = _module(tables, block_mask[-1])
    bias = score.bias
    visible = None if _always(mask) else mask
    blocks = None if block_mask[-3] >= _EVERY_BLOCK and block_mask[-2] >= _EVERY_BLOCK else block_mask
    made: fx.Node | None = None
    if bias is not None or visible is not None or blocks is not None:
        made = _mask(node, tables, bias, visible, blocks, tuple(score_buffers), tuple(mask_buffers))
    factor = float(scale) * score.factor
    return Found(
        anchor="flex-attention",
        output=first_result(node, tables),
        q=Expr(q),
        k=Expr(k),
        v=Expr(v),
        scale=factor,
        mask=Expr(made) if made is not None else None,
        mask_kind="none" if made is None else "bool" if bias is None else "additive",
        softcap=score.softcap,
        repeat=qs[1] // ks[1],
    )


def _module(tables: Tables, node: Any) -> fx.GraphModule:
    found = getattr(tables.shadow.gm, str(node.target)) if isinstance(node, fx.Node) else None
    if not isinstance(found, fx.GraphModule):
        raise Refused("unknown-mask", f"expected a traced score_mod and mask_mod, found {node}")
    return found


def _always(mask: fx.GraphModule) -> bool:
    """Whether a mask_mod is ``noop_mask``: a tensor of ones, made from nothing else."""
    (result,) = mask.graph.find_nodes(op="output")[0].args[:1]
    while isinstance(result, fx.Node) and graph.name(result) in ("lift_fresh_copy", "detach", "detach_", "expand"):
        result = graph.args(result)[0]
    return isinstance(result, fx.Node) and graph.name(result) in ("ones", "new_ones", "ones_like")


class _Score:
    """A score_mod, read backwards from its result: a bias, a soft cap, a factor. Raises ``Refused`` for anything else."""

    def __init__(self, mod: fx.GraphModule) -> None:
        self.factor, self.softcap = 1.0, 0.0
        self.bias: fx.GraphModule | None = None
        self.mod = mod
        self.score = mod.graph.find_nodes(op="placeholder")[0]
        self.made_of: set[fx.Node] = set()  # nodes that depend on the score
        for node in mod.graph.nodes:
            if node is self.score or any(n in self.made_of for n in node.all_input_nodes):
                self.made_of.add(node)
        result: Any = mod.graph.find_nodes(op="output")[0].args[0]
        head = self._shifted(result)
        after = 1.0
        while head is not self.score:
            kind, below = graph.name(head), self._operand(head)
            if kind in ("mul", "div", "true_divide"):
                after *= self._number(head)
            elif kind == "tanh" and not self.softcap:
                self.softcap, after = after, 1.0
            elif kind not in ("_to_copy", "to", "clone", "alias", "detach"):
                raise Refused("unknown-attention", f"a score_mod with {kind or head.op} ({head.name})")
            head = below
        # cap * tanh(factor * score): the attention's own scale comes first, so that factor * cap is one more.
        self.factor = after * self.softcap if self.softcap else after
        if self.softcap < 0:
            raise Refused("unknown-attention", f"a score_mod that caps at {self.softcap}")

    def _operand(self, node: fx.Node) -> fx.Node:
        scores = [x for x in graph.args(node) if isinstance(x, fx.Node) and x in self.made_of]
        if len(scores) != 1 or (graph.name(node) in ("div", "true_divide") and graph.args(node)[0] is not scores[0]):
            raise Refused("unknown-attention", f"a score_mod in which {node.name} does not read the score once")
        return scores[0]

    def _number(self, node: fx.Node) -> float:
        others = [x for x in graph.args(node)[:2] if not (isinstance(x, fx.Node) and x in self.made_of)]
        if len(others) != 1 or isinstance(others[0], (fx.Node, torch.SymInt, torch.SymFloat)):
            raise Refused("unsupported-value", f"a score_mod in which {node.name} is not scaled by a number")
        return float(others[0]) if graph.name(node) == "mul" else 1.0 / float(others[0])

    def _shifted(self, result: fx.Node) -> fx.Node:
        """The part below what is added; a sum of several is one bias."""
        if result not in self.made_of:
            raise Refused("unknown-attention", "a score_mod that does not read the score")
        terms: list[tuple[fx.Node, int]] = []
        while graph.name(result) in ("add", "sub"):
            below = self._operand(result)
            a, b = graph.args(result)[:2]
            if result.kwargs.get("alpha", 1) != 1 or (graph.name(result) == "sub" and a is not below):
                raise Refused("unknown-attention", f"a score_mod with {result.name}")
            other = b if a is below else a
            if isinstance(other, fx.Node):
                terms.append((other, -1 if graph.name(result) == "sub" else 1))
            result = below
        if terms:
            twin = copy.deepcopy(self.mod)
            of = dict(zip(self.mod.graph.nodes, twin.graph.nodes, strict=True))
            last = twin.graph.find_nodes(op="output")[0]
            with twin.graph.inserting_before(last):
                total: Any = None
                for term, sign in terms:
                    new: Any = of[term] if sign > 0 else twin.graph.call_function(operator.neg, (of[term],))
                    total = new if total is None else twin.graph.call_function(operator.add, (total, new))
            last.args = (total,)
            twin.graph.eliminate_dead_code()
            twin.recompile()
            self.bias = twin
        return result


def _mask(
    node: fx.Node,
    tables: Tables,
    bias: fx.GraphModule | None,
    visible: fx.GraphModule | None,
    blocks: Any,
    score_buffers: tuple[Any, ...],
    mask_buffers: tuple[Any, ...],
) -> fx.Node:
    """A mask that broadcasts to [B, Hq, T, L]: boolean, or additive where there is a bias."""
    q, k = graph.args(node)[:2]
    n = len(score_buffers)
    tables_of_blocks = tuple(blocks[2:6]) if blocks is not None else ()
    m = n + len(mask_buffers)

    def make(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
        def over(mod: fx.GraphModule, own: tuple[Any, ...], score: Tensor | None) -> Tensor:
            leaves = mod.graph.find_nodes(op="placeholder")
            first = () if score is None else (score,)
            at = leaves[len(first) :]
            # A mask that asks for no batch or head is one for all of them.
            sizes = (q.shape[0] if at[0].users else 1, q.shape[1] if at[1].users else 1, q.shape[2], k.shape[2])
            indices = [torch.arange(s, device=q.device, dtype=torch.int32) for s in sizes]
            return over_indices(mod, score is not None)(*first, *indices, *own)

        mask: Tensor | None = over(visible, rest[n:m], None) if visible is not None else None
        if blocks is not None:
            seen = _seen(q, k, rest[m:], int(blocks[-3]), int(blocks[-2]))
            mask = seen if mask is None else mask & seen
        if bias is None:
            assert mask is not None
            return mask
        added = over(bias, rest[:n], q.new_zeros(())).float()
        return added if mask is None else torch.where(mask, added, float("-inf"))

    return traced(tables.shadow, node, make, (q, k, *score_buffers, *mask_buffers, *tables_of_blocks))


def _seen(q: Tensor, k: Tensor, blocks: tuple[Any, ...], q_block: int, k_block: int) -> Tensor:
    """Boolean [B', H', T, L]: whether a query's block reads a key's block at all, in part or in full."""
    seen: Tensor | None = None
    for count, index in (blocks[0:2], blocks[2:4]):
        if count is None:
            continue
        listed = torch.arange(index.shape[-1], device=index.device) < count[..., None]
        table = torch.zeros_like(index, dtype=torch.int32).scatter_add(3, index.long(), listed.to(torch.int32)) > 0
        seen = table if seen is None else seen | table
    assert seen is not None
    rows = torch.arange(q.shape[2], device=q.device) // q_block
    columns = torch.arange(k.shape[2], device=q.device) // k_block
    return seen[:, :, rows][:, :, :, columns]
