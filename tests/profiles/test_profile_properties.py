"""Any valid profile survives a round trip; any damaged file is one ``ProfileError``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st
from profile_samples import profile

from fasa_compile.errors import ProfileError
from fasa_compile.profiles import FCProfile, LayerProfile, files
from fasa_compile.testing.strategies import free_form, layer_profiles, profiles


@given(profiles())
def test_a_round_trip_changes_nothing(one: FCProfile) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for suffix in files.SUFFIXES:
            path = Path(folder) / f"p{suffix}"
            one.save(path)
            written = path.read_bytes()
            back = FCProfile.load(path)
            assert back == one
            for a, b in zip(back.layers, one.layers, strict=True):
                for name in files.ARRAYS:  # to the bit: == does not tell -0.0 from 0.0
                    assert torch.equal(getattr(a, name).view(torch.int32), getattr(b, name).view(torch.int32))
            back.save(path)
            assert path.read_bytes() == written
    assert files.to_json(files.parse_json(files.to_json(one).encode())) == files.to_json(one)


@given(layer_profiles("l"))
def test_dims_name_each_fc_once_and_gather_follows(one: LayerProfile) -> None:
    dims = one.dims()
    assert dims.shape == (one.num_kv_heads, 2 * one.n_tip)
    for h, row in enumerate(dims.tolist()):
        assert len(set(row)) == len(row)
        for j, f in enumerate(one.fcs[h].tolist()):
            assert (row[j], row[j + one.n_tip]) == one.rope.pairs[f]
    centre, spread = one.gathered()
    assert torch.equal(centre, torch.stack([one.centre[h][dims[h].long()] for h in range(len(dims))]))
    assert torch.equal(spread, torch.stack([one.spread[h][dims[h].long()] for h in range(len(dims))]))


@given(layer_profiles("l"), st.data())
def test_slices_partition_the_layer(one: LayerProfile, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, one.num_kv_heads))
    ranges = [r for r in (range(0, cut), range(cut, one.num_kv_heads)) if r]
    parts = [one.slice_heads(r) for r in ranges]
    for name in files.ARRAYS:
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(one, name))
    assert sum(p.num_heads for p in parts) == one.num_heads


def _valid(suffix: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"p{suffix}"
        profile().save(path)
        return path.read_bytes()


@given(st.data(), st.sampled_from(files.SUFFIXES))
def test_damaged_bytes_are_a_profile_error_or_a_valid_profile(data: st.DataObject, suffix: str) -> None:
    raw = bytearray(_valid(suffix))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    parse = files.parse_json if suffix == ".json" else files.parse_safetensors
    try:
        assert isinstance(parse(bytes(raw)), FCProfile)  # the damage may have hit a digit
    except ProfileError as error:
        assert str(error)


@given(st.data())
def test_any_value_anywhere_is_a_profile_error_or_a_valid_profile(data: st.DataObject) -> None:
    document = json.loads(files.to_json(profile()))
    target: Any = document
    while True:  # walk to a random place, and put something there
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        key = data.draw(st.sampled_from(keys))
        inner = target[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            break
        target = inner
    target[key] = data.draw(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=5)
        | st.lists(st.integers(), max_size=3)
        | free_form
    )
    try:
        assert isinstance(files.build(document), FCProfile)
    except ProfileError as error:
        assert "expected" in str(error) or "newer than" in str(error)
