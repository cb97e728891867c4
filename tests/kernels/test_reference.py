"""The plain-torch specification: packing, masks, selection and attention against definitions written out in loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fasa_compile.triton_kernels import reference
from fasa_compile.triton_kernels.formats import FORMATS, bytes_per_token, fc_cache_spec

B, HKV, G, L, D, DV, W = 2, 2, 3, 60, 16, 12, 8


def bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    return {
        "q": torch.randn(B, HKV * G, 1, D),
        "k": torch.randn(B, L, HKV, D).transpose(1, 2),
        "v": torch.randn(B, HKV, L, DV),
        "dims": torch.stack([torch.randperm(D)[:W] for _ in range(HKV)]).int(),
        "centre": torch.randn(HKV, W),
        "spread": torch.rand(HKV, W) + 0.5,
        "norm": torch.randn(HKV * G),
    }


def step(x: dict[str, Tensor], fmt: str = "fp32", mask: Tensor | None = None, **how: object) -> Tensor:
    packed = reference.pack(x["k"], x["dims"], x["centre"], x["spread"], fmt)
    how = {"scale": 0.25, "n_fac": 20, "n_sink": 2, "n_recent": 4, **how}
    return reference.sparse_decode(
        x["q"], x["k"], x["v"], *packed, x["dims"], x["centre"], x["spread"], x["norm"], mask, fmt=fmt, **how  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS)
def test_packed_tensors_are_as_the_format_says(fmt: str, inputs: dict[str, Tensor]) -> None:
    data, meta = reference.pack(inputs["k"], inputs["dims"], inputs["centre"], inputs["spread"], fmt)
    (shape, dtype), (meta_shape, meta_dtype) = fc_cache_spec(B, HKV, L, W, fmt)
    assert (tuple(data.shape), data.dtype, tuple(meta.shape), meta.dtype) == (shape, dtype, meta_shape, meta_dtype)
    total = data.numel() * data.element_size() + meta.numel() * meta.element_size()
    assert total == B * HKV * L * bytes_per_token(W, fmt)


def test_bytes_of_the_default_are_a_tenth_of_the_keys() -> None:
    assert bytes_per_token(64, "int4") == 36
    assert bytes_per_token(32, "fp8") == 32


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_packs_alike_alone_and_among_others(fmt: str, inputs: dict[str, Tensor]) -> None:
    k = inputs["k"].half()
    arguments = (inputs["dims"], inputs["centre"], inputs["spread"], fmt)
    whole = reference.pack(k, *arguments)
    for t in (0, 17, L - 1):
        for one, every in zip(reference.pack(k[:, :, t : t + 1], *arguments), whole, strict=True):
            assert torch.equal(bytes_of(one), bytes_of(every[:, :, t : t + 1]))


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["int4", "int8", "fp8", "bf16"])
def test_compiled_packing_gives_the_same_bytes(fmt: str, inputs: dict[str, Tensor]) -> None:
    arguments = (inputs["dims"], inputs["centre"], inputs["spread"], fmt)
    compiled = torch.compile(reference.pack, fullgraph=True)
    for _ in range(20):
        k = (torch.randn(B, HKV, L, D) * torch.logspace(-4, 3, L)[:, None]).bfloat16()
        for ours, theirs in zip(compiled(k, *arguments), reference.pack(k, *arguments), strict=True):
            assert torch.equal(bytes_of(ours), bytes_of(theirs))


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["int4", "fp32"])
def test_compiled_refresh_reads_what_the_cache_stores(fmt: str, inputs: dict[str, Tensor]) -> None:
    arguments = (inputs["dims"], inputs["centre"], inputs["spread"], fmt)

    def write(k: Tensor, data: Tensor, meta: Tensor, fresh: Tensor, angle: Tensor, slots: Tensor) -> None:
        turned = fresh * angle.cos() + fresh.flip(-1) * angle.sin()  # in fp32, and rounded to bf16 by the cache alone
        k.index_copy_(2, slots, turned.to(k.dtype))
        reference.pack_rows_(data, meta, k, slots, *arguments)

    compiled = torch.compile(write, fullgraph=True)
    k = inputs["k"].bfloat16().contiguous()
    data, meta = reference.pack(k, *arguments)
    for t in range(20):
        compiled(k, data, meta, torch.randn(B, HKV, 1, D), torch.randn(D), torch.tensor([t]))
        for stored, expected in zip((data, meta), reference.pack(k, *arguments), strict=True):
            assert torch.equal(bytes_of(stored), bytes_of(expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_rounding_is_the_casts(dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(20000) * scale for scale in (1e-8, 1e-6, 1e-4, 1e-2, 1.0, 100.0)]).clamp(-448, 448)
    x = torch.cat([x, torch.tensor([0.0, -0.0, 2.0**-14, 2.0**-24, 2.0**-25, 1.0009765625, 448.0])])
    assert torch.equal(reference.rounded_to(x, dtype), x.to(dtype).float())


@pytest.mark.parametrize(
    "fmt, error", [("fp32", 1e-7), ("bf16", 2**-8), ("fp16", 2**-11), ("fp8", 2**-4), ("int8", 0), ("int4", 0)]
)
def test_what_is_stored_is_close(fmt: str, error: float, inputs: dict[str, Tensor]) -> None:
    data, meta = reference.pack(inputs["k"], inputs["dims"], inputs["centre"], inputs["spread"], fmt)
    index = inputs["dims"].long()[None, :, None].expand(B, HKV, L, W)
    x = (inputs["k"].gather(3, index) - inputs["centre"][:, None]) / inputs["spread"][:, None]
    # Half a step, and what rounding scale and zero to fp16 adds at the ends of the range.
    allowed = 0.51 * meta[..., :1].float() + 2e-2 if error == 0 else error * x.abs() + 2e-3
    assert ((reference.unpack(data, meta, fmt) - x).abs() <= allowed).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_nothing_that_is_stored_is_nan_or_inf(fmt: str, inputs: dict[str, Tensor]) -> None:
    k = inputs["k"].clone()
    k[0, 0, 0], k[0, 0, 1], k[0, 1, 2], k[0, 1, 3] = torch.nan, torch.inf, 3e38, 0.0
    k[1, :, 4, ::2], k[1, :, 4, 1::2] = 3e38, -3e38
    data, meta = reference.pack(k, inputs["dims"], inputs["centre"], inputs["spread"], fmt)
    assert reference.unpack(data, meta, fmt).isfinite().all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("slots", [torch.tensor([5, 59]), torch.tensor([[3], [40]])], ids=["shared", "per row"])
def test_refreshed_rows(fmt: str, slots: Tensor, inputs: dict[str, Tensor]) -> None:
    arguments = (inputs["dims"], inputs["centre"], inputs["spread"], fmt)
    state = reference.pack(inputs["k"], *arguments)
    before = [x.clone() for x in state]
    k = torch.randn(B, HKV, L, D)
    fresh = reference.pack(k, *arguments)
    reference.pack_rows_(*state, k, slots, *arguments)
    for b in range(B):
        written = set(slots.reshape(-1, slots.shape[-1])[b % slots.reshape(-1, slots.shape[-1]).shape[0]].tolist())
        for t in range(L):
            for now, old, new in zip(state, before, fresh, strict=True):
                assert torch.equal(bytes_of(now[b, :, t]), bytes_of((new if t in written else old)[b, :, t]))


def test_mask_bounds() -> None:
    mask = torch.zeros(3, 1, 1, 9, dtype=torch.bool)
    mask[0, ..., 2], mask[0, ..., 6] = True, True
    mask[2] = True
    assert reference.mask_bounds(mask, 9).tolist() == [[2, 7], [0, 0], [0, 9]]
    additive = torch.full((1, 2, 1, 9), torch.finfo(torch.float16).min, dtype=torch.float16)
    additive[0, 0, 0, 4], additive[0, 1, 0, 5], additive[0, 1, 0, 8] = -60000.0, 0.0, -torch.inf
    assert reference.mask_bounds(additive, 9).tolist() == [[4, 6]]


def loops(
    x: dict[str, Tensor], valid: Tensor, bias: Tensor, n_fac: int, n_sink: int, n_recent: int, scale: float
) -> Tensor:
    """The whole step of fp32 dims in Python: ``valid, bias [B, Hq, L]``; reduction "static"."""
    out = torch.zeros(B, HKV * G, 1, DV)
    for b in range(B):
        shared = valid[b].any(0).nonzero().flatten().tolist()
        for h in range(HKV):
            heads = range(h * G, h * G + G)
            key: dict[int, float] = {}
            for t in range(L):
                part = []
                for n in heads:
                    if valid[b, n, t]:
                        d = x["dims"][h].long()
                        s = scale * ((x["k"][b, h, t, d] - x["centre"][h]) * x["q"][b, n, 0, d]).sum() + bias[b, n, t]
                        part.append(math.exp(s - x["norm"][n]))
                if part:
                    forced = t < shared[0] + n_sink or t > shared[-1] - n_recent
                    key[t] = math.inf if forced else math.log(sum(part))
            kept = sorted(key, key=lambda t: (-key[t], t))[:n_fac]
            for n in heads:
                here = [t for t in kept if valid[b, n, t]]
                if here:
                    logits = scale * x["k"][b, h, here] @ x["q"][b, n, 0] + bias[b, n, here]
                    out[b, n, 0] = logits.softmax(-1) @ x["v"][b, h, here]
    return out


@pytest.mark.parametrize("kind", ["none", "bool", "per head", "additive"])
def test_the_step_is_what_the_loops_say(kind: str, inputs: dict[str, Tensor]) -> None:
    Hq = HKV * G
    masks = {
        "none": None,
        "bool": torch.rand(B, 1, 1, L) > 0.3,
        "per head": torch.rand(B, Hq, 1, L) > 0.5,
        "additive": torch.where(
            torch.rand(B, Hq, 1, L) > 0.3, torch.randn(B, Hq, 1, L), torch.finfo(torch.float32).min
        ),
    }
    mask = masks[kind]
    valid, bias = torch.ones(B, Hq, L, dtype=torch.bool), torch.zeros(B, Hq, L)
    if mask is not None and mask.dtype == torch.bool:
        valid = mask.expand(B, Hq, 1, L)[:, :, 0]
    elif mask is not None:
        valid = mask[:, :, 0] > torch.finfo(torch.float32).min
        bias = mask[:, :, 0]
    expected = loops(inputs, valid, bias, 20, 2, 4, 0.25)
    torch.testing.assert_close(step(inputs, mask=mask), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_budget_of_the_whole_context_is_dense_attention(fmt: str, inputs: dict[str, Tensor]) -> None:
    mask = torch.rand(B, 1, 1, L) > 0.3
    expected = scaled_dot_product_attention(inputs["q"], inputs["k"], inputs["v"], mask, scale=0.25, enable_gqa=True)
    for n_fac in (L, 3 * L):
        torch.testing.assert_close(step(inputs, fmt, mask, n_fac=n_fac), expected, atol=1e-5, rtol=1e-4)
    dense = reference.dense_decode(inputs["q"], inputs["k"], inputs["v"], mask, scale=0.25)
    torch.testing.assert_close(dense, expected, atol=1e-5, rtol=1e-4)


def test_ties_go_to_the_lower_index(inputs: dict[str, Tensor]) -> None:
    inputs["k"] = inputs["k"][:, :, :1].expand(B, HKV, L, D)
    out = step(inputs, n_fac=8, n_sink=0, n_recent=0)
    expected = inputs["v"][:, :, :8].mean(2).repeat_interleave(G, 1)[:, :, None]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("reduction", ["static", "affine", "softmax_sum", "max"])
def test_group_reductions(reduction: str, inputs: dict[str, Tensor]) -> None:
    data, meta = reference.pack(inputs["k"], inputs["dims"], inputs["centre"], inputs["spread"], "fp32")
    slopes = torch.randn(HKV * G, W)
    key = reference.tip_keys(
        inputs["q"], inputs["k"], data, meta, inputs["dims"], inputs["spread"], inputs["norm"], scale=0.25, fmt="fp32",
        reduction=reduction, slopes=slopes,
    )  # fmt: skip
    index = inputs["dims"].long()[None, :, None]
    kd = inputs["k"].gather(3, index.expand(B, HKV, L, W)) - inputs["centre"][:, None]
    qd = inputs["q"].view(B, HKV, G, D).gather(3, index.expand(B, HKV, G, W))
    s = 0.25 * qd @ kd.transpose(2, 3)
    centred = s - inputs["norm"].view(1, HKV, G, 1)
    expected = {
        "static": centred.exp().sum(2).log(),
        "affine": torch.stack(
            [
                sum(
                    torch.exp(
                        centred[:, h, g] - 0.25 * ((qd[:, h, g] * inputs["spread"][h]) @ slopes[h * G + g])[:, None]
                    )
                    for g in range(G)
                ).log()
                for h in range(HKV)
            ],
            1,
        ),
        "softmax_sum": s.softmax(-1).sum(2).log(),
        "max": centred.amax(2),
    }[reduction]
    torch.testing.assert_close(key, expected, atol=1e-4, rtol=1e-4)


def test_masked_rows_give_zeros_and_poison_does_not_spread(inputs: dict[str, Tensor]) -> None:
    mask = torch.rand(B, 1, 1, L) > 0.4
    mask[1] = False
    clean = step(inputs, "int4", mask)
    hidden = ~mask[:, 0, 0]
    poisoned = dict(inputs)
    poisoned["k"] = torch.where(hidden[:, None, :, None], torch.nan, inputs["k"])
    poisoned["v"] = torch.where(hidden[:, None, :, None], torch.inf, inputs["v"])
    assert torch.equal(step(poisoned, "int4", mask), clean)
    assert (clean[1] == 0).all() and clean[0].isfinite().all()
    dense = reference.dense_decode(poisoned["q"], poisoned["k"], poisoned["v"], mask, scale=0.25)
    assert dense.isfinite().all() and (dense[1] == 0).all()


def test_sinks_and_softcap(inputs: dict[str, Tensor]) -> None:
    sinks = torch.randn(HKV * G)
    out = step(inputs, n_fac=L, sinks=sinks, softcap=2.0)
    k, v = (inputs[name].repeat_interleave(G, 1) for name in ("k", "v"))
    s = 2.0 * torch.tanh(0.25 * (inputs["q"] @ k.transpose(2, 3)) / 2.0)
    p = torch.cat([s, sinks.view(1, -1, 1, 1).expand(B, -1, 1, 1)], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(out, p @ v, atol=1e-5, rtol=1e-4)


def test_bounds_hide_tokens_without_a_mask(inputs: dict[str, Tensor]) -> None:
    bounds = torch.tensor([[3, 40], [0, 0]], dtype=torch.int32)
    out = reference.dense_decode(inputs["q"], inputs["k"], inputs["v"], None, bounds, scale=0.25)
    mask = torch.zeros(B, 1, 1, L, dtype=torch.bool)
    mask[0, ..., 3:40] = True
    assert torch.equal(out, reference.dense_decode(inputs["q"], inputs["k"], inputs["v"], mask, scale=0.25))


@pytest.mark.parametrize(
    "how, message",
    [
        ({"fmt": "int3"}, "int3"),
        ({"reduction": "mean"}, "mean"),
        ({"n_fac": 5}, r"n_sink \+ n_recent"),
        ({"n_fac": 0}, "n_fac"),
    ],
)
def test_errors_name_what_was_given(how: dict[str, object], message: str, inputs: dict[str, Tensor]) -> None:
    packed = reference.pack(inputs["k"], inputs["dims"], inputs["centre"], inputs["spread"], "fp32")
    arguments = {"scale": 0.25, "n_fac": 20, "n_sink": 2, "n_recent": 4, "fmt": "fp32", **how}
    with pytest.raises(ValueError, match=message):
        reference.sparse_decode(
            inputs["q"], inputs["k"], inputs["v"], *packed, inputs["dims"], inputs["centre"], inputs["spread"], None, **arguments  # type: ignore[arg-type]
        )  # fmt: skip
    with pytest.raises(ValueError, match="even"):
        fc_cache_spec(1, 1, 1, 7, "int4")


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_several_query_tokens_are_as_many_steps_of_one(kind: str, inputs: dict[str, Tensor]) -> None:
    """Each with a mask of its own, which leaves out tokens that the next one sees."""
    S = 3
    x = inputs | {"q": torch.randn(B, HKV * G, S, D)}
    mask = torch.rand(B, 1, S, L) > 0.4
    if kind == "additive":
        mask = torch.where(mask, torch.randn(B, 1, S, L), torch.finfo(torch.float32).min)
    together = step(x, "int4", mask)
    exact = reference.dense_decode(x["q"], x["k"], x["v"], mask, None, scale=0.25)
    for s in range(S):
        one, its = x | {"q": x["q"][:, :, s : s + 1]}, mask[:, :, s : s + 1]
        torch.testing.assert_close(together[:, :, s : s + 1], step(one, "int4", its))
        alone = reference.dense_decode(one["q"], x["k"], x["v"], its, None, scale=0.25)
        torch.testing.assert_close(exact[:, :, s : s + 1], alone)
