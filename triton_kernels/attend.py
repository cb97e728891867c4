"""FAC: which tokens are kept, and exact softmax attention over them.

The bins that TIP counted tell from which level of key there are ``n_fac`` tokens; each program keeps the tokens of its part of
the context that reach it and attends to them. They are the true top ``n_fac`` and, sharing the threshold's bin, at most
12 % more (bins follow the data, so it is a fiftieth on average). Where the bins do not tell (a first step, a jump, many
equal keys), each program searches the row's keys for the threshold itself: slower, and at most a thirty-second more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bounds import allowed_by
from .launch import admit_successor, wait_for_predecessor
from .score import BELOW, BINS, HINT, LAST, LINES, VALID, WINDOW, counter_of, deal, dealt_token, owner, row_bounds

# Searches read keys in tiles of so many columns, a multiple of what four warps read at once: a sum over a tile's rows is each thread's own.
_LANES: tl.constexpr = tl.constexpr(512)


@triton.jit
def _ordered(x):
    """The bits of a float as an integer that compares as the float does; its own inverse on bits."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _unordered(i):
    return tl.where(i < 0, i ^ 0x7FFFFFFF, i).to(tl.float32, bitcast=True)


@triton.jit
def _half_way(a, b):
    """Between two integers, rounded down, without overflow."""
    return (a & b) + ((a ^ b) >> 1)


@triton.jit
def _keys_at(keys, t, first, stop):
    """Keys of tokens, -inf outside [first, stop): masked by fours, so that they are read four at a time. Behind the keys of
    the last row there is room to read on."""
    x = tl.load(keys + t, mask=t // 4 * 4 < stop, other=-float("inf"))
    return tl.where((t >= first) & (t < stop), x, -float("inf"))


@triton.jit
def _codes_at(codes, t, first, stop, V: tl.constexpr):
    """Codes of tokens, 0 outside [first, stop), read V at a time."""
    code = tl.load(codes + t, mask=t // V * V < stop, other=0)
    return tl.where((t >= first) & (t < stop), code.to(tl.int32), 0)


@triton.jit
def _key_tile(keys, t0, first, stop, BLOCK: tl.constexpr):
    """Keys of BLOCK tokens from ``t0`` on, -inf outside [first, stop), ``[BLOCK / _LANES, _LANES]``."""
    t = t0 + (tl.arange(0, BLOCK // _LANES) * _LANES)[:, None] + tl.arange(0, _LANES)[None, :]
    return _keys_at(keys, t, first, stop)


@triton.jit
def _count_between(keys, lo, hi, first, stop, BLOCK: tl.constexpr):
    """How many tokens in [first, stop) have keys in [lo, hi]; never those with -inf."""
    n = tl.zeros((_LANES,), tl.int32)
    for t0 in range(first // 16 * 16, stop, BLOCK):  # aligned, so that keys are read four at a time
        x = _key_tile(keys, t0, first, stop, BLOCK)
        n += tl.sum(((x >= lo) & (x <= hi)).to(tl.int32), axis=0)
    return tl.sum(n, axis=0)


@triton.jit
def _between(lo, hi, part, other):
    """What lies ``part`` of the way from lo to hi; ``other``, which lies between them, where rounding leaves nothing there."""
    x = lo * (1.0 - part) + hi * part
    return tl.where((x > lo) & (x < hi), x, other)


@triton.jit
def _narrowed(lo, hi, n_lo, n_hi, level, n, want):
    """An interval that ``find_threshold`` searches, with what ``n`` keys from ``level`` on tell."""
    up = (n >= want) & (level >= lo)  # equal: zero may follow minus zero
    down = (n < want) & (level <= hi)
    return tl.where(up, level, lo), tl.where(down, level, hi), tl.where(up, n, n_lo), tl.where(down, n, n_hi)


@triton.jit
def find_threshold(keys, n_fac, first, stop, guess_lo, guess_hi, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """Searches a row for ``(hi_level, lo, below)``: the top ``n_fac`` are the keys >= hi_level and, of those in
    [lo, hi_level), the tokens before ``below``. At most n_fac / 32 more are taken where that saves steps, and none if EXACT; equal
    keys are told apart by their index, exactly. ``guess_lo`` and ``guess_hi`` are any two numbers: the nearer the level lies between them, the
    fewer times the keys are read."""
    INF: tl.constexpr = float("inf")
    # Of keys with +inf (forced), of valid ones, and of those from the guesses on.
    n_hi = tl.zeros((_LANES,), tl.int32)
    n_lo = tl.zeros((_LANES,), tl.int32)
    n_guess_lo = tl.zeros((_LANES,), tl.int32)
    n_guess_hi = tl.zeros((_LANES,), tl.int32)
    least = tl.full((_LANES,), INF, tl.float32)
    most = tl.full((_LANES,), -INF, tl.float32)
    for t0 in range(first // 16 * 16, stop, BLOCK):
        x = _key_tile(keys, t0, first, stop, BLOCK)
        valid = x > -INF
        n_hi += tl.sum((x == INF).to(tl.int32), axis=0)
        n_lo += tl.sum(valid.to(tl.int32), axis=0)
        n_guess_lo += tl.sum((valid & (x >= guess_lo)).to(tl.int32), axis=0)
        n_guess_hi += tl.sum((valid & (x >= guess_hi)).to(tl.int32), axis=0)
        least = tl.minimum(least, tl.min(tl.where(valid, x, INF), axis=0))
        most = tl.maximum(most, tl.max(tl.where(x < INF, x, -INF), axis=0))
    n_hi = tl.sum(n_hi, axis=0)
    n_lo = tl.sum(n_lo, axis=0)
    n_guess_lo = tl.sum(n_guess_lo, axis=0)
    n_guess_hi = tl.sum(n_guess_hi, axis=0)
    least = tl.min(least, axis=0)
    most = tl.max(most, axis=0)
    want = tl.minimum(n_fac, n_lo)
    enough = want
    if not EXACT:
        enough += want // 32

    # Invariant: count(keys >= lo) = n_lo > enough, count(keys >= hi) = n_hi < want, until a level is hit or ties remain.
    hi = tl.full((), INF, tl.float32)
    lo = tl.where(n_hi == want, hi, least)
    n_lo = tl.where(n_hi == want, n_hi, n_lo)
    lo, hi, n_lo, n_hi = _narrowed(lo, hi, n_lo, n_hi, guess_lo, n_guess_lo, want)
    lo, hi, n_lo, n_hi = _narrowed(lo, hi, n_lo, n_hi, guess_hi, n_guess_hi, want)
    # While hi is infinite, ``most`` is the last level; all from there on are equal.
    searching = (n_lo > enough) & ((hi < INF) | (most > lo))
    turn = tl.full((), 0, tl.int32)
    while searching:
        # Three levels at a time. By turns: where the counts let expect it (their logarithms fall about linearly in the tail), by
        # quarters, and by quarters of the bits, which bounds the number of turns.
        lo_bits = _ordered(lo)
        hi_bits = _ordered(hi)
        half_bits = _half_way(lo_bits, hi_bits)
        half = _unordered(half_bits)
        low_bits = _half_way(lo_bits, half_bits)
        high_bits = _half_way(half_bits, hi_bits)
        log_lo = tl.log2(n_lo.to(tl.float32))
        log_hi = tl.log2(tl.maximum(n_hi, 1).to(tl.float32))
        goal = tl.log2((want + enough).to(tl.float32) * 0.5)
        ends = (log_lo - goal) / tl.maximum(log_lo - log_hi, 1e-6)
        ends = tl.minimum(tl.maximum(ends, 0.0), 1.0)
        by_counts = turn % 3 == 0
        top = tl.where(hi < INF, hi, most)
        level_1 = _between(lo, top, tl.where(by_counts, ends * 0.875, 0.25), half)
        level_2 = _between(lo, top, tl.where(by_counts, ends, 0.5), half)
        level_3 = _between(lo, top, tl.where(by_counts, ends * 0.875 + 0.125, 0.75), half)
        if turn % 3 == 2:
            level_1 = tl.where(low_bits > lo_bits, _unordered(low_bits), half)
            level_2 = half
            level_3 = tl.where(high_bits < hi_bits, _unordered(high_bits), half)
        level_3 = tl.where(hi < INF, level_3, most)
        n_1 = tl.zeros((_LANES,), tl.int32)
        n_2 = tl.zeros((_LANES,), tl.int32)
        n_3 = tl.zeros((_LANES,), tl.int32)
        for t0 in range(first // 16 * 16, stop, BLOCK):
            x = _key_tile(keys, t0, first, stop, BLOCK)
            n_1 += tl.sum((x >= level_1).to(tl.int32), axis=0)
            n_2 += tl.sum((x >= level_2).to(tl.int32), axis=0)
            n_3 += tl.sum((x >= level_3).to(tl.int32), axis=0)
        lo, hi, n_lo, n_hi = _narrowed(lo, hi, n_lo, n_hi, level_1, tl.sum(n_1, axis=0), want)
        lo, hi, n_lo, n_hi = _narrowed(lo, hi, n_lo, n_hi, level_2, tl.sum(n_2, axis=0), want)
        lo, hi, n_lo, n_hi = _narrowed(lo, hi, n_lo, n_hi, level_3, tl.sum(n_3, axis=0), want)
        turn += 1
        lo_bits = _ordered(lo)
        hi_bits = _ordered(hi)
        searching = (n_lo > enough) & (hi < INF) & (_half_way(lo_bits, hi_bits) > lo_bits)
    ties = n_lo > enough
    hi_level = tl.where(ties, hi, lo)
    below = tl.full((), 0, tl.int32)
    if ties:
        need = want - n_hi
        below_lo = first + 0  # count(ties before below_lo) < need <= count(ties before below)
        below = stop + 0
        while below - below_lo > 1:
            half = (below + below_lo) // 2
            if (
                _count_between(keys, lo, INF, first, half, BLOCK) - _count_between(keys, hi, INF, first, half, BLOCK)
                >= need
            ):
                below = half
            else:
                below_lo = half
    return hi_level, lo, below


@triton.jit
def softmax_start(scale, GP: tl.constexpr, DVP: tl.constexpr, SOFTCAP: tl.constexpr):
    """Of an online softmax nothing yet, and what ``attend_tile`` multiplies dots with: a softcap is applied in natural units."""
    factor = scale * 1.4426950408889634
    if SOFTCAP:
        factor = scale
    return (
        tl.full((GP,), -float("inf"), tl.float32),
        tl.zeros((GP,), tl.float32),
        tl.zeros((GP, DVP), tl.float32),
        factor,
    )


@triton.jit
def load_rows(
    k_rows, v_rows, seen, stride_kd, stride_vd,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """K as ``[N, D1]`` and, where D2 > 0, ``[N, D2]`` (else the first again), and V ``[N, DVP]``, from pointers ``[N]``, where ``seen [N]``; zeros
    elsewhere."""
    d1 = tl.arange(0, D1)
    dv = tl.arange(0, DVP)
    k1 = tl.load(k_rows[:, None] + (d1 * stride_kd)[None, :], mask=seen[:, None] & (d1 < D)[None, :], other=0.0)
    v = tl.load(v_rows[:, None] + (dv * stride_vd)[None, :], mask=seen[:, None] & (dv < DV)[None, :], other=0.0)
    k2 = k1
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        k2 = tl.load(k_rows[:, None] + (d2 * stride_kd)[None, :], mask=seen[:, None] & (d2 < D)[None, :], other=0.0)
    return k1, k2, v


@triton.jit
def attend_rows(
    q1, q2, m_i, l_i, acc, k1, k2, v, valid, bias, factor, softcap, D2: tl.constexpr, SOFTCAP: tl.constexpr
):  # fmt: skip
    """One tile of an online softmax in base-2 logs, over rows from ``load_rows``; ``valid`` and ``bias [GP, N]``."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if q1.dtype != k1.dtype:
        k1 = k1.to(tl.float32)
    s = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    if D2 > 0:
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
def attend_tile(
    q1, q2, m_i, l_i, acc, k_rows, v_rows, seen, valid, bias, factor, softcap, stride_kd, stride_vd,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """``attend_rows`` over rows at ``k_rows, v_rows [N]``, read where ``seen [N]``."""
    k1, k2, v = load_rows(k_rows, v_rows, seen, stride_kd, stride_vd, D, D1, D2, DV, DVP)
    return attend_rows(q1, q2, m_i, l_i, acc, k1, k2, v, valid, bias, factor, softcap, D2, SOFTCAP)


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
def _threshold_bins(bins, row, n_fac, HKV: tl.constexpr, TOKENS: tl.constexpr):
    """Of a sequence's TOKENS rows, ``row`` the last, the lowest and the highest bin that with all above it holds n_fac tokens; -1: none."""
    TOKENS_P: tl.constexpr = triton.next_power_of_2(TOKENS)
    back = tl.arange(0, TOKENS_P)
    number = tl.arange(0, BINS)
    at = (row - back * HKV)[:, None] * (32 * LINES) + counter_of(number)[None, :]
    reach = tl.cumsum(tl.load(bins + at, mask=back[:, None] < TOKENS, other=0), axis=1, reverse=True)
    found = tl.max(tl.where(reach >= n_fac, number[None, :], -1), axis=1)
    lowest = tl.min(tl.where(back < TOKENS, found, BINS), axis=0)
    return lowest, tl.max(tl.where(back < TOKENS, found, -1), axis=0)


@triton.jit
def width_factor(cell, moved, n_fac):
    """How the bins' width changes after a step whose threshold lay in a bin of ``cell`` tokens, ``moved`` bins from the last one's. Bins widen
    when it has moved by many of them and narrow slowly when by few, so that the window spans several times what the threshold
    moves in a step. They widen by less than what would make a bin too full (``cell`` over 12 % of n_fac) on denser keys: queries that take turns
    would else search at every turn. (``benchmarks/threshold.py`` repeats this.)"""
    factor = tl.where(moved < 4, 0.9, 1.0)
    factor = tl.where(cell * 80 < n_fac, tl.where(cell * 160 < n_fac, 2.0, 1.0), factor)
    factor = tl.where((moved > 8) & (cell * 24 <= n_fac), 1.5, factor)
    return tl.where(cell * 12 > n_fac, tl.where(cell * 4 > n_fac, 0.25, 0.7), factor)


@triton.jit
def learned_slope(slope, growth, error):
    """By how much the threshold's level rises with the query's size, after a step in which the size grew by ``growth`` and the level was
    ``error`` above what the slope had let expect: least mean squares, a quarter of the way at a time, less where the size hardly changed.
    (``benchmarks/threshold.py`` repeats this.)"""
    return slope + 0.25 * growth * error / (growth * growth + 0.01)


@triton.jit
def select_tokens(
    hint, keys, codes, bins, window, kept, kept_count, row, split, first, stop, base, share, n_fac,
    HKV: tl.constexpr, MASK_KIND: tl.constexpr, HAS_HINT: tl.constexpr, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Writes which tokens of a program's part of the context are kept, in order, to its ``kept`` and how many to its ``kept_count``;
    returns that. The first program of a row also writes the next window's place to ``hint``; of a sequence's query
    tokens the last one's, for all of them."""
    # The first codes are on their way while the bins are read. A thread has V neighbours of each tile, and counts what it keeps
    # of the tile without the others.
    LANES: tl.constexpr = 128 if BLOCK_K >= 512 else BLOCK_K // 4
    V: tl.constexpr = 16 if BLOCK_K >= LANES * 16 else BLOCK_K // LANES
    i = (tl.arange(0, BLOCK_K // LANES // V) * (LANES * V))[:, None, None] + (
        (tl.arange(0, LANES) * V)[:, None] + tl.arange(0, V)[None, :]
    )[None]
    token = dealt_token(i, split, base, SPLITS, 32)
    code = _codes_at(codes, token, first, tl.where(i < share, stop, 0), V)

    # The lowest bin that, with all above it, holds n_fac tokens; accepted if that is at most ``reference.most_kept``.
    window += row * WINDOW
    origin = tl.load(window)
    per_width = tl.load(window + 1)
    number = tl.arange(0, BINS)
    in_bin = tl.load(bins + row * (32 * LINES) + counter_of(number))
    reach = tl.cumsum(in_bin, axis=0, reverse=True)  # in this bin or above
    valid_count = stop - first
    if MASK_KIND != 0:
        valid_count = tl.load(bins + row * (32 * LINES) + VALID)
    # Its number, what it reaches and what it holds, in one reduction: L < 2^27.
    found = (number.to(tl.int64) << 54) | (reach.to(tl.int64) << 27) | in_bin
    found = tl.max(tl.where(reach >= n_fac, found, -1), axis=0)
    bin = (found >> 54).to(tl.int32)
    n_bin = ((found >> 27) & 0x7FFFFFF).to(tl.int32)
    cell = (found & 0x7FFFFFF).to(tl.int32)
    everything = valid_count <= n_fac
    by_bin = everything | ((bin >= 0) & (n_bin <= n_fac + n_fac * 3 // 25))
    edge = tl.where(everything, 1, bin + 2)
    hi_level = tl.full((), 0.0, tl.float32)
    lo = tl.full((), 0.0, tl.float32)
    below = tl.full((), 0, tl.int32)
    if by_bin == 0:
        # In the bin found there are too many, or all bins hold too few.
        guess_lo = origin + tl.where(bin < 0, -BELOW, bin).to(tl.float32) / per_width
        guess_hi = tl.where(bin < 0, origin, guess_lo + 1.0 / per_width)
        hi_level, lo, below = find_threshold(keys, n_fac, first, stop, guess_lo, guess_hi, 4096, False)

    writes_hint = split == 0
    if TOKENS > 1:
        writes_hint &= row // HKV % TOKENS == TOKENS - 1
    if HAS_HINT and writes_hint:
        # The next window: this threshold where its bins begin to be dense.
        width = 1.0 / per_width
        inside_window = (bin >= 0) & (bin < LAST)
        lowest = bin
        moved = tl.abs(bin - BELOW)
        if TOKENS > 1:
            # The window holds the thresholds of all tokens of the step, from the lowest on, and as far again as it has below.
            lowest, highest = _threshold_bins(bins, row, n_fac, HKV, TOKENS)
            all_inside = inside_window & (lowest >= 0) & (highest < LAST)
            moved = tl.where(all_inside, tl.maximum(tl.abs(lowest - BELOW), highest - (LAST - BELOW)), BELOW)
            lowest = tl.where(all_inside, lowest, bin)
        level = tl.where(inside_window, origin + (lowest.to(tl.float32) + 0.5) * width, lo)
        level = tl.where(
            (level > -1e30) & (level < 1e30) & (inside_window | (by_bin == 0)), level, origin + BELOW * width
        )
        slope = tl.load(window + 4)
        error = (bin - BELOW).to(tl.float32) + 0.5
        # A search tells that something else has changed, or that the slope is wrong: it is believed half as much.
        taught = learned_slope(slope, tl.load(window + 3), error * width)
        slope = tl.where(by_bin, tl.where(inside_window, taught, slope), 0.5 * slope)
        width *= tl.where(inside_window, width_factor(cell, moved, n_fac), 1.0)
        width = tl.where((inside_window == 0) & (by_bin == 0), tl.maximum(2.0 * width, 0.0625), width)
        hint += owner(row, HKV, TOKENS) * HINT
        tl.store(hint, level)
        tl.store(hint + 1, tl.minimum(tl.maximum(width, 0.000244140625), 16.0))
        tl.store(hint + 2, slope)
        tl.store(hint + 3, tl.load(window + 2))

    # This program's part of the context: which of its tokens are kept, in order.
    mine = tl.full((), 0, tl.int32)
    for _ in range(0, share, BLOCK_K):
        if by_bin:
            keep = code >= edge
        else:
            x = _keys_at(keys, token, first, tl.where(i < share, stop, 0))
            keep = (x >= hi_level) | ((x >= lo) & (x < hi_level) & (token < below))
        # Counted by each thread, then over threads: the order is theirs, the same in every run.
        flag = keep.to(tl.int32)
        of_run = tl.sum(flag, axis=2)
        of_lane = tl.sum(of_run, axis=0)
        before = mine + tl.cumsum(of_lane, axis=0) - of_lane
        at = (before[None, :] + tl.cumsum(of_run, axis=0) - of_run)[:, :, None] + tl.cumsum(flag, axis=2) - flag
        tl.store(kept + at, token, mask=keep)
        mine += tl.sum(of_lane, axis=0)
        i += BLOCK_K
        token = dealt_token(i, split, base, SPLITS, 32)
        code = _codes_at(codes, token, first, tl.where(i < share, stop, 0), V)
    tl.store(kept_count, mine)
    tl.debug_barrier()
    return mine


@triton.jit
def fac_kernel(
    q, k, v, mask, bounds, hint, keys, codes, bins, window, kept, kept_count, out, part, sinks,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_mb, stride_mh, stride_mt, stride_bounds,
    L, n_fac, scale, softcap, room,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, WIDE: tl.constexpr,
    MASK_KIND: tl.constexpr, PER_HEAD: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_HINT: tl.constexpr,
    HAS_SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, GIVEN: tl.constexpr,
    TOKENS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, rows), TOKENS rows to a sequence and KV head (``tokens``). ``kept [rows, SPLITS, room]`` int32 receives the
    selected tokens of each program's part of the context and ``kept_count [rows, SPLITS]`` their number. GIVEN: they hold a
    selection already."""
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    b, h = row // HKV, row % HKV
    own = b // TOKENS
    first, stop = row_bounds(bounds, b, stride_bounds, L, HAS_BOUNDS)
    base, share = deal(first, stop, SPLITS, 32)  # short runs: a stretch of good tokens is shared among programs
    q1, q2 = load_query(q, b, h, stride_qb, stride_qh, stride_qd, G, GP, D, D1, D2, WIDE)
    # What was read so far, TIP does not write, and TIP has let this kernel start after all that came before it had ended.
    wait_for_predecessor(EARLY)
    keys += row * L
    codes += row * L
    kept += (row * SPLITS + split) * room
    kept_count += row * SPLITS + split
    if GIVEN:
        mine = tl.load(kept_count)
    else:
        mine = select_tokens(
            hint, keys, codes, bins, window, kept, kept_count, row, split, first, stop, base, share, n_fac,
            HKV, MASK_KIND, HAS_HINT, SPLITS, BLOCK_K, TOKENS,
        )  # fmt: skip
    m_i, l_i, acc, factor = softmax_start(scale, GP, DVP, SOFTCAP)
    lane = tl.arange(0, BLOCK_N)
    for n0 in range(0, mine, BLOCK_N):
        inside = n0 + lane < mine
        chosen = tl.load(kept + n0 + lane, mask=inside, other=0).to(tl.int64)
        valid, bias = head_mask(
            mask, b, h, chosen, inside, stride_mb, stride_mh, stride_mt, G, GP,
            MASK_KIND if PER_HEAD or MASK_KIND == 2 else 0, PER_HEAD,
        )  # fmt: skip
        m_i, l_i, acc = attend_tile(
            q1, q2, m_i, l_i, acc,
            k + own * stride_kb + h * stride_kh + chosen * stride_kt, v + own * stride_vb + h * stride_vh + chosen * stride_vt,
            inside, valid, bias, factor, softcap, stride_kd, stride_vd, D, D1, D2, DV, DVP, SOFTCAP,
        )  # fmt: skip
    admit_successor(EARLY)
    store_part(out, part, sinks, row, split, SPLITS, h, m_i, l_i, acc, HKV, G, GP, DV, DVP, HAS_SINKS, SPLITS == 1)


@triton.jit
def merge_kernel(
    part, sinks, out, splits, HQ: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    SPLITS_P: tl.constexpr, HAS_SINKS: tl.constexpr, LEVEL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (B * HQ,): joins the shares of one query head, ``part [B * HKV, splits, G, 2 + DV]``, and the learned sink. LEVEL: ``out
    [B * HQ, DV + 1]`` also receives the log-sum-exp of the scores, in natural units, -inf where there are none."""
    wait_for_predecessor(EARLY)
    admit_successor(EARLY)
    head = tl.program_id(0).to(tl.int64)
    row, g = head // G, head % G
    i = tl.arange(0, SPLITS_P)
    dv = tl.arange(0, DVP)
    use = i < splits
    at = part + ((row * splits + i) * G + g) * (DV + 2)
    m = tl.load(at, mask=use, other=-float("inf"))
    of_part = tl.load(at + 1, mask=use, other=0.0)
    acc = tl.load(at[:, None] + 2 + dv[None, :], mask=use[:, None] & (dv < DV)[None, :], other=0.0)
    top = tl.max(m, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + head % HQ).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    top = tl.where(top == -float("inf"), 0.0, top)
    weight = tl.exp2(m - top)
    total = tl.sum(weight * of_part, axis=0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    o = tl.sum(acc * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    if LEVEL:
        out += head
        tl.store(
            out + head * DV + DV, tl.where(total == 0.0, -float("inf"), (top + tl.log2(total)) / 1.4426950408889634)
        )
    tl.store(out + head * DV + dv, o.to(out.dtype.element_ty), mask=dv < DV)
