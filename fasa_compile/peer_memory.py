"""Small collectives of a compiled graph go through the GPUs' memory (``triton_kernels/peers.py``) and not through NCCL.

A pass over the ATen graph that Inductor has before it makes kernels, since that is where a sharded model's collectives are seen: DTensors'
all-reduces among them, and the gathers of ``sharded_decode``. The numbers stay those of the process group's, up to the order of a sum.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from fasa_compile.triton_kernels.ops import KERNEL_VERSION, MOST_BYTES, MOST_RANKS

log = logging.getLogger("fasa_compile")

_SUMMED = (torch.float32, torch.float16, torch.bfloat16)


class ThroughPeers(CustomGraphPass):
    """Inductor's ``post_grad_custom_pre_pass``, after those that the user may have given."""

    def __init__(self, *before: Callable[[fx.Graph], Any]) -> None:
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        for theirs in self.before:
            theirs(graph)
        replaced = replace_collectives(graph)
        log.info("%d collectives go through the GPUs' memory", replaced)

    def uuid(self) -> Any:
        """What compiled graphs are cached by; None, no caching, where a pass of the user's has nothing to tell it by."""
        theirs = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.before]
        return None if None in theirs else (get_hash_for_files((__file__,)), KERNEL_VERSION, *theirs)


def replace_collectives(graph: fx.Graph) -> int:
    """Puts ``fasa::peer_all_reduce`` and ``fasa::peer_all_gather`` where an all-reduce or all-gather of few bytes is waited for; how many."""
    c10d, replaced = torch.ops._c10d_functional, 0
    for wait in graph.find_nodes(op="call_function", target=c10d.wait_tensor.default):
        collective = wait.args[0]
        if not isinstance(collective, fx.Node) or len(collective.users) != 1 or not _is_small(collective):
            continue
        x, *how = collective.args  # a sum and the group, or the number of processes and the group
        if collective.target is c10d.all_reduce.default:
            peers, how = torch.ops.fasa.peer_all_reduce.default, how[1:]
        else:
            peers = torch.ops.fasa.peer_all_gather.default
        with graph.inserting_before(wait):
            made = graph.call_function(peers, (x, *how), {"version": KERNEL_VERSION})
        made.meta = {name: wait.meta[name] for name in ("val", "stack_trace") if name in wait.meta}
        wait.replace_all_uses_with(made)
        graph.erase_node(wait)
        graph.erase_node(collective)
        replaced += 1
    return replaced


def _is_small(node: fx.Node) -> bool:
    c10d = torch.ops._c10d_functional
    if node.target not in (c10d.all_reduce.default, c10d.all_gather_into_tensor.default):
        return False
    x: Any = node.args[0].meta.get("val")  # type: ignore[union-attr]
    if not isinstance(x, torch.Tensor) or x.dim() == 0 or not all(isinstance(n, int) for n in x.shape):
        return False
    if node.target is c10d.all_reduce.default and (node.args[1] != "sum" or x.dtype not in _SUMMED):
        return False
    size = math.prod(x.shape) * x.element_size()
    return _on_gpu(x) and 0 < size <= MOST_BYTES and size % 4 == 0 and _ranks(str(node.args[2])) <= MOST_RANKS


def _on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


def _ranks(group: str) -> int:
    return dist.get_world_size(dist.distributed_c10d._resolve_process_group(group))  # type: ignore[arg-type, attr-defined]


def with_peer_memory(options: dict[str, Any]) -> dict[str, Any]:
    """Inductor's ``options`` with the pass among them."""
    name = "post_grad_custom_pre_pass"
    given = options.get(name)
    before = given if isinstance(given, list | tuple) else [] if given is None else [given]
    return {**options, name: ThroughPeers(*before)}
