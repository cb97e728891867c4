"""One decode step of FASA on the GPU: TIP (``score``), then selection and FAC (``attend``)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .attend import fac_kernel
from .bounds import mask_bounds
from .dense_decode import Refresh, attend_sizes, dense_decode, merge, strides_of, token_width
from .formats import HINT_COLUMNS, INFO, REDUCTIONS, check_format
from .hot_buffer import fetching_fac_kernel
from .hot_slots import fac_parts
from .launch import Device, Mask, device_of, mask_arguments, on_device, partition_alike, power_of_2
from .pack import bytes_view, pack_sizes
from .query import query_kernel
from .reference import most_kept
from .score import LINES, WINDOW, tip_kernel
from .tokens import as_rows, from_rows


@dataclass(frozen=True)
class Configuration:
    """How a step is cut up. TIP: ``chunks`` programs a row, ``block_t`` tokens at a time. FAC: ``splits`` programs a row, which
    look at ``block_k`` keys and attend to ``block_n`` tokens at a time."""

    chunks: int
    block_t: int
    tip_warps: int
    tip_stages: int
    splits: int
    block_k: int
    block_n: int
    fac_warps: int
    fac_stages: int


def configuration(
    rows: int, L: int, n_fac: int, width: int, engine: str, registers: int, device: Device
) -> Configuration:
    """A choice by shape alone: nothing is tuned at run time, so a first call costs compilation only. ``width``: bytes of K and
    V that a token and head have, as the dots take them; ``registers``: about how many a thread of engine "fragments" needs.

    Measured on an H100 and an H200: TIP is fastest with 5 programs a multiprocessor or as many as have registers there, or
    with 4 of another engine; FAC with 4.
    """
    fragments = engine == "fragments"
    long = engine == "dot" and rows * L >= 1 << 19
    block_t = 256 if fragments or long else 128
    tiles = -(-L // block_t)
    per_sm = min(5, 65536 // (128 * registers)) if fragments else 4
    chunks = min(max(1, per_sm * device.sms // rows), tiles)
    chunks = -(-tiles // -(-tiles // chunks))  # as few as need no more tiles each
    block_n = 16 if width > 2048 else 32 if rows > 16 or width > 1024 else 64
    splits = fac_parts(rows, n_fac, device.sms)
    return Configuration(
        chunks=chunks,
        block_t=block_t,
        tip_warps=8 if long else 4,  # of "fragments": block_t / 64
        tip_stages=3 if engine == "dot" else 1,
        splits=splits,
        block_k=_block_k(L, splits),
        block_n=block_n,
        fac_warps=4,
        fac_stages=1 if width > 1024 else 3 if block_n == 32 else 2,
    )


def _block_k(L: int, splits: int) -> int:
    return max(128, min(2048, power_of_2(-(-L // splits))))


@dataclass
class Scan:
    """TIP of one step: what its two kernels share, and what they write. ``keys`` and ``codes [rows * L]``, ``bins [rows, 32 * LINES]`` and
    ``window [rows, WINDOW]`` are what selection reads; ``stats [rows, chunks, GP, 2]`` each head's log-sum-exps, in parts, of "softmax_sum"."""

    q: Tensor  # [rows of the step, Hq, 1, D]
    k: Tensor
    data: Tensor | None
    meta: Tensor | None
    mask: Mask
    bounds: Tensor | None
    hint: Tensor | None
    strides: tuple[int, ...]  # ``strides_of``
    fmt: str
    reduction: str
    scale: float
    softcap: float
    tokens: int  # query tokens of a sequence

    def prepare(self, n_fac: int, width: int, config: Configuration | None = None) -> Configuration:
        """Chooses the configuration, or takes ``config``, and allocates. ``width`` as ``configuration``'s."""
        q, data = self.q, self.data
        Hkv, L = self.k.shape[1], self.k.shape[2]
        state = (self.k.shape[0], Hkv, HINT_COLUMNS)
        if self.hint is not None and (self.hint.shape != state or self.hint.dtype != torch.float32):
            raise ValueError(f"expected hint float32 {state}, got {self.hint.dtype} {tuple(self.hint.shape)}")
        self.rows, self.group = q.shape[0] * Hkv, q.shape[1] // Hkv
        self.device = device_of(q)
        self.engine, self.heads, self.block_w, self.pack = _engine(
            data, self.fmt, self.group, q.shape[3], self.reduction, self.device
        )
        registers = 0  # about what ptxas gives: the queries, a tile and all else
        if data is not None and self.engine == "fragments":
            token = data.shape[3] * data.element_size()
            registers = 3 * self.heads * token // (2 * _step_bytes(self.fmt)) + token // 2 + 22
        self.config = config or configuration(self.rows, L, n_fac, width, self.engine, registers, self.device)
        self.keys = self._scratch(self.rows * L + 16)  # these two are read somewhat beyond their end
        self.codes = self._scratch(self.rows * L + 16, dtype=torch.uint8)
        self.bins = self._scratch(self.rows, 32 * LINES.value, dtype=torch.int32)
        self.window = self._scratch(self.rows, WINDOW.value)
        self.stats: Tensor | None = None
        self.levels: Tensor | None = None
        self.factors: Tensor | None = None
        self.sums: Tensor | None = None
        self.squares: Tensor | None = None
        if self.reduction == "softmax_sum":
            self.stats = self._scratch(self.rows, self.config.chunks, self.heads, 2)
        self.source, self.codes_of_q = self.k, q
        if data is not None:
            # Where the tensor cores do not take e4m3, the kernels decode bytes.
            self.source = data if self.device.fp8 else bytes_view(data)
            dtype = torch.float16 if self._halves else torch.int8 if INFO[self.fmt].bits else self.source.dtype
            self.codes_of_q = self._scratch(self.rows, 2, self.heads, self.block_w, dtype=dtype)
            self.factors = self._scratch(self.rows, self.heads)
            self.sums = self._scratch(self.rows, self.heads, dtype=torch.int32)
            self.squares = self._scratch(self.rows, self.heads)
        return self.config

    def query(
        self,
        dims: Tensor | None,
        centre: Tensor | None,
        spread: Tensor | None,
        norm: Tensor | None,
        slopes: Tensor | None,
        slots: Tensor | None,
    ) -> None:
        """Launches ``query_kernel``, or does what is left of it where the scan reads K itself."""
        data, meta = self.data, self.meta
        if data is None:
            self.bins.zero_()
            return
        assert meta is not None and dims is not None
        if self.reduction == "affine" and slopes is not None:
            self.levels = self._scratch(self.rows, self.group)
        launched = query_kernel[(self.rows, 1 if slots is None else 2)](
            self.q, self.k, dims, centre, spread, slots, bytes_view(data), meta, bytes_view(self.codes_of_q),
            self.factors, self.sums, self.squares, self.bins, norm, slopes, self.levels,
            *self.strides[:7], 0 if slots is None or slots.dim() == 1 else slots.stride(0),
            self.k.shape[2], 0 if slots is None else slots.shape[-1], self.scale,
            HKV=self.k.shape[1], G=self.group, GP=self.heads, COLUMNS=data.shape[3], META=meta.shape[3],
            **pack_sizes(dims.shape[1], self.fmt),
            HAS_SLOTS=slots is not None, BLOCK_W=self.block_w, HALVES=self._halves, COUNTERS=32 * LINES.value,
            HAS_NORM=norm is not None, AFFINE=self.levels is not None, TOKENS=self.tokens, EARLY=self.device.early,
            num_warps=2, launch_pdl=self.device.early,
        )  # fmt: skip
        partition_alike(launched)

    def tip(
        self, step: str, norm: Tensor | None, n_sink: int, n_recent: int, *, shard: int = 0, count: bool = True
    ) -> None:
        """Launches one pass of ``tip_kernel``, its PASS; ``shard`` is its SHARD. Without ``count`` no bins are made."""
        data, meta, c = self.data, self.meta, self.config
        norm = norm if self.levels is None else self.levels
        launched = tip_kernel[(c.chunks, self.rows)](
            self.codes_of_q, self.factors, self.sums, self.squares, self.source, meta, norm, self.mask.tensor, self.bounds, self.hint,
            self.keys, self.bins, self.window, self.stats, self.codes,
            *self.strides[:7], *self.strides[11:], self.k.shape[2], self.scale, self.softcap, n_sink, n_recent,
            HKV=self.k.shape[1], G=self.group, GP=self.heads, D=self.q.shape[3], FMT=self.fmt,
            COLUMNS=1 if data is None else data.shape[3], META=0 if meta is None else meta.shape[3],
            COUNT=count, MASK_KIND=self.mask.kind, PER_HEAD=self.mask.per_head,
            HAS_BOUNDS=self.bounds is not None, HAS_HINT=self.hint is not None, HAS_NORM=norm is not None,
            SOFTCAP=self.softcap != 0.0, MAX=self.reduction == "max", PASS=step, ENGINE=self.engine,
            FP8=self.device.fp8, BLOCK_W=self.block_w, BLOCK_T=c.block_t, PACK=self.pack, NATIVE=self.device.native,
            CHUNKS=c.chunks, LEVELS=self.levels is not None, TOKENS=self.tokens, SHARD=shard,
            EARLY=self.device.early, num_warps=c.tip_warps, num_stages=c.tip_stages, launch_pdl=self.device.early,
        )  # fmt: skip
        partition_alike(launched)

    @property
    def _halves(self) -> bool:
        return self.fmt == "fp8" and self.engine == "fragments"

    def _scratch(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.q.device)


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
    B, Hq, _, _ = q.shape  # B: rows of the step, S for each sequence
    Hkv, L, DV = k.shape[1], k.shape[2], v.shape[3]
    rows = B * Hkv
    device = device_of(q)
    if mask is not None and bounds is None:
        bounds = mask_bounds(mask, L)
    m = mask_arguments(mask)
    strides = strides_of(q, k, v, m, bounds)
    scan = Scan(q, k, data, meta, m, bounds, hint, strides, fmt, reduction, scale, softcap, S)
    c = scan.prepare(n_fac, token_width(q, k, v), config)
    if tags is not None and tags.shape[2] != c.splits:
        c = replace(c, splits=tags.shape[2], block_k=_block_k(L, tags.shape[2]))
    splits = c.splits
    room = min(most_kept(n_fac), 32 * -(-(-(-L // 32) + 1) // splits))
    if given is None:
        kept = torch.empty((rows, splits, room), dtype=torch.int32, device=q.device)
        kept_count = torch.empty((rows, splits), dtype=torch.int32, device=q.device)
    else:
        kept, kept_count = given
    if selection is not None:
        selection.append((kept, kept_count))
    part = torch.empty((rows, splits, Hq // Hkv, DV + 2), device=q.device) if splits > 1 else None
    out = torch.empty((B, Hq, 1, DV), dtype=q.dtype, device=q.device)
    with on_device(q):
        scan.query(dims, centre, spread, norm, slopes, slots)
        for step in ("stats", "keys-by-stats") if reduction == "softmax_sum" else ("keys",):
            scan.tip(step, norm, n_sink, n_recent, count=given is None)
        sizes = attend_sizes(q, k, v)
        how = dict(
            **sizes, MASK_KIND=m.kind, PER_HEAD=m.per_head, HAS_BOUNDS=bounds is not None, HAS_HINT=hint is not None,
            HAS_SINKS=sinks is not None, SOFTCAP=softcap != 0.0, SPLITS=splits, BLOCK_K=c.block_k,
            BLOCK_N=c.block_n, GIVEN=given is not None, EARLY=device.early, num_warps=c.fac_warps, num_stages=c.fac_stages,
            launch_pdl=device.early,
        )  # fmt: skip
        attended = (
            q, k, v, m.tensor, bounds, hint, scan.keys, scan.codes, scan.bins, scan.window, kept, kept_count, out, part, sinks,
        )  # fmt: skip
        if hot is None:
            launched = fac_kernel[(splits, rows)](*attended, *strides, L, n_fac, scale, softcap, room, TOKENS=S, **how)
        else:
            assert tags is not None and ledger is not None
            place = torch.empty((rows, splits, room + tags.shape[3]), dtype=torch.int32, device=q.device)
            # Rows from the host are what is waited for: wide tiles have many under way and look for misses meanwhile, narrow ones need
            # several tiles under way, and room for all programs at once. Measured on an H200.
            how |= {"num_stages": 5, "maxnreg": 128} if c.fac_stages == 3 else {"num_stages": 1}
            launched = fetching_fac_kernel[(splits, rows)](
                *attended, hot, tags, ledger, place, kept if slots is None else slots,
                0 if slots is None or slots.dim() == 1 else slots.stride(0), 0 if slots is None else slots.shape[-1],
                *strides, L, n_fac, scale, softcap, room, HAS_SLOTS=slots is not None, C=tags.shape[3],
                CP=power_of_2(tags.shape[3]), **how,
            )  # fmt: skip
        partition_alike(launched)
        if splits > 1:
            merge(part, sinks, out, splits, sizes)
    return from_rows(out, S)


def _step_bytes(fmt: str) -> int:
    """Of a token's bytes, how many a thread of engine "fragments" multiplies in one step."""
    return 4 if fmt in ("int4", "fp8") else 8


def _engine(data: Tensor | None, fmt: str, G: int, D: int, reduction: str, device: Device) -> tuple[str, int, int, int]:
    """How TIP multiplies, over how many (padded) heads and elements, and how many tokens make a row of the tensor cores' operand in
    engine "dot".

    "fragments" needs the fewest instructions and no shared memory, and keeps the queries of all heads in registers: with many heads or dims there
    is no room, and from 5 heads on Hopper's dot of e4m3 is faster (measured on an H200). "dot" takes at least 8 or 16 columns, and with
    fewer heads several tokens share a row.
    """
    if data is None:
        return "all", max(16, power_of_2(G)), min(64, max(16, power_of_2(D))), 1
    columns, size = data.shape[3], data.element_size()
    most = 4 if fmt == "fp8" else 8
    if (
        device.native
        and device.capability >= (89 if fmt == "fp8" else 80)
        and fmt != "fp32"
        and reduction != "softmax_sum"
        and columns * size % _step_bytes(fmt) == 0
        and columns * size <= 64
        and most >= G
        and data.data_ptr() % 16 == 0
    ):
        return "fragments", max(2, power_of_2(G)), max(4, power_of_2(columns)), 1
    least = 16 if fmt == "fp8" else 8  # 16: the least that Hopper's e4m3 dot takes
    if columns == power_of_2(columns) >= 16 and fmt != "fp32":
        pack = max(1, least // power_of_2(G))
        while pack > 1 and pack * columns * size > 512:
            pack //= 2
        if pack * power_of_2(G) >= least:
            return "dot", power_of_2(G), columns, pack
    return "dot", max(least, power_of_2(G)), max(32 if size == 1 else 16, power_of_2(columns)), 1
