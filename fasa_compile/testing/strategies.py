"""Hypothesis strategies: decode steps, keys to pack, masks, budgets, profiles, tiny models and how to run a model. Needs ``hypothesis``.

Tensors are made from a drawn seed, so that what Hypothesis shrinks are shapes and options, and a failing example prints as a call
that can be pasted into a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fasa_compile.profiles.schema import Budget, FCProfile, LayerProfile, ModelFacts, RopeFacts
from fasa_compile.testing.drivers import Driver
from fasa_compile.testing.model_checks import Trial
from fasa_compile.testing.steps import MASKS, Case, make_case
from fasa_compile.testing.tiny import ATTENTIONS, CACHES, ROPES, TinySpec
from fasa_compile.triton_kernels.formats import FORMATS, REDUCTIONS

formats = st.sampled_from(FORMATS)
reductions = st.sampled_from(REDUCTIONS)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
masks = st.sampled_from(MASKS)
seeds = st.integers(0, 2**16)
#: Lengths of a cache: around the powers of two, and any other up to 80.
lengths = st.sampled_from([1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65]) | st.integers(1, 80)


@st.composite
def budgets(draw: st.DrawFn, most: int = 80) -> Budget:
    """A budget of 1 to ``most`` tokens, its forced ones included."""
    n_fac = draw(st.integers(1, most))
    n_sink = draw(st.integers(0, min(4, n_fac)))
    return Budget(n_fac, n_sink, draw(st.integers(0, min(5, n_fac - n_sink))))


@dataclass(frozen=True)
class Step:
    """What a random decode step is made from: ``make_case``'s options and a seed."""

    seed: int
    options: tuple[tuple[str, Any], ...]

    def case(self, **changes: Any) -> Case:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return make_case(**{**dict(self.options), **changes})


@st.composite
def steps(draw: st.DrawFn, **given: Any) -> Step:
    """Any decode step: head layouts, groups, dims, dtypes, masks, lengths, budgets, formats, reductions. ``given`` are fixed."""
    D = draw(st.integers(1, 12)) * 2
    budget = draw(budgets())
    options = {
        "fmt": draw(formats),
        "B": draw(st.integers(1, 3)),
        "Hkv": draw(st.integers(1, 3)),
        "G": draw(st.integers(1, 4)),
        "L": draw(lengths),
        "D": D,
        "DV": draw(st.sampled_from([1, 3, 8])),
        "W": 2 * draw(st.integers(1, D // 2)),
        "n_fac": budget.n_fac,
        "n_sink": budget.n_sink,
        "n_recent": budget.n_recent,
        "dtype": draw(dtypes),
        "mask": draw(masks),
        "all_dims": draw(st.booleans()) and draw(st.booleans()),
        "gain": draw(st.sampled_from([1.0, 0.1, 3.0, 0.0])),
        "sinks": draw(st.booleans()),
        "softcap": draw(st.sampled_from([0.0, 5.0])),
        "reduction": draw(reductions),
    }
    return Step(draw(seeds), tuple({**options, **given}.items()))


@dataclass(frozen=True)
class Keys:
    """Keys to pack, and the constants of a profile; the tensors are made from ``seed``. ``extremes``: NaN, inf, huge and equal dims."""

    seed: int
    B: int
    Hkv: int
    L: int
    D: int
    W: int
    dtype: torch.dtype
    size: float
    extremes: bool

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``(k, dims, centre, spread)``."""
        g = torch.Generator().manual_seed(self.seed)
        k = torch.randn(self.B, self.L, self.Hkv, self.D, generator=g).transpose(1, 2) * self.size
        if self.extremes:
            for value in (torch.nan, torch.inf, -torch.inf, 3e38, 0.0, -0.0, 65504.0, 2.0**-24):
                b, h, t, d = (int(torch.randint(0, n, (), generator=g)) for n in k.shape)
                k[b, h, t, : d + 1] = value
        dims = torch.stack([torch.randperm(self.D, generator=g)[: self.W] for _ in range(self.Hkv)]).int()
        centre = torch.randn(self.Hkv, self.W, generator=g)
        return k.to(self.dtype), dims, centre, torch.rand(self.Hkv, self.W, generator=g) + 0.01


@st.composite
def keys(draw: st.DrawFn) -> Keys:
    D = draw(st.integers(1, 12)) * 2
    return Keys(
        draw(seeds), draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(lengths), D, 2 * draw(st.integers(1, D // 2)),
        draw(dtypes), draw(st.sampled_from([1.0, 1e-6, 1e3])), draw(st.booleans()),
    )  # fmt: skip


# --- profiles -----------------------------------------------------------------------------------------------------------

names = st.text(min_size=1, max_size=20)
fp32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
#: Plain JSON data.
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
def layer_profiles(draw: st.DrawFn, name: str) -> LayerProfile:
    """Any valid entry of a profile, its rotated pairs in any order."""
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
        affine=table(hkv * group, 1 + head_dim, fp32),
        n_fac=draw(st.none() | st.integers(40, 2**31 - 1)),
        stats=draw(st.dictionaries(names, fp32, max_size=2)),
    )


@st.composite
def profiles(draw: st.DrawFn) -> FCProfile:
    """Any valid profile, of one to three layers."""
    return FCProfile(
        layers=tuple(draw(layer_profiles(name)) for name in draw(st.lists(names, min_size=1, max_size=3, unique=True))),
        budget=Budget(draw(st.integers(40, 2**31 - 1)), draw(st.integers(0, 20)), draw(st.integers(0, 20))),
        fc_format=draw(formats),
        reduction=draw(reductions),
        method=draw(names),
        model=ModelFacts(draw(names), draw(names), draw(st.integers(1, 1024)), draw(free_form)),
        data=draw(free_form),
        stats=draw(free_form),
    )


# --- models and how they are run ----------------------------------------------------------------------------------------


@st.composite
def tiny_specs(draw: st.DrawFn, **given: Any) -> TinySpec:
    """Any layout of a ``Tiny`` decoder: RoPE, cache and attention spellings, head layouts, groups, dims, masks, dtypes."""
    attention = given.get("attention") or draw(st.sampled_from(ATTENTIONS))
    written = attention == "written out"
    options = {
        "rope": draw(st.sampled_from(ROPES)),
        "cache": draw(st.sampled_from(CACHES)),
        "attention": attention,
        "Hkv": draw(st.integers(1, 2)),
        "G": draw(st.integers(1, 3)),
        "D": draw(st.sampled_from([16, 8, 24])),
        "Dv": draw(st.sampled_from([16, 8])),
        "layers": draw(st.integers(1, 2)),
        "scale": draw(st.sampled_from([0.0, 0.3])),
        "softcap": draw(st.sampled_from([0.0, 5.0])) if written else 0.0,
        "sinks": written and draw(st.booleans()),
        "normed": draw(st.booleans()),
        "additive": draw(st.booleans()),
        "table": draw(st.booleans()),
        "dtype": draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])),
        "seed": draw(seeds),
    }
    return TinySpec(**{**options, **given})


@st.composite
def trials(draw: st.DrawFn, driver: Driver, **given: Any) -> Trial:
    """Any way to run a model: kind of cache, rows, lengths, budget, format, reduction and dominant share of a random profile."""
    steps = draw(st.integers(3, 6))
    budget = draw(budgets(most=min(24, driver.length // 2)))
    options = {
        "kind": draw(st.sampled_from(driver.kinds)),
        "rows": draw(st.integers(1, min(2, driver.rows))),
        "prompt": draw(st.integers(2, driver.length - steps - 10)),  # 7 of padding, and a budget that covers it and is no whole cache
        "steps": steps,
        "n_fac": budget.n_fac,
        "n_sink": budget.n_sink,
        "n_recent": budget.n_recent,
        "fc_format": draw(st.sampled_from([*FORMATS, "all"])),
        "reduction": draw(reductions),
        "share": draw(st.sampled_from([0.5, 0.1, 1.0])),
        "seed": draw(seeds),
    }  # fmt: skip
    return Trial(**{**options, **given})
