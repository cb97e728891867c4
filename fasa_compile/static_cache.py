"""``FasaStaticCache``: transformers' static cache with K and V in host memory. Importing this imports transformers."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers.cache_utils import StaticCache, StaticLayer

from fasa_compile.offload import check_host, offloaded_cache, rows_of, staged


class HostStaticLayer(StaticLayer):
    """A static layer whose ``keys`` and ``values`` lie in host memory.

    A call with one new token is given the whole of them, as by any static layer. One with more (prefill, not compiled) is given a
    copy on the device of what is filled so far, which lives as long as this layer's attention does.
    """

    cumulative_length: torch.Tensor
    is_initialized: bool
    # All layers of the cache that lie in host memory. Weak: a cycle would keep the memory until the garbage collector runs.
    siblings: tuple[weakref.ref[HostStaticLayer], ...] = ()

    @torch.compiler.disable
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        B, Hkv, _, D = key_states.shape
        Dv, dtype = value_states.shape[-1], key_states.dtype
        self.dtype, self.device, self.batch_size, self.num_heads = dtype, key_states.device, B, Hkv
        self.k_head_dim, self.v_head_dim = D, Dv
        layers = (reference() for reference in self.siblings)
        waiting = sum(layer is not None and not layer.is_initialized for layer in layers)
        size = B * Hkv * self.max_cache_len * (D + Dv) * dtype.itemsize
        check_host(size * waiting, f"the KV cache of {waiting} layers, {B} x {self.max_cache_len} tokens,")
        self.keys, self.values = offloaded_cache((B, Hkv, self.max_cache_len, D), dtype, self.device, v_dim=Dv)
        self.cumulative_length = self.cumulative_length.to(self.device)
        torch._dynamo.mark_static_address(self.cumulative_length)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if key_states.shape[-2] == 1 or torch.compiler.is_compiling():
            return keys, values
        return staged(keys, values, int(self.cumulative_length))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if query_length == 1 or torch.compiler.is_compiling():
            return self.max_cache_len, 0
        return int(self.cumulative_length) + query_length, 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """In place, head by head: the cache stays where it is, and a copy of one head is all it takes."""
        if not self.is_initialized:
            return
        for tensor in (self.keys, self.values):
            for h in range(self.num_heads):
                tensor[:, h].copy_(tensor[:, h].index_select(0, beam_idx.to(tensor.device)))

    def offload(self) -> None:
        """Nothing to do: the rows are in host memory already."""

    def prefetch(self) -> None:
        """Nothing to do: attention fetches what it reads."""


class FasaStaticCache(StaticCache):
    """transformers' ``StaticCache`` whose full-attention layers keep K and V in host memory, which a CUDA model's kernels read across PCIe.

    Use it where a ``StaticCache`` goes, with a model compiled by ``fasa_backend(profile, offload="cpu")``: prefill attends densely and
    holds one layer's K and V on the GPU at a time, decode fetches the tokens it selects. Layers that slide, or keep other state, stay
    on the device as transformers has them. Memory is taken when the first tokens come (``early_initialization`` takes it sooner) and
    for all layers or not at all: ``OffloadError`` says what is needed and what there is.
    """

    def __init__(self, config: Any, max_cache_len: int, **kwargs: Any) -> None:
        super().__init__(config=config, max_cache_len=max_cache_len, **kwargs)
        # Exactly StaticLayer: its subclasses keep other state.
        self.layers: list[Any] = [HostStaticLayer(max_cache_len) if type(x) is StaticLayer else x for x in self.layers]
        mine = [x for x in self.layers if isinstance(x, HostStaticLayer)]
        for layer in mine:
            layer.siblings = tuple(map(weakref.ref, mine))

    def host_bytes(self) -> int:
        """Bytes of host memory that K and V take so far."""
        blocks = (rows_of(x.keys) for x in self.layers if isinstance(x, HostStaticLayer) and x.is_initialized)
        return sum(block.bytes for block in blocks if block is not None)
