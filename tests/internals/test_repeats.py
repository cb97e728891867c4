"""Calls that repeat are traced once, and the shadow is the one that tracing each of them gives."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from fasa_compile import capture as capturing
from fasa_compile.repeats import Repeats


def both(function, *arguments, dynamic=False, edit=None):
    """The shadow as it is made, and made with every call traced; and how many calls the first of them traced."""
    found = []

    def backend(gm, example_inputs):
        if edit is not None:
            edit(gm)
        traced = Counter()
        trace = capturing._Recorder._trace

        def counted(self, n):
            traced[n.op] += 1
            return trace(self, n)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(capturing._Recorder, "_trace", counted)
            shadow = capturing.capture(gm, example_inputs)
        found.append((shadow, capturing._capture(gm, example_inputs, repeats=False), traced))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=dynamic)(*arguments)
    ((shadow, each, traced),) = found
    return shadow, each, traced["call_function"] + traced["call_method"]


def values(shadow):
    """What each Dynamo value is at each point of the program, and each input at the end: a hash of all that it is made of."""
    spelled: dict = {}

    def spell(node):
        number = node.meta.get("val")
        if isinstance(number, (int, float, torch.SymInt, torch.SymFloat)):
            return str(number)
        if node not in spelled:
            arguments = torch.fx.map_arg((node.args, dict(node.kwargs)), spell)
            text = node.name if node.op == "placeholder" else f"{node.target}{arguments}"
            spelled[node] = hashlib.sha256(text.encode()).hexdigest()
        return spelled[node]

    history = {name: [(at, spell(node)) for at, node in past] for name, past in shadow.history.items()}
    return history, [spell(node) for node in shadow.final]


class Layer(torch.nn.Module):
    """Attention over a cache, split in heads, with a rotation, an assignment, and numbers that only their types tell apart."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x, cache, pos):
        q, k, v = self.qkv(x).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = (torch.cat([-t[..., 2:], t[..., :2]], -1) * 0.5 + t for t in (q, k))
        cache[0].index_copy_(2, pos, k)
        cache[1].index_copy_(2, pos, v)
        y = F.scaled_dot_product_attention(q, *cache)
        kept = torch.zeros_like(y)
        kept[..., 1:] = y[..., 1:]
        y = y + kept
        steps = pos * 1 + (pos * 1.0).long()
        return x + y.transpose(1, 2).reshape(x.shape) * steps


def model(layers):
    torch.manual_seed(0)
    stack = torch.nn.ModuleList(Layer() for _ in range(layers)).requires_grad_(False)
    caches = [tuple(torch.zeros(1, 2, 16, 4) for _ in range(2)) for _ in stack]

    def step(x, pos):
        for layer, cache in zip(stack, caches, strict=True):
            x = layer(x, cache, pos)
        return x

    return step, torch.randn(1, 1, 8), torch.tensor([3])


@pytest.mark.parametrize("dynamic", [False, True])
def test_layers_that_repeat_are_traced_once(dynamic):
    step, *arguments = model(2)
    shadow, each, two = both(step, *arguments, dynamic=dynamic)
    assert values(shadow) == values(each)
    step, *arguments = model(5)
    shadow, each, five = both(step, *arguments, dynamic=dynamic)
    assert values(shadow) == values(each)
    written = sum(node.op.startswith("call") and node.target == "index_copy_" for node in shadow.dynamo.graph.nodes)
    assert written == 10
    # Zeros that are assigned to and the assignment are traced each time, and so are the two writes to the cache.
    assert five - two == 3 * 4, "a further layer costs its writes, and no other call is traced again"


def test_a_write_that_was_not_foreseen_has_every_call_traced():
    def unforeseen(gm):
        for node in gm.graph.nodes:
            node.meta.pop("example_value", None)

    def step(x):
        before, first = x * 2, x + 1
        x.add_(1)
        return before + (x * 2) + first + (x + 1)

    seen = []
    with pytest.MonkeyPatch.context() as patch:
        holds = Repeats.holds
        patch.setattr(Repeats, "holds", lambda self: seen.append(holds(self)) or seen[-1])
        shadow, each, _ = both(step, torch.randn(4), edit=unforeseen)
    assert seen == [False]
    assert values(shadow) == values(each)
    assert shadow.is_written(0)


def test_a_tensor_given_twice_is_not_two_tensors():
    def step(x, y):
        return x * y + x * x + y * y

    shadow, each, _ = both(step, torch.randn(4), torch.randn(4))
    assert values(shadow) == values(each)


@torch._dynamo.allow_in_graph
def times_item(x, by):
    return x * by.item()


def test_a_number_read_from_a_tensor_is_that_tensors():
    """Of two calls that are alike but for the tensor whose value they take."""

    def step(x, first, second):
        both_read = (
            first.item() * second.item()
        )  # before: Dynamo takes no call that is the first to read a number within
        return times_item(x, first) + times_item(x, second) + both_read

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        shadow, _, _ = both(step, torch.randn(4), torch.tensor(2.0), torch.tensor(3.0))
    read = {n.args[1] for n in shadow.gm.graph.nodes if n.target is torch.ops.aten.mul.Tensor}
    assert len(read) == 2
