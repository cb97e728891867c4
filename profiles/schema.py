"""What a profile is: which frequency chunks (FCs) of which heads a model's decode attention is scored by.

Everything here is frozen data that has been checked: a profile that exists is a profile that can be used. Files are read
and written by ``fasa_compile.profiles.files``; that a profile belongs to a graph is checked by ``check_layer``.

Dimension letters (as in ``fasa_compile.sites``): Hq query heads, Hkv KV heads, D dims of a head, W dominant dims of a head
(2 * n_tip).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fasa_compile.errors import BudgetError, ProfileError

if TYPE_CHECKING:
    from os import PathLike

    from fasa_compile.sites import Rope

SCHEMA_VERSION = 2

FC_FORMATS = ("fp32", "bf16", "fp16", "fp8", "int8", "int4")
REDUCTIONS = ("static", "affine", "softmax_sum", "max")

MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 4096
MAX_TEXT = 4096  # characters of a name or another string
MAX_DEPTH = 32  # nesting of a document, its free-form dicts included
MAX_INT = 2**31 - 1

#: RoPE magnitudes (YaRN's attention factor) closer than this are one, or closer than what both measurements are known to.
MAGNITUDE_TOLERANCE = 1e-3

_REMAKE = "Make the profile again with fasa_compile.calibrate()."


class FieldError(ProfileError):
    """A ``ProfileError`` about one field: where it is, what was expected, what was found, what to do.

    ``path`` is the field's path in the document, e.g. ``layers[3].fcs[0][2]``; ``file`` is added by whoever knows it.
    """

    def __init__(self, path: str, expected: str, found: str, advice: str = _REMAKE, file: str = "") -> None:
        super().__init__(path, expected, found, advice, file)
        self.path, self.expected, self.found, self.advice, self.file = path, expected, found, advice, file

    def under(self, parent: str) -> FieldError:
        """The same error, seen from the document that holds the field at ``parent``."""
        inner = self.path if self.path.startswith("[") or not self.path else f".{self.path}"
        return FieldError(f"{parent}{inner}", self.expected, self.found, self.advice, self.file)

    def in_file(self, file: str) -> FieldError:
        return FieldError(self.path, self.expected, self.found, self.advice, file)

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.file, self.path) if part)
        return f"{where}: expected {self.expected}, found {self.found}. {self.advice}"


def shown(value: object, limit: int = 80) -> str:
    """``value`` for an error message: its type and a bounded, printable rendering."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor {list(value.shape)}"
    if isinstance(value, (list, tuple, dict)):
        return f"{type(value).__name__} of {len(value)}"
    # An int of a million digits must not be rendered to be cut off.
    text = "a very large number" if isinstance(value, int) and abs(value) > 2**128 else ascii(value)
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    return text if value is None else f"{type(value).__name__} {text}"


def whole(value: object, path: str, low: int, high: int) -> int:
    """``value`` as an int in ``[low, high]``; a bool, float or string is a ``FieldError``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise FieldError(path, f"a whole number in [{low}, {high}]", shown(value))
    if not low <= value <= high:
        raise FieldError(path, f"a whole number in [{low}, {high}]", shown(value))
    return value


def number(value: object, path: str, expected: str = "a finite number") -> float:
    """``value`` as a finite float; a bool or string, NaN or an infinity is a ``FieldError``."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise FieldError(path, expected, shown(value))
    # Comparing before converting: float() of a huge int overflows.
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise FieldError(path, expected, shown(value))
    return float(value)


def text(value: object, path: str, among: tuple[str, ...] = (), empty: bool = False) -> str:
    """``value`` as a string of at most ``MAX_TEXT`` characters, one of ``among`` where that is given."""
    if among:
        if not isinstance(value, str) or value not in among:
            raise FieldError(path, "one of " + ", ".join(among), shown(value))
        return value
    if not isinstance(value, str) or len(value) > MAX_TEXT or not (value or empty):
        kind = "a string" if empty else "a non-empty string"
        raise FieldError(path, f"{kind} of at most {MAX_TEXT} characters", shown(value))
    return value


def truth(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise FieldError(path, "true or false", shown(value))
    return value


def plain(value: object, path: str, depth: int = 0) -> Any:
    """``value`` as plain JSON data (dicts with string keys, lists, strings, finite numbers, booleans, null), copied.

    Tuples become lists, so that what is saved equals what is loaded.
    """
    if depth > MAX_DEPTH - 4:
        raise FieldError(path, f"nesting of at most {MAX_DEPTH - 4} levels", "more")
    if isinstance(value, Mapping):
        return {text(k, f"{path} key", empty=True): plain(v, f"{path}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, str):
        return text(value, path, empty=True)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return whole(value, path, -(2**63), 2**63 - 1)
    return number(value, path, "plain JSON data with finite numbers")


def _dict(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise FieldError(path, "a dict with string keys", shown(value))
    return plain(value, path)


def _first(bad: Tensor) -> tuple[int, ...]:
    return tuple(bad.nonzero()[0].tolist())


def _array(value: object, path: str, shape: tuple[int | None, ...], dtype: torch.dtype) -> Tensor:
    """Checks dtype, shape (``None``: any size), place and, for floats, that all values are finite."""
    name = str(dtype).removeprefix("torch.")
    want = f"a {name} CPU tensor [{', '.join('any' if n is None else str(n) for n in shape)}]"
    if not isinstance(value, Tensor) or value.dtype != dtype or value.device.type != "cpu":
        found = shown(value) + (f" on {value.device}" if isinstance(value, Tensor) else "")
        raise FieldError(path, want, found)
    if value.dim() != len(shape) or any(n not in (None, m) for n, m in zip(shape, value.shape, strict=True)):
        raise FieldError(path, want, shown(value), "Per-head data is never broadcast: give every head its own row.")
    if dtype.is_floating_point:
        bad = ~value.isfinite()
        if bool(bad.any()):
            at = _first(bad)
            raise FieldError(path + "".join(f"[{i}]" for i in at), "a finite number", str(value[at].item()))
    return value


@dataclass(frozen=True)
class RopeFacts:
    """The rotary embedding seen at calibration; ``check_layer`` compares it with the one proven on the graph.

    ``pairs[f]`` are the two dims of a head that FC ``f`` turns in one plane, ``magnitude`` the common factor on rotated dims
    (1.0 for plain RoPE). No pairs: the attention has no rotary embedding, and its FCs are single dims. The fields are those of
    ``fasa_compile.sites.Rope``. Raises ``ProfileError`` when two FCs share a
    dim, a dim lies outside the head, or the magnitude is not positive.
    """

    head_dim: int
    pairs: tuple[tuple[int, int], ...]
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        whole(self.head_dim, "head_dim", 2, MAX_HEAD_DIM)
        if not isinstance(self.pairs, tuple) or len(self.pairs) > self.head_dim // 2:
            raise FieldError("pairs", f"at most {self.head_dim // 2} pairs of dims", shown(self.pairs))
        owner: dict[int, int] = {}
        for f, pair in enumerate(self.pairs):
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise FieldError(f"pairs[{f}]", "two dims of a head", shown(pair))
            for side, dim in enumerate(pair):
                whole(dim, f"pairs[{f}][{side}]", 0, self.head_dim - 1)
                if dim in owner:
                    raise FieldError(
                        f"pairs[{f}][{side}]",
                        "a dim that no other FC rotates",
                        f"dim {dim}, also in pairs[{owner[dim]}]",
                    )
                owner[dim] = f
        if number(self.magnitude, "magnitude", "a positive finite number") <= 0:
            raise FieldError("magnitude", "a positive finite number", shown(self.magnitude))

    @property
    def rotary_dim(self) -> int:
        """Rotated dims of a head, 2 per FC."""
        return 2 * len(self.pairs)

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The dims of each FC: the pairs, or every dim of the head by itself where nothing is rotated."""
        return self.pairs or tuple((d,) for d in range(self.head_dim))


@dataclass(frozen=True)
class Budget:
    """Tokens a decode step may attend to: ``n_fac`` in all, of which the first ``n_sink`` and last ``n_recent`` are forced.

    Raises ``BudgetError`` for anything but whole numbers with ``n_fac >= 1`` and ``n_sink + n_recent <= n_fac``.
    """

    n_fac: int = 1024
    n_sink: int = 4
    n_recent: int = 16

    def __post_init__(self) -> None:
        for name, low in (("n_fac", 1), ("n_sink", 0), ("n_recent", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise BudgetError(
                    f"{name}: expected a whole number of tokens, found {shown(value)}. Give an int >= {low}."
                )
            if not low <= value <= MAX_INT:
                raise BudgetError(
                    f"{name}: expected a number of tokens in [{low}, {MAX_INT}], found {value}. Give an int >= {low}."
                )
        if self.n_sink + self.n_recent > self.n_fac:
            raise BudgetError(
                f"n_sink + n_recent: expected at most n_fac = {self.n_fac}, found {self.n_sink} + {self.n_recent}: the forced"
                f" tokens are part of the budget. Raise n_fac to {self.n_sink + self.n_recent} or more, or force fewer."
            )

    def replace(self, **given: int) -> Budget:
        """This budget with the given fields changed; an unknown name or an impossible budget is a ``BudgetError``."""
        unknown = sorted(set(given) - {f.name for f in fields(self)})
        if unknown:
            raise BudgetError(f"{unknown[0]}: expected one of n_fac, n_sink, n_recent, found an unknown name.")
        return replace(self, **given)


@dataclass(frozen=True)
class ModelFacts:
    """The model a profile was made on.

    ``weights_hash`` is ``fasa_compile.fingerprint.weights_fingerprint``; ``num_layers`` counts its attention layers, profiled
    or not; ``extra`` is plain JSON data (a revision, a configuration's facts).
    """

    architecture: str
    weights_hash: str
    num_layers: int
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        text(self.architecture, "architecture")
        text(self.weights_hash, "weights_hash")
        whole(self.num_layers, "num_layers", 1, MAX_LAYERS)
        object.__setattr__(self, "extra", _dict(self.extra, "extra"))


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """One attention layer: the FCs that score its tokens, and the constants by which its keys are centred and scaled.

    ``layer``   module path of the attention, as ``AttentionSite.layer``
    ``fcs``     int32 ``[Hkv, n_tip]``: indices into ``rope.chunks``, ascending, none twice; only a dense layer may have none
    ``centre``  fp32 ``[Hkv, D]``: mean of the post-RoPE keys, subtracted before they are packed
    ``spread``  fp32 ``[Hkv, D]``, positive: keys are divided by it and queries multiplied
    ``norm``    fp32 ``[Hq]``: c_h of the single-pass group reduction, ``sum_h exp(s_h - a_h)`` with ``a_h = c_h + scale * q.centre``;
                on centred keys that is ``exp(s'_h - c_h)``. c_h is the mean log-sum-exp of the scores over the dominant dims, less
                log(number of visible tokens); scores in nats
    ``affine``  fp32 ``[Hq, 1 + D]``: the same normaliser fitted to the query, ``a'_h = affine[h, 0] + scale * q . affine[h, 1:]`` on centred
                keys, zero outside the dominant dims. ``None`` stands for ``norm`` with slopes of zero
    ``n_fac``   the layer's own budget; ``None`` takes the profile's
    ``stats``   floats for people: captured energy, stability

    All tensors are on the CPU. Raises ``ProfileError`` that names the field, what was expected and what was found.
    """

    layer: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeFacts
    dense: bool
    fcs: Tensor
    centre: Tensor
    spread: Tensor
    norm: Tensor
    n_fac: int | None = None
    stats: dict[str, float] = field(default_factory=dict)
    affine: Tensor = field(default=None)  # type: ignore[assignment]  # made from norm where None

    def __post_init__(self) -> None:
        text(self.layer, "layer")
        hq = whole(self.num_heads, "num_heads", 1, MAX_HEADS)
        hkv = whole(self.num_kv_heads, "num_kv_heads", 1, MAX_HEADS)
        d = whole(self.head_dim, "head_dim", 2, MAX_HEAD_DIM)
        if hq % hkv:
            raise FieldError("num_heads", f"a multiple of num_kv_heads = {hkv}", str(hq))
        if not isinstance(self.rope, RopeFacts):
            raise FieldError("rope", "RopeFacts", shown(self.rope))
        if self.rope.head_dim != d:
            raise FieldError("rope.head_dim", f"the layer's head_dim = {d}", str(self.rope.head_dim))
        truth(self.dense, "dense")
        if self.n_fac is not None:
            whole(self.n_fac, "n_fac", 1, MAX_INT)
        self._check_fcs(_array(self.fcs, "fcs", (hkv, None), torch.int32))
        _array(self.centre, "centre", (hkv, d), torch.float32)
        bad = _array(self.spread, "spread", (hkv, d), torch.float32) <= 0
        if bool(bad.any()):
            h, i = _first(bad)
            raise FieldError(f"spread[{h}][{i}]", "a positive number", str(self.spread[h, i].item()))
        _array(self.norm, "norm", (hq,), torch.float32)
        if self.affine is None:
            object.__setattr__(self, "affine", torch.cat([self.norm[:, None], self.norm.new_zeros(hq, d)], 1))
        _array(self.affine, "affine", (hq, 1 + d), torch.float32)
        if not isinstance(self.stats, Mapping):
            raise FieldError("stats", "a dict of floats", shown(self.stats))
        stats = {text(k, "stats key"): number(v, f"stats.{k}") for k, v in self.stats.items()}
        object.__setattr__(self, "stats", stats)

    def _check_fcs(self, fcs: Tensor) -> None:
        n_fc, n_tip = len(self.rope.chunks), fcs.shape[1]
        if n_tip > n_fc or (n_tip == 0 and not self.dense):
            raise FieldError("fcs", f"1 to {n_fc} FCs per KV head (none only where dense)", f"{n_tip}")
        outside = (fcs < 0) | (fcs >= n_fc)
        if bool(outside.any()):
            h, j = _first(outside)
            raise FieldError(f"fcs[{h}][{j}]", f"an FC index in [0, {n_fc - 1}]", str(fcs[h, j].item()))
        unsorted = fcs[:, 1:] <= fcs[:, :-1]
        if bool(unsorted.any()):
            h, j = _first(unsorted)
            raise FieldError(
                f"fcs[{h}][{j + 1}]", f"ascending FC indices: more than {fcs[h, j].item()}", str(fcs[h, j + 1].item())
            )

    @property
    def n_tip(self) -> int:
        """Dominant FCs per KV head."""
        return int(self.fcs.shape[1])

    def dims(self) -> Tensor:
        """int32 ``[Hkv, W]``: the dims of the dominant FCs, first dims then second dims.

        Columns ``j`` and ``j + n_tip`` are the two dims of one FC; without a rotary embedding an FC has one dim.
        """
        return dims_of(self.rope, self.fcs.long()).to(torch.int32)

    @property
    def width(self) -> int:
        """W, the dominant dims of a KV head."""
        return self.n_tip * len(self.rope.chunks[0])

    def gathered(self) -> tuple[Tensor, Tensor]:
        """``(centre, spread)``, each fp32 ``[Hkv, W]``, of the dims that ``dims`` names, in its order."""
        dims = self.dims().long()
        return self.centre.gather(1, dims), self.spread.gather(1, dims)

    def normaliser(self, reduction: str) -> tuple[Tensor, Tensor | None]:
        """``(norm fp32 [Hq], slopes)`` as ``triton_kernels`` takes them; ``slopes`` fp32 ``[Hq, W]``, for ``(q * spread)[dims]``,
        where ``reduction`` is ``affine``, else None."""
        if reduction != "affine":
            return self.norm, None
        group = self.num_heads // self.num_kv_heads
        dims = self.dims().long().repeat_interleave(group, 0)
        return self.affine[:, 0].contiguous(), self.affine[:, 1:].gather(1, dims) / self.spread.repeat_interleave(
            group, 0
        ).gather(1, dims)

    def slice_heads(self, kv_heads: range) -> LayerProfile:
        """The layer as one tensor-parallel rank sees it: these KV heads and the query heads that read them.

        ``kv_heads`` is a non-empty range of step 1 within ``[0, Hkv)``. Anything else raises ``ProfileError`` (a
        ``ValueError``); a head's data is never given to another head.
        """
        ok = (
            isinstance(kv_heads, range)
            and kv_heads.step == 1
            and 0 <= kv_heads.start < kv_heads.stop <= self.num_kv_heads
        )
        if not ok:
            raise FieldError(
                f"{self.layer}: kv_heads",
                f"a non-empty range of step 1 within range(0, {self.num_kv_heads})",
                repr(kv_heads),
                "Shard by whole KV heads; a rank that holds none, or a part of one, cannot use this profile.",
            )
        group = self.num_heads // self.num_kv_heads
        kv = slice(kv_heads.start, kv_heads.stop)
        return replace(
            self,
            num_heads=group * len(kv_heads),
            num_kv_heads=len(kv_heads),
            fcs=self.fcs[kv].clone(),
            centre=self.centre[kv].clone(),
            spread=self.spread[kv].clone(),
            norm=self.norm[group * kv_heads.start : group * kv_heads.stop].clone(),
            affine=self.affine[group * kv_heads.start : group * kv_heads.stop].clone(),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerProfile):
            return NotImplemented
        return all(
            torch.equal(a, b) if isinstance(a, Tensor) else a == b
            for a, b in ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        )

    __hash__ = None  # type: ignore[assignment]  # equal by content, and its content includes tensors and a dict


@dataclass(frozen=True)
class FCProfile:
    """A model's profile: one ``LayerProfile`` per attention layer, and how they are to be used.

    ``fc_format``  how the packed FC cache stores keys, one of ``FC_FORMATS``
    ``reduction``  how a KV head's query heads agree on one token set, one of ``REDUCTIONS``
    ``method``     how the FCs were ranked, e.g. ``score_variance``
    ``data``       the calibration data: tokens, context lengths, fingerprint (plain JSON data)
    ``stats``      plain JSON data for people

    A layer that is to stay dense is listed with ``dense=True``; the plan refuses a profile that lacks one of the graph's layers.
    Raises ``ProfileError`` that names the field, what was expected and found.
    """

    layers: tuple[LayerProfile, ...]
    budget: Budget
    fc_format: str
    reduction: str
    method: str
    model: ModelFacts
    data: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        check_version(self.schema_version)
        if not isinstance(self.budget, Budget):
            raise FieldError("budget", "a Budget", shown(self.budget))
        if not isinstance(self.model, ModelFacts):
            raise FieldError("model", "ModelFacts", shown(self.model))
        text(self.fc_format, "fc_format", FC_FORMATS)
        text(self.reduction, "reduction", REDUCTIONS)
        text(self.method, "method")
        if not isinstance(self.layers, tuple) or not 1 <= len(self.layers) <= MAX_LAYERS:
            raise FieldError("layers", f"1 to {MAX_LAYERS} layers", shown(self.layers))
        first: dict[str, int] = {}
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, LayerProfile):
                raise FieldError(f"layers[{i}]", "a LayerProfile", shown(layer))
            if layer.layer in first:
                raise FieldError(
                    f"layers[{i}].layer", "a layer once", f"{shown(layer.layer)}, also layers[{first[layer.layer]}]"
                )
            first[layer.layer] = i
            if self.fc_format == "int4" and layer.width % 2:
                raise FieldError(
                    f"layers[{i}].fcs", "an even number of single dims, which int4 packs by twos", str(layer.n_tip)
                )
            forced = self.budget.n_sink + self.budget.n_recent
            if layer.n_fac is not None and layer.n_fac < forced:
                raise FieldError(f"layers[{i}].n_fac", f"at least the {forced} forced tokens", str(layer.n_fac))
        object.__setattr__(self, "data", _dict(self.data, "data"))
        object.__setattr__(self, "stats", _dict(self.stats, "stats"))

    def by_layer(self, name: str) -> LayerProfile | None:
        """The layer of that module path, or ``None``."""
        return next((layer for layer in self.layers if layer.layer == name), None)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the profile to a ``.json`` or ``.safetensors`` file; what ``load`` reads back is equal, to the bit.

        An existing file is replaced in one step. Raises ``ProfileError`` for another suffix and for a profile too large for
        the format, ``OSError`` when the file cannot be written.
        """
        from fasa_compile.profiles import files

        files.save(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> FCProfile:
        """Reads a ``.json`` or ``.safetensors`` file and checks everything in it; runs no code from it.

        Raises ``ProfileError`` that names the file, the field, what was expected and found, and what to do.
        """
        from fasa_compile.profiles import files

        return files.load(path)


def dims_of(rope: RopeFacts, fcs: Tensor) -> Tensor:
    """int64 ``[Hkv, W]``: the dims of ``fcs`` (int64 ``[Hkv, n_tip]``), first dims of all of them, then second dims."""
    chunks = torch.tensor(rope.chunks, device=fcs.device)  # [n_fc, 1 or 2]
    return torch.cat([chunks[:, side][fcs] for side in range(chunks.shape[1])], dim=1)


def check_version(version: object) -> int:
    """``version`` if this package can read it, ``ProfileError`` if not."""
    found = whole(version, "schema_version", 1, MAX_INT)
    if found > SCHEMA_VERSION:
        raise ProfileError(
            f"profile schema {found} is newer than this package reads ({SCHEMA_VERSION}): upgrade fasa-compile"
        )
    return found


def check_layer(
    profile: LayerProfile, layer: str, num_heads: int, num_kv_heads: int, head_dim: int, rope: Rope | RopeFacts
) -> None:
    """Checks that a layer's profile describes the attention that was found on the graph.

    ``layer`` names the site for the message; the rest is what the graph proved about it. Raises ``ProfileError`` that names
    the first field that differs, what the profile says and what the graph has.
    """
    advice = "The profile was made on another model or revision: calibrate this one, or load its own profile."

    def same(name: str, in_profile: object, in_graph: object) -> None:
        if in_profile != in_graph:
            raise FieldError(f"{layer}: {name}", f"{in_profile} (the profile)", f"{in_graph} (the graph)", advice)

    same("num_heads", profile.num_heads, num_heads)
    same("num_kv_heads", profile.num_kv_heads, num_kv_heads)
    same("head_dim", profile.head_dim, head_dim)
    same("rope.head_dim", profile.rope.head_dim, rope.head_dim)
    same("rope.rotary_dim", profile.rope.rotary_dim, rope.rotary_dim)
    for f, (in_profile, in_graph) in enumerate(zip(profile.rope.pairs, rope.pairs, strict=True)):
        same(f"rope.pairs[{f}]", tuple(in_profile), tuple(in_graph))
    error = 2 * getattr(rope, "error", 0.0)  # of the profile's, and of the graph's
    if not math.isclose(profile.rope.magnitude, rope.magnitude, abs_tol=max(MAGNITUDE_TOLERANCE, error), rel_tol=0.0):
        same("rope.magnitude", profile.rope.magnitude, rope.magnitude)
