"""Decode attention of FASA in plain torch: the specification of the kernels, and what runs on CPU.

Everything here is traceable (AOTAutograd, Inductor, symbolic ``L``): no value is read on the host and no branch looks at
data. Dimension letters: ``fasa_compile/sites.py``. Method: FASA (arXiv 2602.03152), TIP = token importance predictor,
FAC = focused attention computation; what differs from the paper: ``docs/method.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import INFO, REDUCTIONS, check_format
from .hot_slots import rows_through_
from .tokens import as_rows, by_row, by_sequence, four_dims, from_rows

_FLOAT_MAX = torch.finfo(torch.float32).max


def pack(k: Tensor, dims: Tensor, centre: Tensor, spread: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Packed FC cache rows of ``k``.

    ``k [B, Hkv, T, D]`` (post-RoPE, any floating dtype and strides), ``dims [Hkv, W]`` integer indices into D, ``centre``
    and ``spread [Hkv, W]`` fp32. Returns ``(data, meta)`` as ``formats.fc_cache_spec(B, Hkv, T, W, fmt)`` says. Uses only
    IEEE elementwise operations, min and max, so that a row's bytes depend on that row alone and on nothing that a compiler
    may reorder. (Eager PyTorch on CUDA divides by a number as it multiplies with its inverse: there a scale of int8 or int4 may come
    out one unit off, so compare bytes with those made on a CPU.) NaN is stored as 0 and values beyond the format's range are clamped.
    """
    B, Hkv, T, _ = k.shape
    index = dims.long()[None, :, None, :].expand(B, Hkv, T, dims.shape[1])
    return _encode(k.gather(3, index), centre, spread, fmt)


def _encode(chosen: Tensor, centre: Tensor, spread: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """``chosen [B, Hkv, T, W]``, the dominant dims of keys, to ``(data, meta)``."""
    info = INFO[check_format(fmt)]
    x = (chosen.float() - centre[:, None, :]) / spread[:, None, :]
    x = torch.where(x == x, x, 0.0).clamp(-info.limit, info.limit)
    if not info.bits:
        return x.to(info.dtype), x.new_empty((*x.shape[:-1], 0), dtype=torch.float16)
    zero, top = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    steps = float(2**info.bits - 1)
    # The codes are taken with the rounded scale and zero, the ones a reader will use.
    scale = rounded_to((top - zero) / steps, torch.float16)
    scale = torch.where(scale == 0, 1.0, scale)
    zero = rounded_to(zero, torch.float16)
    q = ((x - zero) / scale).round().clamp(0.0, steps)
    meta = torch.cat([scale, zero], dim=-1).to(torch.float16)
    if info.bits == 8:
        return (q - 128.0).to(torch.int8), meta
    q = q.to(torch.uint8)
    half = q.shape[-1] // 2
    return q[..., :half] | (q[..., half:] << 4), meta


def rounded_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite fp32 ``x``, in range, rounded to nearest even in a narrower floating ``dtype`` but kept in fp32.

    For fp16 and bf16 by integers: Inductor drops a cast to them and back, and computes on in fp32.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return x.to(dtype).float()
    drop = 13 if dtype == torch.float16 else 16  # bits of an fp32 fraction that the narrower one lacks
    bits = x.view(torch.int32)
    bits = (bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) & -(1 << drop)
    rounded = bits.view(torch.float32)
    if dtype == torch.float16:
        subnormal = (x * 2.0**24).round() * 2.0**-24
        rounded = torch.where(x.abs() < 2.0**-14, subnormal, rounded)
    return rounded


def unpack(data: Tensor, meta: Tensor, fmt: str) -> Tensor:
    """The stored ``x`` of a packed FC cache, fp32 ``[B, Hkv, L, W]`` (for calibration and tests; TIP never builds it)."""
    info = INFO[check_format(fmt)]
    if not info.bits:
        return data.float()
    return _codes(data, fmt) * meta[..., :1].float() + meta[..., 1:].float()


def _codes(data: Tensor, fmt: str) -> Tensor:
    """Integer codes ``q >= 0`` of int8 or int4 ``data`` as fp32 ``[B, Hkv, L, W]``."""
    if fmt == "int8":
        return data.float() + 128.0
    return torch.cat([data & 15, data >> 4], dim=-1).float()


def pack_rows_(
    data: Tensor, meta: Tensor, k: Tensor, slots: Tensor, dims: Tensor, centre: Tensor, spread: Tensor, fmt: str
) -> None:
    """Refresh rows ``slots`` of a packed FC cache, in place, from the key cache they mirror.

    ``k [B, Hkv, L, D]`` is the whole cache, already written; ``slots`` int64 ``[T]`` (shared by the batch) or ``[B, T]``,
    each in ``[0, L)``. Rows are read back from ``k``, so what counts is the precision the model stored them in.
    """
    B, Hkv, _, _ = k.shape
    # Advanced indices: scatter, gather and index_copy have no float8 implementation on CPU.
    batch = torch.arange(B, device=k.device)[:, None, None]
    head = torch.arange(Hkv, device=k.device)[None, :, None]
    row = slots.reshape(-1, slots.shape[-1])[:, None, :]
    rows = k[batch[..., None], head[..., None], row[..., None], dims.long()[None, :, None, :]]  # [B, Hkv, T, W]
    new_data, new_meta = _encode(rows, centre, spread, fmt)
    data.index_put_((batch, head, row), new_data)
    if INFO[fmt].meta_columns:
        meta.index_put_((batch, head, row), new_meta)


def mask_bounds(mask: Tensor, L: int) -> Tensor:
    """First valid token and one past the last, per query token and over all heads: int32 ``[B' * S', 2]``.

    ``mask`` is broadcastable to ``[B, Hq, S, L]``, bool (True attends) or additive; ``B'`` and ``S'`` are its own sizes, 1 where
    it is shared. ``(0, 0)`` for a row without a valid token.
    """
    allowed = _allowed(four_dims(mask)).any(dim=1).flatten(0, 1)
    allowed = allowed.expand(allowed.shape[0], L)
    t = torch.arange(L, device=mask.device, dtype=torch.int32)
    stop = torch.where(allowed, t + 1, 0).amax(-1)
    start = torch.minimum(torch.where(allowed, t, L).amin(-1), stop)
    return torch.stack([start, stop], dim=-1).to(torch.int32)


def _allowed(mask: Tensor) -> Tensor:
    """Where a mask lets a query attend. An additive mask forbids at its dtype's lowest value and at -inf (and at NaN)."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def per_head_mask(
    mask: Tensor | None, bounds: Tensor | None, B: int, Hkv: int, G: int, L: int, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor]:
    """``(allowed, bias, bounds)``: bool and fp32 broadcastable to ``[B, Hkv, G, L]``, and int32 ``[B', 2]``.

    ``allowed`` holds the bounds too. ``bias`` is None unless the mask is additive.
    """
    t = torch.arange(L, device=device)
    if mask is None:
        if bounds is None:
            bounds = torch.stack([torch.zeros_like(t[:1]), torch.full_like(t[:1], L)], dim=-1)
        allowed = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
        bias = None
    else:
        bounds = mask_bounds(mask, L) if bounds is None else bounds
        mask = four_dims(mask)
        heads = (Hkv, G) if mask.shape[1] != 1 else (1, 1)
        mask = mask.reshape(mask.shape[0], *heads, mask.shape[3])
        allowed = _allowed(mask)
        bias = None if mask.dtype == torch.bool else torch.where(allowed, mask.float(), 0.0)
    inside = (t >= bounds[:, :1]) & (t < bounds[:, 1:])  # [B', L]
    return allowed & inside[:, None, None, :], bias, bounds


def capped(s: Tensor, softcap: float) -> Tensor:
    """Scores under a soft cap, ``softcap * tanh(s / softcap)``; 0 is none."""
    return softcap * torch.tanh(s / softcap) if softcap else s


def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    data: Tensor | None,
    meta: Tensor | None,
    dims: Tensor | None,
    centre: Tensor | None,
    spread: Tensor | None,
    norm: Tensor | None,
    mask: Tensor | None = None,
    bounds: Tensor | None = None,
    *,
    scale: float,
    n_fac: int,
    n_sink: int = 0,
    n_recent: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    fmt: str = "int4",
    reduction: str = "static",
    slopes: Tensor | None = None,
    hot: tuple[Tensor, Tensor, Tensor] | None = None,
    written: Tensor | None = None,
) -> Tensor:
    """One decode step of FASA: TIP scores every cached token, the best ``n_fac`` per KV head are attended to exactly.

    ``q [B, Hq, S, D]`` post-RoPE, one new token or several, each of which selects for itself; ``k [B, Hkv, L, D]``,
    ``v [B, Hkv, L, Dv]``. Any strides, all floating. ``data, meta``:
    the packed FC cache (``formats``) of ``k`` with ``dims, centre, spread [Hkv, W]``; ``data=None`` scores with all dims of
    ``k`` itself. ``norm [Hq]`` fp32, natural log units, or None for zeros. ``mask`` None, bool (True attends) or additive,
    broadcastable to ``[B, Hq, S, L]``. ``bounds`` int32 ``[B or 1, 2]``, or as ``mask_bounds`` makes them of ``mask``: tokens outside
    ``[first, stop)`` are not valid. ``sinks [Hq]``: a logit per query head that joins the denominator. Returns ``[B, Hq, S, Dv]`` in
    q's dtype.

    The score of query head h is ``softcap(scale * (q * spread)[dims] . x) + additive mask``; q is rounded as the format
    asks (``_tip_scores``). The group's one key per token is ``log sum_h exp(s_h - norm_h)`` ("static"), the same with
    ``norm_h`` the log-sum-exp of ``s_h`` over the valid tokens ("softmax_sum") or ``max_h (s_h - norm_h)`` ("max"). "affine" is
    "static" with ``norm_h + scale * (q * spread)[dims] . slopes_h``, ``slopes [Hq, W]`` fp32, the query unrounded; without
    ``data`` it is "static".
    Selected, per KV head: ``min(n_fac, valid)`` tokens; the first ``n_sink`` positions from the row's first valid token and
    the ``n_recent`` positions before its last are in, the rest are the highest keys; ties go to the lower index and NaN
    ranks lowest. A row that no head may attend anywhere yields zeros. ``hot`` and ``written``: K and V rows are read through a hot
    buffer (``hot_slots``), which changes no result and serves one query token.

    Raises ``ValueError`` for an unknown format or reduction, ``n_sink + n_recent > n_fac``, or a hot buffer with several query tokens.
    """
    check_format(fmt)
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown group reduction {reduction!r}; choose one of {', '.join(REDUCTIONS)}")
    if n_fac < 1 or n_sink < 0 or n_recent < 0 or n_sink + n_recent > n_fac:
        raise ValueError(f"expected n_sink + n_recent <= n_fac, n_fac >= 1; got {n_sink} + {n_recent}, {n_fac}")
    _, Hq, S, D = q.shape
    if hot is not None and S != 1:
        raise ValueError(f"a hot buffer serves one query token, got {S}")
    q, mask, bounds = as_rows(q, mask, bounds)
    N, Hkv, L = q.shape[0], k.shape[1], k.shape[2]
    G = Hq // Hkv
    allowed, bias, bounds = per_head_mask(mask, bounds, N, Hkv, G, L, q.device)
    qg = q.reshape(N, Hkv, G, D).float()
    level = levels(qg, dims, spread, norm, slopes, scale, reduction)
    key = _keys(
        qg,
        k,
        data,
        meta,
        dims,
        spread,
        level,
        allowed,
        bias,
        bounds,
        scale,
        n_sink,
        n_recent,
        softcap,
        fmt,
        reduction,
        S,
    )
    chosen = best(key, n_fac)  # [N, Hkv, n_fac], indices below L + n_fac
    index = chosen.clamp(max=L - 1)
    taken = (chosen < L) & (key.gather(2, index) > -torch.inf)

    if hot is not None:
        kept_k, kept_v = rows_through_(*hot, k, v, index, taken, bounds[:, 0], written)
    else:
        rows = by_sequence(index[..., None], S)  # [B, Hkv, S * n_fac, 1]
        kept_k = by_row(k.gather(2, rows.expand(*rows.shape[:3], D)), S)
        kept_v = by_row(v.gather(2, rows.expand(*rows.shape[:3], v.shape[3])), S)
    by_head = index[:, :, None, :].expand(N, Hkv, G, n_fac)
    kept_allowed = allowed.expand(N, Hkv, G, L).gather(3, by_head) & taken[:, :, None, :]
    kept_bias = None if bias is None else bias.expand(N, Hkv, G, L).gather(3, by_head)
    out = _attend(qg, kept_k.float(), kept_v.float(), kept_allowed, kept_bias, scale, softcap, sinks).to(q.dtype)
    return from_rows(out, S)


def tip_keys(
    q: Tensor,
    k: Tensor,
    data: Tensor | None,
    meta: Tensor | None,
    dims: Tensor | None,
    spread: Tensor | None,
    norm: Tensor | None,
    mask: Tensor | None = None,
    bounds: Tensor | None = None,
    *,
    scale: float,
    n_sink: int = 0,
    n_recent: int = 0,
    softcap: float = 0.0,
    fmt: str = "int4",
    reduction: str = "static",
    slopes: Tensor | None = None,
) -> Tensor:
    """The key by which ``sparse_decode`` ranks tokens, fp32 ``[B * S, Hkv, L]`` (row ``b * S + s``: query token s of sequence b),
    natural log units: +inf for forced tokens, -inf for tokens that no head may attend to, finite for others."""
    _, Hq, S, D = q.shape
    q, mask, bounds = as_rows(q, mask, bounds)
    N, Hkv, L = q.shape[0], k.shape[1], k.shape[2]
    G = Hq // Hkv
    allowed, bias, bounds = per_head_mask(mask, bounds, N, Hkv, G, L, q.device)
    qg = q.reshape(N, Hkv, G, D).float()
    level = levels(qg, dims, spread, norm, slopes, scale, reduction)
    return _keys(
        qg,
        k,
        data,
        meta,
        dims,
        spread,
        level,
        allowed,
        bias,
        bounds,
        scale,
        n_sink,
        n_recent,
        softcap,
        fmt,
        reduction,
        S,
    )


def levels(
    qg: Tensor,
    dims: Tensor | None,
    spread: Tensor | None,
    norm: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    reduction: str,
) -> Tensor | None:
    """What is taken from each query head's scores before the group reduces them, broadcastable to ``[B, Hkv, G, 1]``."""
    _, Hkv, G, _ = qg.shape
    level = None if norm is None else norm.float().reshape(1, Hkv, G, 1)
    if reduction != "affine" or slopes is None or dims is None or spread is None:
        return level
    at = scale * (_gathered(qg, dims, spread) * slopes.float().view(1, Hkv, G, -1)).sum(-1, keepdim=True)
    return at if level is None else level + at


def _gathered(qg: Tensor, dims: Tensor, spread: Tensor) -> Tensor:
    """``(q * spread)[dims]`` fp32 ``[B, Hkv, G, W]``, NaN as 0 and clamped to what fp32 tolerates."""
    B, Hkv, G, _ = qg.shape
    y = qg.gather(3, dims.long()[None, :, None, :].expand(B, Hkv, G, dims.shape[1])) * spread[:, None, :]
    return torch.where(y == y, y, 0.0).clamp(-INFO["fp32"].limit, INFO["fp32"].limit)


def _keys(
    qg: Tensor,
    k: Tensor,
    data: Tensor | None,
    meta: Tensor | None,
    dims: Tensor | None,
    spread: Tensor | None,
    level: Tensor | None,
    allowed: Tensor,
    bias: Tensor | None,
    bounds: Tensor,
    scale: float,
    n_sink: int,
    n_recent: int,
    softcap: float,
    fmt: str,
    reduction: str,
    S: int,
) -> Tensor:
    s = scores(qg, k, data, meta, dims, spread, bias, scale, softcap, fmt, S)
    return forced(group_key(s, allowed, level, reduction), bounds, n_sink, n_recent)


def scores(
    qg: Tensor,
    k: Tensor,
    data: Tensor | None,
    meta: Tensor | None,
    dims: Tensor | None,
    spread: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    fmt: str,
    S: int = 1,
) -> Tensor:
    """Scores of ``qg [B * S, Hkv, G, D]`` with softcap and additive mask, fp32 ``[B * S, Hkv, G, L]``: of the dominant dims, or of all
    dims of ``k [B, Hkv, L, D]``."""
    together = by_sequence(qg, S)
    if data is None:
        s = scale * _matmul(together, k)
    else:
        assert meta is not None and dims is not None and spread is not None
        s = _tip_scores(together, data, meta, dims, spread, scale, fmt)
    s = capped(by_row(s, S), softcap)
    return s if bias is None else s + bias


def forced(key: Tensor, bounds: Tensor, n_sink: int, n_recent: int) -> Tensor:
    """``key [B, Hkv, L]`` with +inf for the tokens that are in whatever they score. ``bounds [B', 2]`` may lie outside of ``[0, L]``."""
    t = torch.arange(key.shape[2], device=key.device)
    first, stop = bounds[:, None, :1], bounds[:, None, 1:]
    always = (t < first + n_sink) | (t >= stop - n_recent)
    return torch.where((key > -torch.inf) & always, torch.inf, key)


def dense_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bounds: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Exact grouped-query attention of a step's query tokens. Arguments and result as ``sparse_decode``'s."""
    _, Hq, S, D = q.shape
    q, mask, bounds = as_rows(q, mask, bounds)
    N, Hkv, L = q.shape[0], k.shape[1], k.shape[2]
    G = Hq // Hkv
    allowed, bias, _ = per_head_mask(mask, bounds, N, Hkv, G, L, q.device)
    qg = q.reshape(N, Hkv, G, D).float()
    if S != 1:
        k, v = k.repeat_interleave(S, 0), v.repeat_interleave(S, 0)
    return from_rows(_attend(qg, k.float(), v.float(), allowed, bias, scale, softcap, sinks).to(q.dtype), S)


def _matmul(qg: Tensor, k: Tensor) -> Tensor:
    """``[B, Hkv, G, D] x [B, Hkv, L, D] -> [B, Hkv, G, L]`` in fp32."""
    return qg @ k.float().transpose(2, 3)


def _tip_scores(qg: Tensor, data: Tensor, meta: Tensor, dims: Tensor, spread: Tensor, scale: float, fmt: str) -> Tensor:
    """Partial scores of the dominant dims, fp32 ``[B, Hkv, G, L]``, without softcap and mask.

    ``y = (q * spread)[dims]`` is scaled per query head to its largest magnitude and rounded: to int8 (symmetric, +-127) for
    the integer formats, whose dot is then an integer dot; to e4m3 (+-448) for fp8; to the format itself (+-1) for bf16 and
    fp16; not at all for fp32.
    """
    info = INFO[fmt]
    y = _gathered(qg, dims, spread)
    if fmt == "fp32":
        return scale * _matmul(y, data)
    largest = y.abs().amax(-1, keepdim=True)
    largest = torch.where(largest == 0, 1.0, largest)
    if not info.bits:
        step = largest / 448.0 if fmt == "fp8" else largest
        rounded = rounded_to((y / step).clamp(-info.limit, info.limit), info.dtype)
        return (scale * step) * _matmul(rounded, data)
    step = largest / 127.0
    rounded = (y / step).round().clamp(-127.0, 127.0)
    # Sums of products of small integers stay below 2^24, so this fp32 dot is the integer dot in any order of summation.
    dot = _matmul(rounded, _codes(data, fmt))
    token_scale = meta[..., 0].float()[:, :, None, :]
    token_zero = meta[..., 1].float()[:, :, None, :]
    return (scale * step) * (token_scale * dot + token_zero * rounded.sum(-1, keepdim=True))


def allowed_scores(s: Tensor, allowed: Tensor) -> Tensor:
    """Finite scores ``[B, Hkv, G, L]``, NaN as the lowest, and -inf where a head may not attend."""
    s = torch.where(s == s, s, -_FLOAT_MAX).clamp(-_FLOAT_MAX, _FLOAT_MAX)
    return torch.where(allowed, s, -torch.inf)


def group_key(s: Tensor, allowed: Tensor, level: Tensor | None, reduction: str) -> Tensor:
    """One key per token and KV head, fp32 ``[B, Hkv, L]``: -inf exactly where no head may attend, finite elsewhere."""
    size = s.shape
    s = allowed_scores(s, allowed)
    if reduction == "softmax_sum":
        s = s - guarded_logsumexp(s, -1)
    elif level is not None:
        s = s - level
    key = s.amax(2) if reduction == "max" else guarded_logsumexp(s, 2).squeeze(2)
    key = key.clamp(-_FLOAT_MAX, _FLOAT_MAX)
    key = torch.where(key == 0, 0.0, key)  # -0.0 and 0.0 tie
    return torch.where(allowed.expand(size).any(2), key, -torch.inf)


def guarded_logsumexp(s: Tensor, dim: int) -> Tensor:
    """Log-sum-exp that keeps ``dim``; -FLOAT_MAX where every entry is -inf, never NaN."""
    top = s.amax(dim, keepdim=True).clamp(min=-_FLOAT_MAX)
    return (top + (s - top).exp().sum(dim, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny).log()).clamp(
        min=-_FLOAT_MAX
    )


def most_kept(n_fac: int) -> int:
    """Tokens that a kernel's selection of the best ``n_fac`` holds at most: a bin of keys is taken whole if that is no more."""
    return n_fac + n_fac * 3 // 25


def best(key: Tensor, n: int) -> Tensor:
    """Indices of the ``n`` highest keys along the last dim, ties to the lower index; ``[L, L + n)`` where they run out.

    Key and position go into one int64, so that all entries differ and ``topk`` has one answer.
    """
    padded = torch.nn.functional.pad(key, (0, n), value=-torch.inf)
    bits = padded.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # as integers in the order of the floats
    position = torch.arange(padded.shape[-1], device=key.device)
    picked = (ordered * 2**32 + (2**31 - position)).topk(n, dim=-1).values
    return 2**31 - (picked & 0xFFFFFFFF)


def _attend(
    qg: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax attention in fp32 over ``k, v [B, Hkv, N, *]``; ``allowed`` and ``bias`` broadcast to ``[B, Hkv, G, N]``."""
    B, Hkv, G, _ = qg.shape
    sink = None if sinks is None else sinks.float().reshape(1, Hkv, G, 1)
    out, total, top = partial(qg, k, v, allowed, bias, scale, softcap, sink)
    if sink is not None:
        total = total + (sink - top).exp()
    out = out / torch.where(total == 0, 1.0, total)
    return out.reshape(B, Hkv * G, 1, v.shape[-1])


def partial(
    qg: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    least: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention before it is divided: ``sum_t exp(s_t - top) v_t`` fp32 ``[B, Hkv, G, Dv]``, ``sum_t exp(s_t - top)`` and ``top``,
    ``[B, Hkv, G, 1]``. ``top`` is the largest score, ``least`` at least, and 0 where there is none."""
    s = capped(scale * _matmul(qg, k), softcap)
    if bias is not None:
        s = s + bias
    s = torch.where(allowed, s, -torch.inf)
    top = s.amax(-1, keepdim=True)
    if least is not None:
        top = torch.maximum(top, least)
    top = torch.where(top == -torch.inf, 0.0, top)
    p = (s - top).exp()
    # 0 * NaN is NaN: values that no head of the group may see are taken out, not only weighted with zero.
    v = torch.where(allowed.any(2)[..., None], v, 0.0)
    return p @ v, p.sum(-1, keepdim=True), top
