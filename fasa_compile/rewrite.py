"""Rewrite: plan -> an edited copy of the Dynamo graph. The graph that Dynamo made is never touched.

A site's attention call is replaced by one sparse decode, or by the dense kernel, which read the model's own cache before any
repetition of KV heads.
On a GPU the replacement is a custom operator (Triton kernels); elsewhere it is the plain-torch reference, which the inner
compiler traces and fuses like the rest of the model. What the sparse decode needs beside the model's tensors (the packed FC
cache and the layer's profile) enters as extra graph inputs after Dynamo's own, bound by ``runtime``.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch._dynamo.source import ConstantSource

from fasa_compile.capture import Shadow, may_write
from fasa_compile.plan import Decision, Plan, is_one
from fasa_compile.sites import AttentionSite, Expr, Shard
from fasa_compile.triton_kernels import ops, reference, sharded_decode
from fasa_compile.triton_kernels.formats import fc_cache_spec
from fasa_compile.triton_kernels.hot_slots import hot_spec


class NotExpressible(Exception):
    """A value of the shadow cannot be written as nodes of the Dynamo graph at the place where it is needed."""


#: Extra inputs that hold state: the packed FC cache where it is kept, and on a GPU the kernel's memory of its last threshold,
#: which changes its speed and never which tokens it must select; and the hot buffer, likewise.
STATE_ROLES = ("data", "meta", "hint", "hot", "tags", "ledger")

#: Of these, the hot buffer of a site whose K and V lie in host memory.
HOT_ROLES = ("hot", "tags", "ledger")

#: Extra inputs that the graph leaves a step's query and valid tokens in, for ``audit``: a few kilobytes.
AUDIT_ROLES = ("audit_q", "audit_bounds")


@dataclass(frozen=True)
class ExtraInput:
    """One graph input that the runtime supplies: a constant of the profile, or state of the packed FC cache."""

    decision: Decision
    role: Literal[
        "dims",
        "centre",
        "spread",
        "norm",
        "slopes",
        "data",
        "meta",
        "hint",
        "hot",
        "tags",
        "ledger",
        "audit_q",
        "audit_bounds",
    ]
    fake: torch.Tensor


@dataclass(frozen=True)
class Rewritten:
    """An edited copy of the Dynamo graph and the inputs that it takes beyond Dynamo's."""

    gm: fx.GraphModule
    extra: tuple[ExtraInput, ...]


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A deep copy that keeps what Dynamo hangs on the original and ``copy.deepcopy`` drops.

    Without the placeholders' sources and the parameter names all parameters would count as changing inputs, and CUDA graphs
    would be recorded again for every call.
    """
    twin = copy.deepcopy(gm)
    for name in ("_param_name_to_source", "_dynamo_source"):
        if hasattr(gm, name):
            setattr(twin, name, getattr(gm, name))
    twin.meta.update(gm.meta)
    for old, new in zip(gm.graph.nodes, twin.graph.nodes, strict=True):
        assert old.name == new.name, f"copying the graph renamed {old.name} to {new.name}"
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
        new.meta.update(old.meta)
    return twin


class Emitter:
    """Writes values of the shadow as nodes of the copied Dynamo graph, in front of one node of it."""

    def __init__(self, shadow: Shadow, twin: fx.GraphModule) -> None:
        self.shadow = shadow
        self.graph = twin.graph
        self.nodes = {node.name: node for node in twin.graph.nodes}
        self._inputs = twin.graph.find_nodes(op="placeholder")
        self._done: dict[tuple[str, fx.Node], fx.Node] = {}

    def node(self, value: fx.Node, at: str) -> fx.Node:
        """A node holding ``value`` when ``at`` begins: one that exists, or else ``value``'s own computation written out.

        For K and V one exists (``match`` refuses a site otherwise), so no cache is ever copied.
        """
        holder = self.shadow.holder(value, at)
        if holder is not None:
            return self.nodes[holder]
        if (at, value) in self._done:
            return self._done[at, value]
        if value.op == "placeholder" and not isinstance(value.meta.get("val"), torch.Tensor):
            return self._inputs[self.shadow.inputs.index(value)]  # a number: nothing can have written it
        if value.op != "call_function":
            raise NotExpressible(f"{value.name} ({value.op}) is held by no tensor of the graph at {at}")
        arguments = fx.map_arg(value.args, lambda a: self.node(a, at))
        keywords = fx.map_arg(value.kwargs, lambda a: self.node(a, at))
        made = self._insert(at, value.target, arguments, keywords, value.meta.get("val"))
        self._done[at, value] = made
        return made

    def expr(self, expr: Expr, at: str) -> fx.Node:
        return self.steps(self.node(expr.node, at), expr.steps, at)

    def steps(self, node: fx.Node, steps: tuple[tuple[Any, tuple[Any, ...]], ...], at: str) -> fx.Node:
        for op, arguments in steps:
            node = self._insert(at, op, (node, *arguments), {}, None)
        return node

    def length(self, k: fx.Node, size: Any, at: str) -> Any:
        """The number of cached tokens as an argument: the number itself, or a node where the graph is dynamic in it."""
        return size if isinstance(size, int) else self.call(at, torch.ops.aten.sym_size.int, (k, 2))

    def call(self, at: str, target: Callable[..., Any], arguments: tuple[Any, ...], **keywords: Any) -> fx.Node:
        return self._insert(at, target, arguments, keywords, None)

    def _insert(self, at: str, target: Any, arguments: Any, keywords: Any, example: Any) -> fx.Node:
        place = self.nodes[at]
        with self.graph.inserting_before(place):
            made = self.graph.call_function(target, arguments, keywords)
        for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
            if key in place.meta:
                made.meta[key] = place.meta[key]
        if isinstance(example, torch.Tensor):
            made.meta["example_value"] = example
        return made


def _add_input(twin: fx.GraphModule, name: str, fake: torch.Tensor) -> fx.Node:
    last = list(twin.graph.find_nodes(op="placeholder"))[-1]
    with twin.graph.inserting_after(last):
        node = twin.graph.placeholder(name)
    node.meta["example_value"] = fake
    # The address never changes between calls on one cache; "unguarded" lets CUDA graphs rely on it, and look again if it does.
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    node._dynamo_source = ConstantSource(name)
    return node


def _erase_dead(node: fx.Node) -> None:
    """Remove a node that lost its last user, and what only it used: repeated K and V would cost a copy of the cache.

    Unlike ``eliminate_dead_code`` this never reaches a cache write: writes are reached through users, not through inputs.
    """
    stack, erased = [node], set()
    while stack:
        dead = stack.pop()
        if dead in erased or dead.users or dead.op not in ("call_function", "call_method") or may_write(dead):
            continue
        inputs = list(dead.all_input_nodes)
        dead.graph.erase_node(dead)
        erased.add(dead)
        stack.extend(inputs)


def _fake(shadow: Shadow, shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with shadow.fake_mode:
        return torch.empty(shape, dtype=dtype, device=device)


def uses_kernels(device: torch.device) -> bool:
    """Whether a site's decode becomes a custom operator with Triton kernels; else it is the reference, traced."""
    return device.type == "cuda"


def _extra_inputs(shadow: Shadow, decision: Decision, audit: bool) -> list[ExtraInput]:
    site, layer = decision.site, decision.profile
    assert isinstance(site, AttentionSite)
    if layer is None or decision.action != "sparse":
        return []
    key = site.k.node.meta["val"]
    B, Hq, Hkv, _, L, D, Dv = site.shape
    width = layer.width

    def constant(role: Any, shape: tuple[Any, ...], dtype: torch.dtype) -> ExtraInput:
        return ExtraInput(decision, role, _fake(shadow, shape, dtype, key.device))

    extra = [
        constant("dims", (Hkv, width), torch.int32),
        constant("centre", (Hkv, width), torch.float32),
        constant("spread", (Hkv, width), torch.float32),
        constant("norm", (Hq,), torch.float32),
    ]
    if decision.reduction == "affine":
        extra.append(constant("slopes", (Hq, width), torch.float32))
    state = (*fc_cache_spec(B, Hkv, L, width, decision.fc_format), ops.sparse_decode_state(B, Hkv))
    for role, (shape, dtype) in zip(("data", "meta", "hint"), state, strict=True):
        if role == "hint":
            remembers = decision.state == "packed" or all(isinstance(n, int) for n in shape)
            wanted = uses_kernels(key.device) and remembers
        else:
            wanted = decision.state == "packed"
        if wanted:
            extra.append(constant(role, shape, dtype))
    if decision.hot is not None:
        for role, (shape, dtype) in zip(HOT_ROLES, hot_spec(B, Hkv, decision.hot, D, Dv, key.dtype), strict=True):
            extra.append(constant(role, shape, dtype))
    sizes = site.q.node.meta["val"].shape
    biased = not site.rope.pairs and site.mask_kind == "additive"  # the audit sees no bias by distance
    if (
        audit
        and is_one(site.shape[3])
        and not biased
        and site.shard is None
        and decision.state == "packed"
        and all(isinstance(n, int) for n in sizes)
    ):
        extra.append(constant("audit_q", (B, Hq, 1, D), torch.float32))
        if site.mask is not None:
            extra.append(constant("audit_bounds", (B, 2), torch.int32))
    return extra


def _emit_site(emit: Emitter, decision: Decision, inputs: dict[str, fx.Node], bounds: dict[Any, fx.Node]) -> None:
    site, budget, layer = decision.site, decision.budget, decision.profile
    assert isinstance(site, AttentionSite)
    at = site.output
    kernels = _Kernels(emit, at, site.shard, gpu=uses_kernels(site.k.node.meta["val"].device))
    q = emit.expr(site.q, at)
    k = emit.expr(site.k, at)
    v = emit.expr(site.v, at)
    mask = emit.expr(site.mask, at) if site.mask is not None else None
    sinks = emit.expr(site.sinks, at) if site.sinks is not None else None
    limits = None
    if mask is not None:
        seen = (site.mask, str(site.shape[4]))  # by its name: a symbolic length has no hash
        if seen not in bounds:
            length = emit.length(k, site.shape[4], at) if site.shard is None else site.shard.length
            bounds[seen] = kernels.mask_bounds(mask, length)
        limits = bounds[seen]
    if decision.action == "dense-kernel":
        arguments = (q, k, v, mask, limits)
        exact = kernels.dense_decode(arguments, scale=site.scale, softcap=site.softcap, sinks=sinks)
        return _replace(emit, site, exact)
    assert budget is not None
    profile = tuple(inputs.get(role) for role in ("dims", "centre", "spread"))
    data, meta, slots = inputs.get("data"), inputs.get("meta"), None
    if decision.state == "packed":
        assert site.cache.slots is not None
        slots = emit.expr(site.cache.slots, at)
    elif decision.state == "repacked":
        data, meta = kernels.pack(k, profile, decision.fc_format)
    for role, value in (("audit_q", q), ("audit_bounds", limits)):
        if role in inputs:
            emit.call(at, torch.ops.aten.copy_.default, (inputs[role], value))
    result = kernels.sparse_decode(
        (q, k, v, data, meta, *profile, inputs.get("norm"), mask, limits),
        slots,
        inputs.get("hint"),
        tuple(inputs[role] for role in HOT_ROLES if role in inputs),
        scale=site.scale,
        n_fac=budget.n_fac,
        n_sink=budget.n_sink,
        n_recent=budget.n_recent,
        softcap=site.softcap,
        sinks=sinks,
        fmt=decision.fc_format,
        reduction=decision.reduction if layer is not None else "softmax_sum",
        **({"slopes": inputs["slopes"]} if "slopes" in inputs else {}),
    )
    _replace(emit, site, result)


def _replace(emit: Emitter, site: AttentionSite, result: fx.Node) -> None:
    """Puts the canonical ``result [B, Hq, T, Dv]`` where the site's attention was."""
    at = site.output
    result = emit.steps(result, site.output_steps, at)
    old = emit.nodes[at]
    old.replace_all_uses_with(result)
    _erase_dead(old)


class _Kernels:
    """Emits calls of the kernels: custom operators on a GPU; elsewhere the reference, for the inner compiler to trace. Attention to
    tokens on several processes is traced on a GPU too: its parts are custom operators, with functional collectives between."""

    def __init__(self, emit: Emitter, at: str, shard: Shard | None, *, gpu: bool) -> None:
        self.emit, self.at, self.shard, self.gpu = emit, at, shard, gpu

    def pack(self, k: fx.Node, profile: tuple[Any, ...], fmt: str) -> tuple[fx.Node, fx.Node]:
        if self.gpu:
            both = self._op("pack", (k, *profile, fmt, ops.KERNEL_VERSION))
        else:
            both = self.emit.call(self.at, reference.pack, (k, *profile, fmt))
        first, second = (self.emit.call(self.at, operator.getitem, (both, i)) for i in (0, 1))
        return first, second

    def mask_bounds(self, mask: fx.Node, L: Any) -> fx.Node:
        if self.gpu:
            return self._op("mask_bounds", (mask, L, ops.KERNEL_VERSION))
        return self.emit.call(self.at, reference.mask_bounds, (mask, L))

    def sparse_decode(
        self,
        arguments: tuple[Any, ...],
        slots: fx.Node | None,
        hint: fx.Node | None,
        hot: tuple[fx.Node, ...],
        **how: Any,
    ) -> fx.Node:
        if self.gpu and self.shard is None:
            return self._op("sparse_decode", (*arguments, slots, hint, *hot), **how, version=ops.KERNEL_VERSION)
        if slots is not None:
            _, k, _, data, meta, dims, centre, spread, *_ = arguments
            written = (data, meta, k, slots, dims, centre, spread, how["fmt"])
            if self.gpu:
                self._op("pack_rows_", (*written, ops.KERNEL_VERSION))
            else:
                self.emit.call(self.at, reference.pack_rows_, written)
        if self.shard is not None:
            if self.gpu:
                how |= {"version": ops.KERNEL_VERSION, "hint": hint}
            return self.emit.call(self.at, sharded_decode.sparse_decode, arguments, **how, **asdict(self.shard))
        if hot:
            how |= {"hot": hot, "written": slots}
        return self.emit.call(self.at, reference.sparse_decode, arguments, **how)

    def dense_decode(self, arguments: tuple[Any, ...], **how: Any) -> fx.Node:
        if self.shard is not None:
            if self.gpu:
                how |= {"version": ops.KERNEL_VERSION}
            return self.emit.call(self.at, sharded_decode.dense_decode, arguments, **how, **asdict(self.shard))
        if self.gpu:
            return self._op("dense_decode", arguments, **how, version=ops.KERNEL_VERSION)
        return self.emit.call(self.at, reference.dense_decode, arguments, **how)

    def _op(self, name: str, arguments: tuple[Any, ...], **keywords: Any) -> fx.Node:
        return self.emit.call(self.at, getattr(torch.ops.fasa, name).default, arguments, **keywords)


def _place(shadow: Shadow, decision: Decision) -> int:
    assert isinstance(decision.site, AttentionSite)
    return shadow.order[decision.site.output]


def rewrite(shadow: Shadow, plan: Plan, audit: bool = False) -> Rewritten:
    """Replace the attention of every decision that asks for it in a copy of the Dynamo graph.

    ``audit`` has the graph leave each step's queries where ``audit.Audit`` finds them, for sites whose packed FC cache is kept.
    Raises ``NotExpressible`` with the site's index as second argument where a site's tensors cannot be named at its place;
    the caller turns that one decision dense and starts again from the untouched graph.
    """
    twin = copy_graph(shadow.dynamo)
    emit = Emitter(shadow, twin)
    extra: list[ExtraInput] = []
    bounds: dict[Any, fx.Node] = {}
    # In program order of the outputs, so that what one site computes is there for the next.
    for decision in sorted(plan.rewritten, key=lambda d: _place(shadow, d)):
        inputs: dict[str, fx.Node] = {}
        for item in _extra_inputs(shadow, decision, audit):
            inputs[item.role] = _add_input(twin, f"fasa_{decision.site.index}_{item.role}", item.fake)
            extra.append(item)
        try:
            _emit_site(emit, decision, inputs, bounds)
        except NotExpressible as problem:
            raise NotExpressible(str(problem), decision.site.index) from None
    twin.graph.lint()
    twin.recompile()
    return Rewritten(twin, tuple(extra))
