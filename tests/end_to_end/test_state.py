"""The packed FC cache is a cache of the model's K cache: whatever changes K, the next step must not notice that there is one.

Each case decodes once with the packed cache kept and once with it made anew before every step; logits must be equal bit for
bit. The second run is the specification: it cannot hold anything stale.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from models import Custom, Interleaved, cache_for, decode_custom, difference, llama_profile, profile_of, tiny_llama

import fasa_compile
from fasa_compile import fasa_backend
from fasa_compile.runtime import Runtime

IDS = torch.randint(0, 512, (2, 400), generator=torch.Generator().manual_seed(7))


class Steps:
    """A model compiled once; every step either trusts the packed cache or (``anew``) has it made from K first."""

    def __init__(self, model, profile, anew: bool, inner: str = "eager") -> None:
        torch._dynamo.reset()
        runtimes: list[Runtime] = []
        backend = fasa_backend(profile, check_weights=False, inner=inner, strict=True)

        def keep(gm, example_inputs):
            made = backend(gm, example_inputs)
            if isinstance(made, Runtime):
                runtimes.append(made)
            return made

        self.model, self.anew, self.runtimes = model, anew, runtimes
        self.compiled = torch.compile(model, backend=keep)

    def __call__(self, *arguments, **keywords):
        if self.anew:
            for runtime in self.runtimes:
                runtime.invalidate()
        with torch.no_grad():
            return self.compiled(*arguments, **keywords)


def both_ways(model, profile, scenario: Callable[[Steps], torch.Tensor], inner: str = "eager") -> torch.Tensor:
    """The scenario's logits, after checking that keeping the packed cache changes no bit of them."""
    outcomes, rebuilds = [], []
    for anew in (False, True):
        fasa_compile.reset_stats()
        outcomes.append(scenario(Steps(model, profile, anew, inner)))
        stats = fasa_compile.stats()
        assert stats["sparse_steps"] > 0
        rebuilds.append(stats["state_rebuilds"])
    assert torch.equal(*outcomes), difference(*outcomes)
    assert rebuilds[0] < rebuilds[1], "the packed cache was never kept: nothing was compared"
    return outcomes[0]


def run(step: Steps, cache, tokens: torch.Tensor) -> torch.Tensor:
    out = [
        step(input_ids=tokens[:, i : i + 1].clone(), past_key_values=cache).logits[:, -1].clone()
        for i in range(tokens.shape[1])
    ]
    return torch.stack(out, 1)


def prefill(model, cache, ids: torch.Tensor) -> None:
    with torch.no_grad():
        model(ids, past_key_values=cache)


@pytest.mark.parametrize("fc_format", ["bf16", "fp8", "int8", "int4"])
def test_two_hundred_steps(fc_format):
    model = tiny_llama(layers=2)

    def scenario(step):
        cache = cache_for(model, "static", 256)
        prefill(model, cache, IDS[:1, :40])
        return run(step, cache, IDS[:1, 40:240])

    both_ways(model, llama_profile(2, fc_format=fc_format), scenario)
    assert fasa_compile.stats()["state_rebuilds"] == 2 * 200


@pytest.mark.inductor
def test_two_hundred_steps_compiled():
    model = tiny_llama(layers=1)

    def scenario(step):
        cache = cache_for(model, "static", 256)
        prefill(model, cache, IDS[:1, :40])
        return run(step, cache, IDS[:1, 40:240])

    both_ways(model, llama_profile(1, fc_format="int4"), scenario, inner="inductor")


def test_reset_and_a_new_prompt():  # trials B1 and B6
    model = tiny_llama(layers=2)

    def scenario(step):
        cache = cache_for(model, "static")
        out = []
        for first in (0, 100, 200):
            cache.reset()
            prefill(model, cache, IDS[:1, first : first + 40])
            out.append(run(step, cache, IDS[:1, first + 40 : first + 50]))
        return torch.cat(out, 1)

    together = both_ways(model, llama_profile(2, fc_format="int4"), scenario)

    def alone(step):
        cache = cache_for(model, "static")
        prefill(model, cache, IDS[:1, 200:240])
        return run(step, cache, IDS[:1, 240:250])

    assert torch.equal(together[:, 20:], alone(Steps(model, llama_profile(2, fc_format="int4"), False)))


def test_steps_whose_guards_are_skipped():
    """After a first sequence torch may be told that guards hold (docs/kernels.md): what the package checks itself is still checked."""
    model = tiny_llama(layers=2)

    def scenario(step):
        cache = cache_for(model, "static")
        prefill(model, cache, IDS[:1, :40])
        out = [run(step, cache, IDS[:1, 40:44])]
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
            for first in (100, 200):  # a cache of its own; then another prompt in that one
                cache = cache_for(model, "static") if first == 100 else cache
                cache.reset()
                prefill(model, cache, IDS[:1, first : first + 40])
                out.append(run(step, cache, IDS[:1, first + 40 : first + 44]))
        return torch.cat(out, 1)

    skipped = both_ways(model, llama_profile(2, fc_format="int4"), scenario)
    step = Steps(model, llama_profile(2, fc_format="int4"), False)
    for i, first in enumerate((0, 100, 200)):
        cache = cache_for(model, "static")
        prefill(model, cache, IDS[:1, first : first + 40])
        assert torch.equal(skipped[:, 4 * i : 4 * i + 4], run(step, cache, IDS[:1, first + 40 : first + 44]))


def test_two_caches_in_turn_keep_their_own_state():
    model = tiny_llama(layers=2)

    def scenario(step):
        caches = [cache_for(model, "static") for _ in range(2)]
        for i, cache in enumerate(caches):
            prefill(model, cache, IDS[:1, 50 * i : 50 * i + 40])
        out = []
        for t in range(8):
            for i, cache in enumerate(caches):
                out.append(run(step, cache, IDS[:1, 50 * i + 40 + t : 50 * i + 41 + t]))
        return torch.cat(out, 1)

    both_ways(model, llama_profile(2), scenario)
    fasa_compile.reset_stats()
    scenario(Steps(model, llama_profile(2), False))
    assert fasa_compile.stats()["state_rebuilds"] == 2 * 2, "two caches evicted each other"


def test_beam_reorder():  # trial D1
    model = tiny_llama(layers=2)
    order = torch.tensor([1, 1])

    def scenario(step):
        cache = cache_for(model, "static")
        prefill(model, cache, IDS[:, :40])
        first = run(step, cache, IDS[:, 40:45])
        with torch.no_grad():
            for layer in cache.layers:
                layer.keys.copy_(layer.keys.index_select(0, order))
                layer.values.copy_(layer.values.index_select(0, order))
        return torch.cat([first, run(step, cache, IDS[:, 45:50])], 1)

    both_ways(model, llama_profile(2, fc_format="int4"), scenario)


def test_reorder_of_a_growing_cache():
    model = tiny_llama(layers=2)

    def scenario(step):
        cache = cache_for(model, "dynamic")
        prefill(model, cache, IDS[:, :40])
        first = run(step, cache, IDS[:, 40:45])
        cache.reorder_cache(torch.tensor([1, 0]))
        return torch.cat([first, run(step, cache, IDS[:, 45:50])], 1)

    kept, anew = (scenario(Steps(model, llama_profile(2), anew)) for anew in (False, True))
    assert torch.equal(kept, anew)


def test_crop():  # trial D3
    model = tiny_llama(layers=2)

    def scenario(step):
        cache = cache_for(model, "dynamic")
        prefill(model, cache, IDS[:1, :40])
        first = run(step, cache, IDS[:1, 40:52])
        cache.crop(-5)
        return torch.cat([first, run(step, cache, IDS[:1, 100:112])], 1)

    kept, anew = (scenario(Steps(model, llama_profile(2), anew)) for anew in (False, True))
    assert torch.equal(kept, anew)


def test_going_back_in_a_static_cache():
    """Crop by hand: the write position goes back and other tokens overwrite the slots."""
    model = tiny_llama(layers=2)

    def scenario(step):
        cache = cache_for(model, "static")
        prefill(model, cache, IDS[:1, :40])
        first = run(step, cache, IDS[:1, 40:52])
        for layer in cache.layers:
            layer.cumulative_length.sub_(5)
        return torch.cat([first, run(step, cache, IDS[:1, 100:112])], 1)

    both_ways(model, llama_profile(2, fc_format="int4"), scenario)


def test_several_tokens_between_steps():  # trial B13
    model = tiny_llama(layers=2)

    def scenario(step):
        cache = cache_for(model, "static")
        prefill(model, cache, IDS[:1, :40])
        first = run(step, cache, IDS[:1, 40:50])
        prefill(model, cache, IDS[:1, 50:75])
        return torch.cat([first, run(step, cache, IDS[:1, 75:85])], 1)

    both_ways(model, llama_profile(2, fc_format="int4"), scenario)


@pytest.mark.parametrize("through", ["the tensor", "a view", "a detached alias"])
def test_a_write_from_outside(through):
    model = tiny_llama(layers=2)
    seen = []

    def scenario(step):
        cache = cache_for(model, "static")
        prefill(model, cache, IDS[:1, :40])
        first = run(step, cache, IDS[:1, 40:45])
        with torch.no_grad():
            for layer in cache.layers:
                k = layer.keys
                target = k if through == "the tensor" else k[:, :, 3:20] if through == "a view" else k.detach()
                target.mul_(-1)
        second = run(step, cache, IDS[:1, 45:50])
        seen.append(second)
        return torch.cat([first, second], 1)

    both_ways(model, llama_profile(2, fc_format="int4"), scenario)


def test_inference_mode_is_never_stale():  # trial G1
    """Tensors made in inference mode do not count their writes; the packed cache is made anew for them in each step."""
    model = tiny_llama(layers=2)
    outcomes = []
    for mode in (torch.no_grad, torch.inference_mode):
        step = Steps(model, llama_profile(2, fc_format="int4"), False)
        with mode():
            cache = cache_for(model, "static")
            model(IDS[:1, :40], past_key_values=cache)
            out = []
            for i in range(40, 48):
                if i == 44:
                    for layer in cache.layers:
                        layer.keys[:, :, 5:15].mul_(-1)
                out.append(step.compiled(input_ids=IDS[:1, i : i + 1].clone(), past_key_values=cache).logits.clone())
            outcomes.append(torch.cat(out, 1))
    assert fasa_compile.stats()["sparse_steps"] == 16
    assert torch.equal(*outcomes)


def test_an_interrupted_step_leaves_no_trust_behind():
    model = Custom(Interleaved).eval()
    pairs = tuple((2 * i, 2 * i + 1) for i in range(8))
    profile = profile_of([(f"blocks.{i}", 4, 2, 16, pairs) for i in range(2)], 3, n_fac=12, n_sink=1, n_recent=2)
    ids = torch.randint(0, 128, (1, 50), generator=torch.Generator().manual_seed(2))
    step = Steps(model, profile, False)
    expected = decode_custom(model, step, ids, 6)
    (runtime,) = step.runtimes
    whole, calls = runtime._compiled, iter(range(100))

    def interrupted(*arguments):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return whole(*arguments)

    runtime._compiled = interrupted
    with pytest.raises(KeyboardInterrupt):
        decode_custom(model, step, ids, 6)
    runtime._compiled = whole
    with torch.no_grad():
        # The interrupted step did not run: going on from where it stopped must give what an undisturbed run gives.
        rest = [step(ids[:, i : i + 1].clone(), torch.tensor([i]))[:, -1].clone() for i in range(46, 50)]
    assert torch.equal(torch.stack(rest, 1), expected[:, 2:])


def test_the_packed_cache_dies_with_the_cache():  # trial B6
    model = tiny_llama(layers=2)
    step = Steps(model, llama_profile(2), False)
    cache = cache_for(model, "static")
    prefill(model, cache, IDS[:1, :40])
    run(step, cache, IDS[:1, 40:42])
    (runtime,) = step.runtimes
    keys = weakref.ref(cache.layers[0].keys)
    packed = weakref.ref(runtime._keepers[0].current.data)
    assert packed() is not None
    del cache
    gc.collect()
    assert keys() is None, "the backend keeps the model's cache alive"
    assert packed() is None, "the packed FC cache outlives the cache that it belongs to"
