"""Calls that repeat are traced once: the layers of a model are one computation many times over.

What a call becomes in a shadow follows from its operator, its other arguments and the sizes, strides and types of its tensors. So
the second call that has all of these alike is written out from the first: the same nodes with its own tensors in their places, and
no tensor is made for it before a call that is traced reads it.

That holds for tensors that nobody writes. Which ones are written is foreseen from what Dynamo recorded, and checked when all is
traced: ``Repeats.holds`` says no where a tensor was written that was taken for one that is not, and the trace is made again without.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import track_tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import _disable_current_modes

Plain = Callable[[FunctionalTensor], torch.Tensor]


@dataclass(eq=False, slots=True)
class Value:
    """A tensor that nobody writes, by its shadow node.

    ``made`` is the tensor itself, where a traced call gave or read it, and ``fake`` what it wraps.
    """

    node: fx.Node
    kind: int  # equal for tensors that have size, strides, type and device alike
    made: FunctionalTensor | None = None
    fake: torch.Tensor | None = None


@dataclass(frozen=True)
class _Call:
    """A call, told apart by ``key``, and the tensors that it reads, each once."""

    key: tuple[Any, ...]
    inputs: tuple[Value, ...]


@dataclass(frozen=True)
class _Traced:
    """What the first call of a key became."""

    inputs: dict[fx.Node, int]  # the nodes by which it read its tensors, each with the tensor's number
    nodes: tuple[fx.Node, ...]
    names: tuple[str, ...]
    results: tuple[tuple[fx.Node, int], ...]  # of each tensor that it gave: one of inputs or nodes, and its kind
    tree: pytree.TreeSpec


class _Unknown(Exception):
    """An argument of which not all is known: the call is traced."""


def _storages(node: fx.Node) -> list[int]:
    """The storages of a Dynamo node's value, as Dynamo saw them. Views share that of their base."""
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    return [leaf.untyped_storage()._cdata for leaf in leaves if type(leaf) is FakeTensor]


class Repeats:
    """The calls of one trace, and the values that they read and gave."""

    def __init__(self, tracer: Any, fake_mode: FakeTensorMode, writers: Mapping[fx.Node, int], plain: Plain) -> None:
        """``writers`` are the Dynamo nodes that may write, each with its number in the program; ``plain`` gives what a functional
        tensor wraps, brought up to date.

        Methods and Python's own operators are taken to write the tensor that they belong to, other functions any of their arguments.
        """
        self._tracer, self._fake_mode, self._writers, self._plain = tracer, fake_mode, writers, plain
        self._last_write: dict[int, int] = {}  # by storage
        for node, point in writers.items():
            own = node.op == "call_method" or getattr(node.target, "__module__", "") == operator.setitem.__module__
            for argument in node.all_input_nodes[: 1 if own else None]:
                self._last_write.update(dict.fromkeys(_storages(argument), point))
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._like: list[torch.Tensor] = []  # a fake tensor of each kind
        self._traced: dict[tuple[Any, ...], _Traced] = {}
        self._made: list[Value] = []  # those that are tensors too

    def run(self, n: fx.Node, at: int, env: dict[fx.Node, Any], trace: Callable[[], Any]) -> Any:
        """What Dynamo's node ``n`` gives, number ``at`` of the program: written out from a call that was like it, or traced."""
        call = self._call(n, at, env)
        if call is not None and (first := self._traced.get(call.key)) is not None:
            return self._again(first, call.inputs)
        read = self._read_by(call) if call is not None else {}
        last = self._tracer.graph._root.prev
        result = self._kept(n, trace(), at)
        if call is not None:
            self._learn(call, read, result, last)
        if n.op.startswith("call") and n.target not in _NO_STATE and not _says(result):
            self._traced.clear()  # it may change a state that other calls depend on: autocast, say
        return result

    def holds(self) -> bool:
        """Whether no value was written: a functional tensor that was written wraps another tensor."""
        return all(value.made is None or self._plain(value.made) is value.fake for value in self._made)

    # ---- values ---------------------------------------------------------------------------------------------------

    def tensor(self, value: Value) -> FunctionalTensor:
        """The tensor of a value, made where it is read for the first time."""
        if value.made is None:
            with _disable_current_modes(), self._fake_mode, enable_python_dispatcher():
                value.fake = self._like[value.kind].detach()
            track_tensor(value.fake, fx.Proxy(value.node, self._tracer), constant=None, tracer=self._tracer)
            value.made = FunctionalTensor.to_functional(value.fake)
            self._made.append(value)
        return value.made

    def _kept(self, n: fx.Node, result: Any, at: int) -> Any:
        """What ``n`` holds at that point, its tensors as values where nobody writes them later."""
        if any(self._last_write.get(storage, -1) > at for storage in _storages(n)):
            return result

        def value(tensor: FunctionalTensor) -> Value | FunctionalTensor:
            fake = self._plain(tensor)
            slot = self._tracer.tensor_tracker.get(fake)
            if slot is None or slot.constant is not None or fake.layout != torch.strided:
                return tensor
            if type(fake) is not FakeTensor or fake.constant is not None:
                return tensor
            kept = Value(slot.proxy.node, self._kind(fake), tensor, fake)
            self._made.append(kept)
            return kept

        return pytree.tree_map_only(FunctionalTensor, value, result)

    def _kind(self, fake: torch.Tensor) -> int:
        numbers = (*fake.shape, *fake.stride(), fake.storage_offset())
        about = (fake.dtype, fake.device, fake.requires_grad, fake.is_conj(), fake.is_neg())
        key = (*about, *(_number(n) if type(n) is not int else n for n in numbers))
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = len(self._like)
            self._like.append(fake)
        return found

    def _read_by(self, call: _Call) -> dict[fx.Node, int]:
        """The nodes by which a traced call may read its tensors, with their numbers: their own, and that of a cast which changed
        nothing or of a view made anew."""
        tracked = self._tracer.tensor_tracker
        read = {v.node: i for i, v in enumerate(call.inputs)}
        return read | {tracked[v.fake].proxy.node: i for i, v in enumerate(call.inputs) if v.fake is not None}

    # ---- calls ----------------------------------------------------------------------------------------------------

    def _call(self, n: fx.Node, at: int, env: dict[fx.Node, Any]) -> _Call | None:
        """The call that ``n`` is; None where it may write or reads anything else than values and constants.

        What was written for the last time becomes a value in ``env``.
        """
        if n.op not in ("call_function", "call_method") or n in self._writers:
            return None
        if isinstance(n.target, torch._ops.HigherOrderOperator) or n.target is torch._C._log_api_usage_once:
            return None
        inputs: dict[fx.Node, Value] = {}
        places: dict[fx.Node, int] = {}

        def known(x: Any) -> Any:
            if isinstance(x, fx.Node):
                if isinstance(env[x], FunctionalTensor):
                    env[x] = self._kept(x, env[x], at)
                x = env[x]
            if isinstance(x, Value):
                inputs.setdefault(x.node, x)
                return Value, places.setdefault(x.node, len(places)), x.kind
            if isinstance(x, (tuple, list)):
                return type(x), *map(known, x)
            if isinstance(x, slice):
                return slice, known(x.start), known(x.stop), known(x.step)
            if isinstance(x, dict):
                return dict, *((k, known(v)) for k, v in x.items())
            return _number(x)

        try:
            key = (n.op, n.target, known(n.args), known(n.kwargs))
        except _Unknown:
            return None
        return _Call(key, tuple(inputs.values()))

    def _again(self, first: _Traced, inputs: Sequence[Value]) -> Any:
        """What a call gives whose like was traced."""
        here = {node: inputs[i].node for node, i in first.inputs.items()}
        for node, name in zip(first.nodes, first.names, strict=True):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: here.get(a, a))
            copy = self._tracer.graph.create_node("call_function", node.target, args, kwargs, name=name)
            copy.meta = dict(node.meta)
            here[node] = copy
        given = {value.node: value for value in inputs}
        values = [given.get(here[node]) or Value(here[node], kind) for node, kind in first.results]
        return pytree.tree_unflatten(values, first.tree)

    def _learn(self, call: _Call, read: dict[fx.Node, int], result: Any, last: fx.Node) -> None:
        """Takes note of what a call became, ``last`` being the last node before it: the nodes that its results need.

        Among those made in it there may be others: views of a written tensor are brought up to date when they are next read.
        """
        leaves, tree = pytree.tree_flatten(result)
        if not all(isinstance(leaf, Value) for leaf in leaves):
            return
        if any(free_unbacked_symbols(self._like[leaf.kind]) for leaf in leaves):
            return  # sizes that depend on values
        given = {leaf.node for leaf in leaves}
        read = {node: i for node, i in self._read_by(call).items() if node not in given} | read
        # A size is the same number whichever tensor it was read from, so the node that holds one serves all calls; what ``item`` read is not.
        todo, needed = [*given], set[fx.Node]()
        while todo:
            node = todo.pop()
            number = node.meta.get("val")
            if isinstance(number, _NUMBERS):
                if free_unbacked_symbols(number):
                    return
            elif node not in read and node not in needed:
                needed.add(node)
                todo.extend(node.all_input_nodes)
        nodes = []
        while last.next.op != "root":
            last = last.next
            if last in needed and last.op == "call_function":
                nodes.append(last)
        if len(nodes) == len(needed):
            names = tuple(re.sub(r"_\d+$", "", node.name) for node in nodes)
            results = tuple((leaf.node, leaf.kind) for leaf in leaves)
            self._traced[call.key] = _Traced(read, tuple(nodes), names, results, tree)


_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
_CONSTANTS = (int, bool, str, torch.dtype, torch.device, torch.memory_format, torch.layout, type(None), type(...))


#: Calls that give nothing and yet leave no state behind that other calls depend on: what they write is a tensor's.
_NO_STATE = {operator.setitem, "__setitem__", torch._C._log_api_usage_once}


def _says(result: Any) -> bool:
    """Whether there is a tensor or a number in what a call gave."""
    return any(isinstance(x, (Value, FunctionalTensor, *_NUMBERS)) for x in pytree.tree_leaves(result))


def _number(x: Any) -> tuple[Any, ...]:
    """A constant or a symbolic number, told apart also where Python calls them equal (1, 1.0 and True). Raises ``_Unknown``."""
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(x), x.node.expr
    if isinstance(x, (float, complex)):
        return type(x), repr(x)
    if type(x) in _CONSTANTS:
        return type(x), x
    raise _Unknown
