"""Random decode steps, and the Triton kernels compared with their specification; on CPU (Triton's interpreter) and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasa_compile.triton_kernels import reference

#: Kinds of masks that ``make_case`` makes; "" is none.
MASKS = (
    "", "bool", "lengths", "left", "one row", "additive", "shared additive", "per head", "few", "nothing",
)  # fmt: skip


@dataclass
class Case:
    """Inputs of one decode step; ``how`` are ``sparse_decode``'s keyword arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    cache: tuple[Tensor | None, ...]  # data, meta, dims, centre, spread
    norm: Tensor | None
    mask: Tensor | None
    how: dict[str, Any]


def make_case(
    fmt: str = "int4",
    *,
    B: int = 2,
    Hkv: int = 2,
    G: int = 3,
    L: int = 300,
    D: int = 24,
    DV: int = 16,
    W: int = 12,
    n_fac: int = 40,
    dtype: torch.dtype = torch.float32,
    mask: str = "",
    device: str = "cpu",
    all_dims: bool = False,
    gain: float = 1.0,
    sinks: bool = False,
    softcap: float = 0.0,
    reduction: str = "static",
    n_sink: int = 2,
    n_recent: int = 5,
    S: int = 1,
) -> Case:
    """Random inputs, of ``S`` query tokens per sequence. Keys and values that a mask hides from every head are poisoned with NaN and inf."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    Hq = G * Hkv
    dims = torch.stack([torch.randperm(D)[:W] for _ in range(Hkv)]).int().to(device)
    centre, spread = normal(Hkv, W), torch.rand(Hkv, W, device=device) + 0.5
    q = (gain * normal(B, Hq, S, D)).to(dtype)
    k, v = normal(B, L, Hkv, D).transpose(1, 2).to(dtype), normal(B, Hkv, L, DV).to(dtype)
    lowest = torch.finfo(dtype).min
    masks = {
        "": lambda: None,
        "bool": lambda: torch.rand(B, 1, S, L, device=device) > 0.3,
        "lengths": lambda: (torch.arange(L, device=device) < torch.tensor([[L // 2], [L - 7]] * B, device=device)[:B, None] + torch.arange(S, device=device)[:, None])[:, None],
        "left": lambda: (torch.arange(L, device=device) >= torch.randint(0, L, (B, 1), device=device))[:, None, None],
        "one row": lambda: (torch.arange(B, device=device) > 0)[:, None, None, None].expand(B, 1, 1, L),
        "additive": lambda: torch.where(normal(B, Hq, S, L) > -0.5, normal(B, Hq, S, L), lowest).to(dtype),
        "shared additive": lambda: torch.where(normal(1, 1, S, L) > -0.5, normal(1, 1, S, L), lowest).to(dtype),
        "per head": lambda: torch.rand(B, Hq, S, L, device=device) > 0.5,
        "few": lambda: torch.rand(B, 1, S, L, device=device) > 0.95,
        "nothing": lambda: torch.zeros(B, 1, S, L, dtype=torch.bool, device=device),
    }  # fmt: skip
    m = masks[mask]()
    if m is not None:
        hidden = ~(m if m.dtype == torch.bool else m > lowest).any(1).any(1).expand(B, L)
        k = torch.where(hidden[:, None, :, None], torch.nan, k)
        v = torch.where(hidden[:, None, :, None], torch.inf, v)
    cache: tuple[Tensor | None, ...] = (None,) * 5
    if not all_dims:
        cache = (*reference.pack(k, dims, centre, spread, fmt), dims, centre, spread)
    how = {
        "scale": D**-0.5, "n_fac": n_fac, "n_sink": n_sink, "n_recent": n_recent, "softcap": softcap,
        "sinks": normal(Hq) if sinks else None, "fmt": fmt, "reduction": reduction,
        "slopes": normal(Hq, W) if reduction == "affine" else None,
    }  # fmt: skip
    return Case(q, k, v, cache, normal(Hq), m, how)


def check_step(case: Case, hint: Tensor | None = None, slots: Tensor | None = None, tolerance: float = 1e-5) -> float:
    """Runs the kernels once and checks the selection and the attention over it; returns how many tokens were kept, in
    multiples of what was asked for."""
    from fasa_compile.triton_kernels import sparse_decode

    q, k, v, mask, how = case.q, case.k, case.v, case.mask, case.how
    B, Hkv, L = k.shape[:3]
    data, meta, dims, centre, spread = case.cache
    selection: list[tuple[Tensor, Tensor]] = []
    out = sparse_decode.sparse_decode(
        q, k, v, data, meta, dims, centre, spread, case.norm, mask, None, slots, hint, selection=selection, **how
    )
    kept, count = selection[0]
    used = torch.arange(kept.shape[2], device=q.device) < count[..., None]
    S = q.shape[2]
    times = torch.zeros(B * S * Hkv, L, dtype=torch.int32, device=q.device)
    times.scatter_add_(1, torch.where(used, kept, 0).long().flatten(1), used.flatten(1).int())
    assert times.max() <= 1, "a token was kept twice"
    return check_kept(case, (times > 0).view(B * S, Hkv, L), out, tolerance)


def check_sharded_step(case: Case, ranks: int, hints: list[Tensor] | None = None, tolerance: float = 1e-5) -> float:
    """As ``check_step``, for ``sharded_step``; and exact attention of the same processes."""
    how = case.how
    kept, out, dense = sharded_step(case, ranks, hints)
    exact = reference.dense_decode(
        case.q, case.k, case.v, case.mask, None, scale=how["scale"], softcap=how["softcap"], sinks=how["sinks"]
    )
    torch.testing.assert_close(dense, exact.float(), atol=tolerance, rtol=tolerance)
    return check_kept(case, kept, out, tolerance)


def sharded_step(case: Case, ranks: int, hints: list[Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The kernels of ``sharded_decode``, for ``ranks`` processes one after another, and what they exchange: ``(kept, out, dense)``, the tokens
    attended to, bool ``[B, Hkv, L]``, and sparse and exact attention, fp32 ``[B, Hq, 1, Dv]``.

    Each process has a row more in its buffers, poisoned, that nobody may read. ``L`` must be a multiple of ``ranks``. Which tokens were kept
    shows in attention to unit vectors, 128 tokens at a time. ``hints``: each process's, of the shape of ``ops.sparse_decode_state``.
    """
    from fasa_compile.triton_kernels import dense_decode, shard, sharded_decode

    q, how = case.q, case.how
    B, Hkv, L = case.k.shape[:3]
    rows, n_fac = L // ranks, how["n_fac"]
    data, meta, dims, _, spread = case.cache
    common: dict[str, Any] = {name: how[name] for name in ("scale", "softcap")}
    normal: dict[str, Any] = {"rows": rows, "fmt": how["fmt"], **common}

    def part(x: Tensor, rank: int) -> Tensor:
        own = x[:, :, rank * rows : (rank + 1) * rows]
        with_spill = torch.empty((B, Hkv, rows + 1, x.shape[3]), dtype=x.dtype, device=x.device)
        if x.shape[3]:
            with_spill.view(torch.uint8).fill_(255)  # NaN in all floating formats
            with_spill.view(torch.uint8)[:, :, :rows] = own.contiguous().view(torch.uint8)
        return with_spill

    limits: Any = [sharded_decode.own_mask(case.mask, None, rows, r, ranks, q.device) for r in range(ranks)]
    keys = [part(case.k, r) for r in range(ranks)]
    packed = [tuple(x if x is None else part(x, r) for x in (data, meta)) for r in range(ranks)]
    scored: Any = [(q, keys[r], *packed[r], dims, spread) for r in range(ranks)]
    norm, reduction = case.norm, how["reduction"]
    if reduction == "softmax_sum":
        levels = [shard.levels(*scored[r], *limits[r], **normal) for r in range(ranks)]
        norm, reduction = reference.guarded_logsumexp(torch.stack(levels), 0)[0], "static"
    found = []
    for r in range(ranks):
        hint = None if hints is None else hints[r]
        select = {"n_fac": n_fac, "n_sink": how["n_sink"], "n_recent": how["n_recent"], "reduction": reduction}
        step: Any = (*scored[r], norm, *limits[r], hint, how["slopes"])
        found.append(shard.candidates(*step, **select | normal))
    everyones = torch.cat([listed for listed, _ in found], -1)

    def sparse(v: Tensor, sinks: Tensor | None = None) -> Tensor:
        shares = []
        for r in range(ranks):
            args = (q, keys[r], part(v, r), limits[r][0], everyones, found[r][1])
            shares.append(shard.attend(*args, rank=r, n_fac=n_fac, **common))
        return sharded_decode.merged(torch.stack(shares), sinks)

    weights = []
    for t in range(0, L, 128):
        unit = torch.zeros(L, 128, dtype=case.v.dtype, device=q.device)
        unit[t : t + 128].fill_diagonal_(1.0)
        weights.append(sparse(unit.expand(B, Hkv, L, 128)))
    kept = (torch.cat(weights, -1)[..., :L] > 0).view(B, Hkv, -1, L).any(2)
    exact = []
    for r in range(ranks):
        own_k, own_v = keys[r][:, :, :rows], part(case.v, r)[:, :, :rows]
        exact.append(dense_decode.dense_decode(q, own_k, own_v, *limits[r], **common, shard=True))
    return kept, sparse(case.v, how["sinks"]), sharded_decode.merged(torch.stack(exact), how["sinks"])


def check_kept(case: Case, kept_here: Tensor, out: Tensor, tolerance: float) -> float:
    """Checks which tokens a step kept, bool ``[B * S, Hkv, L]``, and its result; returns how many, in multiples of what was asked for."""
    q, k, v, mask, how = case.q, case.k, case.v, case.mask, case.how
    B, Hkv, L = k.shape[:3]
    S, G = q.shape[2], q.shape[1] // Hkv
    data, meta, dims, _, spread = case.cache

    ranked = {name: how[name] for name in ("scale", "n_sink", "n_recent", "softcap", "fmt", "reduction", "slopes")}
    key = reference.tip_keys(q, k, data, meta, dims, spread, case.norm, mask, None, **ranked)
    valid = key > -torch.inf
    want = valid.sum(-1).clamp(max=how["n_fac"])
    number = kept_here.sum(-1)
    assert not (kept_here & ~valid).any(), "a token that no head may attend to was kept"
    assert (number >= want).all() and (number <= want + how["n_fac"] * 3 // 25).all(), (number.tolist(), want.tolist())
    # Keys are sums in another order than the reference's: what lies within rounding of the threshold may fall on either side.
    threshold = key.sort(-1, descending=True).values.gather(-1, (want - 1).clamp(min=0)[..., None])
    clear = key > threshold + 2e-3 * (1 + threshold.abs())
    assert not (valid & clear & ~kept_here).any(), "a token of the top n_fac is missing"

    among = kept_here.view(B, S, Hkv, L).transpose(1, 2).repeat_interleave(G, 1)
    if mask is not None:
        among = among & mask if mask.dtype == torch.bool else torch.where(among, mask, torch.finfo(mask.dtype).min)
    expected = reference.dense_decode(
        q, k, v, among, None, scale=how["scale"], softcap=how["softcap"], sinks=how["sinks"]
    )
    torch.testing.assert_close(out.float(), expected.float(), atol=tolerance, rtol=tolerance)
    return float(number.sum() / want.sum().clamp(min=1))
