"""What no test noticed when the package was broken on purpose (``tests/mutation``), until these."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from models import (
    Custom,
    Interleaved,
    PartialHalfSplit,
    cache_for,
    compiled,
    decode,
    decode_custom,
    difference,
    eager_fasa,
    half_split,
    llama_profile,
    profile_of,
    tiny_llama,
)
from test_state import Steps
from torch.nn import functional as F

import fasa_compile
from fasa_compile import FasaWarning, calibrate, fasa_backend

IDS = torch.randint(0, 512, (1, 44), generator=torch.Generator().manual_seed(3))
TOKENS = torch.randint(0, 128, (1, 50), generator=torch.Generator().manual_seed(2))
PAIRS = tuple((2 * i, 2 * i + 1) for i in range(8))


def small_profile(**budget):
    """For ``Custom(Interleaved)``."""
    return profile_of([(f"blocks.{i}", 4, 2, 16, PAIRS) for i in range(2)], 3, **budget)


def reasons(made) -> set[str]:
    return {row.reason for row in made.explain().rows}


def test_double_precision_stays_dense():
    model = tiny_llama(layers=1).double()
    made = fasa_backend(llama_profile(1), inner="eager", check_weights=False)
    with pytest.warns(FasaWarning, match="float64"):
        found = decode(model, torch.compile(model, backend=made), IDS, cache_for(model, "static"), 2)
    assert reasons(made) == {"dtype"}
    assert difference(found, decode(model, model, IDS, cache_for(model, "static"), 2)) <= 1e-12
    assert fasa_compile.stats()["declined"] == {"dtype": 1}
    fasa_compile.reset_stats()
    assert fasa_compile.stats()["declined"] == {}


@pytest.mark.parametrize(("n_fac", "sparse"), [(63, True), (64, False), (65, False)])
def test_a_budget_of_exactly_the_cache_is_dense(n_fac, sparse):
    model = tiny_llama(layers=1)
    made = fasa_backend(llama_profile(1), n_fac=n_fac, inner="eager", check_weights=False)
    decode(model, torch.compile(model, backend=made), IDS, cache_for(model, "static", 64), 2)
    assert reasons(made) == ({""} if sparse else {"within-budget"})


def test_a_budget_that_holds_the_cache_counts_for_every_layer():
    """A layer whose share is an eighth of the budget is dense all the same where the model's budget holds the cache."""
    profile = llama_profile(2, n_fac=32)
    layers = (dataclasses.replace(profile.layers[0], n_fac=8), profile.layers[1])
    model = tiny_llama(layers=2)
    made = fasa_backend(
        dataclasses.replace(profile, layers=layers), n_fac=64, inner="eager", check_weights=False, strict=True
    )
    decode(model, torch.compile(model, backend=made), IDS, cache_for(model, "static", 64), 2)
    assert reasons(made) == {"within-budget"}


def test_other_options_under_the_registered_name_are_another_backend():
    model = tiny_llama(layers=1)
    outcomes = []
    for n_fac in (8, 40):
        torch._dynamo.reset()
        options = {"profile": "all", "n_fac": n_fac, "n_sink": 1, "n_recent": 2, "inner": "eager"}
        step = torch.compile(model, backend="fasa", options=options)
        outcomes.append(decode(model, step, IDS, cache_for(model, "static"), 2))
        mine = compiled(model, "all", n_fac=n_fac, n_sink=1, n_recent=2)
        assert torch.equal(outcomes[-1], decode(model, mine, IDS, cache_for(model, "static"), 2))
    assert difference(*outcomes) > 1e-3


def test_padding_is_not_calibrated_on():
    """Two rows of other lengths in one padded batch are the same two texts one after another; scale and soft cap are the graph's."""
    torch.manual_seed(1)
    texts = [torch.randint(1, 512, (n,)) for n in (30, 21)]
    ids = torch.zeros(2, 30, dtype=torch.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    mask = (torch.arange(30) < torch.tensor([[30], [21]])).long()
    model = tiny_llama(layers=2)

    def padded(m, ids):
        return m(ids, attention_mask=mask, use_cache=False)

    together = calibrate(model, ids, forward=padded, progress=False)
    apart = calibrate(model, texts, progress=False)
    for mine, theirs in zip(together.layers, apart.layers, strict=True):
        assert mine.stats["tokens"] == theirs.stats["tokens"] == 51
        for name in ("centre", "spread", "norm"):
            torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), atol=1e-4, rtol=1e-4)
        assert torch.equal(mine.fcs, theirs.fcs)


def test_the_norm_is_that_of_the_graphs_scale():
    """The same weights with queries half as large and a scale twice as large: the same scores, the same norms."""
    model, twin = tiny_llama(layers=1), tiny_llama(layers=1)
    attention = twin.model.layers[0].self_attn
    attention.q_proj.weight.data /= 2
    attention.scaling *= 2
    mine, theirs = (calibrate(m, IDS, progress=False).layers[0] for m in (model, twin))
    torch.testing.assert_close(mine.norm, theirs.norm, atol=1e-4, rtol=1e-4)
    assert mine.norm.abs().max() > 0.1


class Adds(Interleaved):
    """The new keys are added to what the row holds."""

    def forward(self, x, pos, table, mask):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, -1, self.D).split([self.H, self.HKV, self.HKV], dim=2)
        q, k = self.rotate(q, table), self.rotate(k, table)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        rows = (torch.zeros(1, dtype=torch.int64)[:, None], torch.arange(self.HKV)[:, None], pos[None, :])
        self.k_cache.index_put_(rows, k[0], accumulate=True)
        self.v_cache[:, :, pos] = v
        keys, values = self.k_cache.repeat_interleave(2, 1), self.v_cache.repeat_interleave(2, 1)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.3)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


def test_keys_that_are_added_to_a_row_are_not_its_keys():
    """Twice at one position: the second time the row holds the sum of two keys, which no write put there."""
    profile = small_profile(n_fac=60, n_sink=1, n_recent=2)
    model, plain = Custom(Adds).eval(), Custom(Adds).eval()
    made = fasa_backend(profile, inner="eager", check_weights=False)
    step = torch.compile(model, backend=made)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FasaWarning)
        for each in (model, plain):
            decode_custom(each, each, TOKENS[:, :40], 1)
        for i in (40, 40, 41):
            token, pos = TOKENS[:, i : i + 1].clone(), torch.tensor([i])
            assert difference(step(token, pos), plain(token, pos)) <= 1e-4
    assert fasa_compile.stats()["rewritten_sites"] == 0


def test_a_row_beyond_what_attention_reads():
    """Attention over the first rows of a longer buffer: a later token may be written where it does not look."""

    class FirstRows(Interleaved):
        def forward(self, x, pos, table, mask):
            B, T, _ = x.shape
            q, k, v = self.qkv(x).view(B, T, -1, self.D).split([self.H, self.HKV, self.HKV], dim=2)
            q, k = self.rotate(q, table), self.rotate(k, table)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            self.k_cache[:, :, pos] = k
            self.v_cache[:, :, pos] = v
            keys, values = (x[:, :, :48].repeat_interleave(2, 1) for x in (self.k_cache, self.v_cache))
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask[..., :48], scale=0.3)
            return self.out(y.transpose(1, 2).reshape(B, T, -1))

    profile = small_profile(n_fac=47, n_sink=1, n_recent=2)
    model, plain = Custom(FirstRows).eval(), Custom(FirstRows).eval()
    step = torch.compile(model, backend=fasa_backend(profile, inner="eager", check_weights=False))
    with torch.no_grad():
        for each in (model, plain):
            each(TOKENS[:, :40], torch.arange(40))
        for i in (40, 41, 49):
            token, pos = TOKENS[:, i : i + 1].clone(), torch.tensor([i])
            found, expected = step(token, pos), plain(token, pos)
            if i < 48:  # 41 or 42 of 48 rows are visible, within the budget
                assert difference(found, expected) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == 3


def test_a_write_whose_result_is_what_attention_reads():
    """``keys = cache.index_copy_(...)``: when the attention goes, the repetition of its keys goes with it, and the write stays."""

    class Result(Interleaved):
        def forward(self, x, pos, table, mask):
            B, T, _ = x.shape
            q, k, v = self.qkv(x).view(B, T, -1, self.D).split([self.H, self.HKV, self.HKV], dim=2)
            q, k = self.rotate(q, table), self.rotate(k, table)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            keys = self.k_cache.index_copy_(2, pos, k).repeat_interleave(2, 1)
            values = self.v_cache.index_copy_(2, pos, v).repeat_interleave(2, 1)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.3)
            return self.out(y.transpose(1, 2).reshape(B, T, -1))

    profile = small_profile(n_fac=60, n_sink=1, n_recent=2)
    model, plain = Custom(Result).eval(), Custom(Result).eval()
    step = torch.compile(model, backend=fasa_backend(profile, inner="eager", check_weights=False, strict=True))
    found, expected = (decode_custom(m, f, TOKENS, 4) for m, f in ((model, step), (plain, plain)))
    assert difference(found, expected) <= 1e-4
    for name, value in model.named_buffers():
        assert difference(value, plain.get_buffer(name)) <= 1e-5, name
    assert fasa_compile.stats()["sparse_steps"] == 4


def test_what_the_last_threshold_was_is_forgotten_with_the_prompt(monkeypatch):
    """The operators keep a threshold on a GPU. Here nothing writes it, so what stands there shows what the runtime does."""
    from fasa_compile import rewrite

    monkeypatch.setattr(rewrite, "uses_kernels", lambda device: True)
    model = tiny_llama(layers=1)
    step = Steps(model, llama_profile(1), False)
    cache = cache_for(model, "static")
    decode(model, step, IDS, cache, 2)
    (runtime,) = step.runtimes
    hint = runtime._keepers[0].current.hint
    hint.fill_(7.0)
    step(input_ids=IDS[:, :1], past_key_values=cache)
    assert (hint == 7).all(), "one step after another keeps it"
    cache.layers[0].keys.mul_(1)
    step(input_ids=IDS[:, :1], past_key_values=cache)
    assert (hint == 0).all()


def test_a_layer_that_calibration_could_not_read_stays_dense():
    """Its prefill clamps the scores, which no reader takes; its decode steps would be read."""

    class ClampedPrefill(Interleaved):
        clamps = False

        def forward(self, x, pos, table, mask):
            if x.shape[1] == 1 or not self.clamps:
                return super().forward(x, pos, table, mask)
            B, T, _ = x.shape
            q, k, v = self.qkv(x).view(B, T, -1, self.D).split([self.H, self.HKV, self.HKV], dim=2)
            q, k = self.rotate(q, table), self.rotate(k, table)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            self.k_cache[:, :, pos] = k
            self.v_cache[:, :, pos] = v
            keys, values = self.k_cache.repeat_interleave(2, 1), self.v_cache.repeat_interleave(2, 1)
            scores = (q @ keys.transpose(2, 3) * 0.3).clamp(-50, 50).masked_fill(~mask, float("-inf"))
            return self.out((scores.softmax(-1) @ values).transpose(1, 2).reshape(B, T, -1))

    model = Custom(ClampedPrefill).eval()
    model.blocks[1].clamps = True

    def forward(m, ids):
        return m(ids, torch.arange(ids.shape[1]))

    with pytest.warns(FasaWarning, match=r"could not read 1 layers.*blocks\.1"):
        profile = calibrate(model, TOKENS[:, :40], forward=forward, progress=False)
    assert [layer.layer for layer in profile.layers] == ["blocks.0"]
    made = fasa_backend(profile, n_fac=60, inner="eager")
    found = decode_custom(model, torch.compile(model, backend=made), TOKENS, 3)
    assert difference(found, decode_custom(model, model, TOKENS, 3)) <= 1e-4
    assert {(row.layer, row.decision, row.reason) for row in made.explain().rows} == {
        ("blocks.0", "sparse", ""),
        ("blocks.1", "dense", "not-calibrated"),
    }


def test_keys_that_no_value_of_the_graph_holds_stay_dense():
    """The concatenated keys are changed after the attention's own copy was made: to read them, the cache would be copied anew."""

    class ChangedAfterReading(PartialHalfSplit):
        def forward(self, x, pos, table, mask):
            B, T, _ = x.shape
            q = self.q(x).view(B, T, self.H, self.D).transpose(1, 2)
            k, v = self.kv(x).view(B, T, 2, self.HKV, self.D).permute(2, 0, 3, 1, 4)
            q, k = self.rotate(q, table), self.rotate(k, table)
            if self.k_past is not None:
                k, v = torch.cat([self.k_past, k], 2), torch.cat([self.v_past, v], 2)
            keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            self.k_past, self.v_past = k.mul_(1.01), v
            y = F.scaled_dot_product_attention(q, keys, values, is_causal=T > 1)
            return self.out(y.transpose(1, 2).reshape(B, T, -1))

    model = Custom(ChangedAfterReading).eval()
    dense = decode_custom(model, model, TOKENS, 3)
    made = fasa_backend("all", n_fac=12, n_sink=1, n_recent=2, inner="eager")
    with pytest.warns(FasaWarning, match="by views of a value that the graph holds"):
        assert difference(decode_custom(model, torch.compile(model, backend=made), TOKENS, 3), dense) <= 1e-5
    assert reasons(made) == {"heads"}


def test_one_site_that_cannot_be_written_down_leaves_the_others_sparse(monkeypatch):
    from fasa_compile import rewrite

    whole = rewrite._emit_site

    def emit(emitter, decision, *rest):
        if decision.site.index == 0:
            raise rewrite.NotExpressible("planted: no tensor holds it")
        whole(emitter, decision, *rest)

    monkeypatch.setattr(rewrite, "_emit_site", emit)
    model = tiny_llama(layers=2)
    made = fasa_backend(llama_profile(2), n_fac=60, inner="eager", check_weights=False)
    found = decode(model, torch.compile(model, backend=made), IDS, cache_for(model, "static"), 3)
    assert difference(found, decode(model, model, IDS, cache_for(model, "static"), 3)) <= 1e-4
    assert [(row.decision, row.reason) for row in made.explain().rows] == [("dense", "not-expressible"), ("sparse", "")]
    assert fasa_compile.stats()["declined"] == {"not-expressible": 1}


@pytest.mark.parametrize("reduction", ["static", "softmax_sum", "max"])
def test_the_graph_reduces_as_the_profile_says(reduction):
    model = tiny_llama(layers=2)
    rows = [(f"model.layers.{i}.self_attn", 8, 2, 32, half_split(32)) for i in range(2)]
    profile = profile_of(rows, 8, reduction=reduction)
    budget = dict(n_fac=10, n_sink=1, n_recent=2)
    with eager_fasa(model, profile, **budget):
        expected = decode(model, model, IDS, cache_for(model, "static"), 6)
    found = decode(model, compiled(model, profile, **budget), IDS, cache_for(model, "static"), 6)
    assert difference(found, expected) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == 6


def test_layers_with_other_masks_have_bounds_of_their_own():
    """The first layer sees a window only. Each keeps the first four tokens that it may see: as if its mask left no others."""

    class Windowed(Custom):
        first_four = False

        def forward(self, ids, pos):
            x = self.embed(ids)
            t, table = torch.arange(self.LENGTH), self.table[pos]
            for i, (block, norm) in enumerate(zip(self.blocks, self.norms, strict=False)):
                first = pos[:, None] - 12 if i == 0 else pos[:, None] * 0
                mask = self.causal[pos] & (t >= first)
                if self.first_four and len(pos) == 1:
                    mask = mask & (t < first + 4)
                x = x + block(norm(x), pos, table, mask[None, None])
            return self.head(self.norms[-1](x))

    model, plain = Windowed(Interleaved).eval(), Windowed(Interleaved).eval()
    plain.first_four = True
    expected = decode_custom(plain, plain, TOKENS, 5)
    step = compiled(model, small_profile(), n_fac=4, n_sink=4, n_recent=0)
    assert difference(decode_custom(model, step, TOKENS, 5), expected) <= 1e-4
    assert fasa_compile.stats()["sparse_steps"] == 5


@pytest.mark.parametrize("fc_format", ["all", "int4"])
def test_whatever_lies_in_slots_that_are_not_filled_yet(fc_format):
    """NaN and infinity behind the mask, after the prompt, change no bit of the steps that follow."""
    profile = "all" if fc_format == "all" else llama_profile(2, fc_format=fc_format)
    outcomes = []
    for poisoned in (False, True):
        model = tiny_llama(layers=2)
        cache = cache_for(model, "static")

        def poison(i, cache=cache, poisoned=poisoned):
            if i == 0 and poisoned:
                for layer in cache.layers:
                    layer.keys[:, :, IDS.shape[1] :] = torch.nan
                    layer.values[:, :, IDS.shape[1] :] = torch.inf

        step = compiled(model, profile, n_fac=12, n_sink=1, n_recent=2)
        outcomes.append(decode(model, step, IDS, cache, 5, each=poison))
    assert torch.equal(*outcomes) and outcomes[0].isfinite().all()
    assert fasa_compile.stats()["sparse_steps"] == 10
