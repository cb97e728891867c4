"""Operands of the tensor cores, read from memory straight into the registers in which their instruction wants them.

A program of N warps takes tiles of 64 N tokens. A warp multiplies 16 rows by pairs of heads; a row is 4 tokens side by side, a
column one head's query where one of the four tokens lies, and zeros elsewhere. So thread 4 g + t of a warp, which gets columns 2 t and
2 t + 1 of rows g and g + 8, gets what tokens 4 g + t and 32 more score with both heads of a pair: no thread needs what another one
has, and nothing passes through shared memory. Three of four products are with zeros, which costs less than reordering would.

The order of a row's bytes is any, if it is the query's as well: a thread reads pieces of ``BYTES``, as many as it can at once of one
token and aligned wherever a row begins, and four threads' pieces follow each other. ``WIDTH``: a token's bytes.

Every tensor here has one dimension and as many elements as the program has threads, so that an element is a thread.
"""

# ruff: noqa: RUF005 (Triton concatenates tuples, it does not unpack into them; they grow, so mypy's fixed lengths don't fit)
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nibble_low(w):
    return tl.inline_asm_elementwise("and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [w], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def nibble_high(w):
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }",
        "=r,r",
        [w],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def halves(w):
    """Four e4m3 bytes as two pairs of fp16."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r", [w], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _piece(address, there, BYTES: tl.constexpr):
    """The BYTES at each address as words; zeros where not ``there``. Not moved before the wait for whoever writes them."""
    if BYTES == 16:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 a, b, c, d; setp.ne.s32 p, $5, 0; mov.b32 a, 0; mov.b32 b, 0; mov.b32 c, 0; mov.b32 d, 0;"
            " @p ld.global.v4.b32 {a, b, c, d}, [$4]; mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d; }",
            "=r,=r,=r,=r,l,r", [address, there.to(tl.int32)], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False, pack=1,
        )  # fmt: skip
    elif BYTES == 8:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 a, b; setp.ne.s32 p, $3, 0; mov.b32 a, 0; mov.b32 b, 0;"
            " @p ld.global.v2.b32 {a, b}, [$2]; mov.b32 $0, a; mov.b32 $1, b; }",
            "=r,=r,l,r", [address, there.to(tl.int32)], dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        word = tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 a; setp.ne.s32 p, $2, 0; mov.b32 a, 0; @p ld.global.b32 a, [$1]; mov.b32 $0, a; }",
            "=r,l,r", [address, there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        return (word,)


@triton.jit
def read_pieces(
    source, meta, t0, stop, THREADS: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr, META: tl.constexpr
):  # fmt: skip
    """What a thread multiplies of a tile's tokens from ``t0`` on, ``WIDTH / 4`` words of its first row and as many of its second;
    then, with META, its two tokens' scales and zeros, a word each. Zeros from ``stop`` on."""
    thread = tl.arange(0, THREADS)
    place = thread % 4 * BYTES
    words = ()
    for half in tl.static_range(2):
        first = t0 + thread // 32 * 64 + thread % 32 // 4 * 4 + half * 32
        at = source.to(tl.int64) + first * WIDTH + place
        for n in tl.static_range(WIDTH // BYTES):
            words = words + _piece(at + n * 4 * BYTES, first + (n * 4 * BYTES + place) // WIDTH < stop, BYTES)
    if META > 0:
        for half in tl.static_range(2):
            token = t0 + thread // 32 * 64 + thread % 32 + half * 32
            words = words + (tl.load(meta.to(tl.pointer_type(tl.int32)) + token, mask=token < stop, other=0),)
    return words


@triton.jit
def read_queries(
    query, THREADS: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr, GP: tl.constexpr, BLOCK_W: tl.constexpr,
    FMT: tl.constexpr,
):  # fmt: skip
    """A thread's operands of all steps from the rounded queries of a row (``query_kernel``): the first words, for each pair of heads
    the steps' one after another, and the second ones."""
    SPLIT: tl.constexpr = FMT == "int4" or FMT == "fp8"  # a word of keys makes both operands of a step
    WORDS: tl.constexpr = BLOCK_W // 4 if FMT == "int4" or FMT == "fp8" or FMT == "int8" else BLOCK_W // 2
    thread = tl.arange(0, THREADS)
    place = thread % 4 * BYTES
    column = thread % 32 // 4
    at = query.to(tl.pointer_type(tl.int32)) + column % 2 * WORDS
    first = ()
    second = ()
    for pair in tl.static_range(GP // 2):
        for n in tl.static_range(WIDTH // BYTES):
            own = column // 2 == (n * 4 * BYTES + place) // WIDTH
            word = at + (n * 4 * BYTES + place) % WIDTH // 4 + pair * 2 * WORDS
            for i in tl.static_range(0, BYTES // 4, 1 if SPLIT else 2):
                first = first + (tl.load(word + i, mask=own, other=0),)
                second = second + (tl.load(word + (i + GP * WORDS if SPLIT else i + 1), mask=own, other=0),)
    return first, second


@triton.jit
def _multiply(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, FMT: tl.constexpr):
    """One instruction of a warp's tensor cores: adds the product of 16 rows and 8 columns."""
    if FMT == "int4" or FMT == "int8":
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        KIND: tl.constexpr = "bf16" if FMT == "bf16" else "f16"
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32." + KIND + "." + KIND + ".f32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def multiply_pieces(
    words, first, second, THREADS: tl.constexpr, WIDTH: tl.constexpr, GP: tl.constexpr, FMT: tl.constexpr
):  # fmt: skip
    """What ``read_pieces`` read times what ``read_queries`` did: for each pair of heads what a thread's first token scores with both,
    then its second. fp32, or int32 in the integer formats."""
    WORDS: tl.constexpr = WIDTH // 4
    BY: tl.constexpr = 1 if FMT == "int4" or FMT == "fp8" else 2  # words that make the operands of a step
    INTEGER: tl.constexpr = FMT == "int4" or FMT == "int8"
    nothing = tl.zeros((THREADS,), tl.int32 if INTEGER else tl.float32)
    dots = ()
    for pair in tl.static_range(GP // 2):
        c0, c1, c2, c3 = nothing, nothing, nothing, nothing
        for w in tl.static_range(0, WORDS, BY):
            if FMT == "int4":
                a0, a2 = nibble_low(words[w]), nibble_high(words[w])
                a1, a3 = nibble_low(words[WORDS + w]), nibble_high(words[WORDS + w])
            elif FMT == "fp8":
                a0, a2 = halves(words[w])
                a1, a3 = halves(words[WORDS + w])
            else:
                a0, a2 = words[w], words[w + 1]
                a1, a3 = words[WORDS + w], words[WORDS + w + 1]
            b0, b1 = first[pair * (WORDS // BY) + w // BY], second[pair * (WORDS // BY) + w // BY]
            c0, c1, c2, c3 = _multiply(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, FMT)
        dots = dots + (c0, c1, c2, c3)
    return dots
