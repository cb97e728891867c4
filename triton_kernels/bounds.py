"""First and last token that a mask lets any head attend to, per batch row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import BOOL_MASK, mask_arguments, on_device
from .tokens import four_dims, token_rows


@triton.jit
def allowed_by(m, BOOL: tl.constexpr):
    """Where a mask's value lets a query attend: True, or above the lowest number of its dtype."""
    if BOOL:
        return m != 0
    if m.dtype == tl.float16:
        return m > -65504.0
    if m.dtype == tl.bfloat16:
        return m.to(tl.float32) > -3.3895313892515355e38
    return m > -3.4028234663852886e38


@triton.jit
def bounds_kernel(
    mask, out, stride_b, stride_h, stride_t, H, L, BOOL: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """Grid (rows,). Scans all heads' rows of the mask of one query token."""
    b = tl.program_id(0).to(tl.int64)
    first = tl.full((BLOCK_T,), 2147483647, tl.int32)
    stop = tl.zeros((BLOCK_T,), tl.int32)
    for h in range(H):
        for start in range(0, L, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            inside = t < L
            m = tl.load(mask + b * stride_b + h * stride_h + t.to(tl.int64) * stride_t, mask=inside, other=0)
            ok = allowed_by(m, BOOL) & inside
            first = tl.minimum(first, tl.where(ok, t, 2147483647))
            stop = tl.maximum(stop, tl.where(ok, t + 1, 0))
    last = tl.max(stop, axis=0)
    tl.store(out + 2 * b, tl.minimum(tl.min(first, axis=0), last))
    tl.store(out + 2 * b + 1, last)


def mask_bounds(mask: Tensor, L: int) -> Tensor:
    """``reference.mask_bounds`` as a kernel."""
    m = mask_arguments(token_rows(four_dims(mask)))
    assert m.tensor is not None
    B, heads = m.tensor.shape[:2]
    out = torch.empty((B, 2), dtype=torch.int32, device=mask.device)
    block = 16384 if L > 4096 else 1024
    with on_device(mask):
        bounds_kernel[(B,)](
            m.tensor, out, *m.strides, heads if m.per_head else 1, L,
            BOOL=m.kind == BOOL_MASK, BLOCK_T=block, num_warps=16 if block > 1024 else 4,
        )  # fmt: skip
    return out
