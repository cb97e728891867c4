"""Attention without a rotary embedding, sparse on request: scored by single dims, and by the bias that it adds to its scores.

What is expected is computed in the model itself, uncompiled, token by token and head by head.

H 4 query heads    HKV 2    D 16    S 48 slots    PROMPT 30
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import the_model_itself
from torch import Tensor, nn
from torch.nn import functional as F

from fasa_compile import CalibrationError, calibrate, fasa_backend
from fasa_compile.backend import FasaBackend
from fasa_compile.profiles import Budget, FCProfile, LayerProfile

H, HKV, D, S, WIDTH, VOCAB, PROMPT, STEPS = 4, 2, 16, 48, 48, 97, 30, 4
SLOPES = 2.0 ** -torch.tensor([1.0, 2.5, 4.0, 7.0])


class Block(nn.Module):
    """``kind``: "linear bias" (ALiBi), "nothing", or "rope"; ``static``: a buffer of S slots, else a cache that grows."""

    def __init__(self, kind: str, static: bool) -> None:
        super().__init__()
        self.kind, self.static = kind, static
        self.q, self.k, self.v = (nn.Linear(WIDTH, h * D, bias=b) for h, b in ((H, False), (HKV, True), (HKV, False)))
        self.out = nn.Linear(H * D, WIDTH, bias=False)
        self.past: tuple[Tensor, Tensor] | None = None
        self.register_buffer("keys", torch.zeros(1, HKV, S, D))
        self.register_buffer("values", torch.zeros(1, HKV, S, D))
        self.plain: tuple[LayerProfile, Budget, bool] | None = None  # set: attend as the specification says, uncompiled

    def bias(self, pos: Tensor, length: int) -> Tensor:
        back = torch.arange(length) - pos[:, None]
        added = SLOPES[:, None, None] * back if self.kind == "linear bias" else torch.zeros(1, *back.shape)
        return added.masked_fill(back > 0, -torch.inf)[None]  # [1, H or 1, T, L]

    def turned(self, x: Tensor, pos: Tensor) -> Tensor:
        angle = (pos[:, None] * 100.0 ** (-torch.arange(D // 2) / (D // 2))).repeat(1, 2)
        return x * angle.cos() + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * angle.sin()

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, D)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.kind == "rope":
            q, k = self.turned(q, pos), self.turned(k, pos)
        if self.static:
            k, v = self.keys.index_copy_(2, pos, k), self.values.index_copy_(2, pos, v)
        else:
            if self.past is not None:
                k, v = torch.cat([self.past[0], k], 2), torch.cat([self.past[1], v], 2)
            self.past = k, v
        bias = self.bias(pos, k.shape[2])
        if self.plain is not None and x.shape[1] == 1:
            y = self.attend_plainly(q, k, v, bias.expand(1, H, 1, -1)[0, :, 0])
        else:
            k, v = (y.repeat_interleave(H // HKV, 1) for y in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).flatten(2))

    def attend_plainly(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """``bias [H, L]``. Unrounded scores over the profile's dims of centred keys, plus the bias; a group agrees on one set."""
        assert self.plain is not None
        layer, budget, with_bias = self.plain
        scale, group = 1 / math.sqrt(D), H // HKV
        visible = [t for t in range(k.shape[2]) if bias[0, t] > -torch.inf]
        forced = set(visible[: budget.n_sink] + visible[-budget.n_recent :])
        out = []
        for g in range(HKV):
            value = {}
            for t in visible:
                parts = []
                for h in range(g * group, (g + 1) * group):
                    dims = layer.fcs[g].tolist()
                    s = scale * sum(float(q[0, h, 0, d] * (k[0, g, t, d] - layer.centre[g, d])) for d in dims)
                    parts.append(s + (float(bias[h, t]) if with_bias else 0.0) - float(layer.norm[h]))
                value[t] = math.inf if t in forced else math.log(sum(math.exp(p) for p in parts))
            kept = sorted(visible, key=lambda t: (-value[t], t))[: budget.n_fac]
            for h in range(g * group, (g + 1) * group):
                weights = (scale * (k[0, g, kept] @ q[0, h, 0]) + bias[h, kept]).softmax(0)
                out.append(weights @ v[0, g, kept])
        return torch.stack(out)[None, :, None]


class Model(nn.Module):
    def __init__(self, kinds: tuple[str, ...], static: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.norm, self.head = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block(kind, static) for kind in kinds)
        for block in self.blocks:
            block.q.weight.data *= 3.0
            block.k.weight.data *= 3.0

    def forward(self, ids: Tensor, pos: Tensor | None = None) -> Tensor:
        pos = torch.arange(ids.shape[1]) if pos is None else pos
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(self.norm(x), pos)
        return self.head(self.norm(x))

    def reset(self) -> None:
        for block in self.blocks:
            block.keys.zero_()
            block.values.zero_()
            block.past = None


def tokens(n: int) -> Tensor:
    return torch.randint(0, VOCAB, (1, n), generator=torch.Generator().manual_seed(n))


@torch.no_grad()
def decoded(model: Model, step: Any) -> Tensor:
    ids = tokens(PROMPT + STEPS)
    model.reset()
    model(ids[:, :PROMPT])
    out = [step(ids[:, i : i + 1].clone(), torch.tensor([i])) for i in range(PROMPT, PROMPT + STEPS)]
    return torch.cat(out, 1)


def compiled(model: Model, backend: FasaBackend) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, dynamic=not model.blocks[0].static)


def calibrated(model: Model, **options: Any) -> FCProfile:
    torch._dynamo.reset()
    model.reset()
    static = [block.static for block in model.blocks]
    for block in model.blocks:  # a prefill without a cache: S slots are no limit to the text
        block.static = False
    try:
        return calibrate(model, tokens(64), progress=False, **options)
    finally:
        for block, was in zip(model.blocks, static, strict=True):
            block.static = was
        model.reset()


CASES = [("linear bias", True), ("linear bias", False), ("nothing", True), ("nothing", False)]


@pytest.mark.parametrize("kind, static", CASES, ids=lambda x: str(x).replace(" ", "-"))
def test_sparse_is_the_plain_computation(kind: str, static: bool) -> None:
    model = Model((kind, kind), static).eval()
    profile = calibrated(model, fc_format="fp32", reduction="static", allow_no_rope=True)
    assert all(layer.rope.pairs == () and layer.width == D // 2 for layer in profile.layers)
    dense = decoded(model, model)

    wide = fasa_backend(profile, n_fac=PROMPT + STEPS, inner="eager", strict=True, allow_no_rope=True)
    torch.testing.assert_close(decoded(model, compiled(model, wide)), dense, atol=1e-4, rtol=1e-4)
    rows = wide.explain().rows
    assert {row.decision for row in rows} == {"sparse"} and len(wide.graphs[0].decisions) == 2, str(wide.explain())
    assert {row.rope for row in rows} == {"none: single dims"} and {row.n_fc for row in rows} == {D}
    assert {row.state for row in rows} == {"packed" if static else "repacked"}

    budget = Budget(n_fac=8, n_sink=1, n_recent=2)
    narrow = fasa_backend(profile, n_fac=8, n_sink=1, n_recent=2, inner="eager", strict=True, allow_no_rope=True)
    got = decoded(model, compiled(model, narrow))
    wanted = {}
    for with_bias in (True, False):
        for block, layer in zip(model.blocks, profile.layers, strict=True):
            block.plain = (layer, budget, with_bias)
        wanted[with_bias] = decoded(model, model)
    torch.testing.assert_close(got, wanted[True], atol=1e-4, rtol=1e-4)
    assert (got - dense).abs().max() > 1e-3  # the budget was small enough to matter
    if kind == "linear bias":  # and so was the bias, to the choice of tokens
        assert (wanted[True] - wanted[False]).abs().max() > 1e-3


def test_int4_and_a_budget_that_covers_the_context() -> None:
    model = Model(("linear bias",), True).eval()
    profile = calibrated(model, allow_no_rope=True)
    backend = fasa_backend(profile, n_fac=PROMPT + STEPS, inner="eager", strict=True, allow_no_rope=True)
    torch.testing.assert_close(decoded(model, compiled(model, backend)), decoded(model, model), atol=1e-4, rtol=1e-4)
    assert backend.explain().sparse


def test_off_unless_asked_for() -> None:
    model = Model(("linear bias",), True).eval()
    profile = calibrated(model, allow_no_rope=True)
    backend = fasa_backend(profile, n_fac=8, n_sink=1, n_recent=2, inner="eager")
    with pytest.warns(Warning, match="no-rope"):
        got = decoded(model, compiled(model, backend))
    torch.testing.assert_close(got, decoded(model, model), atol=1e-5, rtol=1e-5)
    (row,) = backend.explain().rows
    assert (row.decision, row.reason) == ("dense", "no-rope") and "allow_no_rope=True" in row.why
    torch._dynamo.reset()
    with pytest.raises(CalibrationError, match="allow_no_rope"):
        calibrate(model, tokens(40), progress=False)


def test_layers_with_and_without() -> None:
    """A profile that was made without single dims leaves the layers that would need them dense."""
    model = Model(("rope", "nothing"), True).eval()
    without, with_both = calibrated(model), calibrated(model, allow_no_rope=True, n_tip=3)
    assert [layer.layer for layer in without.layers] == ["blocks.0"]
    assert [(len(x.rope.pairs), x.width) for x in with_both.layers] == [(D // 2, 6), (0, 6)]
    for profile, flag, second in (
        (without, False, ("dense", "no-rope")),
        (without, True, ("dense", "no-rope")),
        (with_both, False, ("dense", "no-rope")),
        (with_both, True, ("sparse", "")),
    ):
        backend = fasa_backend(profile, n_fac=8, n_sink=1, n_recent=2, inner="eager", allow_no_rope=flag)
        decoded(model, compiled(model, backend))
        rows = backend.explain().rows
        assert [(row.decision, row.reason) for row in rows] == [("sparse", ""), second]
    assert "calibrate with allow_no_rope=True" not in rows[1].why


class KeepsTheLargest(torch.overrides.TorchFunctionMode):
    """Hides from every softmax of one query over keys all but the first, the last two and the largest of ``n`` in all."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.applied = n, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            q, k, v = args
            mask = kwargs.pop("attn_mask")
            scores = q @ k.mT * kwargs.get("scale", q.shape[-1] ** -0.5)
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
            return self.kept(scores).softmax(-1) @ v
        if func in (torch.softmax, F.softmax) and args[0].dim() >= 3 and args[0].shape[-2] == 1:
            return func(self.kept(args[0]), *args[1:], **kwargs)
        return func(*args, **kwargs)

    def kept(self, scores: Tensor) -> Tensor:
        self.applied += 1
        seen = scores > -1e4
        first = seen.int().argmax(-1, keepdim=True)
        at = torch.arange(scores.shape[-1]).expand_as(scores)
        last = torch.where(seen, at, -1).amax(-1, keepdim=True)
        rank = scores.masked_fill((at == first) | (at > last - 2) & (at <= last), torch.inf).masked_fill(
            ~seen, -torch.inf
        )
        return scores.masked_fill(rank < rank.topk(self.n, -1).values[..., -1:], -torch.inf)


@pytest.mark.parametrize("name", ["bloom", "mpt", "gpt2"])
@torch.no_grad()
def test_published_models(name: str) -> None:
    """Their own heads share no keys, so with all dims scoring a head's tokens are the largest of its scores, the bias included."""
    transformers = pytest.importorskip("transformers")
    configs = {
        "bloom": ("BloomConfig", "BloomForCausalLM", dict(hidden_size=64, n_layer=2, n_head=4)),
        "mpt": ("MptConfig", "MptForCausalLM", dict(d_model=64, n_layers=2, n_heads=4, max_seq_len=128)),
        "gpt2": ("GPT2Config", "GPT2LMHeadModel", dict(n_embd=64, n_layer=2, n_head=4, n_positions=128)),
    }
    config, model_class, sizes = configs[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config)(vocab_size=VOCAB, **sizes)).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            weight *= 5.0
    ids = tokens(PROMPT + STEPS)

    # MPT breaks its graph inside the attention where the cache's length is a tensor.
    static = name != "mpt"

    def run(step: Any, mode: Any) -> Tensor:
        cache = (
            transformers.StaticCache(config=model.config, max_cache_len=S)
            if static
            else transformers.DynamicCache(config=model.config)
        )
        model(input_ids=ids[:, :PROMPT], past_key_values=cache)
        with mode:
            out = [
                step(input_ids=ids[:, i : i + 1].clone(), past_key_values=cache).logits[:, -1]
                for i in range(PROMPT, PROMPT + STEPS)
            ]
        return torch.stack(out, 1)

    with the_model_itself("must match the existing size"):
        dense = run(model, nullcontext())
    scale = float(dense.abs().max())
    for n in (PROMPT + STEPS, 6):
        torch._dynamo.reset()
        backend = fasa_backend("all", n_fac=n, n_sink=1, n_recent=2, inner="eager", strict=True, allow_no_rope=True)
        got = run(torch.compile(model, backend=backend, dynamic=not static), nullcontext())
        assert {row.decision for row in backend.explain().rows} == {"sparse"}, str(backend.explain())
        if n > 6:
            torch.testing.assert_close(got / scale, dense / scale, atol=1e-4, rtol=0)
            continue
        mode = KeepsTheLargest(n)
        want = run(model, mode)
        assert mode.applied == 2 * STEPS
        torch.testing.assert_close(got / scale, want / scale, atol=1e-4, rtol=0)
        assert (want - dense).abs().max() / scale > 1e-3
