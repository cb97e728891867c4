"""``fasa-compile explain``: which attentions would decode sparsely, from a configuration alone."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fasa_compile.cli.app import (
    JSON,
    MODEL,
    N_FAC,
    NO,
    PROFILE,
    app,
    budget_options,
    busy,
    command,
    plain_table,
    print_json,
    read_profile,
    short,
    stdout,
    writes,
)
from fasa_compile.errors import FasaWarning
from fasa_compile.report_html import size

if TYPE_CHECKING:
    from fasa_compile.report import Row


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3,5`` of sorted numbers; ``0-22 step 2`` where they are evenly apart."""
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}-{numbers[-1]} step {steps.pop()}"
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _folded(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that say the same of layers that differ in one number, together: ``model.layers.0-31.self_attn``."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        shape = re.sub(r"\d+", "#", row.layer, count=1)
        key = (row.graph, shape, row.source, row.heads, row.rope, row.cache, row.decision, row.why, row.budget)
        groups.setdefault((*key, row.sparse_bytes, row.dense_bytes, row.state), []).append(row)
    out = []
    for members in groups.values():
        numbers = [re.search(r"\d+", row.layer) for row in members]
        name = members[0].layer or "(no module path)"
        if len(members) > 1 and all(numbers):
            found = sorted(int(m.group()) for m in numbers if m)
            name = re.sub(r"\d+", _ranges(found), name, count=1)
        out.append((name, members))
    return out


_COLOUR = {"sparse": "green", "dense-kernel": "cyan", "dense": "yellow"}


def _sites_table(rows: Sequence[Row]) -> Group:
    """What becomes of each attention, alike layers folded, with the reasons below."""
    table = plain_table(("layers", "#", "heads", "rotary", "decision", "KV read per step"), right=("#",))
    reasons: dict[str, str] = {}
    for name, members in _folded(rows):
        row = members[0]
        decision = Text(row.decision, style=_COLOUR[row.decision])
        if row.reason:
            decision.append(f" {row.reason}", style="dim")
            reasons[row.reason] = row.why + (f" (at {row.source})" if row.source else "")
            if row.trace:
                reasons[row.reason] += f"; read as far as: {row.trace[-1]}"
        elif row.budget:
            decision.append(f" {row.budget}", style="dim")
        dense, sparse = (sum(getattr(r, f"{kind}_bytes") for r in members) for kind in ("dense", "sparse"))
        read = f"{size(sparse)} of {size(dense)}" if dense and sparse < dense else size(dense) if dense else ""
        table.add_row(name, str(len(members)), row.heads, row.rope, decision, read)
    notes = [Text.assemble((f"{key}: ", "bold yellow"), text) for key, text in sorted(reasons.items())]
    return Group(table, *notes)


@command(app, "explain")
def explain(
    model: MODEL,
    length: Annotated[int | None, typer.Option(help="Tokens of the cache (32768, or what the model can).")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    profile: PROFILE = None,
    n_fac: N_FAC = None,
    cache: Annotated[str, typer.Option(help="static or dynamic")] = "static",
    layers: Annotated[int | None, typer.Option(help="Look at the first layers only.")] = None,
    card: Annotated[str | None, typer.Option(help="Part of a card's name, for expected times.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the report there, as one HTML file.", callback=writes())
    ] = None,
    as_json: JSON = False,
) -> None:
    """Which attentions would decode sparsely, which not and why. Reads the configuration only: no weights, no GPU."""
    from fasa_compile import fasa_backend, loading
    from fasa_compile.cost import NEVER, cards
    from fasa_compile.plan import priced

    if cache not in ("static", "dynamic"):
        raise typer.BadParameter(f"--cache: expected static or dynamic, found {cache}")
    known = [c for c in cards() if (card or "").lower() in c.name.lower()]
    if not known:
        raise typer.BadParameter(f"--card: expected one of {', '.join(c.name for c in cards())}, found {card}")
    found = loading.source(model)
    loaded = read_profile(profile)
    with busy(f"reading {escape(found.name)}") as note:
        config = loading.configuration(found, layers)
        text = config.get_text_config(decoder=True)
        most = getattr(text, "max_position_embeddings", None) or 32768
        length = length or min(32768, most)
        skeleton: Any = loading.skeleton(config)
        note(f"tracing a decode step of {type(skeleton).__name__} over {length} tokens")
        backend = fasa_backend(
            loaded or "all",
            inner="eager",
            check_weights=False,
            **budget_options(n_fac if n_fac or loaded else min(1024, length // 8)),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FasaWarning)  # the table says it
            loading.survey(skeleton, backend, length=length, batch=batch, cache=cache)
    report = backend.explain()
    costs = [cost for g in backend.graphs for d in g.decisions if (cost := priced(d, known[0])) is not None]
    sparse = len(report.sparse)
    if html is not None:
        html.write_text(report.html(), encoding="utf-8")
    if as_json:
        print_json(
            {
                "model": type(skeleton).__name__,
                "length": length,
                "batch": batch,
                "sites": len(report.rows),
                "sparse": sparse,
                "expected": [{"layer": r.layer, **vars(c)} for r, c in zip(report.sparse, costs, strict=True)],
                "report": json.loads(report.json()),
            }
        )
        raise typer.Exit(0 if sparse else NO)
    out = stdout()
    parameters = sum(p.numel() for p in skeleton.parameters())
    out.print(
        f"[bold]{escape(type(skeleton).__name__)}[/], {short(parameters)} parameters, {text.num_hidden_layers} layers; "
        f"{cache} cache of {length:,} tokens, batch {batch}",
        highlight=False,
    )
    style = "green" if sparse else "yellow"
    out.print(
        f"[bold {style}]{sparse} of {len(report.rows)}[/] attention sites would decode sparsely\n", highlight=False
    )
    if report.rows:
        out.print(_sites_table(report.rows))
    else:
        out.print("The traced decode step holds no attention.")
    if costs:
        dense, packed = sum(c.dense_bytes for c in costs), sum(c.packed_bytes for c in costs)
        less = sum(c.sparse_bytes for c in costs)
        us, dense_us = (sum(getattr(c, f"{kind}_us") or 0.0 for c in costs) for kind in ("sparse", "dense"))
        even = max(c.break_even or 0 for c in costs)
        which = (
            f"profile {loaded.method}, {loaded.fc_format}"
            if loaded
            else "the default profile (int4, half of the frequencies)"
        )
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            "KV read per step", f"{size(less)} instead of {size(dense)}, {dense / max(less, 1):.1f} times less"
        )
        if packed:
            grid.add_row("packed FC caches", f"{size(packed)}, beside {size(dense)} of K and V")
        grid.add_row("attention per step", f"{us:,.0f} us expected, {dense_us:,.0f} us dense ({known[0].name})")
        grid.add_row(
            "break-even", "never" if even >= NEVER else f"{even:,} tokens: shorter caches are read densely on a GPU"
        )
        out.print(Panel(grid, title=f"expected with {which}", title_align="left", border_style="dim", expand=False))
    if not loaded and sparse:
        out.print("[dim]next: fasa-compile calibrate MODEL --text FILE --out PROFILE[/]", highlight=False)
    raise typer.Exit(0 if sparse else NO)
