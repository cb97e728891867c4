"""``fasa-compile eval``: what sparse steps cost in quality."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fasa_compile.cli.app import (
    ANYWAY,
    DEVICE,
    INNER,
    JSON,
    MODEL,
    N_FAC,
    app,
    budget_options,
    busy,
    command,
    need_tokenizer,
    numbers,
    pick_device,
    pick_inner,
    plain_table,
    print_json,
    read_profile,
    read_text,
    stdout,
    writes,
)


@command(app, "eval")
def evaluate(
    model: MODEL,
    text: Annotated[Path, typer.Option(help="A text file that was not calibrated on.", show_default=False)],
    profile: Annotated[str, typer.Option("--profile", "-p", help="A profile's file or name.", show_default=False)],
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each stretch of the text.")] = 4096,
    stretches: Annotated[int, typer.Option(min=1, help="How many stretches.")] = 1,
    last: Annotated[int, typer.Option(min=3, help="Tokens at the end of each that are decoded one by one.")] = 256,
    keys: Annotated[int, typer.Option(min=0, help="Facts to hide and ask for, of two kinds; 0: none.")] = 0,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens of the texts that hide the facts, like 2k,4k (--tokens).")
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(
            help="A file of questions to answer: JSON lines of LongBench, MATH-500 or AIME 2024. hub: Hugging Face's copy.",
            metavar="FILE|hub",
        ),
    ] = None,
    kind: Annotated[str, typer.Option(help="What --tasks has: longbench, math500 or aime24.")] = "longbench",
    first: Annotated[int | None, typer.Option(min=1, help="Only so many of the questions.")] = None,
    n_fac: N_FAC = None,
    out: Annotated[Path | None, typer.Option(help="Write the record there (JSON).", callback=writes())] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a plot of what was measured there (SVG).", callback=writes(".svg"))
    ] = None,
    device: DEVICE = None,
    inner: INNER = None,
    any_weights: ANYWAY = False,
    as_json: JSON = False,
) -> None:
    """What sparse steps cost: perplexity, KL, recall and answers, dense and sparse, token by token behind a dense prefill."""
    import torch

    from fasa_compile import loading
    from fasa_compile.doctor import environment
    from fasa_compile.errors import ModelError
    from fasa_compile.evaluation import evaluate as run
    from fasa_compile.evaluation import plot as draw
    from fasa_compile.tasks import hub
    from fasa_compile.tasks import load as load_tasks

    if last >= tokens - 1:
        raise typer.BadParameter(f"--last: expected less than --tokens - 1 = {tokens - 1}, found {last}")
    facts_at = numbers(lengths, "--lengths") if lengths else (tokens,)
    if facts_at[-1] > tokens:
        raise typer.BadParameter(f"--lengths: expected at most --tokens = {tokens}, found {facts_at[-1]}")
    try:
        asked = None if tasks is None else hub(kind) if str(tasks) == "hub" else load_tasks(tasks, kind)
        questions = (asked or [])[:first]
    except ValueError as problem:
        raise typer.BadParameter(f"--tasks: {problem}") from None
    found, place, compiler = loading.source(model), pick_device(device), pick_inner(inner)
    loaded = read_profile(profile)
    options: dict[str, Any] = {
        "inner": compiler,
        **({"check_weights": False} if any_weights else {}),
        **budget_options(n_fac),
    }
    with busy(f"loading {escape(found.name)}") as note:
        real, tokenizer = loading.load(found, place)
        ids = need_tokenizer(tokenizer, model)(read_text(text), verbose=False)["input_ids"]
        if len(ids) < tokens * stretches:
            raise ModelError(
                f"{text}: {stretches} stretches of {tokens} tokens need {tokens * stretches}, it has {len(ids)}"
            )
        note("decoding")
        texts = torch.tensor(ids[: tokens * stretches]).view(stretches, tokens)
        record = run(real, tokenizer, loaded, texts, last=last, keys=keys, lengths=facts_at, tasks=questions, **options)
    record = {
        "model": type(real).__name__,
        "profile": profile,
        "tokens": tokens,
        "last": last,
        **environment(place),
        **record,
    }
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        measured = f"{record['model']}, {Path(profile).name}, {record['card'].split(',')[0]}"
        title = f"{measured}; perplexity of the last {last} of {tokens} tokens"
        plot.write_text(draw(record, title), encoding="utf-8")
    if as_json:
        print_json(record)
        return
    table = plain_table(("", "perplexity", "x dense", "KL to dense", "same top token", "steps/s"))
    for name, row in record["perplexity"].items():
        columns = (
            row["perplexity"],
            row["perplexity_ratio"],
            row["kl_to_dense"],
            row["top1_agreement"],
            row["steps_per_second"],
        )
        table.add_row(name, *(f"{n:.{d}f}" for n, d in zip(columns, (3, 4, 4, 3, 1), strict=True)))
    stdout().print(table)
    for facts in ("passkey", "key_value"):
        for length, paths in record.get(facts, {}).items():
            shares = ", ".join(f"{name} {100 * row['digits']:.0f} %" for name, row in paths.items())
            stdout().print(f"{facts} at {length} tokens, digits recalled: {shares}", highlight=False)
    for name, row in record.get("tasks", {}).items():
        stdout().print(f"{kind}, {row['number']} questions, {name}: {100 * row['mean']:.1f} %", highlight=False)
