"""The kernels on many random steps: what must hold for any of them, and for any two runs of one.

A shape is compiled once and then fed with random content, since compiling is what costs: queries of several sizes, masks, seeds. An
example is one such step with one of the properties; where one fails, the message names layout and seed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fasa_compile.testing import step_checks
from fasa_compile.testing.steps import Case, check_step, make_case
from fasa_compile.triton_kernels import ops, reference
from fasa_compile.triton_kernels.formats import FORMATS

pytestmark = pytest.mark.gpu
VERSION = ops.KERNEL_VERSION
EACH = 90
BASE: dict[str, Any] = {
    "G": 4,
    "L": 1000,
    "D": 128,
    "DV": 128,
    "W": 64,
    "n_fac": 96,
    "dtype": torch.bfloat16,
    "device": "cuda",
}
ODD: dict[str, Any] = {
    "G": 3,
    "D": 80,
    "DV": 96,
    "W": 20,
    "L": 777,
    "n_fac": 50,
    "B": 3,
    "Hkv": 1,
    "n_sink": 3,
    "n_recent": 9,
}
LAYOUTS: list[dict[str, Any]] = [
    *({"fmt": fmt} for fmt in FORMATS),
    *({"fmt": fmt, **ODD, "mask": mask} for fmt, mask in zip(FORMATS, ("left", "bool", "per head", "additive", "few", "one row"), strict=True)),
    {"fmt": "int4", "mask": "lengths", "G": 8, "dtype": torch.float16},
    {"fmt": "int4", "reduction": "softmax_sum", "mask": "shared additive"},
    {"fmt": "fp8", "reduction": "softmax_sum", "mask": "left", "G": 7},
    {"fmt": "int8", "reduction": "max", "softcap": 20.0, "G": 1},
    {"fmt": "int4", "softcap": 20.0, "sinks": True, "mask": "bool"},
    {"fmt": "fp32", "all_dims": True, "mask": "per head"},
    {"fmt": "fp32", "all_dims": True, "G": 1, "Hkv": 4, "dtype": torch.float32, "D": 64, "DV": 64},
    {"fmt": "bf16", "mask": "nothing", "n_fac": 16, "n_sink": 0, "n_recent": 0},
    {"fmt": "int4", "L": 4096, "n_fac": 512, "B": 1, "Hkv": 8},
    {"fmt": "fp8", "L": 4096, "n_fac": 31, "B": 1, "Hkv": 2, "W": 32, "mask": "few"},
    {"fmt": "int4", "n_fac": 2000},
    {"fmt": "fp8", "L": 33, "n_fac": 20, "mask": "one row", "G": 2},
]  # fmt: skip


def _sparse_decode(q: Tensor, k: Tensor, v: Tensor, *state: Tensor | None, **how: Any) -> Tensor:
    *cache, norm, mask, bounds = state
    return torch.ops.fasa.sparse_decode(q, k, v, *cache, norm, mask, bounds, None, None, version=VERSION, **how)


def _pack(k: Tensor, dims: Tensor, centre: Tensor, spread: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    return torch.ops.fasa.pack(k, dims, centre, spread, fmt, VERSION)


KERNELS = SimpleNamespace(sparse_decode=_sparse_decode, pack=_pack)


def step_of(case: Case, seed: int) -> None:
    """Selection and attention against the reference, and the dense kernel."""
    hint = torch.full((*case.k.shape[:2], ops.HINT_COLUMNS), (0.0, -3.0, torch.nan)[seed % 3], device=case.q.device)
    check_step(case, None if seed % 4 == 0 else hint, tolerance=1.6e-2)
    how = {name: case.how[name] for name in ("scale", "softcap", "sinks")}
    got = torch.ops.fasa.dense_decode(case.q, case.k, case.v, case.mask, None, version=VERSION, **how)
    expected = reference.dense_decode(case.q, case.k, case.v, case.mask, None, **how)
    torch.testing.assert_close(got.float(), expected.float(), atol=1.6e-2, rtol=1.6e-2)


def packed_bytes(case: Case, seed: int) -> None:
    """Packed rows, and rows refreshed in place, are the reference's to the byte."""
    data, meta, dims, centre, spread = case.cache
    if data is None or meta is None or dims is None or centre is None or spread is None:
        return
    profile, fmt = (dims, centre, spread), case.how["fmt"]
    k = case.k * 10.0 ** (seed % 5 - 2)
    slots = torch.randint(0, k.shape[2], (k.shape[0], 1), device=k.device)
    torch.ops.fasa.pack_rows_(data, meta, k, slots, *profile, fmt, VERSION)
    for b in range(k.shape[0]):
        at = int(slots[b, 0])
        one = reference.pack(k[b : b + 1, :, at : at + 1].cpu(), *(x.cpu() for x in profile), fmt)
        for stored, row in zip((data, meta), one, strict=True):
            assert step_checks.same(stored[b : b + 1, :, at : at + 1].cpu(), row), "a refreshed row"
    for got, expected in zip(
        _pack(k, *profile, fmt), reference.pack(k.cpu(), *(x.cpu() for x in profile), fmt), strict=True
    ):
        assert step_checks.same(got.cpu(), expected), "packed bytes"


def neighbours(case: Case, seed: int) -> None:
    """A row's bits do not depend on the other rows: here each of them is another row's copy."""
    # Packed by the kernel both times: PyTorch on CUDA divides by a number as it multiplies with its inverse, so now and then
    # the reference's scale of an int8 row differs there by one unit.
    case = step_checks.repacked(case, case.k, KERNELS)
    out = step_checks.run(KERNELS, case)
    row = seed % case.q.shape[0]
    q, k, v = (x[row : row + 1].expand_as(x).contiguous() for x in (case.q, case.k, case.v))
    mask = case.mask
    if mask is not None and mask.shape[0] > 1:
        mask = mask[row : row + 1].expand_as(mask).contiguous()
    same_rows = step_checks.run(KERNELS, step_checks.repacked(case, k, KERNELS, q=q, v=v, mask=mask))
    for got in same_rows:
        assert step_checks.same(got, out[row]), "a row depends on its neighbours"


PROPERTIES: list[Callable[[Case, int], None]] = [
    step_of,
    lambda case, seed: step_checks.check_hidden_tokens(case, KERNELS),
    neighbours,
    lambda case, seed: step_checks.check_scale(case, seed % 9 - 4, KERNELS),
    packed_bytes,
    lambda case, seed: step_checks.check_repeat(case, KERNELS, times=4),
]


def case_of(layout: dict[str, Any], seed: int, **changes: Any) -> Case:
    torch.manual_seed(seed)
    return make_case(**{**BASE, "gain": (2.0, 0.1, 5.0)[seed % 3], **layout, **changes})


def run_examples(layout: dict[str, Any], first: int, n: int, **changes: Any) -> int:
    for seed in range(first, first + n):
        case = case_of(layout, seed, **changes)
        # Every other example is a plain step: what is selected and what comes out.
        check = PROPERTIES[0] if seed % 2 else PROPERTIES[seed // 2 % len(PROPERTIES)]
        try:
            check(case, seed)
        except AssertionError as problem:
            raise AssertionError(f"layout {layout}, seed {seed}: {problem}") from problem
    return n


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_random_steps(number: int) -> None:
    assert run_examples(LAYOUTS[number], 1000 * number, EACH) * len(LAYOUTS) > 2000
    assert {(1000 * number + i) // 2 % len(PROPERTIES) for i in range(0, EACH, 2)} == set(range(len(PROPERTIES)))


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_replays_give_the_bits_of_a_run(number: int) -> None:
    """A captured step, replayed twice on each of several inputs, gives what the step gives outside the graph."""
    case = case_of(LAYOUTS[number], number)
    hint = torch.zeros(*case.k.shape[:2], ops.HINT_COLUMNS, device="cuda")
    bounds = None if case.mask is None else torch.ops.fasa.mask_bounds(case.mask, case.k.shape[2], VERSION)

    def step() -> Tensor:
        hint.zero_()
        args = (case.q, case.k, case.v, *case.cache, case.norm, case.mask, bounds, None, hint)
        return torch.ops.fasa.sparse_decode(*args, version=VERSION, **case.how)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(5):
        case.q.copy_(case_of(LAYOUTS[number], 100 + seed).q)
        found = []
        for _ in range(2):
            out.fill_(torch.nan)
            graph.replay()
            found.append(out.clone())
        assert step_checks.same(found[0], found[1]), "two replays differ"
        assert step_checks.same(found[0], step()), "a replay differs from a run"


def test_a_fault_is_caught() -> None:
    """A kernel that takes its scale from elsewhere."""
    deaf = SimpleNamespace(sparse_decode=lambda *a, **h: _sparse_decode(*a, **{**h, "scale": 0.05}), pack=_pack)
    with pytest.raises(AssertionError, match="scale"):
        step_checks.check_scale(case_of(LAYOUTS[0], 1), 2, deaf)
