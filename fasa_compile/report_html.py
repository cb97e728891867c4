"""The report as one HTML file that needs nothing else: what was decided and why, the frequencies chosen, and of a run what it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from fasa_compile.charts import heat_map

if TYPE_CHECKING:
    from fasa_compile.report import Report, Row

_STYLE = """:root{color-scheme:light}
body{font:14px/1.45 system-ui,sans-serif;margin:0;color:#1f2937;background:#f9fafb}main{max-width:1180px;margin:0 auto;padding:28px}
h1{font-size:24px;margin:0 0 2px}h2{font-size:18px;margin:34px 0 8px}p{margin:4px 0 10px;max-width:80ch}.faint{color:#6b7280}
.cards{display:flex;flex-wrap:wrap;gap:12px;margin:18px 0}.card{background:#fff;border:1px solid #e5e7eb;border-radius:8px;padding:10px 16px;
min-width:120px}.card b{display:block;font-size:22px;line-height:1.25}.card span{color:#6b7280;font-size:12px}
table{border-collapse:collapse;background:#fff;border:1px solid #e5e7eb}td,th{border-bottom:1px solid #e5e7eb;padding:6px 10px;
text-align:left;vertical-align:top}th{background:#f3f4f6;font-weight:600;white-space:nowrap}td.n{text-align:right;font-variant-numeric:tabular-nums;
white-space:nowrap}.scroll{overflow-x:auto}.sparse{color:#0a7d3c}.dense-kernel{color:#2563eb}.dense{color:#9a3412}
code{font-size:12px;overflow-wrap:anywhere}summary{cursor:pointer;color:#374151}details{margin:8px 0}svg{display:block;max-width:100%;height:auto}
.why{color:#6b7280;font-size:12px;max-width:46ch}.bar{display:inline-block;height:10px;background:#0a7d3c;vertical-align:middle}
td svg{margin-top:5px}"""
_CELL = 5  # pixels per frequency chunk in a row's own picture
_OPEN_ROWS = 40  # a graph with more sites starts folded


def html(report: Report, run: Mapping[str, Any] | None = None) -> str:
    """A whole document. ``run``: what one run took, as ``run_facts`` makes it; shown first."""
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>fasa_compile</title><style>{_STYLE}</style></head><body><main><h1>fasa_compile</h1>",
    ]
    if run is not None:
        parts += _run(run)
    if not report.graphs:
        parts.append(f"<p>{escape(str(report))}</p>")
    decode = [g for g in report.graphs if g.kind == "decode" and g.decisions]
    if decode:
        parts += _frequencies([row for row in report.rows if row.graph == decode[-1].index])
    for graph in report.graphs:
        rows = [row for row in report.rows if row.graph == graph.index]
        sparse = sum(row.decision == "sparse" for row in rows)
        parts.append(f"<h2>Graph {graph.index}: {escape(graph.kind)}</h2>")
        if graph.note:
            parts.append(f"<p>{escape(graph.note)}</p>")
        if rows:
            head = ("layer", "decision", "heads", "RoPE", "cache", "budget", "KV read per step")
            parts.append(f"<p>{sparse} of {len(rows)} attention sites decode sparsely.</p>")
            unfolded = ' open=""' if len(rows) <= _OPEN_ROWS else ""
            parts.append(f"<details{unfolded}><summary>every site</summary>")
            parts.append('<div class="scroll"><table><tr>')
            parts += [f"<th>{name}</th>" for name in head]
            parts += ["</tr>", *(_row(row) for row in rows), "</table></div></details>"]
    parts.append("</main></body></html>")
    return "".join(parts)


def size(n: float) -> str:
    """Bytes in words: 12.3 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


def _row(row: Row) -> str:
    why = f'<div class="why">{escape(row.reason)}: {escape(row.why)}</div>' if row.reason else ""
    if row.trace:
        steps = "".join(f"<li><code>{escape(step)}</code></li>" for step in row.trace)
        why += f"<details><summary>read so far</summary><ol>{steps}</ol></details>"
    read = f"{size(row.sparse_bytes)} of {size(row.dense_bytes)}" if row.dense_bytes else ""
    cells = [
        f'{escape(row.layer) or "(no module path)"}<br><code class="faint">{escape(row.source)}</code>',
        f'<b class="{row.decision}">{row.decision}</b>{why}',
        escape(row.heads),
        escape(row.rope) + frequencies(row.n_fc, row.dominant),
        escape(row.cache),
        escape(row.budget),
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + f'<td class="n">{read}</td></tr>'


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
    box = f'width="{n_fc * _CELL}" height="{len(dominant) * _CELL}"'
    return f'<svg {box} role="img" aria-label="dominant frequency chunks per KV head">{"".join(cells)}</svg>'


def _frequencies(rows: Sequence[Row]) -> list[str]:
    """The map of all layers: how many of a layer's KV heads chose each frequency, and each head of its own below."""
    rows = [row for row in rows if row.dominant]
    if not rows:
        return []
    shares = [
        (row.layer, [sum(f in head for head in row.dominant) / len(row.dominant) for f in range(row.n_fc)])
        for row in rows
    ]
    heads = [
        (f"{row.layer} head {h}", [float(f in head) for f in range(row.n_fc)])
        for row in rows
        for h, head in enumerate(row.dominant)
    ]
    axis = "frequency chunk: fast (near tokens) to slow (far tokens)"
    return [
        "<h2>Frequencies that score the tokens</h2>",
        "<p>One row per layer, one cell per rotary frequency; the darker, the more of the layer's KV heads chose it.</p>",
        f'<div class="scroll">{heat_map(shares, x_label=axis, label="chosen frequencies by layer", most="all heads")}</div>',
        f"<details><summary>every KV head ({len(heads)})</summary>",
        f'<div class="scroll">{heat_map(heads, x_label=axis, label="chosen frequencies by head", most="chosen")}</div></details>',
    ]


# --- a run ---------------------------------------------------------------------------------------------------------------


def _card(value: str, name: str) -> str:
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>'


def _run(run: Mapping[str, Any]) -> list[str]:
    """What one run took. Keys as ``fasa-compile report`` makes them: ``model``, ``environment``, ``sparse`` and perhaps ``dense`` (statistics
    of a generation), ``lost_mass`` (layer -> mean and steps), ``packed_bytes``, ``prompt``, ``answer``, ``dense_answer``."""
    sparse, dense, lost = run["sparse"], run.get("dense"), run.get("lost_mass") or {}
    where = ", ".join(f"{name} {value}" for name, value in run["environment"].items() if value and name != "card")
    cards = [
        _card(f"{sparse['sparse_sites']} of {sparse['sites']}", "sites sparse"),
        _card(f"{sparse['ms_per_token']:.1f} ms", "per token, sparse"),
    ]
    if dense is not None:
        cards.append(_card(f"{dense['ms_per_token']:.1f} ms", "per token, dense"))
        if sparse["ms_per_token"]:
            cards.append(_card(f"{dense['ms_per_token'] / sparse['ms_per_token']:.2f} x", "dense / sparse"))
    if sparse["kv_bytes_dense"]:
        share = sparse["kv_bytes_read"] / sparse["kv_bytes_dense"]
        cards.append(_card(f"{100 * share:.0f} %", "of K and V read per step"))
    if lost:
        mean = sum(row["mean"] for row in lost.values()) / len(lost)
        cards.append(_card(f"{100 * (1 - mean):.1f} %", "of attention mass captured"))
    cards.append(_card(size(run["packed_bytes"]), "packed FC caches"))
    out = [
        f"<p><b>{escape(str(run['model']))}</b> on {escape(str(run['environment'].get('card', '')))}<br>"
        f'<span class="faint">{escape(where)}</span></p>',
        f'<div class="cards">{"".join(cards)}</div>',
        "<h2>What it took</h2>",
        _steps_table(sparse, dense),
    ]
    if lost:
        out += _captured(lost)
    if run.get("answer") is not None:
        out.append("<h2>What it said</h2>")
        out.append(
            f"<p><b>prompt</b> ({sparse['prompt_tokens']:,} tokens), its end: <code>{escape(run['prompt'][-300:])}</code></p>"
        )
        out.append(f"<p><b>sparse</b>: {escape(run['answer'])}</p>")
        if run.get("dense_answer") is not None:
            same = " (the same)" if run["dense_answer"] == run["answer"] else ""
            out.append(f"<p><b>dense</b>{same}: {escape(run['dense_answer'])}</p>")
    return out


def _steps_table(sparse: Mapping[str, Any], dense: Mapping[str, Any] | None) -> str:
    rows = [
        ("prompt tokens", "prompt_tokens", "{:,}"),
        ("prefill, s (with compiling)", "prefill_s", "{:.2f}"),
        ("new tokens", "new_tokens", "{:,}"),
        ("ms per token (median)", "ms_per_token", "{:.2f}"),
        ("tokens per s", "tokens_per_s", "{:.1f}"),
        ("sparse steps", "sparse_steps", "{:,}"),
        ("dense steps", "dense_steps", "{:,}"),
        ("packed caches made anew", "state_rebuilds", "{:,}"),
    ]
    columns = [("sparse", sparse), *([("dense", dense)] if dense is not None else [])]
    head = "<tr><th></th>" + "".join(f"<th>{name}</th>" for name, _ in columns) + "</tr>"
    body = "".join(
        f"<tr><td>{label}</td>"
        + "".join(f'<td class="n">{form.format(column[key])}</td>' for _, column in columns)
        + "</tr>"
        for label, key, form in rows
    )
    return f"<table>{head}{body}</table>"


def _captured(lost: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A bar per layer: the attention mass that the selection held."""
    rows = "".join(
        f'<tr><td>{escape(layer)}</td><td style="min-width:220px"><span class="bar" style="width:{200 * (1 - row["mean"]):.0f}px"></span></td>'
        f'<td class="n">{100 * (1 - row["mean"]):.2f} %</td><td class="n">{int(row["steps"])}</td></tr>'
        for layer, row in lost.items()
    )
    return [
        "<h2>Attention mass captured</h2>",
        "<p>How much of the exact attention weights fell on the selected tokens, measured while decoding (audit); one KV head at a time.</p>",
        f"<table><tr><th>layer</th><th></th><th>captured</th><th>steps</th></tr>{rows}</table>",
    ]
