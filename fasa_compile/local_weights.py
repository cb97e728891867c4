"""Sharded weights (DTensors) enter a compiled graph as the local tensors that they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fasa_compile.rewrite import copy_graph
from fasa_compile.sharding import is_dtensor

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def local_weights(inner: Compiler) -> Compiler:
    """The compiler ``inner``, whose graphs make a weight's DTensor of its local tensor themselves, once, while they are traced.

    PyTorch takes the DTensors among a graph's inputs apart in Python in each call; where there are hundreds that takes longer than a
    decode step's kernels. A graph that records gradients is left as it is.
    """

    def compile(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        taken = {} if torch.is_grad_enabled() else _sharded_weights(gm, example_inputs)
        if not taken:
            return inner(gm, example_inputs)
        twin, examples = copy_graph(gm), list(example_inputs)
        placeholders = twin.graph.find_nodes(op="placeholder")
        place = placeholders[-1]
        for i, example in taken.items():
            node = placeholders[i]
            with twin.graph.inserting_after(place):
                place = twin.graph.call_function(_from_local(example), (node,))
            node.replace_all_uses_with(place, delete_user_cb=lambda user, made=place: user is not made)
            place.meta["example_value"] = example
            examples[i] = node.meta["example_value"] = example.to_local()
        twin.recompile()
        compiled = inner(twin, examples)

        def call(*arguments: Any) -> Any:
            return compiled(*(x.to_local() if i in taken else x for i, x in enumerate(arguments)))

        return call

    return compile


def _sharded_weights(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[int, Any]:
    """The graph's inputs, by position, that are parameters and DTensors of fixed sizes: as Dynamo traced them, without numbers."""
    found = {}
    for i, (node, x) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)):
        traced = node.meta.get("example_value")
        if isinstance(x, torch.nn.Parameter) and is_dtensor(x) and is_dtensor(traced):
            assert traced is not None
            if all(isinstance(n, int) for n in traced.shape):
                found[i] = traced
    return found


def _from_local(like: Any) -> Callable[[Tensor], Any]:
    """What makes a DTensor as ``like`` is of its local tensor."""
    from torch.distributed.tensor import DTensor

    mesh, placements, shape, stride = like.device_mesh, like.placements, like.shape, like.stride()

    def from_local(local: Tensor) -> Any:
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    return from_local
