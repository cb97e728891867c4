"""Whole graphs: names, order, counts, guards, registration from outside, and a graph that defeats a reader."""

from __future__ import annotations

import pytest
import torch
from tiny import (
    HKV,
    HQ,
    WIDTH,
    Attention,
    B,
    D,
    S,
    Static,
    check_numbers,
    decode,
    half_split,
    prefill,
    run_matched,
    sdpa,
)
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from fasa_compile import patterns
from fasa_compile.capture import capture
from fasa_compile.match import match
from fasa_compile.patterns import attention
from fasa_compile.sites import REASONS, AttentionSite, NoMatch


class Block(nn.Module):
    def __init__(self, rope):
        super().__init__()
        self.self_attn, self.out = Attention(rope, Static(), sdpa), nn.Linear(HQ * D, WIDTH)

    def forward(self, x, pos):
        return x + self.out(self.self_attn(x, pos))


class Decoder(nn.Module):
    """Layer 1 carries no position; layer 0 runs a second time at the end."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(half_split), Block(lambda q, k, pos: (q, k)), Block(half_split)])

    def forward(self, x, pos):
        for layer in (*self.layers, self.layers[0]):
            x = layer(x, pos)
        return x


def test_names_order_and_counts():
    matched = decode(Decoder())
    assert [type(s) for s in matched.sites] == [AttentionSite, NoMatch, AttentionSite, AttentionSite]
    assert [s.index for s in matched.sites] == [0, 1, 2, 3]
    assert [s.layer for s in matched.sites] == [f"layers.{n}.self_attn" for n in ("0", "1", "2")] + [
        "layers.0.self_attn#2"
    ]
    assert all(s.source.startswith("tiny.py:") and s.source[8:].isdigit() for s in matched.sites)
    refused = matched.sites[1]
    assert refused.reason == "no-rope" and refused.reason in REASONS
    assert any("index_copy" in line and "tiny.py:" in line for line in refused.trace)
    for site in matched.sites[2:]:
        check_numbers(matched, site)


def test_buffer_that_a_later_run_writes_again():
    first, _, last, again = decode(Decoder()).sites
    assert first.cache.rewritten_later and not last.cache.rewritten_later and not again.cache.rewritten_later
    assert again.cache.k_input == first.cache.k_input
    assert again.cache.slots is None  # its buffer had been written by the first run


class Alone(nn.Module):
    """Nothing but the attention: a graph that was cut right before it."""

    def forward(self, q, k, v):
        return scaled_dot_product_attention(q, k, v)


def test_queries_that_arrive_ready_made():
    q, k = torch.randn(B, HQ, 1, D), torch.randn(B, HQ, S, D)
    assert run_matched(Alone(), q, k, k.clone()).refused.reason in ("cross-attention", "incomplete-pattern", "no-rope")


class ProjectedElsewhere(nn.Module):
    """What is left of an attention when the graph was cut between the projections and the rotation."""

    def __init__(self):
        super().__init__()
        self.cache = Static()

    def forward(self, q, k, v, cos, sin, pos):
        def turn(x):
            return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin

        k, v = self.cache(turn(k.view(B, 1, HKV, D).transpose(1, 2)), v.view(B, 1, HKV, D).transpose(1, 2), pos)
        return sdpa(turn(q.view(B, 1, HQ, D).transpose(1, 2)), k, v, pos)


def test_projections_in_another_graph():
    q, k, v = torch.randn(B, 1, HQ * D), torch.randn(B, 1, HKV * D), torch.randn(B, 1, HKV * D)
    angle = 9 * 10000.0 ** (-torch.arange(0, D, 2).float() / D).repeat(2)[None]
    matched = run_matched(ProjectedElsewhere(), q, k, v, angle.cos(), angle.sin(), torch.tensor([9]))
    assert matched.site.rope.kind == "half-split"
    check_numbers(matched)


def test_a_graph_without_attention():
    assert run_matched(nn.Linear(4, 4), torch.randn(2, 4)).sites == []


def test_no_guard_on_the_length():
    """Matching reads the traced length as a hint: further lengths run the same graph."""
    lengths = []

    def backend(gm, example_inputs, **_):
        sites = match(capture(gm, example_inputs))
        assert [type(s) for s in sites] == [AttentionSite]
        lengths.append(sites[0].shape[4])
        return gm.forward

    def step(x, keys, values, wq, wk):
        pos = torch.arange(1) + keys.shape[2]
        q, k = (x @ wq).view(B, 1, HQ, D).transpose(1, 2), (x @ wk).view(B, 1, HKV, D).transpose(1, 2)
        q, k = half_split(q, k, pos)
        k = torch.cat([keys, k], 2)
        return scaled_dot_product_attention(q, k, torch.cat([values, k[:, :, -1:]], 2), enable_gqa=True)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, dynamic=True, fullgraph=True)
    wq, wk = nn.Parameter(torch.randn(WIDTH, HQ * D)), nn.Parameter(torch.randn(WIDTH, HKV * D))
    with torch.no_grad():
        for length in (5, 9, 17, 30):
            past = torch.randn(2, B, HKV, length, D)
            compiled(torch.randn(B, 1, WIDTH), past[0].clone(), past[1].clone(), wq, wk)
    assert len(lengths) == 1 and isinstance(lengths[0], torch.SymInt)


def test_nodes_without_a_stack_trace():
    places = []

    def backend(gm, example_inputs, **_):
        for node in gm.graph.nodes:
            node.meta.pop("stack_trace", None)
            node.meta.pop("nn_module_stack", None)
        places.extend((type(s), s.layer, s.source) for s in match(capture(gm, example_inputs)))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Attention(half_split, Static(), sdpa), backend=backend)(
            torch.randn(B, 1, WIDTH), torch.tensor([9])
        )
    assert places == [(AttentionSite, "", "")]


# ---- registration from outside ------------------------------------------------------------------------------------------


@torch.library.custom_op("tiny_match::attend", mutates_args=())
def attend_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)


@attend_op.register_fake
def _(q, k, v, scale):
    return torch.empty_like(q)


@torch.library.custom_op("tiny_match::write_rows", mutates_args=())
def write_rows(buffer: torch.Tensor, rows: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return buffer.index_copy(2, rows, new)


@write_rows.register_fake
def _(buffer, rows, new):
    return torch.empty_like(buffer)


class Rows(Static):
    def forward(self, k, v, pos):
        self.keys.copy_(write_rows(self.keys, pos, k))
        self.values.copy_(write_rows(self.values, pos, v))
        return self.keys, self.values


def by_custom_op(q, k, v, pos):
    return attend_op(q, k, v, 0.25)


def test_registered_attention():
    assert decode(Attention(half_split, Static(), by_custom_op)).sites == []

    @patterns.register("attention", "tiny", "tiny_match.attend")
    def read(node, tables):
        q, k, v, scale = node.args
        return patterns.Found("tiny", node, *(patterns.Expr(x) for x in (q, k, v)), scale=scale, repeat=HQ // HKV)

    try:
        matched = decode(Attention(half_split, Static(), by_custom_op))
        assert (matched.site.anchor, matched.site.shape[:3]) == ("tiny", (B, HQ, HKV))
        check_numbers(matched)
        with pytest.raises(ValueError, match="registered already"):
            patterns.register("attention", "tiny", "softmax")
    finally:
        patterns.unregister("attention", "tiny")
    assert decode(Attention(half_split, Static(), by_custom_op)).sites == []


def test_registered_cache_write():
    assert decode(Attention(half_split, Rows(), sdpa)).refused.reason == "unknown-cache-write"

    @patterns.register("cache", "tiny-rows", "tiny_match.write_rows")
    def read(node, where, evaluate):
        buffer, rows, new = node.args
        assert where.dim == 2 and where.length == S
        return patterns.Write("tiny-rows", buffer, evaluate(rows).numpy(), patterns.Expr(rows), new)

    try:
        matched = decode(Attention(half_split, Rows(), sdpa))
        assert (matched.site.cache.kind, matched.site.cache.write) == ("static", "tiny-rows")
        assert matched.value(matched.site.cache.slots).tolist() == [9]
        check_numbers(matched)
        with pytest.raises(ValueError, match="registered already"):
            patterns.register("cache", "again", "tiny_match.write_rows")
    finally:
        patterns.unregister("cache", "tiny_match.write_rows")


def test_registration_of_another_kind_is_an_error():
    with pytest.raises(ValueError, match="'attention' or 'cache'"):
        patterns.register("norm", "tiny")
    with pytest.raises(KeyError):
        patterns.unregister("attention", "nothing of that name")


def test_a_reader_that_breaks_takes_no_other_attention_with_it(monkeypatch):
    def broken(node, tables):
        raise ZeroDivisionError("on purpose")

    operators, _ = attention.ANCHORS["sdpa"]
    monkeypatch.setitem(attention.ANCHORS, "sdpa", (operators, broken))
    matched = decode(Decoder())
    assert [(s.reason, s.anchor) for s in matched.sites] == [("failed", "sdpa")] * 4
    assert all("ZeroDivisionError: on purpose" in s.detail for s in matched.sites)


# ---- a model of a library -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["static", "dynamic", "none"])
def test_llama(cache):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=64,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 64, (1, 13))
    with torch.no_grad():
        if cache == "none":
            matched = run_matched(model, ids)
        else:
            past = (
                transformers.StaticCache(config=config, max_cache_len=32)
                if cache == "static"
                else transformers.DynamicCache(config=config)
            )
            model(ids[:, :12], past_key_values=past)
            matched = run_matched(Step(model, past), ids[:, 12:].clone())
    prefix = "" if cache == "none" else "model."
    assert [s.layer for s in matched.sites] == [f"{prefix}model.layers.{i}.self_attn" for i in range(2)]
    for site in matched.sites:
        assert isinstance(site, AttentionSite), site
        assert (site.cache.kind, site.rope.kind, site.anchor) == (cache, "half-split", "sdpa")
        # Older releases pass a mask of True with a cache that grows.
        assert (
            site.mask_kind in {"static": ("bool",), "dynamic": ("none", "bool"), "none": ("none", "bool")}[cache]
        )  # it depends on the release
        check_numbers(matched, site)
        if cache == "static":
            assert matched.value(site.cache.slots).tolist() == [12]


class Step(nn.Module):
    def __init__(self, model, past):
        super().__init__()
        self.model, self.past = model, past

    def forward(self, ids):
        return self.model(ids, past_key_values=self.past).logits


def test_prefill_positions_are_told_apart():
    """Of several new tokens the last and the first are looked at."""
    matched = prefill(Attention(half_split, Static(), sdpa), tokens=5)
    assert matched.site.shape[3] == 5
    check_numbers(matched)
