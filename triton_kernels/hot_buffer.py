"""FAC over K and V in host memory: misses of the hot buffer are fetched across PCIe, everything else is read from the GPU.

``attend.fac_kernel`` with a step in between. After a program has selected the tokens of its part, it looks them up in its own hot
slots and lists the slots that this step does not need. Then it attends: a tile's K and V rows are read from wherever they are, all at
once, since what PCIe asks for is many loads under way and few waits; what came from the host is stored in the listed slots on the
way. No slot is both read and written in a step, so nothing has to be waited for but the rows. ``hot_slots.rows_through_`` says
exactly what happens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attend import attend_rows, head_mask, load_query, load_rows, select_tokens, softmax_start, store_part
from .launch import admit_successor, wait_for_predecessor
from .score import deal, row_bounds


@triton.jit
def tags_left(tags, slots, n_slots, L, C: tl.constexpr, CP: tl.constexpr, HAS_SLOTS: tl.constexpr):
    """A part's tags ``[CP]``, 0 where the step wrote the token's row and behind the last slot."""
    c = tl.arange(0, CP)
    tag = tl.load(tags + c, mask=c < C, other=0)
    if HAS_SLOTS:
        for number in range(n_slots):
            written = tl.load(slots + number).to(tl.int32)
            written = tl.where(written < 0, written + L, written)  # as indexing counts
            tag = tl.where(tag == written + 1, 0, tag)
    return tag


@triton.jit
def look_up(kept, mine, place, spare, tag, hand, C: tl.constexpr, CP: tl.constexpr, BLOCK_N: tl.constexpr):
    """Writes to ``place`` which slot each of the ``mine`` tokens in ``kept`` has, or -1, and to ``spare`` the slots that none of
    them has, from slot ``hand`` on; returns how many these are."""
    lane = tl.arange(0, BLOCK_N)
    for n0 in range(0, mine, BLOCK_N):
        tl.store(place + n0 + lane, -1, mask=n0 + lane < mine)
    # Tokens ascend: how many come before a slot's, by halves.
    c = tl.arange(0, CP)
    before = tl.zeros((CP,), tl.int32)
    stride = tl.full((), 1, tl.int32)
    while stride <= mine:
        stride *= 2
    while stride > 1:
        stride = stride // 2
        end = before + stride
        less = tl.load(kept + end - 1, mask=end <= mine, other=2147483647) < tag - 1
        before = tl.where(less, end, before)
    hit = tl.load(kept + before, mask=before < mine, other=-2) == tag - 1
    free = ((hit == 0) & (c < C)).to(tl.int32)
    wraps = c < hand
    front = tl.sum(tl.where(wraps, free, 0), axis=0)
    back = tl.sum(tl.where(wraps, 0, free), axis=0)
    number = tl.cumsum(free, axis=0) - 1
    number = tl.where(wraps, number + back, number - front)
    tl.store(spare + number, c, mask=free > 0)
    tl.debug_barrier()
    tl.store(place + before, c, mask=hit)
    tl.debug_barrier()
    return front + back


@triton.jit
def keep_rows(
    to, k1, k2, v, keep,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """Stores rows from ``load_rows`` at ``to [N]``, K before V, where ``keep [N]``."""
    d1 = tl.arange(0, D1)
    dv = tl.arange(0, DVP)
    tl.store(to[:, None] + d1[None, :], k1, mask=keep[:, None] & (d1 < D)[None, :])
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        tl.store(to[:, None] + d2[None, :], k2, mask=keep[:, None] & (d2 < D)[None, :])
    tl.store(to[:, None] + D + dv[None, :], v, mask=keep[:, None] & (dv < DV)[None, :])


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
    SPLITS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, GIVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``fac_kernel`` through a hot buffer: ``hot, tags, ledger`` as in ``hot_slots`` with SPLITS parts of C slots; ``place [rows,
    SPLITS, room + C]`` int32 is scratch. K and V lie in rows without gaps."""
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    b, h = row // HKV, row % HKV
    first, stop = row_bounds(bounds, b, stride_bounds, L, HAS_BOUNDS)
    base, share = deal(first, stop, SPLITS, 32)
    mine_at = row * SPLITS + split
    kept += mine_at * room
    place += mine_at * (room + C)
    spare = place + room
    hot += mine_at * C * (D + DV)
    tags += mine_at * C
    ledger += mine_at * 4
    k += b * stride_kb + h * stride_kh
    v += b * stride_vb + h * stride_vh
    q1, q2 = load_query(q, b, h, stride_qb, stride_qh, stride_qd, G, GP, D, D1, D2, WIDE)
    tag = tags_left(tags, slots + b * stride_slots, n_slots, L, C, CP, HAS_SLOTS)
    hand = tl.load(ledger)
    # As in ``fac_kernel``, TIP writes nothing of what was read so far.
    wait_for_predecessor(EARLY)
    keys += row * L
    codes += row * L
    if GIVEN:
        mine = tl.load(kept_count + mine_at)
    else:
        mine = select_tokens(
            hint, keys, codes, bins, window, kept, kept_count + mine_at, row, split, first, stop, base, share, n_fac,
            HKV, MASK_KIND, HAS_HINT, SPLITS, BLOCK_K, 1,
        )  # fmt: skip
    c = tl.arange(0, CP)
    tl.store(tags + c, tag, mask=c < C)
    spares = look_up(kept, mine, place, spare, tag, hand, C, CP, BLOCK_N)
    m_i, l_i, acc, factor = softmax_start(scale, GP, DVP, SOFTCAP)
    lane = tl.arange(0, BLOCK_N)
    missed = tl.full((), 0, tl.int32)
    for n0 in range(0, mine, BLOCK_N):
        inside = n0 + lane < mine
        token = tl.load(kept + n0 + lane, mask=inside, other=0)
        slot = tl.load(place + n0 + lane, mask=inside, other=0)
        miss = slot < 0
        chosen = token.to(tl.int64)
        here = hot + tl.maximum(slot, 0) * (D + DV)
        k1, k2, v1 = load_rows(
            tl.where(miss, k + chosen * stride_kt, here), tl.where(miss, v + chosen * stride_vt, here + D), inside, 1, 1,
            D, D1, D2, DV, DVP,
        )  # fmt: skip
        number = missed + tl.cumsum(miss.to(tl.int32), axis=0) - 1
        missed += tl.sum(miss.to(tl.int32), axis=0)
        keep = miss & (number < spares)
        to = tl.load(spare + number, mask=keep, other=0)
        tl.store(tags + to, token + 1, mask=keep)
        keep_rows(hot + to * (D + DV), k1, k2, v1, keep, D, D1, D2, DV, DVP)
        valid, bias = head_mask(
            mask, b, h, chosen, inside, stride_mb, stride_mh, stride_mt, G, GP,
            MASK_KIND if PER_HEAD or MASK_KIND == 2 else 0, PER_HEAD,
        )  # fmt: skip
        m_i, l_i, acc = attend_rows(
            q1, q2, m_i, l_i, acc, k1, k2, v1, valid, bias, factor, softcap, D2, SOFTCAP
        )  # fmt: skip
    admit_successor(EARLY)
    filled = tl.minimum(missed, spares)
    last = tl.load(spare + filled - 1, mask=filled > 0, other=hand - 1)
    tl.store(ledger, (last + 1) % C)
    tl.store(ledger + 1, tl.load(ledger + 1) + mine)
    tl.store(ledger + 2, tl.load(ledger + 2) + missed)
    tl.store(ledger + 3, tl.load(ledger + 3) + missed - filled)
    store_part(out, part, sinks, row, split, SPLITS, h, m_i, l_i, acc, HKV, G, GP, DV, DVP, HAS_SINKS, SPLITS == 1)
