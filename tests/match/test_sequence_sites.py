"""A KV cache whose tokens lie on several processes: what an attention over the gathered ones is read as, and what is refused. No process is
started: where one would gather, it takes its own part for everybody's."""

from __future__ import annotations

import pytest
import torch
from tiny import HKV, HQ, Attention, B, D, S, Static, decode, half_split, repeated, sdpa
from torch.nn.functional import scaled_dot_product_attention

from fasa_compile.sequence import SequenceShard
from fasa_compile.sites import Shard
from fasa_compile.triton_kernels import sharded_decode

ROWS = S // 3


class Parted(Static):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.shard = SequenceShard(ROWS, rank, 3, "nobody")
        for name in ("keys", "values"):
            setattr(self, name, torch.randn(B, HKV, ROWS + 1, D))

    def forward(self, k, v, pos):
        slots = self.shard.slots(pos)
        self.keys.index_copy_(2, slots, k)
        self.values.index_copy_(2, slots, v)
        return self.gathered()

    def gathered(self):
        return self.shard.gather(self.keys), self.shard.gather(self.values)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(sharded_decode, "all_gather", lambda x, ranks, group: torch.stack([x] * ranks))


@pytest.mark.parametrize("attend", ["repeated", "grouped"])
@pytest.mark.parametrize("position", [3, ROWS, S - 1])
def test_read_as_an_attention_over_what_is_here(position, attend):
    """The token is this process's, or another's before or after: it is written to its row, or to the one that nobody reads."""

    def grouped(q, k, v, pos):
        mask = (torch.arange(S) <= pos[:, None])[None, None]
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    matched = decode(Attention(half_split, Parted(1), sdpa if attend == "repeated" else grouped), position)
    site = matched.site
    assert site.shard == Shard(ROWS, 1, 3, "nobody") and site.shard.length == S
    assert site.shape == (B, HQ, HKV, 1, ROWS + 1, D, D) and site.rope.rotary_dim == D
    assert site.cache.kind == "static" and not site.cache.rewritten_later
    assert matched.value(site.mask).shape[-1] == S
    here = position - ROWS if ROWS <= position < 2 * ROWS else ROWS
    assert matched.value(site.cache.slots).tolist() == [here]
    buffer = matched.values[matched.shadow.final[site.cache.k_input]]
    assert torch.equal(matched.value(site.k), buffer) and buffer.shape[2] == ROWS + 1


class OtherValues(Parted):
    def gathered(self):
        return self.shard.gather(self.keys), SequenceShard(ROWS, 2, 3, "nobody").gather(self.values)


class WholeValues(Parted):
    def gathered(self):
        return self.shard.gather(self.keys), self.values.repeat(1, 1, 3, 1)[:, :, :S]


class Backwards(Parted):
    def gathered(self):
        return tuple(self.shard.gather(x).flip(2) for x in (self.keys, self.values))


class HeadsExchanged(Parted):
    def gathered(self):
        return tuple(self.shard.gather(x).flip(1) for x in (self.keys, self.values))


@pytest.mark.parametrize("cache", [OtherValues, WholeValues, Backwards, HeadsExchanged])
def test_anything_else_of_what_is_gathered_is_refused(cache):
    refused = decode(Attention(half_split, cache(1), sdpa), 9).refused
    assert refused.reason == "unknown-cache-write", refused


def test_gathered_keys_that_are_computed_with_are_refused():
    def doubled(q, k, v, pos):
        mask = (torch.arange(S) <= pos[:, None])[None, None]
        return scaled_dot_product_attention(q, repeated(2 * k), repeated(v), attn_mask=mask)

    assert decode(Attention(half_split, Parted(0), doubled), 9).refused.reason != "failed"


def test_a_position_beyond_the_end_has_no_row():
    shards = [SequenceShard(4, rank, 2, "nobody") for rank in (0, 1)]
    positions = torch.tensor([0, 3, 4, 7, 8, 100])
    assert [s.slots(positions).tolist() for s in shards] == [[0, 3, 4, 4, 5, 5], [4, 4, 0, 3, 5, 5]]


def test_a_part_needs_processes_and_tokens():
    with pytest.raises(ValueError, match="init_process_group"):
        SequenceShard.of(16)
    with pytest.raises(ValueError, match="length: expected"):
        SequenceShard.of(0)
