"""FASA_DUMP=dir: the numbered graphs of each stage, as text, one folder per graph that the backend is given. And TORCH_TRACE=dir:
the report and the rewritten graph of each compilation as artifacts of torch's structured trace, which tlparse shows.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx
from torch._logging._internal import trace_structured

from fasa_compile.capture import Shadow
from fasa_compile.patterns.graph import where
from fasa_compile.plan import Plan
from fasa_compile.rewrite import Rewritten
from fasa_compile.sites import AttentionSite, Expr, NoMatch

log = logging.getLogger("fasa_compile")


def dump(gm: fx.GraphModule, shadow: Shadow | None, plan: Plan, rewritten: Rewritten | None) -> None:
    """Write a graph's stages below the folder that FASA_DUMP names; nothing where it is not set.

    ``0-dynamo``, ``1-shadow`` (missing where the trace failed), ``2-sites``, ``3-plan``, ``4-rewritten`` (missing where nothing
    was). A folder that cannot be written is a line in the log: it must not stop a model.
    """
    if not (root := os.environ.get("FASA_DUMP")):
        return
    stages = {"0-dynamo": graph_text(gm), "2-sites": _sites(plan), "3-plan": _plan(plan)}
    if shadow is not None:
        stages["1-shadow"] = graph_text(shadow.gm, shadow.origin)
    if rewritten is not None:
        stages["4-rewritten"] = graph_text(rewritten.gm)
    try:
        folder = _next(Path(root))
        for name, text in stages.items():
            (folder / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
    except OSError as problem:
        log.warning("FASA_DUMP=%s: the graphs could not be written: %s", root, problem)


def trace(name: str, payload: Callable[[], str], encoding: Literal["json", "string"]) -> None:
    """An artifact of the compilation that is going on, in torch's structured trace; nothing is made where no trace is written."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)


def _next(root: Path) -> Path:
    for number in itertools.count():
        folder = root / f"graph-{number:03}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def graph_text(gm: fx.GraphModule, origin: dict[fx.Node, str] | None = None) -> str:
    """One line per node: number, name, call, the value's dtype and sizes, and where it comes from."""
    lines = []
    for number, node in enumerate(gm.graph.nodes):
        value = node.meta.get("val", node.meta.get("example_value"))
        kind = ""
        if isinstance(value, torch.Tensor):
            kind = f"  : {str(value.dtype).removeprefix('torch.')}{[str(s) for s in value.shape]}".replace("'", "")
        source = f"<- {origin[node]}" if origin and node in origin else where(node)
        called = f"{node.op} {_called(node.target)}{_arguments(node)}"
        lines.append(f"{number:5} {node.name} = {called}{kind}  {source}".rstrip())
    return "\n".join(lines)


def _called(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def _arguments(node: fx.Node) -> str:
    if node.op in ("placeholder", "get_attr"):
        return ""
    given = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
    return f"({', '.join(given)})"


def _expr(expr: Expr | None) -> str:
    if expr is None:
        return "-"
    return " ".join([expr.node.name, *(f".{op._schema.name.split('::')[1]}{args}" for op, args in expr.steps)])


def _sites(plan: Plan) -> str:
    lines: list[str] = []
    for site in (d.site for d in plan.decisions):
        lines.append(f"[{site.index}] {site.layer or '(no module path)'}  {site.source}  anchor {site.anchor}")
        if isinstance(site, NoMatch):
            lines += _indented([f"refused: {site.reason}: {site.detail}", *(f"read: {line}" for line in site.trace)])
        elif isinstance(site, AttentionSite):
            facts = {"output": site.output, "(B, Hq, Hkv, T, L, D, Dv)": site.shape, "scale": site.scale}
            facts |= {name: _expr(getattr(site, name)) for name in ("q", "k", "v", "mask", "sinks")}
            facts |= {"mask kind": site.mask_kind, "softcap": site.softcap, "causal": site.is_causal}
            facts |= {"rope": f"{site.rope.kind}, {site.rope.rotary_dim} dims, x {site.rope.magnitude:g}"}
            facts |= {"cache": f"{site.cache.kind} {site.cache.write}, input {site.cache.k_input}"}
            facts |= {"rows written": _expr(site.cache.slots)}
            lines += _indented([f"{name}: {value}" for name, value in facts.items()])
    return "\n".join(lines)


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _plan(plan: Plan) -> str:
    lines = [f"decode: {plan.decode}"]
    for d in plan.decisions:
        why = f"{d.reason}: {d.detail}" if d.reason else f"{d.budget}, FC cache {d.state} {d.fc_format}, {d.reduction}"
        lines.append(f"[{d.site.index}] {d.site.layer}  {d.action}  {why}")
    return "\n".join(lines)
