"""The kernels of a cache over several processes, on one CUDA device: the processes take turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fasa_compile.testing.steps import check_sharded_step, make_case, sharded_step
from fasa_compile.triton_kernels import ops, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BASE: dict[str, Any] = {
    "G": 4, "L": 4096, "D": 128, "DV": 128, "W": 64, "n_fac": 256, "dtype": torch.bfloat16, "device": "cuda", "gain": 2.0,
}  # fmt: skip


@pytest.mark.parametrize("fmt", ["int4", "fp8", "bf16"])
@pytest.mark.parametrize(("ranks", "options"), [
    (2, {}), (4, {"mask": "lengths"}), (8, {"mask": "left", "sinks": True}), (2, {"mask": "nothing"}), (2, {"B": 16, "L": 2048}),
    (2, {"G": 7, "D": 96, "DV": 64, "W": 24, "mask": "additive", "dtype": torch.float16}), (3, {"L": 3000, "mask": "per head"}),
    (2, {"reduction": "softmax_sum"}), (2, {"reduction": "affine", "softcap": 20.0}), (2, {"L": 40000, "n_fac": 1024, "B": 1}),
], ids=str)  # fmt: skip
def test_a_step(fmt: str, ranks: int, options: dict[str, Any]) -> None:
    case = make_case(fmt, **{**BASE, **options})
    hints = [torch.full((*case.k.shape[:2], ops.HINT_COLUMNS), torch.nan, device="cuda") for _ in range(ranks)]
    for _ in range(2):  # a search, then bins around the threshold
        check_sharded_step(case, ranks, hints, tolerance=1.6e-2)


def test_equal_keys_are_told_apart_by_position() -> None:
    case = make_case("fp32", **{**BASE, "n_fac": 1500, "n_sink": 0, "n_recent": 0, "B": 1})
    case.k[:] = case.k[:, :, :1]
    case.cache = (*reference.pack(case.k, *case.cache[2:], "fp32"), *case.cache[2:])  # type: ignore[arg-type]
    kept, _, _ = sharded_step(case, 4)
    assert kept[..., :1500].all() and not kept[..., 1500:].any()


def test_the_operators() -> None:
    case = make_case("int4", **{**BASE, "mask": "lengths"})
    data, meta, dims, _, spread = case.cache
    bounds = reference.mask_bounds(case.mask, 4096)  # type: ignore[arg-type]
    hint = torch.zeros(2, 2, ops.HINT_COLUMNS, device="cuda")
    common = {"scale": 0.1, "softcap": 0.0, "version": ops.KERNEL_VERSION}
    fasa, scored = torch.ops.fasa, (case.q, case.k, data, meta, dims, spread)
    torch.library.opcheck(fasa.shard_levels, (*scored, case.mask, bounds), {"rows": 4096, "fmt": "int4", **common})
    how = {"rows": 4096, "n_fac": 256, "n_sink": 4, "n_recent": 16, "fmt": "int4", "reduction": "static", **common}
    some = (*scored, case.norm, case.mask, bounds, hint, None)
    # Candidates change their hint, and with it what the next call may list beyond the best: outputs are not compared.
    torch.library.opcheck(fasa.shard_candidates, some, how, test_utils=("test_schema", "test_faketensor"))
    listed, tokens = fasa.shard_candidates(*some, **how)
    chosen = (case.q, case.k, case.v, case.mask, listed, tokens)
    torch.library.opcheck(fasa.shard_attend, chosen, {"rank": 0, "n_fac": 256, **common})
    torch.library.opcheck(fasa.shard_dense, (case.q, case.k, case.v, case.mask, bounds), common)
