"""Packs keys into the FC cache: all rows (``pack``) or some (``pack_rows_``), byte for byte as ``reference`` does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import INFO, check_format, fc_cache_spec
from .launch import on_device, power_of_2


@triton.jit
def round_half_even(x):
    """x to the nearest integer, |x| < 2^22: the sum's own rounding does it, as IEEE says."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def encode_e4m3(x):
    """fp32 in [-448, 448] to e4m3 bytes, rounded to nearest even: integers only, for GPUs without the conversion too."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20).to(tl.int32) - 960  # rebias 127 -> 7
    subnormal = round_half_even(magnitude.to(tl.float32, bitcast=True) * 512.0).to(tl.int32)
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)  # below 2^-6
    return (code.to(tl.uint32) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def rounded_to(x, dtype: tl.constexpr):
    """Finite fp32 to a narrower float, to nearest even; bfloat16 by integers, so that the interpreter rounds too."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def stored_value(chosen, centre, spread, LIMIT: tl.constexpr):
    x = tl.math.div_rn(chosen.to(tl.float32) - centre, spread)
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def encode_code(x, zero, scale, STEPS: tl.constexpr):
    q = round_half_even(tl.math.div_rn(x - zero, scale))
    return tl.minimum(tl.maximum(q, 0.0), STEPS)


@triton.jit
def pack_tile(
    k_rows, data_rows, meta_rows, dims, centre, spread, kept, stride_kd,
    W: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, FMT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Packs N rows. ``k_rows, data_rows, meta_rows [N]``: pointers to each row; ``dims, centre, spread``: those of the KV
    head; ``kept [N]``: which rows to write. The W dims are taken as two halves, since int4 pairs them."""
    j = tl.arange(0, HALF_P)
    in_lo = j < HALF
    in_hi = HALF + j < W
    at_lo = k_rows[:, None] + (tl.load(dims + j, mask=in_lo, other=0).to(tl.int64) * stride_kd)[None, :]
    at_hi = k_rows[:, None] + (tl.load(dims + HALF + j, mask=in_hi, other=0).to(tl.int64) * stride_kd)[None, :]
    use_lo = kept[:, None] & in_lo[None, :]
    use_hi = kept[:, None] & in_hi[None, :]
    centre_lo = tl.load(centre + j, mask=in_lo, other=0.0)[None, :]
    centre_hi = tl.load(centre + HALF + j, mask=in_hi, other=0.0)[None, :]
    spread_lo = tl.load(spread + j, mask=in_lo, other=1.0)[None, :]
    spread_hi = tl.load(spread + HALF + j, mask=in_hi, other=1.0)[None, :]
    lo = stored_value(tl.load(at_lo, mask=use_lo, other=0.0), centre_lo, spread_lo, LIMIT)
    hi = stored_value(tl.load(at_hi, mask=use_hi, other=0.0), centre_hi, spread_hi, LIMIT)
    if FMT == "int8" or FMT == "int4":
        STEPS: tl.constexpr = 255.0 if FMT == "int8" else 15.0
        least = tl.minimum(
            tl.min(tl.where(in_lo[None, :], lo, LIMIT), axis=1), tl.min(tl.where(in_hi[None, :], hi, LIMIT), axis=1)
        )
        most = tl.maximum(
            tl.max(tl.where(in_lo[None, :], lo, -LIMIT), axis=1), tl.max(tl.where(in_hi[None, :], hi, -LIMIT), axis=1)
        )
        scale = tl.math.div_rn(most - least, tl.full(most.shape, STEPS, tl.float32)).to(tl.float16)
        scale = tl.where(scale == 0.0, 1.0, scale).to(tl.float16)
        zero = least.to(tl.float16)
        tl.store(meta_rows, scale, mask=kept)
        tl.store(meta_rows + 1, zero, mask=kept)
        wide_scale = tl.broadcast_to(scale.to(tl.float32)[:, None], lo.shape)
        wide_zero = zero.to(tl.float32)[:, None]
        code_lo = encode_code(lo, wide_zero, wide_scale, STEPS)
        code_hi = encode_code(hi, wide_zero, wide_scale, STEPS)
        if FMT == "int8":
            tl.store(data_rows[:, None] + j[None, :], (code_lo - 128.0).to(tl.int8), mask=use_lo)
            tl.store(data_rows[:, None] + HALF + j[None, :], (code_hi - 128.0).to(tl.int8), mask=use_hi)
        else:
            both = code_lo.to(tl.int32) | (code_hi.to(tl.int32) << 4)
            tl.store(data_rows[:, None] + j[None, :], both.to(tl.uint8), mask=use_lo)
    elif FMT == "fp8":
        tl.store(data_rows[:, None] + j[None, :], encode_e4m3(lo), mask=use_lo)
        tl.store(data_rows[:, None] + HALF + j[None, :], encode_e4m3(hi), mask=use_hi)
    else:
        element: tl.constexpr = data_rows.dtype.element_ty
        tl.store(data_rows[:, None] + j[None, :], rounded_to(lo, element), mask=use_lo)
        tl.store(data_rows[:, None] + HALF + j[None, :], rounded_to(hi, element), mask=use_hi)


@triton.jit
def pack_slots(
    k, slots, data, meta, dims, centre, spread, row, L, first, n_slots, STEP: tl.constexpr, stride_kt, stride_kd,
    COLUMNS: tl.constexpr, META: tl.constexpr,
    W: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, FMT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Packs every STEP-th of the tokens in ``slots`` of one row from the ``first`` on; ``k, slots, dims, centre, spread`` point at the
    row's own."""
    for number in range(first, n_slots, STEP):
        slot = tl.load(slots + number).to(tl.int64) + tl.zeros((1,), tl.int64)
        slot = tl.where(slot < 0, slot + L, slot)  # as indexing counts
        pack_tile(
            k + slot * stride_kt, data + (row * L + slot) * COLUMNS, meta + (row * L + slot) * META, dims, centre, spread,
            (slot >= 0) & (slot < L), stride_kd, W, HALF, HALF_P, FMT, LIMIT,
        )  # fmt: skip


@triton.jit
def pack_kernel(
    k, data, meta, slots, dims, centre, spread,
    stride_kb, stride_kh, stride_kt, stride_kd, stride_slots,
    T, L, Hkv,
    HAS_SLOTS: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr, META: tl.constexpr,
    HALF: tl.constexpr, HALF_P: tl.constexpr, FMT: tl.constexpr, LIMIT: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T / BLOCK_T), B * Hkv). Row i of the call is token i, or ``slots[i]``; L rows a head in data and meta."""
    i = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.program_id(1).to(tl.int64)
    b, h = row // Hkv, row % Hkv
    kept = i < T
    token = i.to(tl.int64)
    if HAS_SLOTS:
        token = tl.load(slots + b * stride_slots + i, mask=kept, other=0).to(tl.int64)
        token = tl.where(token < 0, token + L, token)  # as indexing counts
        kept &= (token >= 0) & (token < L)
    pack_tile(
        k + b * stride_kb + h * stride_kh + token * stride_kt,
        data + (row * L + token) * COLUMNS,
        meta + (row * L + token) * META,
        dims + h * W, centre + h * W, spread + h * W, kept, stride_kd,
        W, HALF, HALF_P, FMT, LIMIT,
    )  # fmt: skip


def bytes_view(data: Tensor) -> Tensor:
    """fp8 data as bytes: kernels read them natively or decode them, as the GPU can."""
    return data.view(torch.uint8) if data.dtype == torch.float8_e4m3fn else data


def pack_sizes(W: int, fmt: str) -> dict[str, int | float | str]:
    """The compile-time arguments of ``pack_tile``."""
    half = (W + 1) // 2
    return {"W": W, "HALF": half, "HALF_P": power_of_2(half), "FMT": fmt, "LIMIT": INFO[fmt].limit}


def _launch(
    data: Tensor, meta: Tensor, k: Tensor, slots: Tensor | None, dims: Tensor, centre: Tensor, spread: Tensor, fmt: str
) -> None:
    B, Hkv, L, columns = data.shape
    T = L if slots is None else slots.shape[-1]
    block = 1 if T == 1 else 32
    with on_device(k):
        pack_kernel[(triton.cdiv(T, block), B * Hkv)](
            k, bytes_view(data), meta, slots, dims, centre, spread,
            *k.stride(), 0 if slots is None or slots.dim() == 1 else slots.stride(0),
            T, L, Hkv,
            HAS_SLOTS=slots is not None, COLUMNS=columns, META=meta.shape[3], BLOCK_T=block, num_warps=4 if T > 1 else 1,
            **pack_sizes(dims.shape[1], fmt),
        )  # fmt: skip


def pack(k: Tensor, dims: Tensor, centre: Tensor, spread: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """``reference.pack`` as a kernel."""
    check_format(fmt)
    (shape, dtype), (meta_shape, meta_dtype) = fc_cache_spec(k.shape[0], k.shape[1], k.shape[2], dims.shape[1], fmt)
    data = torch.empty(shape, dtype=dtype, device=k.device)
    meta = torch.empty(meta_shape, dtype=meta_dtype, device=k.device)
    _launch(data, meta, k, None, dims.contiguous(), centre.contiguous(), spread.contiguous(), fmt)
    return data, meta


def pack_rows_(
    data: Tensor, meta: Tensor, k: Tensor, slots: Tensor, dims: Tensor, centre: Tensor, spread: Tensor, fmt: str
) -> None:
    """``reference.pack_rows_`` as a kernel; ``data`` and ``meta`` must be contiguous."""
    check_format(fmt)
    if not (data.is_contiguous() and meta.is_contiguous()):
        raise ValueError("the packed FC cache must be contiguous")
    _launch(
        data, meta, k, slots.contiguous(), dims.contiguous(), centre.contiguous(), spread.contiguous(), fmt
    )  # fmt: skip
