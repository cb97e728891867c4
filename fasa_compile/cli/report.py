"""``fasa-compile report``: a run as one HTML file."""

from __future__ import annotations

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
    PROFILE,
    app,
    budget_options,
    busy,
    command,
    need_tokenizer,
    pick_device,
    pick_inner,
    print_json,
    read_profile,
    stdout,
    writes,
)
from fasa_compile.cli.generate import statistics, statistics_line


@command(app, "report")
def report(
    model: MODEL,
    out: Annotated[Path, typer.Option(help="The HTML file to write.", show_default=False, callback=writes())],
    prompt: Annotated[str, typer.Option(help="What to continue or answer.")] = "",
    file: Annotated[Path | None, typer.Option(help="A text that stands before the prompt.")] = None,
    profile: PROFILE = None,
    n_fac: N_FAC = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=4, help="Tokens of each run.")] = 48,
    compare: Annotated[bool, typer.Option(help="Run densely too.")] = True,
    device: DEVICE = None,
    inner: INNER = None,
    any_weights: ANYWAY = False,
    as_json: JSON = False,
) -> None:
    """Run a prompt sparsely (every step audited) and densely, and write what happened as one HTML file."""
    import torch

    import fasa_compile
    from fasa_compile import loading
    from fasa_compile.doctor import environment
    from fasa_compile.errors import ModelError
    from fasa_compile.generation import Clock, compiled_forward

    found = loading.source(model)
    loaded = read_profile(profile) or "all"
    place, compiler = pick_device(device), pick_inner(inner)
    text = (file.read_text(encoding="utf-8") + "\n\n" if file is not None else "") + prompt
    with busy(f"loading {escape(found.name)}") as note:
        real, tokenizer = loading.load(found, place)
        ids = need_tokenizer(tokenizer, model)(text, return_tensors="pt", verbose=False)["input_ids"].to(real.device)
        if ids.shape[1] < 2:
            raise ModelError(
                f"a report needs a prompt of at least 2 tokens, found {ids.shape[1]}: give --prompt or --file"
            )
        runs: dict[str, Any] = {}
        options: dict[str, Any] = {
            "audit": 1,
            **({"check_weights": False} if any_weights else {}),
            **budget_options(n_fac),
        }
        backends: dict[str, Any] = {"sparse": fasa_compile.fasa_backend(loaded, inner=compiler, **options)}
        if compare:
            backends["dense"] = fasa_compile.fasa_backend(None, inner=compiler)
        for name, backend in backends.items():
            note(f"decoding, {name}")
            torch._dynamo.reset()
            fasa_compile.reset_stats()
            clock = Clock()
            with compiled_forward(real, backend):
                real.generate(
                    ids,
                    attention_mask=ids.new_ones(ids.shape),
                    max_new_tokens=new_tokens,
                    min_new_tokens=new_tokens,
                    do_sample=False,
                    cache_implementation="static",
                    disable_compile=True,
                    streamer=clock,
                    pad_token_id=0,
                )
            answer = tokenizer.decode(clock.tokens, skip_special_tokens=True)
            lost = fasa_compile.stats().get("lost_mass") or {}
            runs[name] = {"answer": answer, "lost_mass": lost, **statistics(ids.shape[1], clock, backend.explain())}
    made = backends["sparse"].explain()
    facts = {
        "model": type(real).__name__,
        "environment": environment(real.device),
        "profile": profile or "all",
        "prompt": text,
        "answer": runs["sparse"].pop("answer"),
        "lost_mass": runs["sparse"].pop("lost_mass"),
        "packed_bytes": sum(r.packed_bytes for r in made.sparse),
        "sparse": runs["sparse"],
    }
    if compare:
        facts["dense_answer"] = runs["dense"].pop("answer")
        runs["dense"].pop("lost_mass")
        facts["dense"] = runs["dense"]
    out.write_text(made.html(facts), encoding="utf-8")
    if as_json:
        print_json(facts)
    else:
        stdout().print(f"[green]wrote[/] {escape(str(out))}", highlight=False)
        stdout().print(statistics_line(runs["sparse"]), highlight=False)
