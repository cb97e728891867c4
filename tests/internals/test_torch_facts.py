"""Facts of PyTorch's internals that this package stands on. An upgrade that changes one fails here, by name."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from fasa_compile.capture import capture


def traced(function, *arguments):
    """What Dynamo hands to a backend for ``function``: the graph and its example inputs."""
    seen = []

    def backend(gm, example_inputs):
        seen.append((gm, list(example_inputs)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*arguments)
    (only,) = seen
    return only


def shadow_of(function, *arguments):
    seen = []

    def backend(gm, example_inputs):
        seen.append(capture(gm, example_inputs))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*arguments)
    (only,) = seen
    return only


def test_backends_are_given_real_tensors():
    x = torch.randn(3)
    _, inputs = traced(lambda x: x + 1, x)
    assert inputs[0] is x or torch.equal(inputs[0], x)
    assert type(inputs[0]) is torch.Tensor


def test_placeholders_carry_a_source_and_survive_a_copy_of_the_graph():
    from fasa_compile.rewrite import copy_graph

    gm, _ = traced(lambda x: x + 1, torch.randn(3))
    for graph in (gm, copy_graph(gm)):
        (placeholder,) = graph.graph.find_nodes(op="placeholder")
        source = placeholder._dynamo_source
        assert (source.name() if callable(source.name) else source.name) == "L['x']"
        assert "dynamo_compile_id" in graph.meta
    import copy

    (bare,) = copy.deepcopy(gm).graph.find_nodes(op="placeholder")
    assert not hasattr(bare, "_dynamo_source"), "copy.deepcopy keeps sources now: copy_graph can be simpler"


def test_the_shadow_keeps_sdpa_whole_and_makes_writes_functional():
    def step(q, cache, k, pos):
        cache.index_copy_(2, pos, k)
        return F.scaled_dot_product_attention(q, cache, cache)

    q, cache, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 16, 8), torch.randn(1, 2, 1, 8)
    before = cache.clone()
    shadow = shadow_of(step, q, cache, k, torch.tensor([3]))
    targets = [str(node.target) for node in shadow.gm.graph.nodes if node.op == "call_function"]
    assert targets.count("aten.scaled_dot_product_attention.default") == 1
    assert targets.count("aten.index_copy.default") == 1
    assert not any(t.endswith("_.default") for t in targets), "the shadow mutates"
    written = [i for i in range(len(shadow.inputs)) if shadow.is_written(i)]
    assert len(written) == 1
    assert torch.equal(cache[:, :, 4:], before[:, :, 4:])


def test_a_write_through_a_view_reaches_the_base():
    def step(buffer, k):
        buffer[0][:, 2:3] = k
        return buffer[0].sum() + buffer[1].sum()

    shadow = shadow_of(step, torch.randn(2, 4, 16), torch.randn(4, 1))
    (written,) = [i for i in range(len(shadow.inputs)) if shadow.is_written(i)]
    assert shadow.inputs[written].meta["val"].shape == (2, 4, 16)


def test_what_a_dropout_in_evaluation_gives_is_its_input():
    def step(cache, x):
        y = F.dropout(cache, 0.1, training=False)
        y *= x
        return cache + 1

    shadow = shadow_of(step, torch.randn(4), torch.randn(4))
    assert shadow.is_written(0), "F.dropout gives the tensor itself, and a write to that is a write to the input"


def test_values_have_a_holder_before_and_after_a_write():
    def step(cache, k):
        first = cache * 1
        cache.mul_(2)
        return first + cache

    shadow = shadow_of(step, torch.randn(4), torch.randn(4))
    names = [n.name for n in shadow.dynamo.graph.nodes]
    (placeholder,) = [n.name for n in shadow.dynamo.graph.find_nodes(op="placeholder")][:1]
    last = names[-1]
    before, after = (node for _, node in shadow.history[placeholder])
    assert shadow.holder(after, last) is not None
    assert shadow.holder(before, last) is None, "the value before the write is gone"


def write(cache, k, pos):
    cache.index_copy_(0, pos, k)
    return cache.sum()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_writes_of_compiled_graphs_are_counted(backend):
    cache, k, pos = torch.zeros(8, 4), torch.ones(1, 4), torch.tensor([2])
    torch._dynamo.reset()
    step = torch.compile(write, backend=backend)
    counts = []
    for _ in range(3):
        step(cache, k, pos)
        counts.append(cache._version)
    assert counts[0] > 0
    assert counts[2] > counts[1] > counts[0]


def test_writes_through_views_and_detached_aliases_are_counted():
    x = torch.zeros(8)
    seen = [x._version]
    for write_to in (x, x[2:4], x.view(2, 4), x.detach()):
        write_to.add_(1)
        seen.append(x._version)
    assert seen == sorted(set(seen))


def test_inference_tensors_do_not_count():
    with torch.inference_mode():
        x = torch.zeros(4)
    assert x.is_inference()
    with pytest.raises(RuntimeError):
        x._version  # noqa: B018


def test_the_compiled_module_is_in_the_translator_scope():
    from fasa_compile.capture import root_module

    class Inner(torch.nn.Module):
        def forward(self, x):
            return x + 1

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x)

    model, seen = Outer(), []

    def backend(gm, example_inputs):
        seen.append((root_module(["inner"]), root_module(["other"])))
        return gm.forward

    torch.compile(model, backend=backend)(torch.ones(2))
    bound = Outer()
    bound.forward = torch.compile(bound.forward, backend=backend)
    bound(torch.ones(2))
    assert seen[0] == (model, None)
    # The second may be served by the graph of the first; where it is compiled anew, it names its own module.
    assert all(found in (model, bound) for found, _ in seen)
    assert root_module(["inner"]) is None, "outside of Dynamo there is no module"


def test_works_without_triton():  # trial K7
    code = """
import sys

class Without:  # a finder that finds what another does, but for triton
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] == "triton" else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import torch
import fasa_compile
from models import cache_for, decode, difference, llama_profile, tiny_llama

model = tiny_llama(layers=1)
ids = torch.randint(0, 512, (1, 44))
dense = decode(model, model, ids, cache_for(model, "static"), 4)
backend = fasa_compile.fasa_backend(llama_profile(1), n_fac=64, inner="eager", strict=True, check_weights=False)
sparse = decode(model, torch.compile(model, backend=backend), ids, cache_for(model, "static"), 4)
assert fasa_compile.stats()["sparse_steps"] == 4
assert difference(sparse, dense) <= 1e-4
assert "triton" not in sys.modules
print("done")
"""
    from pathlib import Path

    helpers = Path(__file__).parents[1] / "end_to_end"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=helpers, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip().endswith("done"), done.stderr[-2000:]


def test_a_number_that_dynamo_made_an_input_keeps_its_symbol():
    """With ``dynamic=True`` a float of a module is an input, read by item(); what tracing learns of it must be a guard that Dynamo can name."""

    class Normed(torch.nn.Module):
        p = 2.0

        def forward(self, x):
            return x.softmax(-1) / torch.norm(x, p=self.p, dim=-1, keepdim=True)

    def backend(gm, example_inputs):
        capture(gm, example_inputs)
        return gm.forward

    model, x = Normed(), torch.randn(3, 4)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for p in (2.0, 3.0):
        model.p = p
        assert torch.allclose(compiled(x), model(x))
