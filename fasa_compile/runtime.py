"""Runtime: binds what a rewritten graph needs beside the model's tensors, and calls it. The one room that holds state.

The packed FC cache is a cache of the model's K cache, so the question is always whether it still is one. PyTorch counts the
writes to a tensor (``Tensor._version``), through views too. A packed cache carries the count at which it agreed with K; if K
is another tensor now, or has been written since by anybody but the graph that keeps the two in step, it is made anew from K
before the step. Where PyTorch does not count (tensors made in inference mode, the user's own CUDA-graph capture) it is made
anew every time. Packed caches are kept per K tensor, so that two caches used in turn do not evict each other, and die with it. The
graphs of a backend share them: a step of one token and one of several, in turn on one K, both keep it in step.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fasa_compile.audit import Audit
from fasa_compile.counters import count_all, rebuilt, watch_hot
from fasa_compile.errors import FasaError
from fasa_compile.fallback import Fallback, copies, put_back
from fasa_compile.offload import pieces, rows_of
from fasa_compile.plan import Decision
from fasa_compile.rewrite import AUDIT_ROLES, STATE_ROLES, ExtraInput
from fasa_compile.sites import AttentionSite
from fasa_compile.triton_kernels import ops
from fasa_compile.triton_kernels.formats import fc_cache_spec
from fasa_compile.triton_kernels.hot_slots import ATTENDED, FETCHED, UNKEPT, hot_spec

# Errors inside a graph that the model's own graph would have too, or that somebody must hear of.
_RAISED = (MemoryError, torch.OutOfMemoryError, FasaError)
_UNTRACKED = -1  # no write count can vouch for this packed cache: make it anew every step


@dataclass
class PackedCache:
    """The packed FC cache of one K tensor for one layer's profile."""

    key: weakref.ref[torch.Tensor]  # the K tensor it belongs to
    data: torch.Tensor
    meta: torch.Tensor
    hint: torch.Tensor
    address: int = 0  # K's data_ptr() then: assigning to K.data moves it without counting
    version: int = _UNTRACKED  # K._version at which data and meta agreed with K
    frozen: bool = False  # K may change without being counted: never trust ``version`` again
    # A site whose K and V lie in host memory: its hot buffer, which holds rows of both, and V.
    hot: torch.Tensor | None = None
    tags: torch.Tensor | None = None
    ledger: torch.Tensor | None = None
    values: weakref.ref[torch.Tensor] | None = None
    values_version: int = _UNTRACKED

    def agrees(self, k: torch.Tensor) -> bool:
        return not self.frozen and self.key() is k and self.version == k._version and self.address == k.data_ptr()

    def drop_stale_rows(self) -> None:
        """Empty the hot buffer where V was written by others: it holds rows of both. (Where K was, all is made anew.)"""
        v = None if self.values is None else self.values()
        if self.tags is not None and (v is None or self.values_version != v._version):
            self.tags.zero_()

    def note(self, k: torch.Tensor) -> None:
        """From now on it agrees with ``k``, as it is now."""
        self.version = k._version
        v = None if self.values is None else self.values()
        if v is not None:
            self.values_version = v._version


def _total(ledger: torch.Tensor) -> torch.Tensor:
    """int64, over sequences, KV heads and parts."""
    return ledger.reshape(-1, ledger.shape[-1]).sum(0, dtype=torch.int64)


class _Layer:
    """The packed caches of one layer, by the id of the K tensor, for all graphs that pack and read it alike."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.caches: dict[int, PackedCache] = {}
        self.keepers: weakref.WeakSet[_Keeper] = weakref.WeakSet()
        self.past: list[torch.Tensor] = []  # ledgers of hot buffers that are gone, or sums of such

    def forget(self, key: int) -> Callable[[Any], None]:
        """What drops the cache of K tensor ``key`` when that tensor is gone."""
        own = weakref.ref(self)

        def drop(_: Any) -> None:
            layer = own()
            if layer is not None:
                gone = layer.caches.pop(key, None)
                layer.retire(gone)
                for keeper in list(layer.keepers):
                    if keeper.current is gone:
                        keeper.bind(None)

        return drop

    def distrust(self) -> None:
        for packed in self.caches.values():
            packed.version = _UNTRACKED

    def retire(self, packed: PackedCache | None) -> None:
        """Keep what a cache that is let go has counted. Called from anywhere, a CUDA graph's capture too: nothing is computed."""
        if packed is not None and packed.ledger is not None:
            self.past.append(packed.ledger)

    def add_up(self) -> None:
        """Make one ledger for each device of those that are past, without waiting for a device."""
        past, self.past = self.past, []
        sums: dict[torch.device, torch.Tensor] = {}
        for ledger in past:
            total = _total(ledger)
            sums[ledger.device] = sums[ledger.device] + total if ledger.device in sums else total
        self.past.extend(sums.values())

    def hot_rows(self) -> list[tuple[str, int, int, int]]:
        """Of each hot buffer: layer, tokens attended to, of these fetched from host memory, and of those without a slot; over all
        steps, also of caches that are gone. Waits for the device."""
        found = []
        for ledger in (*(packed.ledger for packed in list(self.caches.values())), *self.past):
            if ledger is not None:
                sums = _total(ledger).tolist()
                found.append((self.name, sums[ATTENDED], sums[FETCHED], sums[UNKEPT]))
        return found

    def forget_hot_counts(self) -> None:
        """Set the hot buffers' counts to zero."""
        self.past = []
        for packed in list(self.caches.values()):
            if packed.ledger is not None:
                packed.ledger[..., ATTENDED:].zero_()


class PackedCaches:
    """The packed caches of a backend's graphs, and the lock that a step holds while it reads and writes them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._layers: weakref.WeakValueDictionary[Any, _Layer] = weakref.WeakValueDictionary()
        _stores.add(self)

    def layer(self, decision: Decision) -> _Layer:
        """Where the packed caches of a site are; another site's with the same layer, format and way from buffer to keys."""
        site, profile = decision.site, decision.profile
        assert isinstance(site, AttentionSite) and profile is not None
        key = (profile.layer, decision.fc_format, str(site.cache.k_steps), decision.hot)
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = _Layer(site.layer)
            if decision.hot is not None:
                watch_hot(found)
        return found

    def in_a_forked_child(self) -> None:
        """Another thread's step, whose lock this process has a copy of, does not exist here: the lock is nobody's, the state unknown."""
        if self.lock.locked():
            self.lock = threading.Lock()
            for layer in list(self._layers.values()):
                layer.distrust()


class _Keeper:
    """Keeps the packed caches of one site in step with whatever K tensors the site is called with."""

    def __init__(
        self,
        decision: Decision,
        constants: dict[str, torch.Tensor],
        k_input: int,
        bound: list[torch.Tensor | None],
        layer: _Layer,
    ) -> None:
        self.decision = decision
        self.layer = layer
        layer.keepers.add(self)
        self.bound = bound  # the runtime's extra inputs
        self.places: dict[str, int] = {}  # of these, where the state of this site goes, by role
        self.constants = constants
        self.k_input = k_input
        self.current: PackedCache | None = None

    def bind(self, packed: PackedCache | None) -> None:
        """Make ``packed`` the one that the graph is called with."""
        self.current = packed
        for role, place in self.places.items():
            self.bound[place] = getattr(packed, role) if packed is not None else None

    def release(self) -> None:
        """Let go of the packed caches; they live on where another graph uses them."""
        self.bind(None)
        self.layer.keepers.discard(self)
        self.layer = _Layer(self.layer.name)

    def _canonical(self, k: torch.Tensor) -> torch.Tensor:
        site = self.decision.site
        assert isinstance(site, AttentionSite)
        for op, arguments in site.cache.k_steps:
            k = op(k, *arguments)
        return k  # [B, Hkv, L, D]

    def _allocate(self, k: torch.Tensor) -> PackedCache:
        B, Hkv, L, _ = self._canonical(k).shape
        width = self.constants["dims"].shape[1]
        spec = (*fc_cache_spec(B, Hkv, L, width, self.decision.fc_format), ops.sparse_decode_state(B, Hkv))
        with torch.inference_mode(False):
            data, meta, hint = (torch.zeros(shape, dtype=dtype, device=k.device) for shape, dtype in spec)
        packed = PackedCache(weakref.ref(k, self.layer.forget(id(k))), data, meta, hint, frozen=k.is_inference())
        if self.decision.hot is not None:
            D, Dv = (self.decision.site.shape[i] for i in (5, 6))  # type: ignore[union-attr]
            with torch.inference_mode(False):
                packed.hot, packed.tags, packed.ledger = (
                    torch.zeros(shape, dtype=dtype, device=k.device)
                    for shape, dtype in hot_spec(B, Hkv, self.decision.hot, D, Dv, k.dtype)
                )
        self.layer.caches[id(k)] = packed
        return packed

    def refresh(self, k: torch.Tensor, *, capturing: bool) -> PackedCache:
        """The packed cache of ``k``, made anew from it."""
        canonical = self._canonical(k)
        packed = self.layer.caches.get(id(k))
        why = "uncounted" if capturing else _why_stale(packed, k)
        stale = packed is None or packed.key() is not k or packed.data.device != k.device
        if packed is None or stale or packed.data.shape[:3] != canonical.shape[:3]:
            self.layer.retire(packed)
            if not capturing:
                self.layer.add_up()
            packed = self._allocate(k)
        if packed.version != _UNTRACKED and not capturing:
            # K was written by others: what the last step's threshold was says nothing, and a prompt must give the same result
            # whatever was decoded before it.
            packed.hint.zero_()
        packed.frozen |= capturing
        c = self.constants
        if packed.tags is not None:
            packed.tags.zero_()
            rows = rows_of(k)
            if rows is None or rows.values is None:
                raise FasaError("a KV cache that lay in host memory when the model was compiled no longer does")
            packed.values = rows.values
        with torch.no_grad():
            for first, keys in pieces(canonical):
                data, meta = torch.ops.fasa.pack(
                    keys, c["dims"], c["centre"], c["spread"], self.decision.fc_format, ops.KERNEL_VERSION
                )
                packed.data[:, :, first : first + keys.shape[2]].copy_(data)
                packed.meta[:, :, first : first + keys.shape[2]].copy_(meta)
        packed.address = k.data_ptr()
        rebuilt(why)
        return packed


def _why_stale(packed: PackedCache | None, k: torch.Tensor) -> str:
    """A key of ``WHY_REBUILT``."""
    if packed is None or packed.key() is not k or packed.data.device != k.device:
        return "uncounted" if k.is_inference() else "new-cache"
    if packed.frozen:
        return "uncounted"
    if packed.version == _UNTRACKED:
        return "distrusted"
    return "moved" if packed.address != k.data_ptr() else "written"


class _Number:
    """An input whose value was read into the graph as a number (a scale, say). Dynamo guards no values, so it is watched here."""

    def __init__(self, position: int, example: torch.Tensor) -> None:
        self.position = position
        self.value = example.detach().cpu().clone()
        self.known: tuple[weakref.ref[torch.Tensor], int] | None = None

    def check(self, arguments: Sequence[Any]) -> None:
        found: torch.Tensor = arguments[self.position]
        tracked = not found.is_inference()
        if tracked and self.known is not None and self.known[0]() is found and self.known[1] == found._version:
            return
        if not torch.equal(found.detach().cpu(), self.value):
            raise FasaError(
                f"a number that was read into a compiled attention (a scale, softcap or mask value) was {self.value.tolist()} when "
                f"the model was compiled and is {found.tolist()} now: call torch._dynamo.reset() to compile it again"
            )
        if tracked:
            self.known = (weakref.ref(found), found._version)


class Runtime:
    """What a backend returns to Dynamo for a rewritten graph: called with the graph's inputs, returns its outputs.

    One step of a backend at a time runs, under a lock, since it reads and writes the packed caches. After an exception they count as
    unknown and are made anew from K. Where packing or the graph's first step fails, the model's own graph runs that step and all
    later ones (``fallback``); an interrupt, an error of memory inside the graph and a failure in a later step are raised.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        extra: Sequence[ExtraInput],
        relied: Iterable[int] = (),
        example_inputs: Sequence[Any] = (),
        *,
        tally: Mapping[str, int],
        caches: PackedCaches,
        audit: int = 0,
        audit_bound: float | None = None,
        check: Callable[[], None] | None = None,
        fallback: Fallback | None = None,
        without: Callable[[Sequence[int], Sequence[Any]], Callable[..., Any] | None] | None = None,
    ) -> None:
        self._compiled = compiled
        self._without = without  # makes what runs the same graph with these sites dense; None where that cannot be
        self._successor: Callable[..., Any] | None = None  # it, once audits have asked for it
        self._check = check  # raises where the weights are not the profile's any more
        self._fallback = fallback
        self._gave_up = False  # whether the model's own graph has taken over
        self._ran = False  # whether the rewritten graph has run to its end once
        self._tally = tally  # what a step adds to the counters
        self._relied = [_Number(i, example_inputs[i]) for i in relied if isinstance(example_inputs[i], torch.Tensor)]
        self._caches = caches
        self._keepers: list[_Keeper] = []
        self._extra: list[torch.Tensor | None] = []  # constants of the profile, and what the keepers bind
        self._cuda = any(item.fake.is_cuda for item in extra)
        constants: dict[int, dict[str, torch.Tensor]] = {}
        left: dict[int, dict[str, torch.Tensor]] = {}  # what the graph leaves for the audit, by site
        for position, item in enumerate(extra):
            decision, site = item.decision, item.decision.site
            assert isinstance(site, AttentionSite)
            if item.role in STATE_ROLES and decision.state != "packed":
                self._extra.append(torch.zeros(item.fake.shape, dtype=item.fake.dtype, device=item.fake.device))
            elif item.role in STATE_ROLES:
                if item.role == "data":
                    assert site.cache.k_input is not None
                    self._keepers.append(
                        _Keeper(
                            decision, constants[site.index], site.cache.k_input, self._extra, caches.layer(decision)
                        )
                    )
                self._keepers[-1].places[item.role] = position
                self._extra.append(None)
            elif item.role in AUDIT_ROLES:
                buffer = torch.zeros(item.fake.shape, dtype=item.fake.dtype, device=item.fake.device)
                left.setdefault(site.index, {})[item.role] = buffer
                self._extra.append(buffer)
            else:
                value = profile_constant(decision, item.role).to(item.fake.device)
                constants.setdefault(site.index, {})[item.role] = value
                self._extra.append(value)
        self._audit = Audit(audit, audit_bound) if left else None
        for number, keeper in enumerate(self._keepers):
            found = left.get(keeper.decision.site.index)
            if self._audit is not None and found is not None:
                self._audit.add(number, keeper.decision, keeper.constants, **found)

    def __call__(self, *arguments: Any) -> Any:
        if self._successor is not None:
            return self._successor(*arguments)
        with self._caches.lock:
            if self._gave_up:
                return self._dense(arguments)
            for number in self._relied:
                number.check(arguments)
            capturing = self._cuda and torch.cuda.is_current_stream_capturing()
            try:
                anew = self._bind(arguments, capturing)
            except Exception as problem:  # the graph has not begun, so nothing needs to be put back
                return self._give_up(problem, arguments, {} if not capturing else None)
            if anew and self._check is not None:
                self._check()
            saved = self._copies(arguments) if not self._ran and not capturing else None
            try:
                result = self._compiled(*arguments, *self._extra)
            except BaseException as problem:
                self._distrust()
                if not isinstance(problem, Exception) or isinstance(problem, _RAISED):
                    raise
                return self._give_up(problem, arguments, saved)
            self._ran = True
            for keeper in self._keepers:
                packed = keeper.current
                if packed is not None and not packed.frozen:
                    packed.note(arguments[keeper.k_input])
            if self._audit is not None and not capturing and self._audit.due():
                self._heed(self._audit.too_lossy(), arguments)
                self._audit.run(self._canonical)
            count_all(self._tally)
            return result

    def _heed(self, lossy: list[int], arguments: Sequence[Any]) -> None:
        """Have a graph without these sites' selections take over from the next step on."""
        if not lossy or self._without is None:
            return
        make, self._without = self._without, None
        self._successor = make(lossy, arguments)
        if self._successor is not None:
            for keeper in self._keepers:
                keeper.release()

    def _bind(self, arguments: Sequence[Any], capturing: bool) -> bool:
        """Binds a packed cache that agrees with K to every site; whether one was made anew that will be kept."""
        anew = False
        for keeper in self._keepers:
            k = arguments[keeper.k_input]
            packed = keeper.current
            if packed is None or capturing or not packed.agrees(k):
                packed = keeper.layer.caches.get(id(k))
                if packed is None or capturing or not packed.agrees(k):
                    packed = keeper.refresh(k, capturing=capturing)
                    anew |= not packed.frozen
                keeper.bind(packed)
            packed.drop_stale_rows()
        return anew

    def _copies(self, arguments: Sequence[Any]) -> dict[int, torch.Tensor] | None:
        """Of what the graph's first step may change for good; None where that is not known or too much."""
        if self._fallback is None or self._fallback.saved is None:
            return None
        return copies(arguments, self._fallback.saved)

    def _give_up(self, problem: Exception, arguments: Sequence[Any], saved: dict[int, torch.Tensor] | None) -> Any:
        """Runs the step, and all later ones, as the model's own graph does; raises ``problem`` where that is not possible."""
        if self._fallback is None or saved is None:
            raise problem
        self._fallback.report(problem)
        put_back(arguments, saved)
        self._gave_up = True
        for keeper in self._keepers:
            keeper.release()
        return self._dense(arguments)

    def _dense(self, arguments: Sequence[Any]) -> Any:
        assert self._fallback is not None
        count_all({"dense_steps": 1, "fallback_steps": 1})
        return self._fallback.dense(*arguments)

    def _canonical(self, keeper_index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """``(k, data, meta)`` of a keeper, as its last step left them."""
        keeper = self._keepers[keeper_index]
        k = None if keeper.current is None else keeper.current.key()
        if keeper.current is None or k is None:
            return None
        return keeper._canonical(k), keeper.current.data, keeper.current.meta

    def _distrust(self) -> None:
        for keeper in self._keepers:
            keeper.layer.distrust()

    def invalidate(self) -> None:
        """Have every packed cache made anew from K in the next step."""
        if isinstance(self._successor, Runtime):
            self._successor.invalidate()
        with self._caches.lock:
            self._distrust()


_stores: weakref.WeakSet[PackedCaches] = weakref.WeakSet()


def _in_a_forked_child() -> None:
    for store in _stores:
        store.in_a_forked_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_forked_child)


def profile_constant(decision: Decision, role: str) -> torch.Tensor:
    """One of a layer profile's tensors as the kernels take it: ``dims`` int32 ``[Hkv, W]``, ``centre`` and ``spread`` float32
    ``[Hkv, W]``, ``norm`` float32 ``[Hq]``, ``slopes`` float32 ``[Hq, W]``. A fresh tensor each time: two graph inputs must never share memory."""
    layer = decision.profile
    assert layer is not None
    if role == "dims":
        return layer.dims().clone()
    if role == "norm":
        return layer.normaliser(decision.reduction)[0].clone()
    if role == "slopes":
        slopes = layer.normaliser(decision.reduction)[1]
        assert slopes is not None
        return slopes
    centre, spread = layer.gathered()
    return (centre if role == "centre" else spread).clone()


def counted(compiled: Callable[..., Any], tally: Mapping[str, int]) -> Callable[..., Any]:
    """``compiled``, with each call adding ``tally`` to the counters."""

    def call(*arguments: Any) -> Any:
        count_all(tally)
        return compiled(*arguments)

    return call
