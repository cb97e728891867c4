"""TIP: one key per cached token and KV head, and the list of tokens that can be among the best.

A row is one KV head of one sequence. The tokens of a row's bounds, in blocks of 16, are dealt out to its ``CHUNKS`` programs
in turn, so that every program sees a fair sample of the context. Each program writes the keys of its tokens, and the
*candidates* among them (key at or above the row's cutoff) to its own segment of ``CAP`` entries: no atomics, so the order is
the same in every run. Keys are in base-2 log units; forced tokens have +inf, tokens no head may attend -inf, others are finite.
"""

# ruff: noqa: RUF005 (Triton concatenates tuples, it does not unpack into them)

from __future__ import annotations

import triton
import triton.language as tl

from .bounds import allowed_by

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
def _clean(s):
    """NaN ranks lowest, and infinities are the largest finite numbers: +-inf have meanings of their own in keys."""
    s = tl.where(s == s, s, -3.4028234663852886e38)
    return tl.minimum(tl.maximum(s, -3.4028234663852886e38), 3.4028234663852886e38)


@triton.jit
def _soft(s, softcap):
    """softcap * tanh(s / softcap), in base-2 units from natural ones."""
    return (softcap * 1.4426950408889634) * (1.0 - 2.0 / (tl.exp2(s * (2.0 * 1.4426950408889634 / softcap)) + 1.0))


@triton.jit
def _finish_key(top, total, MAX: tl.constexpr):
    key = top
    if not MAX:
        key = top + tl.log2(tl.maximum(total, 1.1754943508222875e-38))
    key = tl.minimum(tl.maximum(key, -3.4028234663852886e38), 3.4028234663852886e38)
    return tl.where(key == 0.0, 0.0, key)


@triton.jit
def group_key(s, valid, norm, MAX: tl.constexpr):
    """One key per token from ``s [T, G]`` (base-2 logs) of the heads that ``valid [T, G]`` lets attend."""
    s = tl.where(valid, _clean(s) - norm, -float("inf"))
    top = tl.maximum(tl.max(s, axis=1), -3.4028234663852886e38)
    total = tl.sum(tl.exp2(s - top[:, None]), axis=1)
    return _finish_key(top, total, MAX)


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
def tip_kernel(
    query, factors, sums, source, meta, norm, mask, bounds, hint,
    keys, list_key, list_token, counts, stats,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_mb, stride_mh, stride_mt, stride_bounds,
    L, scale, softcap, n_sink, n_recent,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    FMT: tl.constexpr, COLUMNS: tl.constexpr, META: tl.constexpr,
    MASK_KIND: tl.constexpr, PER_HEAD: tl.constexpr, HAS_BOUNDS: tl.constexpr,
    HAS_HINT: tl.constexpr, HAS_NORM: tl.constexpr, SOFTCAP: tl.constexpr, MAX: tl.constexpr,
    PASS: tl.constexpr,  # "keys", "stats" (log-sum-exp partials of each head), "keys-by-stats"
    ENGINE: tl.constexpr,  # "words" (dp4a), "dot"; "all" scores with K itself
    FP8: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    CHUNKS: tl.constexpr, CAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (CHUNKS, B * HKV). ``source`` is the packed data and ``query, factors, sums`` are ``query_kernel``'s; when ENGINE is
    "all", they are k and q themselves and nothing."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    b, h = row // HKV, row % HKV
    first, stop, base, share = row_range(bounds, b, stride_bounds, L, CHUNKS, HAS_BOUNDS)
    cutoff = row_cutoff(hint, row, share, CAP, HAS_HINT)
    LOG2E: tl.constexpr = 1.4426950408889634

    if PDL:  # only what the query's kernel wrote is waited for; nothing before this line reads it
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    g = tl.arange(0, GP)
    head = h * G + g
    is_head = g < G
    level = tl.zeros((GP,), tl.float32)
    if PASS == "keys-by-stats":
        c = tl.arange(0, CHUNKS)
        s_at = (row * CHUNKS + c[:, None]) * GP * 2 + g[None, :] * 2
        tops = tl.load(stats + s_at)
        s_top = tl.maximum(tl.max(tops, axis=0), -3.4028234663852886e38)
        s_total = tl.sum(tl.load(stats + s_at + 1) * tl.exp2(tops - s_top[None, :]), axis=0)
        level = tl.maximum(s_top + tl.log2(tl.maximum(s_total, 1.1754943508222875e-38)), -3.4028234663852886e38)
    elif HAS_NORM:
        level = tl.load(norm + head, mask=is_head, other=0.0).to(tl.float32) * LOG2E

    # The query's side of the dot.
    UNIT: tl.constexpr = 1.0 if SOFTCAP else LOG2E  # a softcap is applied in natural units
    if ENGINE == "words":
        WORDS: tl.constexpr = COLUMNS // 4
        WORDS_P: tl.constexpr = BLOCK_W // 4
        word = tl.arange(0, WORDS_P)
        words = query.to(tl.pointer_type(tl.int32)) + row * (2 * GP * WORDS_P) + word
        words_lo = ()
        words_hi = ()
        code_sums = ()
        factor_of = ()
        levels = ()
        for n in tl.static_range(G):
            words_lo = words_lo + (tl.load(words + n * WORDS_P),)
            words_hi = words_hi + (tl.load(words + (GP + n) * WORDS_P) if FMT == "int4" else 0,)
            code_sums = code_sums + (tl.load(sums + row * GP + n),)
            factor_of = factor_of + (tl.load(factors + row * GP + n) * UNIT,)
            levels = levels + (tl.load(norm + h * G + n).to(tl.float32) * LOG2E if HAS_NORM else 0.0,)
    elif ENGINE == "dot":
        w = tl.arange(0, BLOCK_W)
        q_at = query + (row * 2 * GP + g[None, :]) * BLOCK_W + w[:, None]  # [W, GP]
        q_lo = tl.load(q_at)
        factor = tl.load(factors + row * GP + g) * UNIT
        if FMT == "int4":
            q_hi = tl.load(q_at + GP * BLOCK_W)
        if FMT == "int4" or FMT == "int8":
            code_sum = tl.load(sums + row * GP + g)
        if FMT == "fp8" and not FP8:
            q_lo = e4m3_as_half(q_lo)
            factor = factor * 65536.0
    else:
        q_rows = query + b * stride_qb + head[:, None] * stride_qh  # q itself
        factor = tl.full((GP,), 1.0, tl.float32) * (scale * UNIT)

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
            at = (source + row * L * COLUMNS).to(tl.pointer_type(tl.int32)) + token64[:, None] * WORDS + word[None, :]
            x = tl.load(at, mask=inside[:, None] & (word < WORDS)[None, :], other=0)  # [T, WORDS]
            both = tl.load((meta + row * L * META).to(tl.pointer_type(tl.int32)) + token64, mask=inside, other=0)
            token_scale = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            token_zero = ((both >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            low = x
            high = x
            if FMT == "int4":
                low = _nibble_low(x)
                high = _nibble_high(x)
            if MASK_KIND != 0 and not PER_HEAD:
                m = tl.load(mask + b * stride_mb + token64 * stride_mt, mask=inside, other=0)
            scores = ()
            any_head = inside & False
            top = tl.full((BLOCK_T,), -3.4028234663852886e38, tl.float32)
            for n in tl.static_range(G):
                dots = _dot4(low, tl.broadcast_to(words_lo[n][None, :], x.shape), tl.zeros(x.shape, tl.int32))
                if FMT == "int4":
                    dots = _dot4(high, tl.broadcast_to(words_hi[n][None, :], x.shape), dots)
                dot = tl.sum(dots, axis=1)
                if FMT == "int8":
                    dot += 128 * code_sums[n]
                one = factor_of[n] * (token_scale * dot.to(tl.float32) + token_zero * code_sums[n].to(tl.float32))
                if SOFTCAP:
                    one = _soft(one, softcap)
                valid = inside
                if MASK_KIND != 0:
                    if PER_HEAD:
                        m = tl.load(
                            mask + b * stride_mb + (h * G + n) * stride_mh + token64 * stride_mt, mask=inside, other=0
                        )
                    ok = allowed_by(m, MASK_KIND == 1)
                    valid = valid & ok
                    if MASK_KIND == 2:
                        one = one + tl.where(ok, m.to(tl.float32), 0.0) * LOG2E
                one = tl.where(valid, _clean(one) - levels[n], -float("inf"))
                any_head = any_head | valid
                top = tl.maximum(top, one)
                scores = scores + (one,)
            total = tl.zeros((BLOCK_T,), tl.float32)
            if not MAX:
                for n in tl.static_range(G):
                    total += tl.exp2(scores[n] - top)
            key = _finish_key(top, total, MAX)
        elif ENGINE == "dot":
            col = tl.arange(0, BLOCK_W)
            at = rows_at + token64[:, None] * COLUMNS + col[None, :]
            x = tl.load(at, mask=inside[:, None] & (col < COLUMNS)[None, :], other=0.0)
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
                    s = tl.dot(x, q_lo)
                else:
                    s = tl.dot(e4m3_as_half(x), q_lo)
            else:
                s = tl.dot(x, q_lo, input_precision="ieee")
        else:
            s = tl.zeros((BLOCK_T, GP), tl.float32)
            for d0 in tl.static_range(0, D, BLOCK_W):
                d = d0 + tl.arange(0, BLOCK_W)
                x = tl.load(
                    source + b * stride_kb + h * stride_kh + token64[:, None] * stride_kt + (d * stride_kd)[None, :],
                    mask=inside[:, None] & (d < D)[None, :], other=0.0,
                )  # fmt: skip
                y = tl.load(q_rows + (d * stride_qd)[None, :], mask=is_head[:, None] & (d < D)[None, :], other=0.0)
                if x.dtype != y.dtype:
                    x = x.to(tl.float32)
                    y = y.to(tl.float32)
                s = tl.dot(x, tl.trans(y), acc=s, input_precision="ieee")

        if ENGINE != "words":
            s = s * factor[None, :]
            if SOFTCAP:
                s = _soft(s, softcap)
            valid = inside[:, None] & is_head[None, :]
            if MASK_KIND != 0:
                m_row = mask + b * stride_mb + token64 * stride_mt
                if PER_HEAD:
                    m = tl.load(m_row[:, None] + (head * stride_mh)[None, :], mask=valid, other=0)
                else:
                    m = tl.load(m_row, mask=inside, other=0)[:, None]
                ok = allowed_by(m, MASK_KIND == 1)
                valid = valid & ok
                if MASK_KIND == 2:
                    s = s + tl.where(ok, m.to(tl.float32), 0.0) * LOG2E
            if PASS == "stats":
                s = tl.where(valid, _clean(s), -float("inf"))
                most = tl.maximum(run_top, tl.max(s, axis=0))
                safe = tl.maximum(most, -3.4028234663852886e38)
                run_sum = run_sum * tl.exp2(run_top - safe) + tl.sum(tl.exp2(s - safe[None, :]), axis=0)
                run_top = most
            else:
                key = group_key(s, valid, level[None, :], MAX)
                any_head = tl.max(valid.to(tl.int32), axis=1) > 0
        if PASS != "stats":
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
