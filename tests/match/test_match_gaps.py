"""What no test of matching noticed when the package was broken on purpose (``tests/mutation``), until these."""

from __future__ import annotations

import pytest
import torch
from test_cache import RowPerSequence
from test_rope import Attention, D, Static, both, cos_and_sin_exchanged, decode, halves, sdpa
from tiny import HKV, HQ, S, half_split, repeated, run_matched, visible
from torch import fx, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import dropout, scaled_dot_product_attention

from fasa_compile.capture import capture


def one_plane(x, pos, gain=1.0):
    """The first two dims turn, the others pass; ``gain`` is that of one of the two sines."""
    a = pos.float()[:, None] * 0.3
    first, second, rest = x[..., :1], x[..., 1:2], x[..., 2:]
    return torch.cat([first * a.cos() - second * a.sin(), second * a.cos() + gain * first * a.sin(), rest], -1)


def test_one_plane_alone_must_be_a_rotation():
    """A single plane has no other to be compared with."""
    matched = decode(Attention(both(one_plane), Static(), sdpa))
    assert matched.site.rope.pairs == ((0, 1),)
    refused = decode(Attention(both(lambda x, pos: one_plane(x, pos, 0.9)), Static(), sdpa)).refused
    assert refused.reason == "rope-not-proven" and "no rotation" in refused.detail


def test_a_small_turn_that_never_moves_is_refused():
    """So small that it could be a first position's: only the comparison of two positions tells."""

    def still(x, pos):
        a = torch.full((1, D // 2), 0.01)
        lo, hi = x[..., : D // 2], x[..., D // 2 :]
        return torch.cat([lo * a.cos() - hi * a.sin(), hi * a.cos() + lo * a.sin()], -1) + 0 * pos.float().sum()

    assert decode(Attention(both(still), Static(), sdpa)).refused.reason == "rope-not-proven"


@pytest.mark.parametrize("head", range(HQ))
def test_every_head_that_is_looked_at_must_be_rotated(head):
    """Queries of one head pass unturned: of the first, the middle and the last this is noticed."""

    def rope(q, k, pos):
        turned, keys = half_split(q, k, pos)
        return torch.cat([q[:, h : h + 1] if h == head else turned[:, h : h + 1] for h in range(HQ)], 1), keys

    matched = decode(Attention(rope, Static(), sdpa))
    if head in (0, HQ // 2, HQ - 1):
        assert matched.refused.reason == "rope-mismatch"
    else:
        assert len(matched.sites) == 1


class FromTheEnd(Static):
    """Writes at the same rows, counted from the end."""

    def forward(self, k, v, pos):
        self.keys[:, :, pos - S] = k
        self.values[:, :, pos - S] = v
        return self.keys, self.values


def test_slots_that_count_from_the_end_are_none():
    site = decode(Attention(half_split, FromTheEnd(), sdpa)).site
    assert (site.cache.kind, site.cache.slots) == ("static", None)


class FromARowOn(Static):
    """The first four rows are somebody else's."""

    def forward(self, k, v, pos):
        keys, values = super().forward(k, v, pos)
        return keys[:, :, 4:], values[:, :, 4:]


def test_keys_that_are_seen_from_a_row_on():
    def attend(q, k, v, pos):
        mask = visible(pos, S)[..., 4:]
        return scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)

    site = decode(Attention(half_split, FromARowOn(), attend)).site
    assert site.cache.kind == "static" and site.cache.slots is None and site.shape[4] == S - 4


def test_keys_that_attention_rounds_are_rounded():
    """A cache in fp32 that is read in bf16: the site's keys are what the attention sees."""

    def attend(q, k, v, pos):
        q, k, v = (x.bfloat16() for x in (q, k, v))
        out = scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=visible(pos, S))
        return out.float()

    matched = decode(Attention(half_split, Static(), attend))
    assert matched.value(matched.site.k).dtype == torch.bfloat16


class _Values(fx.Interpreter):
    def __init__(self, gm):
        super().__init__(gm, garbage_collect_values=False)
        self.seen = {}

    def run_node(self, n):
        self.seen[n] = result = super().run_node(n)
        return result


def test_every_alias_of_a_written_tensor_is_followed():
    """At each point of a program the shadow says what every view of a written buffer holds, told by running both."""

    def program(buffer, x):
        row, turned = buffer[1], buffer.transpose(0, 1)
        flat = turned[2]
        buffer[0] = x
        row.mul_(2)
        flat.add_(1)
        return row + buffer[0], turned * 1, flat

    checked = []

    def backend(gm, example_inputs):
        shadow = capture(gm, example_inputs)
        values = _Values(shadow.gm)
        values.run(*(x.clone() for x in example_inputs))

        class Compared(fx.Interpreter):
            def run_node(self, n):
                for name, value in held.items():
                    node = shadow.value(name, n.name)
                    assert node is not None
                    assert torch.equal(values.seen[node], value), (name, n.name)
                    checked.append(name)
                result = super().run_node(n)
                if isinstance(result, torch.Tensor):
                    held[n.name] = result  # the tensor itself: it shows every later write
                return result

        held: dict[str, torch.Tensor] = {}
        Compared(gm, garbage_collect_values=False).run(*(x.clone() for x in example_inputs))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend, dynamic=False)(torch.randn(3, 4), torch.randn(4))
    assert len(checked) > 20


def test_values_shared_by_other_groups_are_refused():
    """Keys of two heads, each for two query heads; values that alternate."""

    def attend(q, k, v, pos):
        return scaled_dot_product_attention(q, repeated(k), v.repeat(1, HQ // HKV, 1, 1), attn_mask=visible(pos, S))

    assert decode(Attention(half_split, Static(), attend)).refused.reason in ("heads", "failed")


class TwoPositions(nn.Module):
    """Two attentions in one graph that turn other dims: what is known of the first says nothing of the second."""

    def __init__(self):
        super().__init__()
        self.first = Attention(both(halves), Static(), sdpa)
        self.second = Attention(both(cos_and_sin_exchanged), Static(), sdpa)

    def forward(self, x, pos):
        return self.first(x, pos), self.second(x, pos)


def test_each_attention_is_proven_for_itself():
    torch.manual_seed(1)
    matched = run_matched(TwoPositions(), torch.randn(1, 1, 32), torch.tensor([9]))
    assert [getattr(site, "reason", "matched") for site in matched.sites] == ["matched", "rope-not-proven"]


def test_rows_of_sequences_that_are_an_input_may_change():
    """``keys[rows, :, pos] = k``: which row is which sequence's is known of this call alone, so there are no slots to keep by."""

    class Given(RowPerSequence):
        def __init__(self, batch, given):
            super().__init__(batch)
            self.rows = torch.arange(batch)
            self.given = given

        def forward(self, x, pos):
            q = self.q(x).view(self.batch, 1, HQ, D).transpose(1, 2)
            k, v = self.kv(x).view(self.batch, 1, 2 * HKV, D).transpose(1, 2).chunk(2, 1)
            q, k = half_split(q[:, :, 0].transpose(0, 1), k[:, :, 0].transpose(0, 1), pos)
            q, k = q.transpose(0, 1)[:, :, None], k.transpose(0, 1)
            rows = self.rows if self.given else torch.arange(self.batch)
            self.keys[rows, :, pos] = k
            self.values[rows, :, pos] = v[:, :, 0]
            mask = (torch.arange(S) <= pos[:, None])[:, None, None]
            keys, values = (x.repeat_interleave(HQ // HKV, 1) for x in (self.keys, self.values))
            return scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    inputs = torch.randn(3, 1, 32), torch.tensor([9, 4, 11])
    for given in (False, True):
        site = run_matched(Given(3, given), *inputs).site
        assert (site.cache.kind, site.cache.slots is None) == ("static", given)


def test_blocks_hide_what_a_mask_mod_would_show():
    """A block mask made by hand: a mask_mod and blocks, some of which are not listed; both count."""

    def attend(q, k, v, pos):
        num = torch.full((1, 1, 1), 2, dtype=torch.int32)
        blocks = torch.tensor([[[[2, 0, 1]]]], dtype=torch.int32)
        block_mask = BlockMask.from_kv_blocks(
            num, blocks, BLOCK_SIZE=(8, 8), mask_mod=lambda b, h, q, kv: kv % 3 != 1, seq_lengths=(1, S)
        )
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)

    matched = decode(Attention(half_split, Static(), attend))
    expected = torch.arange(S) % 3 != 1
    expected[8:16] = False
    assert (matched.value(matched.site.mask) == expected).all()


def test_dropout_of_weights_is_refused():
    def attend(q, k, v, pos):
        weights = (q @ repeated(k).mT).masked_fill(~visible(pos, S), float("-inf")).softmax(-1)
        return dropout(weights, 0.1, training=True) @ repeated(v)

    assert decode(Attention(half_split, Static(), attend)).refused.reason == "dropout"
