"""Weights that libraries quantise: bitsandbytes and torchao. Skipped where they are not installed; neither is a requirement."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from models import cache_for, decode, difference, llama_profile, tiny_llama
from torch import nn

import fasa_compile
from fasa_compile import calibrate, fasa_backend

IDS = torch.randint(0, 512, (1, 60), generator=torch.Generator().manual_seed(5))
STEPS = 4


def linears(model):
    for module in model.model.layers.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                yield module, name, child


def four_bits(model):
    bnb = pytest.importorskip("bitsandbytes")
    for module, name, linear in list(linears(model)):
        new = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32)
        new.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        setattr(module, name, new.to("cpu"))


def eight_bits(model):
    bnb = pytest.importorskip("bitsandbytes")
    for module, name, linear in list(linears(model)):
        new = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
        new.weight = bnb.nn.Int8Params(linear.weight.data.clone(), requires_grad=False, has_fp16_weights=False)
        setattr(module, name, new.to("cpu"))


def int8_subclasses(model):
    ao = pytest.importorskip("torchao.quantization")
    ao.quantize_(model.model.layers, ao.Int8WeightOnlyConfig())


@pytest.mark.parametrize("quantise", [four_bits, eight_bits, int8_subclasses], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_as_many_sites_as_without_and_the_models_own_answers(quantise, kind):  # trials N1 and N2
    model = tiny_llama(layers=2)
    quantise(model)
    expected = decode(model, model, IDS, cache_for(model, kind), STEPS)
    made = fasa_backend(llama_profile(2), n_fac=100, inner="eager", strict=True, check_weights=False)
    found = decode(model, torch.compile(model, backend=made), IDS, cache_for(model, kind), STEPS)
    assert difference(found, expected) <= 1e-4
    # A growing cache's first graph is for one length, which the budget holds.
    expected_rows = [""] * 2 if kind == "static" else ["within-budget"] * 2 + [""] * 2
    assert [row.reason for row in made.explain().rows] == expected_rows
    assert fasa_compile.stats()["sparse_steps"] == (STEPS if kind == "static" else STEPS - 1)


@pytest.mark.parametrize("quantise", [four_bits, int8_subclasses], ids=lambda f: f.__name__)
def test_calibrated_as_it_is_used(quantise):
    """The profile of a quantised model fits it, and not the model before."""
    plain, model = tiny_llama(layers=2), tiny_llama(layers=2)
    quantise(model)
    profile = calibrate(model, IDS, progress=False)
    made = fasa_backend(profile, n_fac=100, inner="eager", strict=True)
    expected = decode(model, model, IDS, cache_for(model, "static"), STEPS)
    assert (
        difference(decode(model, torch.compile(model, backend=made), IDS, cache_for(model, "static"), STEPS), expected)
        <= 1e-4
    )
    theirs = calibrate(plain, IDS, progress=False)
    for mine, other in zip(profile.layers, theirs.layers, strict=True):
        shared = (mine.fcs[:, :, None] == other.fcs[:, None, :]).any(2).double().mean()
        assert shared > 0.8 and difference(mine.centre, other.centre) < 2.0


SECOND_PROCESS = """
    import sys
    sys.path[:0] = {paths!r}
    import torch
    import torchao.quantization as ao
    from models import *
    from fasa_compile import fasa_backend, stats
    torch._inductor.config.fx_graph_cache = True
    model = tiny_llama(layers=1)
    ao.quantize_(model.model.layers, ao.Int8WeightOnlyConfig())
    ids = torch.randint(0, 512, (1, 50), generator=torch.Generator().manual_seed(5))
    dense = decode(model, model, ids, cache_for(model, "static"), 3)
    made = fasa_backend(llama_profile(1), inner="inductor", n_fac=100, strict=True, check_weights=False)
    out = decode(model, torch.compile(model, backend=made), ids, cache_for(model, "static"), 3)
    hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
    print(difference(out, dense) <= 1e-4, stats()["sparse_steps"], hits, float(out.double().sum()))
"""


@pytest.mark.slow
@pytest.mark.inductor
def test_a_second_process_with_a_warm_compile_cache(tmp_path):  # trial N2
    pytest.importorskip("torchao.quantization")
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1] / "benchmarks" / "quality")]
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(SECOND_PROCESS.format(paths=paths)))
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    answers = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        answers.append(done.stdout.splitlines()[-1].split())
    (*cold, total), (*warm, again) = answers
    assert (cold, warm) == (["True", "3", "0"], ["True", "3", "1"]) and total == again
