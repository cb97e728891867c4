"""Fingerprints: what changes them, and what must not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fasa_compile.fingerprint import data_fingerprint, same_weights, weights_fingerprint


def model(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 300), nn.LayerNorm(300)).to(dtype)


def test_equal_models_agree_and_others_do_not() -> None:
    found = weights_fingerprint(model())
    assert found == weights_fingerprint(model()) == weights_fingerprint(copy.deepcopy(model()))
    assert found != weights_fingerprint(model(1))
    assert not same_weights(found, weights_fingerprint(model(1)))
    assert found.split("-")[:2] == weights_fingerprint(model(1)).split("-")[:2]  # same names and shapes


def test_names_and_shapes_count() -> None:
    found = weights_fingerprint(nn.ParameterDict({"a": torch.ones(2, 3)}))
    assert found != weights_fingerprint(nn.ParameterDict({"b": torch.ones(2, 3)}))
    assert found != weights_fingerprint(nn.ParameterDict({"a": torch.ones(3, 2)}))
    assert found != weights_fingerprint(nn.ParameterDict({"a": torch.ones(2, 3), "c": torch.ones(0)}))


def test_a_single_changed_value_is_seen_where_it_is_sampled() -> None:
    one, other = model(), model()
    with torch.no_grad():
        other[2].bias[-1] += 1  # the last value of a parameter always is
    assert weights_fingerprint(one) != weights_fingerprint(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_the_dtype_a_bf16_checkpoint_is_loaded_in_does_not_count(dtype: torch.dtype) -> None:
    assert weights_fingerprint(model().to(dtype)) == weights_fingerprint(model())


def test_an_fp32_checkpoint_cast_to_bf16_is_the_same_model() -> None:
    full = model(dtype=torch.float32)
    assert weights_fingerprint(copy.deepcopy(full).bfloat16()) == weights_fingerprint(full)


def test_small_and_negative_zero_values_count_as_zero() -> None:
    a, b = (nn.ParameterDict({"w": torch.tensor([x, 1.0])}) for x in (-0.0, 1e-6))
    assert weights_fingerprint(a) == weights_fingerprint(b)


def test_wrapping_by_torch_compile_does_not_count() -> None:
    found = weights_fingerprint(model())
    assert weights_fingerprint(torch.compile(model(), backend="eager")) == found
    inside = model()
    inside[1] = torch.compile(inside[1], backend="eager")
    assert weights_fingerprint(inside) == found


def test_memory_layout_requires_grad_and_order_do_not_count() -> None:
    one = model()
    other = copy.deepcopy(one).requires_grad_(False)
    other[1].weight = nn.Parameter(other[1].weight.t().contiguous().t(), requires_grad=False)
    assert not other[1].weight.is_contiguous()
    assert weights_fingerprint(other) == weights_fingerprint(one)
    a, b = torch.ones(3), torch.zeros(2)
    forward, backward = nn.Module(), nn.Module()
    forward.a, forward.b = nn.Parameter(a), nn.Parameter(b)
    backward.b, backward.a = nn.Parameter(b), nn.Parameter(a)
    assert weights_fingerprint(forward) == weights_fingerprint(backward)


def test_tying_does_not_count() -> None:
    tied, loose = (nn.ModuleDict({"e": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)}) for _ in range(2))
    tied["head"].weight = tied["e"].weight
    loose.load_state_dict(tied.state_dict())
    assert weights_fingerprint(tied) == weights_fingerprint(loose)


def test_meta_and_fake_models_have_names_and_shapes() -> None:
    found = weights_fingerprint(model())
    meta = weights_fingerprint(model().to("meta"))
    assert meta.endswith("-unread")
    assert same_weights(found, meta) and same_weights(meta, found) and same_weights(meta, meta)
    with torch._subclasses.FakeTensorMode():
        assert weights_fingerprint(nn.Linear(3, 2)) == weights_fingerprint(nn.Linear(3, 2, device="meta"))
    assert not same_weights(meta, weights_fingerprint(nn.Linear(3, 2)))


class Quantised(torch.Tensor):
    """Stands for a tensor subclass whose values cannot be read as they are."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.Tensor.__getitem__, torch.Tensor.to, torch.Tensor.float):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_quantised_parameters_leave_names_and_shapes() -> None:
    one = model()
    one[1].weight = nn.Parameter(one[1].weight.detach().as_subclass(Quantised), requires_grad=False)
    assert type(one[1].weight) is not nn.Parameter
    found = weights_fingerprint(one)
    assert found.endswith("-unread")
    assert same_weights(found, weights_fingerprint(model()))


def test_scalars_and_low_precision_parameters() -> None:
    one = nn.Module()
    one.scalar = nn.Parameter(torch.tensor(2.0))
    one.low = nn.Parameter(torch.randn(9, 9).to(torch.float8_e4m3fn), requires_grad=False)
    one.whole = nn.Parameter(torch.arange(9, dtype=torch.int8), requires_grad=False)
    first = weights_fingerprint(one)
    assert not first.endswith("unread")
    one.whole.data[-1] = 100
    assert weights_fingerprint(one) != first


def test_other_texts_are_no_fingerprint_of_ours() -> None:
    assert same_weights("abc", "abc") and not same_weights("abc", weights_fingerprint(model()))


@pytest.mark.gpu
def test_the_device_does_not_count() -> None:
    assert weights_fingerprint(model().cuda()) == weights_fingerprint(model())


def test_data_fingerprint() -> None:
    ids = torch.arange(12).view(2, 6)
    found = data_fingerprint(ids)
    assert len(found) == 16 and int(found, 16) >= 0
    assert found == data_fingerprint(ids.int()) == data_fingerprint([ids]) == data_fingerprint(ids.t().contiguous().t())
    assert len({found, data_fingerprint(ids.view(3, 4)), data_fingerprint(ids + 1), data_fingerprint([ids, ids])}) == 4
    texts = [torch.arange(3), torch.arange(5)]
    assert data_fingerprint(texts) != data_fingerprint(texts[::-1])
    for bad in (ids.float(), ids > 3, [[1, 2]], [ids, None]):
        with pytest.raises(TypeError, match="token_ids"):
            data_fingerprint(bad)  # type: ignore[arg-type]
