"""The parts of a decode step between the exchanges of ``sharded_decode``, as kernels, for the tokens that one process holds.

``candidates`` scores them and lists the best in order of position; ``attend`` finds in everyone's list from which key on there are ``n_fac``
tokens, and attends to those of its own that reach it: exactly ``n_fac``, equal keys going to the lower position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attend import attend_tile, find_threshold, head_mask, load_query, select_tokens, softmax_start, store_part
from .dense_decode import attend_sizes, merge, strides_of, token_width
from .hot_slots import fac_parts
from .launch import (
    LOG2E,
    admit_successor,
    device_of,
    mask_arguments,
    on_device,
    partition_alike,
    power_of_2,
    wait_for_predecessor,
)
from .score import own_bounds, row_bounds
from .sharded_decode import candidate_width
from .sparse_decode import Scan


@triton.jit
def select_kernel(
    keys, codes, bins, window, hint, bounds, kept, kept_count, stride_bounds, L, n_fac, room,
    HKV: tl.constexpr, MASK_KIND: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_HINT: tl.constexpr, SHARD: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (PARTS, rows): which of an unbroken run of the row's tokens are among its best ``n_fac``, in order of position. ``kept [rows,
    PARTS, room]`` and ``kept_count [rows, PARTS]`` as ``fac_kernel``'s, and so is the rest."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    first, stop = row_bounds(bounds, row // HKV, stride_bounds, L, HAS_BOUNDS)
    first, stop = own_bounds(first, stop, SHARD)
    base = first // 16 * 16
    share = tl.cdiv(tl.cdiv(stop - base, PARTS), 16) * 16
    wait_for_predecessor(EARLY)
    # One program of one, each with a run of its own: they all write the same next window to the hint.
    select_tokens(
        hint, keys + row * L, codes + row * L, bins, window, kept + (row * PARTS + part) * room,
        kept_count + row * PARTS + part, row, 0, first, stop, base + part * share, share, n_fac,
        HKV, MASK_KIND, HAS_HINT, 1, BLOCK_K, 1,
    )  # fmt: skip
    admit_successor(EARLY)


@triton.jit
def list_kernel(
    keys, kept, kept_count, listed, tokens, L, room, width, PARTS: tl.constexpr, PARTS_P: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (PARTS, rows): the parts' tokens one after another, ``tokens [rows, width]`` and their keys ``listed [rows, width]``, -inf behind
    the last."""
    wait_for_predecessor(EARLY)
    admit_successor(EARLY)
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    n = tl.arange(0, PARTS_P)
    counts = tl.load(kept_count + row * PARTS + n, mask=n < PARTS, other=0)
    before = tl.sum(tl.where(n < part, counts, 0), axis=0)
    mine = tl.sum(tl.where(n == part, counts, 0), axis=0)
    total = tl.sum(counts, axis=0)
    kept += (row * PARTS + part) * room
    lane = tl.arange(0, BLOCK)
    for i0 in range(0, mine, BLOCK):
        use = i0 + lane < mine
        token = tl.load(kept + i0 + lane, mask=use, other=0)
        key = tl.load(keys + row * L + token, mask=use, other=0.0)
        at = row * width + before + i0 + lane
        tl.store(tokens + at, token, mask=use)
        tl.store(listed + at, key, mask=use)
    if part == PARTS - 1:
        for i0 in range(total, width, BLOCK):
            use = i0 + lane < width
            at = row * width + i0 + lane
            tl.store(tokens + at, tl.zeros((BLOCK,), tl.int32), mask=use)
            tl.store(listed + at, tl.full((BLOCK,), -float("inf"), tl.float32), mask=use)


@triton.jit
def chosen_fac_kernel(
    q, k, v, mask, listed, tokens, part,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_mb, stride_mh, stride_mt,
    n_fac, scale, softcap, width, rank,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, WIDE: tl.constexpr, MASK_KIND: tl.constexpr, PER_HEAD: tl.constexpr,
    SOFTCAP: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, rows): attention to those of this process's candidates, ``tokens [rows, width]``, that are among the best ``n_fac`` of
    ``listed [rows, RANKS * width]``, everyone's keys. Writes ``part [rows, SPLITS, G, 2 + DV]``."""
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    b, h = row // HKV, row % HKV
    q1, q2 = load_query(q, b, h, stride_qb, stride_qh, stride_qd, G, GP, D, D1, D2, WIDE)
    wait_for_predecessor(EARLY)
    listed += row * RANKS * width
    tokens += row * width
    anywhere = tl.full((), 0.0, tl.float32)
    hi, lo, below = find_threshold(listed, n_fac, rank * 0, RANKS * width, anywhere, anywhere, 4096, True)
    m_i, l_i, acc, factor = softmax_start(scale, GP, DVP, SOFTCAP)
    lane = tl.arange(0, BLOCK_N)
    for i0 in range(split * BLOCK_N, width, SPLITS * BLOCK_N):
        i = i0 + lane
        at = rank * width + i
        key = tl.load(listed + at, mask=i < width, other=-float("inf"))
        chosen = (key > -float("inf")) & ((key >= hi) | ((key >= lo) & (at < below)))
        token = tl.load(tokens + i, mask=chosen, other=0).to(tl.int64)
        valid, bias = head_mask(
            mask, b, h, token, chosen, stride_mb, stride_mh, stride_mt, G, GP,
            MASK_KIND if PER_HEAD or MASK_KIND == 2 else 0, PER_HEAD,
        )  # fmt: skip
        m_i, l_i, acc = attend_tile(
            q1, q2, m_i, l_i, acc,
            k + b * stride_kb + h * stride_kh + token * stride_kt, v + b * stride_vb + h * stride_vh + token * stride_vt,
            chosen, valid, bias, factor, softcap, stride_kd, stride_vd, D, D1, D2, DV, DVP, SOFTCAP,
        )  # fmt: skip
    admit_successor(EARLY)
    store_part(part, part, q, row, split, SPLITS, h, m_i, l_i, acc, HKV, G, GP, DV, DVP, False, False)


def _scan(
    q: Tensor,
    k: Tensor,
    data: Tensor | None,
    meta: Tensor | None,
    mask: Tensor | None,
    bounds: Tensor,
    hint: Tensor | None,
    fmt: str,
    reduction: str,
    scale: float,
    softcap: float,
) -> Scan:
    for name, state in (("data", data), ("meta", meta), ("hint", hint)):
        if state is not None and not state.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    m = mask_arguments(mask)
    strides = strides_of(q, k, k, m, bounds)
    return Scan(q, k, data, meta, m, bounds, hint, strides, fmt, reduction, scale, softcap, 1)


def levels(
    q: Tensor,
    k: Tensor,
    data: Tensor | None,
    meta: Tensor | None,
    dims: Tensor | None,
    spread: Tensor | None,
    mask: Tensor | None,
    bounds: Tensor,
    *,
    rows: int,
    scale: float,
    softcap: float,
    fmt: str,
) -> Tensor:
    """``sharded_decode.levels`` as kernels."""
    scan = _scan(q, k, data, meta, mask, bounds, None, fmt, "softmax_sum", scale, softcap)
    scan.prepare(1, token_width(q, k, k))  # nothing is selected
    with on_device(q):
        scan.query(dims, spread, spread, None, None, None)
        scan.tip("stats", None, 0, 0, shard=rows)
    assert scan.stats is not None
    top, total = scan.stats[:, :, : scan.group].unbind(-1)  # [rows, chunks, G]
    lowest = torch.finfo(torch.float32).min / 2  # finite in base-2 units too
    most = top.amax(1).clamp(min=lowest)
    total = (total * torch.exp2(top - most[:, None])).sum(1).clamp(min=torch.finfo(torch.float32).tiny)
    return ((most + total.log2()) / LOG2E).view(q.shape[0], q.shape[1])


def candidates(
    q: Tensor,
    k: Tensor,
    data: Tensor | None,
    meta: Tensor | None,
    dims: Tensor | None,
    spread: Tensor | None,
    norm: Tensor | None,
    mask: Tensor | None,
    bounds: Tensor,
    hint: Tensor | None = None,
    slopes: Tensor | None = None,
    *,
    rows: int,
    n_fac: int,
    n_sink: int,
    n_recent: int,
    scale: float,
    softcap: float,
    fmt: str,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """``sharded_decode.candidates`` as kernels, which list up to 12 % more; ``hint`` as in ``ops``, state of this process alone. State must be
    contiguous."""
    dims, spread, norm, slopes = (x if x is None else x.contiguous() for x in (dims, spread, norm, slopes))
    scan = _scan(q, k, data, meta, mask, bounds, hint, fmt, reduction, scale, softcap)
    c = scan.prepare(n_fac, token_width(q, k, k))
    B, Hkv, L, _ = k.shape
    parts, early = c.splits, scan.device.early
    width = candidate_width(n_fac, rows)
    room = min(
        width, (rows + parts - 1) // parts + 31
    )  # a part's share: that, of tokens from a multiple of 16 on, in multiples of 16

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    kept, kept_count = scratch(scan.rows, parts, room), scratch(scan.rows, parts)
    listed, tokens = scratch(B, Hkv, width, dtype=torch.float32), scratch(B, Hkv, width)
    with on_device(q):
        scan.query(dims, spread, spread, norm if norm is None or norm.dim() == 1 else None, slopes, None)
        if norm is not None and norm.dim() == 2:
            scan.levels = norm
        scan.tip("keys", norm, n_sink, n_recent, shard=rows)
        launched = select_kernel[(parts, scan.rows)](
            scan.keys, scan.codes, scan.bins, scan.window, hint, bounds, kept, kept_count, scan.strides[-1], L, n_fac, room,
            HKV=Hkv, MASK_KIND=scan.mask.kind, HAS_BOUNDS=True, HAS_HINT=hint is not None, SHARD=rows, PARTS=parts,
            BLOCK_K=c.block_k, EARLY=early, num_warps=c.fac_warps, launch_pdl=early,
        )  # fmt: skip
        partition_alike(launched)
        launched = list_kernel[(parts, scan.rows)](
            scan.keys, kept, kept_count, listed, tokens, L, room, width, PARTS=parts, PARTS_P=power_of_2(parts),
            BLOCK=128, EARLY=early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
        partition_alike(launched)
    return listed, tokens


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    listed: Tensor,
    tokens: Tensor,
    *,
    rank: int,
    n_fac: int,
    scale: float,
    softcap: float,
) -> Tensor:
    """``sharded_decode.attend`` as kernels; ``listed`` must be contiguous."""
    B, Hkv, width = tokens.shape
    device = device_of(q)
    m = mask_arguments(mask)
    sizes = attend_sizes(q, k, v)
    wide = token_width(q, k, v)
    block_n = 16 if wide > 2048 else 32 if B * Hkv > 16 or wide > 1024 else 64
    splits = min(fac_parts(B * Hkv, n_fac, device.sms), -(-width // block_n))
    part = torch.empty((B * Hkv, splits, sizes["G"], v.shape[3] + 2), device=q.device)
    out = torch.empty((B, q.shape[1], 1, v.shape[3] + 1), device=q.device)
    with on_device(q):
        launched = chosen_fac_kernel[(splits, B * Hkv)](
            q, k, v, m.tensor, listed, tokens, part, *strides_of(q, k, v, m, None)[:-1], n_fac, scale, softcap, width, rank,
            **sizes, MASK_KIND=m.kind, PER_HEAD=m.per_head, SOFTCAP=softcap != 0.0, RANKS=listed.shape[2] // width,
            SPLITS=splits, BLOCK_N=block_n, EARLY=device.early, num_warps=4, num_stages=1 if wide > 1024 else 2,
            launch_pdl=device.early,
        )  # fmt: skip
        partition_alike(launched)
        merge(part, None, out, splits, sizes, level=True)
    return out
