"""One decode step in float64 NumPy, written from the definitions and sharing no code with the package: what is right.

Dimension letters: ``fasa_compile/sites.py``. A step is a ``steps.Case``. Only what the specification fixes bit for bit (the codes of
a packed key, the rounded query) is computed in float32, by NumPy and by plain casts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from fasa_compile.testing.steps import Case

Array = NDArray[Any]

_LIMITS = {"fp32": 2.0**127 * (2 - 2.0**-7), "bf16": 2.0**127 * (2 - 2.0**-7), "fp16": 65504.0, "fp8": 448.0}
_CASTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}


def array(x: Tensor) -> Array:
    """A tensor of any floating dtype as float64, exactly."""
    return x.detach().cpu().double().numpy()


def anywhere(x: Array, axis: int) -> Array:
    """Whether any entry along ``axis`` is true."""
    return np.asarray(x.any(axis))


def packed(k: Tensor, dims: Tensor, centre: Tensor, spread: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """``(data, meta)`` of keys ``k [B, Hkv, L, D]``, a head at a time: the bytes that a packed FC cache must hold."""
    rows = []
    for h in range(k.shape[1]):
        with np.errstate(all="ignore"):
            chosen = k[:, h].float().cpu().numpy()[..., dims[h].long().cpu().numpy()]  # [B, L, W]
            x = (chosen - centre[h].cpu().numpy()) / spread[h].cpu().numpy()
        x = np.where(np.isnan(x), np.float32(0), x)
        limit = np.float32(_LIMITS.get(fmt, 65504.0))
        x = np.clip(x, -limit, limit).astype(np.float32)
        if fmt in _CASTS:
            rows.append((torch.from_numpy(x).to(_CASTS[fmt]), torch.empty(*x.shape[:-1], 0, dtype=torch.float16)))
            continue
        bits = 8 if fmt == "int8" else 4
        low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
        scale = ((high - low) / np.float32(2**bits - 1)).astype(np.float16)
        scale = np.where(scale == 0, np.float16(1), scale)
        zero = low.astype(np.float16)
        codes = np.clip(np.rint((x - zero.astype(np.float32)) / scale.astype(np.float32)), 0, 2**bits - 1)
        meta = torch.from_numpy(np.concatenate([scale, zero], -1))
        if fmt == "int8":
            rows.append((torch.from_numpy((codes - 128).astype(np.int8)), meta))
        else:
            half = codes.shape[-1] // 2
            nibbles = codes.astype(np.uint8)
            rows.append((torch.from_numpy(nibbles[..., :half] + 16 * nibbles[..., half:]), meta))
    return torch.stack([data for data, _ in rows], 1), torch.stack([meta for _, meta in rows], 1)


def unpacked(data: Tensor, meta: Tensor, fmt: str) -> Array:
    """What a packed FC cache stores, ``[B, Hkv, L, W]``."""
    if fmt in _CASTS:
        return array(data)
    if fmt == "int8":
        codes = data.cpu().numpy().astype(np.float64) + 128
    else:
        byte = data.cpu().numpy().astype(np.int64)
        codes = np.concatenate([byte % 16, byte // 16], -1).astype(np.float64)
    m = array(meta)
    return codes * m[..., :1] + m[..., 1:]


def visible(mask: Tensor | None, B: int, Hq: int, L: int) -> tuple[Array, Array]:
    """``(allowed, bias)``, bool and float64 ``[B, Hq, L]``."""
    if mask is None:
        return np.ones((B, Hq, L), bool), np.zeros((B, Hq, L))
    full = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape)).expand(B, Hq, 1, L)[:, :, 0]
    if mask.dtype == torch.bool:
        return full.cpu().numpy().copy(), np.zeros((B, Hq, L))
    values = array(full)
    allowed = values > torch.finfo(mask.dtype).min
    return allowed, np.where(allowed, values, 0.0)


def bounds(mask: Tensor, B: int, Hq: int, L: int) -> Array:
    """First valid token and one past the last, over all heads, ``[B, 2]``; (0, 0) where there is none."""
    allowed = anywhere(visible(mask, B, Hq, L)[0], 1)
    found = [np.flatnonzero(row) for row in allowed]
    return np.array([(t[0], t[-1] + 1) if len(t) else (0, 0) for t in found])


def _rounded_query(y: Array, fmt: str) -> tuple[Array, Array]:
    """``(values, step)`` of queries ``y [..., W]`` float32 as the format's dot takes them; both float64."""
    if fmt == "fp32":
        return y.astype(np.float64), np.ones((*y.shape[:-1], 1))
    largest = np.abs(y).max(-1, keepdims=True)
    largest = np.where(largest == 0, np.float32(1), largest)
    step = largest / np.float32({"fp8": 448, "int8": 127, "int4": 127}.get(fmt, 1))
    over = (y / step).astype(np.float32)
    if fmt in ("int8", "int4"):
        rounded = np.clip(np.rint(over), -127, 127)
    else:
        rounded = array(torch.from_numpy(np.clip(over, -_LIMITS[fmt], _LIMITS[fmt])).to(_CASTS[fmt]))
    return rounded.astype(np.float64), step.astype(np.float64)


def scores(case: Case) -> Array:
    """Partial scores of every token, softcap and additive mask applied, ``[B, Hq, L]``."""
    B, Hq, _, _ = case.q.shape
    Hkv, L = case.k.shape[1:3]
    G = Hq // Hkv
    data, meta, dims, _, spread = case.cache
    out = np.zeros((B, Hq, L))
    stored = None if data is None or meta is None else unpacked(data, meta, case.how["fmt"])
    for h in range(Hkv):
        q = case.q[:, h * G : h * G + G, 0].float().cpu().numpy()  # [B, G, D]
        if stored is None:
            with np.errstate(all="ignore"):
                out[:, h * G : h * G + G] = q.astype(np.float64) @ array(case.k)[:, h].swapaxes(1, 2)
            continue
        assert dims is not None and spread is not None
        y = q[..., dims[h].long().cpu().numpy()] * spread[h].cpu().numpy()
        rounded, step = _rounded_query(y, case.how["fmt"])
        out[:, h * G : h * G + G] = step * (rounded @ stored[:, h].swapaxes(1, 2))
    out *= case.how["scale"]
    if case.how["softcap"]:
        out = case.how["softcap"] * np.tanh(out / case.how["softcap"])
    return out + visible(case.mask, B, Hq, L)[1]


def _along_slopes(case: Case) -> Array:
    """What the affine normaliser takes from each head beyond ``norm``, ``[B, Hq]``."""
    _, _, dims, _, spread = case.cache
    G = case.q.shape[1] // case.k.shape[1]
    out = np.zeros(case.q.shape[:2])
    if dims is not None and spread is not None:
        for head in range(out.shape[1]):
            h = head // G
            y = array(case.q)[:, head, 0][:, dims[h].long().cpu().numpy()] * array(spread)[h]
            out[:, head] = case.how["scale"] * (y @ array(case.how["slopes"])[head])
    return out


def keys(case: Case) -> Array:
    """The key by which tokens are ranked, ``[B, Hkv, L]``: +inf for forced tokens, -inf for those that no head may see."""
    B, Hq, _, _ = case.q.shape
    Hkv, L = case.k.shape[1:3]
    allowed, _ = visible(case.mask, B, Hq, L)
    s = np.where(allowed, scores(case), -np.inf)
    with np.errstate(all="ignore"):
        if case.how["reduction"] == "softmax_sum":
            top = s.max(-1, keepdims=True)
            top = np.where(np.isfinite(top), top, 0)
            s = s - (top + np.log(np.exp(s - top).sum(-1, keepdims=True)))
        elif case.norm is not None:
            s = s - array(case.norm)[None, :, None]
        if case.how["reduction"] == "affine" and case.how["slopes"] is not None:
            s = s - _along_slopes(case)[..., None]
        s = np.where(allowed, s, -np.inf).reshape(B, Hkv, Hq // Hkv, L)
        best = s.max(2)
        if case.how["reduction"] == "max":
            key = best
        else:
            shift = np.where(np.isfinite(best), best, 0)
            key = shift + np.log(np.exp(s - shift[:, :, None]).sum(2))
    seen = anywhere(allowed.reshape(B, Hkv, Hq // Hkv, L), 2)
    key = np.where(seen, key, -np.inf)
    shared = anywhere(allowed, 1)
    for b in range(B):
        tokens = np.flatnonzero(shared[b])
        if len(tokens):
            t = np.arange(L)
            forced = (t < tokens[0] + case.how["n_sink"]) | (t > tokens[-1] - case.how["n_recent"])
            key[b] = np.where(forced & seen[b], np.inf, key[b])
    return key


def attention(case: Case, among: Array | None = None) -> Array:
    """Exact attention over the tokens ``among [B, Hkv, L]`` (all of them by default), ``[B, Hq, Dv]``."""
    B, Hq, _, _ = case.q.shape
    Hkv, L = case.k.shape[1:3]
    G = Hq // Hkv
    allowed, bias = visible(case.mask, B, Hq, L)
    q, k, v = array(case.q)[:, :, 0], array(case.k), array(case.v)
    out = np.zeros((B, Hq, v.shape[3]))
    for b in range(B):
        for n in range(Hq):
            here = allowed[b, n] if among is None else allowed[b, n] & among[b, n // G]
            t = np.flatnonzero(here)
            s = case.how["scale"] * (k[b, n // G][t] @ q[b, n])
            if case.how["softcap"]:
                s = case.how["softcap"] * np.tanh(s / case.how["softcap"])
            s = s + bias[b, n][t]
            sink = None if case.how["sinks"] is None else float(array(case.how["sinks"])[n])
            if not len(t):
                continue
            top = max(s.max(), -np.inf if sink is None else sink)
            p = np.exp(s - top)
            out[b, n] = (p / (p.sum() + (0 if sink is None else np.exp(sink - top)))) @ v[b, n // G][t]
    return out
