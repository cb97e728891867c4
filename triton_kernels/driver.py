"""CUDA's driver, for the few calls that PyTorch does not offer. Needs no triton."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def driver() -> ctypes.CDLL:
    """The loaded library; ``OSError`` where there is none. Its calls need a current context, which PyTorch's first use of a GPU makes."""
    return ctypes.CDLL("libcuda.so.1")
