"""FASA-M on a GPU: K and V in host memory, beside the same sparse decode with K and V on the card (FASA-C).

    python benchmarks/offload.py link --out benchmarks/results/offload-h100.json
    python benchmarks/offload.py layer --shape 1x32768 --shape 8x32768 --out ...
    python benchmarks/offload.py step --case 1x32768:card --case 1x32768:host --soak 2000 --out ...
    python benchmarks/offload.py memory --out ...
    python benchmarks/offload.py long --length 524288 --out ...

Each part adds its rows to the record. ``link``: what host memory costs to get, and what the link to it gives. ``layer``: attention of one
layer in CUDA graphs, four sites in turn, queries that walk around a circle in ``n`` steps: the fewer, the more of the selection changes
in each, down to independent queries; how much was fetched is counted, not assumed. ``step``: a whole model of Llama-3.1-8B geometry
(``decode.py``), all layers with the first one's weights, inputs that are more or less like the last one's; the logits of ``--soak`` steps are
compared bit for bit: Inductor then chooses nothing by timing, which would give each process reductions of its own. ``memory``: what the card holds for one layer. ``long``: a context whose K and V the card cannot hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import decode
import numpy as np
import torch
from _timing import environment, graph_time
from torch import Tensor

import fasa_compile
from fasa_compile import FasaStaticCache, fasa_backend, offload, offloaded_cache, staged
from fasa_compile.offload import rows_of
from fasa_compile.triton_kernels import ops, pack
from fasa_compile.triton_kernels.hot_slots import ATTENDED, FETCHED, UNKEPT, HotSize, fac_parts, hot_spec
from fasa_compile.triton_kernels.sparse_decode import sparse_decode

HQ, HKV, D, N_FAC = 32, 8, 128, 1024
LINK = 46  # GB/s that a kernel reads host memory at (``link``)


def seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


# ---- the link ---------------------------------------------------------------------------------------------------------


def link() -> list[dict[str, Any]]:
    """Managed memory, which caches lie in, and pinned memory: how long it takes to get, copies of a layer to the card, and gathered
    rows of K and V together, near each other and far apart."""
    torch._dynamo.mark_static_address(
        torch.zeros(1, device="cuda")
    )  # imports what the first cache would have to wait for
    rows = []
    manages = offload._manages
    for kind in ("managed", "pinned"):
        offload._manages = manages if kind == "managed" else lambda device: False
        for tokens in (1 << 18, 1 << 20, 1 << 22):  # 1, 4 and 16 GiB
            made: list[Any] = []
            row: dict[str, Any] = {"memory": kind, "gib": tokens >> 18}
            row["seconds_to_get"] = seconds(
                lambda n=tokens, made=made: made.append(offloaded_cache((1, HKV, n, D), torch.bfloat16, "cuda"))  # type: ignore[misc]
            )
            k, v = made.pop()
            if tokens == 1 << 18:
                row["gb_per_s"] = speeds(k, v)
            both = torch.as_strided(k, (HKV * tokens, 2 * D), (2 * D, 1))
            row["gathered_us"] = {}
            for number in (64, 512, 2048, 8192):
                index = [torch.randint(0, HKV * tokens, (number,), device="cuda") for _ in range(24)]
                us = graph_time([lambda i=i, both=both: both.index_select(0, i) for i in index])  # type: ignore[misc]
                row["gathered_us"][f"{number} rows of {4 * D} B"] = us
            print(row, flush=True)
            rows.append(row)
            del k, v, both
    offload._manages = manages
    return rows


def speeds(k: Tensor, v: Tensor) -> dict[str, float]:
    """GB/s at which a cache is written by a kernel, read by one, and copied to the card."""
    rows = rows_of(k)
    assert rows is not None
    fill = seconds(lambda: (k.fill_(1), v.fill_(1)))
    stage = statistics.median(seconds(lambda: staged(k, v, k.shape[2])) for _ in range(3))
    read = statistics.median(seconds(lambda: k.contiguous()) for _ in range(3))
    return {
        "written by a kernel": rows.bytes / fill / 1e9,
        "copied to the card (staged)": rows.bytes / stage / 1e9,
        "K read by a kernel": rows.bytes / 2 / read / 1e9,
    }


# ---- one layer --------------------------------------------------------------------------------------------------------


class Site:
    """One layer's K and V on the card and in host memory, and what the steps keep."""

    def __init__(self, B: int, L: int, fmt: str, n_tip: int) -> None:
        shape = (B, HKV, L, D)
        self.k, self.v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.host_k, self.host_v = offloaded_cache(shape, torch.bfloat16, "cuda")
        self.host_k.copy_(self.k), self.host_v.copy_(self.v)
        W = 2 * n_tip
        self.dims = torch.stack([torch.randperm(D)[:W] for _ in range(HKV)]).int().cuda()
        self.centre, self.spread = torch.zeros(HKV, W, device="cuda"), torch.ones(HKV, W, device="cuda")
        self.norm = torch.zeros(HQ, device="cuda")
        self.data, self.meta = pack.pack(self.k, self.dims, self.centre, self.spread, fmt)
        self.bounds = torch.tensor([[0, L]], device="cuda", dtype=torch.int32)
        self.slots = torch.tensor([L - 1], device="cuda")
        self.planes = [torch.randn(B, HQ, 1, D, device="cuda") for _ in range(2)]
        self.fmt = fmt

    def queries(self, n: int) -> list[Tensor]:
        """``n`` queries around a circle; 0: six independent ones."""
        if n == 0:
            return [torch.randn_like(self.planes[0]).bfloat16() for _ in range(6)]
        angles = [2 * math.pi * i / n for i in range(n)]
        return [(math.cos(a) * self.planes[0] + math.sin(a) * self.planes[1]).bfloat16() for a in angles]

    def state(self, hot_tokens: int | None) -> list[Tensor]:
        """Threshold and, unless ``hot_tokens`` is None or 0, a hot buffer."""
        B = self.k.shape[0]
        shape, dtype = ops.sparse_decode_state(B, HKV)
        made = [torch.zeros(shape, dtype=dtype, device="cuda")]
        if hot_tokens:
            parts = fac_parts(B * HKV, N_FAC, torch.cuda.get_device_properties(0).multi_processor_count)
            for shape, dtype in hot_spec(B, HKV, HotSize(parts, -(-hot_tokens // parts)), D, D, torch.bfloat16):
                made.append(torch.zeros(shape, dtype=dtype, device="cuda"))
        return made

    def step(self, q: Tensor, hosted: bool, state: list[Tensor]) -> Callable[[], Tensor]:
        k, v = (self.host_k, self.host_v) if hosted else (self.k, self.v)
        return lambda: sparse_decode(
            q, k, v, self.data, self.meta, self.dims, self.centre, self.spread, self.norm, None, self.bounds, self.slots,
            *state, scale=D**-0.5, n_fac=N_FAC, n_sink=4, n_recent=16, fmt=self.fmt,
        )  # fmt: skip


def layer(
    sites_number: int, shape: str, hot: list[int], turns: list[int], fmt: str = "int4", n_tip: int = 32
) -> list[dict[str, Any]]:
    """Microseconds a layer, with K and V on the card, in host memory without a hot buffer (0), and with hot buffers."""
    B, L = map(int, shape.split("x"))
    sites = [Site(B, L, fmt, n_tip) for _ in range(sites_number)]
    rows = []
    for n in turns:
        paths = [site.queries(n) for site in sites]

        def steps(
            hosted: bool, states: list[list[Tensor]], paths: list[list[Tensor]] = paths
        ) -> list[Callable[[], Tensor]]:
            return [
                site.step(path[j], hosted, state)
                for j in range(len(paths[0]))
                for site, path, state in zip(sites, paths, states, strict=True)
            ]

        states = [site.state(None) for site in sites]
        row: dict[str, Any] = {
            "shape": shape,
            "turns": n,
            "sites": sites_number,
            "on the card": graph_time(steps(False, states)),
        }
        for tokens in hot:
            states = [site.state(tokens) for site in sites]
            us = graph_time(steps(True, states))
            found: dict[str, float] = {"us": us}
            if tokens:
                before = sum(x[3].sum((0, 1, 2)).double() for x in states)
                calls = steps(True, states)
                for call in calls:
                    call()
                delta = (sum(x[3].sum((0, 1, 2)).double() for x in states) - before).tolist()  # type: ignore[operator]
                found |= {
                    "fetched": delta[FETCHED] / delta[ATTENDED],
                    "without a slot": delta[UNKEPT] / delta[ATTENDED],
                }
                bytes_a_call = delta[FETCHED] / len(calls) * 4 * D
                found |= {"fetched_bytes": bytes_a_call, "bound_us_at_55_gb_s": bytes_a_call / 55e3}
            row[f"hot {tokens}"] = found
        print(row, flush=True)
        rows.append(row)
    return rows


# ---- whole models -----------------------------------------------------------------------------------------------------


def model_of(layers: int, *, shared: bool) -> Any:
    """The model of ``decode.py``; ``shared``: all layers have the first one's weights, which a step reads as often, and which lets
    several cases share the card."""
    from transformers import LlamaConfig, LlamaForCausalLM

    decode.GEOMETRY["max_position_embeddings"] = 1 << 20
    if not shared:
        return decode.build(layers)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **decode.GEOMETRY)).to(torch.bfloat16).eval()
    one = decode.build(1)
    model.model.norm, model.model.rotary_emb, model.lm_head = one.model.norm, one.model.rotary_emb, one.lm_head
    model.model.embed_tokens = None  # inputs are embeddings
    for layer in model.model.layers:
        for name, parameter in one.model.layers[0].named_parameters():
            owner, _, leaf = name.rpartition(".")
            setattr(layer.get_submodule(owner), leaf, parameter)
    return model


class Steps:
    """A compiled model and its cache, whose inputs walk: each embedding is a mixture of the last one and a new one."""

    def __init__(
        self, model: Any, batch: int, length: int, hosted: bool, hot_tokens: int | None, fmt: str, n_tip: int
    ) -> None:
        from transformers import StaticCache

        self.model, self.batch, self.length = model, batch, length
        layers = model.config.num_hidden_layers
        torch.cuda.synchronize()
        self.before = torch.cuda.memory_allocated()
        self.cache = (FasaStaticCache if hosted else StaticCache)(config=model.config, max_cache_len=length)
        self.seconds_to_allocate = seconds(
            lambda: self.cache.early_initialization(batch, HKV, D, torch.bfloat16, torch.device("cuda"))
        )
        g = torch.Generator("cuda").manual_seed(7)
        for layer in self.cache.layers:
            for to in (layer.keys, layer.values):
                for b in range(batch):  # the same numbers wherever they go
                    to[b].copy_(torch.randn(to.shape[1:], generator=g, device="cuda", dtype=torch.bfloat16))
        profile = decode.random_profile(layers, n_tip, fmt)
        how: dict[str, Any] = {"offload": "cpu", "hot_tokens": hot_tokens} if hosted else {}
        self.backend = fasa_backend(profile, n_fac=N_FAC, check_weights=False, strict=True, dense_below=0, **how)
        torch._dynamo.reset()
        self.compiled = torch.compile(model, backend=self.backend, mode="reduce-overhead", dynamic=False)
        self.noise = torch.Generator("cuda").manual_seed(11)
        self.x = self.fresh()

    def fresh(self) -> Tensor:
        """Large against what random layers add, so that the queries of all layers are as alike as the inputs."""
        shape = (self.batch, 1, self.model.config.hidden_size)
        return 32 * torch.randn(shape, generator=self.noise, device="cuda", dtype=torch.bfloat16)

    def rewind(self, room: int) -> None:
        decode.rewind(self.cache, self.length - room)

    @torch.no_grad()
    def step(self, like: float) -> Tensor:
        """One step; ``like``: the cosine of this input with the last one."""
        self.x = like * self.x + math.sqrt(1 - like * like) * self.fresh()
        return self.compiled(inputs_embeds=self.x, past_key_values=self.cache).logits

    def timed(self, like: float, steps: int = 24, warm: int = 6) -> dict[str, Any]:
        """Milliseconds a step (the model's, not the input's), and what the hot buffer counted meanwhile."""
        self.rewind(steps + warm + 2)
        times = []
        for i in range(steps + warm):
            if i == warm:
                fasa_compile.reset_stats()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.x = like * self.x + math.sqrt(1 - like * like) * self.fresh()
            begin.record()
            with torch.no_grad():
                self.compiled(inputs_embeds=self.x, past_key_values=self.cache)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        row = {"likeness": like, "ms_per_step": statistics.median(times[warm:]), "slowest": max(times[warm:])}
        hot = fasa_compile.stats().get("hot")
        if hot:
            total = {name: sum(r[name] for r in hot.values()) for name in ("attended", "fetched", "unkept")}
            bytes_a_step = total["fetched"] / steps * 4 * D
            row |= {
                "hit_rate": 1 - total["fetched"] / total["attended"],
                "without_a_slot": total["unkept"] / total["attended"],
                "mb_fetched_a_step": bytes_a_step / 1e6,
                "ms_at_the_links_gb_s": bytes_a_step / LINK / 1e6,
            }
        return row

    def kept_bytes(self) -> int:
        """What the card holds for K and V beyond the model, by the allocator."""
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - self.before

    def soak(self, steps: int, logits: Path) -> dict[str, Any]:
        """``steps`` steps whose selections change: a digest of every step's logits, and the memory meanwhile. The first steps' go to ``logits``."""
        self.noise.manual_seed(13)
        self.x = self.fresh()
        self.rewind(steps + 2)
        digests, memory, first = [], [], []
        begin = time.perf_counter()
        for i in range(steps):
            out = self.step(0.0 if i % 100 == 99 else 0.95)
            digests.append(
                out.view(torch.int16).to(torch.int64).mul(torch.arange(1, out.shape[-1] + 1, device="cuda")).sum()
            )
            if i < 8:
                first.append(out.float().cpu())
            if i % 100 == 50:
                torch.cuda.synchronize()
                memory.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident_bytes()))
        np.save(logits, torch.stack(first).numpy())
        return {
            "steps": steps,
            "seconds": time.perf_counter() - begin,
            "memory": memory,
            "digests": [int(d) for d in torch.stack(digests).tolist()],
        }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def worker(case: str, lock: str, layers: int, soak: int, out: Path) -> None:
    """One case on one model in this process: ``1x32768:card``, ``1x32768:host`` or ``1x32768:host-HOT``."""
    shape, variant = case.split(":")
    batch, length = map(int, shape.split("x"))
    hot = int(variant.split("-")[1]) if "-" in variant else None
    turn = decode.Turn(lock)
    torch.manual_seed(0)
    torch._inductor.config.deterministic = soak > 0
    model = model_of(layers, shared=True)
    run = Steps(model, batch, length, variant.startswith("host"), hot, "int4", 32)
    run.rewind(64)
    begin = time.perf_counter()
    run.step(0.9)  # traced and compiled while others time
    torch.cuda.synchronize()
    row: dict[str, Any] = {
        "case": case, "seconds_first_step": time.perf_counter() - begin, "seconds_to_allocate": run.seconds_to_allocate,
    }  # fmt: skip
    turn.take()
    for _ in range(4):
        run.step(0.9)
    row["kept_bytes"] = run.kept_bytes()
    row["dense_bytes"] = batch * length * layers * HKV * 4 * D
    row["timed"] = [run.timed(like) for like in (0.99, 0.95, 0.9, 0.8, 0.0)]
    row["skips"] = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    turn.leave()
    print(json.dumps(row), flush=True)
    out.write_text(json.dumps(row))
    if soak:
        turn.take()
        row["soak"] = run.soak(soak, out.with_suffix(".npy"))
        turn.leave()
        out.write_text(json.dumps(row))


def step(cases: list[str], layers: int, soak: int, limit: float, lock: str | None) -> list[dict[str, Any]]:
    """Every case in a process of its own, all at a time: they compile together and take turns on the card."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for i, case in enumerate(cases):
            out = Path(folder) / f"{i}.json"
            command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), __file__, "step", "--worker", case]
            command += ["--lock", lock or f"{folder}/lock", "--layers", str(layers), "--out", str(out)]
            command += ["--soak", str(soak if i < 2 else 0)]
            running.append((case, out, subprocess.Popen(command)))
        for case, _, process in running:
            try:
                process.wait(max(0.1, limit - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                process.kill()
                print(case, "took too long", flush=True)
        rows = [json.loads(out.read_text()) for _, out, _ in running if out.exists()]
        first = [np.load(out.with_suffix(".npy")) for _, out, _ in running if out.with_suffix(".npy").exists()]
    soaks = [row["soak"] for row in rows if "soak" in row]
    digests = [s.pop("digests") for s in soaks]
    if len(digests) == 2:
        soaks[0]["steps_equal"] = sum(a == b for a, b in zip(*digests, strict=True))
        soaks[0]["difference_of_first_steps"] = float(abs(first[0] - first[1]).max() / abs(first[0]).max())
    return rows


def memory(formats: list[str], lengths: list[int], hots: list[int]) -> list[dict[str, Any]]:
    """Bytes on the card for K and V of one layer, by the allocator, against dense bf16. Each ``fmt-n_tip``."""
    rows = []
    model = model_of(1, shared=False)
    with torch.no_grad():  # what a first call takes for good, cuBLAS's workspace above all, is nobody's KV
        model(torch.zeros((1, 4), dtype=torch.long, device="cuda"))
    for length in lengths:
        for name in formats:
            for hot in hots:
                fmt, n_tip = name.split("-")
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # or a freed block is used again, whole, for what is a little smaller
                before = torch.cuda.memory_allocated()
                cache = FasaStaticCache(config=model.config, max_cache_len=length)
                profile = decode.random_profile(1, int(n_tip), fmt)
                backend = fasa_backend(
                    profile, n_fac=N_FAC, check_weights=False, strict=True, offload="cpu", hot_tokens=hot, inner="eager"
                )
                torch._dynamo.reset()
                compiled = torch.compile(model, backend=backend, dynamic=False)
                token = torch.zeros((1, 1), dtype=torch.long, device="cuda")
                with torch.no_grad():
                    model(token.expand(1, 4), past_key_values=cache)
                    for _ in range(2):
                        out = compiled(input_ids=token, past_key_values=cache)
                del out, token
                gc.collect()
                torch.cuda.synchronize()
                kept = torch.cuda.memory_allocated() - before
                dense = length * HKV * 4 * D
                (row,) = backend.explain().rows
                rows.append(
                    {
                        "length": length, "format": fmt, "n_tip": int(n_tip), "hot_tokens": hot, "bytes": kept,
                        "dense_over_this": dense / kept, "predicted": row.packed_bytes + row.hot_bytes,
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
                del cache, compiled, backend
                torch._dynamo.reset()
                gc.collect()
    return rows


def long(
    length: int,
    prefill: int,
    chunk: int,
    layers: int,
    hot: int | None,
    fmt: str,
    n_tip: int,
    turn: decode.Turn,
    save: Any,
) -> None:
    """A context whose K and V do not fit the card: dense runs out of memory; here, prefill in chunks, the rest of the context
    injected as random K and V, and decode."""
    from transformers import StaticCache

    model = model_of(layers, shared=False)
    row: dict[str, Any] = {"length": length, "card_gib": torch.cuda.get_device_properties(0).total_memory / 2**30}
    try:
        dense = StaticCache(config=model.config, max_cache_len=length)
        dense.early_initialization(1, HKV, D, torch.bfloat16, torch.device("cuda"))
        with torch.no_grad():
            model(torch.zeros((1, 1), dtype=torch.long, device="cuda"), past_key_values=dense)
        row["dense"] = "fits"
    except torch.OutOfMemoryError as problem:
        row["dense"] = str(problem).split(". ")[0]
    dense = None
    gc.collect()
    torch.cuda.empty_cache()
    save(row)
    run = Steps(model, 1, length, True, hot, fmt, n_tip)
    row["seconds_to_allocate"] = run.seconds_to_allocate
    save(row)
    decode.rewind(run.cache, 0)
    ids = torch.randint(0, 128256, (1, prefill), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    def fill() -> None:
        with torch.no_grad():
            for part in ids.split(chunk, dim=1):
                model(part, past_key_values=run.cache, logits_to_keep=1)

    turn.take()
    row |= {"prefilled": prefill, "injected": length - prefill, "chunk": chunk, "prefill_seconds": seconds(fill)}
    row["prefill_bytes_on_the_card"] = torch.cuda.max_memory_allocated() - base
    turn.leave()
    torch.cuda.empty_cache()
    save(row)
    run.rewind(200)
    begin = time.perf_counter()
    run.step(0.9)
    torch.cuda.synchronize()
    row["seconds_first_step"] = time.perf_counter() - begin
    turn.take()
    for _ in range(4):
        run.step(0.9)
    row["kept_bytes"], row["dense_bytes"] = run.kept_bytes(), length * layers * HKV * 4 * D
    row["timed"] = [run.timed(like) for like in (0.99, 0.95, 0.9, 0.8, 0.0)]
    row["explain"] = str(run.backend.explain()).splitlines()[-4:]
    turn.leave()
    save(row)


# ---- the record -------------------------------------------------------------------------------------------------------


def add(out: Path | None, part: str, rows: Any) -> None:
    """Puts a part into the record, which keeps the others'."""
    record = (
        json.loads(out.read_text())
        if out is not None and out.exists()
        else {"benchmark": "FASA-M, Llama-3.1-8B geometry"}
    )
    record[part] = {**environment(), "rows": rows}
    print(part, json.dumps(rows), flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["link", "layer", "step", "memory", "long"])
    parser.add_argument("--shape", action="append", help="BATCHxLENGTH, of layer")
    parser.add_argument(
        "--hot", type=int, action="append", help="tokens of the hot buffer, of layer, memory and long; 0: none"
    )
    parser.add_argument("--sites", type=int, default=4, help="that take turns, of layer")
    parser.add_argument("--turns", type=int, action="append", help="steps around the circle, of layer")
    parser.add_argument("--case", action="append", help="BATCHxLENGTH:card, :host or :host-HOT_TOKENS, of step")
    parser.add_argument(
        "--soak", type=int, default=0, help="steps that the first two cases take at the end, to be compared"
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds, of step")
    parser.add_argument("--format", action="append", help="FORMAT-N_TIP, of memory and long")
    parser.add_argument("--length", type=int, action="append", help="tokens, of memory and long")
    parser.add_argument("--prefill", type=int, default=32768, help="tokens that are really prefilled, of long")
    parser.add_argument("--chunk", type=int, default=4096, help="of the prefill")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--lock", help="a file held by whoever times, where step and long run side by side")
    parser.add_argument("--out", type=Path, help="write the record here (JSON)")
    options = parser.parse_args()
    if options.part == "link":
        add(options.out, "link", link())
    elif options.part == "layer":
        rows: list[Any] = []
        for shape in options.shape or ["1x32768"]:
            rows += layer(options.sites, shape, options.hot or [0, 1024, 1536, 2048], options.turns or [48, 20, 12, 0])
            torch.cuda.empty_cache()
        add(options.out, "layer", rows)
    elif options.part == "step":
        if options.worker:
            return worker(options.worker, options.lock, options.layers, options.soak, options.out)
        cases = options.case or ["1x32768:card", "1x32768:host"]
        add(options.out, "step", step(cases, options.layers, options.soak, options.limit, options.lock))
    elif options.part == "memory":
        formats = options.format or ["bf16-8", "bf16-12", "fp8-8", "fp8-12", "int4-32"]
        add(options.out, "memory", memory(formats, options.length or [32768, 131072], options.hot or [960, 1024, 1536]))
    elif options.part == "long":
        (name,) = options.format or ["int4-32"]
        (length,) = options.length or [524288]
        hot = options.hot[0] if options.hot else None
        fmt, n_tip = name.split("-")
        with tempfile.NamedTemporaryFile() as file:
            turn = decode.Turn(options.lock or file.name)
            long(
                length, options.prefill, options.chunk, options.layers, hot, fmt, int(n_tip), turn,
                lambda row: add(options.out, "long", row),
            )  # fmt: skip


if __name__ == "__main__":
    main()
