"""Which collectives of a graph go through the GPUs' memory. What they compute is tested in Triton's interpreter and on two GPUs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fasa_compile import fasa_backend, peer_memory
from fasa_compile.peer_memory import ThroughPeers, replace_collectives, with_peer_memory

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
C10D = torch.ops._c10d_functional


@pytest.fixture
def group() -> Iterator[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield str(dist.group.WORLD.group_name)
    dist.destroy_process_group()


def graph_of(x: Any, collective: Any, *arguments: Any) -> fx.Graph:
    graph = fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = x
    sent = graph.call_function(collective, (given, *arguments))
    graph.output(graph.call_function(C10D.wait_tensor.default, (sent,)))
    return graph


def targets(graph: fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def fake(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda:0") -> Any:
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device=device)


def test_small_sums_and_gathers_are_replaced(group: str) -> None:
    graph = graph_of(fake(4, 1, 4096), C10D.all_reduce.default, "sum", group)
    assert replace_collectives(graph) == 1 and targets(graph) == ["fasa.peer_all_reduce.default"]
    graph = graph_of(fake(8, 9, dtype=torch.int64), C10D.all_gather_into_tensor.default, 1, group)
    assert replace_collectives(graph) == 1 and targets(graph) == ["fasa.peer_all_gather.default"]
    assert [n.args[1:3] for n in graph.nodes if n.op == "call_function"] == [(1, group)]
    graph.lint()


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        (lambda: fake(64, 4097), "sum"),  # more bytes than fit
        (lambda: fake(3), "sum"),  # no whole words
        (lambda: fake(4, 8, device="cpu"), "sum"),
        (lambda: fake(4, 8, dtype=torch.int32), "sum"),
        (lambda: fake(4, 8), "max"),
        (lambda: fake(0, 8), "sum"),
    ],
)
def test_others_stay_with_the_process_group(group: str, x: Any, kind: str) -> None:
    graph = graph_of(x(), C10D.all_reduce.default, kind, group)
    before = targets(graph)
    assert replace_collectives(graph) == 0 and targets(graph) == before


def test_too_many_processes_stay_with_the_process_group(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "_ranks", lambda name: 9)
    assert replace_collectives(graph_of(fake(4, 8), C10D.all_reduce.default, "sum", group)) == 0


@pytest.mark.parametrize("several", [False, True])
def test_a_pass_of_the_users_runs_first(several: bool) -> None:
    ran: list[fx.Graph] = []
    given: Any = [ran.append] if several else ran.append
    options = with_peer_memory({"post_grad_custom_pre_pass": given, "max_autotune": True})
    chained = options["post_grad_custom_pre_pass"]
    empty = fx.Graph()
    chained(empty)
    assert ran == [empty] and options["max_autotune"] and chained.uuid() is None
    assert ThroughPeers().uuid() == ThroughPeers().uuid() is not None


def test_it_needs_inductor() -> None:
    with pytest.raises(TypeError, match="peer_memory needs inner='inductor'"):
        fasa_backend(None, inner="eager", peer_memory=True)


def test_limits_are_the_kernels() -> None:
    peers = pytest.importorskip("fasa_compile.triton_kernels.peers")
    assert (peers.MOST_BYTES, peers.MOST_RANKS) == (peer_memory.MOST_BYTES, peer_memory.MOST_RANKS)


@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler")
def test_a_compiled_graph_calls_the_operators(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Inductor, on a CPU, where the operators are the process group's collectives."""
    monkeypatch.setattr(peer_memory, "_on_gpu", lambda x: True)
    ran = []
    monkeypatch.setattr(peer_memory, "replace_collectives", lambda graph: ran.append(replace_collectives(graph)))

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = C10D.wait_tensor(C10D.all_reduce(x @ w, "sum", group))
        return y + C10D.wait_tensor(C10D.all_gather_into_tensor(y + 1, 1, group))

    x, w = torch.randn(4, 64), torch.randn(64, 64)
    options = {**with_peer_memory({}), "fx_graph_cache": False}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        got = torch.compile(step, dynamic=False, options=options)(x, w)
    torch.testing.assert_close(got, step(x, w))
    assert ran == [2]
    assert {"fasa::peer_all_reduce", "fasa::peer_all_gather"} <= {e.key for e in seen.key_averages()}


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, capturing: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)


def test_a_workspace_belongs_to_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not to one of the same name that was destroyed, whose memory is gone."""
    peers = pytest.importorskip("fasa_compile.triton_kernels.peers")
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(peers, "_make", lambda processes, device: object())
    found, names = [], []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            names.append(str(dist.group.WORLD.group_name))
            found.append(peers.workspace(names[-1]))
            assert peers.workspace(names[-1]) is found[-1]
        finally:
            dist.destroy_process_group()
    assert names[0] == names[1] and found[0] is not found[1]


def test_what_is_wrong_is_said(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = pytest.importorskip("fasa_compile.triton_kernels.peers")
    on_a_gpu(monkeypatch)

    def fails(processes: Any, device: int) -> Any:
        raise RuntimeError("no access")

    monkeypatch.setattr(peers, "_make", fails)
    with pytest.raises(peers.PeerMemoryError, match=r"cannot exchange .*no access.*Leave peer_memory out"):
        peers.workspace(group)
    on_a_gpu(monkeypatch, capturing=True)
    with pytest.raises(peers.PeerMemoryError, match="run the step once before a CUDA graph is captured"):
        peers.workspace(group)
    for x, add in (
        (torch.ones(peers.MOST_BYTES), False),
        (torch.ones(3, dtype=torch.bfloat16), True),
        (torch.ones(4, dtype=torch.int32), True),
        (torch.ones(0), True),
    ):
        with pytest.raises(ValueError, match="cannot exchange"):
            peers.exchange(x, object(), add=add)
