"""Which part of a layer's profile a process gets, and how disagreements are told; no processes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fasa_compile.profiles import LayerProfile, RopeFacts
from fasa_compile.sharding import Share, _difference, _profile_digest, local_layer


def layer(heads: int, kv_heads: int) -> LayerProfile:
    """Every number names the head that it belongs to."""
    return LayerProfile(
        layer="a",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=4,
        rope=RopeFacts(4, ((0, 2), (1, 3)), 1.0),
        dense=False,
        fcs=torch.arange(kv_heads, dtype=torch.int32)[:, None] % 2,
        centre=torch.arange(kv_heads).float()[:, None].repeat(1, 4),
        spread=torch.ones(kv_heads, 4),
        norm=torch.arange(heads).float(),
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "mine", "my_kv", "share", "query", "keys"),
    [
        (8, 4, 4, 2, Share(1, 2, (0, 1)), [4, 5, 6, 7], [2, 3]),
        (8, 2, 2, 1, Share(2, 4, (0, 1, 2, 3)), [4, 5], [1]),  # a KV head that two processes hold
        (8, 8, 2, 2, Share(3, 4, (0, 1, 2, 3)), [6, 7], [6, 7]),
    ],
)
def test_heads_get_their_own_numbers(heads, kv_heads, mine, my_kv, share, query, keys):
    part = local_layer(layer(heads, kv_heads), mine, my_kv, share)
    assert (part.num_heads, part.num_kv_heads) == (mine, my_kv)
    assert part.norm.tolist() == query and part.centre[:, 0].tolist() == keys
    assert part.fcs[:, 0].tolist() == [h % 2 for h in keys]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "mine", "my_kv", "share"),
    [
        (8, 4, 8, 4, Share(0, 2, (0, 1))),  # whole
        (8, 4, 4, 2, None),  # nobody says which part
        (8, 4, 2, 2, Share(0, 2, (0, 1))),  # not half of the heads
        (8, 4, 4, 4, Share(0, 2, (0, 1))),  # other KV heads than these query heads read
        (6, 3, 2, 2, Share(1, 3, (0, 1, 2))),
        (12, 4, 6, 2, Share(0, 3, (0, 1, 2))),
        (8, 2, 6, 2, Share(0, 2, (0, 1))),
    ],
)
def test_any_other_split_is_left_for_the_check_to_refuse(heads, kv_heads, mine, my_kv, share):
    whole = layer(heads, kv_heads)
    assert local_layer(whole, mine, my_kv, share) is whole


def test_parts_of_two_groups_are_no_equal_groups():
    whole = layer(12, 3)  # groups of four: heads 2 to 5 read two KV heads, two of each, and begin inside a group
    assert local_layer(whole, 6, 2, Share(0, 2, (0, 1))) is whole


def test_what_differs_is_named_by_its_first_difference():
    assert _difference(["a", "b"], ["a"]) == "2 against 1"
    assert _difference(["a", "b"], ["a", "c"]) == "'b' against 'c'"
    assert _difference(3, 4) == "3 against 4"


def test_profiles_are_compared_by_what_they_hold():
    from fasa_compile.profiles import Budget, FCProfile, ModelFacts

    def profile(one: LayerProfile) -> FCProfile:
        return FCProfile(
            layers=(one,),
            budget=Budget(8, 1, 2),
            fc_format="int4",
            reduction="static",
            method="made up",
            model=ModelFacts("a", "none", 1),
        )

    whole = layer(4, 2)
    assert _profile_digest(profile(whole)) == _profile_digest(profile(layer(4, 2)))
    assert _profile_digest(profile(whole)) != _profile_digest(profile(dataclasses.replace(whole, norm=whole.norm + 1)))
    assert _profile_digest("all") == "all"
