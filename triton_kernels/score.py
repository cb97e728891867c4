"""TIP: one key per cached token and KV head, and the list of tokens that can be among the best.

A row is one KV head of one sequence. The tokens of a row's bounds, in blocks of 16, are dealt out to its ``CHUNKS`` programs
in turn, so that every program sees a fair sample of the context. Each program writes the keys of its tokens, and the
*candidates* among them (key at or above the row's cutoff) to its own segment of ``CAP`` entries: no atomics, so the order is
the same in every run. Keys are in base-2 log units; forced tokens have +inf, tokens no head may attend -inf, others are finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bounds import allowed_by
from .pack import encode_e4m3, pack_tile, round_half_even, rounded_to

_SUB: tl.constexpr = tl.constexpr(16)  # tokens a program takes in a run


@triton.jit
def row_range(bounds, b, stride_bounds, L, CHUNKS: tl.constexpr, HAS_BOUNDS: tl.constexpr):
    """``(first, stop, base, share)``: the valid range, where dealing starts, and the tokens dealt to each program."""
    first = 0
    stop = L
    if HAS_BOUNDS:
        first = tl.load(bounds + b * stride_bounds)
        stop = tl.load(bounds + b * stride_bounds + 1)
    base = first // _SUB * _SUB
    share = tl.cdiv(tl.cdiv(stop - base, _SUB), CHUNKS) * _SUB
    return first, stop, base, share


@triton.jit
def dealt_token(i, chunk, base, CHUNKS: tl.constexpr):
    """The token that is number i of a program's share."""
    return base + (i // _SUB * CHUNKS + chunk) * _SUB + i % _SUB


@triton.jit
def row_cutoff(hint, row, share, CAP: tl.constexpr, HAS_HINT: tl.constexpr):
    """The key from which a token is a candidate. -inf where all of a program's share fits its segment anyway."""
    cutoff = -float("inf")
    if HAS_HINT:
        guess = tl.load(hint + row * 2)
        cutoff = tl.where((share > CAP) & (guess == guess), guess, cutoff)
    return cutoff


@triton.jit
def group_key(s, valid, norm, MAX: tl.constexpr):
    """One key per token from ``s [T, G]`` (base-2 logs) of the heads that ``valid [T, G]`` lets attend."""
    s = tl.where(s == s, s, -3.4028234663852886e38)
    s = tl.minimum(tl.maximum(s, -3.4028234663852886e38), 3.4028234663852886e38)
    s = tl.where(valid, s - norm, -float("inf"))
    top = tl.maximum(tl.max(s, axis=1), -3.4028234663852886e38)
    if MAX:
        key = top
    else:
        key = top + tl.log2(tl.maximum(tl.sum(tl.exp2(s - top[:, None]), axis=1), 1.1754943508222875e-38))
    key = tl.minimum(tl.maximum(key, -3.4028234663852886e38), 3.4028234663852886e38)
    return tl.where(key == 0.0, 0.0, key)


@triton.jit
def _tip_query(q, dims, spread, use, stride_qd):
    """``y = (q * spread)[dims]`` cleaned, and its largest magnitude per head. ``q [G, 1]`` pointers, others ``[1, W]``."""
    at = tl.load(dims, mask=use, other=0)
    y = tl.load(q + at.to(tl.int64) * stride_qd, mask=use, other=0.0).to(tl.float32)
    y = y * tl.load(spread, mask=use, other=0.0)
    y = tl.where(y == y, y, 0.0)
    return tl.minimum(tl.maximum(y, -3.3895313892515355e38), 3.3895313892515355e38)


@triton.jit
def _head_step(largest, STEPS: tl.constexpr):
    return tl.math.div_rn(tl.where(largest == 0.0, 1.0, largest), tl.full(largest.shape, STEPS, tl.float32))


@triton.jit
def e4m3_as_half(code):
    """e4m3 bytes as fp16 numbers 2^8 too small: exact, and two operations where the GPU has no conversion."""
    wide = code.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _nibble_low(w):
    return tl.inline_asm_elementwise("and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [w], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _nibble_high(w):
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }",
        "=r,r",
        [w],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _dot4(a, b, c):
    """c + the dot of four signed bytes of a and b."""
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _query_words(y, step, WORDS: tl.constexpr, GP: tl.constexpr):
    """``y [GP, 4 * WORDS]`` rounded to int8, four to a word ``[GP, WORDS]``, and the sum of the codes ``[GP]``."""
    code = round_half_even(tl.math.div_rn(y, step))
    code = tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int32)
    total = tl.sum(code, axis=1)
    byte = tl.reshape(code & 255, (GP, WORDS, 4)) << (8 * tl.arange(0, 4))[None, None, :]
    return tl.sum(byte, axis=2), total


@triton.jit
def tip_kernel(
    q, source, meta, dims, centre, spread, norm, mask, bounds, slots, k, hint,
    keys, list_key, list_token, counts, stats,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_mb, stride_mh, stride_mt, stride_bounds, stride_slots,
    L, n_slots, scale, softcap, n_sink, n_recent,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    FMT: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr, META: tl.constexpr,
    HALF: tl.constexpr, HALF_P: tl.constexpr, LIMIT: tl.constexpr,
    MASK_KIND: tl.constexpr, PER_HEAD: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_SLOTS: tl.constexpr,
    HAS_HINT: tl.constexpr, HAS_NORM: tl.constexpr, SOFTCAP: tl.constexpr, MAX: tl.constexpr,
    PASS: tl.constexpr,  # "keys", "stats" (log-sum-exp partials of each head), "keys-by-stats"
    ENGINE: tl.constexpr,  # "words" (dp4a), "dot"; "all" scores with K itself
    FP8: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    CHUNKS: tl.constexpr, CAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (CHUNKS, B * HKV). ``source``: the packed data, or k when ENGINE is "all"."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    b, h = row // HKV, row % HKV
    first, stop, base, share = row_range(bounds, b, stride_bounds, L, CHUNKS, HAS_BOUNDS)
    cutoff = row_cutoff(hint, row, share, CAP, HAS_HINT)
    LOG2E: tl.constexpr = 1.4426950408889634

    if HAS_SLOTS:
        # The program that will read a refreshed row also writes it; rows that nobody reads fall to program 0.
        for i in range(n_slots):
            slot = tl.load(slots + b * stride_slots + i)
            inside = (slot >= base) & (slot < stop)
            owner = tl.where(inside, (slot - base) // _SUB % CHUNKS, 0)
            if owner == chunk:
                at = slot.to(tl.int64) + tl.zeros((1,), tl.int64)
                pack_tile(
                    k + b * stride_kb + h * stride_kh + at * stride_kt,
                    source + (row * L + at) * COLUMNS, meta + (row * L + at) * META,
                    dims + h * W, centre + h * W, spread + h * W, at >= 0, stride_kd,
                    W, HALF, HALF_P, FMT, LIMIT,
                )  # fmt: skip
        tl.debug_barrier()

    g = tl.arange(0, GP)
    head = h * G + g
    is_head = g < G
    q_rows = q + b * stride_qb + head[:, None] * stride_qh  # [GP, 1]
    factor = tl.full((GP,), scale * LOG2E, tl.float32)
    if SOFTCAP:
        factor = tl.full((GP,), scale, tl.float32)
    level = tl.zeros((GP,), tl.float32)
    if PASS == "keys-by-stats":
        c = tl.arange(0, CHUNKS)
        at = (row * CHUNKS + c[:, None]) * GP * 2 + g[None, :] * 2
        tops = tl.load(stats + at)
        top = tl.maximum(tl.max(tops, axis=0), -3.4028234663852886e38)
        total = tl.sum(tl.load(stats + at + 1) * tl.exp2(tops - top[None, :]), axis=0)
        level = tl.maximum(top + tl.log2(tl.maximum(total, 1.1754943508222875e-38)), -3.4028234663852886e38)
    elif HAS_NORM:
        level = tl.load(norm + head, mask=is_head, other=0.0).to(tl.float32) * LOG2E

    # The query's side of the dot, once per program.
    if ENGINE == "words":
        w = tl.arange(0, BLOCK_W)
        WORDS: tl.constexpr = COLUMNS // 4
        WORDS_P: tl.constexpr = BLOCK_W // 4
        LO: tl.constexpr = HALF if FMT == "int4" else W
        use_lo = is_head[:, None] & (w < LO)[None, :]
        y_lo = _tip_query(q_rows, (dims + h * W + w)[None, :], (spread + h * W + w)[None, :], use_lo, stride_qd)
        largest = tl.max(tl.abs(y_lo), axis=1)
        if FMT == "int4":
            use_hi = is_head[:, None] & (HALF + w < W)[None, :]
            y_hi = _tip_query(
                q_rows, (dims + h * W + HALF + w)[None, :], (spread + h * W + HALF + w)[None, :], use_hi, stride_qd
            )
            largest = tl.maximum(largest, tl.max(tl.abs(y_hi), axis=1))
        step = _head_step(largest, 127.0)
        step_w = tl.broadcast_to(step[:, None], y_lo.shape)
        words_lo, code_sum = _query_words(y_lo, step_w, WORDS_P, GP)
        if FMT == "int4":
            words_hi, sum_hi = _query_words(y_hi, step_w, WORDS_P, GP)
            code_sum = code_sum + sum_hi
        factor = factor * step
    elif ENGINE == "dot":
        # int4 takes its dims in two halves; others have one.
        PARTS: tl.constexpr = HALF if FMT == "int4" else W
        w = tl.arange(0, BLOCK_W)
        use_lo = is_head[:, None] & (w < PARTS)[None, :]
        y_lo = _tip_query(q_rows, (dims + h * W + w)[None, :], (spread + h * W + w)[None, :], use_lo, stride_qd)
        largest = tl.max(tl.abs(y_lo), axis=1)
        if FMT == "int4":
            use_hi = is_head[:, None] & (HALF + w < W)[None, :]
            y_hi = _tip_query(
                q_rows, (dims + h * W + HALF + w)[None, :], (spread + h * W + HALF + w)[None, :], use_hi, stride_qd
            )
            largest = tl.maximum(largest, tl.max(tl.abs(y_hi), axis=1))
        if FMT == "int4" or FMT == "int8":
            step = _head_step(largest, 127.0)
            step_w = tl.broadcast_to(step[:, None], y_lo.shape)
            code_lo = round_half_even(tl.math.div_rn(y_lo, step_w))
            code_lo = tl.minimum(tl.maximum(code_lo, -127.0), 127.0)
            code_sum = tl.sum(code_lo.to(tl.int32), axis=1)
            q_lo = tl.trans(code_lo.to(tl.int8))
            if FMT == "int4":
                code_hi = round_half_even(tl.math.div_rn(y_hi, step_w))
                code_hi = tl.minimum(tl.maximum(code_hi, -127.0), 127.0)
                code_sum = code_sum + tl.sum(code_hi.to(tl.int32), axis=1)
                q_hi = tl.trans(code_hi.to(tl.int8))
            factor = factor * step
        elif FMT == "fp32":
            q_lo = tl.trans(y_lo)
        else:
            step = _head_step(largest, 448.0 if FMT == "fp8" else 1.0)
            rounded = tl.math.div_rn(y_lo, tl.broadcast_to(step[:, None], y_lo.shape))
            rounded = tl.minimum(tl.maximum(rounded, -LIMIT), LIMIT)
            factor = factor * step
            if FMT == "fp8":
                code = encode_e4m3(rounded)
                if FP8:
                    q_lo = tl.trans(code.to(tl.float8e4nv, bitcast=True))
                else:
                    q_lo = tl.trans(e4m3_as_half(code))
                    factor = factor * 65536.0
            else:
                q_lo = tl.trans(rounded_to(rounded, source.dtype.element_ty))

    found = 0
    run_top = tl.full((GP,), -float("inf"), tl.float32)
    run_sum = tl.zeros((GP,), tl.float32)
    lane = tl.arange(0, BLOCK_T)
    rows_at = source + row * L * COLUMNS
    for i0 in range(0, share, BLOCK_T):
        i = i0 + lane
        token = dealt_token(i, chunk, base, CHUNKS)
        inside = (i < share) & (token >= first) & (token < stop)
        token64 = token.to(tl.int64)

        if ENGINE == "words":
            word = tl.arange(0, WORDS_P)
            at = (source + row * L * COLUMNS).to(tl.pointer_type(tl.int32)) + token64[:, None] * WORDS + word[None, :]
            x = tl.load(at, mask=inside[:, None] & (word < WORDS)[None, :], other=0)  # [T, WORDS]
            both = tl.load((meta + row * L * META).to(tl.pointer_type(tl.int32)) + token64, mask=inside, other=0)
            token_scale = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            token_zero = ((both >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            shape: tl.constexpr = (GP, BLOCK_T, WORDS_P)
            ql = tl.broadcast_to(words_lo[:, None, :], shape)
            if FMT == "int4":
                low = tl.broadcast_to(_nibble_low(x)[None, :, :], shape)
                high = tl.broadcast_to(_nibble_high(x)[None, :, :], shape)
                qh = tl.broadcast_to(words_hi[:, None, :], shape)
                dots = _dot4(high, qh, _dot4(low, ql, tl.zeros(shape, tl.int32)))
                dot = tl.trans(tl.sum(dots, axis=2))  # [T, GP]
            else:
                dots = _dot4(tl.broadcast_to(x[None, :, :], shape), ql, tl.zeros(shape, tl.int32))
                dot = tl.trans(tl.sum(dots, axis=2)) + 128 * code_sum[None, :]
            s = token_scale[:, None] * dot.to(tl.float32) + token_zero[:, None] * code_sum.to(tl.float32)[None, :]
        elif ENGINE == "dot":
            col = tl.arange(0, BLOCK_W)
            at = rows_at + token64[:, None] * COLUMNS + col[None, :]
            x = tl.load(at, mask=inside[:, None] & (col < COLUMNS)[None, :], other=0)
            if FMT == "int4" or FMT == "int8":
                token_scale = tl.load(meta + (row * L + token64) * META, mask=inside, other=0.0).to(tl.float32)
                token_zero = tl.load(meta + (row * L + token64) * META + 1, mask=inside, other=0.0).to(tl.float32)
                if FMT == "int4":
                    dot = tl.dot((x & 15).to(tl.int8), q_lo)
                    dot = tl.dot((x >> 4).to(tl.int8), q_hi, acc=dot, out_dtype=tl.int32)
                else:
                    dot = tl.dot(x, q_lo) + 128 * code_sum[None, :]
                s = token_scale[:, None] * dot.to(tl.float32) + token_zero[:, None] * code_sum.to(tl.float32)[None, :]
            elif FMT == "fp8":
                if FP8:
                    s = tl.dot(x.to(tl.float8e4nv, bitcast=True), q_lo)
                else:
                    s = tl.dot(e4m3_as_half(x), q_lo)
            else:
                s = tl.dot(x, q_lo, input_precision="ieee")
        else:
            s = tl.zeros((BLOCK_T, GP), tl.float32)
            for d0 in tl.static_range(0, D, BLOCK_W):
                d = d0 + tl.arange(0, BLOCK_W)
                x = tl.load(
                    k + b * stride_kb + h * stride_kh + token64[:, None] * stride_kt + (d * stride_kd)[None, :],
                    mask=inside[:, None] & (d < D)[None, :], other=0.0,
                )  # fmt: skip
                y = tl.load(q_rows + (d * stride_qd)[None, :], mask=is_head[:, None] & (d < D)[None, :], other=0.0)
                if x.dtype != y.dtype:
                    x = x.to(tl.float32)
                    y = y.to(tl.float32)
                s = tl.dot(x, tl.trans(y), acc=s, input_precision="ieee")

        s = s * factor[None, :]
        if SOFTCAP:
            s = (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0))
        valid = inside[:, None] & is_head[None, :]
        if MASK_KIND != 0:
            m_row = mask + b * stride_mb + token64 * stride_mt
            if PER_HEAD:
                m = tl.load(m_row[:, None] + (head * stride_mh)[None, :], mask=valid, other=0)
                ok = allowed_by(m, MASK_KIND == 1)
            else:
                m = tl.load(m_row, mask=inside, other=0)[:, None]
                ok = allowed_by(m, MASK_KIND == 1)
            valid = valid & ok
            if MASK_KIND == 2:
                s = s + tl.where(ok, m.to(tl.float32), 0.0) * LOG2E

        if PASS == "stats":
            s = tl.where(s == s, s, -3.4028234663852886e38)
            s = tl.minimum(tl.maximum(s, -3.4028234663852886e38), 3.4028234663852886e38)
            s = tl.where(valid, s, -float("inf"))
            top = tl.maximum(run_top, tl.max(s, axis=0))
            safe = tl.maximum(top, -3.4028234663852886e38)
            run_sum = run_sum * tl.exp2(run_top - safe) + tl.sum(tl.exp2(s - safe[None, :]), axis=0)
            run_top = top
        else:
            key = group_key(s, valid, level[None, :], MAX)
            any_head = tl.max(valid.to(tl.int32), axis=1) > 0
            forced = (token < first + n_sink) | (token >= stop - n_recent)
            key = tl.where(any_head, tl.where(forced, float("inf"), key), -float("inf"))
            if share > CAP:  # else the list holds them all, and nobody looks here
                tl.store(keys + row * L + token64, key, mask=inside)
            listed = any_head & (key >= cutoff)
            count = listed.to(tl.int32)
            place = found + tl.cumsum(count, axis=0) - 1
            keep = listed & (place < CAP)
            segment = (row * CHUNKS + chunk) * CAP
            tl.store(list_key + segment + place, key, mask=keep)
            tl.store(list_token + segment + place, token, mask=keep)
            found += tl.sum(count, axis=0)

    if PASS == "stats":
        at = (row * CHUNKS + chunk) * GP * 2 + g * 2
        tl.store(stats + at, run_top)
        tl.store(stats + at + 1, run_sum)
    else:
        tl.store(counts + row * (CHUNKS + 1) + chunk, found)
        if chunk == 0:  # whether the list holds every token, if it fits
            tl.store(counts + row * (CHUNKS + 1) + CHUNKS, (cutoff == -float("inf")).to(tl.int32))
