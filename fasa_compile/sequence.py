"""A KV cache whose tokens lie on several processes: which part is whose, how it is written, and how it is read by a model.

Process p of P holds the tokens ``[p * rows, (p + 1) * rows)``. A model writes its new tokens with ``slots`` and attends to what
``gather`` returns, all tokens on every process: right under any compiler and under none, and as slow as moving the whole cache. In a
graph that ``fasa_backend`` compiles a decode step's gather is never run: the attention is made from what each process holds
(``triton_kernels/sharded_decode.py``). An attention that is left dense, for whatever reason, still has its gather.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fasa_compile.sites import Shard
from fasa_compile.triton_kernels import ops  # noqa: F401  registers fasa::gather_sequence


@dataclass(frozen=True)
class SequenceShard(Shard):
    """This process's part of a KV cache of ``length`` tokens, the same number on each process of ``group``.

    Make one with ``SequenceShard.of``. Buffers of it are ``[B, Hkv, rows + 1, D]``: the last row takes what belongs to others, and is
    never read.
    """

    @classmethod
    def of(cls, length: int, group: dist.ProcessGroup | None = None) -> SequenceShard:
        """The part of this process, of a cache of ``length`` tokens or a few more (a multiple of the number of processes).

        ``group``: None for all processes. Raises ``ValueError`` for a ``length`` below 1, or where no process group was made.
        """
        if length < 1:
            raise ValueError(f"length: expected a number of tokens >= 1, found {length}")
        if not dist.is_initialized():
            raise ValueError("a KV cache over several processes needs torch.distributed.init_process_group() first")
        group = group if group is not None else dist.distributed_c10d._get_default_group()
        ranks = dist.get_world_size(group)
        return cls(-(-length // ranks), dist.get_rank(group), ranks, str(group.group_name))

    def slots(self, positions: Tensor) -> Tensor:
        """Rows of this process's buffers that tokens at ``positions`` (int64, any shape) are written to: their own where they belong
        here, the last one where they belong to others, and one that does not exist beyond the cache's end, so that writing fails."""
        own = positions - self.rank * self.rows
        inside = (own >= 0) & (own < self.rows)
        return torch.where(positions >= self.length, self.rows + 1, torch.where(inside, own, self.rows))

    def gather(self, buffer: Tensor) -> Tensor:
        """All processes' rows of ``buffer [B, Hkv, rows + 1, D]``: ``[B, Hkv, length, D]``, on each of them. Every process must call it."""
        gathered: Tensor = torch.ops.fasa.gather_sequence(buffer, self.rows, self.rank, self.ranks, self.group)
        return gathered
