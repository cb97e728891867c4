"""Calibration: one forward over some text -> a profile. Queries and keys are taken at the attention sites that matching finds."""

from __future__ import annotations

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fasa_compile.calibration_budgets import allocate, pyramid
from fasa_compile.calibration_stats import METHODS, LayerStats
from fasa_compile.capture import capture, no_garbage_collection, path_in, pin_root_module, root_module
from fasa_compile.errors import CalibrationError, FasaWarning
from fasa_compile.fingerprint import data_fingerprint, weights_fingerprint
from fasa_compile.match import match
from fasa_compile.profiles.schema import FC_FORMATS, REDUCTIONS, Budget, FCProfile, LayerProfile, ModelFacts
from fasa_compile.rewrite import Emitter, copy_graph
from fasa_compile.sites import AttentionSite, NoMatch, below

#: Rows of a mask [T, L] that are counted at a time.
MASK_ROWS = 256


class _Observer:
    """A ``torch.compile`` backend that runs the graph as it is and shows every matched prefill attention's q and k to a sink."""

    def __init__(self, model: nn.Module, texts: int, show: bool, no_rope: bool) -> None:
        self.model = model
        self.no_rope = no_rope
        self.stats: dict[str, LayerStats] = {}
        self.calls: Counter[str] = Counter()
        self.refused: list[NoMatch] = []
        self.windows: dict[str, int] = {}  # most keys that a query of a layer saw, where a mask says so
        self.texts = texts
        self.bar = _bar(show)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        shadow = capture(gm, example_inputs)
        sites = self._located(match(shadow, no_rope=self.no_rope))
        self.refused += [
            s if isinstance(s, NoMatch) else NoMatch(s.index, "", s.source, s.anchor, "unknown-layer")
            for s in sites
            if isinstance(s, NoMatch) or not s.layer
        ]
        twin = copy_graph(gm)
        emit = Emitter(shadow, twin)
        matched = [s for s in sites if isinstance(s, AttentionSite) and s.layer]
        if self.bar is not None and not self.stats:
            self.bar.total = (self.bar.total or 0) + len(matched) * self.texts
        for site in matched:
            q = emit.expr(site.q, site.output)
            k = emit.expr(site.k, site.output)
            mask = emit.expr(site.mask, site.output) if site.mask is not None else None
            emit.call(site.output, _Sink(self, site), (q, k, mask))
        twin.recompile()
        return twin.forward

    def _located(self, sites: list[AttentionSite | NoMatch]) -> list[AttentionSite | NoMatch]:
        """The sites, their layers named from the model: a frame that Dynamo compiles after a graph break may start inside it."""
        root = root_module([site.layer for site in sites if site.layer])
        path = None if root is None else path_in(self.model, root)
        if root is None or not path:
            return sites
        pin_root_module(root)
        return below(path, sites)

    def record(self, site: AttentionSite, q: Tensor, k: Tensor, mask: Tensor | None) -> None:
        if site.layer not in self.stats:
            self.stats[site.layer] = LayerStats(q.shape[1], k.shape[1], q.shape[3], site.rope, q.device, site.layer)
        self.calls[site.layer] += 1
        if mask is not None:  # broadcastable to [B, Hq, T, L]: a mask [T, L] has no sequences of its own
            mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
        with torch.no_grad():
            for row in range(q.shape[0]):
                mine = None if mask is None else mask[row if mask.shape[0] > 1 else 0]
                if mine is not None:
                    rows = _allowed(mine).split(MASK_ROWS, dim=-2)  # a sum of bools is made of int64 copies of them
                    seen = max(int(part.sum(-1).max()) for part in rows)
                    self.windows[site.layer] = max(self.windows.get(site.layer, 0), seen)
                one_q, one_k, bias = _visible(q[row : row + 1], k[row : row + 1], mine)
                self.stats[site.layer].update(one_q, one_k, site.scale, None, site.softcap, bias)
        if self.bar is not None:
            self.bar.update()


class _Sink:
    """A named callable for one site, so that the graph prints readably."""

    def __init__(self, observer: _Observer, site: AttentionSite) -> None:
        self.observer, self.site = observer, site
        self.__name__ = self.__qualname__ = "observe"
        self.__module__ = __name__

    def __call__(self, q: Tensor, k: Tensor, mask: Tensor | None) -> None:
        self.observer.record(self.site, q, k, mask)


def _allowed(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def _visible(q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries and keys of one sequence without padding and unwritten cache slots, ``[1, Hq, n, D]`` and ``[1, Hkv, n, D]``, and what
    the mask adds to their scores, ``[1, Hq or 1, n, n]``, or None where that is nothing."""
    T, L = q.shape[2], k.shape[2]
    if mask is None:
        return q, k[:, :, :L], None
    allowed = _allowed(mask)
    keys = allowed.reshape(-1, allowed.shape[-1]).any(dim=0).expand(L).nonzero().squeeze(-1)
    n = min(len(keys), T)
    queries = keys if T == L else torch.arange(T - n, T, device=q.device)
    chosen = q.index_select(2, queries), k.index_select(2, keys)
    if mask.dtype == torch.bool:
        return *chosen, None
    bias = torch.where(allowed, mask, 0.0)
    if not bool(bias.any()):
        return *chosen, None
    bias = bias.expand(*mask.shape[:-2], T, L).reshape(1, -1, T, L)
    return *chosen, bias.index_select(2, queries).index_select(3, keys)


def _forward(model: nn.Module, token_ids: Tensor) -> Any:
    """Call a causal LM on ``token_ids [B, T]``, for the last token's logits alone where its signature lets us say so.

    ``model`` may be what ``torch.compile`` made of one, whose own signature is ``(*args, **kwargs)``. A model of transformers is
    given a cache that keeps nothing (``prefill_cache``); else the cache is left to the model.
    """
    inner: Any = getattr(model, "_orig_mod", model)
    takes = inspect.signature(_original_forward(inner)).parameters
    given: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    name = next((name for name in ("cache", "past_key_values") if name in takes), None)
    # What `generate` asks before it makes such a cache.
    dynamic = getattr(inner, "_supports_default_dynamic_cache", None)
    if name is not None and dynamic is not None and dynamic() and not inner.config.is_encoder_decoder:
        from fasa_compile.prefill_cache import PrefillCache

        given[name] = PrefillCache(config=inner.config.get_text_config(decoder=True))
    return model(token_ids, **given)


def _original_forward(model: nn.Module) -> Callable[..., Any]:
    return getattr(model.forward, "_torchdynamo_orig_callable", model.forward)


def _texts(data: Tensor | Iterable[Tensor]) -> list[Tensor]:
    texts = [data] if isinstance(data, Tensor) else list(data)
    if not texts:
        raise CalibrationError("calibration needs at least one text; got none")
    out = []
    for i, text in enumerate(texts):
        if not isinstance(text, Tensor) or text.dtype not in (torch.int32, torch.int64) or text.dim() not in (1, 2):
            found = f"{text.dtype} of {text.dim()} dims" if isinstance(text, Tensor) else type(text).__name__
            raise CalibrationError(f"text {i}: expected integer token ids [T] or [B, T], found {found}")
        text = text if text.dim() == 2 else text[None]
        if text.shape[1] < 2:
            raise CalibrationError(f"text {i}: expected at least 2 tokens, found {text.shape[1]}: nothing to rank by")
        out.append(text)
    return out


def calibrate(
    model: nn.Module,
    data: Tensor | Iterable[Tensor],
    *,
    n_tip: int | None = None,
    method: str = "score_variance",
    fc_format: str = "int4",
    reduction: str | None = None,
    budget: Budget | None = None,
    layer_budgets: str = "equal",
    dense_above: float | None = None,
    forward: Callable[[nn.Module, Tensor], Any] | None = None,
    progress: bool = True,
    allow_no_rope: bool = False,
) -> FCProfile:
    """Rank the frequency chunks of every attention of ``model`` and make a profile.

    ``data``: token ids, ``[T]`` or ``[B, T]`` (no padding), or several of them; one text of a few thousand tokens is enough.
    ``n_tip``: dominant FCs per KV head; by default half of them. ``method``: ``score_variance``, ``contextual_agreement`` or
    ``greedy_mass``. ``fc_format``: how the packed FC cache stores keys. ``reduction``: how the query heads of a KV head agree on
    a set of tokens; by default what keeps the most attention mass on held-out queries of the text, a single pass (``static``,
    ``affine``) being preferred to two unless it loses ``SINGLE_PASS_WORTH`` more: ``stats["mass_kept"]`` has each.

    ``budget``: what a decode step attends to (``Budget()``). ``layer_budgets``: how layers share it, ``budget.n_fac`` being their
    mean: ``equal``; ``mass``, tokens going where they keep the most attention mass; ``pyramid``, falling evenly with depth
    (PyramidKV). ``dense_above``: layers that lose more than this share of attention mass within ``budget.n_fac`` tokens are marked
    dense and attend to everything. ``layer.stats["mass_lost"]`` has that share, measured on held-out queries of the text, wherever
    one of these needs it or ``reduction`` is not given.

    ``forward(model, token_ids)``: how to call a model that does not take ``model(token_ids)``; a prefill of the whole text, with or without a cache.
    Layers that see no more than a window of the text are marked dense: there is nothing to gain, and ``layer.stats["window"]`` says so.
    ``allow_no_rope``: also rank the single dims of attention without a rotary embedding (ALiBi, learned positions, none), twice as
    many of them as FCs; a bias that the attention adds to its scores counts in what needs scores.

    The model runs once per text, through ``torch.compile`` with a backend that only looks. Raises ``CalibrationError`` when
    no attention with a rotary embedding is found, q or k hold values that no statistic can be made of, or what is asked for is
    unknown or impossible.
    """
    texts = _texts(data)
    for what, found, known in (
        ("method", method, METHODS),
        ("fc_format", fc_format, FC_FORMATS),
        ("reduction", reduction or REDUCTIONS[0], REDUCTIONS),
        ("layer_budgets", layer_budgets, LAYER_BUDGETS),
    ):
        if found not in known:
            raise CalibrationError(f"{what}: expected one of {', '.join(known)}, found {found!r}")
    if n_tip is not None and n_tip < 1:
        raise CalibrationError(f"n_tip: expected at least 1 FC per KV head, or None, found {n_tip}")
    if dense_above is not None and not 0 <= dense_above < 1:
        raise CalibrationError(
            f"dense_above: expected a share of attention mass, 0 to 1, or None, found {dense_above!r}"
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    observer = _Observer(model, len(texts), progress, allow_no_rope)
    call = forward or _forward
    own = model.__dict__.get("forward")
    if own is not None:
        model.forward = _original_forward(model)
    try:
        watched: Any = torch.compile(model, backend=observer, dynamic=False)
        # Dynamo counts compilations by code, over all backends: past its limit it would run the model unseen.
        limit = 64 + len(texts)
        limits = torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=8 * limit)
        with torch.no_grad(), no_garbage_collection(), limits:
            for i, text in enumerate(texts):
                seen = dict(observer.calls)
                call(watched, text.to(device))
                unseen = [name for name in observer.calls if i and observer.calls[name] == seen.get(name, 0)]
                if unseen:
                    raise CalibrationError(
                        f"text {i} did not reach {len(unseen)} attention layers, {unseen[0]!r} first: the model ran uncompiled "
                        "(Dynamo's recompile limit?) or skipped them. Calibrate in a fresh process, or on fewer texts"
                    )
    finally:
        if own is not None:
            model.forward = own
        if observer.bar is not None:
            observer.bar.close()
    if not observer.stats:
        reasons = sorted({f"{s.layer or 'attention'} at {s.source}: {s.reason}" for s in observer.refused})
        found = "; ".join(reasons[:4]) if reasons else "the traced graphs hold no attention"
        also = "" if allow_no_rope else ", and allow_no_rope=True was not given"
        raise CalibrationError(f"nothing to calibrate: no attention with a proven rotary embedding{also} ({found})")
    unread = sorted({s.layer for s in observer.refused if s.layer and s.reason != "no-rope"} - set(observer.stats))
    missed = {
        s.layer or f"attention at {s.source}": s.reason
        for s in observer.refused
        if s.layer in unread or s.reason == "unknown-layer"
    }
    if missed:
        because = "; ".join([f"{name}: {reason}" for name, reason in sorted(missed.items())][:4])
        warnings.warn(
            f"calibration could not read {len(missed)} layers, which stay dense ({because})", FasaWarning, stacklevel=2
        )
    longest, budget = max(t.shape[1] for t in texts), budget or Budget()
    layers: dict[str, LayerProfile] = {}
    # Of each sparse layer, by reduction, at the numbers of tokens in ``grid``.
    kept: dict[str, dict[str, list[float]]] = {}
    grid = (
        sorted({max(round(share * budget.n_fac), 1) for share in GRID}) if layer_budgets == "mass" else [budget.n_fac]
    )
    for name in list(observer.stats):
        stats = observer.stats.pop(name)  # Dynamo's cache keeps the observer: without its samples
        most = len(stats.rope.chunks)
        count = n_tip if n_tip is not None else max(1, most // 2)
        if stats.rope.pairs and count > most:
            raise CalibrationError(f"{name}: n_tip: expected 1 to {most} FCs per KV head, found {count}")
        if not stats.rope.pairs:  # single dims, as many as that number of FCs would have; int4 wants an even number
            count = min(2 * n_tip, stats.head_dim) if n_tip is not None else max(2, stats.head_dim // 4 * 2)
        made = stats.layer_profile(name, count, method, reduction or "static")
        window = observer.windows.get(name, longest)
        if window < longest:
            made = replace(made, dense=True, stats={**made.stats, "window": float(window)})
        elif reduction is None or layer_budgets == "mass" or dense_above is not None:
            kept[name] = stats.mass_kept(made, budget, grid)
        layers[name] = made
    at = grid.index(budget.n_fac)
    mass = {name: math.fsum(row[name][at] for row in kept.values()) / len(kept) for name in MEASURED if kept}
    chosen = reduction or _best_reduction(mass)
    # ``max`` is not measured: softmax-sum is the nearest.
    lost = {name: [1 - x for x in row.get(chosen, row["softmax_sum"])] for name, row in kept.items()}
    for name, row in lost.items():
        dense = dense_above is not None and row[at] > dense_above
        layers[name] = replace(layers[name], dense=dense, stats={**layers[name].stats, "mass_lost": row[at]})
    sparse = [name for name, layer in layers.items() if not layer.dense]
    for name, given in _shares(layer_budgets, sparse, lost, grid, budget).items():
        layers[name] = replace(layers[name], n_fac=given)
    return FCProfile(
        layers=tuple(layers.values()),
        budget=budget,
        fc_format=fc_format,
        reduction=chosen,
        method=method,
        model=ModelFacts(type(model).__name__, weights_fingerprint(model), len(layers), {"uncalibrated": unread}),
        data={
            "tokens": sum(t.numel() for t in texts),
            "lengths": sorted({t.shape[1] for t in texts}),
            "fingerprint": data_fingerprint(texts),
        },
        stats={"mass_kept": mass} if mass else {},
    )


#: How layers share a budget.
LAYER_BUDGETS = ("equal", "mass", "pyramid")
#: Tokens at which ``mass`` measures, as shares of the mean.
GRID = (0.25, 0.5, 1.0, 2.0, 4.0)
#: Reductions that are measured.
MEASURED = ("static", "affine", "softmax_sum")


def _shares(
    how: str, names: Sequence[str], lost: dict[str, list[float]], grid: Sequence[int], budget: Budget
) -> dict[str, int]:
    """Tokens of each sparse layer; none where all have the same."""
    if how == "equal" or not names:
        return {}
    least = max(budget.n_fac // 4, budget.n_sink + budget.n_recent, 1)
    if how == "pyramid":
        return pyramid(names, budget.n_fac, least=min(least, budget.n_fac))
    return allocate({name: lost[name] for name in names}, grid, budget.n_fac, least=min(least, budget.n_fac))


#: Share of attention mass that a second pass over the packed FC cache must save to be taken.
SINGLE_PASS_WORTH = 0.01


def _best_reduction(mass: dict[str, float]) -> str:
    """The reduction with the most mass kept, of ``mass`` by name; ``softmax_sum`` only where it is clearly better."""
    if not mass:
        return "affine"
    single = "affine" if mass["affine"] > mass["static"] else "static"
    return "softmax_sum" if mass["softmax_sum"] > mass[single] + SINGLE_PASS_WORTH else single


def _bar(show: bool) -> Any:
    """A progress bar over attention layers and texts, or None where it is not wanted or tqdm is not installed."""
    if not show:
        return None
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm(desc="calibrating", unit="layer", total=0, leave=False)
