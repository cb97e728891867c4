"""Tiny decoders in many spellings: what the checks are tried on, and a pattern for a model of one's own.

``Tiny(spec)`` is a decoder of a few thousand parameters with random weights whose queries and keys are made to differ (nearly flat
attention would hide a wrong mask, scale or selection). Its caches are objects that the caller passes in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fasa_compile.offload import offloaded_cache
from fasa_compile.testing.drivers import Driver

ROPES = ("half-split", "halves", "reversed", "interleaved", "complex", "first dims", "last dims", "scaled")
CACHES = ("index_copy", "index_put", "tokens first", "rows", "concatenated")
ATTENTIONS = ("repeated", "grouped", "written out")
WIDTH, VOCABULARY, LENGTH = 32, 64, 64


@dataclass(frozen=True)
class TinySpec:
    """A decoder's layout. ``scale`` 0 is ``D ** -0.5``; ``softcap`` 0 is none; softcap and sinks need ``written out``."""

    rope: str = "half-split"
    cache: str = "index_copy"
    attention: str = "repeated"
    Hkv: int = 2
    G: int = 2
    D: int = 16
    Dv: int = 16
    layers: int = 2
    scale: float = 0.0
    softcap: float = 0.0
    sinks: bool = False
    normed: bool = False
    additive: bool = False
    table: bool = True
    dtype: torch.dtype = torch.float32
    length: int = LENGTH
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.softcap or self.sinks) and self.attention != "written out":
            raise ValueError("softcap and sinks need attention='written out'")

    @property
    def rotated(self) -> int:
        """R, rotated dims of a head."""
        return self.D // 2 if self.rope in ("first dims", "last dims") else self.D

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The dims that turn together: what matching must find."""
        R, first = self.rotated, self.D // 2 if self.rope == "last dims" else 0
        if self.rope in ("interleaved", "complex"):
            return tuple((2 * i, 2 * i + 1) for i in range(R // 2))
        return tuple((first + i, first + i + R // 2) for i in range(R // 2))

    @property
    def magnitude(self) -> float:
        return 1.25 if self.rope == "scaled" else 1.0

    @property
    def kind(self) -> str:
        """``static`` or ``dynamic``, as ``sites.Cache.kind``."""
        return "dynamic" if self.cache == "concatenated" else "static"


class TinyCache:
    """Keys and values of each layer: buffers of ``length`` slots, or what was concatenated so far."""

    def __init__(self, spec: TinySpec, rows: int, device: torch.device | str = "cpu") -> None:
        shape = (rows, spec.length, spec.Hkv) if spec.cache == "tokens first" else (rows, spec.Hkv, spec.length)
        if spec.cache == "concatenated":
            shape = (rows, spec.Hkv, 0)
        self.k = [torch.zeros(*shape, spec.D, dtype=spec.dtype, device=device) for _ in range(spec.layers)]
        self.v = [torch.zeros(*shape, spec.Dv, dtype=spec.dtype, device=device) for _ in range(spec.layers)]


def _turned(spec: TinySpec, x: Tensor, angle: Tensor) -> Tensor:
    """``x [B, H, T, D]`` turned by ``angle [B, 1, T, R / 2]`` float32."""
    R = spec.rotated
    if spec.rope == "complex":
        factor = torch.polar(torch.ones_like(angle), angle)
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * factor).flatten(-2).to(x.dtype)
    cos, sin = (angle.cos() * spec.magnitude).to(x.dtype), (angle.sin() * spec.magnitude).to(x.dtype)
    if spec.rope == "interleaved":
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    if spec.rope in ("halves", "first dims", "last dims"):
        first = spec.D - R if spec.rope == "last dims" else 0
        a, b = x[..., first : first + R // 2], x[..., first + R // 2 : first + R]
        return torch.cat([x[..., :first], a * cos - b * sin, b * cos + a * sin, x[..., first + R :]], -1)
    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    half = torch.cat([-x[..., R // 2 :], x[..., : R // 2]], -1)
    return x * cos - half * sin if spec.rope == "reversed" else x * cos + half * sin


class TinyAttention(nn.Module):
    """Rotary embedding, cache and attention of one layer."""

    def __init__(self, spec: TinySpec, index: int) -> None:
        super().__init__()
        self.spec, self.index = spec, index
        H, Hkv = spec.Hkv * spec.G, spec.Hkv
        self.q, self.k = nn.Linear(WIDTH, H * spec.D, bias=False), nn.Linear(WIDTH, Hkv * spec.D, bias=False)
        self.v, self.out = nn.Linear(WIDTH, Hkv * spec.Dv), nn.Linear(H * spec.Dv, WIDTH)
        self.sinks = nn.Parameter(torch.randn(H)) if spec.sinks else None
        self.q.weight.data *= 3
        self.k.weight.data *= 3

    def forward(self, x: Tensor, angle: Tensor, slots: Tensor, cache: TinyCache, keep: Tensor | None) -> Tensor:
        spec = self.spec
        B, T, _ = x.shape
        q = self.q(x).view(B, T, -1, spec.D).transpose(1, 2)
        k = self.k(x).view(B, T, -1, spec.D).transpose(1, 2)
        v = self.v(x).view(B, T, -1, spec.Dv).transpose(1, 2)
        if spec.normed:
            q, k = F.rms_norm(q, (spec.D,)) * 2, F.rms_norm(k, (spec.D,))
        q, k = _turned(spec, q, angle), _turned(spec, k, angle)
        k, v = self.cached(k, v, slots, cache)
        L = k.shape[2]
        mask: Tensor | None = None
        if spec.kind == "static" or T > 1 or keep is not None:
            mask = (torch.arange(L, device=x.device) <= slots[:, None])[None, None]
            if keep is not None:
                mask = mask & keep[:, None, None, :L]
        if spec.additive and mask is not None:
            mask = torch.where(mask, 0.0, torch.finfo(x.dtype).min).to(x.dtype)
        scale = spec.scale or spec.D**-0.5
        if spec.attention == "written out":
            y = self.written_out(q, k, v, mask, scale)
        elif spec.attention == "grouped":
            y = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        else:
            k, v = k.repeat_interleave(spec.G, 1), v.repeat_interleave(spec.G, 1)
            y = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        out: Tensor = self.out(y.transpose(1, 2).reshape(B, T, -1))
        return out

    def cached(self, k: Tensor, v: Tensor, slots: Tensor, cache: TinyCache) -> tuple[Tensor, Tensor]:
        """All keys and values so far, ``[B, Hkv, L, *]``."""
        name, i = self.spec.cache, self.index
        if name == "concatenated":
            cache.k[i], cache.v[i] = torch.cat([cache.k[i], k], 2), torch.cat([cache.v[i], v], 2)
            return cache.k[i], cache.v[i]
        keys, values = cache.k[i], cache.v[i]
        if name == "tokens first":
            keys.index_copy_(1, slots, k.transpose(1, 2))
            values.index_copy_(1, slots, v.transpose(1, 2))
            return keys.transpose(1, 2), values.transpose(1, 2)
        if name == "index_put":
            keys[:, :, slots], values[:, :, slots] = k, v
        elif name == "rows":
            rows = torch.arange(k.shape[0], device=k.device)[:, None]
            keys[rows, :, slots[None]] = k.transpose(1, 2)
            values[rows, :, slots[None]] = v.transpose(1, 2)
        else:
            keys.index_copy_(2, slots, k)
            values.index_copy_(2, slots, v)
        return keys, values

    def written_out(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        spec = self.spec
        k, v = k.repeat_interleave(spec.G, 1), v.repeat_interleave(spec.G, 1)
        s = (q @ k.transpose(-1, -2)) * scale
        if spec.softcap:
            s = spec.softcap * torch.tanh(s / spec.softcap)
        if mask is not None:
            s = s + mask if spec.additive else s.masked_fill(~mask, float("-inf"))
        if self.sinks is not None:
            sink = self.sinks.to(s.dtype)[None, :, None, None].expand(*s.shape[:3], 1)
            return torch.cat([s, sink], -1).softmax(-1)[..., :-1] @ v
        return s.softmax(-1) @ v


class Tiny(nn.Module):
    """``model(ids [B, T], positions [B, T], slots [T], cache, keep bool [B, L] or None) -> logits [B, T, VOCABULARY]``."""

    frequency: Tensor
    angles: Tensor

    def __init__(self, spec: TinySpec) -> None:
        super().__init__()
        self.spec = spec
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(TinyAttention(spec, i) for i in range(spec.layers))
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        R = spec.rotated
        frequency = 100.0 ** (-torch.arange(0, R, 2).float() / R)
        self.register_buffer("frequency", frequency, persistent=False)
        self.register_buffer("angles", torch.outer(torch.arange(4 * spec.length).float(), frequency), persistent=False)
        for module in (self.embed, self.blocks, self.head):
            module.to(spec.dtype)
        self.eval()

    def forward(
        self, ids: Tensor, positions: Tensor, slots: Tensor, cache: TinyCache, keep: Tensor | None = None
    ) -> Tensor:
        x = self.embed(ids)
        angle = self.angles[positions] if self.spec.table else positions[..., None].float() * self.frequency
        for block in self.blocks:
            x = x + block(F.rms_norm(x, (WIDTH,)), angle[:, None], slots, cache, keep)
        logits: Tensor = self.head(F.rms_norm(x, (WIDTH,)))
        return logits


class TinyDriver(Driver):
    """Runs a ``Tiny``."""

    rows, padding, vocabulary = 3, True, VOCABULARY

    def __init__(self, spec: TinySpec) -> None:
        self.spec = spec
        self.kinds = (spec.kind,)
        self.length = spec.length

    def new_cache(self, model: nn.Module, kind: str, rows: int) -> TinyCache:
        return TinyCache(self.spec, rows)

    def host_cache(self, model: nn.Module, rows: int) -> TinyCache | None:
        spec = self.spec
        if spec.kind != "static" or spec.cache == "tokens first":
            return None
        cache = TinyCache(spec, rows)
        shape = (rows, spec.Hkv, spec.length, spec.D)
        for i in range(spec.layers):
            cache.k[i], cache.v[i] = offloaded_cache(shape, spec.dtype, "cpu", v_dim=spec.Dv)
        return cache

    def call(self, step: nn.Module, ids: Tensor, start: int, cache: TinyCache, keep: Tensor | None = None) -> Tensor:
        slots = torch.arange(start, start + ids.shape[1])
        positions = slots.expand(ids.shape[0], -1)
        if keep is not None:
            positions = (keep.cumsum(1) - 1).clamp(min=0)[:, start:]
            keep = F.pad(keep, (0, (self.length if self.spec.kind == "static" else keep.shape[1]) - keep.shape[1]))
        logits: Tensor = step(ids.clone(), positions.clone(), slots, cache, keep)
        return logits

    def keys_values(self, model: nn.Module, cache: TinyCache) -> list[tuple[Tensor, Tensor]]:
        pairs = list(zip(cache.k, cache.v, strict=True))
        return (
            [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in pairs] if self.spec.cache == "tokens first" else pairs
        )

    def crop(self, model: nn.Module, cache: TinyCache, length: int) -> None:
        if self.spec.kind == "dynamic":
            cache.k, cache.v = [k[:, :, :length] for k in cache.k], [v[:, :, :length] for v in cache.v]
