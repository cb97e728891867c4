"""The whole way on a GPU: Inductor, Triton kernels and CUDA graphs. `make test-gpu` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))

from models import (
    Custom,
    Interleaved,
    PartialHalfSplit,
    cache_for,
    decode,
    decode_custom,
    difference,
    eager_fasa,
    half_split,
    llama_profile,
    profile_of,
    tiny_llama,
)

import fasa_compile
from fasa_compile import fasa_backend
from fasa_compile.triton_kernels import ops

pytestmark = pytest.mark.gpu
IDS = torch.randint(0, 512, (2, 300), generator=torch.Generator().manual_seed(3))


def compiled(model, profile, mode=None, **how):
    torch._dynamo.reset()
    # dense_below=0: caches this short are read faster densely, and the cost model would have them so.
    backend = fasa_backend(profile, check_weights=False, strict=True, **({"dense_below": 0} | how))
    return torch.compile(model, backend=backend, mode=mode)


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, "static"), (torch.bfloat16, "static"), (torch.float16, "dynamic")]
)
@pytest.mark.parametrize("fc_format", ["int4", "fp8"])
def test_budget_covering_the_context_is_dense(dtype, kind, fc_format):
    torch.backends.cuda.matmul.allow_tf32 = False
    model = tiny_llama(layers=2).to("cuda", dtype)
    ids = IDS[:, :100].cuda()
    dense = decode(model, model, ids, cache_for(model, kind, 256), 12)
    step = compiled(model, llama_profile(2, fc_format=fc_format), n_fac=128)
    sparse = decode(model, step, ids, cache_for(model, kind, 256), 12)
    assert fasa_compile.stats()["sparse_steps"] >= 11
    limit = 1e-4 if dtype is torch.float32 else 3e-2 * dense.abs().max().item()
    assert difference(sparse, dense) <= limit


@pytest.mark.parametrize("fc_format", ["bf16", "int4", "fp8"])
def test_sparse_is_the_plain_reference(fc_format):
    model = tiny_llama(layers=2).cuda()
    ids = IDS[:, :200].cuda()
    profile = llama_profile(2, fc_format=fc_format)
    references = []
    for n_fac in (32, 36):
        with eager_fasa(model, profile, n_fac=n_fac):
            references.append(decode(model, model, ids, cache_for(model, "static", 256), 12))
    reference, more = references
    sparse = decode(model, compiled(model, profile, n_fac=32), ids, cache_for(model, "static", 256), 12)
    assert fasa_compile.stats()["sparse_steps"] == 12
    # The kernel may keep up to 12 % more tokens than the budget, never fewer: it may differ by what those change.
    assert (sparse - reference).norm() <= 1.5 * (more - reference).norm() + 1e-3


def test_two_hundred_steps_in_cuda_graphs():
    """reduce-overhead: no graph is skipped, none is recorded again, and the state kept equals the state made anew."""
    model = tiny_llama(layers=2).to("cuda", torch.bfloat16)
    ids = IDS[:1, :260].cuda()
    captures = 0
    whole = torch.cuda.CUDAGraph.capture_begin

    def counted(self, *args, **kwargs):
        nonlocal captures
        captures += 1
        return whole(self, *args, **kwargs)

    torch.cuda.CUDAGraph.capture_begin = counted
    try:
        outcomes = []
        for anew in (False, True):
            torch._dynamo.utils.counters.clear()
            runtimes = []
            backend = fasa_backend(
                llama_profile(2, fc_format="int4"), n_fac=40, check_weights=False, strict=True, dense_below=0
            )

            def keep(gm, inputs, backend=backend, runtimes=runtimes, **how):
                made = backend(gm, inputs, **how)
                runtimes.append(made)
                return made

            torch._dynamo.reset()
            step = torch.compile(model, backend=keep, mode="reduce-overhead")
            seen = []

            def each(i, anew=anew, runtimes=runtimes, seen=seen):
                seen.append(captures)
                if anew:
                    for runtime in runtimes:
                        runtime.invalidate()

            outcomes.append(decode(model, step, ids, cache_for(model, "static", 512), 200, each=each))
            assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
            assert seen[-1] > 0, "no CUDA graph was recorded"
            assert seen[10] == seen[-1], "graphs were recorded again after the warm-up"
    finally:
        torch.cuda.CUDAGraph.capture_begin = whole
    assert fasa_compile.stats()["sparse_steps"] == 400
    assert torch.equal(*outcomes)


def test_a_user_captured_graph_is_never_stale():  # trial F6
    """Captured by the user, replays do not pass through the runtime: the packed cache is made anew inside the graph."""
    model = tiny_llama(layers=2).cuda()
    ids = IDS[:1, :80].cuda()
    profile = llama_profile(2, fc_format="int4")
    dense = decode(model, model, ids, cache_for(model, "static", 256), 12)
    runtimes = []
    backend = fasa_backend(profile, n_fac=100, check_weights=False, strict=True, dense_below=0)

    def keep(gm, inputs):
        runtimes.append(backend(gm, inputs))
        return runtimes[-1]

    torch._dynamo.reset()
    step = torch.compile(model, backend=keep)
    cache = cache_for(model, "static", 256)
    token = ids[:, 68:69].clone()
    with torch.no_grad():
        model(ids[:, :68], past_key_values=cache)
        kept = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]

        def rewind():
            for layer, (k, v) in zip(cache.layers, kept, strict=True):
                layer.keys.copy_(k)
                layer.values.copy_(v)
                layer.cumulative_length.fill_(68)

        for _ in range(2):
            step(input_ids=token, past_key_values=cache)
            rewind()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step(input_ids=token, past_key_values=cache).logits
        for start in ("prompt", "negated prompt"):
            rewind()
            if start == "negated prompt":  # a write between replays that no runtime sees
                cache.layers[0].keys[:, :, :40].mul_(-1)
            out = []
            for i in range(68, 80):
                token.copy_(ids[:, i : i + 1])
                graph.replay()
                out.append(logits[:, -1].clone())
            (runtime,) = runtimes
            for layer, keeper in zip(cache.layers, runtime._keepers, strict=True):
                c = keeper.constants
                data, meta = torch.ops.fasa.pack(
                    layer.keys, c["dims"], c["centre"], c["spread"], "int4", ops.KERNEL_VERSION
                )
                (packed,) = keeper.layer.caches.values()
                assert torch.equal(packed.data[:, :, :80], data[:, :, :80])
                assert torch.equal(packed.meta[:, :, :80], meta[:, :, :80])
            if start == "prompt":
                assert difference(torch.stack(out, 1), dense) <= 1e-4


@pytest.mark.parametrize("attention", [Interleaved, PartialHalfSplit])
def test_custom_modules(attention):
    model = Custom(attention).eval().cuda()
    pairs = tuple((2 * i, 2 * i + 1) for i in range(8)) if attention is Interleaved else half_split(8)
    profile = profile_of([(f"blocks.{i}", 4, 2, 16, pairs) for i in range(2)], 4, fc_format="int4")
    ids = torch.randint(0, 128, (1, 50), generator=torch.Generator().manual_seed(2))

    def on_gpu(step):
        return lambda ids, pos: step(ids.cuda(), pos.cuda())

    dense = decode_custom_cuda(model, on_gpu(model), ids)
    covering = decode_custom_cuda(model, on_gpu(compiled(model, profile, n_fac=60)), ids)
    assert fasa_compile.stats()["sparse_steps"] >= 9
    assert difference(covering, dense) <= 1e-4


def decode_custom_cuda(model, step, ids):
    class OnCpu:  # decode_custom makes its tensors on the CPU
        def __call__(self, ids, pos):
            return model(ids.cuda(), pos.cuda())

        def reset(self):
            model.reset()

    return decode_custom(OnCpu(), step, ids, 10)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, "static"), (torch.bfloat16, "static"), (torch.float16, "dynamic")]
)
def test_without_a_profile_every_site_is_exact(dtype, kind, mode):
    if (kind, mode) == ("dynamic", "reduce-overhead"):
        pytest.skip("a cache that grows is a new tensor in every step: CUDA graphs do not apply")
    torch.backends.cuda.matmul.allow_tf32 = False
    model = tiny_llama(layers=2).to("cuda", dtype)
    ids = IDS[:, :100].cuda()
    dense = decode(model, model, ids, cache_for(model, kind, 256), 12)
    exact = decode(model, compiled(model, None, mode), ids, cache_for(model, kind, 256), 12)
    stats = fasa_compile.stats()
    assert stats["dense_kernel_sites"] == stats["sites"] > 0
    assert (stats["dense_steps"], stats["sparse_steps"]) == (12, 0)
    assert difference(exact, dense) <= (1e-4 if dtype is torch.float32 else 3e-2 * dense.abs().max().item())


def test_below_the_break_even_the_dense_kernel_reads():
    model = tiny_llama(layers=2).cuda()
    ids = IDS[:, :100].cuda()
    dense = decode(model, model, ids, cache_for(model, "static", 256), 6)
    step = compiled(model, llama_profile(2, fc_format="int4"), n_fac=32, dense_below=None)
    assert difference(decode(model, step, ids, cache_for(model, "static", 256), 6), dense) <= 1e-4
    assert fasa_compile.stats()["declined"] == {}
    assert fasa_compile.stats()["dense_kernel_sites"] == 2


def test_a_layer_above_the_audit_bound_goes_dense_in_cuda_graphs():
    """Every step is audited and every loss is above 0, so both layers go dense; the graphs go on."""
    model = tiny_llama(layers=2).cuda()
    ids, steps = IDS[:1, :200].cuda(), 40
    dense = decode(model, model, ids, cache_for(model, "static", 256), steps)
    fasa_compile.reset_stats()
    profile = llama_profile(2, fc_format="int4")
    step = compiled(model, profile, mode="reduce-overhead", n_fac=32, audit=1, audit_bound=0.0)
    sparse = decode(model, step, ids, cache_for(model, "static", 256), steps)
    found = fasa_compile.stats()
    rows = fasa_compile.explain().rows[-2:]
    assert [(r.decision, r.reason) for r in rows] == [("dense-kernel", "audit-bound")] * 2
    assert found["sparse_steps"] + found["dense_steps"] == steps and 8 < found["sparse_steps"] < 20
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    # What was decoded sparsely is in the caches for good; from the switch on nothing is added to it.
    apart = (sparse - dense).flatten(2).norm(dim=2)[0]
    assert apart[found["sparse_steps"] :].max() < apart[: found["sparse_steps"]].max()


@pytest.mark.parametrize("every", [1, 4])
def test_auditing_changes_no_logits_in_cuda_graphs(every):
    model = tiny_llama(layers=2).to("cuda", torch.bfloat16)
    ids = IDS[:1, :220].cuda()
    logits = [
        decode(model, compiled(model, llama_profile(2, fc_format="int4"), "reduce-overhead", n_fac=32, **how), ids,
               cache_for(model, "static", 256), 20)
        for how in ({}, {"audit": every, "audit_bound": 0.999})
    ]  # fmt: skip
    assert torch.equal(*logits)
    lost = fasa_compile.stats()["lost_mass"]
    assert sum(entry["steps"] for entry in lost.values()) == 20 // every
