"""``fasa-compile profile show|diff|check``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.markup import escape
from rich.text import Text

from fasa_compile.cli.app import JSON, NO, busy, command, plain_table, print_json, profile_app, read_profile, stdout
from fasa_compile.errors import FasaError

if TYPE_CHECKING:
    from fasa_compile.profiles.schema import FCProfile


def facts(profile: FCProfile) -> dict[str, Any]:
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


#: Statistics of a layer that say how much of its set another text would have chosen, and what that text is.
_STABILITY = {
    "stability": "the two halves of the calibration text",
    "stability_length": "half of that text and the whole",
}


def _stability(profile: FCProfile) -> list[str]:
    """A line for each of ``_STABILITY`` that the profile has: the mean over its sparse layers, and the least."""
    lines = []
    for name, texts in _STABILITY.items():
        shares = {p.layer: p.stats[name] for p in profile.layers if name in p.stats and not p.dense}
        if shares:
            least = min(shares, key=shares.__getitem__)
            mean = sum(shares.values()) / len(shares)
            lines.append(f"{texts} share {mean:.2f} of their frequencies, least {shares[least]:.2f} in {least}")
    return lines


def profile_table(profile: FCProfile) -> Group:
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
    table = plain_table(columns, right=("n_tip", "n_fac", "energy kept"))
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
    return Group(Text.from_markup(head), table, foot, *(Text(line, style="dim") for line in _stability(profile)))


@command(profile_app, "show")
def profile_show(
    profile: Annotated[
        str, typer.Argument(help="A profile's file, or the name of one that ships.", show_default=False)
    ],
    as_json: JSON = False,
) -> None:
    """A profile: budget, format, and the frequencies chosen in every layer."""
    loaded = read_profile(profile)
    assert loaded is not None
    if as_json:
        print_json(facts(loaded))
    else:
        stdout().print(profile_table(loaded))


def _differences(a: FCProfile, b: FCProfile) -> tuple[dict[str, list[Any]], list[dict[str, Any]]]:
    """``(fields that differ: [of a, of b], layers that differ)``; a layer says how many of its chosen FCs are shared."""
    fa, fb = facts(a), facts(b)
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
    a, b = read_profile(first), read_profile(second)
    assert a is not None and b is not None
    fields, layers = _differences(a, b)
    if as_json:
        print_json({"fields": fields, "layers": layers})
        raise typer.Exit(NO if fields or layers else 0)
    out = stdout()
    if not fields and not layers:
        out.print("[green]the same[/]")
        return
    for name, (one, two) in fields.items():
        out.print(f"[bold]{name}[/]: [red]{escape(str(one))}[/] -> [green]{escape(str(two))}[/]", highlight=False)
    if layers:
        table = plain_table(("layer", "shared frequencies", "also differs"))
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

    loaded = read_profile(profile)
    assert loaded is not None
    checks: list[tuple[str, bool, str]] = [("readable", True, f"{len(loaded.layers)} layers, {loaded.fc_format}")]
    if model is not None:
        found = loading.source(model)
        with busy(f"tracing {escape(found.name)}"):
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
            with busy(f"loading {escape(found.name)}"):
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
        print_json([{"check": name, "ok": ok, "found": text} for name, ok, text in checks])
    else:
        for name, ok, text in checks:
            stdout().print(
                f"{'[green]ok[/] ' if ok else '[red]no[/] '} [bold]{name}[/]: {escape(text)}",
                highlight=False,
                soft_wrap=True,
            )
    if not all(ok for _, ok, _ in checks):
        raise typer.Exit(NO)
