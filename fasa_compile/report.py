"""Report: what happened to each attention site and why, as data, text, JSON or HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fasa_compile.cost import NEVER
from fasa_compile.plan import WHY_DENSE, Decision, hint
from fasa_compile.sites import REASONS, AttentionSite


@dataclass(frozen=True)
class Row:
    """One attention site of one graph."""

    graph: int
    site: int
    layer: str
    source: str
    anchor: str
    decision: (
        str  # "sparse", "dense-kernel" (exact, grouped, each valid token read once) or "dense" (as the model has it)
    )
    reason: str  # stable key; "" where sparse
    why: str  # the reason in words, with what was found
    rope: str  # kind and rotated width, e.g. "half-split 64/64"; "none: single dims" where it is sparse without
    cache: str  # e.g. "static (index_copy)"
    state: str  # how the packed FC cache is kept
    heads: str  # "Hq/Hkv x D"
    budget: str  # "n_fac (n_sink + n_recent)"
    n_tip: int
    dense_bytes: int  # of K and V read per decode step, batch included, cache full
    sparse_bytes: int  # of what was decided
    packed_bytes: int  # of the packed FC cache, kept from step to step
    scratch_bytes: int  # needed while this site runs; sites take turns
    dense_us: float | None  # expected times by the cost model, on a GPU
    sparse_us: float | None
    hot_bytes: int  # of the hot buffer on the GPU, where K and V lie in host memory
    host_bytes: int  # of K and V there
    break_even: int | None  # the shortest cache that is expected to be read no slower sparsely
    n_fc: int = 0  # frequency chunks of a head; its dims where it has no rotary embedding
    tokens: int = 1  # query tokens per sequence; of a graph that serves several numbers, the one it was traced with
    dominant: tuple[tuple[int, ...], ...] = ()  # per KV head the chunks that score its tokens
    trace: tuple[str, ...] = ()  # of a refused attention: what was read before, one line a step


@dataclass(frozen=True)
class GraphRecord:
    """One graph that the backend saw: its decisions, or why there are none."""

    index: int
    kind: str  # "decode", "prefill", "no attention", "training", "untraceable"
    decisions: tuple[Decision, ...] = ()
    note: str = ""
    seconds: float = 0.0  # of a core, spent in this package's passes: capture, match, plan and rewrite


def why(decision: Decision) -> str:
    """A decision's reason in words."""
    text = WHY_DENSE.get(decision.reason) or REASONS.get(decision.reason) or decision.reason
    return f"{text}: {decision.detail}" if decision.detail else text


def _row(graph: int, decision: Decision) -> Row:
    site = decision.site
    common = dict(
        graph=graph,
        site=site.index,
        layer=site.layer,
        source=site.source,
        anchor=site.anchor,
        decision=decision.action,
        reason=decision.reason,
        why=why(decision) if decision.reason else "",
        state=decision.state if decision.action == "sparse" else "",
        n_tip=decision.profile.n_tip if decision.profile is not None else 0,
        dense_bytes=decision.dense_bytes,
        sparse_bytes=decision.sparse_bytes,
        hot_bytes=decision.hot_bytes,
        host_bytes=decision.host_bytes,
        **_costs(decision),
    )
    budget = decision.budget
    text = f"{budget.n_fac} ({budget.n_sink}+{budget.n_recent})" if budget is not None else ""
    if not isinstance(site, AttentionSite):
        return Row(rope="", cache="", heads="", budget="", trace=site.trace, **common)
    _, Hq, Hkv, T, _, D, _ = (hint(s) for s in site.shape)
    rope = f"{site.rope.kind} {site.rope.rotary_dim}/{D}" if site.rope.pairs else ""
    if not site.rope.pairs and decision.action == "sparse":
        rope = "none: single dims"
    if abs(site.rope.magnitude - 1.0) > 1e-3:
        rope += f" x{site.rope.magnitude:.3g}"
    cache = site.cache.kind + (f" ({site.cache.write})" if site.cache.write else "")
    if site.shard is not None:
        cache += f", over {site.shard.ranks} processes"
    chosen = decision.profile.fcs.tolist() if decision.profile is not None else []
    return Row(
        rope=rope,
        cache=cache,
        heads=f"{Hq}/{Hkv} x {D}",
        budget=text,
        tokens=T,
        n_fc=len(decision.profile.rope.chunks) if decision.profile is not None else len(site.rope.pairs),
        dominant=tuple(tuple(head) for head in chosen),
        **common,
    )


def _costs(decision: Decision) -> dict[str, Any]:
    """The cost model's fields of a row."""
    cost, sparse = decision.cost, decision.action == "sparse"
    if cost is None:
        return dict(packed_bytes=0, scratch_bytes=0, dense_us=None, sparse_us=None, break_even=None)
    scratch = cost.sparse_scratch if sparse else cost.dense_scratch if decision.action == "dense-kernel" else 0
    possible = decision.profile is not None or sparse or decision.reason in ("within-budget", "below-break-even")
    return dict(
        packed_bytes=cost.packed_bytes if sparse else 0,
        scratch_bytes=scratch,
        dense_us=cost.dense_us,
        sparse_us=cost.sparse_us if possible else None,
        break_even=cost.break_even if possible else None,
    )


def _costs_in_words(rows: list[Row], card: str) -> list[str]:
    """Memory and expected times of a graph."""
    lines = []
    if any(r.scratch_bytes for r in rows):
        packed, scratch = sum(r.packed_bytes for r in rows), max(r.scratch_bytes for r in rows)
        lines.append(f"memory: packed FC caches {_megabytes(packed) or 'none'}, scratch {_megabytes(scratch)}")
    hosted = [r for r in rows if r.host_bytes]
    if hosted:
        kept = sum(r.packed_bytes + r.hot_bytes for r in hosted)
        whole = sum(r.host_bytes for r in hosted)
        lines.append(
            f"offload: K and V of {len(hosted)} sites in host memory, {_megabytes(whole)}; for them on the device "
            f"{_megabytes(kept) or 'nothing'} ({100 * kept / whole:.1f} %), of it hot buffers "
            f"{_megabytes(sum(r.hot_bytes for r in hosted)) or 'none'}; kernels fetch the rows that are missing, so CUDA graphs hold "
            "the whole step"
        )
    timed = [r for r in rows if r.dense_us is not None and r.decision != "dense"]
    if timed:
        dense = sum(r.dense_us or 0.0 for r in timed)
        chosen = sum((r.sparse_us if r.decision == "sparse" else r.dense_us) or 0.0 for r in timed)
        lines.append(
            f"expected attention time per step (cache full, constants of {card}): {chosen:.0f} us, dense kernel {dense:.0f} us"
        )
        lengths = sorted({r.break_even for r in timed if r.break_even is not None})
        if lengths:
            words = ", ".join("never" if n >= NEVER else f"{n} tokens" for n in lengths)
            lines.append(f"break-even: {words}")
    return lines


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in [header, *rows]]


def _partial_match(trace: tuple[str, ...]) -> str:
    """How far an attention was read: the last step of the walk, and what queries and keys were found to be made of."""
    made_of = dict.fromkeys(line.partition(": ")[2] for line in trace if " are read as far as " in line)
    return "; ".join(made_of) or f"read as far as {trace[-1]}"


def _megabytes(n: int) -> str:
    return f"{n / 2**20:.2f} MiB" if n else ""


class Report:
    """What a backend did: one row per attention site of every graph it saw.

    ``str(report)`` is a table for people, ``report.rows`` the data, ``report.json()`` and ``report.html()`` are documents. Rows add up:
    ``len(rows)`` is the number of attention nodes in the traced graphs.
    """

    def __init__(self, graphs: list[GraphRecord]) -> None:
        self.graphs = tuple(graphs)
        self.rows = tuple(_row(g.index, d) for g in graphs for d in g.decisions)

    @property
    def sparse(self) -> tuple[Row, ...]:
        return tuple(r for r in self.rows if r.decision == "sparse")

    def json(self) -> str:
        """The report as a JSON document: ``{"schema": 1, "graphs": [...], "rows": [...]}``.

        A graph has ``index``, ``kind``, ``sites`` (how many) and ``note``; a row the fields of ``Row``. Another schema number
        means that a field was removed or means something else; fields may be added under the same number.
        """
        graphs = [
            {"index": g.index, "kind": g.kind, "sites": len(g.decisions), "note": g.note, "seconds": g.seconds}
            for g in self.graphs
        ]
        return json.dumps({"schema": 1, "graphs": graphs, "rows": [asdict(r) for r in self.rows]}, indent=1)

    def html(self, run: Mapping[str, Any] | None = None) -> str:
        """The report as one HTML document that needs no other file; ``run``: what one run took (``fasa-compile report``)."""
        from fasa_compile.report_html import html

        return html(self, run)

    def __str__(self) -> str:
        if not self.graphs:
            return (
                "fasa_compile: this backend has seen no graph yet. Note that `torch.compile(model).generate(...)` runs the "
                "original, uncompiled model; use `model.forward = torch.compile(model.forward, backend=...)` and then "
                "`model.generate(..., cache_implementation='static')`, or `model.compile(backend=...)`."
            )
        lines: list[str] = []
        for graph in self.graphs:
            n = sum(d.action == "sparse" for d in graph.decisions)
            exact = sum(d.action == "dense-kernel" for d in graph.decisions)
            head = f"graph {graph.index}: {graph.kind}"
            if graph.decisions:
                head += f", {n} of {len(graph.decisions)} attention sites decode sparsely"
            if exact:
                head += f", {exact} exactly by the dense kernel"
            lines.append(head + (f" ({graph.note})" if graph.note else ""))
            lines += [f"  {line}" for line in self._graph_table(graph)]
        if not self.sparse:
            lines.append("No attention site decodes sparsely.")
        return "\n".join(lines)

    def _graph_table(self, graph: GraphRecord) -> list[str]:
        rows = [_row(graph.index, d) for d in graph.decisions]
        if not rows:
            return []
        header = [
            "layer",
            "source",
            "heads",
            "rope",
            "cache",
            "decision",
            "budget",
            "FC cache",
            "KV read/step",
            "dense",
        ]
        cells = []
        for r in rows:
            decision = r.decision if not r.reason else f"{r.decision}: {r.reason}"
            if r.decision == "sparse" and r.tokens > 1:
                decision += f", {r.tokens} tokens at once"
            cells.append(
                [
                    r.layer,
                    r.source,
                    r.heads,
                    r.rope,
                    r.cache,
                    decision,
                    r.budget,
                    r.state,
                    _megabytes(r.sparse_bytes),
                    _megabytes(r.dense_bytes),
                ]
            )
        reasons = sorted({(r.reason, r.why) for r in rows if r.reason})
        card = next((d.cost.card for d in graph.decisions if d.cost is not None), "")
        read = [f"{r.source or r.layer}: {_partial_match(r.trace)}" for r in rows if r.reason and r.trace]
        return _table(header, cells) + [f"{key}: {text}" for key, text in reasons] + read + _costs_in_words(rows, card)
