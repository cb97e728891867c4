"""Plan: attention sites + profile + shapes -> one decision per site. Pure data; nothing is edited and nothing runs.

A decode site has one query token per sequence, or a few (``STEP_TOKENS``). It becomes ``sparse``; or ``dense-kernel``, exact
attention of one token by one grouped-query kernel that reads each valid token once; or stays ``dense``, as the model has it. With a
profile the dense kernel stands in on a GPU wherever a decode site that could be rewritten is not worth it sparsely; without one
(``fasa_backend(None)``) every such site gets it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from fasa_compile.cost import Card, Cost, Shape, card, cost_of
from fasa_compile.errors import BudgetError, ProfileError
from fasa_compile.profiles.schema import Budget, FCProfile, LayerProfile, check_layer
from fasa_compile.sharding import Share, local_layer
from fasa_compile.sites import AttentionSite, NoMatch
from fasa_compile.triton_kernels.formats import FCFormat, bytes_per_token, check_format
from fasa_compile.triton_kernels.hot_slots import HotSize, fac_parts, hot_bytes

#: Why a matched attention stays dense. Keys are stable; with ``sites.REASONS`` they are all the reasons there are.
WHY_DENSE: dict[str, str] = {
    "prefill": "more query tokens per sequence than a step has (16), or several for which nothing is to be selected",
    "no-cache": "no cached keys: there is nothing to select from",
    "within-budget": "the cache holds no more tokens than the budget, so dense attention reads as little",
    "no-fixed-length": "n_fac is a share of the context, and the length of this cache is not fixed (n_fac in tokens has it sparse)",
    "below-break-even": "dense attention is expected to be faster at this length of the cache (dense_below=0 has it sparse)",
    "dense-mode": "no profile: the backend was asked for exact attention",
    "no-gain": "exact attention that the model's own kernel computes as well: no mask, no KV head shared by query heads",
    "unknown-layer": "the graph starts inside the model (a graph break, or a part compiled on its own), so it may serve several "
    "layers and none of the profile's entries can be picked for it",
    "profile-dense": "the profile says that this layer stays dense",
    "requires-grad": "gradients are being recorded",
    "not-calibrated": "calibration could not read this layer, so the profile has no entry for it",
    "autocast": "autocast is on: the sparse decode computes in float32 and would not give what autocast gives",
    "dtype": "queries, keys and values are not all float32, float16 or bfloat16 on one device",
    "not-expressible": "a tensor that the rewrite needs is not available where the attention stands",
    "no-triton": "the GPU kernels need the package triton, which cannot be imported here",
    "capture-failed": "the graph could not be traced functionally (kept as the detail)",
    "rewrite-failed": "rewriting this graph raised an error (kept as the detail); the graph was left untouched",
    "audit-bound": "selection kept losing more of this layer's attention mass than audit_bound allows, so it went dense while decoding",
    "step-failed": "the rewritten graph failed before or in its first step (kept as the detail); the model's own graph took over",
}

#: The most query tokens per sequence that a call is taken for a decode step with: speculative verification, not a prompt.
STEP_TOKENS = 16

#: How the packed FC cache of a site is kept: in step with the model's own cache write, made anew from K in every step, or
#: not at all (scores are taken from K itself).
StateKind = Literal["packed", "repacked", "none"]


@dataclass(frozen=True)
class Decision:
    """What becomes of one attention site."""

    site: AttentionSite | NoMatch
    action: Literal["sparse", "dense-kernel", "dense"]
    reason: str = ""  # a key of WHY_DENSE or sites.REASONS where the action is not "sparse"
    detail: str = ""
    state: StateKind = "none"
    profile: LayerProfile | None = None
    budget: Budget | None = None
    fc_format: FCFormat = "fp32"
    reduction: str = "softmax_sum"
    hosted: bool = False  # K and V lie in host memory
    hot: HotSize | None = None  # of a hosted site that decodes sparsely: its hot buffer on the GPU
    cost: Cost | None = None  # of a decode site: bytes, memory, and on a GPU expected times and the break-even length

    @property
    def dense_bytes(self) -> int:
        """Of K and V read per decode step at full cache, dense; 0 where it is no decode site."""
        return 0 if self.cost is None else self.cost.dense_bytes

    @property
    def sparse_bytes(self) -> int:
        """The same, as decided: sparse, the packed FC cache and the selected K and V rows."""
        return self.cost.sparse_bytes if self.cost is not None and self.action == "sparse" else self.dense_bytes

    @property
    def hot_bytes(self) -> int:
        """Of the hot buffer, kept on the GPU from step to step."""
        if self.hot is None:
            return 0
        assert isinstance(self.site, AttentionSite)
        B, _, Hkv, _, _, D, Dv = (hint(s) for s in self.site.shape)
        return hot_bytes(B, Hkv, self.hot, D, Dv, self.site.k.node.meta["val"].dtype)

    @property
    def host_bytes(self) -> int:
        """Of K and V in host memory."""
        if not self.hosted:
            return 0
        assert isinstance(self.site, AttentionSite)
        B, _, Hkv, _, L, D, Dv = (hint(s) for s in self.site.shape)
        return B * Hkv * L * (D + Dv) * int(self.site.k.node.meta["val"].dtype.itemsize)


@dataclass(frozen=True)
class Plan:
    """Decisions for one graph, in the order of its attention nodes."""

    decisions: tuple[Decision, ...]
    decode: bool  # whether some attention of the graph has one query per sequence and a cache, or a few and is sparse

    @property
    def sparse(self) -> tuple[Decision, ...]:
        return tuple(d for d in self.decisions if d.action == "sparse")

    @property
    def rewritten(self) -> tuple[Decision, ...]:
        """What the graph is edited for: sparse sites and those of the dense kernel."""
        return tuple(d for d in self.decisions if d.action != "dense")


@dataclass(frozen=True)
class Policy:
    """What the user asked for: a profile (every FC; none, for exact attention), budget overrides, and the length of a static
    cache below which it is read densely (``None``: the break-even of the cost model, on a GPU)."""

    profile: FCProfile | Literal["all"] | None
    overrides: dict[str, int] = field(default_factory=dict)
    dense_below: int | None = None
    offload: bool = False
    hot_tokens: int | None = None  # of the hot buffer, for each KV head; None: half as many again as n_fac
    share: float | None = None  # of a static cache's length, in place of a number of tokens n_fac

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share <= 1:
            raise BudgetError(
                f"n_fac: expected a number of tokens (int) or a share of the context in (0, 1], found {self.share}"
            )
        hot = self.hot_tokens
        if hot is not None and (not isinstance(hot, int) or isinstance(hot, bool) or hot < 0):
            raise BudgetError(f"hot_tokens: expected a number of tokens >= 0, or None for the default, found {hot!r}")
        n = self.dense_below
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 0):
            raise BudgetError(
                f"dense_below: expected a number of tokens >= 0, or None for the cost model's, found {n!r}"
            )

    def layer(self, name: str, prefix: str) -> LayerProfile | None:
        """The profile's entry for the attention at module path ``name``, whose first part ``prefix`` wraps the model."""
        assert isinstance(self.profile, FCProfile)
        return self.profile.by_layer(name.removeprefix(prefix))

    def uncalibrated(self, name: str, prefix: str) -> bool:
        """Whether calibration met this layer and could not read it."""
        assert isinstance(self.profile, FCProfile)
        return name.removeprefix(prefix) in self.profile.model.extra.get("uncalibrated", [])

    def budget_for(self, layer: LayerProfile | None, length: int | None = None) -> Budget:
        """What a layer may attend to in a cache of ``length`` tokens, which matters where ``share`` is given. Its own ``n_fac`` is a
        share of the profile's: a user's ``n_fac`` scales it."""
        base = self.profile.budget if isinstance(self.profile, FCProfile) else Budget()
        budget = base.replace(**self.overrides)
        if self.share is not None and length is not None:
            budget = budget.replace(n_fac=max(round(self.share * length), budget.n_sink + budget.n_recent, 1))
        if layer is None or layer.n_fac is None:
            return budget
        scaled = round(layer.n_fac * budget.n_fac / base.n_fac)
        return budget.replace(n_fac=max(scaled, budget.n_sink + budget.n_recent, 1))


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def is_one(size: Any) -> bool:
    """Whether a size is statically known to be 1 (a symbolic size is not)."""
    return isinstance(size, int) and size == 1


def is_step(tokens: Any) -> bool:
    """Whether a call with so many query tokens per sequence is a decode step. Where the number is symbolic, asking guards the graph:
    it serves the numbers on this side of the limit, and Dynamo compiles another one for the others."""
    if not isinstance(tokens, int) and not tokens.node.has_hint():
        return False  # a number that only data tells: nothing can guard it
    return bool(tokens <= STEP_TOKENS)


def hint(size: Any) -> int:
    """A size as a number: the example's value where it is symbolic. For reports only, never for decisions."""
    if isinstance(size, int):
        return size
    return int(size.node.hint or 0)


def kernels_missing(device: torch.device) -> bool:
    """Whether ``device`` needs kernels that cannot be had: CUDA without triton. Elsewhere the reference runs."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is None


def on_gpu(site: AttentionSite) -> bool:
    return bool(site.k.node.meta["val"].device.type == "cuda")


def _wants_decode(site: AttentionSite) -> bool:
    return is_one(site.shape[3]) and site.cache.kind != "none"


def _sliced(site: AttentionSite) -> bool:
    return any("slice" in op.name() for op, _ in site.cache.k_steps)


def _state_kind(site: AttentionSite, data: bool) -> StateKind:
    if not data:
        return "none"
    cache = site.cache
    kept = (
        cache.kind == "static"
        and cache.k_input is not None
        and cache.slots is not None
        and not cache.rewritten_later
        and not _sliced(site)
    )
    return "packed" if kept else "repacked"


def _cost(
    site: AttentionSite, budget: Budget, fc_bytes: int, width: int, state: StateKind, on: Card | None = None
) -> Cost:
    """Of a step of S query tokens: what one of S times as many sequences costs, since each token selects and reads for itself. Only
    K, V and their packed cache are there once."""
    B, Hq, Hkv, S, L, D, Dv = (hint(s) for s in site.shape)
    key = site.k.node.meta["val"]
    shape = Shape(B * S, L, Hkv, Hq // Hkv, D, Dv, key.dtype.itemsize, budget.n_fac, width, fc_bytes)
    cost = cost_of(shape, on or card(key.device), kept=state == "packed", packs=state == "repacked")
    return replace(cost, dense_bytes=cost.dense_bytes // S, packed_bytes=cost.packed_bytes // S)


def priced(decision: Decision, on: Card) -> Cost | None:
    """What a sparse decision would cost on another card; None for a decision of another kind. Without a profile, at the cost of
    the one that ``calibrate`` makes by default: half of the frequency chunks, int4."""
    site, layer = decision.site, decision.profile
    if decision.action != "sparse" or not isinstance(site, AttentionSite) or decision.budget is None:
        return None
    chunks = len(site.rope.pairs) or site.rope.head_dim // 2
    width = layer.width if layer is not None else 2 * max(1, chunks // 2)
    fmt = decision.fc_format if layer is not None else "int4"
    state = _state_kind(site, True)
    return _cost(site, decision.budget, bytes_per_token(width, fmt), width, state, on)


def _hot_size(site: AttentionSite, budget: Budget, policy: Policy) -> HotSize | None:
    """The hot buffer of a site: slots for ``hot_tokens`` tokens of a KV head, dealt out to the programs that attend to them."""
    key, value = site.k.node.meta["val"], site.v.node.meta["val"]
    if not all(isinstance(n, int) for n in site.shape) or key.dtype != value.dtype:
        return None
    B, _, Hkv, _, L, _, _ = site.shape
    wanted = budget.n_fac + budget.n_fac // 2 if policy.hot_tokens is None else policy.hot_tokens
    sms = 4
    if key.device.type == "cuda":
        sms = torch.cuda.get_device_properties(key.device).multi_processor_count if torch.cuda.is_available() else 132
    parts = fac_parts(B * Hkv, budget.n_fac, sms)
    slots = min(-(-wanted // parts), L)
    return HotSize(parts, slots) if slots else None


def _is_part_of(layer: str, profile: FCProfile) -> bool:
    """Whether a module path is the tail of one in the profile: Dynamo numbers modules from the frame that it compiles."""
    return not layer or any(p.layer.endswith(f".{layer}") for p in profile.layers)


def _not_in_profile(site: AttentionSite, profile: FCProfile) -> ProfileError:
    known = ", ".join(p.layer for p in profile.layers[:3])
    return ProfileError(
        f"attention layer {site.layer!r} ({site.source}) is not in the profile, which has {len(profile.layers)} layers "
        f"({known}, ...): the profile belongs to another model; calibrate one for this model"
    )


def _decide(
    site: AttentionSite | NoMatch,
    policy: Policy,
    *,
    grad: bool,
    autocast: bool,
    prefix: str,
    hosted: bool,
    share: Share | None,
) -> Decision:
    if isinstance(site, NoMatch):
        return Decision(site, "dense", site.reason, site.detail)
    one = is_one(site.shape[3])
    if site.cache.kind == "none":
        return Decision(site, "dense", "no-cache" if one else "prefill")
    if not one and (refusal := _why_no_step(site, policy, grad)):
        return Decision(site, "dense", "prefill", refusal)
    if grad:
        return Decision(site, "dense", "requires-grad")
    if autocast:
        return Decision(site, "dense", "autocast")
    tensors = [e.node.meta["val"] for e in (site.q, site.k, site.v)]
    if any(t.dtype not in _FLOATS for t in tensors) or len({t.device for t in tensors}) > 1:
        found = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
        return Decision(site, "dense", "dtype", f"found q, k, v: {found}")
    if kernels_missing(tensors[1].device):
        return Decision(site, "dense", "no-triton")
    _, Hq, Hkv, _, L, D, _ = site.shape
    layer: LayerProfile | None = None
    fmt: FCFormat
    if not isinstance(policy.profile, FCProfile):
        fmt, reduction, fc_bytes = "fp32", "softmax_sum", hint(D) * tensors[1].dtype.itemsize
    else:
        layer = policy.layer(site.layer, prefix)
        if layer is None and policy.uncalibrated(site.layer, prefix):
            return Decision(site, "dense", "not-calibrated")
        if layer is None and not site.rope.pairs:
            return Decision(
                site, "dense", "no-rope", "the profile has no single dims for it: calibrate with allow_no_rope=True"
            )
        if layer is None and _is_part_of(site.layer, policy.profile):
            return Decision(site, "dense", "unknown-layer", f"found {site.layer or 'no module path'!r}")
        if layer is None:
            raise _not_in_profile(site, policy.profile)
        layer = local_layer(layer, Hq, Hkv, share)
        check_layer(layer, site.layer, Hq, Hkv, D, site.rope)
        fmt, reduction = check_format(policy.profile.fc_format), policy.profile.reduction
        fc_bytes = bytes_per_token(layer.width, fmt)
    length = L if isinstance(L, int) else None
    budget = policy.budget_for(layer, length)
    state = _state_kind(site, layer is not None)
    cost = _cost(site, budget, fc_bytes, 0 if layer is None else layer.width, state)
    decision = Decision(
        site,
        "sparse",
        state=state,
        profile=layer,
        budget=budget,
        fc_format=fmt,
        reduction=reduction,
        hosted=hosted,
        hot=_hot_size(site, budget, policy) if hosted and policy.offload and state == "packed" and one else None,
        cost=cost,
    )
    if policy.profile is None:
        return _exact(replace(decision, budget=None), "dense-mode", always=not on_gpu(site))
    if layer is not None and layer.dense:
        return _exact(decision, "profile-dense")
    if policy.share is not None and (length is None or site.cache.kind != "static"):
        return _exact(decision, "no-fixed-length", f"n_fac={policy.share}, a cache of kind {site.cache.kind}")
    # The model's budget counts too: one that holds the whole cache means dense, whatever share of it the layer has.
    holds = max(budget.n_fac, policy.budget_for(None, length).n_fac)
    held = L if site.shard is None else site.shard.length
    if isinstance(held, int) and holds >= held:
        return _exact(decision, "within-budget", f"{held} tokens of cache, n_fac {holds}")
    # Reading K and V across PCIe in full never pays.
    least = policy.dense_below if policy.dense_below is not None else None if hosted else cost.break_even
    asked = held if policy.dense_below is not None else L  # a break-even is one process's
    if layer is not None and least is not None and all(isinstance(n, int) for n in site.shape) and least > asked:
        return _exact(decision, "below-break-even", f"{asked} tokens of cache, break-even {least}")
    return decision


def _why_no_step(site: AttentionSite, policy: Policy, grad: bool) -> str:
    """Why a call with several query tokens over a cache is left to the model; "" where it is a step."""
    if grad:
        return "gradients are being recorded"
    if policy.profile is None:
        return "exact attention of several query tokens is the model's own"
    if site.shard is not None:
        return "tokens that lie on several processes are attended to by one query token at a time"
    if site.is_causal:
        return "is_causal=True has query token s attend to the first s + 1 keys alone, wherever the new ones are"
    return "" if is_step(site.shape[3]) else f"{hint(site.shape[3])} query tokens"


def _shares_nothing(site: AttentionSite) -> bool:
    """Whether the model's own attention reads what the dense kernel would: one KV head per query head and no mask."""
    return site.anchor == "sdpa" and site.mask is None and site.sinks is None and site.shape[1] == site.shape[2]


def _exact(decision: Decision, reason: str, detail: str = "", *, always: bool = False) -> Decision:
    """The decision as exact attention: of one token by the dense kernel on a GPU (``always``: anywhere), unless that gains nothing.
    Where tokens lie on several processes it always gains: the model's own attention gathers them all."""
    site = decision.site
    assert isinstance(site, AttentionSite)
    dense = _dense(decision, reason, detail)
    if always or site.shard is not None:
        return replace(dense, action="dense-kernel")
    if not on_gpu(site) or not is_one(site.shape[3]):
        return dense
    if _shares_nothing(site):
        return _dense(decision, "no-gain") if reason == "dense-mode" else dense
    return replace(dense, action="dense-kernel")


def _dense(decision: Decision, reason: str, detail: str = "") -> Decision:
    return Decision(
        decision.site, "dense", reason, detail, budget=decision.budget, hosted=decision.hosted, cost=decision.cost
    )


def demote(plan: Plan, index: int, reason: str, detail: str) -> Plan:
    """The same plan with the decision of attention ``index`` turned dense."""
    changed = tuple(_dense(d, reason, detail) if d.site.index == index else d for d in plan.decisions)
    return Plan(changed, plan.decode)


def go_dense(plan: Plan, index: int, reason: str, detail: str) -> Plan:
    """The same plan with attention ``index`` exact: by the dense kernel where ``plan`` would have chosen it."""
    changed = tuple(_exact(d, reason, detail) if d.site.index == index else d for d in plan.decisions)
    return Plan(changed, plan.decode)


def plan(
    sites: Sequence[AttentionSite | NoMatch],
    policy: Policy,
    *,
    grad: bool,
    autocast: bool = False,
    prefix: str = "",
    hosted: Collection[int] = (),
    shares: Mapping[int, Share] | None = None,
) -> Plan:
    """Decide for each attention of a graph whether it decodes sparsely, with what budget and state.

    ``grad``: whether gradients are recorded for the graph's inputs; ``autocast``: whether it is on somewhere in the graph;
    ``prefix``: where a wrapper (PEFT, DDP, your own) keeps the model that was calibrated, e.g. ``"base_model.model."``; ``hosted``: the sites, by index, whose K and V
    lie in host memory; ``shares``: by a site's index, which part of its heads this process has, where they are shared out. Raises
    ``ProfileError`` where a decode site has no entry in the profile or contradicts it: a profile of another model must never be used in part.
    """
    shared = shares or {}
    decisions = tuple(
        _decide(
            site,
            policy,
            grad=grad,
            autocast=autocast,
            prefix=prefix,
            hosted=site.index in hosted,
            share=shared.get(site.index),
        )
        for site in sites
    )
    decode = any(
        isinstance(d.site, AttentionSite) and (d.action == "sparse" or _wants_decode(d.site)) for d in decisions
    )
    return Plan(decisions, decode)
