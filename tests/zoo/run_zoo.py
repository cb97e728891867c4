"""Every causal-LM architecture of transformers through the backend: ``make zoo``.

For each architecture and kind of cache, with tiny random weights (``tiny_configs.py``) in float32 and a random profile:

1. budget >= context: the sites rewritten are those of ``census.json`` and no other, and the logits are the uncompiled model's;
2. budget < context: the logits are those of the plain reference (``fasa_compile.testing.plain``), which are not the uncompiled model's.

An architecture runs in a process of its own with a time limit, forked from one that has imported and compiled already. ``--out`` is
written anew after each, and ``--resume`` keeps what it says has passed, so that a run can be made in pieces (``--for`` seconds each);
``--table`` writes the page for the docs. The exit status is 1 if any failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from tiny_configs import build
from torch import Tensor, nn

from fasa_compile.backend import FasaBackend
from fasa_compile.plan import Policy, hint
from fasa_compile.profiles import Budget, FCProfile, LayerProfile
from fasa_compile.profiles.stand_in import random_profile
from fasa_compile.sites import AttentionSite, NoMatch
from fasa_compile.testing.plain import Entry, PlainFasa

HERE = Path(__file__).parent
CACHE, STEPS = 64, 2  # slots; decode steps
BUDGET = Budget(n_fac=13, n_sink=1, n_recent=2)
# Prompts: within the budget (some models attend to summaries of tokens besides), and well beyond the windows of 32. Not a size of the
# models: Dynamo would take it for that size.
SHORT, LONG = BUDGET.n_fac - STEPS - 2, 53
TOLERANCE = 1e-4  # of the largest logit, or of 1 if they are smaller

#: Architectures that are not run, and why.
LEFT_OUT = {
    "blt": "with a cache its forward fails: it asks its config for a number of layers, which this config does not have",
    "gemma4_assistant": "drafts for another model: attends to keys and values handed over by that one, and has no cache of its own",
    "gemma4_unified_assistant": "drafts for another model: attends to keys and values handed over by that one, and has no cache of its own",
}


#: Architectures that are given all tokens in every step, and look up in the cache how many of them they have seen.
WHOLE = ("cpmant", "xlm")


class Failed(Exception):
    """A check that did not hold."""


class DoesNotRun(Exception):
    """The model itself, uncompiled, does not run this way."""


def new_cache(model: nn.Module, kind: str) -> Any:
    from transformers import DynamicCache, StaticCache

    config: Any = model.config
    return StaticCache(config=config, max_cache_len=CACHE) if kind == "static" else DynamicCache(config=config)


class Runner:
    """A model and how to call it: which inputs it takes, and where its cache comes from."""

    def __init__(self, model_type: str, kind: str) -> None:
        import inspect

        self.model_type, self.kind = model_type, kind
        self.model = build(model_type)
        takes = set(inspect.signature(self.model.forward).parameters)
        self.cache_name = next(
            (n for n in ("past_key_values", "cache") if n in takes), None
        )  # it depends on the release
        self.codebooks = getattr(self.model.config, "num_codebooks", 1) if "musicgen" in model_type else 1

    def inputs(self, ids: Tensor, first: int, cache: Any) -> dict[str, Any]:
        given: dict[str, Any] = {"input_ids": ids.repeat_interleave(self.codebooks, 0).clone()}
        if self.model_type == "bamba":  # without, it decodes every token at position 0
            given["position_ids"] = torch.arange(first, first + ids.shape[1])[None]
        if self.cache_name is not None:
            given |= {self.cache_name: cache, "use_cache": True}
        return given

    def prefill(self, ids: Tensor) -> Any:
        """The cache after a prompt: ours, or the one that the model makes where it accepts no other."""
        cache = None
        try:
            cache = new_cache(self.model, self.kind) if self.cache_name is not None else None
            out = self.model(**self.inputs(ids, 0, cache))
        except Exception:
            if self.kind == "static" or self.cache_name is None:
                raise
            out = self.model(**self.inputs(ids, 0, None))
        returned = (getattr(out, name, None) for name in (self.cache_name or "", "past_key_values"))
        return next((c for c in returned if c is not None), cache)

    def step(self, call: Any, ids: Tensor, i: int, cache: Any) -> Tensor:
        first = 0 if self.model_type in WHOLE else i
        out = call(**self.inputs(ids[:, first : i + 1], first, cache))
        logits = out.logits if hasattr(out, "logits") else out[0]
        return logits[..., -1, :].float()

    def prompt(self, length: int) -> Tensor:
        return torch.randint(4, 90, (1, length + STEPS), generator=torch.Generator().manual_seed(length))

    def try_out(self, ids: Tensor) -> None:
        """Raises ``DoesNotRun``."""
        try:
            decode(self, self.model, ids)
        except Exception as error:
            why = str(error).splitlines()[0][:160] if str(error) else ""
            raise DoesNotRun(f"{type(error).__name__}: {why}") from error


def decode(
    runner: Runner, call: Any, ids: Tensor, each: Any = None, around: AbstractContextManager[Any] | None = None
) -> list[Tensor]:
    """Logits of the last ``STEPS`` tokens, after a prompt of its own each time: some models keep a state in their modules."""
    cache = runner.prefill(ids[:, :-STEPS])
    out = []
    with around or nullcontext():
        for i in range(ids.shape[1] - STEPS, ids.shape[1]):
            if each is not None:
                each(i)
            out.append(runner.step(call, ids, i, cache))
    return out


def difference(got: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference of logits, of the largest logit expected (or of 1)."""
    pairs = zip(got, expected, strict=True)
    return max(float((a - b).abs().max()) / max(1.0, float(b.abs().max())) for a, b in pairs)


def compare(what: str, got: list[Tensor], expected: list[Tensor]) -> float:
    if not all(bool(torch.isfinite(b).all()) for b in expected):
        raise Failed(f"{what}: the logits expected are not finite")
    worst = difference(got, expected)
    if not worst <= TOLERANCE:
        raise Failed(f"{what}: logits differ by {worst:.2e}, allowed {TOLERANCE:.0e}")
    return worst


class MadeUp(FasaBackend):
    """The backend with a profile that is made up for the sites of each graph: what a model is calibrated to is not at issue here.

    A graph of a model in pieces, whose sites have no names in the model, is scored by all dims.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._policy("all"), "eager", strict=False, check_weights=False)
        self.model = model
        self.profile: FCProfile | None = None
        self.layers: dict[str, LayerProfile] = {}

    @staticmethod
    def _policy(profile: FCProfile | Literal["all"]) -> Policy:
        return Policy(profile, {"n_fac": BUDGET.n_fac, "n_sink": BUDGET.n_sink, "n_recent": BUDGET.n_recent})

    def _located(self, sites: list[AttentionSite | NoMatch]) -> tuple[list[AttentionSite | NoMatch], nn.Module | None]:
        self.policy = self._policy("all")
        sites, root = super()._located(sites)
        found = [s for s in sites if isinstance(s, AttentionSite)]
        named = all(resolve(self.model, s.layer) is not None for s in sites)
        if found and named and len({s.layer for s in found}) == len(found):
            self.profile = random_profile(found, BUDGET, "fp32")
            self.layers |= {layer.layer: layer for layer in self.profile.layers}
            self.policy = self._policy(self.profile)
        return sites, root


def resolve(model: nn.Module, layer: str) -> nn.Module | None:
    try:
        return model.get_submodule(layer.split("#")[0]) if layer else None
    except AttributeError:
        return None


def check(model_type: str, kind: str, expected: list[int] | None) -> dict[str, Any]:
    """One architecture with one kind of cache. ``expected``: sites to rewrite, and attentions to leave alone; None where the census
    could not run the model."""
    runner = Runner(model_type, kind)
    model = runner.model
    record: dict[str, Any] = {}
    ids = runner.prompt(SHORT)
    runner.try_out(ids)
    dense = decode(runner, model, ids)

    def compiled(backend: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(model, backend=backend, dynamic=kind == "dynamic")

    backend = MadeUp(model)
    call = compiled(backend)
    seen: list[int] = []
    try:
        got = decode(runner, call, ids, each=lambda i: seen.append(len(backend.graphs)))
    except Exception as error:
        try:
            decode(runner, compiled("eager"), ids)
        except Exception as same:
            if type(same) is type(error):
                raise DoesNotRun(f"torch.compile with its eager backend: {type(same).__name__}: {same}"[:200]) from same
        raise
    first = backend.graphs[: seen[1]]  # graphs of the first step: a later one may compile again
    decisions = [d for graph in first for d in graph.decisions]
    sparse = [d for d in decisions if d.action == "sparse"]
    record["sites"] = len(sparse)
    record["dense"] = sorted(f"{d.reason} {d.site.layer}" for d in decisions if d.action == "dense")
    record["graphs"] = len(first)
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None) or len(decisions) or 1
    record["passes_s_per_layer"] = round(sum(g.seconds for g in first) / layers, 3)
    if expected is not None and len(sparse) != expected[0]:
        raise Failed(f"{len(sparse)} sites rewritten, expected {expected[0]}; dense: {record['dense']}")
    record["wide"] = compare("budget >= context", got, dense)
    if not sparse:
        return record

    record["states"] = sorted({d.state for d in sparse})
    known = all(d.profile is not None for d in sparse)
    record["profile"] = "random" if known else "all dims"
    if not known and (len(sparse) < len(decisions) or any(d.profile is not None for d in sparse)):
        raise Failed("a graph with sites of unknown modules beside other attentions")
    entries: dict[tuple[nn.Module, int], Entry] = {}
    runs: Counter[nn.Module] = Counter()
    for decision in decisions if known else ():
        module: Any = resolve(model, decision.site.layer)
        runs[module] += 1
        if isinstance(site := decision.site, AttentionSite) and decision.action == "sparse":
            layer = backend.layers[site.layer]
            entries[module, runs[module]] = (layer, hint(site.shape[1]), hint(site.shape[2]), site.softcap)
    if not known:  # pieces of a model: which module a graph belongs to is not known, but all attentions have RoPE
        site = sparse[0].site
        entry: Entry = (None, hint(site.shape[1]), hint(site.shape[2]), site.softcap)
        entries = {(m, n): entry for m in model.modules() for n in range(1, 5)}
    ids = runner.prompt(LONG)
    dense = decode(runner, model, ids)
    reference = PlainFasa(model, entries, backend.profile, BUDGET)
    want = decode(runner, model, ids, each=lambda i: reference.start(), around=reference.following())
    if reference.applied != len(sparse):
        raise Failed(f"the plain reference met {reference.applied} of {len(sparse)} sites")
    record["away_from_dense"] = difference(want, dense)
    if record["away_from_dense"] < 10 * TOLERANCE:
        raise Failed(
            f"the plain reference is within {record['away_from_dense']:.1e} of dense attention: nothing is tested"
        )
    record["narrow"] = compare("budget < context", decode(runner, call, ids), want)
    return record


def one(model_type: str, expected: dict[str, Any], path: Path) -> None:
    """Both kinds of cache of one architecture, into a file."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    began, spent = time.perf_counter(), time.process_time()
    record: dict[str, Any] = {"model_type": model_type}
    for kind, other in (("static", "dynamic"), ("dynamic", "static")):
        # Where the census could not run the model with this cache, it has as many sites as with the other.
        want = expected.get(kind) or expected.get(other)
        try:
            with torch.no_grad():
                record[kind] = {"status": "ok", **check(model_type, kind, want)}
        except DoesNotRun as error:
            compiler = str(error).startswith("torch.compile")
            # In the census it did, so it has to here.
            status = "failed" if (expected.get(kind) or [0])[0] and not compiler else "does not run"
            record[kind] = {"status": status, "why": str(error) if compiler else f"the uncompiled model fails: {error}"}
        except ImportError as error:
            record[kind] = {"status": "missing", "why": f"{type(error).__name__}: {error}"[:400]}
        except Exception as error:
            record[kind] = {"status": "failed", "why": f"{type(error).__name__}: {error}"[:600]}
            if not isinstance(error, Failed):
                record[kind]["trace"] = traceback.format_exc()[-1500:]
    record["seconds"] = round(time.perf_counter() - began, 1)
    record["cpu_seconds"] = round(time.process_time() - spent, 1)
    path.write_text(json.dumps(record))


def warm_up() -> None:
    """Have torch and transformers fill their caches once, ahead of the forks: imports, operator tables, sympy."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with torch.no_grad():
        for kind in ("static", "dynamic"):
            check("llama", kind, None)
    torch._dynamo.reset()


def run(
    names: list[str],
    census: dict[str, Any],
    jobs: int,
    limit: float,
    until: float,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Each name in a process forked from this one, ``jobs`` at a time, ``limit`` seconds each; none is begun after ``until``
    (monotonic). ``keep`` takes each record."""
    warm_up()
    context = multiprocessing.get_context("fork")
    waiting = list(names)
    running: dict[str, tuple[Any, float]] = {}
    done = 0
    with tempfile.TemporaryDirectory() as folder:
        while (waiting and time.monotonic() < until) or running:
            while waiting and len(running) < jobs and time.monotonic() < until:
                name = waiting.pop(0)
                process = context.Process(target=one, args=(name, census.get(name, {}), Path(folder, name)))
                process.start()
                running[name] = (process, time.monotonic())
            for name, (process, since) in list(running.items()):
                late = time.monotonic() - since > limit
                if process.is_alive() and not late:
                    continue
                if late:
                    process.kill()
                process.join()
                del running[name]
                done += 1
                path = Path(folder, name)
                if path.exists():
                    record = json.loads(path.read_text())
                else:
                    why = f"stopped after {limit:.0f} s" if late else f"the process ended with {process.exitcode}"
                    failed = {"status": "failed", "why": why}
                    took = round(time.monotonic() - since, 1)
                    record = {
                        "model_type": name,
                        "static": failed,
                        "dynamic": failed,
                        "seconds": took,
                        "cpu_seconds": took,
                    }
                keep(record)
                say = " ".join(f"{k}: {_brief(record[k])}" for k in ("static", "dynamic"))
                print(f"[{done}/{len(names)}] {name} {record['seconds']} s  {say}", flush=True)
            time.sleep(0.05)


def _has_sites(census: dict[str, Any], name: str) -> bool:
    return any((census.get(name, {}).get(kind) or [0])[0] for kind in ("static", "dynamic"))


def _failed(record: dict[str, Any]) -> bool:
    return "failed" in (record["static"]["status"], record["dynamic"]["status"])


def _brief(record: dict[str, Any]) -> str:
    if record["status"] != "ok":
        return f"{record['status'].upper()} ({record['why'][:140]})"
    return f"{record['sites']} sites"


def table(result: dict[str, Any]) -> str:
    """The page for the docs."""
    records = result["architectures"]
    rope = [r for r in records if any(r[k].get("sites") for k in ("static", "dynamic"))]
    plain = [r for r in records if r not in rope and any(r[k]["status"] == "ok" for k in ("static", "dynamic"))]
    rest = [r for r in records if r not in rope and r not in plain]
    alone = [r for r in plain if any(r[k].get("dense") for k in ("static", "dynamic"))]
    costs = sorted(r[k]["passes_s_per_layer"] for r in rope for k in ("static", "dynamic") if r[k]["status"] == "ok")
    unfinished = (
        f" **{result['of'] - len(records)} architectures have no record yet.**" if len(records) < result["of"] else ""
    )

    def cell(r: dict[str, Any]) -> str:
        if r["status"] == "ok":
            return str(r["sites"])
        return {"does not run": "-", "missing": "-"}.get(r["status"], "**" + r["status"] + "**")

    lines = [
        "# Coverage",
        "",
        "Written by `make zoo` (`tests/zoo/run_zoo.py`): every architecture of transformers' causal-LM mapping, tiny and with random",
        "weights, decoded through the backend. In each, the sites rewritten are exactly those that the census counts as rotary "
        "attention with a cache; with a",
        f"budget that covers the context the logits are the uncompiled model's, with a smaller one the plain reference's (to {TOLERANCE:.0e} of the",
        "largest logit, float32). A dash: the uncompiled model does not run with that kind of cache.",
        "",
        f"torch {result['torch']}, transformers {result['transformers']}, CPU: {len(rope)} architectures with sites, {len(alone)} with other",
        f"attention that was left alone, {len(plain) - len(alone)} without any.{unfinished} All of it took {result['cpu_seconds'] / 60:.1f} minutes of",
        f"one core; capture, match, plan and rewrite {costs[len(costs) // 2]:.2f} s per layer in the median, {costs[len(costs) * 9 // 10]:.2f} in the 90th percentile",
        f"({costs[-1]:.2f} at most; two layers, on which what a graph costs as a whole weighs most).",
        *([f"The run was {result['note']}."] if "note" in result else []),
        "",
        "| architecture | sites, static cache | sites, dynamic cache |",
        "|---|---|---|",
        *(f"| {r['model_type']} | {cell(r['static'])} | {cell(r['dynamic'])} |" for r in rope),
        "",
        "## Nothing to rewrite",
        "",
        "Attention without a rotary embedding: " + ", ".join(r["model_type"] for r in alone) + ".",
        "",
        "No attention: " + ", ".join(r["model_type"] for r in plain if r not in alone) + ".",
        "",
        "## Left out",
        "",
        "| architecture | why |",
        "|---|---|",
        *(f"| {name} | {why} |" for name, why in sorted(LEFT_OUT.items())),
        *(f"| {r['model_type']} | {' '.join(r['dynamic']['why'].split()).replace('|', '/')[:200]} |" for r in rest),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures (default: all)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=240, help="seconds for one architecture")
    parser.add_argument("--resume", action="store_true", help="keep what passed according to --out, and run the rest")
    parser.add_argument(
        "--for", type=float, default=float("inf"), dest="seconds", help="seconds after which none is begun"
    )
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "build" / "zoo.json", help="all records, as JSON")
    parser.add_argument("--table", type=Path, help="the page for the docs")
    given = parser.parse_args()
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as mapping

    began = time.monotonic()
    census = json.loads((HERE / "census.json").read_text())
    everything = sorted((n for n in mapping if n not in LEFT_OUT), key=lambda n: (not _has_sites(census, n), n))
    names = given.names or everything
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    before: dict[str, Any] = json.loads(given.out.read_text()) if given.resume and given.out.exists() else {}
    if before and any(before[k] != v for k, v in versions.items()):
        raise SystemExit(f"{given.out} is a record of other versions: without --resume it is made anew")
    records = {r["model_type"]: r for r in before.get("architectures", ())}
    passed = {n for n, r in records.items() if not _failed(r)}

    def summary() -> dict[str, Any]:
        listed = [records[n] for n in everything if n in records]
        return {
            **versions,
            "jobs": given.jobs,
            "wall_seconds": round(before.get("wall_seconds", 0) + time.monotonic() - began),
            "cpu_seconds": round(sum(r["cpu_seconds"] for r in listed)),
            "of": len(everything),
            "failed": [r["model_type"] for r in listed if _failed(r)],
            "architectures": listed,
        }

    def keep(record: dict[str, Any]) -> None:
        records[record["model_type"]] = record
        given.out.parent.mkdir(parents=True, exist_ok=True)
        half = given.out.with_suffix(".new")
        half.write_text(json.dumps(summary(), indent=1) + "\n")
        half.replace(given.out)

    again = {n for n in names if n in records} - passed  # what failed before comes last
    todo = [n for n in names if n not in records] + [n for n in names if n in again]
    run(todo, census, given.jobs, given.limit, began + given.seconds, keep)
    result = summary()
    missing = [n for n in names if n not in records]
    if given.table:
        given.table.write_text(table(result))
    failed = [n for n in result["failed"] if n in names]
    print(
        f"{len(names) - len(missing) - len(failed)} of {len(names)} architectures passed; {time.monotonic() - began:.0f} s"
    )
    unknown, gone = [n for n in everything if n not in census], sorted(n for n in census if n not in mapping)
    for label, group in (
        ("failed", failed),
        ("not run", missing),
        ("not in the census", unknown),
        ("not in this transformers", gone),
    ):
        if group:
            print(f"{label}: {', '.join(group)}")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
