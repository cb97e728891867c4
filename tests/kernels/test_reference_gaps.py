"""What no test of the specification noticed when it was broken on purpose (``tests/mutation``), until these."""

from __future__ import annotations

import pytest
import torch

from fasa_compile.triton_kernels import reference

B, HKV, G, L, D, W = 2, 2, 3, 60, 16, 8


def inputs():
    torch.manual_seed(0)
    q, k = torch.randn(B, HKV * G, 1, D), torch.randn(B, HKV, L, D) + 3.0
    dims = torch.stack([torch.randperm(D)[:W] for _ in range(HKV)]).int()
    return q, k, dims, torch.randn(HKV, W), torch.rand(HKV, W) + 0.5, torch.randn(HKV * G)


@pytest.mark.parametrize("fmt, error", [("int8", 0.02), ("int4", 0.02), ("fp8", 0.08), ("fp16", 2e-3), ("bf16", 0.02)])
def test_scores_are_those_of_what_is_stored(fmt, error):
    """Against the query in full precision and the values that ``unpack`` reads: only the query's rounding lies between."""
    q, k, dims, centre, spread, norm = inputs()
    data, meta = reference.pack(k, dims, centre, spread, fmt)
    key = reference.tip_keys(q, k, data, meta, dims, spread, norm, scale=0.25, fmt=fmt, reduction="max")
    x = reference.unpack(data, meta, fmt)
    y = q.view(B, HKV, G, D).gather(3, dims.long()[None, :, None].expand(B, HKV, G, W)) * spread[:, None]
    s = 0.25 * y @ x.transpose(2, 3)
    expected = (s - norm.view(1, HKV, G, 1)).amax(2)
    assert (key - expected).abs().max() <= error * s.abs().max()


def test_forced_tokens_are_counted_from_the_first_and_last_valid_one():
    q, k, dims, centre, spread, norm = inputs()
    data, meta = reference.pack(k, dims, centre, spread, "fp32")
    mask = torch.zeros(B, 1, 1, L, dtype=torch.bool)
    mask[0, ..., 10:50] = True
    mask[1, ..., 25:31] = True
    key = reference.tip_keys(
        q, k, data, meta, dims, spread, norm, mask, scale=0.25, n_sink=2, n_recent=3, fmt="fp32", reduction="static"
    )
    for row, (first, stop) in enumerate(((10, 50), (25, 31))):
        forced = (key[row] == torch.inf).nonzero()[:, 1].reshape(HKV, -1)
        assert forced.tolist() == [[first, first + 1, stop - 3, stop - 2, stop - 1]] * HKV


@pytest.mark.parametrize("reduction", ["static", "softmax_sum"])
def test_scores_by_all_dims_have_the_attentions_scale(reduction):
    q, k, _, _, _, norm = inputs()
    key = reference.tip_keys(q, k, None, None, None, None, norm, scale=0.1, fmt="fp32", reduction=reduction)
    s = 0.1 * q.view(B, HKV, G, D) @ k.transpose(2, 3)
    expected = s.softmax(-1).sum(2).log() if reduction == "softmax_sum" else (s - norm.view(1, HKV, G, 1)).logsumexp(2)
    torch.testing.assert_close(key, expected, atol=1e-4, rtol=1e-4)


def test_the_schema_says_what_the_sparse_step_writes():
    """Rows that do not agree with K yet are refreshed, and the operator's schema must say so."""
    from fasa_compile.triton_kernels import ops

    q, k, dims, centre, spread, norm = inputs()
    data, meta = (torch.zeros_like(x) for x in reference.pack(k, dims, centre, spread, "int8"))
    arguments = (q, k, k, data, meta, dims, centre, spread, norm, None, None, torch.tensor([5]), None)
    how = {"scale": 0.25, "n_fac": 20, "n_sink": 1, "n_recent": 2, "softcap": 0.0, "sinks": None, "fmt": "int8"}
    how |= {"reduction": "static", "version": ops.KERNEL_VERSION}
    schema = torch.ops.fasa.sparse_decode.default._schema
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    torch.ops.fasa.sparse_decode(*arguments, **how)
    changed = {
        a.name
        for a, old, new in zip(schema.arguments, before, arguments, strict=False)
        if isinstance(new, torch.Tensor) and not torch.equal(old, new)
    }
    assert changed == {"data", "meta"} and changed <= written
