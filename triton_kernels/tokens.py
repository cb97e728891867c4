"""A step of several new tokens per sequence, as the rows of a batch.

Each of the S query tokens selects for itself and has a mask of its own, so row ``b * S + s`` of what follows is token s of sequence
b, with one query each. Keys and values are not repeated: whoever reads them asks for sequence ``row // S``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def as_rows(q: Tensor, mask: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``q [B, Hq, S, D]`` as ``[B * S, Hq, 1, D]``, with ``mask`` (broadcastable to ``[B, Hq, S, L]``) as ``[B * S, Hq or 1, 1, L]`` and
    ``bounds`` (of that mask's rows, or ``[B or 1, 2]`` without one) as ``[B * S, 2]``. One token: all as they are.

    Views, unless the mask is shared by sequences or tokens that are more than one.
    """
    B, _, S, _ = q.shape
    if S == 1:
        return q, mask, bounds
    tokens: Any = 1
    if mask is not None:
        mask = four_dims(mask)
        tokens = mask.shape[2]
        mask = token_rows(mask.expand(B, mask.shape[1], S, mask.shape[3]))
    if bounds is not None:
        bounds = bounds.reshape(-1, tokens, 2).expand(B, S, 2).reshape(B * S, 2)
    return token_rows(q), mask, bounds


def token_rows(x: Tensor) -> Tensor:
    """``[B, H, S, X]`` as ``[B * S, H, 1, X]``."""
    B, H, S, X = x.shape
    return x if S == 1 else x.transpose(1, 2).reshape(B * S, H, 1, X)


def from_rows(out: Tensor, S: Any) -> Tensor:
    """``[B * S, Hq, 1, Dv]`` as ``[B, Hq, S, Dv]``: a view."""
    return out if S == 1 else out.view(-1, S, out.shape[1], out.shape[3]).transpose(1, 2)


def four_dims(mask: Tensor) -> Tensor:
    """A mask with the leading dims that broadcasting lets it leave out."""
    return mask.reshape((1,) * (4 - mask.dim()) + mask.shape)


def by_sequence(x: Tensor, S: Any) -> Tensor:
    """``[B * S, Hkv, N, X]`` as ``[B, Hkv, S * N, X]``: all that one sequence's tokens ask of a KV head."""
    if S == 1:
        return x
    _, Hkv, N, X = x.shape
    return x.reshape(-1, S, Hkv, N, X).transpose(1, 2).reshape(-1, Hkv, S * N, X)


def by_row(x: Tensor, S: Any) -> Tensor:
    """What ``by_sequence`` made, undone: ``[B, Hkv, S * N, X]`` as ``[B * S, Hkv, N, X]``."""
    if S == 1:
        return x
    B, Hkv, N, X = x.shape
    return x.reshape(B, Hkv, S, N // S, X).transpose(1, 2).reshape(B * S, Hkv, N // S, X)
