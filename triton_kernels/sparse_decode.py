"""One decode step of FASA on the GPU: TIP (``score``), then selection and FAC (``attend``)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .attend import fac_kernel
from .bounds import mask_bounds
from .dense_decode import Refresh, attend_sizes, dense_decode, merge, strides_of, token_width
from .formats import INFO, REDUCTIONS, check_format
from .hot_buffer import fetching_fac_kernel
from .hot_slots import fac_parts
from .launch import Device, device_of, mask_arguments, on_device, partition_alike, power_of_2
from .pack import bytes_view, pack_sizes
from .query import query_kernel
from .score import BINS, tip_kernel
from .tokens import as_rows, from_rows


@dataclass(frozen=True)
class Configuration:
    """How a step is cut up. TIP: ``chunks`` programs a row, ``block_t`` tokens at a time, ``count`` as ``tip_kernel``
    says. FAC: ``splits`` programs a row, which look at ``block_k`` keys and attend to ``block_n`` tokens at a time."""

    chunks: int
    block_t: int
    tip_warps: int
    tip_stages: int
    hoist: bool
    count: str
    splits: int
    block_k: int
    block_n: int
    fac_warps: int
    fac_stages: int


def configuration(
    rows: int, L: int, n_fac: int, width: int, engine: str, fmt: str, query_words: int, device: Device
) -> Configuration:
    """A choice by shape alone: nothing is tuned at run time, so a first call costs compilation only. ``width``: bytes of K and
    V that a token and head have, as the dots take them; ``query_words``: what a thread would keep of the group's queries.

    Measured on an H100: TIP is fastest with the queries in registers, 4 programs a multiprocessor, or 8 that
    read them again for every tile where they are too many; FAC with 4. Keys of the shortest scans are
    counted a tile at a time: single counts queue up at few addresses.
    """
    long = rows * L >= 1 << 19
    block_t = 256 if long and (engine == "dot" or fmt == "fp8") else 128
    hoist = query_words <= 64 or rows * L < 1 << 20
    chunks = power_of_2(max(1, (4 if hoist else 8) * device.sms // rows + 1)) // 2
    chunks = max(1, min(chunks, power_of_2(-(-L // block_t))))
    block_n = 16 if width > 2048 else 32 if rows > 16 or width > 1024 else 64
    splits = fac_parts(rows, n_fac, device.sms)
    return Configuration(
        chunks=chunks,
        block_t=block_t,
        tip_warps=8 if engine == "dot" and long else 4,
        tip_stages=3 if engine == "dot" else 1,
        hoist=hoist,
        count="tile" if engine == "words" and rows * L <= 1 << 16 else "each",
        splits=splits,
        block_k=_block_k(L, splits),
        block_n=block_n,
        fac_warps=4,
        fac_stages=1 if width > 1024 else 3 if block_n == 32 else 2,
    )


def _block_k(L: int, splits: int) -> int:
    return max(128, min(2048, power_of_2(-(-L // splits))))


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
    slots: Tensor | None = None,
    hint: Tensor | None = None,
    hot: Tensor | None = None,
    tags: Tensor | None = None,
    ledger: Tensor | None = None,
    *,
    scale: float,
    n_fac: int,
    n_sink: int = 0,
    n_recent: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    fmt: str = "int4",
    reduction: str = "static",
    slopes: Tensor | None = None,
    selection: list[tuple[Tensor, Tensor]] | None = None,
    config: Configuration | None = None,
    given: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``reference.sparse_decode`` as kernels; ``slots`` and ``hint`` as in ``ops``.

    ``selection``, a list, receives ``(kept, count)``, int32 ``[B * S * Hkv, splits, room]`` and ``[B * S * Hkv, splits]``: the tokens
    attended to, for whoever checks them; ``config`` replaces ``configuration``'s choice for whoever measures it;
    ``given``, a selection as ``selection`` received it, is attended to and none is made: what selecting costs is the difference. ``hot``,
    ``tags`` and ``ledger``: K and V are read through a hot buffer (``hot_slots``). All state must be contiguous. Raises ``ValueError`` as the reference does.
    """
    check_format(fmt)
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown group reduction {reduction!r}; choose one of {', '.join(REDUCTIONS)}")
    if n_fac < 1 or n_sink < 0 or n_recent < 0 or n_sink + n_recent > n_fac:
        raise ValueError(f"expected n_sink + n_recent <= n_fac, n_fac >= 1; got {n_sink} + {n_recent}, {n_fac}")
    for name, state in (
        ("data", data),
        ("meta", meta),
        ("hint", hint),
        ("hot", hot),
        ("tags", tags),
        ("ledger", ledger),
    ):
        if state is not None and not state.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    S = q.shape[2]
    if S > 1 and hot is not None:
        raise ValueError(f"a hot buffer serves one query token, got {S}")
    dims, centre, spread, norm, sinks, slots, slopes = (
        x if x is None else x.contiguous() for x in (dims, centre, spread, norm, sinks, slots, slopes)
    )
    if n_fac >= k.shape[2] and selection is None:
        # The whole cache is within the budget, whatever is valid in it.
        refresh = None
        if data is not None and slots is not None:
            assert meta is not None and dims is not None and centre is not None and spread is not None
            refresh = Refresh(slots, data, meta, dims, centre, spread, fmt)
        return dense_decode(q, k, v, mask, bounds, scale=scale, softcap=softcap, sinks=sinks, refresh=refresh)

    q, mask, bounds = as_rows(q, mask, bounds)
    B, Hq, _, D = q.shape  # B: rows of the step, S for each sequence
    Hkv, L, DV = k.shape[1], k.shape[2], v.shape[3]
    G, rows = Hq // Hkv, B * Hkv
    device = device_of(q)
    engine, GP, block_w, pack = _engine(data, fmt, G, D, reduction, device, rows * L)
    c = config or configuration(rows, L, n_fac, token_width(q, k, v), engine, fmt, GP * block_w // 2, device)
    if tags is not None and tags.shape[2] != c.splits:
        c = replace(c, splits=tags.shape[2], block_k=_block_k(L, tags.shape[2]))
    splits = c.splits
    if mask is not None and bounds is None:
        bounds = mask_bounds(mask, L)
    m = mask_arguments(mask)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    keys = scratch(rows * L + 16)  # these two are read somewhat beyond their end
    codes = scratch(rows * L + 16, dtype=torch.uint8)
    bins = scratch(rows, 2 * BINS.value, dtype=torch.int32)
    if data is None:  # else the query's kernel clears them
        bins.zero_()
    window = scratch(rows, 2)
    stats = scratch(rows, c.chunks, GP, 2) if reduction == "softmax_sum" else None
    room = min(n_fac + n_fac // 8, 32 * -(-(-(-L // 32) + 1) // splits))
    if given is None:
        kept, kept_count = scratch(rows, splits, room, dtype=torch.int32), scratch(rows, splits, dtype=torch.int32)
    else:
        kept, kept_count = given
    if selection is not None:
        selection.append((kept, kept_count))
    part = scratch(rows, splits, G, DV + 2) if splits > 1 else None
    out = torch.empty((B, Hq, 1, DV), dtype=q.dtype, device=q.device)
    # Where the tensor cores do not take e4m3, the kernels decode bytes.
    query, source, factors, sums = q, k, None, None
    if data is not None:
        source = data if device.fp8 else bytes_view(data)
        halves = fmt == "fp8" and engine == "words"
        dtype = torch.float16 if halves else torch.int8 if INFO[fmt].bits else source.dtype
        query = scratch(rows, 2, GP, block_w, dtype=dtype)
        factors, sums = scratch(rows, GP), scratch(rows, GP, dtype=torch.int32)
    levels = scratch(rows, G) if reduction == "affine" and slopes is not None and data is not None else None

    strides = strides_of(q, k, v, m, bounds)
    with on_device(q):
        if data is not None:
            assert meta is not None and dims is not None
            launched = query_kernel[(rows, 1 if slots is None else 2)](
                q, k, dims, centre, spread, slots, bytes_view(data), meta, bytes_view(query), factors, sums, bins,
                norm, slopes, levels,
                *strides[:7], 0 if slots is None or slots.dim() == 1 else slots.stride(0),
                L, 0 if slots is None else slots.shape[-1], scale,
                HKV=Hkv, G=G, GP=GP, COLUMNS=data.shape[3], META=meta.shape[3], **pack_sizes(dims.shape[1], fmt),
                HAS_SLOTS=slots is not None, BLOCK_W=block_w, HALVES=halves, BINS=2 * BINS.value,
                HAS_NORM=norm is not None, AFFINE=levels is not None, TOKENS=S, EARLY=device.early,
                num_warps=2, launch_pdl=device.early,
            )  # fmt: skip
            partition_alike(launched)
        norm = norm if levels is None else levels
        for step in ("stats", "keys-by-stats") if reduction == "softmax_sum" else ("keys",):
            launched = tip_kernel[(c.chunks, rows)](
                query, factors, sums, source, meta, norm, m.tensor, bounds, hint,
                keys, bins, window, stats, codes,
                *strides[:7], *strides[11:], L, scale, softcap, n_sink, n_recent,
                HKV=Hkv, G=G, GP=GP, D=D, FMT=fmt, COLUMNS=1 if data is None else data.shape[3],
                META=0 if meta is None else meta.shape[3], COUNT="no" if given is not None else c.count, MASK_KIND=m.kind, PER_HEAD=m.per_head,
                HAS_BOUNDS=bounds is not None, HAS_HINT=hint is not None, HAS_NORM=norm is not None,
                SOFTCAP=softcap != 0.0, MAX=reduction == "max", PASS=step, ENGINE=engine, FP8=device.fp8,
                BLOCK_W=block_w, BLOCK_T=c.block_t, PACK=pack, NATIVE=device.native, CHUNKS=c.chunks, HOIST=c.hoist,
                LEVELS=levels is not None, TOKENS=S, EARLY=device.early,
                num_warps=c.tip_warps, num_stages=c.tip_stages, launch_pdl=device.early,
            )  # fmt: skip
            partition_alike(launched)
        sizes = attend_sizes(q, k, v)
        how = dict(
            **sizes, MASK_KIND=m.kind, PER_HEAD=m.per_head, HAS_BOUNDS=bounds is not None, HAS_HINT=hint is not None,
            HAS_SINKS=sinks is not None, SOFTCAP=softcap != 0.0, SPLITS=splits, BLOCK_K=c.block_k,
            BLOCK_N=c.block_n, GIVEN=given is not None, EARLY=device.early, num_warps=c.fac_warps, num_stages=c.fac_stages,
            launch_pdl=device.early,
        )  # fmt: skip
        attended = (q, k, v, m.tensor, bounds, hint, keys, codes, bins, window, kept, kept_count, out, part, sinks)
        if hot is None:
            launched = fac_kernel[(splits, rows)](*attended, *strides, L, n_fac, scale, softcap, room, TOKENS=S, **how)
        else:
            assert tags is not None and ledger is not None
            place = torch.empty_like(kept)
            launched = fetching_fac_kernel[(splits, rows)](
                *attended, hot, tags, ledger, place, kept if slots is None else slots,
                0 if slots is None or slots.dim() == 1 else slots.stride(0), 0 if slots is None else slots.shape[-1],
                *strides, L, n_fac, scale, softcap, room, HAS_SLOTS=slots is not None, C=tags.shape[3],
                CP=power_of_2(tags.shape[3]), DP=power_of_2(D), **how,
            )  # fmt: skip
        partition_alike(launched)
        if splits > 1:
            merge(part, sinks, out, splits, sizes)
    return from_rows(out, S)


def _engine(
    data: Tensor | None, fmt: str, G: int, D: int, reduction: str, device: Device, tokens: int
) -> tuple[str, int, int, int]:
    """How TIP multiplies, over how many (padded) heads and dims, and how many tokens make a row of the tensor cores' operand.

    Words of four dims in each thread waste nothing on padding and start fast. The tensor cores need less work for each token:
    they take at least 8 or 16 columns, and with fewer heads several tokens share a row. ``tokens``: of all rows together; where
    the tensor cores begin to win was measured on an H100.
    """
    if data is None:
        return "all", max(16, power_of_2(G)), min(64, max(16, power_of_2(D))), 1
    columns = data.shape[3]
    narrow = INFO[fmt].bits > 0 or (fmt == "fp8" and device.fp8)
    words = narrow and columns % 4 == 0 and device.native and reduction != "softmax_sum" and G <= 8
    few = tokens < (1 << 18 if fmt == "fp8" else 1 << 21)
    least = 16 if fmt == "fp8" else 8  # 16: the least that Hopper's e4m3 dot takes
    if columns == power_of_2(columns) >= 16 and fmt != "fp32" and not (words and few):
        pack = max(1, least // power_of_2(G))
        while pack > 1 and pack * columns * data.element_size() > 512:
            pack //= 2
        if pack * power_of_2(G) >= least:
            return "dot", power_of_2(G), columns, pack
    if words:
        return "words", power_of_2(G), max(4, power_of_2(columns)), 1
    return "dot", max(least, power_of_2(G)), max(32 if data.element_size() == 1 else 16, power_of_2(columns)), 1
