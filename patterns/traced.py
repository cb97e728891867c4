"""A function of the graph's values, written into the shadow as plain ATen nodes.

Some attentions say in code what they mask: FlexAttention's ``mask_mod`` is a function of indices, a sliding window is two numbers.
A site needs a mask that is a value of the graph. The nodes are added in front of the attention; nothing that was there changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import tracing
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from fasa_compile.capture import Shadow
from fasa_compile.patterns.graph import Unreadable

aten = torch.ops.aten
_TENSOR = torch._C.TensorType.get()
_SAME = (aten.lift_fresh_copy.default, aten.detach_.default, aten.detach.default, aten.alias.default)


class _Scalars(fx.Interpreter):
    """Runs ATen with a symbolic number that stands for a tensor made one: ``vmap`` takes no symbols in their place."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, torch._ops.OpOverload):
            device = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
            wanted = [argument.type.isSubtypeOf(_TENSOR) for argument in target._schema.arguments]
            args = tuple(_scalar(a, device) if tensor else a for a, tensor in zip(args, wanted, strict=False))
        return super().call_function(target, args, kwargs)


def _scalar(value: Any, device: torch.device | None) -> Any:
    if not isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value
    dtype = torch.int64 if isinstance(value, torch.SymInt) else torch.float64
    return aten.scalar_tensor.default(value, dtype=dtype, device=device)


def over_indices(mod: fx.GraphModule, with_score: bool = False) -> Callable[..., torch.Tensor]:
    """``mod(b, h, q, k, *others)`` of scalars, as a function of index vectors: the result is ``[B, H, T, L]``."""
    first: tuple[int | None, ...] = (None,) if with_score else ()

    def apply(*arguments: Any) -> torch.Tensor:
        n = len(arguments) - len(first) - 4
        run: Any = _Scalars(mod).run
        for axis in (3, 2, 1, 0):
            over = tuple(0 if i == axis else None for i in range(4))
            run = torch.vmap(run, in_dims=(*first, *over, *(None,) * n))
        result: torch.Tensor = run(*arguments)
        return result

    return apply


def traced(shadow: Shadow, at: fx.Node, function: Callable[..., torch.Tensor], inputs: Sequence[Any]) -> fx.Node:
    """The node of ``function(*inputs)``; tensors and sizes among ``inputs`` are nodes of the shadow, anything else a constant.

    Raises ``Unreadable`` where the function holds a constant tensor of more than one element, or cannot be traced.
    """
    nodes = [x for x in inputs if isinstance(x, fx.Node)]

    def run(*values: Any) -> torch.Tensor:
        given = iter(values)
        return function(*(next(given) if isinstance(x, fx.Node) else x for x in inputs))

    try:
        with tracing(None), torch.no_grad(), shadow.fake_mode, enable_python_dispatcher():
            # Nodes may share one description of their values, but the trace tells its inputs apart by them.
            values = [v.detach() if isinstance(v := n.meta["val"], torch.Tensor) else v for n in nodes]
            made = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*values)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError) as error:
        raise Unreadable(f"what {at.name} masks could not be traced: {str(error).splitlines()[0]}") from error
    placeholders = made.graph.find_nodes(op="placeholder")
    new: dict[fx.Node, Any] = dict(zip(placeholders, nodes, strict=True))
    device = next(n.meta["val"].device for n in nodes if isinstance(n.meta["val"], torch.Tensor))
    with shadow.gm.graph.inserting_before(at):
        for node in made.graph.nodes:
            if node.op == "get_attr":
                new[node] = _constant(shadow, getattr(made, str(node.target)), device)
            elif node.op == "call_function" and node.target in _SAME:
                new[node] = new[node.args[0]]
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: new[n])
                new[node] = shadow.gm.graph.call_function(node.target, args, kwargs)
                new[node].meta.update(val=node.meta.get("val"), fasa_made=True)
            elif node.op == "output":
                result: fx.Node = new[node.args[0]]
    return result


def _constant(shadow: Shadow, value: torch.Tensor, device: torch.device) -> fx.Node:
    known = value.constant if isinstance(value, torch._subclasses.FakeTensor) else value
    if known is None or known.numel() != 1:
        raise Unreadable("a mask holds a constant tensor that cannot be written into the graph")
    how: dict[str, Any] = {"dtype": known.dtype, "device": device}
    with _disable_current_modes():
        number = known.item()
    node = shadow.gm.graph.call_function(aten.full.default, (list(known.shape), number), how)
    with shadow.fake_mode:
        node.meta.update(val=torch.full(tuple(known.shape), number, **how), fasa_made=True)
    return node
