"""Cases distilled from public bug reports: rotary embeddings, scales and attention variants. Numbers: docs/trials.md."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import (
    SHARPEN,
    backend,
    cache_for,
    compiled,
    decode,
    difference,
    eager_fasa,
    half_split,
    llama_profile,
    profile_of,
    tiny_llama,
)
from torch import Tensor, nn
from torch.nn import functional as F

import fasa_compile
from fasa_compile import fasa_backend
from fasa_compile.profiles import Budget

IDS = torch.randint(0, 128, (1, 130), generator=torch.Generator().manual_seed(11))
SMALL = {"n_fac": 12, "n_sink": 1, "n_recent": 2}


def tiny(model_type: str, layers: int = 2, **changes: Any) -> Any:
    """A causal language model of transformers, four heads of 16 dims, query and key projections sharpened."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    base = dict(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(base | changes))).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data *= SHARPEN
    return model


def check(
    model: Any, layers: list[str], pairs: tuple[tuple[int, int], ...], D: int = 16, magnitude: float = 1.0
) -> None:
    """A budget for all is dense; below it, what the plain reference gives with the same profile, and not what dense gives."""
    profile = profile_of([(layer, 4, 2, D, pairs) for layer in layers], min(4, len(pairs)), magnitude=magnitude)
    dense = decode(model, model, IDS[:, :60], cache_for(model, "static"), 6)
    found = decode(model, compiled(model, profile, n_fac=100), IDS[:, :60], cache_for(model, "static"), 6)
    assert fasa_compile.stats()["sparse_steps"] == 6
    assert fasa_compile.stats()["rewritten_sites"] == len(layers)
    assert difference(found, dense) <= 1e-4
    with eager_fasa(model, profile, **SMALL):
        reference = decode(model, model, IDS[:, :60], cache_for(model, "static"), 6)
    sparse = decode(model, compiled(model, profile, **SMALL), IDS[:, :60], cache_for(model, "static"), 6)
    assert difference(sparse, reference) <= 1e-4
    assert difference(reference, dense) > 1e-3, "the budget has no effect: this test could not fail"


def names(n: int = 2) -> list[str]:
    return [f"model.layers.{i}.self_attn" for i in range(n)]


# --- rotary embeddings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.25, 0.5, 0.75])
def test_partial_rotary(factor):  # trial H3
    model = tiny("phi", hidden_size=128, head_dim=32, partial_rotary_factor=factor)
    R = int(32 * factor)
    layers = [f"model.layers.{i}.self_attn" for i in range(2)]
    check(model, layers, half_split(R), D=32)


ROPE_TYPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256},
    "yarn, attention_factor 1": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.0,
    },
    "yarn, attention_factor 1.4": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.4,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_scaled_rotary(kind):  # trials H5 and H7
    length = 64 if kind == "dynamic" else 4096
    model = tiny("llama", rope_parameters={"rope_theta": 10000.0} | ROPE_TYPES[kind], max_position_embeddings=length)
    # transformers says how YaRN's magnitude follows from its parameters; that it reaches the graph is what is tested.
    check(model, names(), half_split(16), magnitude=model.model.rotary_emb.attention_scaling)


def test_dynamic_scaling_follows_the_prompt():  # trial H5
    how = {"rope_parameters": {"rope_theta": 10000.0} | ROPE_TYPES["dynamic"], "max_position_embeddings": 64}
    # The model keeps the frequencies of its longest text: each way has a model of its own.
    plain, model = tiny("llama", **how), tiny("llama", **how)
    step = compiled(model, n_fac=200, n_sink=0, n_recent=0)
    for n in (100, 10, 100):
        ids = IDS[:, : n + 20]
        dense = decode(plain, plain, ids, cache_for(plain, "static", 256), 20)
        assert difference(decode(model, step, ids, cache_for(model, "static", 256), 20), dense) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == 60


def test_a_late_position():  # trial H5: decoding at position 3000
    model = tiny("llama", layers=1, rope_parameters={"rope_theta": 10000.0} | ROPE_TYPES["llama3"])
    outcomes = []
    for step in (model, compiled(model, n_fac=60, n_sink=0, n_recent=0)):
        cache = cache_for(model, "static", 64)
        with torch.no_grad():
            model(IDS[:, :40], past_key_values=cache, position_ids=torch.arange(2960, 3000)[None])
            out = step(
                input_ids=IDS[:, 40:41].clone(), past_key_values=cache, position_ids=torch.tensor([[3000]])
            ).logits
        outcomes.append(out)
    assert difference(*outcomes) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == 1


def test_layers_without_positions_keep_their_numbers():  # trial H12
    model = tiny("smollm3", layers=4, no_rope_layers=[1, 1, 0, 1])
    rotated = [names(4)[i] for i in (0, 1, 3)]
    # Only the rotated layers have entries, each with FCs of its own: an entry taken by counting would be another layer's.
    profile = profile_of([(name, 4, 2, 16, half_split(16)) for name in rotated], 3)
    made = backend(profile, strict=False, **SMALL)
    out = decode(model, torch.compile(model, backend=made), IDS[:, :50], cache_for(model, "static"), 4)
    decisions = {row.layer: (row.decision, row.reason) for row in made.explain().rows if row.decision or row.reason}
    assert {layer for layer, (decision, _) in decisions.items() if decision == "sparse"} == set(rotated)
    assert decisions[names(4)[2]] == ("dense", "no-rope")
    with eager_fasa(model, profile, **SMALL):
        reference = decode(model, model, IDS[:, :50], cache_for(model, "static"), 4)
    assert difference(out, reference) <= 1e-4


class Holder(nn.Module):
    """A model around one attention, so that the attention has a name."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        return self.attention(x, pos)


class Rotated(nn.Module):
    """One attention over a static cache whose rotation is spelled half-split or interleaved, on the same weights.

    The interleaved spelling of a half-split model has its projections' rows permuted: logits agree.
    """

    H, HKV, D, LENGTH = 4, 2, 16, 64

    def __init__(self, spelling: str, scale: float = 0.25, per_head: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spelling, self.scale = spelling, scale
        self.q = nn.Linear(64, self.H * self.D, bias=False)
        self.k = nn.Linear(64, self.HKV * self.D, bias=False)
        self.v = nn.Linear(64, self.HKV * self.D, bias=False)
        self.o = nn.Linear(self.H * self.D, 64, bias=False)
        self.head_scale = nn.Parameter(torch.rand(self.H, 1, 1) + 0.5) if per_head else None
        for p in (self.q, self.k):
            p.weight.data *= 4
            if spelling != "half":  # pair (i, i + D / 2) of the half-split model becomes (2i, 2i + 1)
                order = torch.arange(self.D).view(2, -1).T.flatten()
                p.weight.data = p.weight.data.view(-1, self.D, 64)[:, order].reshape(-1, 64)
        angle = torch.outer(torch.arange(self.LENGTH).float(), 100.0 ** (-torch.arange(0, self.D, 2) / self.D))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        self.register_buffer("turns", torch.polar(torch.ones_like(angle), angle))
        self.register_buffer("keys", torch.zeros(1, self.HKV, self.LENGTH, self.D))
        self.register_buffer("values", torch.zeros(1, self.HKV, self.LENGTH, self.D))

    def turn(self, x: Tensor, pos: Tensor) -> Tensor:
        cos, sin = self.cos[pos], self.sin[pos]
        if self.spelling == "complex":
            z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * self.turns[pos]
            return torch.view_as_real(z).flatten(-2)
        if self.spelling == "half":
            a, b = x.chunk(2, -1)
        elif self.spelling == "strided":
            a, b = x[..., ::2], x[..., 1::2]
        else:  # pairs brought together first: what comes out is in half-split order
            x = x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).reshape(x.shape)
            a, b = x.chunk(2, -1)
        a, b = a * cos - b * sin, b * cos + a * sin
        return torch.stack([a, b], -1).flatten(-2) if self.spelling == "strided" else torch.cat([a, b], -1)

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (
            p(x).view(B, T, n, self.D).transpose(1, 2)
            for p, n in ((self.q, self.H), (self.k, self.HKV), (self.v, self.HKV))
        )
        k, q = self.turn(k, pos), self.turn(q, pos)  # keys first: which is which follows from the attention alone
        if self.head_scale is not None:
            q = q * self.head_scale
        self.keys.index_copy_(2, pos, k)
        self.values.index_copy_(2, pos, v)
        seen = (torch.arange(self.LENGTH) <= pos[:, None])[None, None]
        y = F.scaled_dot_product_attention(
            q, self.keys, self.values, seen, 0.0, False, scale=self.scale, enable_gqa=True
        )
        return self.o(y.transpose(1, 2).reshape(B, T, -1))


def run(model: nn.Module, step: Any, prompt: int = 40, steps: int = 6) -> Tensor:
    x = torch.randn(1, prompt + steps, 64, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("keys", "values")):
                buffer.zero_()
        model(x[:, :prompt], torch.arange(prompt))
        return torch.cat([step(x[:, i : i + 1].clone(), torch.tensor([i]))[0] for i in range(prompt, prompt + steps)])


@pytest.mark.parametrize("spelling", ["strided", "complex", "de-interleaved"])
def test_one_model_in_two_spellings_selects_the_same(spelling):  # trials H1 and H8
    plain, other = Holder(Rotated("half")).eval(), Holder(Rotated(spelling)).eval()
    dense = run(plain, plain)
    assert difference(run(other, other), dense) <= 1e-4
    pairs = {
        "strided": tuple((2 * i, 2 * i + 1) for i in range(8)),
        "complex": tuple((2 * i, 2 * i + 1) for i in range(8)),
        "de-interleaved": half_split(16),
    }
    sparse = {}
    for model, its_pairs in ((plain, half_split(16)), (other, pairs[spelling])):
        profile = profile_of(
            [("attention", 4, 2, 16, its_pairs)], 3, reduction="softmax_sum", n_fac=12, n_sink=1, n_recent=2
        )
        # The same FCs by number, and constants that do not depend on the order of dims: centres 0, spreads 1.
        layer = profile.layers[0]
        layer.centre.zero_()
        layer.spread.fill_(1)
        made = backend(profile, strict=True)
        sparse[model.attention.spelling] = run(model, torch.compile(model, backend=made))
        (row,) = [row for row in made.explain().rows if row.decision == "sparse"]
        assert row.rope.startswith("interleaved" if its_pairs[0] == (0, 1) else "half-split")
        torch._dynamo.reset()
    a, b = sparse.values()
    assert difference(a, b) <= 1e-4, "chunk f is not the same frequency in both"
    assert difference(a, dense) > 1e-3


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_the_scale_is_the_graphs(scale, per_head):  # trials H14 (iv, v), I1 and I2
    model = Rotated("half", scale, per_head).eval()
    dense = run(model, model)
    assert difference(run(model, compiled(model, n_fac=60, n_sink=0, n_recent=0)), dense) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == 6
    other = Rotated("half", 0.25, per_head).eval()
    assert difference(run(other, other), dense) > 1e-3, "the scale does not matter here: this test could not fail"


def test_twenty_compilations_of_complex_numbers():  # trial H8
    model = Rotated("complex").eval()
    outcomes = [run(model, compiled(model, **SMALL), steps=1) for _ in range(20)]
    assert all(torch.equal(one, outcomes[0]) for one in outcomes)
    assert fasa_compile.stats()["sparse_steps"] == 20


# --- norms, softcap, sinks, windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["qwen3", "olmo2", "llama"])
def test_norms_around_the_rotation(model_type):  # trial I4
    model = tiny(model_type)
    for layer in model.model.layers:
        for name in ("q_norm", "k_norm"):
            if hasattr(layer.self_attn, name):  # a norm undoes the sharpened projections: its weights carry it
                getattr(layer.self_attn, name).weight.data.uniform_(1.0, 3.0)
    check(model, names(), half_split(16))


@pytest.mark.parametrize("cap", [1.0, 5.0])
def test_a_softcap_that_bites(cap):  # trial J1
    model = tiny("gemma2", attn_logit_softcapping=cap, sliding_window=4096, query_pre_attn_scalar=4)
    model.set_attn_implementation("eager")
    dense = decode(model, model, IDS[:, :50], cache_for(model, "static"), 4)
    found = decode(model, compiled(model, n_fac=60, n_sink=0, n_recent=0), IDS[:, :50], cache_for(model, "static"), 4)
    assert difference(found, dense) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == 4
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert difference(decode(model, model, IDS[:, :50], cache_for(model, "static"), 4), dense) > 1e-3


@pytest.mark.parametrize("value", [8.0, -20.0])
def test_a_learned_sink_joins_the_denominator(value):  # trial J2
    model = tiny("gpt_oss", num_local_experts=4, sliding_window=4096)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(value)
    dense = decode(model, model, IDS[:, :50], cache_for(model, "static"), 4)
    found = decode(model, compiled(model, n_fac=60, n_sink=0, n_recent=0), IDS[:, :50], cache_for(model, "static"), 4)
    assert fasa_compile.stats()["sparse_steps"] == 4
    assert difference(found, dense) <= 1e-4


@pytest.mark.parametrize("n_fac", [8, 64])
@pytest.mark.parametrize("mask", ["bool", "additive"])
def test_a_window_is_respected(n_fac, mask):  # trial J5
    """Values outside the window are poisoned after the prompt: one of them selected would show."""
    model = tiny_llama(layers=1)
    allowed = torch.zeros(1, 1, 1, 128, dtype=torch.bool)
    allowed[..., 41:57] = True
    given = allowed if mask == "bool" else torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    outcomes = []
    for step, poison in ((model, 0.0), (compiled(model, llama_profile(1), n_fac=n_fac, n_sink=1, n_recent=2), 1e4)):
        cache = cache_for(model, "static")
        with torch.no_grad():
            model(IDS[:1, :56], past_key_values=cache)
            cache.layers[0].values[:, :, :41] += poison
            outcomes.append(
                step(
                    input_ids=IDS[:1, 56:57].clone(),
                    past_key_values=cache,
                    attention_mask=given,
                    position_ids=torch.tensor([[56]]),
                ).logits
            )
    assert fasa_compile.stats()["sparse_steps"] == 1
    if n_fac == 64:
        assert difference(*outcomes) <= 1e-4
    else:
        assert outcomes[1].abs().max() < 100, "a token outside the window was selected"


@pytest.mark.parametrize("context", [*range(1, 11), 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_lengths_around_powers_of_two(context):  # trial J9
    from fasa_compile.triton_kernels import reference

    g = torch.Generator().manual_seed(context)
    q, k, v = (torch.randn(1, n, t, 32, generator=g) for n, t in ((4, 1), (2, context), (2, context)))
    weights = (q.view(1, 2, 2, 32) @ k.transpose(-1, -2) * 0.7).softmax(-1)
    dense = (weights @ v).view(1, 4, 1, 32)
    none = (None,) * 6
    everything = reference.sparse_decode(q, k, v, *none, scale=0.7, n_fac=context + 3, reduction="softmax_sum")
    assert difference(everything, dense) <= 1e-5
    few = reference.sparse_decode(q, k, v, *none, scale=0.7, n_fac=min(16, context), reduction="softmax_sum")
    # By hand: the tokens with the largest sum of the two heads' weights.
    for h in range(2):
        kept = weights[0, h].sum(0).topk(min(16, context)).indices
        part = weights[0, h][:, kept]
        expected = part / part.sum(-1, keepdim=True) @ v[0, h, kept]
        assert difference(few[0, 2 * h : 2 * h + 2, 0], expected) <= 1e-4


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("D", [20, 48, 80, 96, 112, 160, 192, 256])
def test_signal_in_the_last_dims(D, group):  # trial K1, the plain path; the kernels' grids have these sizes too
    from fasa_compile.triton_kernels import reference

    g = torch.Generator().manual_seed(D)
    q, k = torch.zeros(1, group, 1, D), torch.zeros(1, 1, 70, D)
    q[..., -4:] = torch.randn(1, group, 1, 4, generator=g)
    k[..., -4:] = torch.randn(1, 1, 70, 4, generator=g) * 4
    v = torch.randn(1, 1, 70, D, generator=g)
    out = reference.sparse_decode(q, k, v, *(None,) * 6, scale=1 / math.sqrt(4), n_fac=8, reduction="softmax_sum")
    weights = (q[0, :, 0] @ k[0, 0].T / 2).softmax(-1)
    kept = weights.sum(0).topk(8).indices
    part = weights[:, kept]
    assert difference(out[0, :, 0], part / part.sum(-1, keepdim=True) @ v[0, 0, kept]) <= 1e-4


def test_masks_of_another_dtype():  # trial I7
    model = tiny_llama(layers=1).half()
    allowed = torch.arange(128)[None, None, None] <= 50
    mask = torch.where(allowed, 0.0, torch.finfo(torch.float16).min).to(torch.float16)
    outcomes = []
    for step in (model, compiled(model, n_fac=100, n_sink=0, n_recent=0)):
        cache = cache_for(model, "static")
        with torch.no_grad():
            model(IDS[:1, :50], past_key_values=cache)
            outcomes.append(
                step(
                    input_ids=IDS[:1, 50:51].clone(),
                    past_key_values=cache,
                    attention_mask=mask,
                    position_ids=torch.tensor([[50]]),
                ).logits
            )
    assert fasa_compile.stats()["sparse_steps"] == 1
    assert outcomes[1].isfinite().all()
    assert difference(*outcomes) <= 3e-2 * outcomes[0].abs().max().item()


def test_mrope():  # trial H10
    from transformers import Qwen2VLTextConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

    torch.manual_seed(0)
    config = Qwen2VLTextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        pad_token_id=0,
    )
    model = Qwen2VLTextModel(config).eval()
    for layer in model.layers:
        layer.self_attn.q_proj.weight.data *= SHARPEN
        layer.self_attn.k_proj.weight.data *= SHARPEN
    position = torch.arange(60)[None, None].repeat(3, 1, 1)
    position[1, :, 10:30] = 10 + torch.arange(20) // 5  # rows and columns of an image
    position[2, :, 10:30] = 10 + torch.arange(20) % 5

    def steps(step):
        cache = cache_for(model, "static")
        with torch.no_grad():
            model(input_ids=IDS[:, :40], past_key_values=cache, position_ids=position[..., :40])
            return torch.cat(
                [
                    step(
                        input_ids=IDS[:, i : i + 1].clone(),
                        past_key_values=cache,
                        position_ids=position[..., i : i + 1].clone(),
                    ).last_hidden_state
                    for i in range(40, 60)
                ],
                1,
            )

    dense = steps(model)
    profile = profile_of([(f"layers.{i}.self_attn", 4, 2, 16, half_split(16)) for i in range(2)], 4)
    assert difference(steps(compiled(model, profile, n_fac=100)), dense) <= 1e-4
    with eager_fasa(model, profile, **SMALL):
        reference = steps(model)
    fasa_compile.reset_stats()
    assert difference(steps(compiled(model, profile, **SMALL)), reference) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == 20
    assert fasa_compile.stats()["graphs"] == 1
    assert difference(reference, dense) > 1e-3


def test_bloom_has_nothing_to_calibrate():  # trial C9
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4)).eval()
    made = backend(strict=False)
    dense = decode(model, model, IDS[:, :40], cache_for(model, "dynamic"), 4)
    with pytest.warns(fasa_compile.FasaWarning):
        found = decode(model, torch.compile(model, backend=made), IDS[:, :40], cache_for(model, "dynamic"), 4)
    assert difference(found, dense) <= 1e-4
    assert {row.reason for row in made.explain().rows} <= {"no-rope", "unknown-mask"}
    with pytest.raises(fasa_compile.FasaError, match=r"(?i)rope|rotary"):
        fasa_compile.calibrate(model, IDS[:, :100])


def test_a_model_that_dynamo_compiles_in_parts_is_calibrated_and_decodes():  # trial H5
    """transformers' dynamic scaling breaks the graph inside the model: layers keep the names they have in the whole of it."""
    how = {"rope_parameters": {"rope_theta": 10000.0} | ROPE_TYPES["dynamic"], "max_position_embeddings": 64}
    model = tiny("llama", **how)
    profile = fasa_compile.calibrate(model, IDS[:, :50], progress=False, fc_format="fp32", budget=Budget(**SMALL))
    assert [layer.layer for layer in profile.layers] == names()
    torch._dynamo.reset()
    step = torch.compile(
        model, backend=fasa_backend(profile, inner="eager", strict=True)
    )  # and its weights are checked
    found = decode(model, step, IDS[:, :60], cache_for(model, "static"), 6)
    assert fasa_compile.stats()["sparse_steps"] == 6
    model = tiny("llama", **how)
    with eager_fasa(model, profile):
        reference = decode(model, model, IDS[:, :60], cache_for(model, "static"), 6)
    assert difference(found, reference) <= 1e-4
    other = tiny("llama", **how)
    other.lm_head.weight.data += 1.0  # outside the part that Dynamo compiles
    torch._dynamo.reset()
    with pytest.raises(Exception, match="other weights"):
        decode(
            other,
            torch.compile(other, backend=fasa_backend(profile, inner="eager")),
            IDS[:, :60],
            cache_for(other, "static"),
            2,
        )
