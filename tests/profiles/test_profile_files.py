"""Files: what is saved is loaded again to the bit, and whatever else is in a file is refused by name, cheaply, and never run."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from profile_samples import half_split, layer, profile

from fasa_compile.errors import ProfileError
from fasa_compile.profiles import FCProfile, files, load_profile, shipped_profiles

SUFFIXES = (".json", ".safetensors")


def document() -> dict[str, Any]:
    return json.loads(files.to_json(profile()))


def refusal(path: Path) -> str:
    with pytest.raises(ProfileError) as error:
        FCProfile.load(path)
    message = str(error.value)
    assert message.startswith(str(path)), message
    return message


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    def write(content: Any, name: str = "profile.json") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    return write


# --- round trip ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_saved_is_loaded(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"p{suffix}"
    profile().save(path)
    assert FCProfile.load(path) == profile()
    assert load_profile(str(path)) == profile()
    assert load_profile(path) == profile()
    profile(method="other").save(str(path))  # replaces
    assert FCProfile.load(str(path)).method == "other"
    assert os.listdir(tmp_path) == [path.name]  # no temporary left


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_of_schema_1_have_no_affine_normaliser(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"p{suffix}"
    with monkeypatch.context() as older:
        older.setattr(files, "ARRAYS", {name: facts for name, facts in files.ARRAYS.items() if name != "affine"})
        profile(schema_version=1).save(path)
    found = FCProfile.load(path)
    assert found == profile(layers=tuple(replace(x, affine=None) for x in profile().layers))
    assert found.schema_version == 2
    found.save(path)  # as what it is now
    assert FCProfile.load(path) == found


def test_loaded_tensors_can_be_written_and_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    profile().save(path)
    first = FCProfile.load(path)
    first.layers[0].centre.add_(1)
    assert torch.equal(first.layers[1].centre, profile().layers[1].centre)
    assert FCProfile.load(path) == profile()


def test_json_is_one_line_per_field() -> None:
    lines = files.to_json(profile()).splitlines()
    assert sum(line.lstrip().startswith('"fcs": [[') for line in lines) == 2
    assert json.loads("\n".join(lines))["layers"][0]["fcs"] == [[0, 2], [1, 3]]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    profile().save(path)

    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        profile(method="other").save(path)
    monkeypatch.undo()
    assert FCProfile.load(path) == profile()
    assert os.listdir(tmp_path) == ["p.json"]


def test_saving_refuses_what_loading_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProfileError, match=r"\.json or \.safetensors"):
        profile().save(tmp_path / "p.pt")
    monkeypatch.setattr(files, "MAX_VALUES", 20)
    with pytest.raises(ProfileError, match=r"save as \.safetensors"):
        profile().save(tmp_path / "p.json")
    assert os.listdir(tmp_path) == []


# --- the walk -----------------------------------------------------------------------------------------------------------


def _set(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def edit(d: dict[str, Any]) -> None:
        target: Any = d
        for key in keys[:-1]:
            target = target[key]
        target[keys[-1]] = to

    return edit


def _drop(*keys: Any) -> Callable[[dict[str, Any]], None]:
    def edit(d: dict[str, Any]) -> None:
        target: Any = d
        for key in keys[:-1]:
            target = target[key]
        del target[keys[-1]]

    return edit


L0 = ("layers", 0)
WRONG: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (_drop("schema_version"), "schema_version: expected 2, found none"),
    (_set("schema_version", to="1"), "schema_version: expected a whole number"),
    (_set("schema_version", to=True), "schema_version: expected a whole number"),
    (_set("schema_version", to=0), "schema_version: expected a whole number"),
    (_drop("model"), "model: expected a value, found no such key"),
    (_set("model", to=[]), "model: expected a dict, found list of 0"),
    (_drop("model", "weights_hash"), "model.weights_hash: expected a value"),
    (_set("model", "num_layers", to=10**30), "model.num_layers: expected a whole number in [1, 1024]"),
    (_set("model", "architecture", to="x" * 5000), "model.architecture: expected a non-empty string of at most"),
    (_set("model", "extra", to=3), "model.extra: expected a dict"),
    (_set("nonsense", to=1), "unknown key str 'nonsense'"),
    (_set(*L0, "fcs_per_head", to=1), "layers[0]: expected only the keys"),
    (_set(*L0, "rope", "base", to=10000), "layers[0].rope: expected only the keys"),
    (_set("budget", "n_fac", to=0), "budget: n_fac: expected a number of tokens"),
    (_set("budget", "n_fac", to=-1), "budget: n_fac"),
    (_set("budget", "n_fac", to=2.5), "budget: n_fac: expected a whole number of tokens, found float 2.5"),
    (_set("budget", "n_fac", to="64"), "budget: n_fac: expected a whole number of tokens, found str '64'"),
    (_set("budget", "n_sink", to=200), "budget: n_sink + n_recent"),
    (_set("fc_format", to="int3"), "fc_format: expected one of"),
    (_set("reduction", to=["static"]), "reduction: expected one of"),
    (_set("method", to=None), "method: expected a non-empty string"),
    (_set("layers", to={}), "layers: expected a list of 1 to 1024 layers"),
    (_set("layers", to=[]), "layers: expected a list of 1 to 1024 layers"),
    (_set("layers", to=[0] * 1025), "layers: expected a list of 1 to 1024 layers, found list of 1025"),
    (_set(*L0, to=None), "layers[0]: expected a dict, found None"),
    (_set(*L0, "layer", to="model.layers.1.self_attn"), "layers[1].layer: expected a layer once"),
    (_set(*L0, "layer", to=3), "layers[0].layer: expected a non-empty string"),
    (_set(*L0, "num_heads", to=2**20), "layers[0].num_heads: expected a whole number in [1, 1024]"),
    (_set(*L0, "num_heads", to=5), "layers[0].norm: expected a list of 5, found list of 4"),
    (_set(*L0, "num_kv_heads", to=-2), "layers[0].num_kv_heads: expected a whole number"),
    (_set(*L0, "head_dim", to=10**9), "layers[0].head_dim: expected a whole number in [2, 4096]"),
    (_set(*L0, "dense", to="false"), "layers[0].dense: expected true or false"),
    (_set(*L0, "n_fac", to=0.5), "layers[0].n_fac: expected a whole number"),
    (_set(*L0, "n_fac", to=7), "layers[0].n_fac: expected at least the 20 forced tokens"),
    (_set(*L0, "rope", "pairs", to="all"), "layers[0].rope.pairs: expected a list of pairs"),
    (_set(*L0, "rope", "pairs", 1, to=[0, 5]), "layers[0].rope.pairs[1][0]: expected a dim that no other FC rotates"),
    (_set(*L0, "rope", "pairs", 1, to=[1, 5, 6]), "layers[0].rope.pairs[1]: expected two dims"),
    (_set(*L0, "rope", "pairs", 1, to=7), "layers[0].rope.pairs[1]: expected two dims"),
    (_set(*L0, "rope", "pairs", 1, 1, to=8), "layers[0].rope.pairs[1][1]: expected a whole number in [0, 7]"),
    (_set(*L0, "rope", "magnitude", to=-1), "layers[0].rope.magnitude: expected a positive"),
    (_set(*L0, "rope", "magnitude", to=10**400), "layers[0].rope.magnitude: expected a positive"),
    (_set(*L0, "rope", "head_dim", to=16), "layers[0].rope.head_dim: expected the layer's head_dim"),
    (_set(*L0, "fcs", 0, 1, to=4), "layers[0].fcs[0][1]: expected an FC index in [0, 3], found 4"),
    (_set(*L0, "fcs", 0, 1, to=2**40), "layers[0].fcs[0][1]: expected a whole number"),
    (_set(*L0, "fcs", 0, 1, to=-1), "layers[0].fcs[0][1]: expected a whole number"),
    (_set(*L0, "fcs", 0, 1, to=2.0), "layers[0].fcs[0][1]: expected a whole number"),
    (_set(*L0, "fcs", 0, 1, to=True), "layers[0].fcs[0][1]: expected a whole number"),
    (_set(*L0, "fcs", 0, to=[2, 0]), "layers[0].fcs[0][1]: expected ascending"),
    (_set(*L0, "fcs", 0, to=[2, 2]), "layers[0].fcs[0][1]: expected ascending"),
    (_set(*L0, "fcs", 1, to=[1]), "layers[0].fcs[1]: expected a list of 2, found list of 1"),
    (_set(*L0, "fcs", to=[[0, 2]]), "layers[0].fcs: expected a list of 2, found list of 1"),
    (_set(*L0, "fcs", to=[[], []]), "layers[0].fcs: expected 1 to 4 FCs"),
    (_set(*L0, "fcs", to=[0, 2]), "layers[0].fcs[0]: expected a list"),
    (_set(*L0, "fcs", to="all"), "layers[0].fcs: expected a list"),
    (_drop(*L0, "fcs"), "layers[0].fcs: expected a value, found no such key"),
    (_set(*L0, "centre", 0, 3, to=1e39), "layers[0].centre[0][3]: expected a number that fp32 can hold"),
    (_set(*L0, "centre", 0, 3, to="0"), "layers[0].centre[0][3]: expected a finite number"),
    (_set(*L0, "centre", 0, 3, to=[0]), "layers[0].centre[0][3]: expected a finite number"),
    (_set(*L0, "centre", to=[[0.0] * 8]), "layers[0].centre: expected a list of 2, found list of 1"),
    (_set(*L0, "spread", 1, 7, to=0), "layers[0].spread[1][7]: expected a positive number"),
    (_set(*L0, "spread", 1, 7, to=-1), "layers[0].spread[1][7]: expected a positive number"),
    (_set(*L0, "norm", to=[0.0] * 2), "layers[0].norm: expected a list of 4, found list of 2"),
    (_set(*L0, "stats", to=[1]), "layers[0].stats: expected a dict"),
    (_set(*L0, "stats", "x", to=None), "layers[0].stats.x: expected a finite number"),
    (_set("data", "x", to=10**30), "data.x: expected a whole number"),
]


@pytest.mark.parametrize("edit, says", WRONG, ids=[says for _, says in WRONG])
def test_every_wrong_field_is_named(write: Callable[..., Path], edit: Callable[..., None], says: str) -> None:
    content = document()
    edit(content)
    assert says in refusal(write(content))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("key", ["centre", "spread"])
def test_values_that_are_not_finite_are_named(write: Callable[..., Path], key: str, value: str) -> None:
    content = document()
    content["layers"][1][key][1][2] = "HERE"
    raw = json.dumps(content).replace('"HERE"', value).encode()
    assert f"layers[1].{key}[1][2]: expected a finite number" in refusal(write(raw))


def test_a_newer_schema_is_told_before_its_unknown_keys(write: Callable[..., Path]) -> None:
    path = write(document() | {"schema_version": 3, "regions": []})
    assert refusal(path) == f"{path}: profile schema 3 is newer than this package reads (2): upgrade fasa-compile"


@pytest.mark.parametrize(
    "raw, says",
    [
        (b"", "expected JSON"),
        (b"[]", "expected a profile: a dict"),
        (b"3", "expected a profile: a dict"),
        (b"{", "expected JSON"),
        (b'{"a": "', "a string without an end"),
        (b'{"schema_version": 1, "schema_version": 1}', "each key once, found key str 'schema_version' twice"),
        (b"\xff\xfe{\x00}\x00", "expected JSON"),
        (json.dumps({"schema_version": 1}).encode("utf-16"), "expected JSON"),
        (b'{"schema_version": ' + b"9" * 5000 + b"}", "expected JSON"),
        (b"{} {}", "expected JSON"),
    ],
)
def test_what_is_not_a_json_document_is_refused(write: Callable[..., Path], raw: bytes, says: str) -> None:
    assert says in refusal(write(raw))


# --- safetensors --------------------------------------------------------------------------------------------------------


def parts() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the document of a valid ``.safetensors`` profile."""
    one = profile()
    tensors = {f"layers.{i}.{n}": getattr(x, n).clone() for i, x in enumerate(one.layers) for n in files.ARRAYS}
    return tensors, json.loads(files.to_json(one, arrays=False))


def packed(tensors: dict[str, torch.Tensor], document: Any, key: str = files.METADATA_KEY) -> bytes:
    return safetensors.torch.save(tensors, {key: json.dumps(document)})


def test_the_parts_are_a_profile(write: Callable[..., Path]) -> None:
    assert FCProfile.load(write(packed(*parts()), "p.safetensors")) == profile()


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("layers.0.fcs", None, "layers[0].fcs: expected a tensor, found none"),
        ("layers.9.fcs", torch.zeros(1), "'layers.9.fcs': expected a tensor layers.<i>."),
        ("weight", torch.zeros(1), "'weight': expected a tensor layers.<i>."),
        ("layers.0.fcs", torch.tensor([[0, 2], [1, 3]]), "layers.0.fcs: expected dtype I32, found str 'I64'"),
        ("layers.0.centre", torch.zeros(2, 8, dtype=torch.bfloat16), "layers.0.centre: expected dtype F32"),
        ("layers.0.centre", torch.zeros(2, 4), "layers[0].centre: expected a float32 CPU tensor [2, 8]"),
        ("layers.0.centre", torch.zeros(1, 8), "layers[0].centre: expected a float32 CPU tensor [2, 8]"),
        ("layers.0.centre", torch.zeros(1, 2, 8), "layers.0.centre: expected a shape of one or two sizes"),
        ("layers.0.centre", torch.zeros(0, 2**40), "layers.0.centre shape[1]: expected a whole number in [0, 4096]"),
        ("layers.0.centre", torch.full((2, 8), float("nan")), "layers[0].centre[0][0]: expected a finite number"),
        ("layers.0.spread", torch.zeros(2, 8), "layers[0].spread[0][0]: expected a positive number"),
        (
            "layers.0.fcs",
            torch.tensor([[0, 2], [1, 4]], dtype=torch.int32),
            "layers[0].fcs[1][1]: expected an FC index",
        ),
        ("layers.0.fcs", torch.tensor([[0, 2], [3, 1]], dtype=torch.int32), "layers[0].fcs[1][1]: expected ascending"),
    ],
)
def test_a_wrong_tensor_is_named(write: Callable[..., Path], name: str, value: torch.Tensor | None, says: str) -> None:
    tensors, content = parts()
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    assert says in refusal(write(packed(tensors, content), "p.safetensors"))


def test_a_document_in_safetensors_is_checked_like_any(write: Callable[..., Path]) -> None:
    tensors, content = parts()
    content["layers"][0]["centre"] = [[0.0]]
    assert "layers[0]: expected only the keys" in refusal(write(packed(tensors, content), "p.safetensors"))
    tensors, content = parts()
    content["schema_version"] = 7
    assert "profile schema 7 is newer" in refusal(write(packed(tensors, content), "p.safetensors"))
    for bad in ([], {"layers": 3}, 3, None):
        assert "expected" in refusal(write(packed({}, bad), "p.safetensors"))


def test_tensors_of_something_else_are_refused(write: Callable[..., Path]) -> None:
    tensors, content = parts()
    says = "__metadata__.fasa_profile: expected the profile's JSON document, found none"
    assert says in refusal(write(packed(tensors, content, key="format"), "p.safetensors"))
    assert says in refusal(write(safetensors.torch.save(tensors), "p.safetensors"))


def test_every_truncation_is_refused(write: Callable[..., Path]) -> None:
    raw = packed(*parts())
    for size in [*range(0, 64), *range(64, len(raw), 97), len(raw) - 1]:
        assert "expected" in refusal(write(raw[:size], "p.safetensors"))
    assert "expected a whole safetensors file" in refusal(write(raw + b"\0", "p.safetensors"))


def test_offsets_outside_the_file_are_refused(write: Callable[..., Path]) -> None:
    raw = packed(*parts())
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    for offsets in ([0, 10**6], [2**63, 2**63 + 64], [-64, 0], [64, 0], "no", None):
        changed = json.dumps(
            header | {"layers.0.centre": header["layers.0.centre"] | {"data_offsets": offsets}}
        ).encode()
        assert "expected" in refusal(
            write(struct.pack("<Q", len(changed)) + changed + raw[8 + size :], "p.safetensors")
        )


# --- hostile files ------------------------------------------------------------------------------------------------------


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("name", ["profile.safetensors", "profile.json", "profile.pt", "profile.pkl", "profile"])
@pytest.mark.parametrize("how", ["pickle0", "pickle2", "pickle5", "torch", "zip"])
def test_pickles_are_refused_and_never_run(tmp_path: Path, write: Callable[..., Path], name: str, how: str) -> None:
    marker = tmp_path / "marker"
    if how.startswith("pickle"):
        raw = pickle.dumps(Payload(marker), protocol=int(how[-1]))
        pickle.loads(raw).close()  # the payload works
        assert marker.exists()
        marker.unlink()
    else:
        stream = io.BytesIO()
        if how == "torch":
            torch.save({"x": Payload(marker)}, stream)
        else:
            with zipfile.ZipFile(stream, "w") as archive:
                archive.writestr("data.pkl", pickle.dumps(Payload(marker)))
        raw = stream.getvalue()
    message = refusal(write(raw, name))
    if how != "pickle0" or not name.endswith(SUFFIXES):
        assert "pickle" in message
    assert not marker.exists()


def test_the_package_has_no_way_to_run_a_file() -> None:
    root = Path(files.__file__).parent
    for source in root.glob("*.py"):
        text = source.read_text()
        for word in ("import pickle", "torch.load", "eval(", "exec(", "yaml"):
            assert word not in text, f"{source.name}: {word}"


MEGA = 1 << 20
HOSTILE: dict[str, Callable[[], bytes]] = {
    "deep lists": lambda: b"[" * (8 * MEGA),
    "deep, balanced": lambda: b'{"schema_version": 1, "data": ' + b"[" * 90_000 + b"]" * 90_000 + b"}",
    "deep dicts": lambda: b'{"a":' * MEGA,
    "many lists": lambda: b"[" + b"[]," * (8 * MEGA) + b"[]]",
    "many dicts": lambda: b"[" + b"{}," * (8 * MEGA) + b"{}]",
    "many numbers": lambda: b"[" + b"1," * (15 * MEGA) + b"1]",
    "many floats": lambda: b"[" + b"1.5," * (7 * MEGA) + b"1]",
    "many strings": lambda: b"[" + b'"",' * (10 * MEGA) + b'""]',
    "one string": lambda: b'"' + b"x" * (30 * MEGA) + b'"',
    "an open string": lambda: b'"' + b"x" * (30 * MEGA),
    "an open string of escapes": lambda: b'"' + b'\\"' * 190_000,
    "a large number": lambda: b'{"schema_version": ' + b"9" * (30 * MEGA) + b"}",
    "many keys": lambda: b"{" + b",".join(b'"%d":0' % i for i in range(49_000)) + b"}",
    "the same key, often": lambda: b"{" + b",".join([b'"a":0'] * 49_000) + b"}",
    "many different keys, and one twice": lambda: (
        b"{" + b",".join(b'"%d":0' % min(i, 48_998) for i in range(49_000)) + b"}"
    ),
    "few values, many promised": lambda: json.dumps(
        document() | {"layers": [document()["layers"][0] | {"num_heads": 1024, "num_kv_heads": 1024, "head_dim": 4096}]}
    ).encode(),
}


@pytest.mark.parametrize("name", list(HOSTILE))
@pytest.mark.parametrize("inside", [False, True], ids=["json", "safetensors header"])
def test_hostile_json_is_refused_cheaply(write: Callable[..., Path], name: str, inside: bool) -> None:
    raw = HOSTILE[name]()
    if inside:
        raw = raw[: 16 << 20]
        path = write(struct.pack("<Q", len(raw)) + raw, "p.safetensors")
    else:
        path = write(raw)
    start = time.process_time()
    refusal(path)
    assert time.process_time() - start < 2.0
    tracemalloc.start()
    refusal(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * len(raw) + (32 << 20), f"{peak} bytes for a file of {len(raw)}"


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    for name, limit in (("p.json", files.MAX_JSON_BYTES), ("p.safetensors", files.MAX_TENSORS_BYTES)):
        path = tmp_path / name
        with path.open("wb") as stream:
            stream.truncate(1 << 40)  # sparse: no disk is used
        tracemalloc.start()
        assert f"expected at most {limit} bytes, found {1 << 40} bytes" in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


def test_a_header_may_not_promise_more_than_there_is(write: Callable[..., Path]) -> None:
    for size in (2**63, 2**64 - 1, 100):
        assert "expected a whole safetensors file" in refusal(write(struct.pack("<Q", size) + b"{}", "p.safetensors"))


def test_nested_free_form_data_is_bounded(write: Callable[..., Path]) -> None:
    deep: Any = 1
    for _ in range(files.schema.MAX_DEPTH - 3):
        deep = {"a": deep}
    with pytest.raises(ProfileError, match="nesting"):
        profile(data=deep)
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with pytest.raises(ProfileError, match="nesting"):
        profile(stats=loop)
    assert "nesting" in refusal(write(document() | {"data": deep}))


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    assert "expected a readable file, found No such file" in refusal(tmp_path / "absent.json")
    (tmp_path / "folder.json").mkdir()
    assert "expected a regular file" in refusal(tmp_path / "folder.json")
    os.mkfifo(tmp_path / "pipe.json")  # opening it would wait for a writer
    assert "expected a regular file" in refusal(tmp_path / "pipe.json")
    assert "expected a file ending in .json or .safetensors" in refusal(tmp_path / "profile.yaml")


def test_messages_are_printable_and_short(write: Callable[..., Path]) -> None:
    for value in ("\ud800\n\x1b[31m" * 500, [0] * 10_000, {"a": "b" * 4000}):
        message = refusal(write(document() | {"fc_format": value}))
        assert message.isascii() and "\n" not in message and len(message) < 600


# --- shipped ------------------------------------------------------------------------------------------------------------


def test_shipped_profiles_load_by_name() -> None:
    for name in shipped_profiles():
        assert isinstance(load_profile(name), FCProfile)


@pytest.mark.parametrize("name", ["no-such-model", "", "..", "README.md", "__init__"])
def test_an_unknown_name_lists_what_is_shipped(name: str) -> None:
    with pytest.raises(ProfileError, match="the name of a shipped profile") as error:
        load_profile(name)
    for known in shipped_profiles():
        assert known in str(error.value)


def test_partial_rotary_round_trips(tmp_path: Path) -> None:
    one = profile(layers=(layer(rope=half_split(8, 4, 1.27), fcs=torch.tensor([[0], [1]], dtype=torch.int32)),))
    for suffix in SUFFIXES:
        one.save(tmp_path / f"p{suffix}")
        assert FCProfile.load(tmp_path / f"p{suffix}") == one


def test_the_readme_documents_every_field() -> None:
    readme = (Path(files.__file__).parent / "README.md").read_text()

    def paths(value: Any, path: str) -> list[str]:
        if path in ("layers[i].stats", "data", "stats", "model.extra") or not isinstance(value, dict):
            return [path]
        inner = [paths(v, f"{path}.{k}".lstrip(".")) for k, v in value.items()]
        return [p for found in inner for p in found]

    content = document()
    for path in [
        *paths({k: v for k, v in content.items() if k != "layers"}, ""),
        *paths(content["layers"][0], "layers[i]"),
    ]:
        assert f"`{path}`" in readme, path
