"""The hot buffer: rows of K and V that were selected lately, kept on the GPU while all rows lie in host memory (FASA-M).

A row of the step's grid (a KV head of a sequence) has ``parts`` programs, each with tokens of its own (runs of 32, dealt in turn), and
each part has ``slots`` hot slots of its own that nobody else touches: nothing races, nothing waits. What is kept:

=========  =====================================  =====================================================================
hot        ``[B, Hkv, parts, slots, D + Dv]``     K and V of a token side by side, K's dtype
tags       ``[B, Hkv, parts, slots]`` int32       1 + the token whose row a slot holds; 0: none
ledger     ``[B, Hkv, parts, 4]`` int32           the slot to give away next, and counts: tokens attended, fetched from the
                                                  host, and of these without a slot
=========  =====================================  =====================================================================

All zeros is an empty buffer. In a step, tokens found in their part's tags are hits. The others are fetched, in ascending order, and
take the slots of this part that were not hit, in order from the one that is next (a clock); where these run out the row is fetched and
not kept. Slots of tokens that the step wrote to the cache count as empty. A result never depends on what was hot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .formats import Spec

RUN = 32  # consecutive tokens that one part gets at a time

#: Columns of the ledger.
NEXT, ATTENDED, FETCHED, UNKEPT = range(4)


@dataclass(frozen=True)
class HotSize:
    """``parts`` programs of a KV head and how many ``slots`` each has."""

    parts: int
    slots: int

    @property
    def tokens(self) -> int:
        return self.parts * self.slots


def fac_parts(rows: int, n_fac: int, sms: int) -> int:
    """Programs that attention over the selected tokens is split into for each KV head: 4 a multiprocessor, 32 tokens each."""
    return max(1, min(4 * sms // rows, -(-n_fac // RUN), 64))


def hot_spec(B: Any, Hkv: Any, size: HotSize, D: int, Dv: int, dtype: torch.dtype) -> tuple[Spec, Spec, Spec]:
    """Shape and dtype of ``hot``, ``tags`` and ``ledger``."""
    parts = (B, Hkv, size.parts)
    return (
        ((*parts, size.slots, D + Dv), dtype),
        ((*parts, size.slots), torch.int32),
        ((*parts, 4), torch.int32),
    )


def hot_bytes(B: int, Hkv: int, size: HotSize, D: int, Dv: int, dtype: torch.dtype) -> int:
    """Bytes of the three."""
    rows = B * Hkv * size.parts
    return rows * (size.slots * ((D + Dv) * dtype.itemsize + 4) + 16)


def rows_through_(
    hot: Tensor, tags: Tensor, ledger: Tensor, k: Tensor, v: Tensor, token: Tensor, taken: Tensor, first: Tensor,
    written: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """K and V rows of the selected tokens, read through the hot buffer, which is brought up to date in place.

    ``token`` int64 ``[B, Hkv, N]`` in ``[0, L)``, distinct where ``taken`` (bool) is true, in any order; ``first [B or 1]``: first valid token;
    ``written``: rows of the cache that this step wrote, as ``pack_rows_``'s ``slots``. Returns ``k [B, Hkv, N, D]`` and ``v [B, Hkv, N, Dv]``;
    rows that are not taken are some row. Plain torch, traceable: the specification of the kernel.
    """
    B, Hkv, N = token.shape
    L, D, Dv = k.shape[2], k.shape[3], v.shape[3]
    parts, slots = tags.shape[2], tags.shape[3]
    order = torch.where(taken, token, L + token).argsort(-1)
    mine, ok = token.gather(2, order), taken.gather(2, order)
    part = (mine - first.reshape(-1, 1, 1) // 16 * 16) // RUN % parts

    held = tags
    if written is not None:
        rows = torch.where(written < 0, written + L, written).reshape(-1, 1, 1, 1, written.shape[-1])
        held = torch.where((held[..., None] == rows + 1).any(-1), 0, held)
    of_part = part[..., None] == torch.arange(parts, device=token.device)  # [B, Hkv, N, P]
    same = held[:, :, None] == (mine + 1)[..., None, None]  # [B, Hkv, N, P, C]
    same = same & (of_part & ok[..., None])[..., None]
    used = same.any(2)
    hit = same.flatten(3).any(-1)

    # Which unused slot is number how many of its part, counted from the next one to give away.
    slot = torch.arange(slots, device=token.device)
    hand = ledger[..., NEXT : NEXT + 1]
    free, wraps = ~used, slot < hand
    number = free.cumsum(-1) - 1
    number = torch.where(
        wraps, number + (free & ~wraps).sum(-1, keepdim=True), number - (free & wraps).sum(-1, keepdim=True)
    )
    miss = of_part & (ok & ~hit)[..., None]  # [B, Hkv, N, P]
    want = miss.cumsum(2) - 1
    given = miss[..., None] & free[:, :, None] & (number[:, :, None] == want[..., None])  # [B, Hkv, N, P, C]

    index = mine[..., None]
    row = torch.cat(
        [k.gather(2, index.expand(B, Hkv, N, D)), v.gather(2, index.expand(B, Hkv, N, Dv))], dim=-1
    )  # what the kernel reads of it are the misses
    receives = given.any(2)  # [B, Hkv, P, C]
    source = given.int().argmax(2)  # which of the N a slot receives
    flat = source.flatten(2)[..., None].expand(B, Hkv, parts * slots, D + Dv)
    hot.copy_(torch.where(receives[..., None], row.gather(2, flat).reshape(hot.shape), hot))
    tags.copy_(torch.where(receives, mine.gather(2, source.flatten(2)).reshape(tags.shape) + 1, held))
    misses, kept = miss.sum(2), receives.sum(-1)
    last = (free & (number == (kept - 1)[..., None])).int().argmax(-1)
    counts = torch.stack([(of_part & ok[..., None]).sum(2), misses, misses - kept], dim=-1)
    ledger.copy_(
        torch.cat(
            [torch.where(kept > 0, (last + 1) % slots, ledger[..., NEXT])[..., None], ledger[..., 1:] + counts], dim=-1
        )
    )

    place = (same | given).flatten(3)
    at = place.int().argmax(-1)[..., None].expand(B, Hkv, N, D + Dv)
    row = torch.where(place.any(-1, keepdim=True), hot.flatten(2, 3).gather(2, at), row)
    row = row.gather(2, order.argsort(-1)[..., None].expand(B, Hkv, N, D + Dv))
    return row[..., :D], row[..., D:]
