"""TIP: one key per cached token and KV head, and how many tokens there are at each level of key.

A row is one KV head of one sequence. The tiles of tokens in a row's bounds are dealt out to its ``CHUNKS`` programs in turn.
Each program writes the keys of its tokens and counts them in bins around the level at which the step before found
its threshold, so that selection need not search. Keys are in base-2 log units; forced tokens have +inf, tokens no head may
attend -inf, all others are finite.
"""

# ruff: noqa: RUF005 (Triton concatenates tuples, it does not unpack into them; they grow, so mypy's fixed lengths don't fit)
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from .bounds import allowed_by
from .formats import HINT_COLUMNS
from .fragments import multiply_pieces, read_pieces, read_queries
from .launch import admit_successor, wait_for_predecessor

# Below the last threshold there is room for 32 bins, above it, where tokens are few and counting is cheap, for the rest. Bins
# hold a twelfth to an eightieth of n_fac and widen as the threshold moves; LAST is where a byte ends, two codes being taken.
BINS: tl.constexpr = tl.constexpr(256)
BELOW: tl.constexpr = tl.constexpr(32)
LAST: tl.constexpr = tl.constexpr(252)
# Counters of neighbouring bins lie in different lines of memory: most tokens are counted in a few bins, and an L2 adds to the
# counters of a line one after the other. A row has LINES lines of 32 counters.
LINES: tl.constexpr = tl.constexpr(16)
VALID: tl.constexpr = tl.constexpr(31)  # where the number of valid tokens is counted

HINT: tl.constexpr = tl.constexpr(HINT_COLUMNS)
# What a step makes of its hint: where the bins begin, bins to a unit, the query's size, by how much it grew, and the slope.
WINDOW: tl.constexpr = tl.constexpr(5)


@triton.jit
def row_bounds(bounds, b, stride_bounds, L, HAS_BOUNDS: tl.constexpr):
    """First valid token of a batch row and one past the last."""
    first = 0
    stop = L
    if HAS_BOUNDS:
        first = tl.load(bounds + b * stride_bounds)
        stop = tl.load(bounds + b * stride_bounds + 1)
    return first, stop


@triton.jit
def own_bounds(first, stop, SHARD: tl.constexpr):
    """Of bounds that may lie outside of the SHARD tokens that are here (0: all are) what lies inside."""
    if SHARD > 0:
        first = tl.minimum(tl.maximum(first, 0), SHARD)
        stop = tl.maximum(tl.minimum(stop, SHARD), first)
    return first, stop


@triton.jit
def owner(row, HKV: tl.constexpr, TOKENS: tl.constexpr):
    """Of the TOKENS rows that read one sequence and KV head, the number of that pair: where its packed cache and hint lie."""
    if TOKENS == 1:
        return row
    return row // HKV // TOKENS * HKV + row % HKV


@triton.jit
def deal(first, stop, PARTS: tl.constexpr, RUN: tl.constexpr):
    """``(base, share)``: where dealing out tokens in runs of RUN begins, and how many each of PARTS programs gets."""
    base = first // 16 * 16
    return base, tl.cdiv(tl.cdiv(stop - base, RUN), PARTS) * RUN


@triton.jit
def dealt_token(i, part, base, PARTS: tl.constexpr, RUN: tl.constexpr):
    """The token that is number i of a part's share."""
    return base + (i // RUN * PARTS + part) * RUN + i % RUN


@triton.jit
def row_hint(hint, row, HAS_HINT: tl.constexpr):
    """HINT's numbers, or usable ones in the place of what cannot be."""
    level = tl.full((), 0.0, tl.float32)
    width = tl.full((), 0.0625, tl.float32)
    slope = tl.full((), 0.0, tl.float32)
    size = tl.full((), 0.0, tl.float32)
    if HAS_HINT:
        hint += row * HINT
        guess = tl.load(hint)
        level = tl.where((guess > -1e30) & (guess < 1e30), guess, level)
        guess = tl.load(hint + 1)
        width = tl.where((guess >= 0.000244140625) & (guess <= 16.0), guess, width)
        guess = tl.load(hint + 2)
        slope = tl.where((guess > -1e3) & (guess < 1e3), guess, slope)
        guess = tl.load(hint + 3)
        size = tl.where((guess > -1e3) & (guess < 1e3), guess, size)
    return level, width, slope, size


@triton.jit
def row_window(hint, square):
    """WINDOW's numbers, of ``row_hint``'s and the squared length of the row's queries. The level is expected to follow the query's size, by a
    slope that steps have taught (``attend.learned_slope``), unless it grew too much to tell."""
    level, width, slope, last = hint
    size = 0.5 * tl.log2(tl.minimum(tl.maximum(square, 1e-36), 1e36))  # finite, whatever overflows
    growth = tl.where((size - last > -2.0) & (size - last < 2.0), size - last, 0.0)
    return level + slope * growth - BELOW * width, 1.0 / width, size, growth, slope


@triton.jit
def counter_of(bin):
    """Where a bin's counter lies in its row's."""
    return bin % LINES * 32 + bin // LINES


@triton.jit
def bin_of(key, origin, per_width):
    """The bin of a key, as a float, negative below the first."""
    return tl.minimum((key - origin) * per_width, LAST)


@triton.jit
def _clean(s, NATIVE: tl.constexpr):
    """NaN ranks lowest, and infinities are the largest finite numbers: +-inf have meanings of their own in keys."""
    if not NATIVE:  # on a GPU the maximum of NaN and a number is the number
        s = tl.where(s == s, s, -3.4028234663852886e38)
    return tl.minimum(tl.maximum(s, -3.4028234663852886e38), 3.4028234663852886e38)


@triton.jit
def _soft(s, softcap):
    """softcap * tanh(s / softcap), in base-2 units from natural ones."""
    return (softcap * 1.4426950408889634) * (1.0 - 2.0 / (tl.exp2(s * (2.0 * 1.4426950408889634 / softcap)) + 1.0))


@triton.jit
def _log_sum(top, total, NATIVE: tl.constexpr):
    total = tl.maximum(total, 1.1754943508222875e-38)
    if NATIVE:  # one instruction instead of two dozen, exact to 2^-22
        return top + tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1
        )
    return top + tl.log2(total)


@triton.jit
def e4m3_as_half(code):
    """e4m3 bytes as fp16 numbers 2^8 too small: exact, and two operations where the GPU has no conversion."""
    wide = code.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _nibbles(x):
    """Low and high nibbles of bytes, four at a time."""
    low = tl.inline_asm_elementwise("and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [x], dtype=tl.int8, is_pure=True, pack=4)
    high = tl.inline_asm_elementwise(
        "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }",
        "=r,r",
        [x],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )
    return low, high


@triton.jit
def _token_mask(mask, b, head, token, inside, stride_mb, stride_mh, stride_mt, MASK_KIND: tl.constexpr):
    """``(allowed, bias)`` of tokens ``[T]`` for one head; bias in base-2 logs."""
    m = tl.load(mask + b * stride_mb + head * stride_mh + token.to(tl.int64) * stride_mt, mask=inside, other=0)
    ok = inside & allowed_by(m, MASK_KIND == 1)
    bias = tl.zeros(ok.shape, tl.float32)
    if MASK_KIND == 2:
        bias = tl.where(ok, m.to(tl.float32), 0.0) * 1.4426950408889634
    return ok, bias


@triton.jit
def tip_kernel(
    query, factors, sums, squares, source, meta, norm, mask, bounds, hint, keys, bins, window, stats, codes,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_mb, stride_mh, stride_mt, stride_bounds,
    L, scale, softcap, n_sink, n_recent,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    FMT: tl.constexpr, COLUMNS: tl.constexpr, META: tl.constexpr,
    MASK_KIND: tl.constexpr, PER_HEAD: tl.constexpr, HAS_BOUNDS: tl.constexpr,
    HAS_HINT: tl.constexpr, HAS_NORM: tl.constexpr, SOFTCAP: tl.constexpr, MAX: tl.constexpr,
    PASS: tl.constexpr,  # "keys", "stats" (log-sum-exp partials of each head), "keys-by-stats"
    ENGINE: tl.constexpr,  # "fragments" (``fragments``), "dot" (Triton's); "all" scores with K itself
    FP8: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, PACK: tl.constexpr, CHUNKS: tl.constexpr,
    NATIVE: tl.constexpr, COUNT: tl.constexpr, LEVELS: tl.constexpr, TOKENS: tl.constexpr, SHARD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (CHUNKS, rows), TOKENS rows to a sequence and KV head (``tokens``). ``source`` is the packed data and
    ``query, factors, sums, squares`` are ``query_kernel``'s; when ENGINE is
    "all", they are k and q themselves and nothing. Writes ``keys [rows, L]`` and ``window [rows, WINDOW]``, and, if COUNT, adds to
    ``bins [rows, 32 * LINES]``: counts of the keys in the window or above it (``counter_of``) and the number of valid tokens (only
    with a mask: else the bounds tell). LEVELS: ``norm`` has a row of its own for every row, ``[rows, G]``. SHARD: of the row's
    tokens only the first SHARD of L are here, or all (0); ``bounds`` are those of all tokens, seen from the first one here."""
    if ENGINE == "all":
        wait_for_predecessor(EARLY)
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    b, h = row // HKV, row % HKV
    own = b // TOKENS
    own_row = owner(row, HKV, TOKENS)
    first, stop = row_bounds(bounds, b, stride_bounds, L, HAS_BOUNDS)
    sinks_end = first + n_sink
    recent = stop - n_recent
    first, stop = own_bounds(first, stop, SHARD)
    base, share = deal(first, stop, CHUNKS, BLOCK_T)
    guess = row_hint(hint, own_row, HAS_HINT)
    LOG2E: tl.constexpr = 1.4426950408889634
    LOWEST: tl.constexpr = -3.4028234663852886e38
    UNIT: tl.constexpr = 1.0 if SOFTCAP else LOG2E  # a softcap is applied in natural units
    if LEVELS:
        norm += (row - h) * G
    g = tl.arange(0, GP)
    head = h * G + g
    is_head = g < G
    keys += row * L
    codes += row * L
    bins += row * (32 * LINES)
    if META > 0:
        meta += own_row * L * META
    if ENGINE != "all":
        source += own_row * L * COLUMNS
        # The query's kernel, which this one follows, has let it start after all that came before had ended: what was read so
        # far, it does not write.
        wait_for_predecessor(EARLY)
    square = tl.full((), 1.0, tl.float32)
    if ENGINE != "all":
        square = tl.load(squares + row * GP)
        for n in tl.static_range(1, G):
            square += tl.load(squares + row * GP + n)
    # What is subtracted of each head's scores; padded heads count for nothing.
    level = tl.where(is_head, 0.0, float("inf"))
    if PASS == "keys-by-stats":
        CHUNKS_P: tl.constexpr = triton.next_power_of_2(CHUNKS)
        c = tl.arange(0, CHUNKS_P)
        s_at = (row * CHUNKS + c[:, None]) * GP * 2 + g[None, :] * 2
        is_chunk = (c < CHUNKS)[:, None]
        tops = tl.load(stats + s_at, mask=is_chunk, other=-float("inf"))
        s_top = tl.maximum(tl.max(tops, axis=0), LOWEST)
        s_total = tl.sum(tl.load(stats + s_at + 1, mask=is_chunk, other=0.0) * tl.exp2(tops - s_top[None, :]), axis=0)
        level = tl.where(is_head, tl.maximum(_log_sum(s_top, s_total, NATIVE), LOWEST), float("inf"))
    elif HAS_NORM and PASS == "keys":
        level = tl.load(norm + head, mask=is_head, other=float("inf")).to(tl.float32) * LOG2E

    # The query's side of the dot.
    PARTS: tl.constexpr = 2 if ENGINE == "fragments" else 1  # tokens a thread has of a tile, taken one after the other
    lane = tl.arange(0, BLOCK_T // PARTS)
    if ENGINE == "fragments":
        THREADS: tl.constexpr = BLOCK_T // 2
        WIDTH: tl.constexpr = COLUMNS * source.dtype.element_ty.primitive_bitwidth // 8
        BYTES: tl.constexpr = 16 if WIDTH % 16 == 0 else 8 if WIDTH % 8 == 0 else 4
        lane = lane // 32 * 64 + lane % 32
        Q_ROW: tl.constexpr = GP * BLOCK_W if FMT == "fp8" else 2 * GP * BLOCK_W
        q_first, q_second = read_queries(query + row * Q_ROW, THREADS, WIDTH, BYTES, GP, BLOCK_W, FMT)
        code_sums = ()
        factor_of = ()
        level_of = ()
        for n in tl.static_range(G):
            code_sums = code_sums + (tl.load(sums + row * GP + n).to(tl.float32) if META > 0 else 0.0,)
            factor_of = factor_of + (tl.load(factors + row * GP + n) * UNIT,)
            level_of = level_of + (tl.load(norm + h * G + n).to(tl.float32) * LOG2E if HAS_NORM else 0.0,)
    elif ENGINE == "dot":
        # A row of the left operand is PACK tokens side by side, a column of the right one is a head's query where one of them
        # lies, and zeros: the product has a column for each head of each token, and none for padding.
        w = tl.arange(0, PACK * BLOCK_W)
        n = tl.arange(0, PACK * GP)
        q_at = query + (row * 2 * GP + (n % GP)[None, :]) * BLOCK_W + (w % BLOCK_W)[:, None]  # [PACK * W, PACK * GP]
        own = (w // BLOCK_W)[:, None] == (n // GP)[None, :]
        q_lo = tl.load(q_at, mask=own, other=0.0)
        factor = tl.load(factors + row * GP + g) * UNIT
        if FMT == "int4":
            q_hi = tl.load(q_at + GP * BLOCK_W, mask=own, other=0.0)
        if FMT == "int4" or FMT == "int8":
            code_sum = tl.load(sums + row * GP + g)
        if FMT == "fp8" and not FP8:
            q_lo = e4m3_as_half(q_lo)
            factor = factor * 65536.0
    else:
        q_rows = query + b * stride_qb + head[:, None] * stride_qh  # q itself
        factor = tl.full((GP,), 1.0, tl.float32) * (scale * UNIT)

    run_top = tl.full((GP,), -float("inf"), tl.float32)
    run_sum = tl.zeros((GP,), tl.float32)
    seen = tl.zeros(lane.shape, tl.int32)
    if ENGINE == "fragments":
        pieces = read_pieces(source, meta, base + chunk * BLOCK_T, stop, THREADS, WIDTH, BYTES, META)
    # Here, so that what is read above is under way, and not at the end, since registers are few.
    origin, per_width, size, growth, slope = row_window(guess, square)
    if chunk == 0:
        window += row * WINDOW
        tl.store(window, origin)
        tl.store(window + 1, per_width)
        tl.store(window + 2, size)
        tl.store(window + 3, growth)
        tl.store(window + 4, slope)
    for i0 in range(0, share, BLOCK_T):
        t0 = base + i0 * CHUNKS + chunk * BLOCK_T
        if ENGINE == "fragments":
            dots = multiply_pieces(pieces, q_first, q_second, THREADS, WIDTH, GP, FMT)
            if META > 0:
                scales = (pieces[WIDTH // 2], pieces[WIDTH // 2 + 1])
            # The next tile is under way, into the registers of this one, while scores become keys.
            pieces = read_pieces(source, meta, t0 + CHUNKS * BLOCK_T, stop, THREADS, WIDTH, BYTES, META)
        for part in tl.static_range(PARTS):
            token = t0 + lane + part * 32
            key_at = keys + (t0 + lane) + part * 32
            code_at = codes + (t0 + lane) + part * 32
            inside = (token >= first) & (token < stop)
            counted = inside
            bias = tl.zeros(lane.shape, tl.float32)
            if MASK_KIND != 0 and not PER_HEAD:
                counted, bias = _token_mask(mask, b, 0, token, inside, stride_mb, 0, stride_mt, MASK_KIND)

            if ENGINE == "fragments":
                if META > 0:
                    token_scale = (scales[part] & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                    token_zero = (scales[part] >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                scores = ()
                any_head = counted
                if PER_HEAD:
                    any_head = tl.zeros(lane.shape, tl.int1)
                top = tl.full(lane.shape, LOWEST, tl.float32)
                for n in tl.static_range(G):
                    dot = dots[n // 2 * 4 + part * 2 + n % 2].to(tl.float32)
                    if META > 0:
                        if FMT == "int8":
                            dot += 128.0 * code_sums[n]
                        one = (token_scale * dot + token_zero * code_sums[n]) * factor_of[n]
                    else:
                        one = dot * factor_of[n]
                    if SOFTCAP:
                        one = _soft(one, softcap)
                    if PER_HEAD:
                        ok, head_bias = _token_mask(
                            mask, b, h * G + n, token, inside, stride_mb, stride_mh, stride_mt, MASK_KIND
                        )
                        one = tl.where(ok, _clean(one + head_bias, NATIVE), -float("inf"))
                        any_head = any_head | ok
                    one = one - level_of[n]
                    top = tl.maximum(top, one)
                    scores = scores + (one,)
                key = top
                if not MAX:
                    total = tl.zeros(lane.shape, tl.float32)
                    for n in tl.static_range(G):
                        total += tl.exp2(scores[n] - top)
                    key = _log_sum(top, total, NATIVE)
                counted = any_head
            else:
                if ENGINE == "dot":
                    first_of = t0 + tl.arange(0, BLOCK_T // PACK) * PACK
                    x_at = source + first_of[:, None] * COLUMNS + w[None, :]
                    if PACK == 1:
                        there = inside[:, None] & (w < COLUMNS)[None, :]
                    else:  # COLUMNS == BLOCK_W; what lies before the first valid token may be read
                        there = first_of[:, None] + (w // BLOCK_W)[None, :] < stop
                    x = tl.load(x_at, mask=there, other=0.0)
                    if FMT == "int4" or FMT == "int8":
                        token_scale = tl.load(meta + token * META, mask=inside, other=0.0).to(tl.float32)
                        token_zero = tl.load(meta + token * META + 1, mask=inside, other=0.0).to(tl.float32)
                        if FMT == "int4":
                            if NATIVE:
                                x_lo, x_hi = _nibbles(x)
                            else:
                                x_lo = (x & 15).to(tl.int8)
                                x_hi = (x >> 4).to(tl.int8)
                            dot = tl.dot(x_lo, q_lo)
                            dot = tl.dot(x_hi, q_hi, acc=dot, out_dtype=tl.int32)
                        else:
                            dot = tl.dot(x, q_lo)
                        dot = tl.reshape(dot, [BLOCK_T, GP])
                        if FMT == "int8":
                            dot += 128 * code_sum[None, :]
                        s = (
                            token_scale[:, None] * dot.to(tl.float32)
                            + token_zero[:, None] * code_sum.to(tl.float32)[None, :]
                        )
                    elif FMT == "fp8" and not FP8:
                        s = tl.reshape(tl.dot(e4m3_as_half(x), q_lo), [BLOCK_T, GP])
                    else:
                        s = tl.reshape(tl.dot(x, q_lo, input_precision="ieee"), [BLOCK_T, GP])
                else:
                    s = tl.zeros((BLOCK_T, GP), tl.float32)
                    for d0 in tl.static_range(0, D, BLOCK_W):
                        d = d0 + tl.arange(0, BLOCK_W)
                        x = tl.load(
                            source + own * stride_kb + h * stride_kh + token.to(tl.int64)[:, None] * stride_kt
                            + (d * stride_kd)[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0,
                        )  # fmt: skip
                        y = tl.load(
                            q_rows + (d * stride_qd)[None, :], mask=is_head[:, None] & (d < D)[None, :], other=0.0
                        )
                        if x.dtype != y.dtype:
                            x = x.to(tl.float32)
                            y = y.to(tl.float32)
                        s = tl.dot(x, tl.trans(y), acc=s, input_precision="ieee")
                    s = _clean(s, NATIVE)  # packed data holds neither NaN nor inf; keys may
                s = s * factor[None, :]
                if SOFTCAP:
                    s = _soft(s, softcap)
                if PER_HEAD:
                    valid = inside[:, None] & is_head[None, :]
                    m = tl.load(
                        mask + b * stride_mb + token.to(tl.int64)[:, None] * stride_mt + (head * stride_mh)[None, :],
                        mask=valid, other=0,
                    )  # fmt: skip
                    valid = valid & allowed_by(m, MASK_KIND == 1)
                    if MASK_KIND == 2:
                        s = s + tl.where(valid, m.to(tl.float32), 0.0) * LOG2E
                    s = tl.where(valid, _clean(s, NATIVE), -float("inf"))
                    counted = tl.max(valid.to(tl.int32), axis=1) > 0
                if PASS == "stats":
                    if not PER_HEAD:
                        s = tl.where(counted[:, None], _clean(s + bias[:, None], NATIVE), -float("inf"))
                    most = tl.maximum(run_top, tl.max(s, axis=0))
                    safe = tl.maximum(most, LOWEST)
                    run_sum = run_sum * tl.exp2(run_top - safe) + tl.sum(tl.exp2(s - safe[None, :]), axis=0)
                    run_top = most
                else:
                    s = s - level[None, :]
                    key = tl.maximum(tl.max(s, axis=1), LOWEST)
                    if not MAX:
                        key = _log_sum(key, tl.sum(tl.exp2(s - key[:, None]), axis=1), NATIVE)

            if PASS != "stats":
                key = _clean(key + bias + 0.0, NATIVE)  # + 0: there is no negative zero
                if (t0 < sinks_end) | (t0 + BLOCK_T > recent):
                    forced = (token < sinks_end) | (token >= recent)
                    key = tl.where(inside, tl.where(forced, float("inf"), key), -float("inf"))
                if MASK_KIND != 0:
                    key = tl.where(counted, key, -float("inf"))
                tl.store(key_at, key, mask=inside)
                # What is counted is what a code says, so that selection by codes takes as many tokens as were counted.
                code = (tl.maximum(bin_of(key, origin, per_width), -1.0) + 2.0).to(tl.int32)
                tl.store(code_at, tl.where(key > -float("inf"), code, 0).to(tl.uint8), mask=inside)
                in_window = counted & (code >= 2)
                if COUNT:
                    tl.atomic_add(bins + counter_of(tl.maximum(code - 2, 0)), 1, mask=in_window, sem="relaxed")
                if MASK_KIND != 0:
                    seen += counted.to(tl.int32)

    admit_successor(EARLY)
    if PASS == "stats":
        at = (row * CHUNKS + chunk) * GP * 2 + g * 2
        tl.store(stats + at, run_top)
        tl.store(stats + at + 1, run_sum)
    else:
        if MASK_KIND != 0:
            tl.atomic_add(bins + VALID, tl.sum(seen, axis=0), sem="relaxed")
