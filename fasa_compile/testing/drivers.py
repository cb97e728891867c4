"""How the checks run a model: what it takes, and where its keys and values are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Driver:
    """Tells the checks how to run a model. Subclass it for a model of your own: ``new_cache`` and ``call`` are all that is needed.

    ``kinds``       names of the kinds of cache that ``new_cache`` makes
    ``rows``        the most sequences a batch may have; with 1, checks that need neighbours are left out
    ``padding``     whether ``call`` takes ``keep``
    ``vocabulary``  token ids are below it
    ``length``      slots of a cache; contexts stay below it. Small is fast: 64 is enough
    ``crops``       whether a cache can go back to a shorter length (``crop``)
    """

    kinds: tuple[str, ...] = ("static",)
    rows: int = 1
    padding: bool = False
    vocabulary: int = 64
    length: int = 64
    crops: bool = True

    def new_cache(self, model: nn.Module, kind: str, rows: int) -> Any:
        """An empty cache for ``rows`` sequences. A model that holds its cache empties it and returns None."""
        raise NotImplementedError

    def call(self, step: Any, ids: Tensor, start: int, cache: Any, keep: Tensor | None = None) -> Tensor:
        """``step`` (the model, or the model compiled) on tokens ``ids [B, T]`` whose first is the ``start``-th of the context.

        ``keep``: bool ``[B, start + T]``, False where a row is padded on the left; positions then count from the first token kept.
        Returns logits ``[B, T, V]``.
        """
        raise NotImplementedError

    def keys_values(self, model: nn.Module, cache: Any) -> list[tuple[Tensor, Tensor]]:
        """Views of each layer's live keys and values, ``[B, Hkv, L, *]``; without them no check writes into a cache."""
        return []

    def host_cache(self, model: nn.Module, rows: int) -> Any:
        """An empty static cache whose K and V lie in host memory (``fasa_compile.offloaded_cache``); None where there is none."""
        return None

    def crop(self, model: nn.Module, cache: Any, length: int) -> None:
        """Have the cache hold its first ``length`` tokens only. Nothing to do where ``start`` says it all."""

    def reset(self, model: nn.Module, cache: Any, kind: str, rows: int) -> Any:
        """A cache for another prompt, made from one that was used: by default a new one."""
        return self.new_cache(model, kind, rows)


class TransformersDriver(Driver):
    """Runs a causal LM of transformers, with a static and a growing cache."""

    kinds = ("static", "dynamic")
    rows, padding = 3, True

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        self.config = config
        self.vocabulary = min(int(config.get_text_config().vocab_size), 512)

    def new_cache(self, model: nn.Module, kind: str, rows: int) -> Any:
        from transformers import DynamicCache, StaticCache

        if kind == "static":
            return StaticCache(config=self.config, max_cache_len=self.length)
        return DynamicCache(config=self.config)

    def call(self, step: Any, ids: Tensor, start: int, cache: Any, keep: Tensor | None = None) -> Tensor:
        given: dict[str, Any] = {}
        if keep is not None:
            given["attention_mask"] = keep.long()
            given["position_ids"] = (keep.long().cumsum(1) - 1).clamp(min=0)[:, start:].clone()
        logits: Tensor = step(input_ids=ids.clone(), past_key_values=cache, **given).logits
        return logits

    def host_cache(self, model: nn.Module, rows: int) -> Any:
        from fasa_compile.static_cache import FasaStaticCache

        return FasaStaticCache(self.config, max_cache_len=self.length)

    def keys_values(self, model: nn.Module, cache: Any) -> list[tuple[Tensor, Tensor]]:
        return [(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "keys", None) is not None]

    def crop(self, model: nn.Module, cache: Any, length: int) -> None:
        for layer in cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(length)
            else:
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]

    def reset(self, model: nn.Module, cache: Any, kind: str, rows: int) -> Any:
        if kind == "static":
            cache.reset()
            return cache
        return self.new_cache(model, kind, rows)


def driver_for(model: nn.Module) -> Driver:
    """The driver of a transformers model. Raises ``TypeError`` for any other: it needs one of its own."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        return TransformersDriver(model)
    raise TypeError(
        f"{type(model).__name__} is no transformers model: pass driver=, a fasa_compile.testing.Driver with `new_cache` and `call`"
    )


def tokens(driver: Driver, rows: int, n: int, seed: int) -> Tensor:
    """Random token ids ``[rows, n]``."""
    return torch.randint(0, driver.vocabulary, (rows, n), generator=torch.Generator().manual_seed(seed))
