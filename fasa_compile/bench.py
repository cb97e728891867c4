"""``fasa-compile bench``: a model's prefill and decode step against the length of its context, as it is, by our dense kernel, and sparse."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

import fasa_compile
from fasa_compile import charts
from fasa_compile.backend import FasaBackend, Inner, fasa_backend
from fasa_compile.doctor import environment
from fasa_compile.profiles.schema import FCProfile

#: Variant -> what it is called in tables and plots.
VARIANTS = {"hf": "Hugging Face", "dense": "ours, dense", "sparse": "ours, sparse"}
_WARM = 4  # steps before those that are timed; the first one compiles


@dataclass(frozen=True)
class Setting:
    """``contexts``: lengths of the static cache, in tokens. ``prefill``: fill it by a prefill of random tokens, which is timed;
    else with random keys and values. ``budget``: arguments of ``fasa_backend`` for the sparse variant."""

    contexts: tuple[int, ...]
    batch: int = 1
    steps: int = 24
    variants: tuple[str, ...] = tuple(VARIANTS)
    inner: Inner = "inductor"
    mode: str | None = None
    prefill: bool = True
    budget: tuple[tuple[str, Any], ...] = ()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - began


def _fill(model: Any, cache: Any, tokens: int, batch: int, prefill: bool, device: torch.device) -> float | None:
    """Bring ``cache`` to ``tokens`` tokens; seconds of the prefill, None where there is none."""
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (batch, tokens), device=device)
    if prefill:
        return _timed(lambda: model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1), device)
    model(ids[:, :1], past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(tokens)
    return None


def _backend(name: str, profile: FCProfile, setting: Setting) -> Any:
    if name == "hf":
        return "eager" if setting.inner == "eager" else setting.inner
    if name == "dense":
        return fasa_backend(None, inner=setting.inner)
    return fasa_backend(profile, inner=setting.inner, check_weights=False, **dict(setting.budget))


def _variant(model: Any, name: str, profile: FCProfile, cache: Any, setting: Setting) -> dict[str, Any]:
    device = model.device
    torch._dynamo.reset()
    fasa_compile.reset_stats()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    backend = _backend(name, profile, setting)
    step_model = torch.compile(model, backend=backend, mode=setting.mode, dynamic=False)
    token = torch.zeros((setting.batch, 1), dtype=torch.long, device=device)

    def step() -> Any:
        return step_model(input_ids=token, past_key_values=cache, use_cache=True)

    first = _timed(step, device)
    for _ in range(_WARM - 1):
        step()
    times = [_timed(step, device) for _ in range(setting.steps)]
    median = statistics.median(times)
    row: dict[str, Any] = {
        "ms_per_step": 1e3 * median,
        "fastest_ms": 1e3 * min(times),
        "slowest_ms": 1e3 * max(times),
        "tokens_per_s": setting.batch / median,
        "seconds_first_step": first,
    }
    if device.type == "cuda":
        row["memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    if isinstance(backend, FasaBackend):
        rows = backend.explain().rows
        row["sites"] = {d: sum(r.decision == d for r in rows) for d in sorted({r.decision for r in rows})}
        row["reasons"] = sorted({r.reason for r in rows if r.reason})
        row["packed_bytes"] = sum(r.packed_bytes for r in rows)
        row["kv_bytes_read"] = sum(r.sparse_bytes for r in rows)
    return row


@torch.no_grad()
def bench(
    model: Any, profile: FCProfile, setting: Setting, *, note: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Times of a transformers model as plain data: versions, the setting, and for each context a row per variant.

    ``note`` is told what comes next. A context that does not fit into memory has ``{"error": ...}`` instead of rows. Speed-ups
    are of medians, of one process on one cache.
    """
    from transformers import StaticCache

    device = model.device
    cases: list[dict[str, Any]] = []
    model(
        torch.zeros((setting.batch, 16), dtype=torch.long, device=device), use_cache=False
    )  # warms up what loads lazily
    room = (setting.steps + _WARM) * len(setting.variants) + 1
    for context in setting.contexts:
        case: dict[str, Any] = {"context": context}
        cases.append(case)
        if context <= room:
            case["error"] = f"{context} tokens leave no room for {room} timed steps"
            continue
        try:
            note(f"{charts.tokens(context)}: " + ("prefill" if setting.prefill else "filling the cache"))
            cache = StaticCache(config=model.config, max_cache_len=context)
            case["prefill_s"] = _fill(model, cache, context - room, setting.batch, setting.prefill, device)
            case["prefill_tokens"] = context - room
            tensors = [
                t for layer in cache.layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))
            ]
            case["kv_bytes"] = sum(t.nbytes for t in tensors if t is not None)
            rows: dict[str, Any] = {}
            case["variants"] = rows
            for name in setting.variants:
                note(f"{charts.tokens(context)}: {VARIANTS[name]}")
                rows[name] = _variant(model, name, profile, cache, setting)
            if "sparse" in rows:
                for name in ("hf", "dense"):
                    if name in rows:
                        case[f"speedup_over_{name}"] = rows[name]["ms_per_step"] / rows["sparse"]["ms_per_step"]
        except torch.OutOfMemoryError:
            case["error"] = "out of memory"
        finally:
            cache = None
            torch._dynamo.reset()
    return {
        "benchmark": "fasa-compile bench: decode step over a full static cache",
        **environment(device),
        "model": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "batch": setting.batch,
        "steps": setting.steps,
        "budget": dict(setting.budget),
        "date": time.strftime("%Y-%m-%d"),
        "cases": cases,
    }


def plot(record: dict[str, Any], what: Literal["step", "speedup"] = "step") -> str:
    """An SVG of a record: milliseconds of a step against the context, or the speed-up of sparse steps."""
    good = [c for c in record["cases"] if "variants" in c and "error" not in c]
    if what == "speedup":
        series = {
            f"over {VARIANTS[name]}": [
                (c["context"], c[f"speedup_over_{name}"]) for c in good if f"speedup_over_{name}" in c
            ]
            for name in ("hf", "dense")
        }
        y_label = "times faster, sparse"
    else:
        series = {
            label: [(c["context"], c["variants"][name]["ms_per_step"]) for c in good if name in c["variants"]]
            for name, label in VARIANTS.items()
        }
        y_label = "ms per decode step"
    title = f"{record['model']}, batch {record['batch']}, {record['card'].split(',')[0]}"
    kept = {name: points for name, points in series.items() if points}
    return charts.lines(title, kept, x_label="tokens of context", y_label=y_label)
