"""What must hold for one decode step, for any implementation of it.

``impl`` is the module under test, or anything with its functions: by default the plain-torch reference, which is what runs on a
CPU. An implementation is a black box here: with the unit matrix as values, its output is the attention weights, so that the tokens
it selected can be seen from outside. Every check raises ``AssertionError``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasa_compile.testing import oracle
from fasa_compile.testing.oracle import Array
from fasa_compile.testing.steps import Case
from fasa_compile.triton_kernels import reference

#: Keys this close to the last selected one may be taken for equal: they are sums of float32 products.
NEAR = 1e-4


def run(impl: Any, case: Case, **how: Any) -> Tensor:
    """The step's output ``[B, Hq, 1, Dv]``."""
    out: Tensor = impl.sparse_decode(
        case.q, case.k, case.v, *case.cache, case.norm, case.mask, None, **{**case.how, **how}
    )
    return out


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def weights(impl: Any, case: Case, **how: Any) -> Array:
    """Attention weights ``[B, Hq, L]`` float64 that the step gave its tokens: 0 where a token was not selected."""
    B, Hkv, L = case.k.shape[:3]
    unit = torch.eye(L, device=case.k.device).expand(B, Hkv, L, L)
    seen = replace(case, q=case.q.float(), v=unit)
    return oracle.array(run(impl, seen, **how))[:, :, 0]


def selected(weight: Array, case: Case) -> Array:
    """Tokens with a weight in some query head, bool ``[B, Hkv, L]``."""
    B, Hkv, L = case.k.shape[:3]
    return oracle.anywhere((weight > 0).reshape(B, Hkv, -1, L), 2)


def repacked(case: Case, k: Tensor, impl: Any = reference, **changes: Any) -> Case:
    """The case with other keys, and a packed FC cache made from them."""
    data, _, dims, centre, spread = case.cache
    cache = case.cache
    if data is not None:
        cache = (*impl.pack(k, dims, centre, spread, case.how["fmt"]), dims, centre, spread)
    return replace(case, k=k, cache=cache, **changes)


def _unclear(key: Array, n: int) -> Array:
    """Rows ``[B, Hkv]`` where some token is so near the last one selected that rounding may decide between them."""
    ranked = -np.sort(-key, -1)
    if n >= ranked.shape[-1]:
        return np.zeros(key.shape[:2], bool)
    last, following = ranked[..., n - 1], ranked[..., n]
    with np.errstate(invalid="ignore"):
        near: Array = (last - following <= NEAR * (1 + np.abs(last))) & np.isfinite(last) & np.isfinite(following)
    return near


def _close(got: Array, expected: Array, what: str, atol: float = 2e-5, rtol: float = 2e-5) -> None:
    np.testing.assert_allclose(got, expected, atol=atol, rtol=rtol, err_msg=what)


def check_selection(case: Case, impl: Any = reference) -> None:
    """The tokens selected are the float64 oracle's, and the output is its exact attention over them."""
    B, Hkv, L = case.k.shape[:3]
    n = case.how["n_fac"]
    weight = weights(impl, case)
    kept = selected(weight, case)
    key = oracle.keys(case)
    valid = key > -np.inf
    assert not (kept & ~valid).any(), "a token that no head may see was attended to"
    assert (kept.sum(-1) == np.minimum(valid.sum(-1), n)).all(), (kept.sum(-1), valid.sum(-1), n)
    forced = np.isposinf(key)
    # Forced tokens are in even where they outnumber the visible part of the budget: they are part of it.
    assert not (forced & ~kept).any() or (forced.sum(-1) > n).any(), "a forced token is missing"
    ranked = -np.sort(-key, -1)
    last = ranked[..., min(n, L) - 1][..., None]
    with np.errstate(invalid="ignore"):
        above, below = key > last + NEAR * (1 + np.abs(last)), key < last - NEAR * (1 + np.abs(last))
    assert not (above & ~kept).any(), "a token of the top n_fac is missing"
    assert not (below & kept).any(), "a token below the top n_fac was selected"
    # Tokens with the same key (duplicates, or any under a query of zeros) go by index.
    for b, h in np.argwhere(np.isfinite(last[..., 0])):
        equal: list[int] = np.flatnonzero(key[b, h] == last[b, h]).tolist()
        tied = [t for t in equal if _same_token(case, b, h, t, equal[0])]
        taken = kept[b, h][tied]
        assert (np.diff(taken.astype(int)) <= 0).all(), f"ties at row {b}, KV head {h} do not go to the lower index"
    unit = replace(case, v=torch.eye(L).expand(B, Hkv, L, L))
    _close(weight, oracle.attention(unit, kept), "attention weights")
    half = case.q.dtype != torch.float32
    size = max(1.0, float(np.nan_to_num(oracle.array(case.v), posinf=0).max()))
    _close(
        oracle.array(run(impl, case))[:, :, 0],
        oracle.attention(case, kept),
        "output",
        atol=(1e-2 if half else 2e-5) * size,
        rtol=1e-2 if half else 1e-4,
    )


def _same_token(case: Case, b: int, h: int, one: int, other: int) -> bool:
    """Whether two cached tokens of a row are told apart by nothing but their index."""
    if case.q.any() and not torch.equal(case.k[b, h, one], case.k[b, h, other]):
        return False
    return case.mask is None or bool((case.mask[..., one] == case.mask[..., other]).all())


def check_covering_budget(case: Case, impl: Any = reference) -> None:
    """With a budget of the whole context the step is dense attention; so is ``dense_decode``."""
    expected = oracle.attention(case)
    half = case.q.dtype != torch.float32
    size = max(1.0, float(np.nan_to_num(oracle.array(case.v), posinf=0).max()))
    how = {"atol": (1e-2 if half else 2e-5) * size, "rtol": 1e-2 if half else 1e-4}
    L = case.k.shape[2]
    for n_fac in (max(L, case.how["n_fac"]), 3 * L + case.how["n_fac"]):
        _close(oracle.array(run(impl, case, n_fac=n_fac))[:, :, 0], expected, f"n_fac {n_fac} of {L} tokens", **how)
    given = {name: case.how[name] for name in ("scale", "softcap", "sinks")}
    out = impl.dense_decode(case.q, case.k, case.v, case.mask, None, **given)
    _close(oracle.array(out)[:, :, 0], expected, "dense_decode", **how)
    assert out.dtype == case.q.dtype


def check_hidden_tokens(case: Case, impl: Any = reference) -> None:
    """What a mask hides from every head changes no bit, NaN and inf included; a row that sees nothing gives zeros."""
    B, Hq, _, _ = case.q.shape
    L = case.k.shape[2]
    seen = torch.from_numpy(oracle.visible(case.mask, B, Hq, L)[0].any(1)).to(case.k.device)  # [B, L]
    outs = []
    for k_poison, v_poison in ((0.0, 0.0), (torch.nan, torch.inf), (-3e4, torch.nan), (torch.inf, 1e4)):
        k, v = (
            torch.where(seen[:, None, :, None], x, torch.full_like(x, p)) for x, p in ((case.k, k_poison), (case.v, v_poison))
        )  # fmt: skip
        outs.append(run(impl, repacked(case, k, v=v)))
    for out in outs[1:]:
        assert same(out, outs[0]), "a hidden token changed the output"
    assert bool(outs[0].isfinite().all()), "a hidden token spread NaN or inf"
    assert not outs[0][~seen.any(1)].any(), "a row that may see nothing gave something else than zeros"


def check_neighbours(case: Case, impl: Any = reference) -> None:
    """A row's answer does not depend on the other rows of the batch."""
    B = case.q.shape[0]
    out = run(impl, case)
    for row in range(B):
        others = torch.arange(B, device=case.q.device) != row
        q, k, v = (
            torch.where(others[:, None, None, None], torch.full_like(x, p), x)
            for x, p in ((case.q, torch.nan), (case.k, torch.inf), (case.v, torch.nan))
        )
        assert same(run(impl, repacked(case, k, q=q, v=v))[row], out[row]), f"row {row} depends on its neighbours"


def check_padding(case: Case, left: int, right: int, impl: Any = reference) -> None:
    """Slots that are masked, before and after the tokens, change nothing."""
    B, _, L = case.k.shape[:3]
    pad = (0, 0, left, right)
    k, v = (torch.nn.functional.pad(x, pad, value=torch.nan) for x in (case.k, case.v))
    if case.mask is None or case.mask.dtype == torch.bool:
        mask = torch.ones(B, 1, 1, L, dtype=torch.bool) if case.mask is None else case.mask
        mask = torch.nn.functional.pad(mask.to(case.k.device), (left, right), value=False)
    else:
        mask = torch.nn.functional.pad(case.mask, (left, right), value=torch.finfo(case.mask.dtype).min)
    padded = repacked(case, k, v=v, mask=mask)
    key = oracle.keys(case)
    if _unclear(key, case.how["n_fac"]).any():
        return
    weight = weights(impl, padded)
    assert not weight[:, :, :left].any() and not weight[:, :, left + L :].any(), "padding was attended to"
    _close(weight[:, :, left : left + L], weights(impl, case), "attention weights with and without padding")


def check_permutation(case: Case, seed: int, impl: Any = reference) -> None:
    """Cached keys carry their positions: in another order of the slots they get the same weights (no token is forced)."""
    L = case.k.shape[2]
    order = torch.randperm(L, generator=torch.Generator().manual_seed(seed)).to(case.k.device)
    free = replace(case, how={**case.how, "n_sink": 0, "n_recent": 0})
    if _unclear(oracle.keys(free), case.how["n_fac"]).any():
        return
    mask = case.mask if case.mask is None else case.mask[..., order]
    moved = repacked(free, case.k[:, :, order], v=case.v[:, :, order], mask=mask)
    _close(weights(impl, moved), weights(impl, free)[:, :, order.cpu().numpy()], "attention weights of permuted tokens")


def check_scale(case: Case, power: int, impl: Any = reference) -> None:
    """A query ``2^p`` times as large with a scale ``2^p`` times as small is the same step, bit for bit."""
    factor = 2.0**power
    bare = (
        replace(case, q=case.q.float()) if case.q.dtype == torch.float16 else case
    )  # its small numbers would be rounded
    grown = replace(bare, q=bare.q * factor, how={**case.how, "scale": case.how["scale"] / factor})
    assert same(run(impl, grown), run(impl, bare)), "the scale and the size of the query do not make up for each other"


def check_scores_scale(case: Case, power: int, impl: Any = reference) -> None:
    """A query ``2^p`` times as large has ``2^p`` times the scores: keys of one head without norm and mask, bit for bit."""
    data, meta, dims, _, spread = case.cache
    given = dict(scale=case.how["scale"], fmt=case.how["fmt"], reduction="max")
    q = case.q.float()
    one, grown = (
        impl.tip_keys(x, case.k, data, meta, dims, spread, None, None, None, **given) for x in (q, q * 2.0**power)
    )
    assert same(grown, one * 2.0**power), "scores do not grow with the query"


def check_duplicates(case: Case, seed: int, impl: Any = reference) -> None:
    """Equal tokens are told apart by index alone: the one that comes first is selected first, in every run."""
    L = case.k.shape[2]
    g = torch.Generator().manual_seed(seed)
    k, v = case.k.clone(), case.v.clone()
    mask = None if case.mask is None else case.mask.clone()
    groups = torch.randint(0, max(1, L // 3), (L,), generator=g)
    first = torch.tensor([int((groups == group).nonzero()[0]) for group in groups])
    k[:], v[:] = k[:, :, first], v[:, :, first]
    if mask is not None:
        mask = mask[..., first]
    twins = repacked(replace(case, how={**case.how, "n_sink": 0, "n_recent": 0}), k, v=v, mask=mask)
    weight = weights(impl, twins)
    kept = selected(weight, twins)
    for group in groups.unique():
        taken = kept[..., (groups == group).numpy()].astype(int)
        assert (np.diff(taken, axis=-1) <= 0).all(), "of equal tokens a later one was selected before an earlier one"
    assert same(run(impl, twins), run(impl, twins)), "two runs of one step differ"


def check_growing_budget(case: Case, more: int, impl: Any = reference) -> None:
    """A larger budget keeps every token of a smaller one, with its exact weight relative to the others."""
    n = case.how["n_fac"]
    small, large = weights(impl, case), weights(impl, case, n_fac=n + more)
    few, many = selected(small, case), selected(large, case)
    assert not (few & ~many).any(), f"a token selected within {n} is missing within {n + more}"
    G = case.q.shape[1] // case.k.shape[1]
    among = np.repeat(few, G, axis=1)
    if case.how["sinks"] is None:
        rest = np.where(among, large, 0)
        total = rest.sum(-1, keepdims=True)
        _close(small, rest / np.where(total == 0, 1, total), "weights within the smaller budget", atol=1e-4, rtol=1e-3)


def check_heads(case: Case, seed: int, impl: Any = reference) -> None:
    """KV heads in another order, with their query heads, give the outputs in that order."""
    Hq, Hkv = case.q.shape[1], case.k.shape[1]
    order = torch.randperm(Hkv, generator=torch.Generator().manual_seed(seed))
    heads = torch.arange(Hq).view(Hkv, -1)[order].flatten()
    if _unclear(oracle.keys(case), case.how["n_fac"]).any():
        return
    data, meta, dims, centre, spread = case.cache
    cache: tuple[Tensor | None, ...] = case.cache
    if data is not None and meta is not None and dims is not None and centre is not None and spread is not None:
        cache = (data[:, order], meta[:, order], dims[order], centre[order], spread[order])
    mask = case.mask if case.mask is None or case.mask.shape[1] == 1 else case.mask[:, heads]
    how = dict(case.how)
    how |= {name: how[name][heads] for name in ("sinks", "slopes") if how[name] is not None}
    moved = Case(
        case.q[:, heads], case.k[:, order], case.v[:, order], cache, None if case.norm is None else case.norm[heads], mask, how
    )  # fmt: skip
    _close(weights(impl, moved), weights(impl, case)[:, heads.numpy()], "weights of permuted heads")


def check_keys(case: Case, impl: Any = reference) -> None:
    """The keys that tokens are ranked by are the float64 oracle's."""
    data, meta, dims, _, spread = case.cache
    given = {n: case.how[n] for n in ("scale", "n_sink", "n_recent", "softcap", "fmt", "reduction", "slopes")}
    got = oracle.array(
        impl.tip_keys(case.q, case.k, data, meta, dims, spread, case.norm, case.mask, None, **given),
    )
    expected = oracle.keys(case)
    assert (np.isneginf(got) == np.isneginf(expected)).all(), "the tokens that no head may see are others"
    assert (np.isposinf(got) == np.isposinf(expected)).all(), "the forced tokens are others"
    finite = np.isfinite(expected)
    assert np.isfinite(got[finite]).all()
    _close(got[finite], expected[finite], "keys", atol=5e-5, rtol=5e-5)


def check_pack(k: Tensor, dims: Tensor, centre: Tensor, spread: Tensor, fmt: str, impl: Any = reference) -> None:
    """The bytes of a packed FC cache are those of the format's definition, finite, and each row's depend on that row alone."""
    data, meta = impl.pack(k, dims, centre, spread, fmt)
    for got, expected in zip((data, meta), oracle.packed(k, dims, centre, spread, fmt), strict=True):
        assert same(got.cpu(), expected), "packed bytes"
    assert np.isfinite(oracle.unpacked(data, meta, fmt)).all()
    t = k.shape[2] // 2
    alone = impl.pack(k[:, :, t : t + 1], dims, centre, spread, fmt)
    for got, whole in zip(alone, (data, meta), strict=True):
        assert same(got, whole[:, :, t : t + 1]), "a row packs otherwise alone than among others"


def check_refresh(
    k: Tensor, dims: Tensor, centre: Tensor, spread: Tensor, fmt: str, slots: Tensor, impl: Any = reference
) -> None:
    """Refreshing rows in place equals packing anew, and touches no other row."""
    before = impl.pack(k, dims, centre, spread, fmt)
    written = k.flip(2) * 0.5 - 1
    after = impl.pack(written, dims, centre, spread, fmt)
    state = tuple(x.clone() for x in before)
    impl.pack_rows_(*state, written, slots, dims, centre, spread, fmt)
    rows = torch.zeros(k.shape[0], k.shape[2], dtype=torch.bool)
    rows.scatter_(1, slots.reshape(-1, slots.shape[-1]).expand(k.shape[0], -1).cpu(), True)
    for now, old, new in zip(state, before, after, strict=True):
        wide = tuple(x.contiguous().view(torch.uint8).cpu() for x in (now, old, new))
        expected = torch.where(rows[:, None, :, None], wide[2], wide[1])
        assert torch.equal(wide[0], expected), "refreshed rows"


def check_bounds(mask: Tensor, L: int, impl: Any = reference) -> None:
    """``mask_bounds`` is the first valid token and one past the last, of each row."""
    got = impl.mask_bounds(mask, L)
    full = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    assert got.dtype == torch.int32 and got.shape == (full.shape[0], 2)
    assert got.tolist() == oracle.bounds(mask, full.shape[0], full.shape[1], L).tolist()


def check_repeat(case: Case, impl: Any = reference, times: int = 2) -> None:
    """A step gives the same bits in every run."""
    first = run(impl, case)
    for _ in range(times - 1):
        assert same(run(impl, case), first), "two runs of one step differ"


#: The checks of one step by name, each as ``check(case, seed, impl)``: what the property tests and the mutation check run.
STEP_CHECKS: dict[str, Callable[[Case, int, Any], None]] = {
    "selection": lambda case, seed, impl: check_selection(case, impl),
    "covering budget": lambda case, seed, impl: check_covering_budget(case, impl),
    "hidden tokens": lambda case, seed, impl: check_hidden_tokens(case, impl),
    "neighbours": lambda case, seed, impl: check_neighbours(case, impl),
    "padding": lambda case, seed, impl: check_padding(case, seed % 4, seed % 5, impl),
    "permutation": check_permutation,
    "scale": lambda case, seed, impl: check_scale(case, seed % 9 - 4, impl),
    "duplicates": check_duplicates,
    "growing budget": lambda case, seed, impl: check_growing_budget(case, 1 + seed % 7, impl),
    "heads": check_heads,
    "repeat": lambda case, seed, impl: check_repeat(case, impl),
}
