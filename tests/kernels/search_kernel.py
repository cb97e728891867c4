"""A kernel that does nothing but search a row for its threshold."""

from __future__ import annotations

import triton
import triton.language as tl

from fasa_compile.triton_kernels.attend import find_threshold


@triton.jit
def search(keys, levels, index, n_fac, first, stop, guess_lo, guess_hi, EXACT: tl.constexpr):
    high, low, below = find_threshold(keys, n_fac, first, stop, guess_lo, guess_hi, 1024, EXACT)
    tl.store(levels, high)
    tl.store(levels + 1, low)
    tl.store(index, below)
