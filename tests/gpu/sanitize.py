"""Every kernel once on small inputs, for compute-sanitizer; not a test of its own.

    . tests/gpu/path.sh
    compute-sanitizer --tool memcheck --error-exitcode 9 python3 -P tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python3 -P tests/gpu/sanitize.py

Inputs are made on the CPU, so that little else than these kernels runs under the tool. Each format takes a step that searches and
one that follows it, with a mask, freshly written rows and a row whose length is no multiple of anything.
"""

from __future__ import annotations

import torch

from fasa_compile.testing.steps import check_sharded_step, make_case
from fasa_compile.triton_kernels import bounds, dense_decode, pack, sparse_decode


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
        q, k, v, norm = (x.cuda() for x in (case.q, case.k, case.v, case.norm))  # type: ignore[union-attr]
        cache = [x if x is None else x.cuda() for x in case.cache]
        mask = case.mask if case.mask is None else case.mask.cuda()
        hint = torch.zeros(2, 2, 2).cuda()
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
    check_sharded_step(make_case("int4", L=501, D=64, DV=64, W=32, mask="lengths", device="cuda"), 3, tolerance=1e-3)
    torch.cuda.synchronize()
    print(f"{steps} sparse steps")


if __name__ == "__main__":
    main()
