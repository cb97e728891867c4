"""How the dominant dims of a key are stored in the packed FC cache: shapes, dtypes and ranges of each format.

The packed FC cache of a site is two tensors (dimension letters: ``fasa_compile/sites.py``):

=========  ==============================  ======================================================
format     data                            meta
=========  ==============================  ======================================================
fp32       ``[B, Hkv, L, W]`` float32      ``[B, Hkv, L, 0]`` float16
bf16       ``[B, Hkv, L, W]`` bfloat16     ``[B, Hkv, L, 0]`` float16
fp16       ``[B, Hkv, L, W]`` float16      ``[B, Hkv, L, 0]`` float16
fp8        ``[B, Hkv, L, W]`` e4m3fn       ``[B, Hkv, L, 0]`` float16
int8       ``[B, Hkv, L, W]`` int8         ``[B, Hkv, L, 2]`` float16: scale and zero of a token
int4       ``[B, Hkv, L, W/2]`` uint8      ``[B, Hkv, L, 2]`` float16: scale and zero of a token
=========  ==============================  ======================================================

What is stored is ``x = (k[dims] - centre) / spread``. The integer formats are asymmetric per token and KV head:
``x ~ q * scale + zero`` with ``q`` in ``[0, 2^bits - 1]``. int8 stores ``q - 128``; byte j of int4 holds dim j in its low
nibble and dim j + W/2 in its high nibble.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch

FCFormat = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4"]
FORMATS: tuple[str, ...] = get_args(FCFormat)

Reduction = Literal["static", "affine", "softmax_sum", "max"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)

Spec = tuple[tuple[Any, ...], torch.dtype]

#: What a KV head of a sequence remembers from step to step to predict its threshold (``sparse_decode``'s ``hint``, float32): the level at
#: which it was found and the width of a bin around it (base-2 log units of the keys), by how much the level rises where the query's size
#: does by one, and that size (base-2 log of the query's length).
HINT_COLUMNS = 4


@dataclass(frozen=True)
class FormatInfo:
    """What a format needs to know of itself.

    ``limit``: stored values are clamped to ``[-limit, limit]`` (so that a conversion never yields inf or NaN); for the
    integer formats it bounds the fp16 scale and zero. ``bits``: width of the integer codes, 0 for floating formats.
    """

    dtype: torch.dtype
    limit: float
    bits: int = 0
    dims_per_element: int = 1

    @property
    def meta_columns(self) -> int:
        return 2 if self.bits else 0


_BF16_MAX = torch.finfo(torch.bfloat16).max
_FP16_MAX = torch.finfo(torch.float16).max

INFO: dict[str, FormatInfo] = {
    # The largest bfloat16 bounds fp32 too: differences of clamped values, and their squares' sums, stay away from inf.
    "fp32": FormatInfo(torch.float32, _BF16_MAX),
    "bf16": FormatInfo(torch.bfloat16, _BF16_MAX),
    "fp16": FormatInfo(torch.float16, _FP16_MAX),
    "fp8": FormatInfo(torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max),
    "int8": FormatInfo(torch.int8, _FP16_MAX, bits=8),
    "int4": FormatInfo(torch.uint8, _FP16_MAX, bits=4, dims_per_element=2),
}


def check_format(fmt: str) -> FCFormat:
    """``fmt`` itself; raises ``ValueError`` naming the choices when it is no format."""
    if fmt not in INFO:
        raise ValueError(f"unknown FC cache format {fmt!r}; choose one of {', '.join(FORMATS)}")
    return cast(FCFormat, fmt)


def fc_cache_spec(B: Any, Hkv: Any, L: Any, W: int, fmt: str) -> tuple[Spec, Spec]:
    """Shape and dtype of the ``data`` and the ``meta`` tensor of a site's packed FC cache.

    ``B``, ``Hkv`` and ``L`` may be ``SymInt``; ``W`` is the number of dominant dims a KV head keeps (``2 * n_tip``).
    Raises ``ValueError`` for an unknown format or, in int4, an odd ``W``.
    """
    info = INFO[check_format(fmt)]
    if W % info.dims_per_element:
        raise ValueError(f"{fmt} packs dims in pairs: expected an even number of dominant dims, got {W}")
    data: Spec = ((B, Hkv, L, W // info.dims_per_element), info.dtype)
    meta: Spec = ((B, Hkv, L, info.meta_columns), torch.float16)
    return data, meta


def bytes_per_token(W: int, fmt: str) -> int:
    """Bytes the packed FC cache holds (and TIP reads) for one token of one KV head."""
    ((*_, columns), dtype), ((*_, meta), meta_dtype) = fc_cache_spec(1, 1, 1, W, fmt)
    return columns * dtype.itemsize + meta * meta_dtype.itemsize
