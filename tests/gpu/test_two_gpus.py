"""A model on the second GPU, and one whose layers lie on two. Skipped where there is one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))

from models import cache_for, decode, difference, llama_profile, tiny_llama

import fasa_compile
from fasa_compile import fasa_backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")]
IDS = torch.randint(0, 512, (2, 100), generator=torch.Generator().manual_seed(3))
STEPS = 8


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_model_on_the_second_gpu(kind, mode):  # trial L1
    """While the first one is current: the answers are right, and nothing is allocated on the first."""
    if (kind, mode) == ("dynamic", "reduce-overhead"):
        pytest.skip("a cache that grows is a new tensor in every step: CUDA graphs do not apply")
    assert torch.cuda.current_device() == 0
    model = tiny_llama(layers=2).to("cuda:1", torch.bfloat16)
    ids = IDS.to("cuda:1")
    dense = decode(model, model, ids, cache_for(model, kind, 256), STEPS)
    torch._dynamo.reset()
    profile = llama_profile(2, fc_format="int4")
    made = fasa_backend(profile, check_weights=False, strict=True, dense_below=0, n_fac=128)
    before = torch.cuda.memory_allocated(0)
    found = decode(model, torch.compile(model, backend=made, mode=mode), ids, cache_for(model, kind, 256), STEPS)
    torch.cuda.synchronize(1)
    assert torch.cuda.memory_allocated(0) == before
    assert difference(found, dense) <= 3e-2 * dense.abs().max().item()
    assert fasa_compile.stats()["sparse_steps"] >= STEPS - 1


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_layers_on_two_gpus(kind):  # trial L2
    """As a device map has it: each layer's state lies where the layer is."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny_llama(layers=4)
    places = {f"model.layers.{i}": i // 2 for i in range(4)}
    places |= {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    model = fasa_compile.traceable_device_map(accelerate.dispatch_model(model, places))
    ids = IDS.to("cuda:0")
    dense = decode(model, model, ids, cache_for(model, kind, 256), STEPS)
    torch._dynamo.reset()
    made = fasa_backend(llama_profile(4, fc_format="int4"), check_weights=False, strict=True, dense_below=0, n_fac=107)
    runtimes = []

    def compiler(*graph):
        runtimes.append(made(*graph))
        return runtimes[-1]

    cache = cache_for(model, kind, 256)
    found = decode(model, torch.compile(model, backend=compiler), ids, cache, STEPS)
    assert difference(found, dense) <= 1e-3
    steps = fasa_compile.stats()["sparse_steps"]
    # A cache that grows is within the budget until its last step.
    assert steps == STEPS if kind == "static" else steps >= 1
    if kind == "static":
        packed = [
            c.data.device.index for r in runtimes for k in getattr(r, "_keepers", ()) for c in k.layer.caches.values()
        ]
        assert sorted(packed) == [0, 0, 1, 1]
