"""The backend: what ``torch.compile`` calls. Takes a graph through capture, match, plan and rewrite to the inner compiler."""

from __future__ import annotations

import atexit
import functools
import inspect
import itertools
import logging
import os
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Literal

import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._guards import TracingContext, tracing

from fasa_compile.audit import IN_A_ROW
from fasa_compile.capture import (
    Shadow,
    capture,
    enclosing_modules,
    has_module,
    no_garbage_collection,
    pin_root_module,
    root_module,
)
from fasa_compile.counters import count, decline
from fasa_compile.dump import dump, graph_text, trace
from fasa_compile.errors import FasaError, FasaWarning, NoSitesError, ProfileError
from fasa_compile.fallback import Fallback, inputs_to_save
from fasa_compile.fingerprint import same_weights, weights_fingerprint, weights_stamp
from fasa_compile.local_weights import local_weights
from fasa_compile.match import match
from fasa_compile.offload import check_device, rows_of
from fasa_compile.patterns import attention
from fasa_compile.plan import Decision, Plan, Policy, demote, go_dense, hint, is_one, is_step, plan
from fasa_compile.profiles.files import load_profile
from fasa_compile.profiles.schema import FCProfile
from fasa_compile.report import GraphRecord, Report, why
from fasa_compile.rewrite import NotExpressible, Rewritten, rewrite
from fasa_compile.runtime import PackedCaches, Runtime, counted
from fasa_compile.sharding import agree, communicates, shares_of
from fasa_compile.sites import AttentionSite, NoMatch, below

log = logging.getLogger("fasa_compile")

Inner = Literal["inductor", "eager"] | Callable[..., Any]
# Errors that are no reason to fall back. The last asks Dynamo to trace again, with a float that is needed as a number.
_NOT_SWALLOWED = (
    KeyboardInterrupt,
    SystemExit,
    MemoryError,
    torch.OutOfMemoryError,
    FasaError,
    TensorifyScalarRestartAnalysis,
)


def _inner_compiler(
    inner: Inner, mode: str | None, options: dict[str, Any] | None, peer_memory: bool = False
) -> Callable[..., Any]:
    """The compiler that takes the (rewritten) graph, with ``torch.compile``'s mode and options handed on."""
    if inner == "eager":
        return lambda gm, example_inputs: gm.forward
    if inner == "inductor":
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        patches = {**(list_mode_options(mode) if mode and mode != "default" else {}), **(options or {})}
        if peer_memory:
            from fasa_compile.peer_memory import with_peer_memory

            patches = with_peer_memory(patches)

        def inductor(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            compiled: Any = compile_fx(gm, example_inputs, config_patches=patches or None)
            return compiled

        return local_weights(inductor)
    given = {name: value for name, value in (("mode", mode), ("options", options)) if value}
    takes: Mapping[str, inspect.Parameter]
    try:
        takes = inspect.signature(inner).parameters
    except ValueError:  # a callable without a signature that Python can tell
        takes = {}
    if takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        if unused := sorted(set(given) - set(takes)):
            log.warning("the inner compiler takes no %s: torch.compile's is not handed on", " or ".join(unused))
        given = {name: value for name, value in given.items() if name in takes}
    return lambda gm, example_inputs: inner(gm, example_inputs, **given)


def _records_gradients(example_inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)


def _example(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


# Beside the operators that readers are registered for.
_ATTENTION_NAMES = ("attention", "flash_attn", "softmax")


def _attention_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """Dynamo nodes that may be an attention, by name: cheap, and errs on the side of yes."""
    found = []
    registered = {o.rpartition(".")[2] for operators, _ in attention.ANCHORS.values() for o in operators}
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method", "call_module"):
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            if name.partition(".")[0] in registered or any(part in name for part in _ATTENTION_NAMES):
                found.append(node)
    return found


def _only_prefill(nodes: Sequence[fx.Node]) -> bool:
    """Whether every attention is an SDPA with statically more queries than a step has: nothing to rewrite, so nothing to trace."""
    for node in nodes:
        q = _example(node.args[0]) if node.args else None
        if "scaled_dot_product" not in str(node.target) or not isinstance(q, torch.Tensor) or q.dim() != 4:
            return False
        if not isinstance(q.shape[2], int) or is_step(q.shape[2]):
            return False
    return True


def _decodes(nodes: Sequence[fx.Node]) -> bool:
    """Whether some attention scores more keys than one with a single query, read off the shapes that Dynamo recorded."""
    for node in nodes:
        tensors = [x for x in map(_example, node.args[:2]) if isinstance(x, torch.Tensor) and x.dim() >= 3]
        if "scaled_dot_product" in str(node.target):
            if len(tensors) == 2 and is_one(tensors[0].shape[-2]) and not is_one(tensors[1].shape[-2]):
                return True
        elif tensors and is_one(tensors[0].shape[-2]) and not is_one(tensors[0].shape[-1]):
            return True
    return False


def _without_aliases(site: AttentionSite | NoMatch, shadow: Shadow) -> AttentionSite | NoMatch:
    """The site, counted as written again where another written input shares its K buffer's memory."""
    if not isinstance(site, AttentionSite) or site.cache.k_input is None:
        return site
    if not shadow.overlaps_a_written_input(site.cache.k_input):
        return site
    return replace(site, cache=replace(site.cache, rewritten_later=True))


# ATen operators between a buffer of K or V and its reader that copy nothing.
_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.select.int,
    torch.ops.aten.expand.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.unbind.int,
}


def _hosted(site: AttentionSite | NoMatch, shadow: Shadow) -> bool:
    """Whether the K and V that a site reads are one ``offloaded_cache``, V as the whole graph leaves it."""
    if not isinstance(site, AttentionSite) or site.cache.k_input is None:
        return False
    rows = rows_of(shadow.example_inputs[site.cache.k_input])
    if rows is None:
        return False
    held = {node: i for i, node in enumerate(shadow.final) if shadow.is_written(i)}
    node = site.v.node
    while node not in held and node.op == "call_function" and node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node in held and rows_of(shadow.example_inputs[held[node]]) is rows


def _autocasts(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether autocast is on around the graph, or turned on inside it for a device that the graph uses.

    Many a rotary embedding turns it off for its tables, which changes nothing where it is not on.
    """
    devices = {x.device.type for x in example_inputs if isinstance(x, torch.Tensor)}
    if any(torch.is_autocast_enabled(d) for d in devices if torch.amp.is_autocast_available(d)):
        return True
    entered = [node.args for node in gm.graph.nodes if "enter_autocast" in str(node.target)]
    return any(len(args) < 3 or (args[2] is not False and args[0] in devices) for args in entered)


def _check_memory(planned: Plan) -> None:
    """Raises ``OffloadError`` where what sparse sites over host memory keep on a GPU does not fit. (A step's scratch is small.)"""
    kept: Counter[torch.device] = Counter()
    for d in planned.sparse:
        if d.hosted and isinstance(d.site, AttentionSite) and d.cost is not None:
            kept[d.site.k.node.meta["val"].device] += d.hot_bytes + d.cost.packed_bytes
    for device, size in kept.items():
        check_device(size, device, "the packed FC caches and hot buffers of the attention sites")


def _tally(planned: Plan) -> dict[str, int]:
    """What each step of a graph adds to the counters."""
    found = {"sparse_steps" if planned.sparse else "dense_steps": 1}
    if any(d.reason in ("capture-failed", "rewrite-failed") for d in planned.decisions):
        found["fallback_steps"] = 1
    if planned.rewritten:
        found["bytes_read"] = sum(d.sparse_bytes for d in planned.rewritten)
    for decision in planned.sparse:
        assert isinstance(decision.site, AttentionSite) and decision.budget is not None
        B, _, Hkv, S, L, _, _ = (hint(n) for n in decision.site.shape)
        found["selected_tokens"] = found.get("selected_tokens", 0) + B * S * Hkv * min(decision.budget.n_fac, L)
        if not is_one(decision.site.shape[3]):
            found["multi_token_steps"] = 1
    return found


def _exact_sites(planned: Plan) -> int:
    return len(planned.rewritten) - len(planned.sparse)


def _wrapper(profile: FCProfile, sites: Sequence[AttentionSite]) -> str:
    """What a wrapper puts before the profile's module paths: the one prefix under which all sites have an entry, or ""."""
    first = sites[0].layer
    prefixes = {first[: -len(p.layer)] for p in profile.layers if first.endswith(f".{p.layer}")}
    fitting = [p for p in prefixes if all(profile.by_layer(s.layer.removeprefix(p)) for s in sites)]
    return fitting[0] if len(fitting) == 1 else ""


class FasaBackend:
    """A ``torch.compile`` backend made by ``fasa_backend``; callable, and its own copy when copied.

    transformers deep-copies the backend it is given; a copy that counted and reported on its own would hide what happened.
    """

    def __init__(
        self,
        policy: Policy,
        inner: Inner,
        strict: bool,
        check_weights: bool,
        audit: int = 0,
        allow_no_rope: bool = False,
        audit_bound: float | None = None,
        peer_memory: bool = False,
    ) -> None:
        self.allow_no_rope = allow_no_rope
        self.__name__ = "fasa"
        self.peer_memory = peer_memory
        self.audit = audit
        self.audit_bound = audit_bound
        self._lossy: dict[str, str] = {}  # layers that audits found above the bound -> what was found
        self.policy = policy
        self.inner = inner
        self.strict = strict
        self.check_weights = check_weights
        self._stamps: weakref.WeakKeyDictionary[torch.nn.Module, int] = (
            weakref.WeakKeyDictionary()
        )  # of checked weights
        self.graphs: list[GraphRecord] = []
        self._packed = PackedCaches()
        self._warned: set[str] = set()
        self._made = next(_count)
        _live.add(self)

    def __copy__(self) -> FasaBackend:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FasaBackend:
        return self

    def explain(self) -> Report:
        """What happened to each attention site of every graph seen so far."""
        return Report(self.graphs)

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        inner = _inner_compiler(self.inner, mode, options, self.peer_memory)
        nodes = _attention_nodes(gm)
        if not nodes:
            self._record("no attention")
            return inner(gm, example_inputs)
        if _only_prefill(nodes):
            self._record("prefill", note=f"{len(nodes)} attention sites, dense")
            return counted(inner(gm, example_inputs), {"dense_steps": 1})
        began = time.thread_time()
        rewritten: Rewritten | None = None
        compiled: Callable[..., Any] | None = None
        with no_garbage_collection():
            shadow, planned, check = self._plan(gm, example_inputs)
            if shadow is not None and planned.rewritten:
                planned, rewritten = self._rewrite(shadow, planned)
        seconds = time.thread_time() - began
        if rewritten is not None:
            examples = [*example_inputs, *(item.fake for item in rewritten.extra)]
            try:
                compiled = inner(rewritten.gm, examples)
            except Exception as problem:
                planned = self._give_up(planned, "rewrite-failed", problem)
                rewritten = None
        dump(gm, shadow, planned, rewritten)
        if rewritten is not None:
            twin = rewritten.gm
            trace("fasa_rewritten_graph", lambda: graph_text(twin), "string")
        self._note(planned, decode=planned.decode or _decodes(nodes), seconds=seconds)
        if shadow is not None and rewritten is not None and compiled is not None:
            number = len(self.graphs) - 1
            return self._runtime(shadow, planned, rewritten, compiled, example_inputs, inner, check, number)
        return counted(inner(gm, example_inputs), _tally(planned))

    def _runtime(
        self,
        shadow: Shadow,
        planned: Plan,
        rewritten: Rewritten,
        compiled: Callable[..., Any],
        example_inputs: Sequence[Any],
        inner: Callable[..., Any],
        check: Callable[[], None] | None,
        number: int,
    ) -> Runtime:
        """What runs graph ``number``."""
        bare = replace(shadow, example_inputs=())  # else the caches of the first call would live as long as the graph
        without = functools.partial(self._without, bare, planned, inner, check, number)
        return Runtime(
            compiled,
            rewritten.extra,
            sorted(shadow.relied),
            example_inputs,
            tally=_tally(planned),
            caches=self._packed,
            audit=self.audit,
            audit_bound=self.audit_bound,
            check=check,
            fallback=Fallback(
                shadow.dynamo.forward, inputs_to_save(shadow), lambda p: self._step_failed(number, planned, p)
            ),
            without=without if self.audit_bound is not None else None,
        )

    def _without(
        self,
        shadow: Shadow,
        planned: Plan,
        inner: Callable[..., Any],
        check: Callable[[], None] | None,
        number: int,
        lossy: Sequence[int],
        arguments: Sequence[Any],
    ) -> Callable[..., Any] | None:
        """What runs graph ``number`` with the sites ``lossy`` dense; None, which is said, where that cannot be compiled."""
        layers = [d.site.layer for d in planned.decisions if d.site.index in lossy]
        found = f"more than {self.audit_bound} in {IN_A_ROW} audits in a row"
        before = planned
        for index in lossy:
            planned = go_dense(planned, index, "audit-bound", found)
        try:
            if any(not isinstance(n, int) for d in planned.decisions for n in getattr(d.site, "shape", ())):
                raise FasaError("the graph has sizes that are not fixed")
            shadow = replace(shadow, example_inputs=tuple(arguments))
            if communicates(shadow):
                raise FasaError("the model is shared out over processes, which would have to decide alike")
            with tracing(TracingContext(shadow.fake_mode)):
                rewritten = rewrite(shadow, planned, audit=True) if planned.rewritten else None
                graph, extra = (shadow.dynamo, ()) if rewritten is None else (rewritten.gm, rewritten.extra)
                compiled = inner(graph, [*arguments, *(item.fake for item in extra)])
        except Exception as problem:
            log.warning("audit_bound: %s", problem, exc_info=problem)
            self.warn(
                f"{', '.join(layers)}: selection lost {found} and should give way to dense attention (audit_bound), but the layer "
                f"stays sparse: {problem}"
            )
            return None
        self._lossy.update(dict.fromkeys(layers, found))
        log.warning("%s: selection lost %s: dense from now on", ", ".join(layers), found)
        for _ in range(len(before.rewritten) - len(planned.rewritten)):
            count("rewritten_sites", -1)
            decline("audit-bound")
        count("dense_kernel_sites", _exact_sites(planned) - _exact_sites(before))
        self.graphs[number] = replace(self.graphs[number], decisions=planned.decisions)
        if rewritten is None:
            return counted(compiled, _tally(planned))
        return self._runtime(shadow, planned, rewritten, compiled, arguments, inner, check, number)

    def _plan(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> tuple[Shadow | None, Plan, Callable[[], None] | None]:
        """The shadow, the plan, and what checks the weights again later."""
        try:
            shadow = capture(gm, example_inputs)
            sites = match(shadow, prove=self.policy.profile is not None, no_rope=self.allow_no_rope)
        except Exception as problem:
            return None, self._untraced(gm, example_inputs, problem), None
        sites = [_without_aliases(site, shadow) for site in sites]
        sites, root = self._located(sites)
        prefix = self._check_model([s for s in sites if isinstance(s, AttentionSite)], root)
        grad, autocast = _records_gradients(example_inputs), _autocasts(gm, example_inputs)
        shares = shares_of(sites, shadow)
        hosted = [site.index for site in sites if _hosted(site, shadow)]
        planned = plan(sites, self.policy, grad=grad, autocast=autocast, prefix=prefix, hosted=hosted, shares=shares)
        for decision in planned.sparse:
            if found := self._lossy.get(decision.site.layer):
                planned = go_dense(planned, decision.site.index, "audit-bound", found)
        _check_memory(planned)
        agree(planned, self.policy, shares.values(), peer_memory=self.peer_memory)
        return shadow, planned, self._checker(root, prefix)

    def _located(
        self, sites: list[AttentionSite | NoMatch]
    ) -> tuple[list[AttentionSite | NoMatch], torch.nn.Module | None]:
        """The sites, their layers named from the model that was calibrated, and the module that these names start from.

        After a graph break inside a model, the frame that Dynamo compiles may start at a part of it. Where that part holds
        every layer of the profile its place is looked up in the modules around it, and the graph is pinned to it; a smaller
        part (a decoder layer compiled on its own) may serve several layers and keeps the names it has.
        """
        profile = self.policy.profile
        paths = [site.layer for site in sites if site.layer]
        root = root_module(paths)
        if not isinstance(profile, FCProfile) or root is None or any(profile.by_layer(path) for path in paths):
            return sites, root
        for outer, path in enclosing_modules(root):
            if all(layer.layer.startswith(f"{path}.") for layer in profile.layers):
                pin_root_module(root)
                return below(path, sites), outer
        return sites, root

    def _check_model(self, sites: Sequence[AttentionSite], root: torch.nn.Module | None) -> str:
        """Raise ``ProfileError`` where the model ``root`` is not the one that the profile was made for.

        Returns what stands before the profile's module paths in the sites': "" or a wrapper's path and a dot.
        """
        profile = self.policy.profile
        if not isinstance(profile, FCProfile) or not sites:
            return ""
        prefix = _wrapper(profile, sites)
        if not any(self.policy.layer(site.layer, prefix) for site in sites):
            return ""
        if root is None:
            return prefix
        pin_root_module(root)
        if root in self._stamps:
            self._check_weights(root, prefix)
            return prefix
        missing = [p.layer for p in profile.layers if not has_module(root, prefix + p.layer)]
        if missing:
            raise ProfileError(
                f"the profile has {len(profile.layers)} layers, and {len(missing)} of them are not in {type(root).__name__}, "
                f"{missing[0]!r} first: it belongs to another model; calibrate one for this model"
            )
        self._check_weights(root, prefix)
        return prefix

    def _check_weights(self, root: torch.nn.Module, prefix: str) -> None:
        """Raise ``ProfileError`` where the weights are not those of the profile. Read only where they may have changed since."""
        profile, model = self.policy.profile, root.get_submodule(prefix.rstrip("."))
        assert isinstance(profile, FCProfile)
        stamp = weights_stamp(model)
        if self._stamps.get(root) == stamp:
            return
        found = weights_fingerprint(model)
        if self.check_weights and not same_weights(profile.model.weights_hash, found):
            raise ProfileError(
                f"the profile was made for other weights: its fingerprint is {profile.model.weights_hash} "
                f"({profile.model.architecture}), that of this {type(root).__name__} is {found}. Calibrate one for these weights, "
                "or pass check_weights=False to use it on purpose (fine-tuned, adapted or quantised weights)"
            )
        self._stamps[root] = stamp

    def _checker(self, root: torch.nn.Module | None, prefix: str) -> Callable[[], None] | None:
        """``_check_weights`` for later steps, where there was something to check."""
        if root is None or root not in self._stamps or not self.check_weights:
            return None
        own = weakref.ref(root)

        def check() -> None:
            if (module := own()) is not None:
                self._check_weights(module, prefix)

        return check

    def _untraced(self, gm: fx.GraphModule, example_inputs: Sequence[Any], problem: Exception) -> Plan:
        # Under autocast queries and values may have dtypes that only autocast makes one of: no surprise.
        reason = "autocast" if _autocasts(gm, example_inputs) else "capture-failed"
        if reason != "autocast" or isinstance(problem, _NOT_SWALLOWED):
            self._fall_back("a graph could not be read; it runs as it was", problem)
        detail = f"{type(problem).__name__}: {problem}"
        found = [NoMatch(i, "", "", str(node.target), "failed", detail) for i, node in enumerate(_attention_nodes(gm))]
        return Plan(tuple(Decision(s, "dense", reason, detail) for s in found), decode=True)

    def _rewrite(self, shadow: Shadow, planned: Plan) -> tuple[Plan, Rewritten | None]:
        while planned.rewritten:
            try:
                return planned, rewrite(shadow, planned, audit=self.audit > 0)
            except NotExpressible as problem:
                planned = demote(planned, problem.args[1], "not-expressible", problem.args[0])
            except Exception as problem:
                return self._give_up(planned, "rewrite-failed", problem), None
        return planned, None

    def _give_up(self, planned: Plan, reason: str, problem: Exception) -> Plan:
        self._fall_back("rewriting a graph failed; it runs as it was", problem)
        detail = f"{type(problem).__name__}: {problem}"
        for decision in planned.rewritten:
            planned = demote(planned, decision.site.index, reason, detail)
        return planned

    def _step_failed(self, number: int, planned: Plan, problem: Exception) -> None:
        """A rewritten graph failed before or in its first step: says so in ``explain()`` and ``stats()``, or raises."""
        if self.strict:
            raise problem
        lost = len(planned.rewritten), _exact_sites(planned)
        detail = f"{type(problem).__name__}: {problem}"
        log.warning("a rewritten graph failed in its first step: %s", detail, exc_info=problem)
        for decision in planned.rewritten:
            planned = demote(planned, decision.site.index, "step-failed", detail)
            decline("step-failed")
        count("rewritten_sites", -lost[0])
        count("dense_kernel_sites", -lost[1])
        self.graphs[number] = replace(self.graphs[number], decisions=planned.decisions)
        self.warn(
            f"the first step of a rewritten graph failed ({detail}). The model's own graph ran it and runs all later ones, dense and "
            "not compiled; torch._dynamo.reset() has it all compiled again. strict=True raises instead."
        )

    def _fall_back(self, what: str, problem: Exception) -> None:
        if self.strict or isinstance(problem, _NOT_SWALLOWED):
            raise problem
        log.warning("%s: %s: %s", what, type(problem).__name__, problem, exc_info=problem)
        self.warn(f"{what} ({type(problem).__name__}: {problem}). strict=True raises instead.")

    def _note(self, planned: Plan, *, decode: bool, seconds: float) -> None:
        count("sites", len(planned.decisions))
        count("rewritten_sites", len(planned.rewritten))
        count("dense_kernel_sites", _exact_sites(planned))
        for decision in planned.decisions:
            if decision.action == "dense":
                decline(decision.reason)
        if decode:
            count("decode_graphs")
        self._record("decode" if decode else "no cached decode", planned.decisions, seconds=seconds)
        if any(d.reason == "requires-grad" for d in planned.decisions):
            self.warn(
                "a decode graph was compiled while gradients are recorded, so it runs dense: decode under torch.no_grad()"
            )
        expected = {
            "profile-dense",
            "audit-bound",
            "within-budget",
            "below-break-even",
            "no-gain",
            "requires-grad",
            "prefill",
        }
        if decode and not planned.rewritten and not all(d.reason in expected for d in planned.decisions):
            reasons = "; ".join(
                sorted({f"{d.reason} ({why(d)})" for d in planned.decisions if d.reason not in expected})
            )
            aim = "rewritten" if self.policy.profile is None else "made sparse"
            message = (
                f"no attention site of this decode graph could be {aim}, so it runs as it was. Found {len(planned.decisions)} "
                f"attention nodes: {reasons}. `backend.explain()` shows each one."
            )
            if self.strict:
                raise NoSitesError(message)
            self.warn(message)

    def _record(self, kind: str, decisions: tuple[Decision, ...] = (), note: str = "", seconds: float = 0.0) -> None:
        count("graphs")
        record = GraphRecord(len(self.graphs), kind, decisions, note, seconds)
        self.graphs.append(record)
        sparse = sum(d.action == "sparse" for d in decisions)
        log.info("graph %d: %s, %d of %d attention sites sparse", record.index, kind, sparse, len(decisions))
        for d in decisions:
            log.debug("graph %d: %s: %s %s", record.index, d.site.layer, d.action, why(d) if d.reason else "")
        trace("fasa_report", lambda: Report([record]).json(), "json")

    def warn(self, message: str) -> None:
        """A ``FasaWarning``, once per message."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, FasaWarning, stacklevel=3)

    @property
    def saw_decode(self) -> bool:
        return any(g.kind == "decode" for g in self.graphs)


_live: weakref.WeakSet[FasaBackend] = weakref.WeakSet()
_count = itertools.count()


@atexit.register
def warn_unused() -> None:
    """Say of each backend that it was never called, or saw no decode step."""
    for backend in _live:
        if not backend.graphs:
            log.warning("a fasa backend was made and never called. %s", backend.explain())
        elif not backend.saw_decode:
            log.warning("a fasa backend was made and saw no decode step with a cache. %s", backend.explain())


def fasa_backend(
    profile: FCProfile | str | PathLike[str] | None,
    *,
    n_fac: int | float | None = None,
    n_sink: int | None = None,
    n_recent: int | None = None,
    dense_below: int | None = None,
    inner: Inner = "inductor",
    strict: bool = False,
    check_weights: bool = True,
    audit: int = 0,
    audit_bound: float | None = None,
    offload: Literal["cpu"] | None = None,
    hot_tokens: int | None = None,
    allow_no_rope: bool = False,
    peer_memory: bool = False,
) -> FasaBackend:
    """A backend for ``torch.compile`` that makes RoPE attention decode sparsely.

    ``profile``: an ``FCProfile``, the path or name of one, or ``"all"`` (every frequency chunk dominant: exact scores, no
    calibration and no packed cache; an oracle, not a speed-up), or ``None``: exact attention, every decode site with a KV cache by a
    grouped-query kernel that reads each valid token once (on a GPU; elsewhere its plain-torch reference). ``n_fac``, ``n_sink``, ``n_recent``: tokens attended per KV
    head and step, of them always the first and the last ones; they override the profile's. ``n_fac`` between 0 and 1 (a float) is a share of a static cache's
    length. ``dense_below``: static caches of
    fewer tokens are read densely; by default the break-even length of the cost model on a GPU (``fasa_compile.cost``), and 0
    elsewhere. ``inner``: the compiler that takes
    the rewritten graph. ``strict``: raise where the default is to warn and stay dense. ``check_weights=False`` accepts a profile
    made for other weights of the same shapes (weights are compared when a graph is compiled, and again at the first step after a
    prompt if they have been written since). ``audit=n``: on every n-th decode step measure, on the device and without waiting for
    it, the attention mass that the selection lost (one KV head of every fourth layer, in turn); ``stats()["lost_mass"]`` has the
    means by layer. For sites whose packed FC cache is kept (static caches); steps inside a CUDA graph that you capture are not seen.
    ``audit_bound``: a layer that loses more than this share (0 to 1) in four audits in a row goes dense for good: the graph is compiled
    once more without its selection, and ``explain()`` gives ``audit-bound`` as the reason.
    ``allow_no_rope``: also make attention without a rotary embedding sparse (ALiBi, learned positions, none), scored by single dims
    and by what its mask adds; the profile must have been calibrated with it.

    ``offload="cpu"``: for K and V in host memory (``FasaStaticCache``, ``offloaded_cache``): the selected rows are read through a hot
    buffer of ``hot_tokens`` tokens per KV head on the GPU (default: half as many again as ``n_fac``; 0: none).

    ``peer_memory=True``: where a model or its KV cache is shared out over GPUs of one host, a step's small all-reduces and all-gathers go
    through the GPUs' memory, in a kernel each, and not through NCCL (``docs/distributed.md``). Needs ``inner="inductor"``.

    With ``n_fac`` at least the context length the result equals dense attention. Raises ``ProfileError`` for a profile that
    cannot be read, ``BudgetError`` for an impossible budget, ``dense_below`` or
    ``hot_tokens``; and, when a graph is compiled, ``ProfileError`` for a profile
    that does not belong to the model, ``OffloadError`` where the GPU has no room for what offloaded sites keep there, and (``strict``) ``NoSitesError`` when a decode graph has nothing to rewrite.
    """
    share = n_fac if isinstance(n_fac, float) else None
    tokens = {"n_fac": n_fac if share is None else None, "n_sink": n_sink, "n_recent": n_recent}
    overrides: dict[str, Any] = {name: v for name, v in tokens.items() if v is not None}
    loaded: FCProfile | Literal["all"] | None
    if profile is None or isinstance(profile, FCProfile) or profile == "all":
        loaded = profile  # type: ignore[assignment]
    else:
        loaded = load_profile(profile)
    if not (inner in ("inductor", "eager") or callable(inner)):
        raise TypeError(f"inner: expected 'inductor', 'eager' or a callable backend, found {inner!r}")
    if offload not in (None, "cpu"):
        raise TypeError(f"offload: expected 'cpu' or None, found {offload!r}")
    policy = Policy(loaded, overrides, dense_below, offload is not None, hot_tokens, share)
    if not isinstance(audit, int) or isinstance(audit, bool) or audit < 0:
        raise TypeError(f"audit: expected a number of steps >= 1, or 0 for none, found {audit!r}")
    if audit_bound is not None:
        if isinstance(audit_bound, bool) or not isinstance(audit_bound, int | float) or not 0 <= audit_bound < 1:
            raise TypeError(f"audit_bound: expected a share of attention mass, 0 to 1, or None, found {audit_bound!r}")
        if not audit:
            raise TypeError("audit_bound needs audit=n: on every n-th step it is compared with what an audit measures")
    if peer_memory and inner != "inductor":
        raise TypeError(f"peer_memory needs inner='inductor', which sees a graph's collectives; found inner={inner!r}")
    policy.budget_for(None)  # an impossible budget is an error now, not at the first graph
    return FasaBackend(policy, inner, strict, check_weights, audit, allow_no_rope, audit_bound, peer_memory)


def fasa(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Any:
    """The backend under its registered name, ``torch.compile(model, backend="fasa", options={"profile": ...})``.

    ``options`` takes the keyword arguments of ``fasa_backend``; whatever else it holds goes to the inner compiler.
    """
    given = dict(options or {})
    mine = {name: given.pop(name) for name in inspect.signature(fasa_backend).parameters if name in given}
    if "profile" not in mine:
        raise TypeError('backend="fasa" needs options={"profile": <path or name of a profile, "all" or None>}')
    profile = mine.pop("profile")
    key = (_identity(profile), *sorted((k, repr(v)) for k, v in mine.items()))
    if key not in _named:
        _named[key] = fasa_backend(profile, **mine)
    return _named[key](gm, example_inputs, mode=mode, options=given or None)


def _identity(profile: Any) -> Any:
    """What tells one profile from another: a file that was written anew is another profile."""
    if isinstance(profile, FCProfile):
        return id(profile)
    try:
        state = os.stat(profile)
    except OSError:  # "all", or the name of a shipped profile
        return str(profile)
    return os.path.realpath(profile), state.st_mtime_ns, state.st_size


_named: dict[Any, FasaBackend] = {}


def explain(backend: FasaBackend | None = None) -> Report:
    """What happened to each attention site: of one backend, or of every live backend together, in the order they were made."""
    if backend is not None:
        return backend.explain()
    merged = (g for live in sorted(_live, key=lambda b: b._made) for g in live.graphs)
    return Report([replace(g, index=i) for i, g in enumerate(merged)])
