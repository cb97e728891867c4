"""Cost model: bytes, kernel launches, memory and expected time of a decode step's attention, as formulas in sympy.

Letters as in ``sites``; ``w`` is W, ``fc`` the bytes that the packed FC cache holds per token and KV head, ``item`` the bytes of an
element of K and V. A step is taken to cost a start per kernel launch and time per byte, at rates of its own for dense reading,
for the scan of the packed cache (TIP) and for the gathered rows (FAC). The constants are a card's, fitted once to measured times
by ``benchmarks/fit_cost.py`` and kept in ``cards.json``. A card that is not there is given the constants of the first one, whose
break-even lengths hold roughly elsewhere, being ratios.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import sympy
import torch

from .triton_kernels.reference import most_kept

#: A break-even length that no cache has: sparse decoding never pays.
NEVER = 1 << 62
_COUNTERS = 512  # 32 * LINES of ``triton_kernels.score``, which needs triton

_B, _L, _Hkv, _G, _d, _dv, _item, _n_fac, _w, _fc, _sms = _SIZES = sympy.symbols(
    "B L Hkv G d dv item n_fac w fc sms", integer=True, positive=True
)
_d0, _dr, _s0, _tr, _fr = _RATES = sympy.symbols("dense_start dense_rate sparse_start tip_rate fac_rate", positive=True)

_rows = _B * _Hkv
_row = (_d + _dv) * _item  # K and V of one token and head
_kept = sympy.Min(_n_fac, _L)

DENSE_BYTES = _rows * _L * _row
TIP_BYTES = _rows * _L * _fc
KEY_BYTES = _rows * _L * 6  # a token's key, fp32, and its code, one byte, which TIP writes; FAC reads the code
FAC_BYTES = _rows * _kept * _row
PACK_BYTES = _rows * _L * (_d * _item + _fc)  # where the packed cache is made anew in every step

_dense_splits = sympy.Max(
    1, sympy.Min(sympy.ceiling(2 * _sms / _rows), sympy.floor((_L + 127) / 128), 128)
)  # ``dense_decode._splits``
_sparse_splits = sympy.Max(1, sympy.Min(sympy.floor(4 * _sms / _rows), sympy.ceiling(_n_fac / 32), 64))
DENSE_LAUNCHES = sympy.Integer(2)  # attention, merge
SPARSE_LAUNCHES = sympy.Integer(4)  # query and refresh, TIP, FAC, merge

PACKED_BYTES = _rows * (_L * _fc + 16)  # the packed cache and what predicts its threshold, kept from step to step
DENSE_SCRATCH = _rows * _dense_splits * _G * (_dv + 2) * 4
SPARSE_SCRATCH = _rows * (
    5 * _L
    + 4 * _COUNTERS
    + 4 * sympy.Min(most_kept(_n_fac), _L + 32 * _sparse_splits) * _sparse_splits
    + 4 * _sparse_splits * _G * (_dv + 2)
    + 64 * _w
)

DENSE_US = _d0 * DENSE_LAUNCHES + _dr * DENSE_BYTES
SPARSE_US = _s0 * SPARSE_LAUNCHES + _tr * (TIP_BYTES + KEY_BYTES) + _fr * FAC_BYTES
PACK_US = _s0 + _dr * PACK_BYTES

#: What a token of length adds to dense reading and not to sparse: the break-even exists while this is positive.
_gain = sympy.diff(DENSE_US - SPARSE_US.subs(_kept, _n_fac), _L)
_behind = (SPARSE_US.subs(_kept, _n_fac) - DENSE_US).subs(_L, 0)  # of sparse, at length zero: both grow linearly


@dataclass(frozen=True)
class Card:
    """A GPU's constants: microseconds per launch (``*_start``) and per byte (``*_rate``), and its multiprocessors."""

    name: str
    sms: int
    dense_start: float
    dense_rate: float
    sparse_start: float
    tip_rate: float
    fac_rate: float

    def rates(self) -> tuple[float, ...]:
        return (self.dense_start, self.dense_rate, self.sparse_start, self.tip_rate, self.fac_rate)


@dataclass(frozen=True)
class Shape:
    """The numbers of one site that a step's cost depends on."""

    B: int
    L: int
    Hkv: int
    G: int
    d: int
    dv: int
    item: int
    n_fac: int
    w: int  # 0 where no FC cache is packed
    fc: int


@dataclass(frozen=True)
class Cost:
    """What one site's decode step costs. Times and ``break_even`` are None where no GPU runs it.

    ``packed_bytes`` stay allocated for each site; ``scratch_bytes`` are needed while one site runs and shared by all of them.
    ``break_even``: the shortest cache that is read no slower sparsely, ``NEVER`` where there is none.
    """

    dense_bytes: int
    sparse_bytes: int
    packed_bytes: int
    dense_scratch: int
    sparse_scratch: int
    dense_launches: int
    sparse_launches: int
    dense_us: float | None = None
    sparse_us: float | None = None
    break_even: int | None = None
    card: str = ""


@cache
def _function(expression: sympy.Expr) -> Callable[..., Any]:
    made: Callable[..., Any] = sympy.lambdify([*_SIZES, *_RATES], expression, modules="math")
    return made


def evaluate(expression: sympy.Expr, shape: Shape, card: Card) -> Any:
    """One of this module's formulas for a shape and a card."""
    return _function(expression)(*asdict(shape).values(), card.sms, *card.rates())


@lru_cache(maxsize=1024)
def cost_of(shape: Shape, card: Card | None, *, kept: bool = True, packs: bool = False) -> Cost:
    """Cost of a decode step. ``card=None``: bytes only. ``kept``: whether a packed cache stays allocated; ``packs``: whether it
    is made anew in every step instead."""
    c = card or cards()[0]

    def bytes_of(expression: sympy.Expr) -> int:
        return int(evaluate(expression, shape, c))

    def timed() -> dict[str, Any]:
        gain, behind = evaluate(_gain, shape, c), evaluate(_behind, shape, c)
        if packs:
            gain -= c.dense_rate * bytes_of(PACK_BYTES) / shape.L
            behind += c.sparse_start
        even = NEVER if gain <= 0 else max(shape.n_fac + 1, math.ceil(behind / gain))
        pack = evaluate(PACK_US, shape, c) if packs else 0.0
        return {
            "dense_us": evaluate(DENSE_US, shape, c),
            "sparse_us": evaluate(SPARSE_US, shape, c) + pack,
            "break_even": even,
            "card": c.name,
        }

    return Cost(
        dense_bytes=bytes_of(DENSE_BYTES),
        sparse_bytes=bytes_of(TIP_BYTES + FAC_BYTES),
        packed_bytes=bytes_of(PACKED_BYTES) if kept else 0,
        dense_scratch=bytes_of(DENSE_SCRATCH),
        sparse_scratch=bytes_of(SPARSE_SCRATCH) + (bytes_of(TIP_BYTES) if packs else 0),
        dense_launches=int(DENSE_LAUNCHES),
        sparse_launches=int(SPARSE_LAUNCHES) + packs,
        **(timed() if card is not None else {}),
    )


@cache
def cards() -> tuple[Card, ...]:
    """The cards that constants were fitted for."""
    rows = json.loads((Path(__file__).parent / "cards.json").read_text())["cards"]
    return tuple(Card(**{name: row[name] for name in Card.__dataclass_fields__}) for row in rows)


@cache
def card_named(name: str) -> Card:
    """The card of that name, or else the first one that is known."""
    return next((c for c in cards() if c.name == name), cards()[0])


def card(device: torch.device) -> Card | None:
    """The constants for a device; None where it is no GPU."""
    if device.type != "cuda":
        return None
    return card_named(torch.cuda.get_device_name(device) if torch.cuda.is_available() else "")
