"""Decode attention over a KV cache whose tokens lie on several processes, in plain torch and functional collectives.

Process ``rank`` of ``ranks`` holds the tokens ``[rank * rows, (rank + 1) * rows)`` of L = ranks * rows: rows ``[0, rows)`` of its
buffers (what they have beyond is not read). All processes call with the same queries and get the same result, to the bit: what is
exchanged is gathered, in the order of the ranks, and each process computes the rest from that alone. In a step and layer, with
``all_gather`` alone and fp32:

1. ``softmax_sum`` only: each process's log-sum-exp of its scores, ``B * Hq`` numbers, since a head's scores are taken relative to that of
   all tokens;
2. the keys of each process's best ``min(n_fac, rows)`` tokens, as many numbers for each KV head, best first. The ``n_fac`` best of all are
   among them. Which of these are a process's own follows without their positions: equal keys go to the lower position, processes
   are in the order of positions, so the chosen ones of a process are always a first part of its list;
3. each process's attention over what it has of them, ``G * Dv`` numbers and a log-sum-exp for each head, merged by these.

Thresholds found by counting (an all-reduce of a histogram for each 8 of 32 bits) would send fewer bytes from three processes on at n_fac
1024, but wait four times for the slowest; at these sizes waiting is what an exchange costs (``docs/distributed.md``).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from . import reference
from .formats import REDUCTIONS, check_format
from .tokens import four_dims

if dist.is_available():
    import torch.distributed._functional_collectives  # registers what traces of the collectives need


def all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """``x`` of every process of the group of that name, ``[ranks, *x.shape]``."""
    c10d = torch.ops._c10d_functional
    both = c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), ranks, group))
    return both.view(ranks, *x.shape)


def gather_sequence(own: Tensor, rows: int, rank: int, ranks: int, group: str) -> Tensor:
    """``[B, Hkv, ranks * rows, D]``: the first ``rows`` of every process's ``own [B, Hkv, rows or more, D]``."""
    B, Hkv, _, D = own.shape
    return all_gather(own[:, :, :rows], ranks, group).permute(1, 2, 0, 3, 4).reshape(B, Hkv, ranks * rows, D)


def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    data: Tensor | None,
    meta: Tensor | None,
    dims: Tensor | None,
    centre: Tensor | None,
    spread: Tensor | None,
    norm: Tensor | None,
    mask: Tensor | None = None,
    bounds: Tensor | None = None,
    *,
    rows: int,
    rank: int,
    ranks: int,
    group: str,
    scale: float,
    n_fac: int,
    n_sink: int = 0,
    n_recent: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    fmt: str = "int4",
    reduction: str = "static",
    slopes: Tensor | None = None,
) -> Tensor:
    """``reference.sparse_decode`` over the tokens of all processes, on each of them: the same tokens are selected and attended to.

    ``k``, ``v``, ``data`` and ``meta`` are this process's, ``[B, Hkv, rows or more, *]``; ``q``, ``mask`` (broadcastable to ``[B, Hq, 1,
    ranks * rows]``), ``bounds``, the profile's constants and the options are the same everywhere. ``group``: the name of the process group
    (``ProcessGroup.group_name``). Raises as the reference does, and what the group raises when a process is lost.
    """
    check_format(fmt)
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown group reduction {reduction!r}; choose one of {', '.join(REDUCTIONS)}")
    if n_fac < 1 or n_sink < 0 or n_recent < 0 or n_sink + n_recent > n_fac:
        raise ValueError(f"expected n_sink + n_recent <= n_fac, n_fac >= 1; got {n_sink} + {n_recent}, {n_fac}")
    B, Hq, _, D = q.shape
    Hkv = k.shape[1]
    G = Hq // Hkv
    k, v = k[:, :, :rows], v[:, :, :rows]
    if data is not None and meta is not None:
        data, meta = data[:, :, :rows], meta[:, :, :rows]
    allowed, bias, bounds = _own_mask(mask, bounds, B, Hkv, G, rows, rank, ranks, q.device)
    qg = q.reshape(B, Hkv, G, D).float()

    # TIP, on the tokens that are here.
    s = reference.scores(qg, k, data, meta, dims, spread, bias, scale, softcap, fmt)  # [B, Hkv, G, rows]
    if reduction == "softmax_sum":
        own = reference.guarded_logsumexp(reference.allowed_scores(s, allowed), -1)
        level: Tensor | None = reference.guarded_logsumexp(all_gather(own, ranks, group), 0)[0]
        reduction = "static"
    else:
        level = reference.levels(qg, dims, spread, norm, slopes, scale, reduction)
    key = reference.forced(reference.group_key(s, allowed, level, reduction), bounds, n_sink, n_recent)

    # The best of all.
    n = min(n_fac, rows)
    index = reference.best(key, n)  # [B, Hkv, n], best first
    inside, index = index < rows, index.clamp(max=rows - 1)
    candidates = torch.where(inside, key.gather(2, index), -torch.inf)
    everyones = all_gather(candidates, ranks, group).permute(1, 2, 0, 3).reshape(B, Hkv, ranks * n)
    chosen = reference.best(everyones, n_fac)  # [B, Hkv, n_fac], process p's are [p * n, (p + 1) * n)
    count = ((chosen >= rank * n) & (chosen < (rank + 1) * n)).sum(-1, keepdim=True)
    taken = (torch.arange(n, device=q.device) < count) & (candidates > -torch.inf)

    # FAC, on those of them that are here.
    kept_k = k.gather(2, index[..., None].expand(B, Hkv, n, D))
    kept_v = v.gather(2, index[..., None].expand(B, Hkv, n, v.shape[3]))
    by_head = index[:, :, None, :].expand(B, Hkv, G, n)
    kept_allowed = allowed.expand(B, Hkv, G, rows).gather(3, by_head) & taken[:, :, None, :]
    kept_bias = None if bias is None else bias.expand(B, Hkv, G, rows).gather(3, by_head)
    part = reference.partial(qg, kept_k.float(), kept_v.float(), kept_allowed, kept_bias, scale, softcap)
    return _merged(*part, sinks, ranks, group).to(q.dtype)


def dense_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bounds: Tensor | None = None,
    *,
    rows: int,
    rank: int,
    ranks: int,
    group: str,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Exact attention of one query token to the tokens of all processes: step 3 alone. Arguments and result as ``sparse_decode``'s."""
    B, Hq, _, D = q.shape
    Hkv = k.shape[1]
    G = Hq // Hkv
    allowed, bias, _ = _own_mask(mask, bounds, B, Hkv, G, rows, rank, ranks, q.device)
    qg = q.reshape(B, Hkv, G, D).float()
    part = reference.partial(qg, k[:, :, :rows].float(), v[:, :, :rows].float(), allowed, bias, scale, softcap)
    return _merged(*part, sinks, ranks, group).to(q.dtype)


def _own_mask(
    mask: Tensor | None,
    bounds: Tensor | None,
    B: int,
    Hkv: int,
    G: int,
    rows: int,
    rank: int,
    ranks: int,
    device: torch.device,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """``reference.per_head_mask`` of this process's tokens, from the mask of all. The bounds count from its first token: they may lie
    outside of its rows."""
    first = rank * rows
    if bounds is None and mask is not None:
        bounds = reference.mask_bounds(mask, ranks * rows)
    elif bounds is None:
        bounds = torch.stack([torch.full((1,), n, dtype=torch.int32, device=device) for n in (0, ranks * rows)], dim=-1)
    if mask is not None:
        mask = four_dims(mask)
        mask = mask if mask.shape[3] == 1 else mask[..., first : first + rows]
    return reference.per_head_mask(mask, bounds - first, B, Hkv, G, rows, device)


def _merged(out: Tensor, total: Tensor, top: Tensor, sinks: Tensor | None, ranks: int, group: str) -> Tensor:
    """Attention ``[B, Hq, 1, Dv]`` fp32 of all processes' ``reference.partial``."""
    B, Hkv, G, Dv = out.shape
    lse = top + total.log()  # -inf without a token
    own = torch.cat([out / torch.where(total == 0, 1.0, total), lse], dim=-1)
    everyones = all_gather(own, ranks, group)  # [ranks, B, Hkv, G, Dv + 1]
    out, lse = everyones[..., :Dv], everyones[..., Dv:]
    top = lse.amax(0)
    sink = None if sinks is None else sinks.float().reshape(1, Hkv, G, 1)
    if sink is not None:
        top = torch.maximum(top, sink)
    top = torch.where(top == -torch.inf, 0.0, top)
    weight = (lse - top).exp()
    total = weight.sum(0)
    if sink is not None:
        total = total + (sink - top).exp()
    # A process whose own sum is NaN or inf makes the result so, as it would in one process.
    return ((weight * out).sum(0) / torch.where(total == 0, 1.0, total)).reshape(B, Hkv * G, 1, Dv)
