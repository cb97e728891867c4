"""Counters, logs and structured traces say what happened."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
from models import backend, cache_for, compiled, decode, llama_profile, tiny_llama

import fasa_compile
from fasa_compile import counters

pytest.importorskip("transformers")
IDS = torch.randint(0, 512, (2, 60), generator=torch.Generator().manual_seed(2))


def test_tokens_and_bytes_of_each_step():
    model = tiny_llama(layers=2)
    step = compiled(model, llama_profile(2, fc_format="int4"), n_fac=24)
    decode(model, step, IDS, cache_for(model, "static", 128), 5)
    stats = fasa_compile.stats()
    assert stats["sparse_steps"] == 5 and stats["fallback_steps"] == 0
    assert stats["selected_tokens"] == 5 * 2 * 2 * 2 * 24  # steps, layers, sequences, KV heads, n_fac
    packed = 16 // 2 + 4  # int4 of 16 dims, a scale and a zero
    rows = 24 * 2 * 32 * 4
    assert stats["bytes_read"] == 5 * 2 * 2 * 2 * (128 * packed + rows)


def test_rebuilds_say_why():
    model = tiny_llama(layers=1)
    step = compiled(model, llama_profile(1), n_fac=24)
    cache = cache_for(model, "static")
    with torch.no_grad():
        model(IDS[:1, :40], past_key_values=cache)

        def once() -> dict[str, int]:
            fasa_compile.reset_stats()
            step(input_ids=IDS[:1, 40:41].clone(), past_key_values=cache)
            stats = fasa_compile.stats()
            assert sum(stats["rebuilt"].values()) == stats["state_rebuilds"]
            return stats["rebuilt"]

        assert once() == {"new-cache": 1}
        assert once() == {}
        cache.layers[0].keys[:, :, 3] += 1.0
        assert once() == {"written": 1}
        cache.layers[0].keys.data = cache.layers[0].keys.data.clone()
        assert once() == {"moved": 1}
        cache = copy.deepcopy(cache)
        assert once() == {"new-cache": 1}
    assert set(counters.WHY_REBUILT) == {"new-cache", "written", "moved", "uncounted", "distrusted"}


def test_inference_mode_is_uncounted():
    model = tiny_llama(layers=1)
    step = compiled(model, llama_profile(1), n_fac=24)
    with torch.inference_mode():
        decode(model, step, IDS[:1], cache_for(model, "static"), 3)
    assert fasa_compile.stats()["rebuilt"] == {"uncounted": 3}


def test_a_graph_that_could_not_be_read_counts_its_steps(monkeypatch):
    def fails(*_, **__):
        raise ValueError("planted")

    monkeypatch.setattr("fasa_compile.backend.capture", fails)
    model = tiny_llama(layers=1)
    with pytest.warns(fasa_compile.FasaWarning, match="planted"):
        decode(model, compiled(model, llama_profile(1), strict=False), IDS[:1], cache_for(model, "static"), 3)
    stats = fasa_compile.stats()
    assert (stats["dense_steps"], stats["fallback_steps"], stats["selected_tokens"]) == (3, 3, 0)


def test_the_log_says_what_was_decided(caplog):
    model = tiny_llama(layers=1)
    with caplog.at_level(logging.DEBUG, logger="fasa_compile"):
        decode(model, compiled(model, llama_profile(1), n_fac=24), IDS[:1], cache_for(model, "static"), 1)
    lines = [r.getMessage() for r in caplog.records if r.name == "fasa_compile"]
    assert "graph 0: decode, 1 of 1 attention sites sparse" in lines
    assert any("model.layers.0.self_attn: sparse" in line for line in lines)


def test_a_structured_trace_has_the_report_and_the_graph():
    """What TORCH_TRACE=dir writes and tlparse shows: one artifact each, with the compilation's id."""
    from torch._logging._internal import trace_log

    seen: dict[str, str] = {}

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            about = getattr(record, "metadata", {}).get("artifact")
            if about and about["name"].startswith("fasa_"):
                assert record.metadata["frame_id"] is not None
                seen[about["name"]] = record.payload

    keep, level = Keep(), trace_log.level
    trace_log.addHandler(keep)
    trace_log.setLevel(logging.DEBUG)
    try:
        model = tiny_llama(layers=1)
        made = backend(llama_profile(1), n_fac=24)
        torch._dynamo.reset()
        decode(model, torch.compile(model, backend=made), IDS[:1], cache_for(model, "static"), 1)
    finally:
        trace_log.removeHandler(keep)
        trace_log.setLevel(level)
    (row,) = json.loads(seen["fasa_report"])["rows"]
    assert (row["layer"], row["decision"]) == ("model.layers.0.self_attn", "sparse")
    assert "sparse_decode" in seen["fasa_rewritten_graph"]
