"""Step time of a whole model decoding: dense as Hugging Face runs it, dense with the best attention kernel, and sparse.

Llama-3.1-8B geometry (32 layers, 32/8 heads of 128, bf16) with random weights; the static cache is full of random keys and
values. All variants are compiled by Inductor with CUDA graphs:

- ``hf``: transformers' own static-cache path (repeat_kv and a mask);
- ``flash``: the same model whose attention is SDPA's flash kernel, grouped, over exactly the cache, without a mask;
- ``dense``: the unmodified model with ``fasa_backend(None)``;
- ``fasa-<format>-<n_tip>``: the unmodified model with ``fasa_backend(profile)``.

    python benchmarks/decode.py --case 1x32768:hf,dense,fasa-int4-32 --case 8x32768:flash,fasa-int4-32 \\
        --out benchmarks/results/decode-h100.json --plot benchmarks/results/decode-h100.svg

A case is a process; its variants run one after the other on one model and one cache. Cases whose memory fits together compile side by
side and are then timed one after the other: no process compiles while one is timed. The profile's FCs are drawn at random: on random keys every choice is
alike, and the time does not depend on it.

Of each variant: median, fastest and slowest step, each waited for; the mean of steps that are not waited for; microseconds from a
call until it returns; seconds until four steps had run; seconds of these in this package's passes;
microseconds of Python a step in this package's wrapper (beyond the call of what it wraps); bytes of the packed caches, and of those
what the cost model had predicted.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fasa_compile
from fasa_compile import fasa_backend
from fasa_compile.profiles import Budget, FCProfile, LayerProfile, ModelFacts, RopeFacts
from fasa_compile.runtime import Runtime

GEOMETRY = dict(
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=131072 + 4096,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)
WEIGHTS_GIB, PER_LAYER_GIB, CONTEXT_GIB = 2.0, 0.41, 1.2  # embeddings and head; a layer; a process's own
STEPS = 40


def build(layers: int) -> Any:
    """The model with random weights, made on the GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=layers, **GEOMETRY)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    return model


def random_profile(layers: int, n_tip: int, fc_format: str) -> FCProfile:
    """A profile of the geometry with random FCs, zero centre and unit spread."""
    g = torch.Generator().manual_seed(0)
    pairs = tuple((i, i + 64) for i in range(64))
    rows = tuple(
        LayerProfile(
            layer=f"model.layers.{i}.self_attn",
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rope=RopeFacts(128, pairs, 1.0),
            dense=False,
            fcs=torch.stack([torch.randperm(64, generator=g)[:n_tip].sort().values for _ in range(8)]).to(torch.int32),
            centre=torch.zeros(8, 128),
            spread=torch.ones(8, 128),
            norm=torch.zeros(32),
        )
        for i in range(layers)
    )
    return FCProfile(rows, Budget(), fc_format, "static", "random", ModelFacts("Llama", "random", layers, {}))


def full_cache(model: Any, batch: int, length: int, room: int) -> Any:
    """A static cache of ``length`` slots, all holding random keys and values, whose next write goes to ``length - room``."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=length)
    model.set_attn_implementation("bench_grouped")  # the default would repeat the whole cache for this first call
    with torch.no_grad():
        model(torch.zeros((batch, 1), dtype=torch.long, device="cuda"), past_key_values=cache)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    rewind(cache, length - room)
    return cache


def rewind(cache: Any, position: int) -> None:
    for layer in cache.layers:
        layer.cumulative_length.fill_(position)


def flash_attention(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float | None = None, **_: Any) -> Any:
    """transformers' attention interface: SDPA's flash kernel over the whole cache, query heads grouped, no mask."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


class Turn:
    """The GPU, for one process at a time: held while something executes, let go while a graph is traced and compiled.

    ``variants``: how many each of the processes that share ``path`` has, this one included. They go through these together, each meeting the
    others (``meet``) when it has compiled one and when that has been timed.
    """

    def __init__(self, path: str, variants: Sequence[int] = ()) -> None:
        self._path, self._variants, self._meetings = path, variants, 0
        self._file = Path(path).open("w")  # noqa: SIM115
        self.held = False

    def take(self) -> None:
        if not self.held:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self.held = True

    def meet(self) -> None:
        """Returns once every process that is not through with its variants has come here as often as this one, or has ended badly:
        ``run_cases`` writes how many variants such a one had."""
        folder = Path(f"{self._path}-{self._meetings}")
        folder.mkdir(exist_ok=True)
        (folder / str(os.getpid())).touch()
        number = self._meetings // 2  # of the variant
        self._meetings += 1
        wanted = sum(n > number for n in self._variants)
        while True:
            ended = [file for file in Path(f"{self._path}-ended").glob("*") if int(file.read_text() or 0) > number]
            if len({file.name for file in (*folder.iterdir(), *ended)}) >= wanted:
                return
            time.sleep(0.05)

    def leave(self) -> None:
        torch.cuda.synchronize()
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self.held = False


class Backend:
    """Compiles for one variant, keeps what it made, and waits for the GPU before that is first called."""

    def __init__(self, name: str, n_fac: int, layers: int, turn: Turn) -> None:
        self.turn = turn
        self.fasa: Any = None
        self.runtimes: list[Runtime] = []
        if name == "dense":
            self.fasa = fasa_backend(None, strict=True)
        elif name.startswith("fasa"):
            _, fmt, n_tip = name.split("-")
            profile = random_profile(layers, int(n_tip), fmt)
            self.fasa = fasa_backend(profile, n_fac=n_fac, check_weights=False, strict=True)

    def __call__(self, gm: Any, example_inputs: Any, **how: Any) -> Any:
        if self.fasa is not None:
            compiled = self.fasa(gm, example_inputs, **how)
        else:
            from torch._inductor import list_mode_options
            from torch._inductor.compile_fx import compile_fx

            compiled = compile_fx(gm, example_inputs, config_patches=list_mode_options(how["mode"]))
        if isinstance(compiled, Runtime):
            self.runtimes.append(compiled)

        def call(*arguments: Any) -> Any:
            if not self.turn.held:
                self.turn.meet()
                self.turn.take()
            return compiled(*arguments)

        return call


def wrapper_us(runtime: Runtime, step: Any) -> float:
    """Microseconds of Python that the runtime adds to a call of what it wraps."""
    seen: list[Any] = []
    inner = runtime._compiled
    runtime._compiled = lambda *arguments: (seen.append(arguments), inner(*arguments))[1]
    step()
    extra = len(runtime._extra)
    arguments = seen[0][: len(seen[0]) - extra]

    def nothing(*_: Any) -> None:
        return None

    def median(call: Any) -> float:
        times = []
        for _ in range(500):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return 1e6 * statistics.median(times)

    runtime._compiled = nothing
    whole, bare = median(lambda: runtime(*arguments)), median(lambda: nothing(*arguments, *runtime._extra))
    runtime._compiled = inner
    return whole - bare


@torch.no_grad()
def measure(model: Any, name: str, cache: Any, batch: int, length: int, n_fac: int, turn: Turn) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fasa_compile.reset_stats()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model.set_attn_implementation("bench_grouped" if name == "flash" else "sdpa")
    room, layers = STEPS + 16, model.config.num_hidden_layers
    rewind(cache, length - room)
    backend = Backend(name, n_fac, layers, turn)
    compiled = torch.compile(model, backend=backend, mode="reduce-overhead", dynamic=False)
    token = torch.zeros((batch, 1), dtype=torch.long, device="cuda")

    def step() -> None:
        compiled(input_ids=token, past_key_values=cache)

    turn.leave()
    began = time.perf_counter()
    step()  # takes the turn
    first = time.perf_counter() - began
    for _ in range(3):
        step()
        torch.cuda.synchronize()
    warm = time.perf_counter() - began
    times = []
    for _ in range(STEPS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    rewind(cache, length - room)
    alone = []
    for _ in range(12):
        torch.cuda.synchronize()
        came = time.perf_counter()
        step()
        alone.append(time.perf_counter() - came)
    # Steps of a loop that never waits: what the CPU does for the next one goes beside the GPU's work.
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(STEPS - 8):
        if i == 8:
            begin.record()
        step()
    end.record()
    end.synchronize()
    ahead = begin.elapsed_time(end) / (STEPS - 16)
    stats = fasa_compile.stats()
    row: dict[str, Any] = {
        "ms_per_step": statistics.median(times),
        "fastest": min(times),
        "slowest": max(times),
        "ms_per_step_without_waiting": ahead,
        "us_of_cpu_per_step": 1e6 * statistics.median(alone),
        "seconds_first_step": first,
        "seconds_to_warm": warm,
        "cudagraph_skips": torch._dynamo.utils.counters["inductor"]["cudagraph_skips"],
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    if backend.fasa is not None:
        rows = backend.fasa.explain().rows
        row["sites"] = {d: sum(r.decision == d for r in rows) for d in sorted({r.decision for r in rows})}
        row["steps"] = {kind: stats[kind] for kind in ("sparse_steps", "dense_steps", "state_rebuilds")}
        row["seconds_of_our_passes"] = sum(g.seconds for g in backend.fasa.graphs)
        row["packed_bytes"] = sum(
            t.nbytes
            for runtime in backend.runtimes
            for keeper in runtime._keepers
            for packed in keeper.layer.caches.values()
            for t in (packed.data, packed.meta, packed.hint)
        )
        row["packed_bytes_predicted"] = sum(r.packed_bytes for r in rows)
        row["attention_us_predicted"] = sum(
            (r.sparse_us if r.decision == "sparse" else r.dense_us) or 0.0 for r in rows
        )
        (runtime,) = backend.runtimes
        row["wrapper_us_per_step"] = wrapper_us(runtime, step)
    return row


def run_case(case: str, n_fac: int, layers: int, lock: str, together: list[int], out: Path) -> None:
    """One case in this process; its record so far lies in ``out`` after each variant. ``together``: ``Turn``'s variants."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register("bench_grouped", flash_attention)
    AttentionMaskInterface.register("bench_grouped", lambda *args, **kwargs: None)
    shape, variants = case.split(":")
    batch, length = map(int, shape.split("x"))
    turn = Turn(lock, together)
    turn.take()
    model = build(layers)
    cache = full_cache(model, batch, length, STEPS + 16)
    rows: dict[str, Any] = {}
    for name in variants.split(","):
        turn.take()
        rows[name] = row = measure(model, name, cache, batch, length, n_fac, turn)
        print(f"{shape} {name:14s} {row['ms_per_step']:8.2f} ms  {row}", flush=True)
        whole = out.with_suffix(".new")
        whole.write_text(json.dumps(rows))
        whole.replace(out)
        turn.leave()
        turn.meet()


def gib(case: str, layers: int) -> float:
    """Memory a case needs: weights, cache, and what a packed cache may add."""
    batch, length = map(int, case.split(":")[0].split("x"))
    return WEIGHTS_GIB + CONTEXT_GIB + layers * (PER_LAYER_GIB + 1.08 * batch * length * 8 * 256 * 2 / 2**30)


def run_cases(cases: list[str], n_fac: int, layers: int, save: Callable[[dict[str, Any]], None]) -> bool:
    """Every case, as many at a time as fit the card; whether all of them ended well. ``save`` is given all rows so far,
    whenever there is a new one."""
    room = torch.cuda.get_device_properties(0).total_memory / 2**30 - 2.0
    groups: list[list[str]] = []
    for case in sorted(cases, key=lambda case: -gib(case, layers)):
        fitting = (g for g in groups if sum(gib(c, layers) for c in (*g, case)) < room)
        group = next(fitting, None)
        if group is None:
            groups.append(group := [])
        group.append(case)
    saved: dict[str, Any] = {}
    good = True
    with tempfile.TemporaryDirectory() as folder:
        outs = {case: Path(folder) / f"{i}.json" for i, case in enumerate(cases)}
        for i, group in enumerate(groups):
            lock = Path(folder) / f"lock-{i}"
            ended = Path(f"{lock}-ended")
            ended.mkdir()
            command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), __file__, "--lock", str(lock)]
            command += ["--n-fac", str(n_fac), "--layers", str(layers)]
            command += ["--together", ",".join(str(len(case.split(","))) for case in group)]
            running = {c: subprocess.Popen([*command, "--worker", c, "--out", str(outs[c])]) for c in group}
            while running:
                time.sleep(0.2)
                for case in [case for case, process in running.items() if process.poll() is not None]:
                    process = running.pop(case)
                    if process.returncode != 0:  # the others do not wait for it
                        (ended / str(process.pid)).write_text(str(len(case.split(","))))
                        good = False
                rows = {c.split(":")[0]: json.loads(outs[c].read_text()) for c in cases if outs[c].exists()}
                if rows != saved:
                    save(rows)
                    saved = rows
    return good


# --- plot -----------------------------------------------------------------------------------------------------------------

COLOURS = {"hf": "#888888", "flash": "#d08020", "dense": "#3070c0", "fasa": "#208040"}


def plot(record: dict[str, Any]) -> str:
    """An SVG: milliseconds of a step by case, a bar for each variant, logarithmic."""
    import math

    cases = record["cases"]
    bars = [(case, name, row["ms_per_step"]) for case, rows in cases.items() for name, row in rows.items()]
    top, bottom, left, height, width = 40, 60, 50, 300, 26
    low, high = 4.0, max(ms for *_, ms in bars) * 1.3

    def y(ms: float) -> float:
        return top + height * (1 - math.log(ms / low) / math.log(high / low))

    parts, x, floor = [], left + 12.0, top + height
    for case, rows in cases.items():
        start = x
        for name, row in rows.items():
            colour, ms = COLOURS[name.split("-")[0]], row["ms_per_step"]
            parts.append(
                f'<rect x="{x}" y="{y(ms):.1f}" width="{width}" height="{floor - y(ms):.1f}" fill="{colour}"/>'
            )
            parts.append(f'<text x="{x + width / 2}" y="{y(ms) - 4:.1f}" text-anchor="middle">{ms:.1f}</text>')
            x += width + 4
        batch, length = case.split("x")
        parts.append(
            f'<text x="{(start + x) / 2}" y="{floor + 18}" text-anchor="middle">{batch} x {int(length) // 1024}k</text>'
        )
        x += 24
    grid = [
        f'<line x1="{left}" x2="{x}" y1="{y(ms):.1f}" y2="{y(ms):.1f}" stroke="#dddddd"/>'
        f'<text x="{left - 6}" y="{y(ms) + 4:.1f}" text-anchor="end">{ms}</text>'
        for ms in (5, 10, 20, 50, 100)
        if ms < high
    ]
    names = {
        "hf": "Hugging Face",
        "flash": "flash kernel",
        "dense": "fasa_backend(None)",
        "fasa": "fasa_backend(profile)",
    }
    legend = "".join(
        f'<rect x="{left + 150 * i}" y="{floor + 34}" width="10" height="10" fill="{COLOURS[key]}"/>'
        f'<text x="{left + 150 * i + 14}" y="{floor + 43}">{text}</text>'
        for i, (key, text) in enumerate(names.items())
    )
    title = f'<text x="{left}" y="20" font-size="13">{record["benchmark"]}: ms per step, batch x context, {record["card"]}</text>'
    wide = max(x, left + 620)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {floor + bottom}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>{title}{"".join(grid + parts)}{legend}</svg>\n'
    )


def main() -> None:
    import transformers
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", action="append", help="BATCHxLENGTH:VARIANT,VARIANT,..., e.g. 1x32768:hf,fasa-int4-32"
    )
    parser.add_argument("--n-fac", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=Path, help="write the record here (JSON)")
    parser.add_argument("--plot", type=Path, help="and a plot of it here (SVG)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    parser.add_argument("--together", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        together = [int(n) for n in options.together.split(",")]
        return run_case(options.worker, options.n_fac, options.layers, options.lock, together, options.out)
    record: dict[str, Any] = {
        "benchmark": "Decode step, Llama-3.1-8B geometry, random weights, bf16, static cache full of random K and V, CUDA graphs",
        "layers": options.layers,
        "n_fac": options.n_fac,
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }

    def save(rows: dict[str, Any]) -> None:
        record["cases"] = rows
        for path, text in (
            (options.out, lambda: json.dumps(record, indent=1) + "\n"),
            (options.plot, lambda: plot(record)),
        ):
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text())

    good = run_cases(options.case or ["1x32768:hf,flash,dense,fasa-int4-32"], options.n_fac, options.layers, save)
    if not good:
        sys.exit("a case did not end well")


if __name__ == "__main__":
    main()
