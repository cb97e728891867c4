"""What one layer's decode attention costs on several GPUs, on paper: sympy formulas over those of ``cost``, and the tables of
``docs/distributed.md``, which this prints:

    python -m fasa_compile.cost_ranks

The GPU's constants were measured (``cards.json``), and so was what an exchange between two GPUs of a host takes with the small kernels
around it (``benchmarks/results/distributed-h200.json``); what more processes and more hosts add is assumed. P is the number of processes that share
out the tokens. An all-gather of n bytes a process is a ring's, P - 1 rounds of n bytes; an all-reduce of n bytes a tree's, 2 log2 P
rounds of n bytes, as NCCL takes them for small sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from fasa_compile.cost import (
    _B,
    _G,
    _L,
    DENSE_US,
    SPARSE_US,
    Card,
    Shape,
    _dv,
    _Hkv,
    _n_fac,
    cards,
    evaluate,
)
from fasa_compile.triton_kernels.reference import most_kept

P, BYTES = sympy.symbols("P bytes", integer=True, positive=True)
_start, _hop, _rate = sympy.symbols("start hop rate", positive=True)

GATHER_US = _start + (P - 1) * (_hop + _rate * BYTES)
REDUCE_US = _start + 2 * sympy.ceiling(sympy.log(P, 2)) * (_hop + _rate * BYTES)

#: Bytes that one process sends in one step of one layer (``triton_kernels/sharded_decode.py``).
_listed = sympy.Min(most_kept(_n_fac), sympy.ceiling(_L / P))  # ``sharded_decode.candidate_width``
KEY_BYTES = 4 * _B * _Hkv * 4 * sympy.ceiling(_listed / 4)  # its best tokens' keys
PART_BYTES = 4 * _B * _Hkv * _G * (_dv + 1)  # its attention and log-sum-exp
LSE_BYTES = 4 * _B * _Hkv * _G  # of the scores, for softmax_sum
HISTOGRAM_BYTES = 4 * _B * _Hkv * 256  # of a threshold found by counting, for each 8 of its 32 bits


@dataclass(frozen=True)
class Link:
    """How GPUs are joined: microseconds that a collective takes to begin, of a round, and per byte."""

    name: str
    start: float
    hop: float
    rate: float


#: Two H200s: a sparse layer over both takes 41 us at 256k tokens and 44 at 1024k beyond the part of one card's time that half of the
#: tokens should take by ``cost``. These are its two exchanges.
NVLINK = Link("NVLink within a host of 8", start=18.0, hop=1.5, rate=1 / 350e3)
HOSTS = Link("400 Gb/s for each GPU between hosts", start=22.0, hop=5.0, rate=1 / 40e3)


@dataclass(frozen=True)
class Time:
    """Microseconds of one layer's attention: in kernels, as on one GPU for an even part of the work, and in exchanges."""

    kernels: float
    exchanges: float

    @property
    def us(self) -> float:
        return self.kernels + self.exchanges


def collective_us(formula: sympy.Expr, size: sympy.Expr, shape: Shape, ranks: int, link: Link) -> float:
    """Microseconds of ``GATHER_US`` or ``REDUCE_US`` for one of this module's sizes; 0 for one process."""
    if ranks == 1:
        return 0.0
    numbers = {P: ranks, _start: link.start, _hop: link.hop, _rate: link.rate}
    return float(evaluate(formula.subs(BYTES, size).subs(numbers), shape, cards()[0]))


def layer_time(
    shape: Shape,
    heads: int = 1,
    tokens: int = 1,
    *,
    dense: bool = False,
    reduction: str = "static",
    card: Card | None = None,
) -> Time:
    """One layer on ``heads x tokens`` GPUs: its KV heads on ``heads`` groups, which exchange nothing, and the tokens of each on
    ``tokens``. ``heads`` divides the KV heads. Heads stay within a host of 8; tokens go over hosts where all do not fit in one."""
    link = NVLINK if heads * tokens <= 8 else HOSTS
    mine = replace(shape, Hkv=shape.Hkv // heads)
    part = replace(mine, L=-(-shape.L // tokens), n_fac=max(1, shape.n_fac // tokens))
    kernels = float(evaluate(DENSE_US if dense else SPARSE_US, part, card or cards()[0]))
    sizes = [PART_BYTES] if dense else [KEY_BYTES, PART_BYTES, *([LSE_BYTES] if reduction == "softmax_sum" else [])]
    return Time(kernels, sum(collective_us(GATHER_US, size, mine, tokens, link) for size in sizes))


def llama(batch: int, length: int) -> Shape:
    """Llama-3.1-8B's attention in bf16, half of the frequencies in int4, n_fac 1024."""
    return Shape(B=batch, L=length, Hkv=8, G=4, d=128, dv=128, item=2, n_fac=1024, w=64, fc=36)


def table() -> str:
    """Expected microseconds of one layer's attention by how it is shared out, in Markdown."""
    ways = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (8, 1), (1, 8), (8, 8), (1, 64))
    shapes = ((4, 1 << 16), (1, 1 << 18), (1, 1 << 20), (1, 1 << 22))
    names = [f"{batch} x {length >> 10}k" for batch, length in shapes]
    rows = [f"| GPUs (heads x tokens) | {' | '.join(names)} |", f"|---|{'---|' * len(shapes)}"]
    for heads, tokens in ways:
        cells = []
        for batch, length in shapes:
            dense, sparse = (layer_time(llama(batch, length), heads, tokens, dense=d) for d in (True, False))
            cells.append(f"{dense.us:.0f} / {sparse.us:.0f} ({sparse.exchanges:.0f})")
        rows.append(f"| {heads * tokens} ({heads} x {tokens}) | {' | '.join(cells)} |")
    return "\n".join(rows)


def thresholds_table() -> str:
    """Expected microseconds of finding one layer's global threshold, by gathering keys and by counting, in Markdown."""
    shape = llama(1, 1 << 20)
    rows = [
        "| GPUs | keys: a GPU receives | time | counting, four rounds: a GPU receives | time |",
        "|---|---|---|---|---|",
    ]
    for ranks in (2, 4, 8, 64):
        link = NVLINK if ranks <= 8 else HOSTS
        keys, counts = (evaluate(s.subs(P, ranks), shape, cards()[0]) for s in (KEY_BYTES, HISTOGRAM_BYTES))
        gathered = collective_us(GATHER_US, KEY_BYTES, shape, ranks, link)
        counted = 4 * collective_us(REDUCE_US, HISTOGRAM_BYTES, shape, ranks, link)
        received = keys * (ranks - 1) / 1e3, 4 * 2 * counts / 1e3
        rows.append(f"| {ranks} | {received[0]:.0f} kB | {gathered:.0f} us | {received[1]:.0f} kB | {counted:.0f} us |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(), thresholds_table(), sep="\n\n")
