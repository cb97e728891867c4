"""What engine "fragments" says in PTX, computed in numpy, so that Triton's interpreter can run it: each function takes and gives an element
for each thread of the program, as on a GPU. The fragments' places are those of the PTX ISA's sections on ``mma.m16n8k16`` and
``mma.m16n8k32``."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets launchers take the kernels' path for GPUs of compute capability 8.9, with these functions for PTX."""
    from fasa_compile.triton_kernels import dense_decode, fragments, launch, score, sparse_decode

    for module in (sparse_decode, dense_decode):
        monkeypatch.setattr(module, "device_of", lambda _: launch.Device(sms=4, capability=89, native=True))
    for name in ("_piece", "_multiply", "halves", "nibble_low", "nibble_high"):
        monkeypatch.setattr(fragments, name, globals()[name.strip("_")])
    monkeypatch.setattr(score, "_log_sum", log_sum)


def numbers(x: Any) -> np.ndarray:
    return x.handle.data


def tensor(x: np.ndarray, dtype: Any) -> Any:
    return tl.core.tensor(TensorHandle(x, dtype), tl.block_type(dtype, [len(x)]))


def piece(address: Any, there: Any, BYTES: int) -> tuple[Any, ...]:
    count = int(BYTES) // 4
    words = np.zeros((len(numbers(address)), count), np.int32)
    for thread in np.flatnonzero(numbers(there)):
        at = int(numbers(address)[thread])
        assert at % int(BYTES) == 0, "a GPU reads aligned pieces only"
        words[thread] = np.frombuffer(ctypes.string_at(at, int(BYTES)), np.int32)
    return tuple(tensor(words[:, i].copy(), tl.int32) for i in range(count))


def nibble_low(w: Any) -> Any:
    return tensor(numbers(w).astype(np.int32) & 0x0F0F0F0F, tl.int32)


def nibble_high(w: Any) -> Any:
    return tensor(numbers(w).astype(np.int32) >> 4 & 0x0F0F0F0F, tl.int32)


def halves(w: Any) -> tuple[Any, Any]:
    codes = torch.from_numpy(numbers(w).astype(np.int32).view(np.uint8)).view(torch.float8_e4m3fn)
    pairs = codes.half().numpy().view(np.int32).reshape(-1, 2)
    return tensor(pairs[:, 0].copy(), tl.int32), tensor(pairs[:, 1].copy(), tl.int32)


def _elements(words: np.ndarray, FMT: str) -> np.ndarray:
    """A warp's registers ``[32, N]`` as numbers ``[32, N, 4 or 2]``."""
    words = np.ascontiguousarray(words.astype(np.int32))
    if FMT in ("int4", "int8"):
        return words.view(np.int8).reshape(*words.shape, 4).astype(np.int64)
    halves = torch.from_numpy(words).view(torch.bfloat16 if FMT == "bf16" else torch.float16)
    return halves.float().numpy().reshape(*words.shape, 2)


def multiply(*operands: Any) -> tuple[Any, ...]:
    *registers, FMT = operands
    a, b, c = (np.stack([numbers(x) for x in part], -1) for part in (registers[:4], registers[4:6], registers[6:]))
    FMT = getattr(FMT, "value", FMT)
    out = np.empty_like(c)
    g, t = np.arange(32) // 4, np.arange(32) % 4
    for warp in range(len(a) // 32):
        own = slice(32 * warp, 32 * warp + 32)
        xa, xb = _elements(a[own], FMT), _elements(b[own], FMT)
        width = xa.shape[-1]  # of a register
        A, B = np.zeros((16, 8 * width), xa.dtype), np.zeros((8 * width, 8), xb.dtype)
        for i in range(width):
            k = t * width + i
            A[g, k], A[g + 8, k] = xa[:, 0, i], xa[:, 1, i]
            A[g, k + 4 * width], A[g + 8, k + 4 * width] = xa[:, 2, i], xa[:, 3, i]
            B[k, g], B[k + 4 * width, g] = xb[:, 0, i], xb[:, 1, i]
        C = A @ B
        got = np.stack([C[g, 2 * t], C[g, 2 * t + 1], C[g + 8, 2 * t], C[g + 8, 2 * t + 1]], -1)
        out[own] = got.astype(c.dtype) + c[own]
    kind = tl.int32 if FMT in ("int4", "int8") else tl.float32
    return tuple(tensor(out[:, i].copy(), kind) for i in range(4))


def log_sum(top: Any, total: Any, NATIVE: bool) -> Any:
    return top + tl.log2(tl.maximum(total, 1.1754943508222875e-38))
