"""Reading and writing profiles. A file is data from strangers: it is bounded before it is parsed and checked as it is read.

``.json``          the whole profile, arrays as nested lists; fp32 values are written so that they read back to the bit.
``.safetensors``   each layer's arrays as tensors ``layers.<i>.<name>``; the rest of the document, as JSON, is the one metadata
                   entry ``fasa_profile``.

Nothing here unpickles or evaluates anything. Every failure to read is one ``ProfileError`` that names the file, the field,
what was expected, what was found and what to do.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from fasa_compile.errors import BudgetError, ProfileError
from fasa_compile.profiles import schema
from fasa_compile.profiles.schema import FieldError, shown, text, truth, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bounds on a file, checked before anything is allocated for its content. 80 layers of 8 KV heads of 128 dims are 4 MiB of JSON.
MAX_JSON_BYTES = 32 << 20
MAX_TENSORS_BYTES = 64 << 20
MAX_HEADER_BYTES = 16 << 20
MAX_CONTAINERS = 200_000
MAX_STRINGS = 100_000
MAX_VALUES = 4_000_000

SUFFIXES = (".json", ".safetensors")
METADATA_KEY = "fasa_profile"
#: name -> (dtype, safetensors' name of it)
ARRAYS: dict[str, tuple[torch.dtype, str]] = {
    "fcs": (torch.int32, "I32"),
    "centre": (torch.float32, "F32"),
    "spread": (torch.float32, "F32"),
    "norm": (torch.float32, "F32"),
    "affine": (torch.float32, "F32"),
}
#: Arrays that files of schema version 1 do not have.
SINCE_2 = ("affine",)
FP32_MAX = torch.finfo(torch.float32).max

_PICKLE = "pickles are never loaded, since loading one runs code from it"
_DAMAGED = "The file is damaged or no profile: get it again."


# --- the way in ---------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str]) -> schema.FCProfile:
    """Reads and checks a profile file; raises ``ProfileError``."""
    file = Path(path)
    with _naming(str(file)):
        suffix = _suffix(file)
        raw = _read(file, MAX_JSON_BYTES if suffix == ".json" else MAX_TENSORS_BYTES)
        return parse_json(raw) if suffix == ".json" else parse_safetensors(raw)


def load_profile(name_or_path: str | os.PathLike[str]) -> schema.FCProfile:
    """The shipped profile of that name (``shipped_profiles``), or the one in that file.

    A string without a suffix ``.json`` or ``.safetensors`` and without a directory is a name. Raises ``ProfileError``.
    """
    if not isinstance(name_or_path, str) or name_or_path.endswith(SUFFIXES) or set(name_or_path) & {"/", os.sep}:
        return load(name_or_path)
    shipped = _shipped()
    if name_or_path not in shipped:
        raise ProfileError(
            f"profile {shown(name_or_path)}: expected a path ending in .json or .safetensors, or the name of a shipped profile"
            f" ({', '.join(sorted(shipped)) or 'none are shipped'}). Give a file, or make a profile with fasa_compile.calibrate()."
        )
    with resources.as_file(shipped[name_or_path]) as file:
        return load(file)


def shipped_profiles() -> tuple[str, ...]:
    """Names that ``load_profile`` knows, sorted."""
    return tuple(sorted(_shipped()))


def _shipped() -> dict[str, Any]:
    found = resources.files("fasa_compile.profiles").iterdir()
    return {Path(entry.name).stem: entry for entry in found if entry.name.endswith(SUFFIXES)}


@contextmanager
def _naming(file: str) -> Iterator[None]:
    """Adds the file's name to whatever ``ProfileError`` arises inside."""
    try:
        yield
    except FieldError as error:
        raise error.in_file(file) from None
    except ProfileError as error:
        raise ProfileError(f"{file}: {error}") from None


def _suffix(file: Path) -> str:
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise FieldError(
            "", "a file ending in .json or .safetensors", shown(file.name), f"Other formats are not read; {_PICKLE}."
        )
    return suffix


def _read(file: Path, limit: int) -> bytes:
    try:
        facts = file.stat()
        if not stat.S_ISREG(facts.st_mode):  # a pipe or a device would block or never end
            raise FieldError("", "a regular file", "something else", "Give the path of a profile file.")
        if facts.st_size > limit:
            raise FieldError("", f"at most {limit} bytes", f"{facts.st_size} bytes", "No profile is this large.")
        with file.open("rb") as stream:
            raw = stream.read(facts.st_size + 1)
    except OSError as error:
        raise FieldError("", "a readable file", error.strerror or str(error), "Check the path.") from None
    if len(raw) != facts.st_size:
        raise FieldError("", "a file at rest", "a size that changes while it is read", "Try again when it is written.")
    # A safetensors header of 0x..0280 bytes starts like a pickle, and goes on with a brace.
    if raw.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")) and raw[8:9] != b"{":
        raise FieldError("", "a profile", f"a pickle or torch archive ({_PICKLE})", "Ask for a .json or .safetensors.")
    return raw


# --- bytes to plain data ------------------------------------------------------------------------------------------------

_MARK = re.compile(rb'["\[\]{}]')
_REST_OF_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def bounded_json(raw: bytes) -> Any:
    """Parses UTF-8 JSON whose size in memory and depth were bounded first; raises ``FieldError``.

    Python's parser makes some 60 bytes of two (``[]``) and recurses as deep as the text says, so what it will build is
    counted on the text, in time linear in it. Duplicate keys are refused; NaN and infinities are left for the walk to
    find, which knows where they are.
    """
    for what, count, limit in (
        ("lists and dicts", raw.count(b"[") + raw.count(b"{"), MAX_CONTAINERS),
        ("strings", raw.count(b'"') // 2, MAX_STRINGS),
        ("values", raw.count(b","), MAX_VALUES),
    ):
        if count > limit:
            raise FieldError(
                "", f"at most {limit} {what}", f"{count}", "No profile is this large: save as .safetensors."
            )
    _check_depth(raw)

    def unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    raise FieldError("", "each key once", f"key {shown(key)} twice", _DAMAGED)
                seen.add(key)
        return found

    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except FieldError:
        raise
    except RecursionError:
        raise FieldError("", f"nesting of at most {schema.MAX_DEPTH} levels", "more", _DAMAGED) from None
    except ValueError as error:
        raise FieldError("", "JSON", f"none: {shown(str(error))}", _DAMAGED) from None


def _check_depth(raw: bytes) -> None:
    depth = at = 0
    while mark := _MARK.search(raw, at):
        at = mark.end()
        char = mark.group()
        if char == b'"':
            rest = _REST_OF_STRING.match(raw, at)
            if rest is None:
                raise FieldError("", "JSON", "a string without an end", _DAMAGED)
            at = rest.end()
        elif char in b"[{":
            depth += 1
            if depth > schema.MAX_DEPTH:
                raise FieldError("", f"nesting of at most {schema.MAX_DEPTH} levels", "more", _DAMAGED)
        else:
            depth -= 1


def parse_json(raw: bytes) -> schema.FCProfile:
    """A profile from the bytes of a ``.json`` file."""
    return build(bounded_json(raw))


def parse_safetensors(raw: bytes) -> schema.FCProfile:
    """A profile from the bytes of a ``.safetensors`` file.

    The header is bounded and read here, and every tensor's dtype and shape checked, before the safetensors library sees
    the file; it then checks that the tensors tile the data exactly.
    """
    size = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or size > len(raw) - 8:
        found = f"{len(raw)} bytes of which the header claims {size}"
        raise FieldError("", "a whole safetensors file", found, _DAMAGED)
    if size > MAX_HEADER_BYTES:
        raise FieldError("", f"a header of at most {MAX_HEADER_BYTES} bytes", str(size), "No profile is this large.")
    header = bounded_json(raw[8 : 8 + size])
    if not isinstance(header, dict):
        raise FieldError("header", "a dict", shown(header), _DAMAGED)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(METADATA_KEY), str):
        raise FieldError(
            f"__metadata__.{METADATA_KEY}",
            "the profile's JSON document",
            "none",
            "These are tensors of something else: give a file that FCProfile.save() wrote.",
        )
    document = bounded_json(metadata[METADATA_KEY].encode("utf-8", "surrogatepass"))
    layers = document.get("layers") if isinstance(document, dict) else None
    known = {
        f"layers.{i}.{name}": name for i in range(len(layers) if isinstance(layers, list) else 0) for name in ARRAYS
    }
    for name, facts in header.items():
        if name not in known:
            raise FieldError(
                shown(name), "a tensor layers.<i>.<" + "|".join(ARRAYS) + ">", "an unknown tensor", _DAMAGED
            )
        dtype = facts.get("dtype") if isinstance(facts, dict) else None
        if dtype != ARRAYS[known[name]][1]:
            raise FieldError(name, f"dtype {ARRAYS[known[name]][1]}", shown(dtype))
        shape = facts.get("shape")
        if not isinstance(shape, list) or len(shape) > 2:
            raise FieldError(name, "a shape of one or two sizes", shown(shape))
        for axis, n in enumerate(shape):
            whole(n, f"{name} shape[{axis}]", 0, schema.MAX_HEAD_DIM)
    try:
        tensors = load_tensors(raw)
    except (SafetensorError, ValueError, OverflowError) as error:
        raise FieldError("", "a whole safetensors file", shown(str(error)), _DAMAGED) from None
    return build(document, tensors)


# --- plain data to a profile --------------------------------------------------------------------------------------------


def build(document: Any, tensors: dict[str, Tensor] | None = None) -> schema.FCProfile:
    """Walks a parsed document and makes the profile; ``tensors`` holds the arrays where the document does not."""
    if not isinstance(document, dict):
        raise FieldError("", "a profile: a dict", shown(document), _DAMAGED)
    if "schema_version" not in document:
        raise FieldError("schema_version", str(schema.SCHEMA_VERSION), "none", "This is no profile, or a damaged one.")
    # Before the keys: a newer schema has keys that this one does not know, and that is not what is wrong with it.
    schema.check_version(document["schema_version"])
    d = _keys(
        document,
        "",
        ("schema_version", "model", "method", "fc_format", "reduction", "budget", "data", "stats", "layers"),
    )
    model = _keys(d["model"], "model", ("architecture", "weights_hash", "num_layers", "extra"))
    tokens = _keys(d["budget"], "budget", ("n_fac", "n_sink", "n_recent"))
    layers = d["layers"]
    if not isinstance(layers, list) or not 1 <= len(layers) <= schema.MAX_LAYERS:
        raise FieldError("layers", f"a list of 1 to {schema.MAX_LAYERS} layers", shown(layers))
    with _under("model"):
        facts = schema.ModelFacts(**model)
    try:
        budget = schema.Budget(**tokens)
    except BudgetError as error:
        raise ProfileError(f"budget: {error}") from None
    old = d["schema_version"] < 2
    return schema.FCProfile(
        layers=tuple(_layer(entry, i, tensors, SINCE_2 if old else ()) for i, entry in enumerate(layers)),
        budget=budget,
        fc_format=d["fc_format"],
        reduction=d["reduction"],
        method=d["method"],
        model=facts,
        data=d["data"],
        stats=d["stats"],
    )


@contextmanager
def _under(path: str) -> Iterator[None]:
    """Puts ``path`` before the field of whatever ``FieldError`` arises inside."""
    try:
        yield
    except FieldError as error:
        raise error.under(path) from None


def _keys(value: Any, path: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """``value`` as a dict with exactly these keys."""
    if not isinstance(value, dict):
        raise FieldError(path, "a dict", shown(value))
    for key in keys:
        if key not in value:
            raise FieldError(f"{path}.{key}".lstrip("."), "a value", "no such key")
    for key in value:
        if key not in keys:
            raise FieldError(
                path or "profile",
                "only the keys " + ", ".join(keys),
                f"unknown key {shown(key)}",
                "Remove it; if it is misspelt, correct it.",
            )
    return value


def _layer(value: Any, index: int, tensors: dict[str, Tensor] | None, absent: tuple[str, ...]) -> schema.LayerProfile:
    """One layer; arrays in ``absent`` get the schema's default."""
    arrays = {name: dtype for name, (dtype, _) in ARRAYS.items() if name not in absent}
    own = ("layer", "num_heads", "num_kv_heads", "head_dim", "rope", "dense", "n_fac", "stats")
    path = f"layers[{index}]"
    entry = dict(_keys(value, path, own if tensors is not None else (*own, *arrays)))
    with _under(path):
        hq = whole(entry["num_heads"], "num_heads", 1, schema.MAX_HEADS)
        hkv = whole(entry["num_kv_heads"], "num_kv_heads", 1, schema.MAX_HEADS)
        dims = whole(entry["head_dim"], "head_dim", 2, schema.MAX_HEAD_DIM)
        text(entry["layer"], "layer")
        truth(entry["dense"], "dense")
        entry["rope"] = _rope(entry["rope"])
        shapes: dict[str, tuple[int | None, ...]] = {
            "fcs": (hkv, None),
            "centre": (hkv, dims),
            "spread": (hkv, dims),
            "norm": (hq,),
            "affine": (hq, 1 + dims),
        }
        for name, dtype in arrays.items():
            if tensors is None:
                entry[name] = _array(entry[name], name, shapes[name], dtype)
            elif f"layers.{index}.{name}" in tensors:
                # A copy of its own: safetensors' share one buffer, and are read-only views of the file's bytes.
                entry[name] = tensors[f"layers.{index}.{name}"].clone()
            else:
                raise FieldError(name, "a tensor", "none")
        return schema.LayerProfile(**entry)


def _rope(value: Any) -> schema.RopeFacts:
    rope = _keys(value, "rope", ("head_dim", "pairs", "magnitude"))
    pairs = rope["pairs"]
    if not isinstance(pairs, list):
        raise FieldError("rope.pairs", "a list of pairs of dims", shown(pairs))
    with _under("rope"):
        return schema.RopeFacts(
            head_dim=rope["head_dim"],
            pairs=tuple(tuple(pair) if isinstance(pair, list) else pair for pair in pairs),
            magnitude=rope["magnitude"],
        )


def _array(value: Any, path: str, shape: tuple[int | None, ...], dtype: torch.dtype) -> Tensor:
    """Nested lists as a tensor, each length and each number checked."""
    if not isinstance(value, list) or (shape[0] is not None and len(value) != shape[0]):
        want = "a list" if shape[0] is None else f"a list of {shape[0]}"
        raise FieldError(path, want, shown(value), "Per-head data is never broadcast: give every head its own row.")
    if len(shape) == 2:
        inner = shape[1]
        if inner is None:  # as many as the first row has
            inner = len(value[0]) if isinstance(value[0], list) else None
        rows = [_array(row, f"{path}[{i}]", (inner,), dtype) for i, row in enumerate(value)]
        return torch.stack(rows)
    for i, item in enumerate(value):
        if dtype == torch.int32:
            whole(item, f"{path}[{i}]", 0, schema.MAX_INT)
        elif abs(schema.number(item, f"{path}[{i}]")) > FP32_MAX:
            raise FieldError(f"{path}[{i}]", "a number that fp32 can hold", shown(item))
    return torch.tensor(value, dtype=dtype)


# --- the way out --------------------------------------------------------------------------------------------------------


def save(profile: schema.FCProfile, path: str | os.PathLike[str]) -> None:
    """Writes a profile; raises ``ProfileError`` for a suffix or size that ``load`` would refuse."""
    file = Path(path)
    with _naming(str(file)):
        if _suffix(file) == ".json":
            raw = to_json(profile).encode()
            bounded_json(raw)  # what cannot be read back is not written
            limit = MAX_JSON_BYTES
        else:
            tensors = {
                f"layers.{i}.{n}": getattr(x, n).contiguous() for i, x in enumerate(profile.layers) for n in ARRAYS
            }
            raw = save_tensors(tensors, {METADATA_KEY: to_json(profile, arrays=False)})
            limit = MAX_TENSORS_BYTES
        if len(raw) > limit:
            raise FieldError(
                "", f"at most {limit} bytes", f"{len(raw)} bytes", "Save as .safetensors, or drop dense layers."
            )
    _replace(file, raw)


def _replace(file: Path, raw: bytes) -> None:
    """Writes beside ``file`` and renames, so that a reader sees the old file or the new one, never a part."""
    handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(raw)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes private files; a profile is to be shared
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise


def to_json(profile: schema.FCProfile, arrays: bool = True) -> str:
    """The profile's document, one line per field of a layer so that two profiles can be compared with ``diff``."""
    head = {
        "schema_version": profile.schema_version,
        "model": {
            "architecture": profile.model.architecture,
            "weights_hash": profile.model.weights_hash,
            "num_layers": profile.model.num_layers,
            "extra": profile.model.extra,
        },
        "method": profile.method,
        "fc_format": profile.fc_format,
        "reduction": profile.reduction,
        "budget": {
            "n_fac": profile.budget.n_fac,
            "n_sink": profile.budget.n_sink,
            "n_recent": profile.budget.n_recent,
        },
        "data": profile.data,
        "stats": profile.stats,
    }
    lines = [f" {_line(key)}: {_line(value)}," for key, value in head.items()]
    layers = [",\n".join(f"   {_line(k)}: {_line(v)}" for k, v in _entry(x, arrays).items()) for x in profile.layers]
    body = ",\n".join(f"  {{\n{layer}\n  }}" for layer in layers)
    return "{\n" + "\n".join(lines) + '\n "layers": [\n' + body + "\n ]\n}\n"


def _line(value: Any) -> str:
    # A Python float of an fp32 value prints enough digits to come back as the same fp32.
    return json.dumps(value, allow_nan=False)


def _entry(layer: schema.LayerProfile, arrays: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "layer": layer.layer,
        "num_heads": layer.num_heads,
        "num_kv_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "rope": {"head_dim": layer.rope.head_dim, "pairs": layer.rope.pairs, "magnitude": layer.rope.magnitude},
        "dense": layer.dense,
        "n_fac": layer.n_fac,
        "stats": layer.stats,
    }
    if arrays:
        entry |= {name: getattr(layer, name).tolist() for name in ARRAYS}
    return entry
