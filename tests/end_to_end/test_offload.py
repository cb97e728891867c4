"""FASA-M on a CPU, where host memory is all there is: the same plan, state and logic as on a GPU, with plain tensors."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from models import (
    Custom,
    Interleaved,
    backend,
    cache_for,
    compiled,
    decode,
    decode_custom,
    difference,
    llama_profile,
    profile_of,
    tiny_llama,
)

import fasa_compile
from fasa_compile import FasaStaticCache, OffloadError, counters, offloaded_cache, staged
from fasa_compile import offload as module
from fasa_compile.errors import BudgetError

IDS = torch.randint(0, 512, (2, 80), generator=torch.Generator().manual_seed(3))
STEPS = 12


def host_cache(model, length=128):
    return FasaStaticCache(model.config, max_cache_len=length)


def totals():
    rows = fasa_compile.stats()["hot"].values()
    return {name: sum(row[name] for row in rows) for name in ("attended", "fetched", "unkept")}


def test_what_was_counted_outlives_the_cache():
    """As ``generate`` has it, whose cache nobody holds; and many such caches leave little behind."""
    model = tiny_llama(1)
    step = compiled(model, llama_profile(1), offload="cpu")
    fasa_compile.reset_stats()
    for n in range(1, 5):
        cache = host_cache(model)
        decode(model, step, IDS, cache, 2)
        held = totals()
        del cache
        gc.collect()
        assert totals() == held and held["attended"] == n * 2 * 2 * 24 * 2  # sequences, KV heads, n_fac, steps
        (layer,) = (layer for layer in counters._hot if layer.past)
        assert len(layer.past) <= 2
    fasa_compile.reset_stats()
    assert totals()["attended"] == 0


@pytest.mark.parametrize(("fc_format", "hot_tokens"), [("int4", None), ("int4", 10), ("int4", 0), ("bf16", None)])
def test_same_bits_as_on_the_device(fc_format, hot_tokens):
    model = tiny_llama(2)
    profile = llama_profile(2, fc_format=fc_format)
    expected = decode(model, compiled(model, profile), IDS, cache_for(model, "static"), STEPS)
    dense = decode(model, model, IDS, cache_for(model, "static"), STEPS)
    fasa_compile.reset_stats()
    step = compiled(model, profile, offload="cpu", hot_tokens=hot_tokens)
    found = decode(model, step, IDS, host_cache(model), STEPS)
    assert torch.equal(found, expected)
    assert difference(found, dense) > 0.05, "the budget has no effect: this test could not fail"
    stats = fasa_compile.stats()
    assert (stats["sparse_steps"], stats["state_rebuilds"]) == (STEPS, 2)
    if hot_tokens == 0:
        assert "hot" not in stats
        return
    seen = totals()
    assert seen["attended"] == 2 * 2 * 2 * 24 * STEPS  # layers, sequences, KV heads, n_fac
    assert 0 < seen["fetched"] < (0.7 if hot_tokens is None else 0.95) * seen["attended"]
    assert (seen["unkept"] > 0) == (hot_tokens == 10)


@pytest.mark.inductor
def test_inductor_keeps_the_hot_buffer():
    model = tiny_llama(1)
    profile = llama_profile(1, fc_format="int4")
    expected = decode(model, compiled(model, profile, offload="cpu"), IDS, host_cache(model), 8)
    counts = totals()
    fasa_compile.reset_stats()
    step = compiled(model, profile, inner="inductor", offload="cpu")
    assert difference(decode(model, step, IDS, host_cache(model), 8), expected) <= 1e-4
    assert totals() == counts
    assert 0 < totals()["fetched"] < totals()["attended"]


def outside(cache, i):
    """What may happen to a cache between two steps."""
    layer = cache.layers[0]
    if i == 2:
        layer.values[:, :, :40].mul_(-1)  # V alone: the packed FC cache still agrees with K
    elif i == 4:
        layer.keys[:, :, 3:30].add_(0.5)
    elif i == 6:
        cache.reorder_cache(torch.tensor([1, 0]))
    elif i == 8:
        for x in cache.layers:
            x.cumulative_length.sub_(3)  # cropped: the next tokens overwrite rows that are hot


@pytest.mark.parametrize("event", [2, 4, 6, 8])
def test_a_hot_row_is_never_stale(event):
    model = tiny_llama(1)
    profile = llama_profile(1, fc_format="int4")
    outcomes = []
    for how, cache in (({}, cache_for(model, "static")), ({"offload": "cpu"}, host_cache(model))):
        step = compiled(model, profile, **how)
        change = lambda i, cache=cache: outside(cache, i) if i == event else None  # noqa: E731
        outcomes.append(decode(model, step, IDS, cache, 12, each=change))
    assert torch.equal(*outcomes)


def test_reset_new_prompt_and_two_caches_in_turn():
    model = tiny_llama(1)
    profile = llama_profile(1, fc_format="int4")
    plain = compiled(model, profile)
    expected = [decode(model, plain, ids, cache_for(model, "static"), 8) for ids in (IDS, IDS.flip(1))]
    step = compiled(model, profile, offload="cpu")
    first, second = host_cache(model), host_cache(model)
    for ids, want in zip((IDS, IDS.flip(1)), expected, strict=True):
        for cache in (first, second):
            assert torch.equal(decode(model, step, ids, cache, 8), want)
            cache.reset()
            assert not cache.layers[0].keys.any() and not cache.layers[0].values.any()


def test_prefill_in_chunks_is_prefill():
    model = tiny_llama(2)
    whole, parts = host_cache(model), host_cache(model)
    with torch.no_grad():
        expected = model(IDS, past_key_values=whole).logits[:, -1]
        for chunk in IDS.split(30, dim=1):
            found = model(chunk, past_key_values=parts).logits[:, -1]
    assert difference(found, expected) <= 1e-4
    assert difference(whole.layers[1].values, parts.layers[1].values) <= 1e-4


def test_generate_takes_the_cache():
    model = tiny_llama(1)
    profile = llama_profile(1, fc_format="int4")
    model.generation_config.eos_token_id = None
    found = []
    whole = model.forward
    for how, cache in (({}, cache_for(model, "static")), ({"offload": "cpu"}, host_cache(model))):
        torch._dynamo.reset()
        model.forward = torch.compile(whole, backend=backend(profile, **how))
        found.append(
            model.generate(IDS[:1], max_new_tokens=8, do_sample=False, past_key_values=cache, disable_compile=True)
        )
        model.forward = whole
    assert torch.equal(*found)
    assert fasa_compile.stats()["sparse_steps"] >= 14
    assert totals()["attended"] > 0


def test_a_custom_module_with_an_offloaded_cache():
    model = Custom(Interleaved).eval()
    pairs = tuple((2 * i, 2 * i + 1) for i in range(8))
    profile = profile_of([(f"blocks.{i}", 4, 2, 16, pairs) for i in range(2)], 3, n_fac=12, n_sink=1, n_recent=2)
    ids = torch.randint(0, 128, (1, 60), generator=torch.Generator().manual_seed(2))
    expected = decode_custom(model, compiled(model, profile), ids, 12)
    for block in model.blocks:
        block.k_cache, block.v_cache = offloaded_cache(tuple(block.k_cache.shape), torch.float32, "cpu")
    fasa_compile.reset_stats()
    assert torch.equal(decode_custom(model, compiled(model, profile, offload="cpu"), ids, 12), expected)
    assert 0 < totals()["fetched"] < totals()["attended"]


def test_values_from_elsewhere_have_no_hot_buffer():
    """The negative twin: K is in host memory and V is not, so no row of the host has both."""
    model = Custom(Interleaved).eval()
    profile = profile_of(
        [(f"blocks.{i}", 4, 2, 16, tuple((2 * i, 2 * i + 1) for i in range(8))) for i in range(2)], 3, n_fac=12
    )
    ids = torch.randint(0, 128, (1, 60), generator=torch.Generator().manual_seed(2))
    expected = decode_custom(model, compiled(model, profile), ids, 6)
    for block in model.blocks:
        block.k_cache, _ = offloaded_cache(tuple(block.k_cache.shape), torch.float32, "cpu")
    fasa_compile.reset_stats()
    made = backend(profile, offload="cpu")
    torch._dynamo.reset()
    assert torch.equal(decode_custom(model, torch.compile(model, backend=made), ids, 6), expected)
    assert "hot" not in fasa_compile.stats()
    assert [(r.decision, r.hot_bytes, r.host_bytes) for r in made.explain().rows] == [("sparse", 0, 0)] * 2


def test_rows_lie_side_by_side_and_are_recognised():
    k, v = offloaded_cache((2, 3, 5, 8), torch.float16, "cpu", v_dim=4)
    assert (k.shape, v.shape) == ((2, 3, 5, 8), (2, 3, 5, 4))
    assert v.data_ptr() - k.data_ptr() == 8 * 2 and k.stride() == v.stride() == (180, 60, 12, 1)
    rows = module.rows_of(k)
    assert rows is not None and rows is module.rows_of(v[1, :, 2:]) and rows.bytes == 2 * 3 * 5 * 12 * 2
    k.fill_(1), v.fill_(2)
    assert rows.rows[..., :8].eq(1).all() and rows.rows[..., 8:].eq(2).all()
    assert module.rows_of(torch.zeros(3)) is None and module.rows_of(k.clone()) is None
    copies = staged(k, v, 3)
    assert torch.equal(copies[0], k[:, :, :3]) and torch.equal(copies[1], v[:, :, :3])


def test_nothing_is_left_of_a_hundred_caches():
    model = tiny_llama(2)
    gc.collect()
    before = len(module._blocks)
    resident = []
    for i in range(100):
        cache = host_cache(model, 4096)
        with torch.no_grad():
            model(IDS[:, :4], past_key_values=cache)
        for layer in cache.layers:
            layer.keys.fill_(1.0)
        assert cache.host_bytes() == 2 * 2 * 2 * 4096 * 64 * 4
        del cache, layer
        if i in (9, 99):
            gc.collect()
            with open("/proc/self/statm") as file:
                resident.append(int(file.read().split()[1]) * 4096)
    assert len(module._blocks) == before
    # Ninety caches of 16 MiB would be 1.4 GiB.
    assert resident[1] - resident[0] < 64 << 20


def test_memory_goes_with_the_cache_and_does_not_wait_for_the_collector():
    model = tiny_llama(2)
    gc.collect()
    before = len(module._blocks)
    gc.disable()
    try:
        cache = host_cache(model)
        with torch.no_grad():
            model(IDS[:, :4], past_key_values=cache)
        assert len(module._blocks) == before + 2
        del cache
        assert len(module._blocks) == before
    finally:
        gc.enable()


def test_nothing_is_given_back_while_a_graph_is_captured(monkeypatch):
    """A cache may die during a capture, which waiting for the device would break: its memory is given back with the next one's."""
    freed, capturing = [], True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: freed.append("waited"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    module._give_back(lambda: freed.append(1), torch.device("cuda", 0))
    assert freed == []
    capturing = False
    module._give_back(lambda: freed.append(2), torch.device("cuda", 0))
    assert freed == ["waited", 2, "waited", 1] and not module._waiting


def test_host_memory_that_is_not_there(monkeypatch):
    model = tiny_llama(3)
    cache = host_cache(model, 1 << 16)
    need = 2 * 2 * (1 << 16) * 64 * 4  # of one layer: 64 MiB
    monkeypatch.setattr(module, "host_available", lambda: 2 * need)  # two of three layers would fit
    with pytest.raises(OffloadError, match=r"3 layers, 2 x 65536 tokens, needs 0\.19 GiB .* 0\.12 GiB are available"):
        model(IDS[:, :4], past_key_values=cache)
    assert cache.host_bytes() == 0, "all layers or none"
    monkeypatch.setattr(module, "host_available", lambda: 3 * need)
    model(IDS[:, :4], past_key_values=cache)
    assert cache.host_bytes() == 3 * need


def test_the_plan_says_what_lies_where():
    model = tiny_llama(2)
    made = backend(llama_profile(2, fc_format="int4"), offload="cpu", hot_tokens=48)
    torch._dynamo.reset()
    decode(model, torch.compile(model, backend=made), IDS, host_cache(model, 1024), 2)
    rows = made.explain().rows
    host = 2 * 2 * 1024 * 64 * 4
    assert [r.host_bytes for r in rows] == [host, host]
    assert all(48 * 4 * 64 * 4 <= r.hot_bytes <= 48 * 4 * 64 * 4 * 1.1 for r in rows)
    text = str(made.explain())
    kept = sum(r.packed_bytes + r.hot_bytes for r in rows)
    assert f"K and V of 2 sites in host memory, 2.00 MiB; for them on the device {kept / 2**20:.2f} MiB" in text


def test_arguments_are_checked():
    profile = llama_profile(1)
    with pytest.raises(TypeError, match="offload"):
        backend(profile, offload="disk")
    for wrong in (-1, 1.5, True):
        with pytest.raises(BudgetError, match="hot_tokens"):
            backend(profile, offload="cpu", hot_tokens=wrong)
    with pytest.raises(OffloadError, match="meta"):
        offloaded_cache((1, 1, 8, 4), torch.float32, "meta")
