"""Kernels that do nothing but search a row for its threshold, and say how the bins' width and the level's slope change."""

from __future__ import annotations

import triton
import triton.language as tl

from fasa_compile.triton_kernels.attend import find_threshold, learned_slope, width_factor


@triton.jit
def search(keys, levels, index, n_fac, first, stop, guess_lo, guess_hi, EXACT: tl.constexpr):
    high, low, below = find_threshold(keys, n_fac, first, stop, guess_lo, guess_hi, 1024, EXACT)
    tl.store(levels, high)
    tl.store(levels + 1, low)
    tl.store(index, below)


@triton.jit
def factors(cells, moves, out, n_fac, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + i, width_factor(tl.load(cells + i), tl.load(moves + i), n_fac))


@triton.jit
def slopes(slope, growth, error, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, learned_slope(tl.load(slope + i), tl.load(growth + i), tl.load(error + i)))
