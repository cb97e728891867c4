"""The commands of ``fasa-compile``. Each is a thin face of the Python API; torch is imported when a command runs.

Exit codes: 0 done, 1 an error (one line on stderr), 2 wrong usage, 3 the answer is no (nothing would be sparse, a profile does not
fit, two profiles differ, something that a GPU needs is missing).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fasa_compile.errors import FasaError, FasaWarning
from fasa_compile.report_html import size

if TYPE_CHECKING:
    from fasa_compile.generation import Clock
    from fasa_compile.profiles.schema import FCProfile
    from fasa_compile.report import Report, Row

NO = 3  # exit code: the answer is no

app = typer.Typer(
    help="Make long-context language models decode sparsely, and see what happened.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
profile_app = typer.Typer(help="Look at profiles: show, diff, check.", no_args_is_help=True)
app.add_typer(profile_app, name="profile")

MODEL = Annotated[str, typer.Argument(help="A local model folder, a .gguf file or a config.json.", show_default=False)]
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
PROFILE = Annotated[
    str | None, typer.Option("--profile", "-p", help="A profile's file, or the name of one that ships.")
]
N_FAC = Annotated[int | None, typer.Option("--n-fac", help="Tokens attended to per KV head and step (the profile's).")]
DEVICE = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... (a GPU where there is one)")]
INNER = Annotated[str | None, typer.Option(help="inductor or eager (inductor where it can compile)")]
ANYWAY = Annotated[bool, typer.Option("--any-weights", help="Accept a profile made for other weights.")]


def _out() -> Console:
    # Piped output has no width of its own; rich would take 80.
    return Console(width=None if sys.stdout.isatty() else 120)


def _err() -> Console:
    return Console(stderr=True, width=None if sys.stderr.isatty() else 120)


def command(group: typer.Typer, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a command whose errors are one line on stderr and whose warnings are shown as such."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=FutureWarning)
                warnings.filterwarnings("ignore", category=UserWarning)
                warnings.filterwarnings("always", category=FasaWarning)
                warnings.showwarning = _show_warning
                try:
                    return function(*arguments, **keywords)
                except (FasaError, OSError) as problem:
                    _err().print(f"[bold red]error:[/] {escape(str(problem))}", highlight=False, soft_wrap=True)
                    raise typer.Exit(1) from None
                except ImportError as problem:
                    _err().print(f"[bold red]error:[/] {problem.name or problem} is not installed", highlight=False)
                    raise typer.Exit(1) from None
                except KeyboardInterrupt:
                    raise typer.Exit(130) from None

        group.command(name)(run)
        return run

    return wrap


def _show_warning(message: Any, category: Any, *_: Any, **__: Any) -> None:
    if issubclass(category, FasaWarning):
        _err().print(f"[yellow]warning:[/] {escape(str(message))}", highlight=False, soft_wrap=True)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


@contextlib.contextmanager
def _busy(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr while something is done; the value changes what it says."""
    with _err().status(text) as status:
        yield status.update


def _device(given: str | None) -> str:
    import torch

    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if given.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter(f"--device {given}: torch sees no CUDA device (fasa-compile doctor says more)")
    return given


def _inner(given: str | None) -> Any:
    if given is None:
        from fasa_compile.doctor import inductor_problem

        problem = inductor_problem()
        if problem:
            _err().print(f"[yellow]note:[/] graphs run uncompiled: {escape(problem)}", highlight=False)
        return "eager" if problem else "inductor"
    if given not in ("inductor", "eager"):
        raise typer.BadParameter(f"--inner: expected inductor or eager, found {given}")
    return given


def _profile(name: str | None) -> FCProfile | None:
    from fasa_compile.profiles.files import load_profile

    return None if name is None else load_profile(name)


def _need_tokenizer(tokenizer: Any, model: str) -> Any:
    if tokenizer is None:
        from fasa_compile.errors import ModelError

        raise ModelError(f"{model}: found no tokenizer beside the model, and text needs one (tokenizer.json)")
    return tokenizer


def _budget(n_fac: int | None, n_sink: int | None = None, n_recent: int | None = None) -> dict[str, Any]:
    given = {"n_fac": n_fac, "n_sink": n_sink, "n_recent": n_recent}
    return {name: value for name, value in given.items() if value is not None}


def _table(columns: Sequence[str], right: Sequence[str] = ()) -> Table:
    """A borderless table. The first column gives way where the terminal is narrow, the others do not."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=i > 0,
            overflow="fold" if i == 0 else "ellipsis",
            min_width=8 if i == 0 else None,
        )
    return table


def _count(n: float) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e8 else f"{n / 1e6:.2f} M"


# --- explain -------------------------------------------------------------------------------------------------------------


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
    table = _table(("layers", "#", "heads", "rotary", "decision", "KV read per step"), right=("#",))
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
    html: Annotated[Path | None, typer.Option(help="Write the report there, as one HTML file.")] = None,
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
    loaded = _profile(profile)
    with _busy(f"reading {escape(found.name)}") as note:
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
            **_budget(n_fac if n_fac or loaded else min(1024, length // 8)),
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
        _print_json(
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
    out = _out()
    parameters = sum(p.numel() for p in skeleton.parameters())
    out.print(
        f"[bold]{escape(type(skeleton).__name__)}[/], {_count(parameters)} parameters, {text.num_hidden_layers} layers; "
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


# --- calibrate and profiles ----------------------------------------------------------------------------------------------


@command(app, "calibrate")
def calibrate(
    model: MODEL,
    text: Annotated[Path, typer.Option(help="A text file; a few thousand tokens are enough.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The profile to write, .safetensors or .json.", show_default=False)],
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
    if out.suffix not in (".safetensors", ".json"):
        raise typer.BadParameter(f"--out: expected a name ending in .safetensors or .json, found {out.name}")
    content = text.read_text(encoding="utf-8")
    began = time.perf_counter()
    with _busy(f"loading {escape(found.name)}"):
        loaded, tokenizer = loading.load(found, _device(device))
        ids = _need_tokenizer(tokenizer, model)(content, verbose=False)["input_ids"][:tokens]
    if len(ids) < 2:
        raise CalibrationError(f"{text}: expected at least 2 tokens, found {len(ids)}")
    if not found.has_weights:
        _err().print("[yellow]note:[/] no weights there: the profile is of random ones (seed 0)", highlight=False)
    budget = Budget().replace(**_budget(n_fac))
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
        _print_json({"out": str(out), "seconds": seconds, **_facts(profile)})
        return
    _out().print(
        f"[green]wrote[/] {escape(str(out))}: {len(profile.layers)} layers, {out.stat().st_size / 1024:.0f} KiB, from "
        f"{len(ids)} tokens in {seconds:.1f} s",
        highlight=False,
    )
    _out().print(_profile_table(profile))
    _out().print(
        f"[dim]next: fasa-compile generate MODEL --profile {escape(str(out))} --prompt ...[/]", highlight=False
    )


def _facts(profile: FCProfile) -> dict[str, Any]:
    """A profile in brief, as JSON data."""
    b = profile.budget
    return {
        "architecture": profile.model.architecture,
        "weights": profile.model.weights_hash,
        "method": profile.method,
        "fc_format": profile.fc_format,
        "reduction": profile.reduction,
        "budget": {"n_fac": b.n_fac, "n_sink": b.n_sink, "n_recent": b.n_recent},
        "data": dict(profile.data),
        "layers": [
            {
                "layer": p.layer,
                "heads": [p.num_heads, p.num_kv_heads, p.head_dim],
                "n_fc": len(p.rope.chunks),
                "n_tip": p.n_tip,
                "dense": p.dense,
                "n_fac": p.n_fac,
                "stats": dict(p.stats),
            }
            for p in profile.layers
        ],
    }


_BARS = " ▁▂▃▄▅▆▇█"


def _strip(fcs: Sequence[Sequence[int]], n_fc: int) -> str:
    """One character per frequency chunk, fast to slow: how many KV heads chose it. At most 64 of them, neighbours joined."""
    chosen = [sum(f in head for head in fcs) / max(len(fcs), 1) for f in range(n_fc)]
    wide = -(-n_fc // 64)
    joined = [sum(chosen[i : i + wide]) / len(chosen[i : i + wide]) for i in range(0, n_fc, wide)]
    return "".join(_BARS[round(value * 8)] for value in joined)


def _profile_table(profile: FCProfile) -> Group:
    b = profile.budget
    head = (
        f"[bold]{escape(profile.model.architecture)}[/]  {escape(profile.method)}, {profile.fc_format}, {profile.reduction}; "
        f"n_fac {b.n_fac} ({b.n_sink} first, {b.n_recent} last); weights {escape(profile.model.weights_hash)}"
    )
    # What no layer has is no column.
    own, mass = any(p.n_fac for p in profile.layers), any("energy_kept" in p.stats for p in profile.layers)
    columns = [
        "layer",
        "heads",
        "n_tip",
        *(["n_fac"] if own else []),
        *(["energy kept"] if mass else []),
        "frequencies, fast to slow",
    ]
    table = _table(columns, right=("n_tip", "n_fac", "energy kept"))
    for p in profile.layers:
        cells = [
            p.layer,
            f"{p.num_heads}/{p.num_kv_heads} x {p.head_dim}",
            "dense" if p.dense else f"{p.n_tip}/{len(p.rope.chunks)}",
        ]
        if own:
            cells.append(str(p.n_fac or ""))
        if mass:
            cells.append(f"{p.stats['energy_kept']:.3f}" if "energy_kept" in p.stats else "")
        table.add_row(*cells, Text(_strip(p.fcs.tolist(), len(p.rope.chunks)), style="green"))
    foot = Text(
        "each mark: how many of a layer's KV heads chose that frequency, from none to all: " + _BARS[1:], style="dim"
    )
    return Group(Text.from_markup(head), table, foot)


@command(profile_app, "show")
def profile_show(
    profile: Annotated[
        str, typer.Argument(help="A profile's file, or the name of one that ships.", show_default=False)
    ],
    as_json: JSON = False,
) -> None:
    """A profile: budget, format, and the frequencies chosen in every layer."""
    loaded = _profile(profile)
    assert loaded is not None
    if as_json:
        _print_json(_facts(loaded))
    else:
        _out().print(_profile_table(loaded))


def _differences(a: FCProfile, b: FCProfile) -> tuple[dict[str, list[Any]], list[dict[str, Any]]]:
    """``(fields that differ: [of a, of b], layers that differ)``; a layer says how many of its chosen FCs are shared."""
    fa, fb = _facts(a), _facts(b)
    fields = {k: [fa[k], fb[k]] for k in fa if k not in ("layers", "data") and fa[k] != fb[k]}
    layers: list[dict[str, Any]] = []
    for name in dict.fromkeys([p.layer for p in (*a.layers, *b.layers)]):
        one, two = a.by_layer(name), b.by_layer(name)
        if one is None or two is None:
            layers.append({"layer": name, "only_in": "second" if one is None else "first"})
            continue
        changed = [
            f
            for f in ("num_heads", "num_kv_heads", "head_dim", "rope", "dense", "n_fac")
            if getattr(one, f) != getattr(two, f)
        ]
        shared = None
        if one.num_kv_heads == two.num_kv_heads:
            pairs = list(zip(one.fcs.tolist(), two.fcs.tolist(), strict=True))
            total = sum(len(set(x) | set(y)) for x, y in pairs)
            shared = sum(len(set(x) & set(y)) for x, y in pairs) / total if total else 1.0
        constants = [
            f
            for f in ("centre", "spread", "norm")
            if getattr(one, f).shape != getattr(two, f).shape or not bool((getattr(one, f) == getattr(two, f)).all())
        ]
        if changed or constants or shared != 1.0:
            layers.append({"layer": name, "fields": changed + constants, "shared_fcs": shared})
    return fields, layers


@command(profile_app, "diff")
def profile_diff(
    first: Annotated[str, typer.Argument(show_default=False)],
    second: Annotated[str, typer.Argument(show_default=False)],
    as_json: JSON = False,
) -> None:
    """What differs between two profiles. Exit code 0 where nothing does, 3 else."""
    a, b = _profile(first), _profile(second)
    assert a is not None and b is not None
    fields, layers = _differences(a, b)
    if as_json:
        _print_json({"fields": fields, "layers": layers})
        raise typer.Exit(NO if fields or layers else 0)
    out = _out()
    if not fields and not layers:
        out.print("[green]the same[/]")
        return
    for name, (one, two) in fields.items():
        out.print(f"[bold]{name}[/]: [red]{escape(str(one))}[/] -> [green]{escape(str(two))}[/]", highlight=False)
    if layers:
        table = _table(("layer", "shared frequencies", "also differs"))
        for row in layers:
            if "only_in" in row:
                table.add_row(row["layer"], f"only in the {row['only_in']}", "")
            else:
                shared = row["shared_fcs"]
                share = "" if shared is None else f"{_BARS[round(shared * 8)]} {100 * shared:.0f} % of the union"
                table.add_row(row["layer"], share, ", ".join(row["fields"]))
        out.print(table)
    raise typer.Exit(NO)


@command(profile_app, "check")
def profile_check(
    profile: Annotated[
        str, typer.Argument(help="A profile's file, or the name of one that ships.", show_default=False)
    ],
    model: Annotated[str | None, typer.Argument(help="A model that it should fit.", show_default=False)] = None,
    weights: Annotated[bool, typer.Option(help="Load the model's weights and compare their fingerprint.")] = True,
    as_json: JSON = False,
) -> None:
    """Whether a profile can be read and, with a model, whether it fits: layers, heads, rotary embedding, weights."""
    from fasa_compile import fasa_backend, loading
    from fasa_compile.fingerprint import same_weights, weights_fingerprint

    loaded = _profile(profile)
    assert loaded is not None
    checks: list[tuple[str, bool, str]] = [("readable", True, f"{len(loaded.layers)} layers, {loaded.fc_format}")]
    if model is not None:
        found = loading.source(model)
        with _busy(f"tracing {escape(found.name)}"):
            skeleton = loading.skeleton(loading.configuration(found))
            backend = fasa_backend(loaded, inner="eager", check_weights=False, n_fac=16, n_sink=1, n_recent=1)
            problem = ""
            try:
                loading.survey(skeleton, backend, length=4096)
            except FasaError as error:
                problem = str(error.__cause__ if isinstance(error.__cause__, FasaError) else error)
        rows = backend.explain().rows
        used = {r.layer for r in rows if r.decision == "sparse"}
        unused = [p.layer for p in loaded.layers if p.layer not in used and not p.dense]
        fits = not problem and not unused
        why = problem or (
            f"{len(unused)} layers of the profile are not used, {unused[0]} first"
            if unused
            else f"{len(used)} layers used"
        )
        checks.append(("fits the model", fits, why))
        if weights and found.has_weights:
            with _busy(f"loading {escape(found.name)}"):
                real, _ = loading.load(found, "cpu")
                print_of = weights_fingerprint(real)
            same = same_weights(loaded.model.weights_hash, print_of)
            checks.append(
                (
                    "made for these weights",
                    same,
                    print_of if same else f"profile {loaded.model.weights_hash}, model {print_of}",
                )
            )
    if as_json:
        _print_json([{"check": name, "ok": ok, "found": text} for name, ok, text in checks])
    else:
        for name, ok, text in checks:
            _out().print(
                f"{'[green]ok[/] ' if ok else '[red]no[/] '} [bold]{name}[/]: {escape(text)}",
                highlight=False,
                soft_wrap=True,
            )
    if not all(ok for _, ok, _ in checks):
        raise typer.Exit(NO)


# --- doctor --------------------------------------------------------------------------------------------------------------


@command(app, "doctor")
def doctor(as_json: JSON = False) -> None:
    """Versions, the card, what works on this machine and what to do about what does not."""
    with _busy("looking at torch"):
        from fasa_compile.doctor import examine

        found = examine()
    if as_json:
        _print_json([vars(f) for f in found])
    else:
        marks = {"ok": "[green]ok[/]", "note": "[yellow]--[/]", "bad": "[red]no[/]"}
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for f in found:
            advice = f"\n[dim]{escape(f.advice)}[/]" if f.advice else ""
            table.add_row(marks[f.state], f"[bold]{f.name}[/]", escape(f.found) + advice)
        _out().print(table, highlight=False)
    if any(f.state == "bad" for f in found):
        raise typer.Exit(NO)


# --- generate ------------------------------------------------------------------------------------------------------------


@command(app, "generate")
def generate(
    model: MODEL,
    prompt: Annotated[str | None, typer.Option(help="What to continue or answer; without it, a chat on stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text that stands before the prompt (a long document).")] = None,
    profile: PROFILE = None,
    n_fac: N_FAC = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Tokens at most.")] = 128,
    dense: Annotated[bool, typer.Option("--dense", help="Exact attention, for comparison.")] = False,
    chat: Annotated[bool | None, typer.Option(help="Use the chat template (where there is one).")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token.")] = 0.0,
    device: DEVICE = None,
    inner: INNER = None,
    any_weights: ANYWAY = False,
    as_json: JSON = False,
) -> None:
    """Continue a text or answer a question, sparsely, with statistics. Without --prompt: a chat, one line a turn."""
    import fasa_compile
    from fasa_compile import loading
    from fasa_compile.generation import Clock, Printer
    from fasa_compile.generation import generate as run

    found = loading.source(model)
    loaded = None if dense else (_profile(profile) or "all")
    place, compiler = _device(device), _inner(inner)
    with _busy(f"loading {escape(found.name)}"):
        real, tokenizer = loading.load(found, place)
    tokenizer = _need_tokenizer(tokenizer, model)
    if loaded == "all":
        _err().print(
            "[yellow]note:[/] no profile: tokens are scored with all dims of the keys, which is right and saves little",
            highlight=False,
        )
    templated = bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat
    if templated and not getattr(tokenizer, "chat_template", None):
        raise typer.BadParameter("--chat: the tokenizer has no chat template")
    options: dict[str, Any] = {} if dense else _budget(n_fac)
    if any_weights:
        options["check_weights"] = False
    document = file.read_text(encoding="utf-8") + "\n\n" if file is not None else ""
    turns: list[dict[str, str]] = []
    results = []
    interactive = prompt is None and sys.stdin.isatty()

    def questions() -> Iterator[str]:
        if prompt is not None:
            yield prompt
            return
        while True:
            if interactive:
                _err().print("[bold]> [/]", end="")
            line = sys.stdin.readline()
            if not line:
                return
            if line.strip():
                yield line.strip()

    for number, question in enumerate(questions()):
        turns.append({"role": "user", "content": (document if number == 0 else "") + question})
        if templated:
            made = tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            made = tokenizer("".join(turn["content"] for turn in turns), return_tensors="pt")
        ids = made["input_ids"].to(real.device)
        if not ids.shape[1]:
            raise typer.BadParameter("--prompt: the tokenizer makes no token of it")
        clock = Clock() if as_json else Printer(tokenizer, sys.stdout)
        fasa_compile.reset_stats()
        end = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        run(
            real,
            {"input_ids": ids, "attention_mask": ids.new_ones(ids.shape)},
            profile=loaded,
            inner=compiler,
            backend=options,
            max_new_tokens=new_tokens,
            streamer=clock,
            pad_token_id=end,
            **sampling,
        )
        answer = tokenizer.decode(clock.tokens, skip_special_tokens=True)
        turns.append({"role": "assistant", "content": answer})
        result = {"prompt": question, "answer": answer, **_statistics(ids.shape[1], clock, fasa_compile.explain())}
        results.append(result)
        if not as_json:
            _err().print(_statistics_line(result), highlight=False)
    if as_json:
        _print_json(results)


def _statistics(prompt_tokens: int, clock: Clock, report: Report) -> dict[str, Any]:
    """What a generation took, as JSON data. Bytes are those of the last decode graph's sites, cache full."""
    import fasa_compile

    stats = fasa_compile.stats()
    decode = [g.index for g in report.graphs if g.kind == "decode"]
    rows = [r for r in report.rows if decode and r.graph == decode[-1]]
    step = clock.step()
    return {
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(clock.tokens),
        "prefill_s": clock.prefill(),
        "ms_per_token": 1e3 * step,
        "tokens_per_s": 1 / step if step else 0.0,
        "sites": len(rows),
        "sparse_sites": sum(r.decision == "sparse" for r in rows),
        "sparse_steps": stats["sparse_steps"],
        "dense_steps": stats["dense_steps"],
        "state_rebuilds": stats["state_rebuilds"],
        "kv_bytes_read": sum(r.sparse_bytes for r in rows),
        "kv_bytes_dense": sum(r.dense_bytes for r in rows),
    }


def _statistics_line(found: dict[str, Any]) -> str:
    parts = [
        f"{found['prompt_tokens']:,} tokens read in {found['prefill_s']:.2f} s",
        f"{found['new_tokens']} written at [bold]{found['tokens_per_s']:.1f}/s[/]",
        f"{found['sparse_sites']} of {found['sites']} sites sparse",
        f"{found['sparse_steps']} sparse steps",
    ]
    if found["kv_bytes_dense"] > found["kv_bytes_read"]:
        parts.append(f"{size(found['kv_bytes_read'])} of {size(found['kv_bytes_dense'])} K and V read per step")
    return f"[dim]{'  |  '.join(parts)}[/]"


# --- bench ---------------------------------------------------------------------------------------------------------------


def _numbers(text: str) -> tuple[int, ...]:
    """``4k,32768`` as tokens."""
    out = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*([kK]?)\s*", part)
        if not match or not int(match[1]):
            raise typer.BadParameter(f"--contexts: expected numbers of tokens like 4k,32k, found {part!r}")
        out.append(int(match[1]) * (1024 if match[2] else 1))
    return tuple(sorted(set(out)))


def _bench_table(record: dict[str, Any]) -> Table:
    from fasa_compile.bench import VARIANTS
    from fasa_compile.charts import tokens

    names = [name for name in VARIANTS if any(name in c.get("variants", {}) for c in record["cases"])]
    heads = ["context", "prefill", *(f"{VARIANTS[name]}\nms/step" for name in names)]
    heads += ["tokens/s\nsparse", "memory\nsparse", "faster than\nHugging Face", "faster than\nours, dense"]
    table = _table(heads, right=heads)
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
    out: Annotated[Path | None, typer.Option(help="Write the record there (JSON).")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a plot of the step time there (SVG), and one of the speed-up.")
    ] = None,
    device: DEVICE = None,
    inner: INNER = None,
    as_json: JSON = False,
) -> None:
    """Prefill, step time, tokens per second and memory against the context: Hugging Face, our dense kernel, and sparse.

    A config.json gives random weights of its shapes, which take as long as real ones. Without a profile frequencies are drawn at
    random: times do not depend on them.
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
    lengths, found = _numbers(contexts), loading.source(model)
    place, compiler = _device(device), _inner(inner)
    mode = "reduce-overhead" if place.startswith("cuda") and compiler == "inductor" else None
    budget = _budget(n_fac)
    if sparse_anyway:
        budget["dense_below"] = 0
    with _busy(f"loading {escape(found.name)}") as note:
        config = loading.configuration(found, layers)
        if layers is not None or not found.has_weights:
            real = loading.random_model(config, place)
        else:
            real, _ = loading.load(found, place)
        loaded = _profile(profile)
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
        _print_json(record)
    else:
        out_ = _out()
        out_.print(
            f"[bold]{record['model']}[/], {_count(record['parameters'])} parameters, {record['dtype']}, batch {batch}, "
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


# --- eval ----------------------------------------------------------------------------------------------------------------


@command(app, "eval")
def evaluate(
    model: MODEL,
    text: Annotated[Path, typer.Option(help="A text file that was not calibrated on.", show_default=False)],
    profile: Annotated[str, typer.Option("--profile", "-p", help="A profile's file or name.", show_default=False)],
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each stretch of the text.")] = 4096,
    stretches: Annotated[int, typer.Option(min=1, help="How many stretches.")] = 1,
    last: Annotated[int, typer.Option(min=3, help="Tokens at the end of each that are decoded one by one.")] = 256,
    keys: Annotated[int, typer.Option(min=0, help="Facts to hide and ask for, of two kinds; 0: none.")] = 0,
    n_fac: N_FAC = None,
    out: Annotated[Path | None, typer.Option(help="Write the record there (JSON).")] = None,
    device: DEVICE = None,
    inner: INNER = None,
    any_weights: ANYWAY = False,
    as_json: JSON = False,
) -> None:
    """What sparse steps cost: perplexity, KL and recall, dense and sparse, token by token behind a dense prefill."""
    import torch

    from fasa_compile import loading
    from fasa_compile.doctor import environment
    from fasa_compile.errors import ModelError
    from fasa_compile.evaluation import evaluate as run

    if last >= tokens - 1:
        raise typer.BadParameter(f"--last: expected less than --tokens - 1 = {tokens - 1}, found {last}")
    found, place, compiler = loading.source(model), _device(device), _inner(inner)
    loaded = _profile(profile)
    options: dict[str, Any] = {"inner": compiler, **({"check_weights": False} if any_weights else {}), **_budget(n_fac)}
    with _busy(f"loading {escape(found.name)}") as note:
        real, tokenizer = loading.load(found, place)
        ids = _need_tokenizer(tokenizer, model)(text.read_text(encoding="utf-8"), verbose=False)["input_ids"]
        if len(ids) < tokens * stretches:
            raise ModelError(
                f"{text}: {stretches} stretches of {tokens} tokens need {tokens * stretches}, it has {len(ids)}"
            )
        note("decoding")
        texts = torch.tensor(ids[: tokens * stretches]).view(stretches, tokens)
        record = run(real, tokenizer, loaded, texts, last=last, keys=keys, **options)
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
    if as_json:
        _print_json(record)
        return
    table = _table(("", "perplexity", "x dense", "KL to dense", "same top token", "steps/s"))
    for name, row in record["perplexity"].items():
        numbers = (
            row["perplexity"],
            row["perplexity_ratio"],
            row["kl_to_dense"],
            row["top1_agreement"],
            row["steps_per_second"],
        )
        table.add_row(name, *(f"{n:.{d}f}" for n, d in zip(numbers, (3, 4, 4, 3, 1), strict=True)))
    _out().print(table)
    for kind in ("passkey", "key_value"):
        for length, paths in record.get(kind, {}).items():
            shares = ", ".join(f"{name} {100 * row['digits']:.0f} %" for name, row in paths.items())
            _out().print(f"{kind} at {length} tokens, digits recalled: {shares}", highlight=False)


# --- report --------------------------------------------------------------------------------------------------------------


@command(app, "report")
def report(
    model: MODEL,
    out: Annotated[Path, typer.Option(help="The HTML file to write.", show_default=False)],
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
    loaded = _profile(profile) or "all"
    place, compiler = _device(device), _inner(inner)
    text = (file.read_text(encoding="utf-8") + "\n\n" if file is not None else "") + prompt
    with _busy(f"loading {escape(found.name)}") as note:
        real, tokenizer = loading.load(found, place)
        ids = _need_tokenizer(tokenizer, model)(text, return_tensors="pt", verbose=False)["input_ids"].to(real.device)
        if ids.shape[1] < 2:
            raise ModelError(
                f"a report needs a prompt of at least 2 tokens, found {ids.shape[1]}: give --prompt or --file"
            )
        runs: dict[str, Any] = {}
        options: dict[str, Any] = {"audit": 1, **({"check_weights": False} if any_weights else {}), **_budget(n_fac)}
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
            runs[name] = {"answer": answer, "lost_mass": lost, **_statistics(ids.shape[1], clock, backend.explain())}
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
        _print_json(facts)
    else:
        _out().print(f"[green]wrote[/] {escape(str(out))}", highlight=False)
        _out().print(_statistics_line(runs["sparse"]), highlight=False)
