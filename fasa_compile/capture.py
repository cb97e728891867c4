"""Capture: a Dynamo graph -> its functional shadow, an ATen graph in which every value can be traced back to its origin.

The Dynamo graph is what gets rewritten; the shadow is what gets read. In the shadow nothing is mutated: a cache write is a
node whose result feeds the attention, also when the model wrote through a view. Composite operators such as
``scaled_dot_product_attention`` stay whole (pre-dispatch). The two are tied together value by value, at every point of the
program: for each Dynamo node the shadow node of its value when it was made, and again after each write that changed it.

The trace runs on fake tensors in Dynamo's own fake mode, so it allocates nothing, executes nothing and keeps Dynamo's
symbols for sizes. It adds no guards of its own.

Tensor subclasses (DTensors, quantised weights) are not looked into: what is computed from one enters the shadow as the result
of ``fasa::outside``, a value of which only its shape is known.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass, transform_subclass
from torch.utils._pytree import tree_map, tree_map_only

from fasa_compile.repeats import Repeats, Value


@torch.library.custom_op("fasa::outside", mutates_args=())
def outside(
    made_of: Sequence[torch.Tensor], size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Stands in a shadow for what a tensor subclass computed from ``made_of``, of that size. It is never run."""
    raise NotImplementedError("fasa::outside stands for a computation that only the traced model has")


@outside.register_fake
def _(made_of: Sequence[torch.Tensor], size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


@dataclass(frozen=True)
class Shadow:
    """The functional ATen twin of a Dynamo graph.

    ``order`` numbers the Dynamo nodes; ``history[name]`` lists, in program order, ``(order, shadow node)``: the value of that
    Dynamo node from the given point on. ``inputs`` are the shadow's placeholders, one per Dynamo placeholder, and
    ``final[i]`` is input i's value after the whole graph (``inputs[i]`` itself where the graph does not write it).
    ``origin`` names the Dynamo node during which a shadow node was traced.
    """

    gm: fx.GraphModule
    dynamo: fx.GraphModule
    example_inputs: tuple[Any, ...]
    fake_mode: FakeTensorMode
    inputs: tuple[fx.Node, ...]
    final: tuple[fx.Node, ...]
    order: dict[str, int]
    history: dict[str, list[tuple[int, fx.Node]]]
    origin: dict[fx.Node, str]
    relied: set[int] = field(default_factory=set)  # inputs whose values matching has read into a site as numbers
    _holders: dict[fx.Node, list[str]] = field(default_factory=dict)

    def value(self, dynamo_node: str, at: str) -> fx.Node | None:
        """Shadow node of the value that ``dynamo_node`` holds when the Dynamo node ``at`` begins, or None if not a tensor."""
        point, found = self.order[at], None
        for since, node in self.history.get(dynamo_node, ()):
            if since >= point:
                break
            found = node
        return found

    def holder(self, node: fx.Node, at: str) -> str | None:
        """Name of a Dynamo node that holds exactly the value ``node`` when the Dynamo node ``at`` begins; None if there is none."""
        for name in self._holders.get(node, ()):
            if self.value(name, at) is node:
                return name
        return None

    def overlaps_a_written_input(self, i: int) -> bool:
        """Whether another input that the graph writes shares memory with input i, as far as its first and last byte tell.

        Inputs are traced apart: a write to one is not seen in the other.
        """
        mine = _byte_range(self.example_inputs[i])
        for j, other in enumerate(self.example_inputs):
            if j != i and self.is_written(j) and isinstance(other, torch.Tensor):
                theirs = _byte_range(other)
                if mine[0] == theirs[0] and mine[1] < theirs[2] and theirs[1] < mine[2]:
                    return True
        return False

    def is_written(self, i: int) -> bool:
        """Whether the graph writes its i-th input in place."""
        return self.final[i] is not self.inputs[i]

    @cached_property
    def needed(self) -> frozenset[fx.Node]:
        """The nodes that what the graph gives or writes is computed from."""
        todo, seen = [*self.gm.graph.find_nodes(op="output"), *self.final], set()
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo.extend(node.all_input_nodes)
        return frozenset(seen)


def fake_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """Fakes of a backend's example inputs in Dynamo's own fake mode, with Dynamo's symbols for dynamic sizes.

    The ``example_value`` that a placeholder carries belongs to the fake mode of an earlier trace and must not be used here.
    """
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None and context.fake_mode is not None else FakeTensorMode()
    fakes: list[Any] = []
    for example, node in zip(example_inputs, gm.graph.find_nodes(op="placeholder"), strict=True):
        if isinstance(example, torch.Tensor) and not isinstance(example, FakeTensor):
            symbolic = context.tensor_to_context.get(example) if context is not None else None
            source = getattr(node.meta.get("grapharg"), "source", None)
            fake = mode.from_tensor(
                example, static_shapes=True if symbolic is None else None, symbolic_context=symbolic, source=source
            )
            # A Python number that Dynamo made an input is read by item(): it must be Dynamo's symbol, which guards can name.
            number = getattr(node.meta.get("example_value"), "item_memo", None) if example.dim() == 0 else None
            if number is not None and number.node.shape_env is mode.shape_env:
                fake.item_memo = number
            fakes.append(fake)
        else:
            fakes.append(example)
    return mode, fakes


def root_module(paths: Sequence[str]) -> torch.nn.Module | None:
    """The module that Dynamo is compiling, if the frame at hand holds one with submodules at all these paths, else None.

    A frame resumed after a graph break may hold no such module; then nothing can be said about the model as a whole.
    """
    return next(
        (module for module, _ in _modules_in_scope() if paths and all(has_module(module, p) for p in paths)), None
    )


def enclosing_modules(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    """Modules that hold ``module`` and are being called right now, the innermost first, each with the path to ``module``.

    After a graph break Dynamo compiles a part of the model on its own and numbers modules from there; the modules around it
    run as Python below us on the stack.
    """
    frame = sys._getframe(1)
    seen: set[int] = set()
    while frame is not None:
        outer = frame.f_locals.get("self")
        if isinstance(outer, torch.nn.Module) and id(outer) not in seen:
            seen.add(id(outer))
            path = path_in(outer, module)
            if path:
                yield outer, path
        frame = frame.f_back  # type: ignore[assignment]


def path_in(outer: torch.nn.Module, module: torch.nn.Module) -> str | None:
    """The path of ``module`` in ``outer``: "" where they are one, None where it is not in there."""
    return next((path for path, inner in outer.named_modules() if inner is module), None)


def pin_root_module(root: torch.nn.Module) -> None:
    """Have Dynamo compile anew for another module than ``root``.

    Parameters are inputs of a graph, so Dynamo would run one graph for every model of a class; a profile belongs to one model.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard

    for module, source in _modules_in_scope():
        if module is root:
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))
            return


def _modules_in_scope() -> list[tuple[torch.nn.Module, Any]]:
    """Modules that the frame Dynamo compiles holds in its variables, or in tuples of them, each with where it is found."""
    from torch._dynamo.source import GetItemSource, LocalSource
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        scope = dict(InstructionTranslator.current_tx().output.local_scope)
    except AttributeError:  # called by something other than Dynamo
        return []
    found: list[tuple[torch.nn.Module, Any]] = []
    for name, value in scope.items():
        source = LocalSource(name, is_input=True)
        if isinstance(value, torch.nn.Module):
            found.append((value, source))
        elif isinstance(value, tuple):
            found += [(x, GetItemSource(source, i)) for i, x in enumerate(value) if isinstance(x, torch.nn.Module)]
    return found


def has_module(module: torch.nn.Module, path: str) -> bool:
    """Whether ``module`` has a submodule at ``path``; a "#2" for the second run of a module is ignored."""
    try:
        module.get_submodule(path.split("#")[0])
    except AttributeError:
        return False
    return True


def _byte_range(tensor: torch.Tensor) -> tuple[Any, int, int]:
    """A tensor's storage, and its first byte and the one past its last in it."""
    if isinstance(tensor, FakeTensor) or is_foreign(tensor):  # have no storage of their own
        return id(tensor), 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), begin, begin + (int(last) + 1) * tensor.element_size()


def _plain(value: FunctionalTensor) -> torch.Tensor:
    """The traced tensor behind a functional wrapper, brought up to date with writes through its aliases."""
    torch._sync(value)  # type: ignore[attr-defined]
    return torch._from_functional_tensor(value.elem)


def is_foreign(value: Any) -> bool:
    """Whether a value is a tensor subclass that holds other tensors: a DTensor, a quantised weight."""
    return is_traceable_wrapper_subclass(value) and not isinstance(value, FunctionalTensor)


def _storage(value: FunctionalTensor) -> int:
    return value.elem.untyped_storage()._cdata


_IN_PLACE = {"setitem", "__setitem__"} | {
    f"i{name}"
    for name in (
        "add",
        "sub",
        "mul",
        "matmul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    )
}


def may_write(node: fx.Node) -> bool:
    """Whether a Dynamo node may change one of its arguments. Errs on the side of yes: a yes costs one look."""
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    if node.op != "call_function":
        return node.op == "call_module"
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return any(getattr(node.target, o)._schema.is_mutable for o in node.target.overloads())
    name = getattr(node.target, "__name__", str(node.target))
    return (
        name in _IN_PLACE
        or (name.endswith("_") and not name.endswith("__"))
        or "out" in node.kwargs
        or bool(node.kwargs.get("inplace"))
        or any(argument is True for argument in node.args)  # inplace=True may stand among the arguments
        or (isinstance(node.target, torch._ops.HigherOrderOperator) and name != "flex_attention")
    )


def _vmapped(gm: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """The nodes of each outermost ``vmap`` in the graph, from the one that enters it to the one that leaves it, by its first."""
    regions: dict[fx.Node, list[fx.Node]] = {}
    depth, inside = 0, []
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "")
        depth += name == "_vmap_increment_nesting"
        if depth:
            inside.append(node)
        if name == "_vmap_decrement_nesting" and depth:
            depth -= 1
            if not depth:
                regions[inside[0]] = inside
                inside = []
    return regions


#: Methods that a functional tensor of an exporting mode overrides, to assert what it is before each cast: nodes that say nothing here.
_CASTS: dict[str, dict[str, torch.dtype]] = {"to": {}} | {
    name: {"dtype": dtype}
    for name, dtype in (
        ("float", torch.float32),
        ("double", torch.float64),
        ("half", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("int", torch.int32),
        ("long", torch.int64),
        ("bool", torch.bool),
    )
}


def _leaves(env: dict[fx.Node, Any], n: fx.Node) -> list[Any]:
    """What a node's arguments hold, looked for in lists and tuples."""
    return [leaf for a in n.all_input_nodes for leaf in torch.utils._pytree.tree_leaves(env[a])]


def _name(values: Sequence[Any]) -> str:
    return next((type(leaf).__name__ for leaf in torch.utils._pytree.tree_leaves(list(values)) if is_foreign(leaf)), "")


class _Recorder(fx.Interpreter):
    """Runs the Dynamo graph on functional tensors and notes which shadow node each value is."""

    def __init__(self, gm: fx.GraphModule, fake_mode: FakeTensorMode, repeats: bool) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._fake_mode = fake_mode
        self._writers = {node: i for i, node in enumerate(gm.graph.nodes) if may_write(node)}
        self._foreign = False  # whether a tensor subclass has been met
        self.order = {node.name: i for i, node in enumerate(gm.graph.nodes)}
        self.history: dict[str, list[tuple[int, fx.Node]]] = {}
        self.origin: dict[fx.Node, str] = {}
        self._aliases: dict[int, list[fx.Node]] = {}
        self._tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
        self.repeats = Repeats(self._tracer, fake_mode, self._writers, _plain) if repeats else None
        self._last = self._tail()
        self._regions = _vmapped(gm)
        self._inside = {node for region in self._regions.values() for node in region}
        self._ready: dict[fx.Node, Any] = {}

    def _tail(self) -> fx.Node:
        return self._tracer.graph._root.prev

    def _shadow(self, value: FunctionalTensor) -> fx.Node | None:
        slot = get_proxy_slot(_plain(value), self._tracer, None)
        return slot.proxy.node if slot is not None else None

    def _held(self, node: fx.Node) -> Any:
        """The value of a Dynamo node, in tensors."""
        value = self.env[node]
        return tree_map_only(Value, self.repeats.tensor, value) if self.repeats is not None else value

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = super().fetch_args_kwargs_from_env(n)
        return tree_map_only(Value, self.repeats.tensor, found) if self.repeats is not None else found

    def _note(self, name: str, value: FunctionalTensor | Value, point: int) -> None:
        node = value.node if isinstance(value, Value) else self._shadow(value)
        past = self.history.setdefault(name, [])
        if node is not None and not (past and past[-1][1] is node):
            past.append((point, node))

    def _run_vmapped(self, region: list[fx.Node]) -> None:
        """Evaluate a ``vmap`` as the ATen nodes it is made of: functional tensors cannot be batched before dispatch."""
        inside = set(region)
        given = list(dict.fromkeys(n for node in region for n in node.all_input_nodes if n not in inside))
        wanted = [node for node in region if any(user not in inside for user in node.users)]
        body = fx.Graph()
        copies = {node: body.placeholder(node.name) for node in given}
        for node in region:
            copies[node] = body.node_copy(node, copies.__getitem__)
        body.output([copies[node] for node in wanted])
        values = [self._held(node) for node in given]
        plain = [_plain(v) if isinstance(v, FunctionalTensor) else v for v in values]
        mode = next((p.fake_mode for p in plain if isinstance(p, FakeTensor)), None) or FakeTensorMode()
        with _disable_current_modes(), mode, enable_python_dispatcher():
            flat = make_fx(fx.GraphModule(self.module, body), tracing_mode="real", _allow_non_fake_inputs=True)(*plain)
        self._ready.update(zip(wanted, fx.Interpreter(flat).run(*values), strict=True))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.nn.functional.dropout:
            given = inspect.signature(target).bind(*args, **kwargs).arguments
            if not given.get("training", True):
                return given[
                    "input"
                ]  # as it is: an exporting mode takes it for a tensor of its own, which nothing may write
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in _CASTS and isinstance(args[0], FunctionalTensor):
            to: Any = torch.Tensor.to
            return to(*args, **kwargs, **_CASTS[target])
        return super().call_method(target, args, kwargs)

    def _run_outside(self, n: fx.Node) -> Any:
        """Evaluate a node that takes a tensor subclass on plain fakes; plain results come back as ``fasa::outside``."""
        given = [self._held(a) for a in n.all_input_nodes]
        plain = [v for v in given if isinstance(v, FunctionalTensor)]
        if plain and may_write(n):
            raise NotImplementedError(
                f"{n.name} ({n.target}) may write a tensor, and a {_name(given)} takes part in it"
            )
        env = {a: tree_map_only(FunctionalTensor, _plain, self._held(a)) for a in n.all_input_nodes}
        with _disable_current_modes(), self._fake_mode, enable_python_dispatcher():
            args, kwargs = fx.map_arg((n.args, dict(n.kwargs)), env.__getitem__)
            found = getattr(self, n.op)(n.target, args, kwargs)

        def enter(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or is_foreign(value):
                return value
            return outside(plain, list(value.shape), value.dtype, value.device)

        return tree_map(enter, found)

    def run_node(self, n: fx.Node) -> Any:
        point = self.order[n.name]
        if n in self._regions:
            self._run_vmapped(self._regions[n])
        if self.repeats is None or n in self._inside or n.op == "output":
            result = self._trace(n)
        else:
            result = self.repeats.run(n, point, self.env, lambda: self._trace(n))
        if isinstance(result, (FunctionalTensor, Value)):
            self._note(n.name, result, point)
        if isinstance(result, FunctionalTensor):
            self._aliases.setdefault(_storage(result), []).append(n)
        if n in self._writers:
            for argument in n.all_input_nodes:
                value = self.env.get(argument)
                if isinstance(value, FunctionalTensor):
                    for alias in self._aliases.get(_storage(value), ()):
                        current = result if alias is n else self.env[alias]
                        if isinstance(current, FunctionalTensor):
                            self._note(alias.name, current, point)
        node = self._tail()
        while node is not self._last and node.op != "root":
            self.origin.setdefault(node, n.name)
            node = node.prev
        self._last = self._tail()
        return result

    def _trace(self, n: fx.Node) -> Any:
        if self._foreign and n.op not in ("placeholder", "output") and any(map(is_foreign, _leaves(self.env, n))):
            result = self._run_outside(n)
        else:
            result = self._ready.get(n) if n in self._inside else super().run_node(n)
        if is_foreign(result):  # an input, or made of plain tensors as DTensor.from_local does
            self._foreign = True
            result = transform_subclass(result, lambda _, t: _plain(t) if isinstance(t, FunctionalTensor) else t)
        return result


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A trace makes so many objects that Python's collector, which looks at all that live, would run again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Shadow:
    """Trace a Dynamo graph into its functional shadow.

    Called inside a ``torch.compile`` backend; ``gm`` and ``example_inputs`` are what Dynamo passes. Neither is changed, and
    no kernel runs. Raises whatever the trace raises; the caller leaves the graph alone then and says so.
    """
    with no_garbage_collection():
        shadow = _capture(gm, example_inputs, repeats=True)
        if shadow is None:
            shadow = _capture(gm, example_inputs, repeats=False)
    assert shadow is not None
    return shadow


def _capture(gm: fx.GraphModule, example_inputs: Sequence[Any], repeats: bool) -> Shadow | None:
    """``capture``, with calls that repeat traced once or each time; None if they do not repeat after all."""
    mode, fakes = fake_inputs(gm, example_inputs)
    recorder: _Recorder | None = None
    placeholders: list[fx.Node] = []
    finals: list[fx.Node] = []
    holds = True

    def run(*arguments: Any) -> Any:
        nonlocal recorder, holds
        with FunctionalTensorMode(pre_dispatch=True, export=True):
            wrapped = [FunctionalTensor.to_functional(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            wrapped = [fake if is_foreign(fake) else a for fake, a in zip(fakes, wrapped, strict=True)]
            recorder = _Recorder(gm, mode, repeats)
            placeholders.extend(recorder._tracer.graph.find_nodes(op="placeholder"))
            outputs = recorder.run(*wrapped)
            holds = recorder.repeats is None or recorder.repeats.holds()
            for given, node in zip(wrapped, placeholders, strict=True):
                final = recorder._shadow(given) if isinstance(given, FunctionalTensor) else None
                finals.append(final if final is not None else node)
            plain = tree_map_only(FunctionalTensor, _plain, outputs)
            return tree_map(lambda value: None if is_foreign(value) else value, plain)

    trace = make_fx(
        run,
        pre_dispatch=True,
        tracing_mode="real",
        _allow_non_fake_inputs=True,
        _disable_torch_fn_metadata_mode=True,  # no names of torch functions on nodes: nobody reads them
    )
    with tracing(None), torch.no_grad(), mode, enable_python_dispatcher():
        # A tensor subclass has a placeholder that nothing reads.
        given = [torch.empty(0, dtype=x.dtype, device=x.device) if is_foreign(x) else x for x in fakes]
        shadow = trace(*given)
    assert recorder is not None
    if not holds:
        return None

    holders: dict[fx.Node, list[str]] = {}
    for name, past in recorder.history.items():
        for _, node in past:
            holders.setdefault(node, []).append(name)
    return Shadow(
        gm=shadow,
        dynamo=gm,
        example_inputs=tuple(example_inputs),
        fake_mode=mode,
        inputs=tuple(placeholders),
        final=tuple(finals),
        order=recorder.order,
        history=recorder.history,
        origin=recorder.origin,
        _holders=holders,
    )
