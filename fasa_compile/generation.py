"""``generate``: the common case in one call, and a clock for what it took."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any, TextIO

import torch

from fasa_compile.backend import FasaBackend, Inner, fasa_backend
from fasa_compile.profiles.schema import FCProfile

_backends: weakref.WeakKeyDictionary[torch.nn.Module, dict[Any, FasaBackend]] = weakref.WeakKeyDictionary()

#: With these, transformers cannot use a static cache, or has been given a cache already.
_OWN_CACHE = ("cache_implementation", "past_key_values", "assistant_model", "prompt_lookup_num_tokens", "cache_config")


@contextmanager
def compiled_forward(model: Any, backend: Any, mode: str | None = None) -> Iterator[None]:
    """Inside, ``model.forward`` is compiled with ``backend``; ``model.generate`` uses it."""
    own = model.__dict__.get("forward")
    model.forward = torch.compile(model.forward, backend=backend, mode=mode)
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own


def generate(
    model: Any,
    inputs: torch.Tensor | Mapping[str, Any],
    *,
    profile: FCProfile | str | PathLike[str] | None,
    inner: Inner = "inductor",
    mode: str | None = None,
    backend: Mapping[str, Any] | None = None,
    **generation: Any,
) -> Any:
    """``model.generate(**inputs, **generation)`` of a transformers model, its decode steps sparse.

    ``inputs``: token ids int64 ``[B, T]``, or what a tokenizer returns. ``profile`` and ``inner``: as for ``fasa_backend``, whose
    other arguments go into ``backend``, e.g. ``backend={"n_fac": 256}``. ``mode``: ``torch.compile``'s; by default
    ``"reduce-overhead"`` on a GPU with Inductor. The cache is static unless ``generation`` says otherwise or, as assisted decoding
    does, needs another one. The model is as it was afterwards; a second call with the same settings compiles nothing anew.
    Returns what ``model.generate`` returns; ``fasa_compile.explain()`` says what happened.
    """
    given = dict(backend or {})
    known = _backends.setdefault(model, {})
    key = (profile if isinstance(profile, str | None) else id(profile), inner, *sorted(given.items()))
    if key not in known:
        known[key] = fasa_backend(profile, inner=inner, **given)
    if mode is None and inner == "inductor" and model.device.type == "cuda":
        mode = "reduce-overhead"
    if not any(generation.get(name) is not None for name in _OWN_CACHE):
        generation["cache_implementation"] = "static"
    # Without it, transformers would compile the model once more around ours, with its own backend, on a GPU.
    generation.setdefault("disable_compile", True)
    given_inputs = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    # An adapted model of PEFT generates with the model inside.
    generating = model.get_base_model() if hasattr(model, "get_base_model") else model
    with compiled_forward(generating, known[key], mode):
        output = model.generate(**given_inputs, **generation)
    if not known[key].saw_decode and generation.get("max_new_tokens") != 1:
        known[key].warn(
            "generate has run, and no decode step over a cache reached the backend: Dynamo ran the model uncompiled or in parts too "
            "small to hold one (hooks that move weights, as device_map with a disk or CPU offload has them; those of a device_map over "
            "several GPUs, which fasa_compile.traceable_device_map(model) replaces; a graph break in a layer)"
        )
    return output


class Clock:
    """A streamer for ``generate`` that notes when each token came. ``times[0]`` is the prompt's, which comes first of all."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        if self.times:
            self.tokens.append(int(value.reshape(-1)[0]))
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def prefill(self) -> float:
        """Seconds from the prompt to the first token."""
        return self.times[1] - self.times[0] if len(self.times) > 1 else 0.0

    def step(self) -> float:
        """Median seconds of a decode step; the first ones may still compile and are not counted where there are others."""
        steps = [b - a for a, b in zip(self.times[1:], self.times[2:], strict=False)]
        return statistics.median(steps[2:] or steps) if steps else 0.0


class Printer(Clock):
    """A ``Clock`` that writes the text as it comes: all of it that later tokens cannot change."""

    def __init__(self, tokenizer: Any, to: TextIO) -> None:
        super().__init__()
        self.tokenizer, self.to, self.done = tokenizer, to, ""

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        # The bytes of a character may come in several tokens; half of one decodes to U+FFFD.
        if not text.endswith("\ufffd"):
            self._write(text)

    def end(self) -> None:
        self._write(self.tokenizer.decode(self.tokens, skip_special_tokens=True) + "\n")

    def _write(self, text: str) -> None:
        self.to.write(text[len(self.done) :])
        self.to.flush()
        self.done = text
