"""The hot buffer's specification against a simulation of it in plain Python, and what no state of it may change."""

from __future__ import annotations

import pytest
import torch

from fasa_compile.triton_kernels import hot_slots
from fasa_compile.triton_kernels.hot_slots import HotSize

B, HKV, L, D, DV, N = 2, 2, 400, 6, 4, 40


class Part:
    """One part's slots as its description has them."""

    def __init__(self, slots: int) -> None:
        self.held: list[int | None] = [None] * slots
        self.next, self.attended, self.fetched, self.unkept = 0, 0, 0, 0

    def step(self, tokens: list[int], written: list[int]) -> None:
        slots = len(self.held)
        self.held = [None if t in written else t for t in self.held]
        misses = [t for t in sorted(tokens) if t not in self.held]
        free = [s % slots for s in range(self.next, self.next + slots) if self.held[s % slots] not in tokens]
        for token, slot in zip(misses, free, strict=False):
            self.held[slot] = token
            self.next = (slot + 1) % slots
        self.attended += len(tokens)
        self.fetched += len(misses)
        self.unkept += max(0, len(misses) - len(free))


def empty(size: HotSize) -> list[torch.Tensor]:
    spec = hot_slots.hot_spec(B, HKV, size, D, DV, torch.float32)
    return [torch.zeros(shape, dtype=dtype) for shape, dtype in spec]


@pytest.mark.parametrize("size", [HotSize(1, 64), HotSize(3, 9), HotSize(2, 40)], ids=str)
def test_slots_are_given_as_described(size: HotSize) -> None:
    state = empty(size)
    parts = [[[Part(size.slots) for _ in range(size.parts)] for _ in range(HKV)] for _ in range(B)]
    k, v = torch.randn(B, HKV, L, D), torch.randn(B, HKV, L, DV)
    first = torch.tensor([0, 37])
    for step in range(8):
        written = torch.tensor([[60 + step, 90], [120 + step, -1]])
        for b in range(B):
            k[b, :, written[b]], v[b, :, written[b]] = torch.randn(HKV, 2, D), torch.randn(HKV, 2, DV)
        # Crowded together, so that steps share tokens.
        token = torch.stack([torch.stack([40 + torch.randperm(80)[:N] for _ in range(HKV)]) for _ in range(B)])
        taken = torch.rand(B, HKV, N) > 0.1
        rows, values = hot_slots.rows_through_(*state, k, v, token, taken, first, written)
        for b in range(B):
            for h in range(HKV):
                chosen = token[b, h][taken[b, h]]
                assert torch.equal(rows[b, h][taken[b, h]], k[b, h][chosen])
                assert torch.equal(values[b, h][taken[b, h]], v[b, h][chosen])
                for p in range(size.parts):
                    base = int(first[b]) // 16 * 16
                    mine = [t for t in chosen.tolist() if (t - base) // 32 % size.parts == p]
                    part = parts[b][h][p]
                    part.step(mine, [t % L for t in written[b].tolist()])
                    assert state[1][b, h, p].tolist() == [0 if t is None else t + 1 for t in part.held]
                    assert state[2][b, h, p].tolist() == [part.next, part.attended, part.fetched, part.unkept]
    assert sum(p.fetched for x in parts for y in x for p in y) < 0.9 * sum(
        p.attended for x in parts for y in x for p in y
    )


def test_what_empty_slots_hold_is_never_read() -> None:
    """Poison in every slot without a token: rows come out clean, and slots without a token keep it."""
    size = HotSize(2, 15)
    state = empty(size)
    state[0].fill_(torch.nan)
    k, v = torch.randn(B, HKV, L, D), torch.randn(B, HKV, L, DV)
    for step in range(4):
        token = torch.stack([torch.randperm(L)[:10] for _ in range(B * HKV)]).view(B, HKV, 10)
        rows, values = hot_slots.rows_through_(
            *state, k, v, token, torch.ones(B, HKV, 10, dtype=torch.bool), torch.zeros(1), torch.tensor([step])
        )
        assert torch.isfinite(rows).all() and torch.isfinite(values).all()
        assert torch.equal(torch.isnan(state[0]).any(-1), state[1] == 0)
        state[0][state[1] == 0] = torch.nan


def test_bytes_are_those_of_the_tensors() -> None:
    size = HotSize(3, 9)
    assert hot_slots.hot_bytes(B, HKV, size, D, DV, torch.float32) == sum(t.nbytes for t in empty(size))
