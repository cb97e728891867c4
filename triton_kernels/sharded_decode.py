"""Decode attention over a KV cache whose tokens lie on several processes: what each computes, in kernels (``shard``) or in plain torch, and
functional collectives between.

Process ``rank`` of ``ranks`` holds the tokens ``[rank * rows, (rank + 1) * rows)`` of L = ranks * rows: rows ``[0, rows)`` of its
buffers (what they have beyond is not read). All processes call with the same queries and get the same result, to the bit: what is
exchanged is gathered, in the order of the ranks, and each process computes the rest from that alone. In a step and layer, with
``all_gather`` alone and fp32:

1. ``softmax_sum`` only: each process's log-sum-exp of its scores, ``B * Hq`` numbers, since a head's scores are taken relative to that of
   all tokens;
2. the keys of each process's best ``min(n_fac, rows)`` tokens (kernels may list up to 12 % more), ``candidate_width`` numbers for each
   KV head, in order of position. The ``n_fac`` best of all are among them. Equal keys go to the lower position: processes are in that order too, so the
   gathered lists tell all that is needed;
3. each process's attention over what it has of them, ``G * Dv`` numbers and a log-sum-exp for each head, merged by these.

Thresholds found by counting (an all-reduce of a histogram for each 8 of 32 bits) would send fewer bytes from three processes on at n_fac
1024, but wait four times for the slowest; at these sizes waiting is what an exchange costs (``docs/distributed.md``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import reference
from .formats import REDUCTIONS, check_format
from .tokens import four_dims

if dist.is_available():
    import torch.distributed._functional_collectives  # registers what traces of the collectives need


def candidate_width(n_fac: int, rows: int) -> int:
    """Length of a process's list of candidates: what the kernels may keep where they select ``n_fac`` of ``rows`` tokens, in fours."""
    return -(-min(reference.most_kept(n_fac), rows) // 4) * 4


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
    version: int | None = None,
    hint: Tensor | None = None,
) -> Tensor:
    """``reference.sparse_decode`` over the tokens of all processes, on each of them: the same tokens are selected and attended to.

    ``k``, ``v``, ``data`` and ``meta`` are this process's, ``[B, Hkv, rows or more, *]``; ``q``, ``mask`` (broadcastable to ``[B, Hq, 1,
    ranks * rows]``), ``bounds``, the profile's constants and the options are the same everywhere. ``group``: the name of the process group
    (``ProcessGroup.group_name``). ``version``: that of the kernels (``ops.KERNEL_VERSION``), on a GPU, with ``hint`` as in ``ops``, state of
    this process alone; None: plain torch. Raises as the reference does, and what the group
    raises when a process is lost.
    """
    check_format(fmt)
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown group reduction {reduction!r}; choose one of {', '.join(REDUCTIONS)}")
    if n_fac < 1 or n_sink < 0 or n_recent < 0 or n_sink + n_recent > n_fac:
        raise ValueError(f"expected n_sink + n_recent <= n_fac, n_fac >= 1; got {n_sink} + {n_recent}, {n_fac}")
    mask, bounds = own_mask(mask, bounds, rows, rank, ranks, q.device)
    scored = (q, k, data, meta, dims, spread)
    step, common = _parts(version)
    common |= {"scale": scale, "softcap": softcap}
    if reduction == "softmax_sum":
        own = step.shard_levels(*scored, mask, bounds, rows=rows, fmt=fmt, **common)
        norm = reference.guarded_logsumexp(all_gather(own, ranks, group), 0)[0]
        reduction = "static"
    listed, tokens = step.shard_candidates(
        *scored, norm, mask, bounds, hint, slopes, rows=rows, n_fac=n_fac, n_sink=n_sink, n_recent=n_recent, fmt=fmt,
        reduction=reduction, **common,
    )  # fmt: skip
    everyones = all_gather(listed, ranks, group).permute(1, 2, 0, 3).flatten(2)  # [B, Hkv, ranks * width]
    own = step.shard_attend(q, k, v, mask, everyones, tokens, rank=rank, n_fac=n_fac, **common)
    return merged(all_gather(own, ranks, group), sinks).to(q.dtype)


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
    version: int | None = None,
) -> Tensor:
    """Exact attention of one query token to the tokens of all processes: step 3 alone. Arguments and result as ``sparse_decode``'s."""
    mask, bounds = own_mask(mask, bounds, rows, rank, ranks, q.device)
    step, common = _parts(version)
    own = step.shard_dense(q, k[:, :, :rows], v[:, :, :rows], mask, bounds, scale=scale, softcap=softcap, **common)
    return merged(all_gather(own, ranks, group), sinks).to(q.dtype)


# ---- what one process computes, in plain torch: the specification of ``shard`` -----------------------------------------


def levels(
    q: Tensor,
    k: Tensor,
    data: Tensor | None,
    meta: Tensor | None,
    dims: Tensor | None,
    spread: Tensor | None,
    mask: Tensor | None,
    bounds: Tensor,
    *,
    rows: int,
    scale: float,
    softcap: float,
    fmt: str,
) -> Tensor:
    """Log-sum-exp of each query head's scores of the tokens that are here, fp32 ``[B, Hq]``, a very low number where there are none.
    Arguments as ``candidates``'s."""
    s, allowed, _ = _scores(q, k, data, meta, dims, spread, mask, bounds, rows, scale, softcap, fmt)
    return reference.guarded_logsumexp(reference.allowed_scores(s, allowed), -1).flatten(1)


def candidates(
    q: Tensor,
    k: Tensor,
    data: Tensor | None,
    meta: Tensor | None,
    dims: Tensor | None,
    spread: Tensor | None,
    norm: Tensor | None,
    mask: Tensor | None,
    bounds: Tensor,
    hint: Tensor | None = None,
    slopes: Tensor | None = None,
    *,
    rows: int,
    n_fac: int,
    n_sink: int,
    n_recent: int,
    scale: float,
    softcap: float,
    fmt: str,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """The best ``n_fac`` of the first ``rows`` tokens of ``k, data, meta [B, Hkv, L, *]``, in order of position: their keys, fp32 ``[B, Hkv,
    candidate_width(n_fac, rows)]``, -inf behind the last, and the tokens, int32.

    ``mask`` is these tokens', broadcastable to ``[B, Hq, 1, rows]``; ``bounds [B or 1, 2]`` those of all tokens of the sequence, counted from
    the first one here; ``norm [Hq]``, or ``[B, Hq]`` for each row of the step. Not for "softmax_sum": take the ``levels`` of all processes
    for ``norm``, and "static". ``hint`` is the kernels'. Other arguments as ``reference.sparse_decode``'s.
    """
    s, allowed, bounds = _scores(q, k, data, meta, dims, spread, mask, bounds, rows, scale, softcap, fmt)
    B, Hkv, G, _ = s.shape
    if norm is not None and norm.dim() == 2:
        level: Tensor | None = norm.view(B, Hkv, G, 1)
    else:
        level = reference.levels(q.reshape(B, Hkv, G, -1).float(), dims, spread, norm, slopes, scale, reduction)
    key = reference.forced(reference.group_key(s, allowed, level, reduction), bounds, n_sink, n_recent)
    n = min(n_fac, rows)
    tokens = reference.best(key, n).sort(-1).values  # [B, Hkv, n], in order of position
    there, tokens = tokens < rows, tokens.clamp(max=rows - 1)
    listed = torch.where(there, key.gather(2, tokens), -torch.inf)
    room = candidate_width(n_fac, rows) - n
    return (
        torch.nn.functional.pad(listed, (0, room), value=-torch.inf),
        torch.nn.functional.pad(tokens.to(torch.int32), (0, room)),
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    listed: Tensor,
    tokens: Tensor,
    *,
    rank: int,
    n_fac: int,
    scale: float,
    softcap: float,
) -> Tensor:
    """Attention to those of a process's candidates that are among the best of all, and the log-sum-exp of their scores behind it: fp32
    ``[B, Hq, 1, Dv + 1]``, 0 and -inf without one.

    ``listed [B, Hkv, ranks * width]``: everyone's keys in the order of the ranks; ``tokens [B, Hkv, width]`` this process's own, of which it
    is number ``rank``. ``k, v, mask`` as ``candidates``'s.
    """
    B, Hkv, width = tokens.shape
    D, G = q.shape[3], q.shape[1] // Hkv
    chosen = reference.best(listed, n_fac)  # process p's are [p * width, (p + 1) * width)
    taken = torch.zeros(B, Hkv, listed.shape[2] + n_fac, dtype=torch.bool, device=q.device).scatter(2, chosen, True)
    taken = taken[..., rank * width : (rank + 1) * width]
    taken = taken & (listed[..., rank * width : (rank + 1) * width] > -torch.inf)
    index = tokens.long()
    kept_k = k.gather(2, index[..., None].expand(B, Hkv, width, D))
    kept_v = v.gather(2, index[..., None].expand(B, Hkv, width, v.shape[3]))
    L = k.shape[2] if mask is None else mask.shape[3]
    allowed, bias, _ = reference.per_head_mask(mask, None, B, Hkv, G, L, q.device)
    by_head = index[:, :, None, :].expand(B, Hkv, G, width)
    kept_allowed = allowed.expand(B, Hkv, G, L).gather(3, by_head) & taken[:, :, None, :]
    kept_bias = None if bias is None else bias.expand(B, Hkv, G, L).gather(3, by_head)
    qg = q.reshape(B, Hkv, G, D).float()
    return _with_level(*reference.partial(qg, kept_k.float(), kept_v.float(), kept_allowed, kept_bias, scale, softcap))


def dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bounds: Tensor, *, scale: float, softcap: float
) -> Tensor:
    """Exact attention to the tokens that are here, ``k, v [B, Hkv, rows, *]``; the result as ``attend``'s, the rest as ``candidates``'s."""
    B, Hq, _, D = q.shape
    Hkv, rows = k.shape[1], k.shape[2]
    allowed, bias, _ = reference.per_head_mask(mask, bounds, B, Hkv, Hq // Hkv, rows, q.device)
    qg = q.reshape(B, Hkv, Hq // Hkv, D).float()
    return _with_level(*reference.partial(qg, k.float(), v.float(), allowed, bias, scale, softcap))


class _Plain:
    """The functions above under the names that the operators have."""

    shard_levels = staticmethod(levels)
    shard_candidates = staticmethod(candidates)
    shard_attend = staticmethod(attend)
    shard_dense = staticmethod(dense)


def _parts(version: int | None) -> tuple[Any, dict[str, Any]]:
    """What computes a process's part, kernels of that version or plain torch, and what only it is called with."""
    return (_Plain, {}) if version is None else (torch.ops.fasa, {"version": version})


def _scores(
    q: Tensor,
    k: Tensor,
    data: Tensor | None,
    meta: Tensor | None,
    dims: Tensor | None,
    spread: Tensor | None,
    mask: Tensor | None,
    bounds: Tensor,
    rows: int,
    scale: float,
    softcap: float,
    fmt: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores ``[B, Hkv, G, rows]`` of the tokens that are here, where they count, and the bounds."""
    B, Hq, _, D = q.shape
    Hkv = k.shape[1]
    allowed, bias, bounds = reference.per_head_mask(mask, bounds, B, Hkv, Hq // Hkv, rows, q.device)
    k = k[:, :, :rows]
    if data is not None and meta is not None:
        data, meta = data[:, :, :rows], meta[:, :, :rows]
    qg = q.reshape(B, Hkv, Hq // Hkv, D).float()
    return reference.scores(qg, k, data, meta, dims, spread, bias, scale, softcap, fmt), allowed, bounds


def own_mask(
    mask: Tensor | None, bounds: Tensor | None, rows: int, rank: int, ranks: int, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """What of the mask of all tokens is this process's, and the bounds of all, counted from its first token: they may lie outside of its
    rows."""
    first = rank * rows
    if bounds is None and mask is not None:
        bounds = reference.mask_bounds(mask, ranks * rows)
    elif bounds is None:
        bounds = torch.stack([torch.full((1,), n, dtype=torch.int32, device=device) for n in (0, ranks * rows)], dim=-1)
    if mask is not None:
        mask = four_dims(mask)
        mask = mask if mask.shape[3] == 1 else mask[..., first : first + rows]
    return mask, bounds - first


def _with_level(out: Tensor, total: Tensor, top: Tensor) -> Tensor:
    """``reference.partial`` divided, and the log-sum-exp behind it, -inf without a token: ``[B, Hq, 1, Dv + 1]``."""
    both = torch.cat([out / torch.where(total == 0, 1.0, total), top + total.log()], dim=-1)
    return both.flatten(1, 2)[:, :, None]


def merged(shares: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention ``[B, Hq, 1, Dv]`` fp32 of the shares of all processes, ``[ranks, B, Hq, 1, Dv + 1]``, and the learned sinks."""
    out, lse = shares[..., :-1], shares[..., -1:]
    top = lse.amax(0)
    sink = None if sinks is None else sinks.float().view(1, -1, 1, 1)
    if sink is not None:
        top = torch.maximum(top, sink)
    top = torch.where(top == -torch.inf, 0.0, top)
    weight = (lse - top).exp()
    total = weight.sum(0)
    if sink is not None:
        total = total + (sink - top).exp()
    # A process whose own sum is NaN or inf makes the result so, as it would in one process.
    return (weight * out).sum(0) / torch.where(total == 0, 1.0, total)
