"""The ``fasa::`` operators on CPU: what they promise to the compiler, and that they are the reference."""

from __future__ import annotations

import subprocess
import sys

import torch

from fasa_compile.triton_kernels import ops, reference

VERSION = ops.KERNEL_VERSION
FASA = torch.ops.fasa
B, HKV, G, L, D, W = 2, 2, 3, 70, 16, 8
HOW = {
    "scale": 0.25,
    "n_fac": 20,
    "n_sink": 2,
    "n_recent": 4,
    "softcap": 0.0,
    "sinks": None,
    "fmt": "int4",
    "reduction": "static",
}


def inputs() -> tuple[torch.Tensor, ...]:
    dims = torch.stack([torch.randperm(D)[:W] for _ in range(HKV)]).int()
    q, k = torch.randn(B, HKV * G, 1, D), torch.randn(B, L, HKV, D).transpose(1, 2)
    return q, k, torch.randn(B, HKV, L, 12), dims, torch.randn(HKV, W), torch.rand(HKV, W) + 0.5


def test_operators_keep_their_promises() -> None:
    q, k, v, dims, centre, spread = inputs()
    check = torch.library.opcheck
    for fmt in ("int4", "fp8", "fp32"):
        check(FASA.pack.default, (k, dims, centre, spread, fmt, VERSION))
    data, meta = FASA.pack(k, dims, centre, spread, "int4", VERSION)
    slots, hint = torch.tensor([3]), torch.zeros(ops.sparse_decode_state(B, HKV)[0])
    mask = torch.rand(B, 1, 1, L) > 0.5
    check(FASA.pack_rows_.default, (data, meta, k, slots, dims, centre, spread, "int4", VERSION))
    check(FASA.mask_bounds.default, (mask, L, VERSION))
    check(
        FASA.dense_decode.default,
        (q, k, v, mask, None),
        {"scale": 0.25, "softcap": 0.0, "sinks": None, "version": VERSION},
    )
    how = {**HOW, "version": VERSION}
    check(FASA.sparse_decode.default, (q, k, v, data, meta, dims, centre, spread, None, mask, None, slots, hint), how)
    check(FASA.sparse_decode.default, (q, k, v, *(None,) * 10), how)


def test_slots_are_refreshed_first() -> None:
    q, k, v, dims, centre, spread = inputs()
    data, meta = FASA.pack(k, dims, centre, spread, "int4", VERSION)
    expected = reference.sparse_decode(q, k, v, data, meta, dims, centre, spread, None, **HOW)
    whole, whole_meta = data.clone(), meta.clone()
    data[:, :, 9], meta[:, :, 9] = 0, 0
    slots = torch.tensor([9])
    out = FASA.sparse_decode(
        q, k, v, data, meta, dims, centre, spread, None, None, None, slots, None, version=VERSION, **HOW
    )
    assert torch.equal(data, whole) and torch.equal(meta, whole_meta) and torch.equal(out, expected)


def test_the_package_imports_without_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import fasa_compile.triton_kernels.ops as ops, torch\n"
        "q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 1, 5, 8)\n"
        "how = dict(scale=1.0, softcap=0.0, sinks=None, version=ops.KERNEL_VERSION)\n"
        "assert torch.ops.fasa.dense_decode(q, k, k, None, None, **how).shape == q.shape\n"
        "assert not [m for m in sys.modules if m.startswith('triton.')]\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
