"""Every kernel once on small inputs, for compute-sanitizer; not a test of its own.

    . tests/gpu/path.sh
    compute-sanitizer --tool memcheck --error-exitcode 9 python3 -P tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python3 -P tests/gpu/sanitize.py

Inputs are made on the CPU, so that little else than these kernels runs under the tool. Each format takes a step that searches and
one that follows it, with a mask, freshly written rows and a row whose length is no multiple of anything.
"""

from __future__ import annotations

from typing import Any

import torch

from fasa_compile.testing.steps import Case, check_sharded_step, make_case
from fasa_compile.triton_kernels import bounds, dense_decode, hot_slots, pack, peers, sparse_decode
from fasa_compile.triton_kernels.formats import HINT_COLUMNS


def main() -> None:
    torch.manual_seed(0)
    steps = 0
    for fmt, options in (
        ("int4", {"mask": "lengths", "W": 64}), ("fp8", {"W": 32}), ("bf16", {"W": 32, "mask": "additive"}),
        ("int8", {"W": 20, "G": 3, "reduction": "softmax_sum"}), ("int4", {"all_dims": True, "mask": "bool"}),
    ):  # fmt: skip
        case = make_case(
            fmt, **{"G": 4, "L": 1501, "D": 128, "DV": 128, "n_fac": 100, "dtype": torch.float16, **options}
        )  # type: ignore[arg-type]
        (q, k, v), cache, (norm, mask) = on_gpu(case)
        hint = torch.zeros(2, 2, HINT_COLUMNS).cuda()
        slots = None if cache[0] is None else torch.tensor([[7], [1400]]).cuda()
        for _ in range(2):
            out = sparse_decode.sparse_decode(q, k, v, *cache, norm, mask, None, slots, hint, **case.how)
            steps += 1
        dense_decode.dense_decode(q, k, v, mask, scale=case.how["scale"])
        if mask is not None:
            bounds.mask_bounds(mask, 1501)
        if cache[0] is not None:
            pack.pack(k, *cache[2:], fmt)
        assert out.cpu().isfinite().all()
    hot_buffer()
    several_tokens()
    exchanges()
    check_sharded_step(make_case("int4", L=501, D=64, DV=64, W=32, mask="lengths", device="cuda"), 3, tolerance=1e-3)
    torch.cuda.synchronize()
    print(f"{steps} sparse steps")


def on_gpu(case: Case) -> tuple[list[Any], list[Any], list[Any]]:
    """``q, k, v``, the packed FC cache and its constants, and ``norm, mask``."""
    groups = (case.q, case.k, case.v), case.cache, (case.norm, case.mask)
    moved = ([x if x is None else x.cuda() for x in group] for group in groups)
    return next(moved), next(moved), next(moved)


def hot_buffer() -> None:
    """Three steps through a buffer too small for a step, K and V on the GPU: from where rows are fetched is all one to the kernel."""
    case = make_case("int4", B=2, G=4, L=1501, D=128, DV=128, W=64, n_fac=100, mask="lengths", dtype=torch.float16)
    size = hot_slots.HotSize(4, 13)
    state = [
        torch.zeros(shape, dtype=dtype).cuda()
        for shape, dtype in hot_slots.hot_spec(2, 2, size, 128, 128, torch.float16)
    ]
    (q, k, v), cache, (norm, mask) = on_gpu(case)
    hint, slots = torch.zeros(2, 2, HINT_COLUMNS).cuda(), torch.tensor([[7], [1400]]).cuda()
    for _ in range(3):
        out = sparse_decode.sparse_decode(q, k, v, *cache, norm, mask, None, slots, hint, *state, **case.how)
    assert out.cpu().isfinite().all() and state[2].cpu()[..., hot_slots.FETCHED].sum() > 0


def several_tokens() -> None:
    case = make_case("int4", S=3, G=4, L=1501, D=128, DV=128, W=64, n_fac=100, mask="lengths", dtype=torch.float16)
    (q, k, v), cache, (norm, mask) = on_gpu(case)
    hint = torch.zeros(2, 2, HINT_COLUMNS).cuda()
    for _ in range(2):
        out = sparse_decode.sparse_decode(q, k, v, *cache, norm, mask, None, None, hint, **case.how)
    assert out.cpu().isfinite().all()


def exchanges() -> None:
    """Of two processes, here taking turns."""
    memory = torch.zeros(2, 2, 2, 1024, dtype=torch.int64).cuda()
    numbers = torch.zeros(2, 4, dtype=torch.int32).cuda()
    begins = torch.tensor([0, memory[0].numel()])
    spaces = [
        peers.Workspace(memory[r], numbers[r], (begins - begins[r]).cuda(), r, 2, 10**10, None)
        for r in range(2)
    ]  # fmt: skip
    xs = [torch.full((2, 700), float(r + 1), dtype=torch.float16).cuda() for r in range(2)]
    for add in (True, False):
        for x, space in zip(xs, spaces, strict=True):
            peers.exchange(x, space, add=add, receive=False)
        outs = [peers.exchange(x, space, add=add, send=False).cpu() for x, space in zip(xs, spaces, strict=True)]
        assert all((out == 3).all() if add else torch.equal(out, torch.stack(xs).cpu()) for out in outs)


if __name__ == "__main__":
    main()
