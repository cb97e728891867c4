"""FAC: which tokens are kept, exactly, and softmax attention over them.

Each program of a row finds the row's selection for itself, from the candidates that TIP listed or, where the cutoff let too
few or too many through, from all keys: same search, same tokens, only slower. It then attends to its part of them. Tokens are
numbered in the order in which TIP dealt them out, in both cases, so that results do not depend on the cutoff by one bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bounds import allowed_by
from .score import dealt_token, row_range


@triton.jit
def _ordered(x):
    """The bits of a float as an integer that compares as the float does; its own inverse on bits."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _unordered(i):
    return tl.where(i < 0, i ^ 0x7FFFFFFF, i).to(tl.float32, bitcast=True)


@triton.jit
def _dealt_keys(keys, p, first, stop, base, share, CHUNKS: tl.constexpr):
    """Keys and tokens at positions ``p`` of the dealing order, -inf where there is none."""
    token = dealt_token(p % share, p // share, base, CHUNKS)
    inside = (p // share < CHUNKS) & (token >= first) & (token < stop)
    return tl.load(keys + token, mask=inside, other=-float("inf")), token


@triton.jit
def _count_between(listed, fast, keys, lo, hi, first, stop, base, share, CHUNKS: tl.constexpr, LIST: tl.constexpr):
    """How many keys are in [lo, hi)."""
    n = tl.full((), 0, tl.int32)
    if fast:
        n = tl.sum(((listed >= lo) & (listed < hi)).to(tl.int32), axis=0)
    else:
        for p0 in range(0, CHUNKS * share, LIST):
            x, _ = _dealt_keys(keys, p0 + tl.arange(0, LIST), first, stop, base, share, CHUNKS)
            n += tl.sum(((x >= lo) & (x < hi)).to(tl.int32), axis=0)
    return n


@triton.jit
def _count_ties(
    listed, listed_token, fast, keys, lo, hi, below, first, stop, base, share, CHUNKS: tl.constexpr, LIST: tl.constexpr
):
    """How many tokens before ``below`` have keys in [lo, hi)."""
    n = tl.full((), 0, tl.int32)
    if fast:
        n = tl.sum(((listed >= lo) & (listed < hi) & (listed_token < below)).to(tl.int32), axis=0)
    else:
        for p0 in range(0, CHUNKS * share, LIST):
            x, token = _dealt_keys(keys, p0 + tl.arange(0, LIST), first, stop, base, share, CHUNKS)
            n += tl.sum(((x >= lo) & (x < hi) & (token < below)).to(tl.int32), axis=0)
    return n


@triton.jit
def attend_tile(
    q1, q2, m_i, l_i, acc, k_rows, v_rows, seen, valid, bias, factor, softcap, stride_kd, stride_vd,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One tile of an online softmax in base-2 logs: ``k_rows, v_rows [N]`` pointers, read where ``seen [N]``; ``valid`` and
    ``bias [GP, N]``."""
    LOG2E: tl.constexpr = 1.4426950408889634
    d1 = tl.arange(0, D1)
    dv = tl.arange(0, DVP)
    k1 = tl.load(k_rows[:, None] + (d1 * stride_kd)[None, :], mask=seen[:, None] & (d1 < D)[None, :], other=0.0)
    v = tl.load(v_rows[:, None] + (dv * stride_vd)[None, :], mask=seen[:, None] & (dv < DV)[None, :], other=0.0)
    if q1.dtype != k1.dtype:
        k1 = k1.to(tl.float32)
    s = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        k2 = tl.load(k_rows[:, None] + (d2 * stride_kd)[None, :], mask=seen[:, None] & (d2 < D)[None, :], other=0.0)
        if q2.dtype != k2.dtype:
            k2 = k2.to(tl.float32)
        s = tl.dot(q2, tl.trans(k2), acc=s, input_precision="ieee")
    s = s * factor
    if SOFTCAP:
        s = (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0))
    s = tl.where(valid, s + bias, -float("inf"))
    top = tl.maximum(m_i, tl.max(s, axis=1))
    safe = tl.where(top == -float("inf"), 0.0, top)
    p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(m_i - safe)
    l_i = l_i * shrink + tl.sum(p, axis=1)
    if v.dtype == tl.float32:
        acc = tl.dot(p, v, acc=acc * shrink[:, None], input_precision="ieee")
    else:
        acc = tl.dot(p.to(v.dtype), v, acc=acc * shrink[:, None])
    return top, l_i, acc


@triton.jit
def load_query(q, b, h, stride_qb, stride_qh, stride_qd, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
               D1: tl.constexpr, D2: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """The group's queries ``[GP, D1]`` and ``[GP, D2]``; ``WIDE``: in fp32, since keys have another dtype."""
    g = tl.arange(0, GP)
    rows = q + b * stride_qb + (h * G + g[:, None]) * stride_qh
    d1 = tl.arange(0, D1)
    q1 = tl.load(rows + (d1 * stride_qd)[None, :], mask=(g < G)[:, None] & (d1 < D)[None, :], other=0.0)
    q2 = q1
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q2 = tl.load(rows + (d2 * stride_qd)[None, :], mask=(g < G)[:, None] & (d2 < D)[None, :], other=0.0)
    if WIDE:
        q1 = q1.to(tl.float32)
        q2 = q2.to(tl.float32)
    return q1, q2


@triton.jit
def head_mask(
    mask, b, h, token, inside, stride_mb, stride_mh, stride_mt,
    G: tl.constexpr, GP: tl.constexpr, MASK_KIND: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """``valid`` and ``bias [GP, N]`` (base-2 logs) of tokens ``[N]`` for the heads of a group."""
    g = tl.arange(0, GP)
    valid = (g < G)[:, None] & inside[None, :]
    bias = tl.zeros(valid.shape, tl.float32)
    if MASK_KIND != 0:
        at = (mask + b * stride_mb + token.to(tl.int64) * stride_mt)[None, :]
        if PER_HEAD:
            at = at + ((h * G + g) * stride_mh)[:, None]
            m = tl.load(at, mask=valid, other=0)
        else:
            m = tl.load(at, mask=inside[None, :], other=0)
        ok = allowed_by(m, MASK_KIND == 1)
        valid = valid & ok
        if MASK_KIND == 2:
            bias = bias + tl.where(ok, m.to(tl.float32), 0.0) * 1.4426950408889634
    return valid, bias


@triton.jit
def store_part(
    out, part, sinks, row, split, splits, h, m_i, l_i, acc, HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, HAS_SINKS: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """A program's share of the softmax: the output itself when there is one share, else ``part [row, split, G, 2 + DV]``."""
    g = tl.arange(0, GP)
    dv = tl.arange(0, DVP)
    use = (g < G)[:, None] & (dv < DV)[None, :]
    if ONE:
        if HAS_SINKS:
            sink = tl.load(sinks + h * G + g, mask=g < G, other=-float("inf")).to(tl.float32) * 1.4426950408889634
            top = tl.maximum(m_i, sink)
            safe = tl.where(top == -float("inf"), 0.0, top)
            acc = acc * tl.exp2(m_i - safe)[:, None]
            l_i = l_i * tl.exp2(m_i - safe) + tl.exp2(sink - safe)
        acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        tl.store(out + (row * G + g[:, None]) * DV + dv[None, :], acc.to(out.dtype.element_ty), mask=use)
    else:
        at = part + ((row * splits + split) * G + g) * (DV + 2)
        tl.store(at, m_i, mask=g < G)
        tl.store(at + 1, l_i, mask=g < G)
        tl.store(at[:, None] + 2 + dv[None, :], acc, mask=use)


@triton.jit
def fac_kernel(
    q, k, v, mask, bounds, hint, keys, list_key, list_token, counts, kept, out, part, sinks,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_mb, stride_mh, stride_mt, stride_bounds,
    L, n_fac, scale, softcap, kept_row,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, WIDE: tl.constexpr,
    MASK_KIND: tl.constexpr, PER_HEAD: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_HINT: tl.constexpr,
    HAS_SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
    CHUNKS: tl.constexpr, CAP: tl.constexpr, SPLITS: tl.constexpr, SHARE: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, B * HKV). ``kept [B * HKV, kept_row]`` int32 receives the selected tokens, SHARE to a program."""
    LIST: tl.constexpr = CHUNKS * CAP
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    b, h = row // HKV, row % HKV
    first, stop, base, share = row_range(bounds, b, stride_bounds, L, CHUNKS, HAS_BOUNDS)
    q1, q2 = load_query(q, b, h, stride_qb, stride_qh, stride_qd, G, GP, D, D1, D2, WIDE)
    keys += row * L
    list_key += row * LIST
    list_token += row * LIST

    if PDL:  # what was loaded so far is none of TIP's work; what follows is
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    counts += row * (CHUNKS + 1)
    c = tl.load(counts + tl.arange(0, CHUNKS))
    complete = tl.load(counts + CHUNKS) != 0
    total = tl.sum(c, axis=0)
    fits = tl.max(c, axis=0) <= CAP
    fast = fits & ((total >= n_fac) | complete)
    slot = tl.arange(0, LIST)
    filled = tl.load(counts + slot // CAP)
    listed = tl.load(list_key + slot, mask=fast & (slot % CAP < filled), other=-float("inf"))

    # What there is: +inf keys are forced, finite ones compete, -inf is nothing.
    INF: tl.constexpr = float("inf")
    if fast:
        n_forced = tl.sum((listed == INF).to(tl.int32), axis=0)
        valid_count = tl.sum((listed > -INF).to(tl.int32), axis=0)
        least = tl.min(tl.where(listed > -INF, listed, INF), axis=0)
        most = tl.max(tl.where(listed < INF, listed, -INF), axis=0)
    else:
        n_forced = tl.full((), 0, tl.int32)
        valid_count = tl.full((), 0, tl.int32)
        least = tl.full((), INF, tl.float32)
        most = tl.full((), -INF, tl.float32)
        for p0 in range(0, CHUNKS * share, LIST):
            x, _ = _dealt_keys(keys, p0 + slot, first, stop, base, share, CHUNKS)
            n_forced += tl.sum((x == INF).to(tl.int32), axis=0)
            valid_count += tl.sum((x > -INF).to(tl.int32), axis=0)
            least = tl.minimum(least, tl.min(tl.where(x > -INF, x, INF), axis=0))
            most = tl.maximum(most, tl.max(tl.where(x < INF, x, -INF), axis=0))
    want = tl.minimum(n_fac, valid_count)

    # Search: count(key >= lo) >= want > count(key >= hi), until a level is hit exactly or only ties remain.
    hi = tl.full((), INF, tl.float32)
    n_hi = n_forced
    lo = tl.where(n_hi == want, hi, least)
    n_lo = tl.where(n_hi == want, n_hi, valid_count)
    middle = most
    searching = n_lo != want
    turn = tl.full((), 0, tl.int32)
    while searching:
        n = _count_between(listed, fast, keys, middle, INF, first, stop, base, share, CHUNKS, LIST) + n_forced
        if n >= want:
            lo = middle
            n_lo = n
        else:
            hi = middle
            n_hi = n
        searching = (n_lo != want) & (hi < INF)  # while hi is infinite, all that compete are equal
        if searching:
            # In turn: by the counts, by halves, and by halves of the bits (which bounds the number of steps).
            ends = tl.cast(n_lo - want, tl.float32) / tl.cast(n_lo - n_hi, tl.float32)
            ends = tl.where(turn % 3 == 0, ends, 0.5)
            middle = lo * (1.0 - ends) + hi * ends
            lo_bits = _ordered(lo)
            hi_bits = _ordered(hi)
            half_bits = (lo_bits & hi_bits) + ((lo_bits ^ hi_bits) >> 1)
            outside = (middle <= lo) | (middle >= hi) | (middle != middle)
            if (turn % 3 == 2) | outside:
                middle = _unordered(half_bits)
            turn += 1
            searching = half_bits > lo_bits
    # Kept: keys >= hi_level, and of those in [lo, hi_level) the tokens before `below`.
    ties = n_lo != want
    hi_level = tl.where(ties, hi, lo)
    below = tl.full((), 0, tl.int32)
    if ties:
        need = want - n_hi
        below_lo = first + 0  # count(ties before below_lo) < need <= count(ties before below)
        below = stop + 0
        while below - below_lo > 1:
            half = (below + below_lo) // 2
            tokens = tl.load(list_token + slot, mask=fast & (slot % CAP < filled), other=0)
            n = _count_ties(listed, tokens, fast, keys, lo, hi, half, first, stop, base, share, CHUNKS, LIST)
            if n >= need:
                below = half
            else:
                below_lo = half

    # Number the kept tokens and write down this program's share of them.
    begin = split * SHARE
    mine = tl.minimum(tl.maximum(want - begin, 0), SHARE)
    kept += row * kept_row
    if fast:
        keep = listed >= hi_level
        if ties:
            tokens = tl.load(list_token + slot, mask=fast & (slot % CAP < filled), other=0)
            keep = keep | ((listed >= lo) & (listed < hi_level) & (tokens < below))
        place = tl.cumsum(keep.to(tl.int32), axis=0) - 1
        use = keep & (place >= begin) & (place < begin + mine)
        tl.store(kept + place, tl.load(list_token + slot, mask=use, other=0), mask=use)
    else:
        passed = 0
        for p0 in range(0, CHUNKS * share, LIST):
            x, tokens = _dealt_keys(keys, p0 + slot, first, stop, base, share, CHUNKS)
            keep = (x >= hi_level) | ((x >= lo) & (x < hi_level) & (tokens < below))
            place = passed + tl.cumsum(keep.to(tl.int32), axis=0) - 1
            use = keep & (place >= begin) & (place < begin + mine)
            tl.store(kept + place, tokens, mask=use)
            passed += tl.sum(keep.to(tl.int32), axis=0)
    tl.debug_barrier()

    # The next cutoff: this step's threshold less a margin that keeps the list about a third full.
    if HAS_HINT and split == 0:
        margin = tl.load(hint + row * 2 + 1)
        sane = (margin >= 0.01) & (margin <= 64.0)
        margin = tl.where(sane, margin, 1.0)
        listed_count = tl.where(fits, total, LIST)
        tight = (listed_count * 2 < n_fac * 3) & (complete == 0)
        loose = (listed_count * 2 > LIST) | (fits == 0)
        margin = tl.where(tight, margin * 1.5, tl.where(loose & (complete == 0), margin * 0.75, margin))
        tl.store(hint + row * 2, tl.where(lo == INF, lo, lo - margin))
        tl.store(hint + row * 2 + 1, margin)

    m_i = tl.full((GP,), -float("inf"), tl.float32)
    l_i = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, DVP), tl.float32)
    LOG2E: tl.constexpr = 1.4426950408889634
    factor = scale * LOG2E
    if SOFTCAP:
        factor = scale
    lane = tl.arange(0, BLOCK_N)
    for n0 in range(0, mine, BLOCK_N):
        inside = n0 + lane < mine
        token = tl.load(kept + begin + n0 + lane, mask=inside, other=0).to(tl.int64)
        valid, bias = head_mask(
            mask, b, h, token, inside, stride_mb, stride_mh, stride_mt, G, GP, MASK_KIND if PER_HEAD or MASK_KIND == 2 else 0,
            PER_HEAD,
        )  # fmt: skip
        m_i, l_i, acc = attend_tile(
            q1, q2, m_i, l_i, acc,
            k + b * stride_kb + h * stride_kh + token * stride_kt, v + b * stride_vb + h * stride_vh + token * stride_vt,
            inside, valid, bias, factor, softcap, stride_kd, stride_vd, D, D1, D2, DV, DVP, SOFTCAP,
        )  # fmt: skip
    store_part(out, part, sinks, row, split, SPLITS, h, m_i, l_i, acc, HKV, G, GP, DV, DVP, HAS_SINKS, SPLITS == 1)


@triton.jit
def merge_kernel(
    part, sinks, out, splits, HQ: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    SPLITS_P: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * HQ,): joins the shares of one query head, ``part [B * HKV, splits, G, 2 + DV]``, and the learned sink."""
    head = tl.program_id(0).to(tl.int64)
    row, g = head // G, head % G
    i = tl.arange(0, SPLITS_P)
    dv = tl.arange(0, DVP)
    use = i < splits
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = part + ((row * splits + i) * G + g) * (DV + 2)
    m = tl.load(at, mask=use, other=-float("inf"))
    top = tl.max(m, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + head % HQ).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    top = tl.where(top == -float("inf"), 0.0, top)
    weight = tl.exp2(m - top)
    total = tl.sum(weight * tl.load(at + 1, mask=use, other=0.0), axis=0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    acc = tl.load(at[:, None] + 2 + dv[None, :], mask=use[:, None] & (dv < DV)[None, :], other=0.0)
    o = tl.sum(acc * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + head * DV + dv, o.to(out.dtype.element_ty), mask=dv < DV)
