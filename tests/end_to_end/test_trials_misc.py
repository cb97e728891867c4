"""Cases distilled from public bug reports: graphs, processes, calibration, profiles and cost. Numbers: docs/trials.md."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from models import (
    SHARPEN,
    backend,
    cache_for,
    compiled,
    decode,
    difference,
    half_split,
    llama_profile,
    profile_of,
    tiny_llama,
)
from torch import Tensor, nn
from torch.nn import functional as F

import fasa_compile

IDS = torch.randint(0, 512, (2, 130), generator=torch.Generator().manual_seed(11))
SMALL = {"n_fac": 12, "n_sink": 1, "n_recent": 2}


class Shapes(nn.Module):
    """Attention over a static cache, by ``block``: parallel to the MLP, twice in a block, or q and k rotated as one tensor."""

    H, HKV, D, LENGTH = 4, 2, 16, 64

    def __init__(self, block: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = block
        self.qkv = nn.ModuleList(nn.Linear(64, (self.H + 2 * self.HKV) * self.D, bias=False) for _ in range(2))
        self.o = nn.ModuleList(nn.Linear(self.H * self.D, 64, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        for p in self.qkv:
            p.weight.data *= SHARPEN / 2
        angle = torch.outer(torch.arange(self.LENGTH).float(), 100.0 ** (-torch.arange(0, self.D, 2) / self.D))
        self.register_buffer("cos", angle.cos().repeat(1, 2))
        self.register_buffer("sin", angle.sin().repeat(1, 2))
        self.register_buffer("keys", torch.zeros(2, 1, self.HKV, self.LENGTH, self.D))
        self.register_buffer("values", torch.zeros(2, 1, self.HKV, self.LENGTH, self.D))

    def turn(self, x: Tensor, pos: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos[pos] + torch.cat([-b, a], -1) * self.sin[pos]

    def attend(self, x: Tensor, pos: Tensor, i: int) -> Tensor:
        T = x.shape[1]
        qkv = self.qkv[i](x).view(1, T, -1, self.D).transpose(1, 2)
        if self.block == "fused":
            qk, v = qkv.split([self.H + self.HKV, self.HKV], 1)
            q, k = self.turn(qk, pos).split([self.H, self.HKV], 1)
        else:
            q, k, v = qkv.split([self.H, self.HKV, self.HKV], 1)
            q, k = self.turn(q, pos), self.turn(k, pos)
        self.keys[i].index_copy_(2, pos, k)
        self.values[i].index_copy_(2, pos, v)
        seen = (torch.arange(self.LENGTH) <= pos[:, None])[None, None]
        y = F.scaled_dot_product_attention(q, self.keys[i], self.values[i], seen, enable_gqa=True)
        return self.o[i](y.transpose(1, 2).reshape(1, T, -1))

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        if self.block == "parallel":
            return x + self.attend(x, pos, 0) + self.down(F.gelu(self.up(x)))
        x = x + self.attend(x, pos, 0)
        return x + self.attend(x, pos, 1) if self.block == "twice" else x


@pytest.mark.parametrize("block, sites", [("parallel", 1), ("twice", 2), ("fused", 1)])
def test_queries_find_their_keys(block, sites):  # trial H14
    model = Shapes(block).eval()
    x = torch.randn(1, 46, 64, generator=torch.Generator().manual_seed(4))

    def run(step) -> Tensor:
        with torch.no_grad():
            model.keys.zero_()
            model.values.zero_()
            model(x[:, :40], torch.arange(40))
            return torch.cat([step(x[:, i : i + 1].clone(), torch.tensor([i]))[0] for i in range(40, 46)])

    dense = run(model)
    made = backend(n_fac=60, n_sink=0, n_recent=0)
    assert difference(run(torch.compile(model, backend=made)), dense) <= 1e-4
    assert [row.decision for row in made.explain().rows] == ["sparse"] * sites
    assert difference(run(compiled(model, **SMALL)), dense) > 1e-3


class EncoderDecoder(nn.Module):
    """A step of a decoder: rotated self-attention over a cache, then cross-attention to what an encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = Shapes("once")
        self.q = nn.Linear(64, 64, bias=False)
        self.q.weight.data *= SHARPEN

    def forward(self, x: Tensor, pos: Tensor, cross_k: Tensor, cross_v: Tensor) -> Tensor:
        x = self.self_attention(x, pos)
        q = self.q(x).view(1, -1, 4, 16).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, cross_k, cross_v)
        return x + y.transpose(1, 2).reshape(1, -1, 64)


def test_cross_attention_is_left_alone():  # trial I9
    model = EncoderDecoder().eval()
    x = torch.randn(1, 46, 64, generator=torch.Generator().manual_seed(4))
    made = backend(n_fac=60, n_sink=0, n_recent=0)
    step = torch.compile(model, backend=made)
    outcomes = []
    for seed in (1, 2):  # two texts to translate, one after the other
        cross = torch.randn(2, 1, 4, 30, 16, generator=torch.Generator().manual_seed(seed))
        for one in (model, step):
            with torch.no_grad():
                model.self_attention.keys.zero_()
                model.self_attention.values.zero_()
                model(x[:, :40], torch.arange(40), *cross)
                outcomes.append(
                    torch.cat([one(x[:, i : i + 1].clone(), torch.tensor([i]), *cross)[0] for i in range(40, 46)])
                )
    assert difference(outcomes[0], outcomes[1]) <= 1e-4
    assert difference(outcomes[2], outcomes[3]) <= 1e-4
    assert difference(outcomes[0], outcomes[2]) > 0.01
    assert {row.decision for row in made.explain().rows if "self_attention" in row.layer} == {"sparse"}
    assert sorted(row.decision for row in made.explain().rows) == ["dense", "sparse"]


SCRIPT = """
    import sys
    import torch
    sys.path[:0] = {paths!r}
    from models import cache_for, decode, eager_fasa, llama_profile, tiny_llama
    from fasa_compile import fasa_backend
    import fasa_compile

    ids = torch.randint(0, 512, (1, 44), generator=torch.Generator().manual_seed(3))
    model = tiny_llama(layers=1)
    seed = int(sys.argv[1])
    if seed:
        profile = llama_profile(1, n_tip=3, n_fac=8, n_sink=1, n_recent=2)
        if seed == 2:  # other chunks, else alike
            profile.layers[0].fcs.copy_(torch.tensor([[13, 14, 15], [12, 13, 14]]))
        backend = fasa_backend(profile, check_weights=False, strict=True)
        found = decode(model, torch.compile(model, backend=backend), ids, cache_for(model, "static"), 3)
        assert fasa_compile.stats()["sparse_steps"] == 3
        with eager_fasa(model, profile):
            expected = decode(model, model, ids, cache_for(model, "static"), 3)
    else:
        found = decode(model, torch.compile(model), ids, cache_for(model, "static"), 3)
        expected = decode(model, model, ids, cache_for(model, "static"), 3)
    assert (found - expected).abs().max() <= 1e-4, (found - expected).abs().max()
    print("sum", found.double().abs().sum().item())
"""


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.timeout(600)
def test_a_shared_compile_cache_knows_one_profile_from_another(tmp_path):  # trial Q5
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1] / "benchmarks" / "quality")]
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(SCRIPT.format(paths=paths)))
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    sums = []
    for seed in (1, 2, 0, 1):
        done = subprocess.run(
            [sys.executable, str(script), str(seed)], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        sums.append(done.stdout.split()[-1])
    assert sums[0] == sums[3]
    assert len(set(sums)) == 3


def test_a_layer_that_calibration_did_not_reach_is_an_error_or_dense():  # trial Q1
    """Calibration in two texts, the second of which skips a layer."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Shapes("once") for _ in range(2))
            self.skip = False

        def forward(self, ids: Tensor) -> Tensor:
            x = F.one_hot(ids, 64).float()
            pos = torch.arange(ids.shape[1])
            for layer in self.layers[: 1 if self.skip else 2]:
                x = layer(x, pos)
            return x

    model = Skipping().eval()

    def forward(model, ids):
        inner = getattr(model, "_orig_mod", model)
        inner.skip = ids.shape[1] == 30
        return model(ids)

    texts = [torch.randint(0, 64, (n,)) for n in (40, 30)]
    with pytest.raises(fasa_compile.FasaError, match=r"layers\.1"):
        fasa_compile.calibrate(model, texts, forward=forward, progress=False)


def test_calibration_asks_for_one_row_of_logits():
    """Those of a whole text, 4096 x 49152 floats of SmolLM2, would be most of what calibration holds."""

    class Watched(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.logits = tiny_llama(layers=1), []

        def forward(self, input_ids, logits_to_keep=0):
            out = self.inner(input_ids, logits_to_keep=logits_to_keep)
            self.logits.append(out.logits.shape[1])
            return out

    model = Watched()
    fasa_compile.calibrate(model, IDS[0, :40], progress=False)
    assert model.logits == [1]


def test_calibration_keeps_no_keys_and_values(monkeypatch):
    """A cache of all layers, 180 MiB of SmolLM2 at 4k, and Dynamo's trace of it, for a prompt that nobody decodes from."""
    from transformers.cache_utils import DynamicLayer

    model = tiny_llama(layers=2)
    own = fasa_compile.calibrate(model, IDS[0, :40], forward=lambda m, ids: m(ids), progress=False)
    torch._dynamo.reset()

    def keeps(*_, **__):
        raise AssertionError("keys and values were kept")

    monkeypatch.setattr(DynamicLayer, "update", keeps)
    profile = fasa_compile.calibrate(model, IDS[0, :40], progress=False)
    assert [layer.layer for layer in profile.layers] == [layer.layer for layer in own.layers]
    for found, expected in zip(profile.layers, own.layers, strict=True):
        assert (found.fcs == expected.fcs).all() and (found.centre == expected.centre).all()


def test_an_attention_that_no_module_names_is_not_calibrated():
    """Its graph begins at a function, behind a graph break: decode steps have it dense (unknown-layer)."""

    def attend(q, k, v):
        angles = (torch.arange(q.shape[2])[:, None] * 0.7 ** torch.arange(8)).repeat(1, 2)
        q, k = (x * angles.cos() + torch.cat((-x[..., 8:], x[..., :8]), -1) * angles.sin() for x in (q, k))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    class Nameless(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.projection = nn.Embedding(512, 32), nn.Linear(32, 96)

        def forward(self, ids):
            q, k, v = self.projection(self.embedding(ids)).view(*ids.shape, 3, 2, 16).permute(2, 0, 3, 1, 4)
            torch._dynamo.graph_break()
            return attend(q, k, v)

    with pytest.raises(fasa_compile.CalibrationError, match="unknown-layer"):
        fasa_compile.calibrate(Nameless(), IDS[0, :30], progress=False)


def test_calibration_texts_that_are_short_or_broken():  # trial Q1
    model = tiny_llama(layers=1)
    profile = fasa_compile.calibrate(model, IDS[0, :5], progress=False)  # shorter than any budget
    assert len(profile.layers) == 1
    with pytest.raises(fasa_compile.FasaError, match="at least 2 tokens"):
        fasa_compile.calibrate(model, IDS[0, :1], progress=False)
    model.model.layers[0].self_attn.k_proj.weight.data[3, 3] = float("nan")
    with pytest.raises(fasa_compile.FasaError, match=r"model\.layers\.0\.self_attn"):
        fasa_compile.calibrate(model, IDS[0, :40], progress=False)


@pytest.mark.parametrize("change", ["layers", "head_dim", "interleaved", "rotary_dim", "kv_heads"])
def test_a_profile_of_another_architecture_names_what_differs(change):  # trial Q3
    rows = {
        "layers": [(f"model.layers.{i}.self_attn", 8, 2, 32, half_split(32)) for i in range(6)],
        "head_dim": [(f"model.layers.{i}.self_attn", 8, 2, 64, half_split(64)) for i in range(2)],
        "interleaved": [
            (f"model.layers.{i}.self_attn", 8, 2, 32, tuple((2 * j, 2 * j + 1) for j in range(16))) for i in range(2)
        ],
        "rotary_dim": [(f"model.layers.{i}.self_attn", 8, 2, 32, half_split(16)) for i in range(2)],
        "kv_heads": [(f"model.layers.{i}.self_attn", 8, 4, 32, half_split(32)) for i in range(2)],
    }
    named = {
        "layers": "layers",
        "head_dim": "head_dim",
        "interleaved": "pairs",
        "rotary_dim": "rotary_dim",
        "kv_heads": "kv",
    }
    model = tiny_llama(layers=2)
    with pytest.raises(Exception, match=rf"(?s)(Profile|Field)Error.*{named[change]}"):
        decode(model, compiled(model, profile_of(rows[change], 4)), IDS[:1, :42], cache_for(model, "static"), 2)
    assert fasa_compile.stats()["sparse_steps"] == 0


@pytest.mark.parametrize("spelling", ["expand", "repeat_interleave", "enable_gqa", "einsum", "matmul"])
def test_grouped_heads_in_every_spelling(spelling):  # trial I5
    class Grouped(Shapes):
        def attend(self, x: Tensor, pos: Tensor, i: int) -> Tensor:
            q, k, v = self.qkv[i](x).view(1, -1, 8, 16).transpose(1, 2).split([4, 2, 2], 1)
            q, k = self.turn(q, pos), self.turn(k, pos)
            self.keys[i].index_copy_(2, pos, k)
            self.values[i].index_copy_(2, pos, v)
            seen = (torch.arange(self.LENGTH) <= pos[:, None])[None, None]
            k, v = self.keys[i], self.values[i]
            if spelling == "enable_gqa":
                y = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
            elif spelling == "einsum":
                s = torch.einsum("bhgtd,bhsd->bhgts", q.unflatten(1, (2, 2)), k) / 4
                w = s.masked_fill(~seen[None], float("-inf")).softmax(-1)
                y = torch.einsum("bhgts,bhsd->bhgtd", w, v).flatten(1, 2)
            else:
                if spelling == "repeat_interleave":
                    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
                else:
                    k, v = (
                        t[:, :, None].expand(1, 2, 2, self.LENGTH, 16).reshape(1, 4, self.LENGTH, 16) for t in (k, v)
                    )
                if spelling == "matmul":
                    y = (q @ k.mT / 4).masked_fill(~seen, float("-inf")).softmax(-1) @ v
                else:
                    y = F.scaled_dot_product_attention(q, k, v, seen)
            return self.o[i](y.transpose(1, 2).reshape(1, x.shape[1], -1))

    model = Grouped("once").eval()
    x = torch.randn(1, 44, 64, generator=torch.Generator().manual_seed(4))

    def run(step) -> Tensor:
        with torch.no_grad():
            model.keys.zero_()
            model.values.zero_()
            model(x[:, :40], torch.arange(40))
            return torch.cat([step(x[:, i : i + 1].clone(), torch.tensor([i]))[0] for i in range(40, 44)])

    dense = run(model)
    assert difference(run(compiled(model, n_fac=60, n_sink=0, n_recent=0)), dense) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == 4
    if spelling == "expand":
        return
    # Every spelling selects what the first one selects.
    sparse = run(compiled(model, **SMALL))
    spelling = "expand"
    assert difference(run(compiled(model, **SMALL)), sparse) <= 1e-4
    assert difference(sparse, dense) > 1e-3


def test_a_declined_model_runs_what_it_would_run_without_us():  # trial R1
    """No wrapper around a graph that was left alone: what the inner compiler made is called as it is."""
    model = tiny_llama(layers=1)
    calls = []

    def inner(gm, example_inputs):
        def run(*arguments):
            calls.append(len(arguments))
            return gm.forward(*arguments)

        return run

    made = backend(llama_profile(1), inner=inner, strict=False, n_fac=500)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", fasa_compile.FasaWarning)
        decode(model, torch.compile(model, backend=made), IDS[:1, :60], cache_for(model, "static"), 20)
    assert len(calls) == 20
    assert not [w for w in seen if issubclass(w.category, fasa_compile.FasaWarning)], (
        "within the budget: nothing to warn of"
    )
    stats = fasa_compile.stats()
    assert (stats["dense_steps"], stats["sparse_steps"], stats["state_rebuilds"]) == (20, 0, 0)
