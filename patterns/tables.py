"""Values of the graph that do not depend on what the tokens say: cos and sin tables, positions, indices, norm weights.

They are computed for real, on small CPU tensors, from the graph's example inputs. Everything downstream of a projection is
*data* and is never computed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fasa_compile.capture import Shadow
from fasa_compile.patterns import graph
from fasa_compile.patterns.graph import Unreadable

DATA, PARAMETER, POSITION, INPUT = 1, 2, 4, 8

_LARGEST = 1 << 26  # elements of a table that may be computed: a 32k-token table of 128 dims is 2^22

#: Contractions: a projection of the tokens is one of these. Outer products (inverse frequencies by positions) are not.
_CONTRACTIONS = frozenset(
    [
        "linear",
        "addmm",
        "mm",
        "bmm",
        "matmul",
        "einsum",
        "baddbmm",
        "addbmm",
        "mv",
        "dot",
        "convolution",
        "conv1d",
        "conv2d",
        "conv_transpose1d",
        "_scaled_mm",
    ]
)
#: What attention and recurrences make is data whatever they are made of.
_MIXERS = frozenset(["scaled_dot_product_attention", "softmax", "_softmax", "scaled_dot_product_flash_attention"])


def _contracts(node: fx.Node) -> bool:
    """Whether more than one term is summed per element of the result."""
    kind = graph.name(node)
    if kind == "einsum":
        equation, operands = graph.args(node)[:2]
        sides = str(equation).replace(" ", "").replace("...", "").split("->")
        terms = sides[0].split(",")
        kept = sides[1] if len(sides) > 1 else "".join(c for c in sides[0] if sides[0].count(c) == 1)
        extent = {
            c: graph.hint(graph.tensor(op).shape[i - len(t)])
            for t, op in zip(terms, operands, strict=True)
            for i, c in enumerate(t)
        }
        return any(c not in kept and extent[c] > 1 for t in terms for c in t)
    first = {"addmm": 1, "baddbmm": 1, "addbmm": 1}.get(kind, 0)
    if kind in ("mm", "bmm", "matmul", "linear", "mv", "dot") or first:
        return graph.hint(graph.tensor(graph.args(node)[first]).shape[-1]) > 1
    return True


@dataclass(frozen=True)
class Marks:
    """For every shadow node, what its value is made of: a set of DATA, PARAMETER, POSITION and INPUT (other floats) bits."""

    bits: dict[fx.Node, int]

    def is_data(self, node: fx.Node) -> bool:
        return bool(self.bits.get(node, DATA) & DATA)

    def is_input(self, node: fx.Node) -> bool:
        """Made of float inputs of the graph that are no parameters, and of nothing else."""
        return self.bits.get(node, DATA) == INPUT and graph.is_tensor(node) and graph.tensor(node).is_floating_point()

    def is_lane_weight(self, node: fx.Node) -> bool:
        """A learned factor that does not depend on the position, such as a norm's weight."""
        return self.bits.get(node, DATA) & (PARAMETER | POSITION | DATA) == PARAMETER


def mark(shadow: Shadow, data_inputs: frozenset[fx.Node] = frozenset()) -> Marks:
    """One pass over the graph. ``data_inputs`` are placeholders known to hold data (queries that arrive ready-made)."""
    bits: dict[fx.Node, int] = {}
    example = dict(zip(shadow.inputs, shadow.example_inputs, strict=True))
    for node in shadow.gm.graph.nodes:
        if node.op == "placeholder":
            value = example.get(node)
            if node in data_inputs:
                bits[node] = DATA
            elif isinstance(value, torch.nn.Parameter):
                bits[node] = PARAMETER
            elif isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
                bits[node] = INPUT
            else:
                bits[node] = POSITION
            continue
        if is_size(node):  # a size says how many tokens there are, not what they say
            bits[node] = POSITION
            continue
        made_of = 0
        for source in node.all_input_nodes:
            made_of |= bits[source]
        if node.op == "call_function":
            kind = graph.name(node)
            if kind == "arange":
                made_of |= POSITION
            elif kind in _CONTRACTIONS:
                if made_of & (DATA | PARAMETER) and _contracts(node):
                    made_of |= DATA
            elif kind in _MIXERS or ("." in kind and not kind.startswith(("prims.", "_operator."))):
                made_of |= DATA
        bits[node] = made_of
    return Marks(bits)


class Tables:
    """Evaluates table nodes, each once. ``moved`` replaces the values of some placeholders."""

    def __init__(self, shadow: Shadow, marks: Marks, moved: Mapping[fx.Node, Any] | None = None) -> None:
        self.shadow, self.marks = shadow, marks
        self.leaves: set[fx.Node] = set()  # the placeholders that were read
        self.straight: dict[fx.Node, bool] = {}  # whether a node is a way to attention scores, as far as it was asked
        self._example = dict(zip(shadow.inputs, shadow.example_inputs, strict=True))
        self._moved = dict(moved or {})
        self._known: dict[fx.Node, Any] = {}
        self._arrays: dict[fx.Node, np.ndarray] = {}

    def example(self, leaf: fx.Node) -> Any:
        """The value of a placeholder or a size, on the CPU."""
        value = self._example.get(leaf, leaf.meta.get("val"))
        return value.detach().cpu() if isinstance(value, torch.Tensor) else graph.hint(value)

    def value(self, node: fx.Node) -> Any:
        """The node's value on the CPU (a tensor, or a number). Raises ``Unreadable`` for data and for very large values."""
        with _disable_current_modes(), torch.no_grad():
            return self._value(node)

    def array(self, node: fx.Node) -> np.ndarray:
        """The value as a float64 (or complex128, int64, bool) array."""
        if (known := self._arrays.get(node)) is None:
            value = self.value(node)
            if value.is_floating_point():
                value = value.double()
            elif value.is_complex():
                value = value.to(torch.complex128)
            known = self._arrays[node] = value.resolve_conj().numpy()
        return known

    def _value(self, node: fx.Node) -> Any:
        todo = [node]
        while todo:
            head = todo[-1]
            if head in self._known:
                todo.pop()
                continue
            if self.marks.is_data(head):
                raise Unreadable(f"{head.name} depends on the tokens")
            if graph.is_tensor(head) and int(np.prod(graph.shape(head))) > _LARGEST:
                raise Unreadable(f"{head.name} is too large to compute while matching")
            missing = [n for n in head.all_input_nodes if n not in self._known and not is_size(head)]
            if missing:
                todo.extend(missing)
                continue
            todo.pop()
            self._known[head] = self._compute(head)
        return self._known[node]

    def _compute(self, node: fx.Node) -> Any:
        if is_size(node):
            return self._moved.get(node, graph.hint(node.meta["val"]))
        if node.op == "placeholder":
            self.leaves.add(node)
            if node in self._moved:
                return self._moved[node]
            value = self._example[node]
            return value.detach().cpu() if isinstance(value, torch.Tensor) else graph.hint(value)
        if node.op == "get_attr":
            owner: Any = self.shadow.gm
            for part in str(node.target).split("."):
                owner = getattr(owner, part)
            if isinstance(owner, torch.Tensor) and type(owner) not in (torch.Tensor, torch.nn.Parameter):
                raise Unreadable(f"the constant {node.target} has no value")
            return owner.detach().cpu() if isinstance(owner, torch.Tensor) else owner
        if node.op != "call_function" or not callable(node.target):
            raise Unreadable(f"{node.name} is not a call")
        args, kwargs = fx.map_arg((graph.args(node), dict(node.kwargs)), lambda n: self._known[n])
        args, kwargs = _on_cpu(args), _on_cpu(kwargs)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        try:
            return node.target(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise Unreadable(f"{node.name} could not be computed: {str(error).splitlines()[0]}") from error


def is_size(node: fx.Node) -> bool:
    """A size, stride or offset of a tensor, read as a number."""
    return graph.name(node).startswith("sym_")


def _on_cpu(x: Any) -> Any:
    if isinstance(x, torch.device):
        return torch.device("cpu")
    if isinstance(x, (list, tuple)):
        return type(x)(_on_cpu(y) for y in x) if type(x) in (list, tuple) else [_on_cpu(y) for y in x]
    if isinstance(x, dict):
        return {k: _on_cpu(v) for k, v in x.items()}
    return graph.hint(x)
