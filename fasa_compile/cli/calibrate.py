"""``fasa-compile calibrate``: a text and a model to a profile."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fasa_compile.cli.app import (
    DEVICE,
    JSON,
    MODEL,
    N_FAC,
    app,
    budget_options,
    busy,
    command,
    need_tokenizer,
    pick_device,
    print_json,
    read_text,
    stderr,
    stdout,
    writes,
)
from fasa_compile.cli.profile import facts, profile_table


@command(app, "calibrate")
def calibrate(
    model: MODEL,
    text: Annotated[Path, typer.Option(help="A text file; a few thousand tokens are enough.", show_default=False)],
    out: Annotated[
        Path,
        typer.Option(
            help="The profile to write, .safetensors or .json.",
            show_default=False,
            callback=writes(".safetensors", ".json"),
        ),
    ],
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens of the text are used.")] = 4096,
    n_tip: Annotated[int | None, typer.Option(help="Dominant frequency chunks per KV head (half of them).")] = None,
    method: Annotated[str, typer.Option(help="score_variance, contextual_agreement or greedy_mass")] = "score_variance",
    fc_format: Annotated[str, typer.Option(help="fp32, bf16, fp16, fp8, int8 or int4")] = "int4",
    reduction: Annotated[
        str | None,
        typer.Option(help="static, affine, softmax_sum or max (default: what keeps the most attention mass)"),
    ] = None,
    n_fac: N_FAC = None,
    layer_budgets: Annotated[str, typer.Option(help="How layers share the budget: equal, mass or pyramid.")] = "equal",
    dense_above: Annotated[
        float | None, typer.Option(help="Layers that lose more than this share of attention mass stay dense.")
    ] = None,
    device: DEVICE = None,
    as_json: JSON = False,
) -> None:
    """Rank the rotary frequencies of every attention on a text, and write a profile."""
    import torch

    from fasa_compile import calibrate as make
    from fasa_compile import loading
    from fasa_compile.errors import CalibrationError
    from fasa_compile.profiles.schema import Budget

    found = loading.source(model)
    content = read_text(text)
    began = time.perf_counter()
    with busy(f"loading {escape(found.name)}"):
        loaded, tokenizer = loading.load(found, pick_device(device))
        ids = need_tokenizer(tokenizer, model)(content, verbose=False)["input_ids"][:tokens]
    if len(ids) < 2:
        raise CalibrationError(f"{text}: expected at least 2 tokens, found {len(ids)}")
    if not found.has_weights:
        stderr().print("[yellow]note:[/] no weights there: the profile is of random ones (seed 0)", highlight=False)
    budget = Budget().replace(**budget_options(n_fac))
    data = torch.tensor([ids], device=loaded.device)
    profile = make(
        loaded,
        data,
        n_tip=n_tip,
        method=method,
        fc_format=fc_format,
        reduction=reduction,
        budget=budget,
        layer_budgets=layer_budgets,
        dense_above=dense_above,
        progress=not as_json and sys.stderr.isatty(),
    )
    profile.save(out)
    seconds = time.perf_counter() - began
    if as_json:
        print_json({"out": str(out), "seconds": seconds, **facts(profile)})
        return
    stdout().print(
        f"[green]wrote[/] {escape(str(out))}: {len(profile.layers)} layers, {out.stat().st_size / 1024:.0f} KiB, from "
        f"{len(ids)} tokens in {seconds:.1f} s",
        highlight=False,
    )
    stdout().print(profile_table(profile))
    stdout().print(
        f"[dim]next: fasa-compile generate MODEL --profile {escape(str(out))} --prompt ...[/]", highlight=False
    )
