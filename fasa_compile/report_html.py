"""The report as one HTML file that needs nothing else: a section per graph, a row per site, what its RoPE turns and what is scored."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fasa_compile.report import Report, Row

_STYLE = """body{font:14px system-ui,sans-serif;margin:2em;color:#222}table{border-collapse:collapse}
td,th{border-bottom:1px solid #ddd;padding:.4em .7em;text-align:left;vertical-align:top}.sparse{color:#0a6b2d}.dense{color:#9a3412}
code{font-size:12px}summary{cursor:pointer}svg{display:block;margin-top:.3em}"""
_CELL = 5  # pixels per frequency chunk


def html(report: Report) -> str:
    """A whole document."""
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>fasa_compile</title>',
        f"<style>{_STYLE}</style></head><body><h1>fasa_compile</h1>",
    ]
    if not report.graphs:
        parts.append(f"<p>{escape(str(report))}</p>")
    for graph in report.graphs:
        rows = [row for row in report.rows if row.graph == graph.index]
        sparse = sum(row.decision == "sparse" for row in rows)
        parts.append(f"<h2>Graph {graph.index}: {escape(graph.kind)}</h2>")
        if graph.note:
            parts.append(f"<p>{escape(graph.note)}</p>")
        if rows:
            head = ("layer", "source", "decision", "heads", "RoPE", "cache", "budget", "KV read per step")
            parts.append(f"<p>{sparse} of {len(rows)} attention sites decode sparsely.</p><table><tr>")
            parts += [f"<th>{name}</th>" for name in head]
            parts += ["</tr>", *(_row(row) for row in rows), "</table>"]
    parts.append("</body></html>")
    return "".join(parts)


def _row(row: Row) -> str:
    why = f"<br>{escape(row.reason)}: {escape(row.why)}" if row.reason else ""
    if row.trace:
        steps = "".join(f"<li><code>{escape(step)}</code></li>" for step in row.trace)
        why += f"<details><summary>read so far</summary><ol>{steps}</ol></details>"
    read = f"{row.sparse_bytes:,} of {row.dense_bytes:,} bytes" if row.dense_bytes else ""
    cells = [
        escape(row.layer),
        f"<code>{escape(row.source)}</code>",
        f'<b class="{row.decision}">{row.decision}</b>{why}',
        escape(row.heads),
        escape(row.rope) + frequencies(row.n_fc, row.dominant),
        escape(row.cache),
        escape(row.budget),
        read,
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def frequencies(n_fc: int, dominant: Sequence[Sequence[int]]) -> str:
    """A picture: one line per KV head, one cell per frequency chunk from fast to slow; the dominant ones are filled."""
    if not dominant or not n_fc:
        return ""
    cells = [
        f'<rect x="{f * _CELL}" y="{h * _CELL}" width="{_CELL - 1}" height="{_CELL - 1}" '
        f'fill="{"#0a6b2d" if f in chosen else "#dddddd"}"/>'
        for h, chosen in enumerate(map(set, dominant))
        for f in range(n_fc)
    ]
    size = f'width="{n_fc * _CELL}" height="{len(dominant) * _CELL}"'
    return f'<svg {size} role="img" aria-label="dominant frequency chunks per KV head">{"".join(cells)}</svg>'
