"""What a profile may hold, how it is gathered and sliced, and how it is compared with a graph."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError

import pytest
import torch
from profile_samples import half_split, layer, profile

from fasa_compile.errors import BudgetError, ProfileError
from fasa_compile.profiles import Budget, FCProfile, RopeFacts, check_layer
from fasa_compile.sites import Rope


@pytest.mark.parametrize(
    "given, says",
    [
        ({"n_fac": 0}, "n_fac"),
        ({"n_fac": -1}, "n_fac"),
        ({"n_fac": 2.5}, "float 2.5"),
        ({"n_fac": "64"}, "str '64'"),
        ({"n_fac": True}, "bool True"),
        ({"n_fac": None}, "None"),
        ({"n_fac": 2**40}, "n_fac"),
        ({"n_sink": -1}, "n_sink"),
        ({"n_recent": 1.0}, "n_recent"),
        ({"n_fac": 19}, "n_sink + n_recent"),
    ],
)
def test_impossible_budgets_say_what_is_wrong(given: dict, says: str) -> None:
    with pytest.raises(BudgetError) as error:
        Budget(**given)
    assert says in str(error.value)
    with pytest.raises(BudgetError):
        Budget().replace(**given)


def test_budget_edges_and_replace() -> None:
    assert Budget(1, 0, 0).n_fac == 1
    assert Budget(20, 4, 16).replace(n_fac=21, n_sink=5) == Budget(21, 5, 16)
    with pytest.raises(BudgetError, match="n_fact"):
        Budget().replace(n_fact=3)
    with pytest.raises(FrozenInstanceError):
        Budget().n_fac = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "given, path",
    [
        ({"layer": ""}, "layer:"),
        ({"num_heads": 3}, "num_heads:"),
        ({"num_heads": True}, "num_heads:"),
        ({"num_heads": 2048, "num_kv_heads": 2}, "num_heads:"),
        ({"head_dim": 16}, "rope.head_dim:"),
        ({"head_dim": 8.0}, "head_dim:"),
        ({"rope": None}, "rope:"),
        ({"dense": 1}, "dense:"),
        ({"n_fac": 0}, "n_fac:"),
        ({"fcs": torch.tensor([[0, 2], [1, 4]], dtype=torch.int32)}, "fcs[1][1]:"),
        ({"fcs": torch.tensor([[-1, 2], [1, 3]], dtype=torch.int32)}, "fcs[0][0]:"),
        ({"fcs": torch.tensor([[0, 2], [3, 1]], dtype=torch.int32)}, "fcs[1][1]:"),
        ({"fcs": torch.tensor([[2, 2], [1, 3]], dtype=torch.int32)}, "fcs[0][1]:"),
        ({"fcs": torch.tensor([[0, 2], [1, 3]])}, "fcs:"),
        ({"fcs": torch.tensor([0, 2], dtype=torch.int32)}, "fcs:"),
        ({"fcs": torch.tensor([[0, 2]], dtype=torch.int32)}, "fcs:"),
        ({"fcs": torch.zeros(2, 0, dtype=torch.int32)}, "fcs:"),
        ({"fcs": [[0, 2], [1, 3]]}, "fcs:"),
        ({"centre": torch.zeros(1, 8)}, "centre:"),
        ({"centre": torch.zeros(2, 8, dtype=torch.float64)}, "centre:"),
        ({"centre": torch.zeros(2, 8, device="meta")}, "centre:"),
        ({"centre": torch.full((2, 8), float("nan"))}, "centre[0][0]:"),
        ({"spread": torch.zeros(2, 8)}, "spread[0][0]:"),
        ({"spread": torch.full((2, 8), float("inf"))}, "spread[0][0]:"),
        ({"norm": torch.zeros(2)}, "norm:"),
        ({"norm": torch.tensor([0, 0, -float("inf"), 0])}, "norm[2]:"),
        ({"affine": torch.zeros(4, 8)}, "affine:"),
        ({"affine": torch.full((4, 9), float("nan"))}, "affine[0][0]:"),
        ({"stats": {"energy_kept": float("nan")}}, "stats.energy_kept:"),
        ({"stats": {"energy_kept": "much"}}, "stats.energy_kept:"),
    ],
)
def test_a_bad_layer_names_the_field(given: dict, path: str) -> None:
    with pytest.raises(ProfileError) as error:
        layer(**given)
    message = str(error.value)
    assert message.startswith(path)
    assert "expected" in message and "found" in message


@pytest.mark.parametrize(
    "facts, path",
    [
        ((8, ((0, 4), (4, 5)), 1.0), "pairs[1][0]"),
        ((8, ((0, 0),), 1.0), "pairs[0][1]"),
        ((8, ((0, 8),), 1.0), "pairs[0][1]"),
        ((8, ((0, -1),), 1.0), "pairs[0][1]"),
        ((8, ((0, 1, 2),), 1.0), "pairs[0]"),
        ((4, ((0, 1), (2, 3), (1, 2)), 1.0), "pairs"),
        ((8, [(0, 4)], 1.0), "pairs"),
        ((8, ((0, 4),), 0.0), "magnitude"),
        ((8, ((0, 4),), float("nan")), "magnitude"),
        ((1, ((0, 1),), 1.0), "head_dim"),
    ],
)
def test_bad_rope_facts(facts: tuple, path: str) -> None:
    with pytest.raises(ProfileError) as error:
        RopeFacts(*facts)
    assert str(error.value).startswith(f"{path}: expected")


def test_without_a_rotary_embedding_the_chunks_are_single_dims() -> None:
    rope = RopeFacts(8, ())
    assert rope.chunks == tuple((d,) for d in range(8)) and rope.rotary_dim == 0
    fcs = torch.tensor([[0, 3, 5], [1, 2, 7]], dtype=torch.int32)
    single = layer("a", rope=rope, fcs=fcs)
    assert single.width == single.n_tip == 3 and torch.equal(single.dims(), fcs)
    assert profile(layers=(single,), fc_format="int8").layers == (single,)
    with pytest.raises(ProfileError, match=r"layers\[0\].fcs: expected an even number of single dims"):
        profile(layers=(single,), fc_format="int4")


@pytest.mark.parametrize(
    "given, path",
    [
        ({"layers": ()}, "layers"),
        ({"layers": [layer()]}, "layers"),
        ({"layers": (layer("a"), layer("b"), layer("a"))}, "layers[2].layer"),
        ({"layers": (layer("a", n_fac=19),)}, "layers[0].n_fac"),
        ({"fc_format": "int3"}, "fc_format"),
        ({"fc_format": None}, "fc_format"),
        ({"reduction": "mean"}, "reduction"),
        ({"method": ""}, "method"),
        ({"budget": 128}, "budget"),
        ({"data": {"x": {1, 2}}}, "data.x"),
        ({"data": {3: 4}}, "data key"),
        ({"stats": {"kl": float("inf")}}, "stats.kl"),
        ({"schema_version": 0}, "schema_version"),
        ({"schema_version": 1.0}, "schema_version"),
    ],
)
def test_a_bad_profile_names_the_field(given: dict, path: str) -> None:
    with pytest.raises(ProfileError) as error:
        profile(**given)
    assert str(error.value).startswith(f"{path}: expected")


def test_a_newer_schema_says_to_upgrade() -> None:
    with pytest.raises(ProfileError) as error:
        profile(schema_version=3)
    assert str(error.value) == "profile schema 3 is newer than this package reads (2): upgrade fasa-compile"


def test_dims_are_first_halves_then_second_halves() -> None:
    assert layer().dims().tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layer().dims().dtype == torch.int32
    odd = RopeFacts(8, ((1, 6), (2, 3), (4, 7), (5, 0)))
    assert layer(rope=odd).dims().tolist() == [[1, 4, 6, 7], [2, 5, 3, 0]]


def test_gathered_follows_dims() -> None:
    one = layer()
    centre, spread = one.gathered()
    for h, row in enumerate(one.dims().tolist()):
        assert centre[h].tolist() == [one.centre[h, d].item() for d in row]
        assert spread[h].tolist() == [one.spread[h, d].item() for d in row]


def test_slices_give_each_head_its_own_data() -> None:
    one = layer()
    parts = [one.slice_heads(range(h, h + 1)) for h in range(2)]
    for h, part in enumerate(parts):
        assert (part.num_heads, part.num_kv_heads) == (2, 1)
        assert torch.equal(part.fcs, one.fcs[h : h + 1])
        assert torch.equal(part.centre, one.centre[h : h + 1])
        assert torch.equal(part.spread, one.spread[h : h + 1])
        assert torch.equal(part.norm, one.norm[2 * h : 2 * h + 2])
        assert torch.equal(part.affine, one.affine[2 * h : 2 * h + 2])
    assert one.slice_heads(range(0, 2)) == one


@pytest.mark.parametrize(
    "heads", [range(0, 0), range(0, 3), range(-1, 1), range(2, 3), range(0, 2, 2), range(1, -1, -1), slice(0, 1), 0]
)
def test_a_slice_that_is_not_whole_kv_heads_is_refused(heads: object) -> None:
    # 2 KV heads on 4 ranks: rank 2 would ask for heads that are not there; nothing is broadcast to it.
    with pytest.raises(ValueError, match="kv_heads: expected"):
        layer().slice_heads(heads)  # type: ignore[arg-type]


def test_slopes_are_those_of_the_dominant_dims_in_the_scaled_query() -> None:
    one = layer()
    q = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    dims, (norm, slopes) = one.dims(), one.normaliser("affine")
    assert slopes is not None and torch.equal(norm, one.affine[:, 0])
    assert one.normaliser("static") == (one.norm, None)
    for h in range(4):
        kv, own = h // 2, dims[h // 2].tolist()
        scaled = [float(q[h, d] * one.spread[kv, d]) for d in own]
        expected = sum(float(q[h, d] * one.affine[h, 1 + d]) for d in own)
        assert sum(a * float(b) for a, b in zip(scaled, slopes[h], strict=True)) == pytest.approx(expected, rel=1e-5)


def test_without_a_fit_the_affine_normaliser_is_the_constant() -> None:
    one = layer(affine=None)
    assert torch.equal(one.affine[:, 0], one.norm) and not one.affine[:, 1:].any()


def test_by_layer() -> None:
    one = profile()
    assert one.by_layer("model.layers.1.self_attn") is one.layers[1]
    assert one.by_layer("model.layers.2.self_attn") is None


def test_equality_is_by_content() -> None:
    assert profile() == profile()
    assert profile() == copy.deepcopy(profile())
    moved = layer()
    moved.norm[2] += 1
    assert moved != layer()
    assert layer(fcs=torch.tensor([[0, 2], [1, 2]], dtype=torch.int32)) != layer()
    assert profile(stats={}) != profile()
    assert layer() != "layer"


def test_tuples_in_free_form_data_become_lists() -> None:
    assert profile(data={"context_lengths": (1, 2)}).data == {"context_lengths": [1, 2]}


def test_a_profile_made_by_hand_cannot_be_changed_through_its_dict() -> None:
    data = {"lengths": [1]}
    one = profile(data=data)
    data["lengths"].append(2)
    assert one.data == {"lengths": [1]}


SITE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": Rope(half_split(8).pairs, 8, 1.0)}
INTERLEAVED = tuple((2 * i, 2 * i + 1) for i in range(4))


def test_a_layer_that_fits_the_graph_passes() -> None:
    check_layer(layer(), "site", **SITE)
    check_layer(layer(), "site", **(SITE | {"rope": Rope(half_split(8).pairs, 8, 1.0005)}))
    check_layer(layer(), "site", **(SITE | {"rope": Rope(half_split(8).pairs, 8, 1.01, error=0.0078)}))


@pytest.mark.parametrize(
    "given, field, ours, theirs",
    [
        ({"num_heads": 8}, "num_heads", "4", "8"),
        ({"num_kv_heads": 1}, "num_kv_heads", "2", "1"),
        ({"head_dim": 16}, "head_dim", "8", "16"),
        ({"rope": Rope(INTERLEAVED, 8, 1.0)}, "rope.pairs[0]", "(0, 4)", "(0, 1)"),
        ({"rope": Rope(half_split(8, 4).pairs, 8, 1.0)}, "rope.rotary_dim", "8", "4"),
        ({"rope": Rope(half_split(8).pairs, 16, 1.0)}, "rope.head_dim", "8", "16"),
        ({"rope": Rope(half_split(8).pairs, 8, 1.01)}, "rope.magnitude", "1.0", "1.01"),
        ({"rope": Rope(half_split(8).pairs, 8, 1.1, error=0.0078)}, "rope.magnitude", "1.0", "1.1"),
        ({"rope": Rope(half_split(8).pairs, 8, float("nan"))}, "rope.magnitude", "1.0", "nan"),
    ],
)
def test_another_architecture_is_named(given: dict, field: str, ours: str, theirs: str) -> None:
    with pytest.raises(ValueError) as error:
        check_layer(layer(), "model.layers.7", **(SITE | given))
    assert isinstance(error.value, ProfileError)
    message = str(error.value)
    assert message.startswith(f"model.layers.7: {field}: expected {ours} (the profile), found {theirs} (the graph).")
    assert "calibrate" in message


def test_layers_may_differ_in_heads_and_dims() -> None:
    shapes = [(8, 2, 32), (12, 3, 32), (4, 4, 64), (8, 1, 128)]
    layers = tuple(
        layer(
            f"l{i}",
            num_heads=hq,
            num_kv_heads=hkv,
            head_dim=d,
            rope=half_split(d),
            fcs=torch.arange(d // 4, dtype=torch.int32).expand(hkv, -1),
            centre=torch.zeros(hkv, d),
            spread=torch.ones(hkv, d),
            norm=torch.zeros(hq),
            affine=None,
        )
        for i, (hq, hkv, d) in enumerate(shapes)
    )
    one: FCProfile = profile(layers=layers)
    assert [x.dims().shape for x in one.layers] == [(hkv, d // 2) for _, hkv, d in shapes]
