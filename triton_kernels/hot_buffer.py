"""FAC over K and V in host memory: misses of the hot buffer are fetched across PCIe, everything else is read from the GPU.

``attend.fac_kernel`` with a step in between. After a program has selected the tokens of its part, it looks them up in its own hot
slots, copies the rows that are missing from host memory to slots that this step does not need, and then attends to rows in GPU
memory (and, where it had no slot left, to the host's). All loads of a tile of misses are under way at once, from all programs, which is
what PCIe's latency asks for. ``hot_slots.rows_through_`` says exactly what happens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attend import attend_tile, head_mask, load_query, select_tokens, softmax_start, store_part
from .launch import admit_successor, wait_for_predecessor
from .score import deal, row_bounds


@triton.jit
def _move(to, source, moved, stride, N: tl.constexpr, NP: tl.constexpr):
    """Copies rows ``[T]`` of N elements, where ``moved``."""
    d = tl.arange(0, NP)
    use = moved[:, None] & (d < N)[None, :]
    tl.store(to[:, None] + d[None, :], tl.load(source[:, None] + (d * stride)[None, :], mask=use), mask=use)


@triton.jit
def fetch_missing(
    k, v, hot, tags, ledger, kept, place, slots, n_slots, mine, L, stride_kt, stride_kd, stride_vt, stride_vd,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    HAS_SLOTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Brings a part's ``mine`` selected tokens, listed in ``kept``, into its C hot slots, and writes to ``place`` which slot each
    has, or -1. All pointers are the part's own; ``k, v`` point at the first row of its KV head."""
    c = tl.arange(0, CP)
    lane = tl.arange(0, BLOCK_N)
    tag = tl.load(tags + c, mask=c < C, other=-1)
    if HAS_SLOTS:
        for number in range(n_slots):
            written = tl.load(slots + number).to(tl.int32)
            written = tl.where(written < 0, written + L, written)  # as indexing counts
            tag = tl.where(tag == written + 1, 0, tag)
    hit_slots = tl.zeros((CP,), tl.int32)
    for n0 in range(0, mine, BLOCK_N):
        inside = n0 + lane < mine
        label = tl.load(kept + n0 + lane, mask=inside, other=-2) + 1
        hit_slots = tl.maximum(hit_slots, tl.max((label[:, None] == tag[None, :]).to(tl.int32), axis=0))
    # Slots to give away, numbered from the next one on.
    hand = tl.load(ledger)
    free = ((hit_slots == 0) & (c < C)).to(tl.int32)
    wraps = c < hand
    before = tl.sum(tl.where(wraps, free, 0), axis=0)
    after = tl.sum(tl.where(wraps, 0, free), axis=0)
    number = tl.cumsum(free, axis=0) - 1
    number = tl.where(free > 0, tl.where(wraps, number + after, number - before), -1)

    new_tag = tag
    missed = tl.full((), 0, tl.int32)
    for n0 in range(0, mine, BLOCK_N):
        inside = n0 + lane < mine
        token = tl.load(kept + n0 + lane, mask=inside, other=-2)
        same = ((token + 1)[:, None] == tag[None, :]).to(tl.int32)
        miss = inside & (tl.max(same, axis=1) == 0)
        want = missed + tl.cumsum(miss.to(tl.int32), axis=0) - 1
        given = (miss[:, None] & (want[:, None] == number[None, :])).to(tl.int32)
        slot = tl.max(tl.where((same + given) > 0, c[None, :], -1), axis=1)
        new_tag = tl.maximum(
            tl.where(tl.max(given, axis=0) > 0, 0, new_tag), tl.max(given * (token + 1)[:, None], axis=0)
        )
        tl.store(place + n0 + lane, slot, mask=inside)
        moved = miss & (slot >= 0)
        to = hot + tl.maximum(slot, 0) * (D + DV)
        row = token.to(tl.int64)
        _move(to, k + row * stride_kt, moved, stride_kd, D, DP)
        _move(to + D, v + row * stride_vt, moved, stride_vd, DV, DVP)
        missed += tl.sum(miss.to(tl.int32), axis=0)

    tl.store(tags + c, new_tag, mask=c < C)
    filled = tl.minimum(missed, before + after)
    last = tl.max(tl.where(number == filled - 1, c, -1), axis=0)
    tl.store(ledger, tl.where(filled > 0, (last + 1) % C, hand))
    tl.store(ledger + 1, tl.load(ledger + 1) + mine)
    tl.store(ledger + 2, tl.load(ledger + 2) + missed)
    tl.store(ledger + 3, tl.load(ledger + 3) + missed - filled)
    tl.debug_barrier()


@triton.jit
def fetching_fac_kernel(
    q, k, v, mask, bounds, hint, keys, codes, bins, window, kept, kept_count, out, part, sinks,
    hot, tags, ledger, place, slots, stride_slots, n_slots,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_mb, stride_mh, stride_mt, stride_bounds,
    L, n_fac, scale, softcap, room,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, WIDE: tl.constexpr,
    MASK_KIND: tl.constexpr, PER_HEAD: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_HINT: tl.constexpr,
    HAS_SINKS: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SLOTS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    DP: tl.constexpr, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, GIVEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """``fac_kernel`` through a hot buffer: ``hot, tags, ledger`` as in ``hot_slots`` with SPLITS parts of C slots; ``place``
    is scratch like ``kept``."""
    wait_for_predecessor(EARLY)
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    b, h = row // HKV, row % HKV
    first, stop = row_bounds(bounds, b, stride_bounds, L, HAS_BOUNDS)
    base, share = deal(first, stop, SPLITS, 32)
    keys += row * L
    codes += row * L
    mine_at = row * SPLITS + split
    kept += mine_at * room
    place += mine_at * room
    hot += mine_at * C * (D + DV)
    k += b * stride_kb + h * stride_kh
    v += b * stride_vb + h * stride_vh
    if GIVEN:
        mine = tl.load(kept_count + mine_at)
    else:
        mine = select_tokens(
            hint, keys, codes, bins, window, kept, kept_count + mine_at, row, split, first, stop, base, share, n_fac,
            HKV, MASK_KIND, HAS_HINT, SPLITS, BLOCK_K, 1,
        )  # fmt: skip
    fetch_missing(
        k, v, hot, tags + mine_at * C, ledger + mine_at * 4, kept, place, slots + b * stride_slots, n_slots, mine, L,
        stride_kt, stride_kd, stride_vt, stride_vd, D, DP, DV, DVP, C, CP, HAS_SLOTS, BLOCK_N,
    )  # fmt: skip
    q1, q2 = load_query(q, b, h, stride_qb, stride_qh, stride_qd, G, GP, D, D1, D2, WIDE)
    m_i, l_i, acc, factor = softmax_start(scale, GP, DVP, SOFTCAP)
    lane = tl.arange(0, BLOCK_N)
    for n0 in range(0, mine, BLOCK_N):
        inside = n0 + lane < mine
        chosen = tl.load(kept + n0 + lane, mask=inside, other=0).to(tl.int64)
        slot = tl.load(place + n0 + lane, mask=inside, other=-1)
        valid, bias = head_mask(
            mask, b, h, chosen, inside, stride_mb, stride_mh, stride_mt, G, GP,
            MASK_KIND if PER_HEAD or MASK_KIND == 2 else 0, PER_HEAD,
        )  # fmt: skip
        here = hot + slot * (D + DV)
        k_rows = tl.where(slot >= 0, here, k + chosen * stride_kt)
        v_rows = tl.where(slot >= 0, here + D, v + chosen * stride_vt)
        m_i, l_i, acc = attend_tile(
            q1, q2, m_i, l_i, acc, k_rows, v_rows, inside, valid, bias, factor, softcap, stride_kd, stride_vd,
            D, D1, D2, DV, DVP, SOFTCAP,
        )  # fmt: skip
    admit_successor(EARLY)
    store_part(out, part, sinks, row, split, SPLITS, h, m_i, l_i, acc, HKV, G, GP, DV, DVP, HAS_SINKS, SPLITS == 1)
