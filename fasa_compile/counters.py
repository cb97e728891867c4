"""Process-wide counters: what the backend saw and did. ``stats()`` reads them, tests assert on them."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

_lock = threading.Lock()
_NAMES = (
    "graphs",  # graphs Dynamo handed to the backend
    "decode_graphs",  # of these, graphs with an attention that has one query per sequence, or a few and is sparse
    "sites",  # attention nodes of the graphs that were read, matched or not; a plain prefill graph is not read
    "rewritten_sites",  # attention nodes replaced, by a sparse decode or by the exact dense kernel
    "dense_kernel_sites",  # of these, attention nodes replaced by the dense kernel
    "sparse_steps",  # calls of a graph with at least one sparse site
    "multi_token_steps",  # of these, calls with several query tokens per sequence
    "dense_steps",  # calls of a graph that has attention and no sparse site
    "fallback_steps",  # of these, calls of a graph whose capture, rewrite or first step failed
    "selected_tokens",  # that sparse steps could attend to, over sequences, query tokens, KV heads, layers: n_fac, or all slots there are
    "bytes_read",  # of K, V and packed FC caches by the steps of rewritten graphs, as the cost model counts them, caches full
    "state_rebuilds",  # packed FC caches made anew from K, one per layer and event
)
_counts: Counter[str] = Counter()
_declined: Counter[str] = Counter()
_rebuilt: Counter[str] = Counter()

#: Why a packed FC cache was made anew from K.
WHY_REBUILT = {
    "new-cache": "K is a tensor that had no packed cache: a first step, another cache, a new prompt",
    "written": "K was written by somebody else since: a prefill, several tokens at once, a reorder, a crop, a reset",
    "moved": "K lies at another address: its storage was swapped",
    "uncounted": "PyTorch does not count writes to K: inference mode, or a CUDA graph that the user captures",
    "distrusted": "a step ended in an exception, or Runtime.invalidate() was called",
}
#: Audits that run: each gives ``(layer, attention mass lost, audited steps)`` rows, and forgets them when told to.
_audits: weakref.WeakSet[Any] = weakref.WeakSet()
#: Layers with hot buffers: each gives ``(layer, tokens attended, fetched, without a slot)`` rows, and forgets them when told to.
_hot: weakref.WeakSet[Any] = weakref.WeakSet()


def count(name: str, by: int = 1) -> None:
    """Add to one of the counters above."""
    with _lock:
        _counts[name] += by


def count_all(amounts: Mapping[str, int]) -> None:
    """Add to several counters."""
    with _lock:
        for name, by in amounts.items():
            _counts[name] += by


def rebuilt(reason: str) -> None:
    """Count one packed FC cache made anew, by a key of ``WHY_REBUILT``."""
    with _lock:
        _counts["state_rebuilds"] += 1
        _rebuilt[reason] += 1


def decline(reason: str) -> None:
    """Count one attention site left as it was, by its reason (see ``plan.WHY_DENSE`` and ``sites.REASONS``)."""
    with _lock:
        _declined[reason] += 1


def stats() -> dict[str, Any]:
    """Counters since the last ``reset_stats()``.

    Keys: ``graphs``, ``decode_graphs``, ``sites``, ``rewritten_sites``, ``dense_kernel_sites``, ``sparse_steps``,
    ``multi_token_steps``, ``dense_steps``, ``fallback_steps``, ``selected_tokens``, ``bytes_read``, ``state_rebuilds`` (ints),
    ``rebuilt`` (a key of ``WHY_REBUILT`` -> how often) and ``declined`` (reason -> number of attention sites). Every attention site that was found is either in
    ``rewritten_sites`` or in ``declined``: ``sites == rewritten_sites + sum(declined.values())``. Where a backend audits, also
    ``lost_mass``: layer -> ``{"mean": ..., "steps": ...}``, the share of attention mass that selection lost (reading it waits for
    the device). Where K and V lie in host memory, also ``hot``: layer -> ``{"attended": ..., "fetched": ..., "unkept": ...}``, tokens
    (times KV heads and sequences) attended to, of these fetched from the host, and of those for which the hot buffer had no room;
    of caches that are gone too, while the compiled model lives.
    """
    with _lock:
        found: dict[str, Any] = {
            **{name: _counts[name] for name in _NAMES},
            "rebuilt": dict(_rebuilt),
            "declined": dict(_declined),
        }
        audits = list(_audits)
        hot = list(_hot)
    if hot:
        sums: dict[str, Counter[str]] = {}
        for layer, attended, fetched, unkept in (row for one in hot for row in one.hot_rows()):
            sums.setdefault(layer, Counter()).update(attended=attended, fetched=fetched, unkept=unkept)
        found["hot"] = {layer: dict(counts) for layer, counts in sums.items()}
    if audits:
        totals: dict[str, list[float]] = {}
        for layer, lost, steps in (row for audit in audits for row in audit.rows()):
            total = totals.setdefault(layer, [0.0, 0.0])
            total[0] += lost
            total[1] += steps
        found["lost_mass"] = {
            layer: {"mean": lost / steps, "steps": int(steps)} for layer, (lost, steps) in totals.items() if steps
        }
    return found


def watch(audit: Any) -> None:
    """Have ``stats()`` read an audit for as long as it lives."""
    with _lock:
        _audits.add(audit)


def watch_hot(layer: Any) -> None:
    """Have ``stats()`` read a layer's hot buffers for as long as it lives."""
    with _lock:
        _hot.add(layer)


def reset_stats() -> None:
    """Set every counter to zero."""
    with _lock:
        _counts.clear()
        _declined.clear()
        _rebuilt.clear()
        audits = list(_audits)
        hot = list(_hot)
    for audit in audits:
        audit.clear()
    for layer in hot:
        layer.forget_hot_counts()
