"""Exact grouped-query decode attention: K and V are read once for all heads of a group, and only inside the bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attend import attend_tile, head_mask, load_query, merge_kernel, softmax_start, store_part
from .launch import (
    Device,
    Mask,
    admit_successor,
    device_of,
    mask_arguments,
    on_device,
    partition_alike,
    power_of_2,
    split_width,
    wait_for_predecessor,
)
from .pack import bytes_view, pack_sizes, pack_slots
from .score import own_bounds, row_bounds
from .tokens import as_rows, from_rows


@triton.jit
def dense_kernel(
    q, k, v, mask, bounds, out, part, sinks,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_mb, stride_mh, stride_mt, stride_bounds,
    L, scale, softcap,
    slots, data, meta, dims, centre, spread, stride_slots, n_slots,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, WIDE: tl.constexpr,
    MASK_KIND: tl.constexpr, PER_HEAD: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SLOTS: tl.constexpr, COLUMNS: tl.constexpr, META: tl.constexpr,
    W: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, FMT: tl.constexpr, LIMIT: tl.constexpr,
    TOKENS: tl.constexpr, SHARD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, rows), TOKENS rows to a sequence and KV head (``tokens``): each program attends to an equal run of the row's
    valid range. With slots there is one program more to a row: it refreshes its share of these rows of the packed FC cache, which
    nobody reads here but the next step may. SHARD: as ``tip_kernel``'s; the result is left in parts."""
    wait_for_predecessor(EARLY)
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    b, h = row // HKV, row % HKV
    own = b // TOKENS
    if HAS_SLOTS and split == SPLITS:
        pack_slots(
            k + own * stride_kb + h * stride_kh, slots + own * stride_slots, data, meta, dims + h * W, centre + h * W,
            spread + h * W, own * HKV + h, L, b % TOKENS, n_slots, TOKENS, stride_kt, stride_kd, COLUMNS, META,
            W, HALF, HALF_P, FMT, LIMIT,
        )  # fmt: skip
        return
    first, stop = row_bounds(bounds, b, stride_bounds, L, HAS_BOUNDS)
    first, stop = own_bounds(first, stop, SHARD)
    share = tl.cdiv(tl.cdiv(stop - first, SPLITS), BLOCK_N) * BLOCK_N
    begin = first + split * share
    end = tl.minimum(begin + share, stop)
    q1, q2 = load_query(q, b, h, stride_qb, stride_qh, stride_qd, G, GP, D, D1, D2, WIDE)
    m_i, l_i, acc, factor = softmax_start(scale, GP, DVP, SOFTCAP)
    lane = tl.arange(0, BLOCK_N)
    for n0 in range(begin, end, BLOCK_N):
        inside = n0 + lane < end
        token = (n0 + lane).to(tl.int64)
        valid, bias = head_mask(
            mask, b, h, token, inside, stride_mb, stride_mh, stride_mt, G, GP, MASK_KIND, PER_HEAD
        )  # fmt: skip
        seen = inside
        if MASK_KIND != 0:
            seen = tl.max(valid.to(tl.int32), axis=0) > 0
        m_i, l_i, acc = attend_tile(
            q1, q2, m_i, l_i, acc,
            k + own * stride_kb + h * stride_kh + token * stride_kt, v + own * stride_vb + h * stride_vh + token * stride_vt,
            seen, valid, bias, factor, softcap, stride_kd, stride_vd, D, D1, D2, DV, DVP, SOFTCAP,
        )  # fmt: skip
    admit_successor(EARLY)
    store_part(
        out,
        part,
        sinks,
        row,
        split,
        SPLITS,
        h,
        m_i,
        l_i,
        acc,
        HKV,
        G,
        GP,
        DV,
        DVP,
        HAS_SINKS,
        SPLITS == 1 and SHARD == 0,
    )


def attend_sizes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int | bool]:
    """The compile-time arguments that dense and sparse attention share."""
    Hkv, D, DV = k.shape[1], q.shape[3], v.shape[3]
    G = q.shape[1] // Hkv
    D1, D2 = split_width(D)
    wide = q.dtype != k.dtype
    return {
        "HKV": Hkv, "G": G, "GP": max(16, power_of_2(G)), "D": D, "D1": D1, "D2": D2, "DV": DV,
        "DVP": max(16, power_of_2(DV)), "WIDE": wide,
    }  # fmt: skip


def token_width(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Bytes of K and V of one token and head, in the wider of the query's and the cache's dtype."""
    return (q.shape[3] + v.shape[3]) * max(k.element_size(), q.element_size())


def strides_of(q: Tensor, k: Tensor, v: Tensor, mask: Mask, bounds: Tensor | None) -> tuple[int, ...]:
    """The stride arguments of the attention kernels, in their order."""
    of_bounds = 0 if bounds is None or bounds.shape[0] == 1 else bounds.stride(0)
    return (q.stride(0), q.stride(1), q.stride(3), *k.stride(), *v.stride(), *mask.strides, of_bounds)


def merge(
    part: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    splits: int,
    sizes: dict[str, int | bool],
    level: bool = False,
) -> None:
    """Launches ``merge_kernel``: ``out [B, Hq, 1, DV]``, or with its log-sum-exp ``[B, Hq, 1, DV + 1]``."""
    B, Hq = out.shape[:2]
    early = device_of(out).early
    launched = merge_kernel[(B * Hq,)](
        part, sinks, out, splits, HQ=Hq, G=sizes["G"], DV=sizes["DV"], DVP=sizes["DVP"],
        SPLITS_P=power_of_2(splits), HAS_SINKS=sinks is not None, LEVEL=level, EARLY=early, num_warps=4,
        launch_pdl=early,
    )  # fmt: skip
    partition_alike(launched)


def _splits(rows: int, tokens: int, block: int, device: Device) -> int:
    """Enough programs to fill the GPU about twice, each with at least two tiles."""
    wanted = max(1, (2 * device.sms + rows - 1) // rows)
    return max(1, min(wanted, (tokens + 2 * block - 1) // (2 * block), 128))


@dataclass(frozen=True)
class Refresh:
    """Rows ``slots`` of a packed FC cache that follow the key cache in this step (``pack.pack_rows_``)."""

    slots: Tensor
    data: Tensor
    meta: Tensor
    dims: Tensor
    centre: Tensor
    spread: Tensor
    fmt: str

    def kernel_arguments(self) -> dict[str, Tensor | int | float | str | bool]:
        return {
            "slots": self.slots, "data": bytes_view(self.data), "meta": self.meta, "dims": self.dims, "centre": self.centre,
            "spread": self.spread, "stride_slots": 0 if self.slots.dim() == 1 else self.slots.stride(0),
            "n_slots": self.slots.shape[-1], "HAS_SLOTS": True, "COLUMNS": self.data.shape[3], "META": self.meta.shape[3],
            **pack_sizes(self.dims.shape[1], self.fmt),
        }  # fmt: skip


_NO_REFRESH: dict[str, Any] = {
    "slots": None, "data": None, "meta": None, "dims": None, "centre": None, "spread": None, "stride_slots": 0, "n_slots": 0,
    "HAS_SLOTS": False, "COLUMNS": 1, "META": 0, **pack_sizes(1, "fp32"),
}  # fmt: skip


def dense_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bounds: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    refresh: Refresh | None = None,
    shard: bool = False,
) -> Tensor:
    """``reference.dense_decode`` as kernels. Without ``bounds`` the whole cache is scanned, masked tokens unread. ``shard``: K and V are
    those of some of the tokens, ``bounds`` those of all, counted from the first one here, and the result is fp32 with the log-sum-exp
    of the scores behind it, ``[B, Hq, 1, DV + 1]``."""
    S = q.shape[2]
    q, mask, bounds = as_rows(q, mask, bounds)
    B, Hq = q.shape[:2]
    Hkv, L, DV = k.shape[1], k.shape[2], v.shape[3]
    m = mask_arguments(mask)
    sizes = attend_sizes(q, k, v)
    width = token_width(q, k, v)  # a tile of K and V must fit in shared memory, twice
    block = 64 if width <= 1024 else 32 if width <= 2048 else 16
    device = device_of(q)
    splits = _splits(B * Hkv, L, block, device)
    out = torch.empty((B, Hq, 1, DV + shard), dtype=torch.float32 if shard else q.dtype, device=q.device)
    in_parts = shard or splits > 1
    part = torch.empty(
        (B * Hkv * splits * (Hq // Hkv) * (DV + 2)) if in_parts else 1, dtype=torch.float32, device=q.device
    )
    with on_device(q):
        launched = dense_kernel[(splits + (refresh is not None), B * Hkv)](
            q, k, v, m.tensor, bounds, out, part, sinks, *strides_of(q, k, v, m, bounds),
            L, scale, softcap, **sizes, MASK_KIND=m.kind, PER_HEAD=m.per_head, HAS_BOUNDS=bounds is not None,
            HAS_SINKS=sinks is not None, SOFTCAP=softcap != 0.0, SPLITS=splits, BLOCK_N=block,
            **(_NO_REFRESH if refresh is None else refresh.kernel_arguments()), TOKENS=S, SHARD=L if shard else 0, EARLY=device.early, num_warps=4,
            num_stages=2, launch_pdl=device.early,
        )  # fmt: skip
        partition_alike(launched)
        if in_parts:
            merge(part, sinks, out, splits, sizes, level=shard)
    return from_rows(out, S)
