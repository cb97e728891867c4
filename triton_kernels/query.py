"""The query's side of TIP, once per row: dominant dims gathered, scaled and rounded as the FC format asks.

The same small kernel refreshes the packed rows that this step wrote to the key cache, so that TIP reads them afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import admit_successor, wait_for_predecessor
from .pack import encode_e4m3, pack_slots, round_half_even, rounded_to


@triton.jit
def _scaled(q_rows, at, spread, use, stride_qd):
    """``y = (q * spread)[at]`` without NaN and inf. ``q_rows [G, 1]`` pointers, ``at, spread [1, W]``, ``use [G, W]``."""
    y = tl.load(q_rows + at.to(tl.int64) * stride_qd, mask=use, other=0.0).to(tl.float32)
    y = y * spread
    y = tl.where(y == y, y, 0.0)
    return tl.minimum(tl.maximum(y, -3.3895313892515355e38), 3.3895313892515355e38)


@triton.jit
def _code(y, step):
    q = round_half_even(tl.math.div_rn(y, tl.broadcast_to(step[:, None], y.shape)))
    return tl.minimum(tl.maximum(q, -127.0), 127.0)


@triton.jit
def _largest_and_sum(x, y, other_x, other_y):
    return tl.maximum(x, other_x), y + other_y


@triton.jit
def query_kernel(
    q, k, dims, centre, spread, slots, data, meta, query, factors, sums, squares, bins, norm, slopes, levels,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd, stride_slots,
    L, n_slots, scale,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, COLUMNS: tl.constexpr, META: tl.constexpr,
    W: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, FMT: tl.constexpr, LIMIT: tl.constexpr,
    HAS_SLOTS: tl.constexpr, BLOCK_W: tl.constexpr, HALVES: tl.constexpr, COUNTERS: tl.constexpr,
    HAS_NORM: tl.constexpr, AFFINE: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (rows, 1), or (rows, 2) with slots: the second half refreshes them, each row its share of the TOKENS rows that read
    one sequence (``tokens``). Writes ``query [rows, 2, GP, BLOCK_W]`` (zero padded; the second half is int4's high nibbles),
    ``factors [rows, GP]``, what turns a dot into a score, ``sums [rows, GP]``, the codes' sums (integer formats), and
    ``squares [rows, GP]``, the squared length of each head's query. HALVES: e4m3 numbers are written as fp16, divided by 512. Clears
    ``bins [rows, COUNTERS]`` for the counts that follow. AFFINE: ``levels [rows, G]`` are what is taken from each head's scores,
    ``norm [HKV * G]`` and the query's dot with ``slopes [HKV * G, W]``."""
    row = tl.program_id(0).to(tl.int64)
    b, h = row // HKV, row % HKV
    own = b // TOKENS
    # What no step writes is read before the wait.
    w = tl.arange(0, BLOCK_W)
    INT4: tl.constexpr = FMT == "int4"
    END: tl.constexpr = HALF if INT4 else W
    at_lo = tl.load(dims + h * W + w, mask=w < END, other=0)[None, :]
    spread_lo = tl.load(spread + h * W + w, mask=w < END, other=0.0)[None, :]
    if INT4:
        at_hi = tl.load(dims + h * W + HALF + w, mask=HALF + w < W, other=0)[None, :]
        spread_hi = tl.load(spread + h * W + HALF + w, mask=HALF + w < W, other=0.0)[None, :]
    wait_for_predecessor(EARLY)
    admit_successor(EARLY)
    if HAS_SLOTS and tl.program_id(1) == 1:
        pack_slots(
            k + own * stride_kb + h * stride_kh, slots + own * stride_slots, data, meta, dims + h * W, centre + h * W,
            spread + h * W, own * HKV + h, L, b % TOKENS, n_slots, TOKENS, stride_kt, stride_kd, COLUMNS, META,
            W, HALF, HALF_P, FMT, LIMIT,
        )  # fmt: skip
        return
    tl.store(bins + row * COUNTERS + tl.arange(0, COUNTERS), tl.zeros((COUNTERS,), tl.int32))
    g = tl.arange(0, GP)
    q_rows = q + b * stride_qb + (h * G + g[:, None]) * stride_qh
    lo = _scaled(q_rows, at_lo, spread_lo, (g < G)[:, None] & (w < END)[None, :], stride_qd)
    largest = tl.abs(lo)
    square = lo * lo
    if INT4:
        hi = _scaled(q_rows, at_hi, spread_hi, (g < G)[:, None] & (HALF + w < W)[None, :], stride_qd)
        largest = tl.maximum(largest, tl.abs(hi))
        square += hi * hi
    largest, square = tl.reduce((largest, square), 1, _largest_and_sum)
    tl.store(squares + row * GP + g, square)
    if AFFINE:
        s_at = slopes + (h * G + g[:, None]) * W + w[None, :]
        level = tl.sum(lo * tl.load(s_at, mask=(g < G)[:, None] & (w < END)[None, :], other=0.0), axis=1)
        if INT4:
            upper = tl.load(s_at + HALF, mask=(g < G)[:, None] & (HALF + w < W)[None, :], other=0.0)
            level += tl.sum(hi * upper, axis=1)
        level = level * scale
        if HAS_NORM:
            level += tl.load(norm + h * G + g, mask=g < G, other=0.0)
        tl.store(levels + row * G + g, level, mask=g < G)
    largest = tl.where(largest == 0.0, 1.0, largest)
    at = query + (row * 2 * GP + g[:, None]) * BLOCK_W + w[None, :]
    factor = tl.full((GP,), scale, tl.float32)
    if FMT == "int4" or FMT == "int8":
        step = tl.math.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
        factor = factor * step
        code = _code(lo, step)
        total = tl.sum(code, axis=1)
        tl.store(at, code.to(tl.int8))
        if INT4:
            code = _code(hi, step)
            total += tl.sum(code, axis=1)
            tl.store(at + GP * BLOCK_W, code.to(tl.int8))
        tl.store(sums + row * GP + g, total.to(tl.int32))
    elif FMT == "fp32":
        tl.store(at, lo)
    else:
        step = tl.math.div_rn(largest, tl.full(largest.shape, 448.0 if FMT == "fp8" else 1.0, tl.float32))
        factor = factor * step
        y = tl.math.div_rn(lo, tl.broadcast_to(step[:, None], lo.shape))
        y = tl.minimum(tl.maximum(y, -LIMIT), LIMIT)
        if FMT == "fp8" and HALVES:
            code = encode_e4m3(y).to(tl.uint16)
            half = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.float16, bitcast=True)  # the number / 256
            factor = factor * 512.0
            # The first two dims of every word of four, for all heads, then the last two.
            pair = query + ((row * 2 + w % 4 // 2)[None, :] * GP + g[:, None]) * (BLOCK_W // 2)
            tl.store(pair + (w // 4 * 2 + w % 2)[None, :], half * 0.5)
        elif FMT == "fp8":
            tl.store(at, encode_e4m3(y))
        else:
            tl.store(at, rounded_to(y, query.dtype.element_ty))
    tl.store(factors + row * GP + g, factor)
