"""What matching finds: data passed from ``match`` to ``plan``, ``rewrite``, ``calibrate`` and ``report``.

Dimension letters, used throughout the package:

    B    batch                         L    cached tokens (the length of the K/V the attention reads)
    Hq   query heads                   T    new tokens in this call (1 when decoding, a few when verifying)
    Hkv  key/value heads               D    dims of a query/key head      Dv  dims of a value head
    G    Hq // Hkv, the query group    R    rotated dims of a head (2 per frequency chunk)
    W    dominant dims kept per KV head: 2 * n_tip, and n_tip single ones where there is no rotary embedding
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import fx
from torch._ops import OpOverload


@dataclass(frozen=True)
class Expr:
    """A tensor of the traced graph: the value of a shadow node, seen through views and casts.

    ``steps`` are applied in order, each as ``op(x, *args)``; they are ATen overloads that copy nothing (permute, unsqueeze,
    view, slice, select, expand) or a dtype cast. Whoever emits an ``Expr`` into another graph emits the node's value first
    and then the steps.
    """

    node: fx.Node
    steps: tuple[tuple[OpOverload, tuple[Any, ...]], ...] = ()

    def then(self, op: OpOverload, *args: Any) -> Expr:
        return Expr(self.node, (*self.steps, (op, args)))


@dataclass(frozen=True)
class Rope:
    """A rotary embedding as proven by running it, not as spelled.

    ``pairs[f]`` are the two dims of a head (as the attention sees them, after rotation) that frequency chunk ``f`` turns in
    one plane; chunks are ordered by their first dim. ``magnitude`` is the common factor on rotated dims (YaRN's attention
    factor; 1.0 for plain RoPE), known to within ``error``: tables in half precision tell it less exactly, and otherwise at each position.
    No pairs: there is no rotary embedding, or none was asked for.
    """

    pairs: tuple[tuple[int, int], ...]
    head_dim: int
    magnitude: float = 1.0
    error: float = 0.0

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.pairs)

    @property
    def kind(self) -> str:
        """``half-split``, ``interleaved`` or ``other``, for people; code uses ``pairs``."""
        n = len(self.pairs)
        if n == 0:
            return "none"
        first = min(min(p) for p in self.pairs)
        shifted = tuple((min(a, b) - first, max(a, b) - first) for a, b in self.pairs)
        if shifted == tuple((i, i + n) for i in range(n)):
            return "half-split"
        if shifted == tuple((2 * i, 2 * i + 1) for i in range(n)):
            return "interleaved"
        return "other"


@dataclass(frozen=True)
class Cache:
    """How the keys that an attention reads came to be.

    ``kind``: ``static`` (a buffer of fixed size, written in place), ``dynamic`` (concatenated: a new tensor each step) or
    ``none`` (the keys of this call only). ``write`` is the spelling's registered name. For a static cache, ``k_input`` is the
    position of the key buffer among the Dynamo graph's placeholders, ``k_steps`` lead from that buffer to the canonical
    ``[B, Hkv, L, D]`` and ``slots`` gives the rows of L that this call writes (int64 ``[T]``, shared by the batch, or
    ``[B, T]``); ``None`` where they cannot be told, which costs a rebuild of the packed FC cache each step, never a wrong one.
    ``rewritten_later`` is true when the graph writes the buffer again after this attention has read it.
    """

    kind: Literal["static", "dynamic", "none"]
    write: str = ""
    k_input: int | None = None
    k_steps: tuple[tuple[OpOverload, tuple[Any, ...]], ...] = ()
    slots: Expr | None = None
    rewritten_later: bool = False


@dataclass(frozen=True)
class Shard:
    """One process's part of a KV cache whose tokens lie on several: ``[rank * rows, (rank + 1) * rows)`` of ``length``. ``group`` is the
    name of their process group."""

    rows: int
    rank: int
    ranks: int
    group: str

    @property
    def length(self) -> int:
        """L, of all processes together."""
        return self.ranks * self.rows


@dataclass(frozen=True)
class AttentionSite:
    """One softmax attention whose queries and keys carry a proven RoPE, or none where that was allowed.

    Canonical layouts: ``q [B, Hq, T, D]`` (query head h reads KV head h // G), ``k [B, Hkv, L, D]``, ``v [B, Hkv, L, Dv]``,
    ``mask`` broadcastable to ``[B, Hq, T, L]``, ``sinks [Hq]``. ``output`` is the name of the Dynamo node whose value is the
    attention's result and ``output_steps`` lead from the canonical ``[B, Hq, T, Dv]`` to that node's layout and dtype. Where tokens lie
    on several processes (``shard``), k and v are this one's buffers and L their rows; the mask is that of all tokens.
    """

    index: int  # order among the graph's attention nodes, matched or not
    layer: str  # module path, e.g. "model.layers.3.self_attn"; "#2" marks the second run of one module in a graph
    source: str  # "file.py:line" of the user's code
    anchor: str  # the anchor's registered name, e.g. "sdpa"
    output: str
    q: Expr
    k: Expr
    v: Expr
    scale: float  # multiplies q.k; as in the graph, never a default taken on trust
    cache: Cache
    rope: Rope
    shape: tuple[Any, ...]  # (B, Hq, Hkv, T, L, D, Dv); ints, or SymInts where the graph is dynamic
    mask: Expr | None = None
    mask_kind: Literal["none", "bool", "additive"] = "none"
    is_causal: bool = False
    softcap: float = 0.0  # s -> softcap * tanh(s / softcap) before the mask; 0.0 is off
    sinks: Expr | None = None  # learned logits that join the softmax's denominator
    output_steps: tuple[tuple[OpOverload, tuple[Any, ...]], ...] = ()
    notes: tuple[str, ...] = ()
    shard: Shard | None = None


@dataclass(frozen=True)
class NoMatch:
    """An attention left as it was, and why.

    ``reason`` is one of ``REASONS``; ``detail`` says what was expected and found at which node, for people.
    """

    index: int
    layer: str
    source: str
    anchor: str
    reason: str
    detail: str = ""
    trace: tuple[str, ...] = field(default=())  # the best partial match: one line per step of the walk


def below(path: str, sites: Sequence[AttentionSite | NoMatch]) -> list[AttentionSite | NoMatch]:
    """The sites with their layers named from a module that holds the traced one at ``path``; a site without a name has none."""
    return [replace(site, layer=f"{path}.{site.layer}") if site.layer else site for site in sites]


#: Reasons an attention is left as it was. Keys are stable (tests, stats and explain() use them); values are for people.
REASONS: dict[str, str] = {
    "no-rope": "the queries or keys carry no rotary embedding (allow_no_rope=True has such attention sparse, by single dims)",
    "rope-not-proven": "what precedes the keys looks like a rotary embedding but is not a set of plane rotations",
    "rope-mismatch": "queries and keys are not rotated alike",
    "incomplete-pattern": "part of the pattern lies in another graph (a graph break, or keys that arrive ready-made)",
    "unknown-cache-write": "the keys come from a cache write that no registered spelling reads",
    "unknown-attention": "a softmax over scores that no registered anchor reads",
    "unknown-mask": "the mask could not be brought to [B, Hq, T, L]",
    "causal-single-query": "is_causal=True with one query attends to the first key only",
    "dropout": "attention dropout is active",
    "cross-attention": "keys and values do not grow with the queries (cross-attention)",
    "unsupported-value": "a scale, softcap or sink is not a constant of the graph",
    "heads": "the query heads do not map to KV heads in equal consecutive groups",
    "failed": "matching this attention raised an error (kept as the detail)",
}
