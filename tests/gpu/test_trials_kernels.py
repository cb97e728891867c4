"""Cases distilled from public bug reports that need a GPU. Numbers: docs/trials.md."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


def _free(gib: float) -> None:
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


@pytest.mark.parametrize("layout", ["long", "strided"])
@pytest.mark.parametrize("fmt", ["all", "int4", "bf16"])
def test_offsets_beyond_two_to_the_31(layout, fmt):  # trial K3
    """The only key that matters lies where an int32 offset has wrapped: by a long cache, or by strides into a fused buffer."""
    from fasa_compile.triton_kernels import pack, sparse_decode

    _free(30)
    D = 128
    if layout == "long":
        L = 17_000_000  # 2.2e9 elements
        k = torch.zeros(1, 1, L, D, dtype=torch.bfloat16, device="cuda")
        v = torch.zeros(1, 1, L, D, dtype=torch.bfloat16, device="cuda")
    else:
        L, wide = 1_000_000, 3 * 8 * D  # one of 8 heads of a fused qkv buffer: 3.1e9 elements
        fused = torch.zeros(L, wide, dtype=torch.bfloat16, device="cuda")
        k, v = fused[:, 7 * D : 8 * D][None, None], fused[:, 23 * D : 24 * D][None, None]
    q = torch.randn(1, 4, 1, D, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    q = q[:, :1].expand(1, 4, 1, D).contiguous()
    far = L - 3
    k[0, 0, far] = q[0, 0, 0] * 4
    v[0, 0, far] = 1.0
    state = (None,) * 6
    if fmt != "all":
        dims = torch.arange(64, dtype=torch.int32, device="cuda")[None]
        centre, spread = torch.zeros(1, 64, device="cuda"), torch.ones(1, 64, device="cuda")
        data, meta = pack.pack(k, dims, centre, spread, fmt)
        state = (data, meta, dims, centre, spread, torch.zeros(4, device="cuda"))
    how = dict(scale=1.0, n_fac=64, n_sink=4, n_recent=16, fmt="int4" if fmt == "all" else fmt)
    how["reduction"] = "softmax_sum" if fmt == "all" else "static"
    out = sparse_decode.sparse_decode(q, k, v, *state, **how)
    assert (out.float() - 1.0).abs().max() <= 1e-2, "the far token was not found"


@pytest.mark.parametrize("valid", [*range(10), 31, 4000])
def test_parts_without_a_token(valid):  # trial K5
    """More programs than tokens, a row with none beside a row with many, and a window that leaves the last part alone."""
    from fasa_compile.triton_kernels import reference, sparse_decode

    g = torch.Generator().manual_seed(valid)
    q, k, v = (torch.randn(3, n, t, 64, generator=g).cuda() for n, t in ((4, 1), (2, 4000), (2, 4000)))
    allowed = torch.zeros(3, 1, 1, 4000, dtype=torch.bool)
    allowed[0, ..., :valid] = True
    allowed[1] = True
    allowed[2, ..., 3990:] = True
    hidden = ~allowed.cuda().expand(3, 2, 1, 4000).mT
    k, v = (t.masked_fill(hidden, float("nan")) for t in (k, v))
    for n_fac in (64, 5000):
        out = sparse_decode.sparse_decode(
            q, k, v, *(None,) * 6, mask=allowed.cuda(), scale=0.5, n_fac=n_fac, reduction="softmax_sum"
        )
        clean = [t.nan_to_num(0.0).cpu() for t in (k, v)]
        expected = reference.dense_decode(q.cpu(), *clean, allowed, scale=0.5)
        assert out.isfinite().all()
        assert torch.allclose(out[0].cpu(), expected[0], atol=2e-3) or valid > 64
        assert torch.allclose(out[2].cpu(), expected[2], atol=2e-3)
        if valid == 0:
            assert (out[0] == 0).all()
