"""``PrefillCache``: a cache of transformers for a prompt that nobody decodes from. Importing this imports transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache


class PrefillCache(DynamicCache):
    """Hands a prompt's K and V on to attention and keeps none of them; what linear attention keeps, it keeps.

    Calibration's: a model that makes its own cache makes it inside the graph, where Dynamo traces that layer by layer, and holds K and
    V of all layers. Without any cache transformers builds a mask of [T, T], to tell sequences that are packed in a row.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states
