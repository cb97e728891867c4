"""The kernels as PyTorch operators (namespace ``fasa``), for graphs: Triton on CUDA, the plain-torch reference on CPU.

Importing this module registers them. Arguments, shapes and errors are those of the functions of ``reference`` with the
same names; what is added here:

- ``version``: pass ``KERNEL_VERSION`` as a literal. Compile caches are keyed by a graph's ops and literals, not by the body
  of an op, so this is what makes them notice a changed kernel.
- ``sparse_decode`` takes ``slots``: when given, these rows of ``data`` and ``meta`` are refreshed from ``k`` first, as
  ``pack_rows_`` would. It also takes ``hint``, per-site state for speed (``sparse_decode_state``): what it holds afterwards
  tells the next step where to look for its threshold. And ``hot``, ``tags`` and ``ledger`` (``hot_slots``), for K and V that lie in
  host memory: all three or none.
- ``shard_levels``, ``shard_candidates``, ``shard_attend`` and ``shard_dense`` are what one of several processes does between the exchanges of
  ``sharded_decode``.
- ``peer_all_reduce`` and ``peer_all_gather`` are collectives of small tensors (``peers``; on CPU those of the process group).
- ``gather_sequence`` stands in a model's graph where it reads a KV cache whose tokens lie on several processes.

On CPU exactly ``min(n_fac, valid)`` tokens are attended to. On CUDA these, whatever ``hint`` holds, and the few that rank so
close below them that telling them apart would cost a search: a fiftieth of ``n_fac`` on average, never more than 12 %.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import reference, sharded_decode
from .formats import HINT_COLUMNS, fc_cache_spec
from .tokens import four_dims, from_rows

#: Raise it with every change of what a kernel computes or of how it is called.
KERNEL_VERSION = 11

#: Bytes that one process may contribute to ``peer_all_reduce`` and ``peer_all_gather``, and processes that may take part.
MOST_BYTES, MOST_RANKS = 256 << 10, 8

_LIBRARY = torch.library.Library("fasa", "DEF")

# The kernels take K, V, q and masks with whatever strides they have, and say so: Inductor would otherwise copy a whole K and V to
# the strides they had when it traced, where functionalisation makes a dense tensor of a cache with gaps between its rows.
_ANY_STRIDES = (torch.Tag.flexible_layout,)

_LIBRARY.define(
    "pack(Tensor k, Tensor dims, Tensor centre, Tensor spread, str fmt, int version) -> (Tensor, Tensor)",
    tags=_ANY_STRIDES,
)
_LIBRARY.define(
    "pack_rows_(Tensor(a!) data, Tensor(b!) meta, Tensor k, Tensor slots, Tensor dims, Tensor centre, Tensor spread, "
    "str fmt, int version) -> ()",
    tags=_ANY_STRIDES,
)
_LIBRARY.define("mask_bounds(Tensor mask, SymInt L, int version) -> Tensor", tags=_ANY_STRIDES)
_LIBRARY.define(
    "sparse_decode(Tensor q, Tensor k, Tensor v, Tensor(a!)? data, Tensor(b!)? meta, Tensor? dims, Tensor? centre, "
    "Tensor? spread, Tensor? norm, Tensor? mask, Tensor? bounds, Tensor? slots, Tensor(c!)? hint, Tensor(d!)? hot=None, "
    "Tensor(e!)? tags=None, Tensor(f!)? ledger=None, *, float scale, int n_fac, int n_sink, int n_recent, float softcap, "
    "Tensor? sinks, str fmt, str reduction, int version, Tensor? slopes=None) -> Tensor",
    tags=_ANY_STRIDES,
)
_LIBRARY.define(
    "dense_decode(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bounds, *, float scale, float softcap, Tensor? sinks, "
    "int version) -> Tensor",
    tags=_ANY_STRIDES,
)
_LIBRARY.define(
    "shard_levels(Tensor q, Tensor k, Tensor? data, Tensor? meta, Tensor? dims, Tensor? spread, Tensor? mask, Tensor bounds, *, "
    "int rows, float scale, float softcap, str fmt, int version) -> Tensor",
    tags=_ANY_STRIDES,
)
_LIBRARY.define(
    "shard_candidates(Tensor q, Tensor k, Tensor? data, Tensor? meta, Tensor? dims, Tensor? spread, Tensor? norm, Tensor? mask, "
    "Tensor bounds, Tensor(a!)? hint, Tensor? slopes, *, int rows, int n_fac, int n_sink, int n_recent, float scale, "
    "float softcap, str fmt, str reduction, int version) -> (Tensor, Tensor)",
    tags=_ANY_STRIDES,
)
_LIBRARY.define(
    "shard_attend(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor listed, Tensor tokens, *, int rank, int n_fac, float scale, "
    "float softcap, int version) -> Tensor",
    tags=_ANY_STRIDES,
)
_LIBRARY.define(
    "shard_dense(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor bounds, *, float scale, float softcap, int version) -> Tensor",
    tags=_ANY_STRIDES,
)
_LIBRARY.define("peer_all_reduce(Tensor x, str group, *, int version) -> Tensor")
_LIBRARY.define("peer_all_gather(Tensor x, int ranks, str group, *, int version) -> Tensor")
_LIBRARY.define("gather_sequence(Tensor own, int rows, int rank, int ranks, str group) -> Tensor")


def sparse_decode_state(B: Any, Hkv: Any) -> tuple[tuple[Any, ...], torch.dtype]:
    """Shape and dtype of ``sparse_decode``'s ``hint``. Allocate it with zeros, or anything else; one for each site."""
    return (B, Hkv, HINT_COLUMNS), torch.float32


def _pack(k: Tensor, dims: Tensor, centre: Tensor, spread: Tensor, fmt: str, version: int) -> tuple[Tensor, Tensor]:
    return reference.pack(k, dims, centre, spread, fmt)


def _pack_rows_(
    data: Tensor,
    meta: Tensor,
    k: Tensor,
    slots: Tensor,
    dims: Tensor,
    centre: Tensor,
    spread: Tensor,
    fmt: str,
    version: int,
) -> None:
    reference.pack_rows_(data, meta, k, slots, dims, centre, spread, fmt)


def _mask_bounds(mask: Tensor, L: int, version: int) -> Tensor:
    return reference.mask_bounds(mask, L)


def _sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    data: Tensor | None,
    meta: Tensor | None,
    dims: Tensor | None,
    centre: Tensor | None,
    spread: Tensor | None,
    norm: Tensor | None,
    mask: Tensor | None,
    bounds: Tensor | None,
    slots: Tensor | None,
    hint: Tensor | None,
    hot: Tensor | None = None,
    tags: Tensor | None = None,
    ledger: Tensor | None = None,
    *,
    version: int,
    fmt: str,
    **how: Any,
) -> Tensor:
    if slots is not None and data is not None:
        assert meta is not None and dims is not None and centre is not None and spread is not None
        reference.pack_rows_(data, meta, k, slots, dims, centre, spread, fmt)
    if hot is not None and tags is not None and ledger is not None:
        how |= {"hot": (hot, tags, ledger), "written": slots}
    return reference.sparse_decode(q, k, v, data, meta, dims, centre, spread, norm, mask, bounds, fmt=fmt, **how)


def _dense_decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bounds: Tensor | None, *, version: int, **how: Any
) -> Tensor:
    return reference.dense_decode(q, k, v, mask, bounds, **how)


def _pack_cuda(
    k: Tensor, dims: Tensor, centre: Tensor, spread: Tensor, fmt: str, version: int
) -> tuple[Tensor, Tensor]:
    from . import pack

    return pack.pack(k, dims, centre, spread, fmt)


def _pack_rows_cuda_(
    data: Tensor,
    meta: Tensor,
    k: Tensor,
    slots: Tensor,
    dims: Tensor,
    centre: Tensor,
    spread: Tensor,
    fmt: str,
    version: int,
) -> None:
    from . import pack

    pack.pack_rows_(data, meta, k, slots, dims, centre, spread, fmt)


def _mask_bounds_cuda(mask: Tensor, L: int, version: int) -> Tensor:
    from . import bounds

    return bounds.mask_bounds(mask, L)


def _sparse_decode_cuda(q: Tensor, k: Tensor, v: Tensor, *state: Tensor | None, version: int, **how: Any) -> Tensor:
    from . import sparse_decode

    return sparse_decode.sparse_decode(q, k, v, *state, **how)


def _dense_decode_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bounds: Tensor | None, *, version: int, **how: Any
) -> Tensor:
    from . import dense_decode

    return dense_decode.dense_decode(q, k, v, mask, bounds, **how)


def _all_reduce(x: Tensor, group: str) -> Tensor:
    c10d = torch.ops._c10d_functional
    total: Tensor = c10d.wait_tensor(c10d.all_reduce(x, "sum", group))
    return total


def _all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    return sharded_decode.all_gather(x, ranks, group).flatten(0, 1)


def _of_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, version, **how: function(*args, **how)


def _of_kernels(module: str, name: str, **fixed: Any) -> Callable[..., Any]:
    """A function of a module that needs triton, which is imported at its first call."""

    def call(*args: Any, version: int, **how: Any) -> Any:
        return getattr(importlib.import_module(f".{module}", __package__), name)(*args, **how, **fixed)

    return call


for _name, _cpu, _cuda in (
    ("pack", _pack, _pack_cuda),
    ("pack_rows_", _pack_rows_, _pack_rows_cuda_),
    ("mask_bounds", _mask_bounds, _mask_bounds_cuda),
    ("sparse_decode", _sparse_decode, _sparse_decode_cuda),
    ("dense_decode", _dense_decode, _dense_decode_cuda),
    ("shard_levels", _of_plain(sharded_decode.levels), _of_kernels("shard", "levels")),
    ("shard_candidates", _of_plain(sharded_decode.candidates), _of_kernels("shard", "candidates")),
    ("shard_attend", _of_plain(sharded_decode.attend), _of_kernels("shard", "attend")),
    ("shard_dense", _of_plain(sharded_decode.dense), _of_kernels("dense_decode", "dense_decode", shard=True)),
    ("peer_all_reduce", _of_plain(_all_reduce), _of_kernels("peers", "all_reduce")),
    ("peer_all_gather", _of_plain(_all_gather), _of_kernels("peers", "all_gather")),
    ("gather_sequence", sharded_decode.gather_sequence, sharded_decode.gather_sequence),
):
    _LIBRARY.impl(_name, _cpu, "CPU")
    _LIBRARY.impl(_name, _cuda, "CUDA")


def _empty_result(q: Tensor, v: Tensor) -> Tensor:
    """A tensor of a decode's result, with its strides."""
    B, Hq, S, _ = q.shape
    return from_rows(q.new_empty((B * S, Hq, 1, v.shape[3])), S)


@torch.library.register_fake("fasa::pack", lib=_LIBRARY)
def _(k: Tensor, dims: Tensor, centre: Tensor, spread: Tensor, fmt: str, version: int) -> tuple[Tensor, Tensor]:
    (shape, dtype), (meta_shape, meta_dtype) = fc_cache_spec(k.shape[0], k.shape[1], k.shape[2], dims.shape[1], fmt)
    return k.new_empty(shape, dtype=dtype), k.new_empty(meta_shape, dtype=meta_dtype)


@torch.library.register_fake("fasa::pack_rows_", lib=_LIBRARY)
def _(*args: Any) -> None:
    return None


@torch.library.register_fake("fasa::mask_bounds", lib=_LIBRARY)
def _(mask: Tensor, L: int, version: int) -> Tensor:
    B, _, S, _ = four_dims(mask).shape
    return mask.new_empty((B * S, 2), dtype=torch.int32)


@torch.library.register_fake("fasa::sparse_decode", lib=_LIBRARY)
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any, **how: Any) -> Tensor:
    return _empty_result(q, v)


@torch.library.register_fake("fasa::dense_decode", lib=_LIBRARY)
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any, **how: Any) -> Tensor:
    return _empty_result(q, v)


@torch.library.register_fake("fasa::shard_levels", lib=_LIBRARY)
def _(q: Tensor, *args: Any, **how: Any) -> Tensor:
    return q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.register_fake("fasa::shard_candidates", lib=_LIBRARY)
def _(q: Tensor, k: Tensor, *args: Any, rows: int, n_fac: int, **how: Any) -> tuple[Tensor, Tensor]:
    shape = (*k.shape[:2], sharded_decode.candidate_width(n_fac, rows))
    return k.new_empty(shape, dtype=torch.float32), k.new_empty(shape, dtype=torch.int32)


@torch.library.register_fake("fasa::shard_attend", lib=_LIBRARY)
@torch.library.register_fake("fasa::shard_dense", lib=_LIBRARY)
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any, **how: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3] + 1), dtype=torch.float32)


@torch.library.register_fake("fasa::peer_all_reduce", lib=_LIBRARY)
def _(x: Tensor, group: str, version: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("fasa::peer_all_gather", lib=_LIBRARY)
def _(x: Tensor, ranks: int, group: str, version: int) -> Tensor:
    return x.new_empty((ranks * x.shape[0], *x.shape[1:]))


@torch.library.register_fake("fasa::gather_sequence", lib=_LIBRARY)
def _(own: Tensor, rows: int, rank: int, ranks: int, group: str) -> Tensor:
    return own.new_empty((*own.shape[:2], ranks * rows, own.shape[3]))
