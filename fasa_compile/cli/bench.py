"""``fasa-compile bench``: step time against context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fasa_compile.cli.app import (
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
    numbers,
    pick_device,
    pick_inner,
    plain_table,
    print_json,
    read_profile,
    short,
    stdout,
    writes,
)


def _bench_table(record: dict[str, Any]) -> Table:
    from fasa_compile.bench import VARIANTS
    from fasa_compile.charts import tokens

    names = [name for name in VARIANTS if any(name in c.get("variants", {}) for c in record["cases"])]
    heads = ["context", "prefill", *(f"{VARIANTS[name]}\nms/step" for name in names)]
    heads += ["tokens/s\nsparse", "memory\nsparse", "faster than\nHugging Face", "faster than\nours, dense"]
    table = plain_table(heads, right=heads)
    for case in record["cases"]:
        if "error" in case:
            table.add_row(tokens(case["context"]), Text("-", style="yellow"))
            continue
        rows = case["variants"]
        sparse = rows.get("sparse", {})
        took = case["prefill_s"]
        cells = [tokens(case["context"]), "" if took is None else f"{took:.2f} s"]
        cells += [f"{rows[name]['ms_per_step']:.2f}" if name in rows else "" for name in names]
        cells.append(f"{sparse['tokens_per_s']:.1f}" if sparse else "")
        cells.append(f"{sparse['memory_gib']:.1f} GiB" if "memory_gib" in sparse else "")
        for name in ("hf", "dense"):
            ratio = case.get(f"speedup_over_{name}")
            cells.append("" if ratio is None else f"[{'green' if ratio > 1.02 else 'default'}]{ratio:.2f} x[/]")
        table.add_row(*cells)
    return table


@command(app, "bench")
def bench(
    model: MODEL,
    contexts: Annotated[str, typer.Option(help="Lengths of the cache, e.g. 4k,32k,128k.")] = "4k,16k,32k",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    profile: PROFILE = None,
    n_fac: N_FAC = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant.")] = 24,
    variants: Annotated[str, typer.Option(help="Of hf, dense, sparse.")] = "hf,dense,sparse",
    prefill: Annotated[
        bool, typer.Option(help="Time a prefill of random tokens; else the cache is filled at random.")
    ] = True,
    sparse_anyway: Annotated[
        bool, typer.Option("--sparse-anyway", help="Sparse below the break-even length too.")
    ] = False,
    layers: Annotated[int | None, typer.Option(help="The first layers only (of a configuration).")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the record there (JSON).", callback=writes())] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Write a plot of the step time there (SVG), and one of the speed-up.", callback=writes(".svg")
        ),
    ] = None,
    device: DEVICE = None,
    inner: INNER = None,
    as_json: JSON = False,
) -> None:
    """Prefill, step time, tokens per second and memory against the context: Hugging Face, our dense kernel, and sparse.

    A config.json, or the name of one that ships, gives random weights of its shapes, which take as long as real ones. Without a
    profile frequencies are drawn at random: times do not depend on them.
    """
    import torch

    from fasa_compile import bench as benches
    from fasa_compile import fasa_backend, loading
    from fasa_compile.errors import ModelError
    from fasa_compile.profiles.stand_in import random_profile
    from fasa_compile.sites import AttentionSite

    names = tuple(v.strip() for v in variants.split(","))
    if unknown := sorted(set(names) - set(benches.VARIANTS)):
        raise typer.BadParameter(f"--variants: expected some of hf, dense, sparse, found {unknown[0]!r}")
    lengths, found = numbers(contexts, "--contexts"), loading.source(model)
    place, compiler = pick_device(device), pick_inner(inner)
    mode = "reduce-overhead" if place.startswith("cuda") and compiler == "inductor" else None
    budget = budget_options(n_fac)
    if sparse_anyway:
        budget["dense_below"] = 0
    with busy(f"loading {escape(found.name)}") as note:
        config = loading.configuration(found, layers)
        if layers is not None or not found.has_weights:
            real = loading.random_model(config, place)
        else:
            real, _ = loading.load(found, place)
        loaded = read_profile(profile)
        if loaded is None:
            backend = fasa_backend("all", inner="eager", n_fac=16, n_sink=1, n_recent=1)
            loading.survey(loading.skeleton(config), backend, length=1024)
            sites = [d.site for g in backend.graphs for d in g.decisions if d.action == "sparse"]
            if not sites:
                raise ModelError("no attention of this model would decode sparsely: fasa-compile explain says why")
            loaded = random_profile([s for s in sites if isinstance(s, AttentionSite)])
        torch.manual_seed(0)
        setting = benches.Setting(lengths, batch, steps, names, compiler, mode, prefill, tuple(budget.items()))
        record = benches.bench(real, loaded, setting, note=lambda text: note(escape(text)))
    record["profile"] = profile or "stand-in: half of the frequencies at random, int4"
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        plot.write_text(benches.plot(record), encoding="utf-8")
        plot.with_stem(plot.stem + "-speedup").write_text(benches.plot(record, "speedup"), encoding="utf-8")
    if as_json:
        print_json(record)
    else:
        out_ = stdout()
        out_.print(
            f"[bold]{record['model']}[/], {short(record['parameters'])} parameters, {record['dtype']}, batch {batch}, "
            f"{escape(record['card'])}",
            highlight=False,
        )
        out_.print(_bench_table(record))
        for case in record["cases"]:
            if "error" in case:
                out_.print(f"[yellow]{case['context']:,} tokens: {escape(case['error'])}[/]", highlight=False)
        reasons = {r for c in record["cases"] for r in c.get("variants", {}).get("sparse", {}).get("reasons", ())}
        if reasons:
            out_.print(f"[dim]read densely in some cases: {', '.join(sorted(reasons))}[/]", highlight=False)
    if all("error" in case for case in record["cases"]):
        raise typer.Exit(1)
