"""``fasa-compile doctor``: what works on this machine."""

from __future__ import annotations

import typer
from rich.markup import escape
from rich.table import Table

from fasa_compile.cli.app import JSON, NO, app, busy, command, print_json, stdout


@command(app, "doctor")
def doctor(as_json: JSON = False) -> None:
    """Versions, the card, what works on this machine and what to do about what does not."""
    with busy("looking at torch"):
        from fasa_compile.doctor import examine

        found = examine()
    if as_json:
        print_json([vars(f) for f in found])
    else:
        marks = {"ok": "[green]ok[/]", "note": "[yellow]--[/]", "bad": "[red]no[/]"}
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for f in found:
            advice = f"\n[dim]{escape(f.advice)}[/]" if f.advice else ""
            table.add_row(marks[f.state], f"[bold]{f.name}[/]", escape(f.found) + advice)
        stdout().print(table, highlight=False)
    if any(f.state == "bad" for f in found):
        raise typer.Exit(NO)
