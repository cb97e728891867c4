"""Report: what happened to each attention site and why, as data, text or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

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
    decision: str  # "sparse" or "dense"
    reason: str  # stable key; "" where sparse
    why: str  # the reason in words, with what was found
    rope: str  # kind and rotated width, e.g. "half-split 64/64"
    cache: str  # e.g. "static (index_copy)"
    state: str  # how the packed FC cache is kept
    heads: str  # "Hq/Hkv x D"
    budget: str  # "n_fac (n_sink + n_recent)"
    n_tip: int
    dense_bytes: int  # of K and V read per decode step, batch included, cache full
    sparse_bytes: int


@dataclass(frozen=True)
class GraphRecord:
    """One graph that the backend saw: its decisions, or why there are none."""

    index: int
    kind: str  # "decode", "prefill", "no attention", "training", "untraceable"
    decisions: tuple[Decision, ...] = ()
    note: str = ""


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
    )
    budget = decision.budget
    text = f"{budget.n_fac} ({budget.n_sink}+{budget.n_recent})" if budget is not None else ""
    if not isinstance(site, AttentionSite):
        return Row(rope="", cache="", heads="", budget="", **common)  # type: ignore[arg-type]
    _, Hq, Hkv, _, _, D, _ = (hint(s) for s in site.shape)
    rope = f"{site.rope.kind} {site.rope.rotary_dim}/{D}"
    if abs(site.rope.magnitude - 1.0) > 1e-3:
        rope += f" x{site.rope.magnitude:.3g}"
    cache = site.cache.kind + (f" ({site.cache.write})" if site.cache.write else "")
    return Row(rope=rope, cache=cache, heads=f"{Hq}/{Hkv} x {D}", budget=text, **common)  # type: ignore[arg-type]


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in [header, *rows]]


def _megabytes(n: int) -> str:
    return f"{n / 2**20:.2f} MiB" if n else ""


class Report:
    """What a backend did: one row per attention site of every graph it saw.

    ``str(report)`` is a table for people, ``report.rows`` the data, ``report.json()`` a document. Rows add up:
    ``len(rows)`` is the number of attention nodes in the traced graphs.
    """

    def __init__(self, graphs: list[GraphRecord]) -> None:
        self.graphs = tuple(graphs)
        self.rows = tuple(_row(g.index, d) for g in graphs for d in g.decisions)

    @property
    def sparse(self) -> tuple[Row, ...]:
        return tuple(r for r in self.rows if r.decision == "sparse")

    def json(self) -> str:
        """The report as a JSON document: ``{"graphs": [...], "rows": [...]}``."""
        graphs = [{"index": g.index, "kind": g.kind, "sites": len(g.decisions), "note": g.note} for g in self.graphs]
        return json.dumps({"graphs": graphs, "rows": [asdict(r) for r in self.rows]}, indent=1)

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
            head = f"graph {graph.index}: {graph.kind}"
            if graph.decisions:
                head += f", {n} of {len(graph.decisions)} attention sites decode sparsely"
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
        return _table(header, cells) + [f"{key}: {text}" for key, text in reasons]
