"""Sharded weights among a graph's inputs: one of two processes, whose collectives do nothing (the real ones: ``tests/distributed``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from fasa_compile.local_weights import local_weights

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


@pytest.fixture
def sharded() -> Iterator[nn.Sequential]:
    """A layer by rows, one by columns, and one that is not sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8, bias=False), nn.Linear(8, 4))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    with torch.no_grad():
        for p in model.parameters():  # nothing was sent: a shard may hold anything
            (p.to_local() if hasattr(p, "to_local") else p).normal_()
    yield model
    torch._dynamo.reset()
    dist.destroy_process_group()


def noting(seen: list[list[str]]) -> Callable[..., Any]:
    """A compiler that notes the types of the inputs that it is given."""

    def compiler(gm: Any, examples: Any) -> Callable[..., Any]:
        seen.append([type(x).__name__ for x in examples])
        return aot_eager(gm, examples)

    return compiler


def test_they_enter_as_plain_tensors(sharded: nn.Sequential) -> None:
    """A DTensor would be taken apart in Python in every call."""
    seen: list[list[str]] = []
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = sharded(x)
        step = torch.compile(sharded, backend=local_weights(noting(seen)))
        assert torch.equal(step(x), expected)
        sharded[0].weight.mul_(2)  # still the model's own
        assert torch.equal(step(x), sharded(x)) and not torch.equal(step(x), expected)
    assert len(seen) == 1 and (seen[0].count("DTensor"), seen[0].count("FakeTensor")) == (0, 3)


def test_where_gradients_are_recorded_they_stay_what_they_are(sharded: nn.Sequential) -> None:
    seen: list[list[str]] = []
    x = torch.randn(3, 8)
    sharded(x).sum().backward()
    expected = {name: p.grad for name, p in sharded.named_parameters()}
    sharded.zero_grad()
    torch.compile(sharded, backend=local_weights(noting(seen)))(x).sum().backward()
    assert seen[0].count("DTensor") == 3
    for name, p in sharded.named_parameters():
        assert type(p.grad) is type(expected[name])
        whole = [getattr(g, "to_local", lambda g=g: g)() for g in (p.grad, expected[name])]
        torch.testing.assert_close(*whole)
