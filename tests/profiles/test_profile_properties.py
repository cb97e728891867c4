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
from fasa_compile.profiles import Budget, FCProfile, LayerProfile, ModelFacts, RopeFacts, files
from fasa_compile.profiles.schema import FC_FORMATS, REDUCTIONS

names = st.text(min_size=1, max_size=20)
fp32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
free_form = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8) | fp32,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


@st.composite
def layers(draw: st.DrawFn, name: str) -> LayerProfile:
    hkv, group, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(2, 10))
    n_fc = draw(st.integers(1, head_dim // 2))
    dims = draw(st.permutations(range(head_dim)))
    pairs = tuple((dims[2 * f], dims[2 * f + 1]) for f in range(n_fc))
    n_tip = draw(st.integers(1, n_fc))
    fcs = [sorted(draw(st.permutations(range(n_fc)))[:n_tip]) for _ in range(hkv)]

    def table(rows: int, columns: int, values: st.SearchStrategy[float]) -> torch.Tensor:
        flat = draw(st.lists(values, min_size=rows * columns, max_size=rows * columns))
        return torch.tensor(flat, dtype=torch.float32).view(rows, columns)

    return LayerProfile(
        layer=name,
        num_heads=hkv * group,
        num_kv_heads=hkv,
        head_dim=head_dim,
        rope=RopeFacts(head_dim, pairs, draw(st.floats(1e-3, 1e3))),
        dense=draw(st.booleans()),
        fcs=torch.tensor(fcs, dtype=torch.int32),
        centre=table(hkv, head_dim, fp32),
        spread=table(hkv, head_dim, st.floats(2.0**-149, 2.0**100, width=32)),
        norm=table(1, hkv * group, fp32)[0],
        n_fac=draw(st.none() | st.integers(40, 2**31 - 1)),
        stats=draw(st.dictionaries(names, fp32, max_size=2)),
    )


@st.composite
def profiles(draw: st.DrawFn) -> FCProfile:
    return FCProfile(
        layers=tuple(draw(layers(name)) for name in draw(st.lists(names, min_size=1, max_size=3, unique=True))),
        budget=Budget(draw(st.integers(40, 2**31 - 1)), draw(st.integers(0, 20)), draw(st.integers(0, 20))),
        fc_format=draw(st.sampled_from(FC_FORMATS)),
        reduction=draw(st.sampled_from(REDUCTIONS)),
        method=draw(names),
        model=ModelFacts(draw(names), draw(names), draw(st.integers(1, 1024)), draw(free_form)),
        data=draw(free_form),
        stats=draw(free_form),
    )


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


@given(layers("l"))
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


@given(layers("l"), st.data())
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
