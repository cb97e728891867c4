"""Ways to make a rewritten model silently wrong; each was possible once."""

from __future__ import annotations

import pytest
import torch
from models import (
    Custom,
    Interleaved,
    cache_for,
    decode,
    decode_custom,
    difference,
    half_split,
    llama_profile,
    profile_of,
    the_model_itself,
    tiny_llama,
)
from test_state import Steps
from torch import nn
from torch.nn import functional as F

import fasa_compile
from fasa_compile import fasa_backend
from fasa_compile.fingerprint import weights_fingerprint
from fasa_compile.profiles import ModelFacts

IDS = torch.randint(0, 128, (1, 50), generator=torch.Generator().manual_seed(2))
PAIRS = tuple((2 * i, 2 * i + 1) for i in range(8))


def profile(**budget: int):
    return profile_of(
        [(f"blocks.{i}", 4, 2, 16, PAIRS) for i in range(2)], 3, **({"n_fac": 12, "n_sink": 1, "n_recent": 2} | budget)
    )


def kept_equals_anew(attention: type[Interleaved]) -> None:
    """Decode with the packed cache kept, where it is, and made anew before every step: no bit may differ."""
    outcomes = []
    for anew in (False, True):
        model = Custom(attention).eval()
        step = Steps(model, profile(), anew)
        outcomes.append(decode_custom(model, step, IDS, 10))
    assert fasa_compile.stats()["sparse_steps"] == 20
    assert torch.equal(*outcomes), difference(*outcomes)


def test_a_write_through_another_input_that_shares_memory():
    class Stacked(Interleaved):
        def __init__(self, width, length):
            super().__init__(width, length)
            both = torch.zeros(2, 1, self.HKV, length, self.D)
            del self.k_cache, self.v_cache
            self.both, self.k_cache, self.v_cache = both, both[0], both[1]

        def forward(self, x, pos, table, mask):
            if x.shape[1] == 1:
                self.both.mul_(-1)
            return super().forward(x, pos, table, mask)

    kept_equals_anew(Stacked)


def test_positions_that_are_changed_in_place_after_the_write():
    whole = F.scaled_dot_product_attention

    class MovedBeforeAttention(Interleaved):
        def forward(self, x, pos, table, mask):
            B, T, _ = x.shape
            q, k, v = self.qkv(x).view(B, T, -1, self.D).split([self.H, self.HKV, self.HKV], dim=2)
            q, k = self.rotate(q, table), self.rotate(k, table)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            at = pos + 0
            self.k_cache[:, :, at] = k
            self.v_cache[:, :, at] = v
            at ^= 16
            keys, values = self.k_cache.repeat_interleave(2, 1), self.v_cache.repeat_interleave(2, 1)
            y = whole(q, keys, values, attn_mask=mask, scale=0.3)
            return self.out(y.transpose(1, 2).reshape(B, T, -1)) + at.sum() * 0

    kept_equals_anew(MovedBeforeAttention)


def test_a_row_written_at_a_fixed_place_before_the_new_one():
    class Patched(Interleaved):
        def forward(self, x, pos, table, mask):
            if x.shape[1] == 1:
                self.k_cache[:, :, 7] = self.k_cache[:, :, 7] * -0.9
            return super().forward(x, pos, table, mask)

    kept_equals_anew(Patched)


def test_storage_that_is_swapped_under_the_cache():
    model = Custom(Interleaved).eval()
    outcomes = []
    for anew in (False, True):
        step = Steps(model, profile(), anew)
        decode_custom(model, step, IDS, 6)
        with torch.no_grad():
            for block in model.blocks:
                block.k_cache.data = -block.k_cache.data.flip(2)
            outcomes.append(step(IDS[:, :1].clone(), torch.tensor([49])))
    assert torch.equal(*outcomes)


class WrittenOut(Interleaved):
    """Attention written out; ``weigh`` makes weights of the products ``w [B, H, T, L]``."""

    def weigh(self, w, mask):
        raise AssertionError("each case has its own")

    def forward(self, x, pos, table, mask):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, -1, self.D).split([self.H, self.HKV, self.HKV], dim=2)
        q, k = self.rotate(q, table), self.rotate(k, table)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        self.k_cache[:, :, pos] = k
        self.v_cache[:, :, pos] = v
        keys, values = self.k_cache.repeat_interleave(2, 1), self.v_cache.repeat_interleave(2, 1)
        w = self.weigh(q @ keys.transpose(-1, -2), mask)
        return self.out((w @ values).transpose(1, 2).reshape(B, T, -1))


class WithTemperature(WrittenOut):
    """A scale that is a buffer."""

    def __init__(self, width, length):
        super().__init__(width, length)
        self.register_buffer("temperature", torch.tensor(3.0))

    def weigh(self, w, mask):
        return torch.where(mask, w / self.temperature, -1e9).softmax(-1)


def test_a_scale_that_changes_after_compilation_is_noticed():
    model = Custom(WithTemperature).eval()
    step = Steps(model, profile(n_fac=60), False)
    dense = decode_custom(model, model, IDS, 6)
    assert difference(decode_custom(model, step, IDS, 6), dense) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == 6
    model.blocks[0].temperature.fill_(6.0)
    with pytest.raises(fasa_compile.FasaError, match=r"was 3\.0 .* is 6\.0 now"):
        decode_custom(model, step, IDS, 6)
    torch._dynamo.reset()
    assert difference(decode_custom(model, step, IDS, 6), decode_custom(model, model, IDS, 6)) <= 1e-4


@pytest.mark.parametrize("shift", ["constant", "maximum"])
def test_a_shift_before_a_softcap_is_not_dropped(shift):
    class Shifted(WrittenOut):
        def weigh(self, w, mask):
            w = w + 2.0 if shift == "constant" else w - w.amax(-1, keepdim=True)
            return torch.where(mask, 3.0 * torch.tanh(w / 3.0), -1e9).softmax(-1)

    model = Custom(Shifted).eval()
    backend = fasa_backend("all", n_fac=60, inner="eager")
    with pytest.warns(fasa_compile.FasaWarning):
        out = decode_custom(model, torch.compile(model, backend=backend), IDS, 6)
    assert difference(out, decode_custom(model, model, IDS, 6)) <= 1e-4
    assert {row.reason for row in backend.explain().rows} == {"unknown-attention"}


def test_one_backend_on_two_models_checks_both():
    torch.manual_seed(0)
    first, second = Custom(Interleaved).eval(), Custom(Interleaved).eval()
    second.head.weight.data.mul_(-1)
    base = profile()
    mine = fasa_compile.FCProfile(
        base.layers,
        base.budget,
        base.fc_format,
        base.reduction,
        base.method,
        ModelFacts("Custom", weights_fingerprint(first), 2, {}),
    )
    backend = fasa_backend(mine, inner="eager")
    decode_custom(first, torch.compile(first, backend=backend), IDS, 3)
    assert fasa_compile.stats()["sparse_steps"] == 3
    with pytest.raises(Exception, match="made for other weights"):
        decode_custom(second, torch.compile(second, backend=backend), IDS, 3)


def test_a_wrapper_around_the_model_is_seen_through():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *arguments, **keywords):
            return self.inner(*arguments, **keywords)

    model = Custom(Interleaved).eval()
    base = profile(n_fac=60)
    mine = fasa_compile.FCProfile(
        base.layers,
        base.budget,
        base.fc_format,
        base.reduction,
        base.method,
        ModelFacts("Custom", weights_fingerprint(model), 2, {}),
    )
    step = torch.compile(Wrapper(model), backend=fasa_backend(mine, inner="eager", strict=True))
    out = decode_custom(model, step, IDS, 4)
    assert fasa_compile.stats()["sparse_steps"] == 4
    assert difference(out, decode_custom(model, model, IDS, 4)) <= 1e-4


class Autocast(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, *args, **given):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*args, **given)


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_autocast_stays_dense(inside):
    model = tiny_llama(layers=1)
    model = Autocast(model) if inside else model
    ids = torch.randint(0, 512, (1, 44), generator=torch.Generator().manual_seed(1))
    backend = fasa_backend(llama_profile(1), inner="eager", check_weights=False)
    around = torch.autocast("cpu", torch.bfloat16, enabled=not inside)
    with around, the_model_itself("expected to have the same dtype"):
        dense = decode(model, model, ids, cache_for(model, "static"), 3)
    with around, pytest.warns(fasa_compile.FasaWarning, match="autocast"):
        out = decode(model, torch.compile(model, backend=backend), ids, cache_for(model, "static"), 3)
    assert {row.reason for row in backend.explain().rows} == {"autocast"}
    assert out.dtype == dense.dtype
    assert difference(out, dense) <= 3e-2 * dense.abs().max().item()


def test_many_texts_all_count():
    model = tiny_llama(layers=1)
    texts = [torch.randint(0, 512, (20 + i,), generator=torch.Generator().manual_seed(i)) for i in range(12)]
    made = fasa_compile.calibrate(model, texts, progress=False)
    assert made.layers[0].stats["tokens"] == sum(len(t) for t in texts) == made.data["tokens"]
    assert made.layers[0].rope.pairs == half_split(32)


def test_rows_of_sequences_that_change_their_order_between_calls():
    """``cache[rows, :, pos] = k``: ``rows`` is an input, in order when the model is compiled and not afterwards."""

    class Rows(Interleaved):
        rows = torch.arange(1)

        def forward(self, x, pos, table, mask):
            B, T, _ = x.shape
            q, k, v = self.qkv(x).view(B, T, -1, self.D).split([self.H, self.HKV, self.HKV], dim=2)
            q, k = self.rotate(q, table), self.rotate(k, table)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            if T > 1:
                self.k_cache[:, :, pos] = k
                self.v_cache[:, :, pos] = v
            else:
                self.k_cache[self.rows, :, pos] = k[:, :, 0]
                self.v_cache[self.rows, :, pos] = v[:, :, 0]
            keys, values = self.k_cache.repeat_interleave(2, 1), self.v_cache.repeat_interleave(2, 1)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.3)
            return self.out(y.transpose(1, 2).reshape(B, T, -1))

    ids = torch.randint(0, 128, (3, 40), generator=torch.Generator().manual_seed(4))
    outcomes = []
    for anew in (False, True):
        model = Custom(Rows).eval()
        for block in model.blocks:
            block.rows = torch.arange(3)
            block.k_cache, block.v_cache = (torch.zeros(3, 2, Custom.LENGTH, 16) for _ in range(2))
        step = Steps(model, profile(), anew)
        with torch.no_grad():
            model(ids[:, :30], torch.arange(30))
            out = []
            for i in range(30, 40):
                if i == 35:
                    for block in model.blocks:
                        block.rows = torch.tensor([2, 0, 1])
                out.append(step(ids[:, i : i + 1].clone(), torch.tensor([i])))
        outcomes.append(torch.cat(out, 1))
    assert fasa_compile.stats()["sparse_steps"] == 20
    assert torch.equal(*outcomes)
