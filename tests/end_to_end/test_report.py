"""explain() and stats(): one row per attention, reasons in words, and counts that add up."""

from __future__ import annotations

import json

import pytest
import torch
from models import cache_for, decode, llama_profile, tiny_llama
from tiny import HKV, WIDTH, Attention, B, D, S, Static, half_split, sdpa
from torch import nn

import fasa_compile
from fasa_compile import fasa_backend
from fasa_compile.plan import WHY_DENSE
from fasa_compile.sites import REASONS

IDS = torch.randint(0, 512, (2, 44), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def made():
    model = tiny_llama(layers=2)
    backend = fasa_backend(llama_profile(2, fc_format="int4"), inner="eager", check_weights=False)
    step = torch.compile(model, backend=backend)
    decode(step, step, IDS, cache_for(model, "static"), 4)  # the prefill goes through the backend too
    return backend


def test_rows_say_what_happened(made):
    report = made.explain()
    assert [g.kind for g in report.graphs] == ["prefill", "decode"]
    assert [row.layer for row in report.rows] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    row = report.rows[0]
    assert (row.decision, row.reason, row.anchor, row.state) == ("sparse", "", "sdpa", "packed")
    assert row.rope == "half-split 32/32"
    assert row.cache.startswith("static (index_copy")
    assert row.heads == "8/2 x 32"
    assert row.budget == "24 (2+4)"
    assert row.n_tip == 8
    assert row.source.endswith(tuple("0123456789")) and ".py:" in row.source


def test_bytes_are_those_of_the_shapes(made):
    row = made.explain().rows[0]
    # 2 sequences, 2 KV heads, 128 slots of K and V in fp32; int4: 8 bytes of codes and 4 of scale and zero per token.
    assert row.dense_bytes == 2 * 2 * 128 * 2 * 32 * 4
    assert row.sparse_bytes == 2 * 2 * (128 * 12 + 24 * 2 * 32 * 4)


def test_text_and_json(made):
    report = made.explain()
    text = str(report)
    assert "graph 0: prefill (2 attention sites, dense)" in text
    assert "graph 1: decode, 2 of 2 attention sites decode sparsely" in text
    document = json.loads(report.json())
    assert len(document["rows"]) == 2
    assert document["rows"][1]["layer"] == "model.layers.1.self_attn"
    assert [g["kind"] for g in document["graphs"]] == ["prefill", "decode"]


def test_counts_add_up(made):
    stats = fasa_compile.stats()
    assert stats["graphs"] == 2 and stats["decode_graphs"] == 1
    assert stats["sites"] == stats["rewritten_sites"] + sum(stats["declined"].values()) == 2
    assert (stats["sparse_steps"], stats["dense_steps"]) == (4, 1)
    assert stats["state_rebuilds"] == 2
    fasa_compile.reset_stats()
    assert fasa_compile.stats()["graphs"] == 0


def test_a_backend_without_a_graph_says_how_to_start():
    assert "model.forward = torch.compile(model.forward" in str(fasa_backend("all").explain())


def test_reasons_have_words_and_no_key_twice():
    assert not set(REASONS) & set(WHY_DENSE)
    assert all((text and text[0].islower()) or text.startswith("is_causal") for text in (REASONS | WHY_DENSE).values())


class Quantised(nn.Module):
    """Keys are kept in int8 with a scale per token: rounded after they were turned."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(B, HKV, S, D, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(B, HKV, S, 1))
        self.register_buffer("values", torch.randn(B, HKV, S, D))

    def forward(self, k, v, pos):
        scale = k.abs().amax(-1, keepdim=True) / 127
        self.keys.index_copy_(2, pos, (k / scale).round().to(torch.int8))
        self.scales.index_copy_(2, pos, scale)
        self.values.index_copy_(2, pos, v)
        return self.keys.float() * self.scales, self.values


def decaying(q, k, pos):
    """xPos: queries grow with the position and keys shrink, each plane by a factor of its own."""
    q, k = half_split(q, k, pos)
    factor = ((torch.arange(0, D, 2) / D + 0.4) / 1.4) ** (pos.float()[:, None] / 512)
    factor = torch.cat([factor, factor], -1)
    return q * factor, k / factor


@pytest.mark.parametrize(
    "rope, cache, expected",
    [
        (
            half_split,
            Quantised,
            ["rope-mismatch", "the queries are rotated, the keys are not", "queries are read as far as linear", "keys are read as far as"],
        ),
        (decaying, Static, ["rope-not-proven", "scaled unequally", "expected one factor for all", "queries are read as far as linear"]),
    ],
    ids=["int8 keys", "xPos"],
)  # fmt: skip
def test_a_miss_says_how_far_it_was_read_and_where(rope, cache, expected):
    torch._dynamo.reset()
    backend = fasa_backend("all", n_fac=8, n_sink=1, n_recent=1, inner="eager")
    step = torch.compile(Attention(rope, cache(), sdpa), backend=backend)
    with torch.no_grad(), pytest.warns(fasa_compile.FasaWarning):
        step(torch.randn(B, 1, WIDTH), torch.tensor([9]))
    text = str(backend.explain())
    for words in expected:
        assert words in text, text
    assert "<- linear tiny.py:" in text, "the user's line of the projection"
    if cache is Quantised:
        assert any("_to_copy" in line and "test_report.py:" in line for line in text.splitlines()), text
