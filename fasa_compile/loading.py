"""Models for the command line: a local Hugging Face folder, a GGUF file, a config.json or the name of one that ships -> a model, whole
or as a skeleton.

A skeleton has the modules, shapes and rotary tables of the real model and weights that nobody has written: memory that is asked for
and never touched. ``survey`` has Dynamo trace a prefill and a decode step of it, shows the graphs to the backend, and runs nothing:
what a graph returns are tensors of the right shapes. An 8B model at 128k tokens is looked at in seconds on a laptop.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx, nn

from fasa_compile.backend import FasaBackend
from fasa_compile.errors import ModelError

#: Configurations that ship, by name: ``NAME.json``. What is timed or explained needs a model's shapes, not its weights.
SHAPES = Path(__file__).with_name("shapes")
#: Tensors up to this many bytes are zeros where a graph is not run; larger ones are memory that is never touched.
_ZEROED = 1 << 20


@dataclass(frozen=True)
class Source:
    """What was named: ``folder`` holds a config.json (``config``), or that and weights (``folder``), or a GGUF ``file`` (``gguf``)."""

    kind: Literal["folder", "config", "gguf"]
    folder: Path
    file: str = ""

    @property
    def name(self) -> str:
        return self.file or self.folder.resolve().name

    @property
    def has_weights(self) -> bool:
        return self.kind != "config"


def source(path: str | Path) -> Source:
    """What lies at ``path``, or ships by that name. Raises ``ModelError`` that says what was expected."""
    place = Path(path).expanduser()
    if place.is_dir():
        if not (place / "config.json").is_file():
            found = sorted(p.name for p in place.glob("*.gguf"))
            hint = f"It holds {found[0]}: name that file." if found else "A model folder of Hugging Face has one."
            raise ModelError(f"{place}: expected a config.json in this folder, found none. {hint}")
        weights = any(True for pattern in ("*.safetensors", "*.bin") for _ in place.glob(pattern))
        return Source("folder" if weights else "config", place)
    if place.is_file() and place.suffix == ".gguf":
        return Source("gguf", place.parent, place.name)
    if place.is_file() and place.suffix == ".json":
        return Source("config", place.parent, place.name)
    if place.exists():
        raise ModelError(
            f"{place}: expected a model folder, a .gguf file or a config.json, found a {place.suffix or 'file'}"
        )
    shipped = sorted(p.stem for p in SHAPES.glob("*.json"))
    if str(path) in shipped:
        return Source("config", SHAPES, f"{path}.json")
    raise ModelError(
        f"{place}: there is no such file or folder. Give a local model folder (download one with `hf download NAME --local-dir "
        f"DIR`), a .gguf file, a config.json, or shapes that ship: {', '.join(shipped)}"
    )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ModelError(
            "this command needs transformers: pip install 'fasa-compile[demo]' (models of other libraries: use the Python API)"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def configuration(found: Source, layers: int | None = None) -> Any:
    """The model's configuration as transformers reads it, cut to its first ``layers`` layers where that is given."""
    transformers = _transformers()
    try:
        if found.kind == "gguf":
            config = transformers.AutoConfig.from_pretrained(found.folder, gguf_file=found.file)
        elif found.kind == "config" and found.file:
            given = json.loads((found.folder / found.file).read_text(encoding="utf-8"))
            kind = given.pop("model_type", None)
            if not kind:
                raise ModelError(f"{found.folder / found.file}: expected a model_type, found none")
            config = transformers.AutoConfig.for_model(kind, **given)
        else:
            config = transformers.AutoConfig.from_pretrained(found.folder)
    except ModelError:
        raise
    except Exception as problem:
        raise ModelError(
            f"{found.folder / found.file}: transformers cannot read the configuration: {_line(problem)}"
        ) from problem
    text = config.get_text_config(decoder=True)
    if layers is not None:
        if not 1 <= layers <= text.num_hidden_layers:
            raise ModelError(f"--layers: expected 1 to {text.num_hidden_layers}, found {layers}")
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == text.num_hidden_layers:
                setattr(text, name, value[:layers])
        text.num_hidden_layers = layers
    return config


def _line(problem: BaseException) -> str:
    """The first line of an exception's text."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[0][:300]


@contextlib.contextmanager
def _without_weights(dtype: torch.dtype) -> Iterator[None]:
    """Inside, every parameter that a module registers goes to the meta device; buffers (rotary tables) stay real."""
    register, before = nn.Module.register_parameter, torch.get_default_dtype()

    def meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:  # one that is there already is tied to another module's
            kind, flag = type(param), param.requires_grad
            self._parameters[name] = kind(param.to("meta"), requires_grad=flag)

    nn.Module.register_parameter = meta  # type: ignore[method-assign]
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        torch.set_default_dtype(before)


def skeleton(config: Any, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The causal LM of a configuration with weights that nobody wrote, on the CPU in ``dtype``. It must not be run."""
    transformers = _transformers()
    try:
        with _without_weights(dtype):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as problem:
        raise ModelError(f"no causal LM can be made of this {type(config).__name__}: {_line(problem)}") from problem
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=False)
                module._parameters[name] = made[id(parameter)]
    return model.eval().requires_grad_(False)


def random_model(config: Any, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Any:
    """The causal LM of a configuration with random weights (seed 0), made on ``device``; ``dtype`` as for ``load``."""
    device = torch.device(device)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return _transformers().AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def load(found: Source, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """``(model, tokenizer)``: in eval mode on ``device``, float32 on a CPU and bfloat16 elsewhere unless ``dtype`` is given.

    A configuration alone gives random weights (seed 0). The tokenizer is None where there is none.
    """
    transformers = _transformers()
    device = torch.device(device)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    extra = {"gguf_file": found.file} if found.kind == "gguf" else {}
    try:
        if found.has_weights:
            model = transformers.AutoModelForCausalLM.from_pretrained(found.folder, dtype=dtype, **extra)
        else:
            model = random_model(configuration(found), device, dtype)
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        raise ModelError(f"{found.folder / found.file}: the model cannot be loaded: {_line(problem)}") from problem
    tokenizer = None
    with contextlib.suppress(Exception):  # no tokenizer among the files: commands that need one say so
        tokenizer = transformers.AutoTokenizer.from_pretrained(found.folder, **extra)
    return model.to(device).eval().requires_grad_(False), tokenizer


# --- looking without running ---------------------------------------------------------------------------------------------


def _shaped(node: Any) -> Any:
    """A value of the shape that Dynamo recorded for a graph's output."""
    example = node.meta.get("example_value") if isinstance(node, fx.Node) else node
    if not isinstance(example, torch.Tensor):
        return example
    shape, stride = [int(n) for n in example.shape], [int(n) for n in example.stride()]
    made = torch.empty_strided(shape, stride, dtype=example.dtype, device=example.device)
    return made.zero_() if made.nbytes <= _ZEROED else made


def shapes_only(gm: fx.GraphModule) -> Callable[..., Any]:
    """A callable in place of a graph: it computes nothing and returns tensors of the shapes that Dynamo recorded.

    An output that is an input is handed back as it is.
    """
    inputs = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    (output,) = gm.graph.find_nodes(op="output")

    def call(*arguments: Any) -> Any:
        return fx.map_arg(output.args[0], lambda node: arguments[inputs[node]] if node in inputs else _shaped(node))

    return call


@torch.no_grad()
def survey(
    model: Any, backend: FasaBackend, *, length: int, batch: int = 1, cache: str = "static", prompt: int = 4
) -> None:
    """Shows ``backend`` the graphs of a decode step of a skeleton over a cache of ``length`` tokens; ``backend.explain()`` then
    says what becomes of each attention.

    ``cache``: ``static``, or ``dynamic`` (``length`` tokens grown by concatenation). Raises ``ModelError`` where the model
    cannot be traced.
    """
    from transformers import DynamicCache, StaticCache

    def look(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        backend(gm, example_inputs)
        return shapes_only(gm)

    def shape(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return shapes_only(gm)

    text = model.config.get_text_config(decoder=True)
    made = StaticCache(config=text, max_cache_len=length) if cache == "static" else DynamicCache(config=text)
    first = prompt if cache == "static" else length - 1
    try:
        with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=512):
            # The prefill is not shown: it makes the cache. Not run either, it leaves counters at zero, which is no matter.
            for take, count in ((shape, first), (look, 1)):
                torch._dynamo.reset()
                ids = torch.zeros((batch, count), dtype=torch.long)
                torch.compile(model, backend=take, dynamic=False)(ids, past_key_values=made, use_cache=True)
    except Exception as problem:
        raise ModelError(
            f"a decode step of {type(model).__name__} cannot be traced here: {_line(problem)}"
        ) from problem
    finally:
        torch._dynamo.reset()
