"""``SequenceShardedCache``: transformers' static cache with its tokens on several processes. Importing this imports transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers.cache_utils import StaticCache, StaticLayer

from fasa_compile.sequence import SequenceShard
from fasa_compile.sharding import meet, ranks_of, software


class SequenceShardedLayer(StaticLayer):
    """A static layer that holds this process's part of ``keys`` and ``values``, and returns those of all processes.

    A prompt's first part (not compiled) attends to itself, as it is on every process: nothing is exchanged.
    """

    cumulative_length: torch.Tensor
    is_initialized: bool

    def __init__(self, shard: SequenceShard) -> None:
        super().__init__(shard.length)
        self.shard = shard

    @torch.compiler.disable
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        B, Hkv, _, D = key_states.shape
        Dv, dtype, rows = value_states.shape[-1], key_states.dtype, self.shard.rows
        made = software() | {"KV cache": f"{self.shard.ranks} x [{B}, {Hkv}, {rows}, {D} and {Dv}] {dtype}"}
        meet(ranks_of(self.shard.group), self.shard.rank, "sequence", "a KV cache's layer", made)
        self.dtype, self.device, self.batch_size, self.num_heads = dtype, key_states.device, B, Hkv
        self.k_head_dim, self.v_head_dim = D, Dv
        self.keys, self.values = (
            torch.zeros((B, Hkv, rows + 1, width), dtype=dtype, device=self.device) for width in (D, Dv)
        )
        self.cumulative_length = self.cumulative_length.to(self.device)
        for tensor in (self.keys, self.values, self.cumulative_length):
            torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[-2]
        slots = self.shard.slots(torch.arange(tokens, device=self.device) + self.cumulative_length)
        self.cumulative_length.add_(tokens)
        self.keys.index_copy_(2, slots, key_states)
        self.values.index_copy_(2, slots, value_states)
        if not self._eager(tokens):
            return self.shard.gather(self.keys), self.shard.gather(self.values)
        filled = int(self.cumulative_length)
        if filled == tokens:
            return key_states, value_states
        return self.shard.gather(self.keys)[:, :, :filled], self.shard.gather(self.values)[:, :, :filled]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (int(self.cumulative_length) + query_length if self._eager(query_length) else self.shard.length), 0

    @staticmethod
    def _eager(tokens: int) -> bool:
        """Whether these tokens are a prompt's that no compiler sees: lengths may be read then, and what is empty left out."""
        return tokens > 1 and not torch.compiler.is_compiling()


class SequenceShardedCache(StaticCache):
    """transformers' ``StaticCache`` whose full-attention layers hold ``max_cache_len / P`` consecutive tokens on each of P processes.

    Use it where a ``StaticCache`` goes, on every process of ``group`` (None: all), with the same model and the same tokens. Each
    process computes the whole prompt and keeps its part of K and V. With the model compiled by ``fasa_backend`` decode steps select and
    attend to where the tokens lie; without, every step gathers the whole cache, one layer at a time, and is right and slow. Layers that
    slide, or keep other state, are whole on every process, as transformers has them. ``max_cache_len`` is rounded up to a multiple of P.

    Raises ``ValueError`` without a process group, and at the first tokens ``Disagreement`` where another process makes another cache.
    """

    def __init__(self, config: Any, max_cache_len: int, group: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
        shard = SequenceShard.of(max_cache_len, group)
        super().__init__(config=config, max_cache_len=shard.length, **kwargs)
        # Exactly StaticLayer: its subclasses keep other state.
        self.layers: list[Any] = [SequenceShardedLayer(shard) if type(x) is StaticLayer else x for x in self.layers]
