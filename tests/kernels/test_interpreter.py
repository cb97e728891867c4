"""The kernels, run by Triton's interpreter on CPU tensors and compared with the reference.

The interpreter must be chosen before the kernels are imported, so these tests run in a process of their own. It has no
bfloat16 dot and no inline PTX: those are tested on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fasa_compile.testing.steps import check_sharded_step, check_step, make_case, sharded_step
from fasa_compile.triton_kernels import reference
from fasa_compile.triton_kernels.formats import FORMATS, HINT_COLUMNS
from fasa_compile.triton_kernels.launch import LOG2E
from fasa_compile.triton_kernels.score import BELOW

HERE = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(
    not HERE, reason="runs in a process with TRITON_INTERPRET=1, which another test starts"
)


def count_with_arrays() -> None:
    """Triton 3.6's interpreter counts loops with arrays of one element, which NumPy 2.4 no longer takes for numbers."""
    import triton
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.6."):
        return
    patch = interpreter._patch_lang_tensor

    def and_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = and_index


if HERE:
    count_with_arrays()


@pytest.mark.skipif(HERE, reason="this is that process")
@pytest.mark.timeout(900)
def test_all_in_a_process_with_the_interpreter() -> None:
    window = str(Path(__file__).with_name("test_window.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", __file__, window]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-5000:] + run.stderr[-2000:]


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@interpreted
@pytest.mark.parametrize("W, D", [(8, 16), (24, 40)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_packed_bytes_are_the_references(fmt: str, W: int, D: int) -> None:
    from fasa_compile.triton_kernels import pack

    dims = torch.stack([torch.randperm(D)[:W] for _ in range(2)]).int()
    centre, spread = torch.randn(2, W), torch.rand(2, W) + 0.5
    k = torch.randn(3, 2, 50, D) * torch.logspace(-6, 3, 50)[:, None]
    k[0, 0, 3], k[0, 0, 4, 0], k[1, 1, 7], k[1, 1, 8] = torch.nan, torch.inf, 0.0, 1.0
    centre[1], spread[1] = 0.0, 1.0
    for t, steps in enumerate((15.0, 255.0)):  # of int4 and int8: codes that lie halfway between two numbers
        k[2, 1, t] = torch.arange(D) * 0.5 % 15
        k[2, 1, t, dims[1, :2].long()] = torch.tensor([0.0, steps])
    k = k.half()
    for got, expected in zip(
        pack.pack(k, dims, centre, spread, fmt), reference.pack(k, dims, centre, spread, fmt), strict=True
    ):
        assert torch.equal(bytes_of(got), bytes_of(expected))
    for slots in (torch.tensor([[3, 5], [7, 1], [9, 8]]), torch.tensor([4]), torch.tensor([-2])):
        ours, theirs = (tuple(x.clone() for x in reference.pack(k, dims, centre, spread, fmt)) for _ in range(2))
        written = torch.randn(k.shape).half()
        pack.pack_rows_(*ours, written, slots, dims, centre, spread, fmt)
        reference.pack_rows_(*theirs, written, slots, dims, centre, spread, fmt)
        for got, expected in zip(ours, theirs, strict=True):
            assert torch.equal(bytes_of(got), bytes_of(expected))


@interpreted
def test_mask_bounds() -> None:
    from fasa_compile.triton_kernels import bounds

    mask = torch.rand(3, 1, 1, 70) > 0.9
    mask[1] = False
    additive = torch.where(
        torch.rand(3, 4, 1, 70) > 0.9, torch.randn(3, 4, 1, 70), torch.finfo(torch.float16).min
    ).half()
    for m in (mask, additive, additive.float().masked_fill(additive < -1e4, -torch.inf)):
        assert torch.equal(bounds.mask_bounds(m, 70), reference.mask_bounds(m, 70))


@interpreted
@pytest.mark.parametrize("fmt", [f for f in FORMATS if f != "bf16"])
def test_formats(fmt: str) -> None:
    check_step(make_case(fmt))


@interpreted
@pytest.mark.parametrize("mask", ["bool", "lengths", "additive", "shared additive", "per head", "few", "nothing"])
def test_masks(mask: str) -> None:
    check_step(make_case("int4", mask=mask))


@interpreted
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "softmax_sum"}, {"reduction": "softmax_sum", "mask": "per head"}, {"reduction": "max"},
        {"reduction": "affine"}, {"reduction": "affine", "mask": "per head", "G": 2},
        {"softcap": 5.0}, {"sinks": True, "mask": "additive"}, {"all_dims": True}, {"all_dims": True, "mask": "bool"},
        {"G": 1}, {"G": 7, "n_fac": 17}, {"D": 80, "DV": 96, "W": 20, "L": 70, "n_fac": 30}, {"n_fac": 300},
    ],
    ids=str,
)  # fmt: skip
def test_options(options: dict[str, object]) -> None:
    check_step(make_case("int8", **options))  # type: ignore[arg-type]


@interpreted
@pytest.mark.parametrize(
    "fmt, G, mask", [("int4", 4, ""), ("int4", 1, "per head"), ("fp8", 3, "bool"), ("fp16", 2, "additive")]
)
def test_tokens_that_share_a_row_of_the_operand(fmt: str, G: int, mask: str) -> None:
    from fasa_compile.triton_kernels import launch, sparse_decode

    case = make_case(fmt, W=32, D=40, G=G, L=297, mask=mask)
    device = launch.device_of(case.q)
    engine, *_, pack = sparse_decode._engine(case.cache[0], fmt, G, 40, "static", device)
    assert engine == "dot" and pack > 1
    check_step(case)


@interpreted
@pytest.mark.parametrize(
    "options",
    [
        {"mask": "lengths"}, {"mask": "lengths", "B": 1, "S": 7}, {"mask": "left"}, {"mask": "shared additive"}, {"mask": "per head"},
        {"mask": "nothing"}, {}, {"fmt": "fp8", "mask": "bool"}, {"all_dims": True, "mask": "additive"},
        {"reduction": "softmax_sum", "mask": "lengths"}, {"reduction": "affine", "mask": "lengths", "sinks": True},
        {"mask": "lengths", "W": 32, "D": 40, "G": 4},
    ],
    ids=str,
)  # fmt: skip
def test_several_query_tokens_select_each_for_itself(options: dict[str, object]) -> None:
    case = make_case(**({"S": 3} | options))  # type: ignore[arg-type]
    hint = torch.zeros(case.k.shape[0], 2, HINT_COLUMNS)
    check_step(case, hint)
    # The next step's window begins below the lowest threshold of this one's tokens, as steps of each alone leave them; below the last
    # one's if some were not in the window that steps without a past have.
    alone = torch.zeros(case.q.shape[2], *hint.shape)
    for token in range(case.q.shape[2]):
        mask = case.mask if case.mask is None or case.mask.shape[2] == 1 else case.mask[:, :, token : token + 1]
        check_step(replace(case, q=case.q[:, :, token : token + 1], mask=mask), alone[token])
    levels = alone[..., 0]
    in_window = (levels > -BELOW.value * 0.0625).all(0)
    assert torch.equal(hint[..., 0], torch.where(in_window, levels.amin(0), levels[-1])) and hint.any()
    check_step(case, hint)


@interpreted
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (3, {"mask": "lengths"}), (2, {"mask": "left", "fmt": "fp8", "sinks": True}), (2, {"mask": "few", "fmt": "int8"}),
        (4, {"mask": "shared additive", "n_fac": 90, "reduction": "affine", "softcap": 5.0}),
        (2, {"mask": "per head", "reduction": "softmax_sum"}), (2, {"mask": "nothing"}),
        (3, {"all_dims": True, "reduction": "max", "mask": "one row", "n_fac": 119, "B": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_tokens_on_several_processes(ranks: int, options: dict[str, object]) -> None:
    case = make_case(**({"B": 1, "L": 120} | options))  # type: ignore[arg-type]
    assert check_sharded_step(case, ranks) == (options.get("mask") != "nothing"), "exactly as many as asked for"


@interpreted
def test_processes_whose_hints_differ() -> None:
    """A process that has just begun searches; the others have bins around the threshold. All keep their best."""
    case = make_case(B=1, L=120)
    hints = [torch.full((1, 2, HINT_COLUMNS), state) for state in (torch.nan, 0.0)]
    for _ in range(2):
        check_sharded_step(case, 2, hints)
    hints[0].fill_(torch.nan)
    check_sharded_step(case, 2, hints)


@interpreted
def test_equal_keys_of_several_processes_are_told_apart_by_position() -> None:
    case = make_case("fp32", B=1, L=120, n_fac=70, n_sink=0, n_recent=0)
    case.k[:] = case.k[:, :, :1]
    case.cache = (*reference.pack(case.k, *case.cache[2:], "fp32"), *case.cache[2:])  # type: ignore[arg-type]
    kept, _, _ = sharded_step(case, 3)
    assert kept[..., :70].all() and not kept[..., 70:].any()


@interpreted
@pytest.mark.parametrize("fmt", ["int4", "fp32"])
@pytest.mark.parametrize("n_fac", [40, 300])  # 300: all of the cache, which the dense kernel reads
def test_several_rows_are_packed_before_they_are_scored(fmt: str, n_fac: int) -> None:
    from fasa_compile.triton_kernels import sparse_decode

    case = make_case(fmt, S=3, mask="lengths", n_fac=n_fac)
    data, meta, dims, centre, spread = case.cache
    assert data is not None and meta is not None and dims is not None and centre is not None and spread is not None
    for slots in (torch.tensor([150, 151, 152]), torch.tensor([[150, 151, 152, 4], [293, 294, 295, 7]])):
        stale = [data.clone(), meta.clone()]
        for x in stale:
            x[0, :, 150:153] = x[1, :, 293:296] = 0
            if slots.dim() == 2:  # more rows than query tokens
                x[0, :, 4] = x[1, :, 7] = 0
        if slots.dim() == 1:
            stale[0][1], stale[1][1] = data[1], meta[1]
        out = sparse_decode.sparse_decode(
            case.q, case.k, case.v, *stale, dims, centre, spread, case.norm, case.mask, None, slots, **case.how
        )
        assert torch.equal(bytes_of(stale[0]), bytes_of(data)) and torch.equal(bytes_of(stale[1]), bytes_of(meta))
        expected = reference.sparse_decode(case.q, case.k, case.v, *case.cache, case.norm, case.mask, **case.how)
        if n_fac == 300:  # fewer are the kernel's choice, which check_step looks at
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@interpreted
def test_a_hot_buffer_serves_one_token() -> None:
    from fasa_compile.triton_kernels import sparse_decode

    case, some = make_case(S=2), torch.zeros(2, 2, 1, 1)
    for decode in (
        lambda: sparse_decode.sparse_decode(case.q, case.k, case.v, *case.cache, case.norm, hot=some, tags=some, ledger=some, **case.how),
        lambda: reference.sparse_decode(case.q, case.k, case.v, *case.cache, case.norm, hot=(some, some, some), **case.how),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="one query token, got 2"):
            decode()


@interpreted
@pytest.mark.parametrize("state", [0.0, -1.0, float("nan"), float("inf"), -50.0, 1e38])
def test_whatever_the_hint_holds(state: float) -> None:
    case = make_case("fp32")
    hint = torch.full((2, 2, HINT_COLUMNS), state)
    kept = [check_step(case, hint) for _ in range(4)]
    assert hint.isfinite().all()
    assert kept[-1] <= 1.07


@interpreted
def test_whatever_the_hint_holds_is_forgotten() -> None:
    """Numbers of every kind in all columns, and queries that grow and shrink: within a few steps no row searches."""
    torch.manual_seed(1)
    numbers = torch.tensor(
        [0.0, -0.0, 1e-30, 0.01, -2.0, 5.0, 16.0, 900.0, -900.0, 1e4, 3e38, torch.inf, -torch.inf, torch.nan]
    )
    case = make_case("fp32", B=8, L=1000, n_fac=100)
    hint = numbers[torch.randint(0, len(numbers), (8, 2, HINT_COLUMNS))]
    assert (hint[..., 2].abs() == 900).any()
    small, large = case.q, case.q * 1.5
    for turn in range(24):
        case.q = large if turn % 2 else small
        width = hint[..., 1].clone()
        check_step(case, hint)
        assert hint.isfinite().all()
    assert (hint[..., 1] < 1.9 * width).all(), "rows search"
    assert (hint[..., 2].abs() < 10).all(), "slopes are as they were"


@interpreted
@pytest.mark.parametrize(
    "fmt, options",
    [
        ("int4", {"mask": "lengths"}), ("int4", {"W": 32, "G": 3, "mask": "per head"}), ("int4", {"W": 24, "G": 1}),
        ("int4", {"G": 8, "softcap": 20.0, "mask": "left"}), ("int4", {"reduction": "affine", "mask": "shared additive"}),
        ("fp8", {"W": 32, "mask": "few"}), ("fp8", {"W": 20, "G": 2, "mask": "additive"}), ("fp8", {"W": 24, "G": 1}),
        ("fp8", {"W": 64, "reduction": "max", "L": 777}), ("fp8", {"W": 32, "S": 3, "mask": "lengths"}),
        ("int8", {"W": 24, "mask": "bool"}), ("int8", {"W": 64, "G": 7}), ("fp16", {"W": 20}), ("fp16", {"W": 32, "mask": "one row"}),
        ("fp8", {"W": 32, "mask": "nothing"}), ("bf16", {"W": 32}), ("bf16", {"W": 28, "G": 2, "mask": "bool"}),
    ],
    ids=str,
)  # fmt: skip
def test_fragments(fmt: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that a GPU takes, with what it says in PTX emulated."""
    from emulated import emulate

    from fasa_compile.triton_kernels import sparse_decode

    emulate(monkeypatch)
    used = []
    choose = sparse_decode._engine
    monkeypatch.setattr(sparse_decode, "_engine", lambda *how: used.append(choose(*how)) or used[-1])
    case = make_case(fmt, **{"L": 300, "D": 72, "W": 64, "G": 4} | options)  # type: ignore[arg-type]
    hint = torch.zeros(2, 2, HINT_COLUMNS)
    for _ in range(2):
        check_step(case, hint)
    assert {engine for engine, *_ in used} == {"fragments"}


@interpreted
def test_a_threshold_in_the_lowest_bin() -> None:
    """What lies less than a bin's width below the window is not counted, and not kept."""
    case = make_case("fp32", L=1000, n_fac=100)
    (_, _, dims, _, spread), names = case.cache, ("scale", "n_sink", "n_recent", "fmt", "reduction")
    key = reference.tip_keys(
        case.q, case.k, *case.cache[:2], dims, spread, case.norm, **{name: case.how[name] for name in names}
    )
    key = key * LOG2E
    width = 0.5
    origin = key.sort(-1, descending=True).values[..., 99] - 0.01 * width
    counted, nearly = ((key >= (origin - d)[..., None]).sum(-1) for d in (0.0, width))
    assert (counted <= 112).all() and (nearly > 112).all(), (
        "the bins tell, but those below the window would be too many"
    )
    hint = torch.zeros(*origin.shape, HINT_COLUMNS)
    hint[..., 0], hint[..., 1] = origin + BELOW.value * width, width
    check_step(case, hint)


@interpreted
@pytest.mark.parametrize("fmt", ["fp32", "fp8", "int4"])
def test_thresholds_follow_the_size_of_the_query(fmt: str) -> None:
    """Queries that grow and shrink: where the threshold will be is soon known much better than that it will be where it was."""
    case = make_case(fmt, L=1000, n_fac=100)
    _, _, dims, _, spread = case.cache
    assert dims is not None and spread is not None
    hint = torch.zeros(2, 2, HINT_COLUMNS)
    small, large = case.q, case.q * 1.5
    levels, expected = [], []
    for turn in range(16):
        case.q = large if turn % 2 else small
        before = hint.clone()
        check_step(case, hint)
        y = case.q.unflatten(1, (2, -1))[:, :, :, 0].gather(
            3, dims.long()[None, :, None].expand(2, 2, case.q.shape[1] // 2, -1)
        )
        size = (y * spread[:, None]).square().sum((2, 3)).log2() / 2
        torch.testing.assert_close(hint[..., 3], size, atol=1e-4, rtol=0)
        levels.append(hint[..., 0].clone())
        expected.append(before[..., 0] + before[..., 2] * (size - before[..., 3]))
    moved = (torch.stack(levels[-4:]) - torch.stack(levels[-5:-1])).abs().mean(0)
    missed = (torch.stack(levels[-4:]) - torch.stack(expected[-4:])).abs().mean(0)
    assert (moved > 0.1).all() and (missed < 0.25 * moved).all(), (moved, missed)


@interpreted
def test_a_search_halves_the_slope() -> None:
    """And none is used where the size has changed beyond all that steps teach it from."""
    case = make_case("fp32", L=1000, n_fac=100)
    hint = torch.zeros(2, 2, HINT_COLUMNS)
    for _ in range(8):
        check_step(case, hint)
    settled = hint.clone()
    hint[..., 2], hint[..., 3] = 1.5, settled[..., 3] - 1
    hint[..., 0] = 50.0  # above all keys: no bin holds the threshold
    check_step(case, hint)
    assert (hint[..., 1] > settled[..., 1]).all(), "rows have searched"
    assert (hint[..., 2] == 0.75).all() and torch.equal(hint[..., 3], settled[..., 3])
    hint[..., 0], hint[..., 1], hint[..., 2], hint[..., 3] = *settled[..., :2].unbind(-1), 1.5, settled[..., 3] - 5
    check_step(case, hint)
    assert (hint[..., 1] <= settled[..., 1]).all(), "no row has searched"


@interpreted
@pytest.mark.parametrize(
    "hint", [torch.zeros(2, 2, HINT_COLUMNS // 2), torch.zeros(2, 2, HINT_COLUMNS, dtype=torch.float64)]
)
def test_a_hint_of_another_kind_is_refused(hint: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=rf"expected hint float32 \(2, 2, {HINT_COLUMNS}\)"):
        check_step(make_case(), hint)


@interpreted
@pytest.mark.parametrize("first, best", [(0, 0), (168, 0), (20, 10)])
def test_equal_keys_are_told_apart_by_index(first: int, best: int) -> None:
    """All from token ``first`` on are equal, but those before are a little below and the last ``best`` above them: too little for
    bins, so that the threshold is searched."""
    from fasa_compile.triton_kernels import sparse_decode

    case = make_case("fp32", L=200, n_fac=32, n_sink=0, n_recent=0)
    assert case.cache[0] is not None
    _, _, dims, centre, spread = case.cache

    def pack(k: torch.Tensor) -> None:
        case.cache = (*reference.pack(k, dims, centre, spread, "fp32"), dims, centre, spread)  # type: ignore[arg-type]

    def keys(k: torch.Tensor) -> torch.Tensor:
        pack(k)
        ranked = {name: case.how[name] for name in ("scale", "n_sink", "n_recent", "softcap", "fmt", "reduction")}
        return reference.tip_keys(case.q, k, *case.cache[:3], spread, case.norm, None, None, **ranked)  # type: ignore[arg-type]

    case.k[:] = case.k[:, :, :1]
    shrinks = keys(case.k * (1 - 1e-4)) < keys(case.k)
    lower, higher = (torch.where(at, 1 - 1e-4, 1 + 1e-4)[..., None] for at in (shrinks, ~shrinks))
    case.k[:, :, :first] *= lower[:, :, :first]
    case.k[:, :, 200 - best :] *= higher[:, :, 200 - best :]
    pack(case.k)
    selection: list[tuple[torch.Tensor, torch.Tensor]] = []
    sparse_decode.sparse_decode(case.q, case.k, case.v, *case.cache, case.norm, selection=selection, **case.how)
    kept, count = selection[0]
    for row in range(4):
        tokens = [t for s in range(kept.shape[1]) for t in kept[row, s, : count[row, s]].tolist()]
        assert sorted(tokens) == [*range(first, first + 32 - best), *range(200 - best, 200)]


@interpreted
def test_keys_that_are_neighbouring_numbers() -> None:
    """Of three levels a unit apart the two higher ones are kept whole, and of the lowest what is missing, from the first token on."""
    from fasa_compile.triton_kernels import sparse_decode

    one = {"B": 1, "Hkv": 1, "G": 1, "W": 16, "D": 16, "DV": 16, "n_fac": 32, "n_sink": 0, "n_recent": 0}
    case = make_case("fp32", L=200, reduction="max", dtype=torch.float32, **one)
    level = torch.ones(200)
    level[50:60], level[100:120] = 1 + 2**-22, 1 + 2**-23
    case.q.zero_(), case.k.zero_()
    case.q[..., 0], case.k[0, 0, :, 0] = 1.0, level
    dims, centre, spread = torch.arange(16)[None].int(), torch.zeros(1, 16), torch.ones(1, 16)
    cache = (*reference.pack(case.k, dims, centre, spread, "fp32"), dims, centre, spread)
    selection: list[tuple[torch.Tensor, torch.Tensor]] = []
    sparse_decode.sparse_decode(
        case.q, case.k, case.v, *cache, torch.zeros(1), selection=selection, **case.how | {"scale": 1.0}
    )
    kept, count = selection[0]
    tokens = [t for s in range(kept.shape[1]) for t in kept[0, s, : count[0, s]].tolist()]
    assert sorted(tokens) == [0, 1, *range(50, 60), *range(100, 120)]


ROWS = {
    "random": lambda g: torch.randn(3000, generator=g) * 5,
    "all positive": lambda g: torch.rand(3000, generator=g) + 7,
    "all negative": lambda g: -torch.rand(3000, generator=g).exp2(),
    "outliers": lambda g: torch.randn(3000, generator=g) * torch.logspace(-44, 37, 3000),
    "the ends of fp32": lambda g: torch.tensor([-3.4028234663852886e38, 3.4028234663852886e38]).repeat(1500),
    "equal": lambda g: torch.full((3000,), -2.5),
    "few levels": lambda g: torch.randint(-2, 3, (3000,), generator=g).float(),
    "zeros": lambda g: torch.where(torch.rand(3000, generator=g) < 0.5, 0.0, torch.randn(3000, generator=g)),
    "forced": lambda g: torch.where(torch.rand(3000, generator=g) < 0.2, torch.inf, torch.randn(3000, generator=g)),
    "not allowed": lambda g: torch.where(
        torch.rand(3000, generator=g) < 0.9, -torch.inf, torch.randn(3000, generator=g)
    ),
}


@interpreted
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_search_finds_the_best(name: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the keys and the guesses: all that are kept are at least as good as all that are not, earlier ones where they are
    equal. How often the keys are read is bounded, and little where a guess is good or keys are as they mostly are."""
    from search_kernel import search

    from fasa_compile.triton_kernels import attend

    calls = []
    narrowed = attend._narrowed
    monkeypatch.setattr(attend, "_narrowed", lambda *how: calls.append(1) or narrowed(*how))
    keys, t = ROWS[name](torch.Generator().manual_seed(0)), torch.arange(3000)
    first, stop = 37, 2950
    keys[:first] = torch.inf  # are not the row's
    best = keys[first:stop].sort(descending=True).values
    for n_fac in (1, 100, 1000, 2913):
        level = float(best[min(n_fac, 2912) - 1])
        guesses = [(0.0, 0.0), (level - 0.1, level + 0.1)]
        if n_fac == 100:
            guesses += [(level, level), (level + 0.1, level + 9.0), (level - 9.0, level - 0.1)]
            guesses += [(torch.nan, torch.inf), (-torch.inf, -3e38), (level + 1.0, level - 1.0)]
        for guess in guesses:
            calls.clear()
            levels, index = torch.zeros(2), torch.zeros(1, dtype=torch.int32)
            search[(1,)](keys, levels, index, n_fac, first, stop, *guess, EXACT=exact)
            high, low = levels.tolist()
            mine = (t >= first) & (t < stop)
            kept = mine & ((keys >= high) | ((keys >= low) & (keys < high) & (t < int(index))))
            want = min(n_fac, int((mine & (keys > -torch.inf)).sum()))
            forced = int((mine & (keys == torch.inf)).sum())
            if want > forced:  # else the forced ones are more than is asked for, which no step asks
                assert want <= kept.sum() <= want + (0 if exact else want // 32)
                left = mine & ~kept
                if left.any():
                    worst = keys[kept].min()
                    assert worst >= keys[left].max()
                    assert (
                        not ((keys == worst) & left).any()
                        or t[kept & (keys == worst)].max() < t[left & (keys == worst)].min()
                    )
            turns = len(calls) // 3
            assert turns <= 48
            if name in ("random", "all positive", "forced") and n_fac in (100, 1000) and not exact:
                assert turns <= (2 if guess == (level - 0.1, level + 0.1) else 5)


@interpreted
def test_a_given_selection_is_attended_to() -> None:
    from fasa_compile.triton_kernels import sparse_decode

    case = make_case("int8", mask="bool")
    chosen: list[tuple[torch.Tensor, torch.Tensor]] = []
    args = (case.q, case.k, case.v, *case.cache, case.norm, case.mask)
    expected = sparse_decode.sparse_decode(*args, selection=chosen, **case.how)
    assert torch.equal(sparse_decode.sparse_decode(*args, given=chosen[0], **case.how), expected)
    chosen[0][1].zero_()  # and nothing else: with no token kept, the sum is empty
    assert not sparse_decode.sparse_decode(*args, given=chosen[0], **case.how).any()


@interpreted
def test_rows_are_refreshed_before_they_are_scored() -> None:
    for fmt in ("int4", "fp8"):
        case = make_case(fmt)
        data, meta, *_ = case.cache
        assert data is not None and meta is not None
        whole = data.clone()
        slots = torch.tensor([[17], [299]])
        for b in range(2):
            bytes_of(data)[b, :, slots[b, 0]] = 0
        check_step(case, slots=slots)
        assert torch.equal(bytes_of(data), bytes_of(whole))


@interpreted
@pytest.mark.parametrize("mask", ["", "lengths"])
def test_a_hot_buffer_changes_nothing(mask: str) -> None:
    """Attention through the hot buffer has the same bits, and the buffer is what its specification makes of the same tokens."""
    from fasa_compile.triton_kernels import hot_slots, sparse_decode

    case = make_case("int8", mask=mask, L=240, n_fac=40)
    size = hot_slots.HotSize(2, 13)
    spec = hot_slots.hot_spec(2, 2, size, 24, 16, torch.float32)
    ours, theirs = ([torch.zeros(shape, dtype=dtype) for shape, dtype in spec] for _ in range(2))
    first = torch.zeros(1) if case.mask is None else reference.mask_bounds(case.mask, 240)[:, 0]
    for step in range(3):
        case.q = case.q + 0.4 * torch.randn_like(case.q)
        slots = torch.tensor([[17 + step], [129 + step]])
        for b in range(2):
            case.k[b, :, slots[b]], case.v[b, :, slots[b]] = torch.randn(2, 1, 24), torch.randn(2, 1, 16)
        args = (case.q, case.k, case.v, *case.cache, case.norm, case.mask, None, slots, None)
        chosen: list[tuple[torch.Tensor, torch.Tensor]] = []
        plain = sparse_decode.sparse_decode(*args, **case.how)
        through = sparse_decode.sparse_decode(*args, *ours, selection=chosen, **case.how)
        assert torch.equal(plain, through)
        kept, count = (x.view(2, 2, *x.shape[1:]) for x in chosen[0])
        used = (torch.arange(kept.shape[-1]) < count[..., None]).flatten(2)
        token = torch.where(used, kept.flatten(2), 0).long()
        hot_slots.rows_through_(*theirs, case.k, case.v, token, used, first, slots)
        for got, expected in zip(ours, theirs, strict=True):
            assert torch.equal(got, expected)
    assert ours[2][..., hot_slots.FETCHED].sum() < ours[2][..., hot_slots.ATTENDED].sum()
    assert ours[2][..., hot_slots.UNKEPT].sum() > 0


@interpreted
def test_rows_are_refreshed_where_the_budget_holds_all() -> None:
    from fasa_compile.triton_kernels import sparse_decode

    for fmt in ("int4", "fp8"):
        case = make_case(fmt, n_fac=300)
        data, meta, *_ = case.cache
        assert data is not None and meta is not None
        whole, whole_meta = data.clone(), meta.clone()
        bytes_of(data)[:, :, 17], bytes_of(meta)[:, :, 17] = 0, 0
        slots = torch.tensor([17])
        out = sparse_decode.sparse_decode(case.q, case.k, case.v, *case.cache, None, None, None, slots, **case.how)
        torch.testing.assert_close(out, reference.dense_decode(case.q, case.k, case.v, scale=case.how["scale"]))
        assert torch.equal(bytes_of(data), bytes_of(whole)) and torch.equal(bytes_of(meta), bytes_of(whole_meta))


@interpreted
@pytest.mark.parametrize("mask", ["", "left", "additive", "nothing"])
def test_dense(mask: str) -> None:
    """Each row in two parts, which are merged."""
    from fasa_compile.triton_kernels import dense_decode

    case = make_case(mask=mask, D=24, DV=40, L=300)
    limits = None if case.mask is None else reference.mask_bounds(case.mask, 300)
    for bounds, how in ((None, {}), (limits, {"sinks": torch.randn(6), "softcap": 3.0})):
        got = dense_decode.dense_decode(case.q, case.k, case.v, case.mask, bounds, scale=0.3, **how)
        torch.testing.assert_close(got, reference.dense_decode(case.q, case.k, case.v, case.mask, scale=0.3, **how))


@interpreted
def test_offsets_beyond_two_to_the_31(monkeypatch: pytest.MonkeyPatch) -> None:  # trial K3
    """Rows so far apart that their offsets need 64 bits. The memory between them is never touched, so it costs none."""
    from triton.runtime import interpreter

    from fasa_compile.triton_kernels import dense_decode, sparse_decode

    # Tensors on the CPU are read and written in place: copying their storages back would touch it all.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    L, D, stride = 48, 16, 1 << 26
    try:
        wide = torch.empty(L * stride, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("no 6 GiB of addresses")
    k, v = (wide.as_strided((1, 1, L, D), (0, 0, stride, 1), offset) for offset in (0, 64))
    small = torch.randn(2, 1, 1, L, D).half()
    k[:], v[:] = small[0], small[1]
    q = torch.randn(1, 2, 1, D).half()
    expected = reference.dense_decode(q, *small, scale=0.3)
    torch.testing.assert_close(dense_decode.dense_decode(q, k, v, scale=0.3), expected, atol=1e-3, rtol=1e-3)
    for fmt in ("all", "int8"):
        state: tuple[torch.Tensor | None, ...] = (None,) * 5
        if fmt != "all":
            constants = torch.arange(8).int()[None], torch.zeros(1, 8), torch.ones(1, 8)
            state = (*reference.pack(small[0], *constants, fmt), *constants)
        how = {"scale": 0.3, "n_fac": 40, "fmt": "fp32" if fmt == "all" else fmt, "reduction": "static"}
        chosen: list[tuple[torch.Tensor, torch.Tensor]] = []
        near = sparse_decode.sparse_decode(q, *small, *state, None, selection=chosen, **how)
        far = sparse_decode.sparse_decode(q, k, v, *state, None, given=chosen[0], **how)
        torch.testing.assert_close(far, near, atol=1e-3, rtol=1e-3)


@interpreted
@pytest.mark.parametrize("ranks", [2, 3])
def test_exchanges_through_peers_memory(ranks: int) -> None:
    """The processes take turns, all sending before any reads; sizes differ from one exchange to the next, and halves of the memory alternate."""
    from fasa_compile.triton_kernels import peers

    capacity = 2 * peers.BLOCK
    memory = torch.zeros(ranks, 2, ranks, capacity, dtype=torch.int64)
    begins = torch.arange(ranks) * memory[0].numel()
    numbers = torch.zeros(ranks, 2, dtype=torch.int32)
    spaces = [
        peers.Workspace(memory[r], numbers[r], begins - begins[r], r, ranks, 0, None)
        for r in range(ranks)
    ]  # fmt: skip
    for round, (shape, dtype) in enumerate(
        (((3, 5, 2), torch.float32), ((700,), torch.float16), ((2, 7), torch.float16), ((300,), torch.float32), ((6,), torch.float16))
    ):  # fmt: skip
        xs = [(torch.randn(shape) * 3).to(dtype) for _ in range(ranks)]
        for add in (True, False):
            for x, space in zip(xs, spaces, strict=True):
                peers.exchange(x, space, add=add, receive=False)
            got = [peers.exchange(x, space, add=add, send=False) for x, space in zip(xs, spaces, strict=True)]
            together = torch.stack(xs)
            total = together[0].float()
            for x in xs[1:]:
                total = total + x.float()  # in the order of the ranks
            expected = total.to(dtype) if add else together
            assert all(torch.equal(bytes_of(g), bytes_of(expected)) for g in got)
        assert numbers[:, 0].tolist() == [2 * (round + 1)] * ranks
    assert numbers[0, 1].item() == 4  # two of the sizes need a second program
    # One process is done and sends the next exchange's words before another has read this one's: both are there.
    x = torch.ones(6)
    for space in spaces:
        peers.exchange(x, space, add=True, receive=False)
    peers.exchange(x, spaces[0], add=True, send=False)
    peers.exchange(x, spaces[0], add=True, receive=False)
    last = int(numbers[1, 0])
    assert {last + 1, last + 2} <= set((memory[1, :, 0] >> 32).flatten().tolist())
