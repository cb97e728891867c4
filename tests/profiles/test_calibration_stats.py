"""Streaming statistics against brute force in float64, and the FCs that each method must find."""

from __future__ import annotations

import math

import pytest
import torch
from profile_samples import half_split
from torch import Tensor

from fasa_compile import calibration_stats
from fasa_compile.calibration_stats import METHODS, LayerStats
from fasa_compile.errors import CalibrationError
from fasa_compile.profiles import Budget, RopeFacts

HQ, HKV, D = 4, 2, 8
G = HQ // HKV
ROPE = half_split(D)


def stats(rope: RopeFacts = ROPE, **given: int) -> LayerStats:
    shape = {"num_heads": HQ, "num_kv_heads": HKV, "head_dim": D} | given
    return LayerStats(*shape.values(), rope, "cpu", "model.layers.3.self_attn")


def text(length: int, seed: int = 0, batch: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, HQ, length, D, generator=g) * torch.arange(1, D + 1) + 0.5
    k = torch.randn(batch, HKV, length, D, generator=g) / torch.arange(1, D + 1) + torch.arange(D)
    return q, k


def brute_energy(q: Tensor, k: Tensor, rope: RopeFacts = ROPE) -> Tensor:
    """``q [Hq, N, D]``, ``k [Hkv, N, D]``: the definition, written out."""
    q, k = q.double(), k.double()
    out = torch.zeros(k.shape[0], len(rope.pairs), dtype=torch.float64)
    group = q.shape[0] // k.shape[0]
    for h in range(k.shape[0]):
        for f, pair in enumerate(rope.pairs):
            for d in pair:
                for g in range(group):
                    out[h, f] += (q[h * group + g, :, d] ** 2).mean() * k[h, :, d].var(correction=0)
    return out


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


# --- moments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(40,), (2,), (5, 1, 33), (1, 1, 1), (2100,)])
def test_moments_are_those_of_all_tokens(lengths: tuple[int, ...]) -> None:
    s, texts = stats(), [text(n, i) for i, n in enumerate(lengths)]
    for q, k in texts:
        s.update(q, k, 0.3)
    q, k = (torch.cat([t[i][0] for t in texts], dim=1).double() for i in (0, 1))
    assert s.tokens == sum(lengths)
    close(s.key_mean(), k.mean(1))
    close(s.key_variance(), k.var(1, correction=0))
    close(s.query_square(), q.square().mean(1))
    close(s.energy(), brute_energy(q, k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_large_mean_costs_no_digits(dtype: torch.dtype) -> None:
    s = stats()
    parts = []
    for seed in range(3):
        q, k = text(700, seed)
        k = (k + 350).to(dtype)
        s.update(q.to(dtype), k, 1.0)
        parts.append(k[0].double())
    exact = torch.cat(parts, dim=1).var(1, correction=0)
    torch.testing.assert_close(s.key_variance(), exact, rtol=1e-9, atol=0)


def test_calls_in_pieces_equal_one_call() -> None:
    q, k = text(96)
    whole, pieces = stats(), stats()
    whole.update(q, k, 1.0)
    for start, stop in ((0, 50), (50, 95), (95, 96)):  # a chunked prefill, then one decode step
        pieces.update(q[:, :, start:stop], k[:, :, :stop], 1.0)
    assert pieces.tokens == whole.tokens
    close(pieces.energy(), whole.energy())
    close(pieces.key_mean(), whole.key_mean())


def test_padding_counts_for_nothing() -> None:
    texts = [text(n, n) for n in (30, 17, 1)]  # left padding: the texts end together
    alone, padded = stats(), stats()
    length = 30
    q, k = torch.full((3, HQ, length, D), math.nan), torch.full((3, HKV, length, D), math.inf)
    valid = torch.zeros(3, length, dtype=torch.bool)
    for b, (qb, kb) in enumerate(texts):
        alone.update(qb, kb, 0.25)
        n = qb.shape[2]
        q[b, :, length - n :], k[b, :, length - n :], valid[b, length - n :] = qb[0], kb[0], True
    padded.update(q, k, 0.25, valid)
    assert padded.tokens == alone.tokens == 48
    close(padded.energy(), alone.energy())
    for method in ("score_variance", "contextual_agreement"):
        assert padded.layer_profile("l", 2, method) == alone.layer_profile("l", 2, method)


def test_a_row_of_padding_only_is_skipped() -> None:
    q, k = text(12, batch=2)
    valid = torch.tensor([[True] * 12, [False] * 12])
    s = stats()
    s.update(q, k, 1.0, valid)
    assert s.tokens == 12


def test_padding_inside_a_chunk_with_earlier_keys() -> None:
    q, k = text(20)
    valid = torch.ones(1, 20, dtype=torch.bool)
    valid[0, :3] = valid[0, 12] = False
    s = stats()
    s.update(q[:, :, :10], k[:, :, :10], 1.0, valid[:, :10])
    s.update(q[:, :, 10:], k, 1.0, valid)
    keep = valid[0]
    close(s.energy(), brute_energy(q[0][:, keep], k[0][:, keep]))


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["queries", "keys"])
def test_values_that_are_not_finite_name_the_layer(value: float, which: str) -> None:
    q, k = text(2000)
    (q if which == "queries" else k)[0, 1, 1500, 3] = value
    with pytest.raises(CalibrationError, match=rf"model\.layers\.3\.self_attn: {which}: expected finite values"):
        stats().update(q, k, 1.0)


def test_earlier_keys_that_are_not_finite_are_found_too() -> None:
    q, k = text(20)
    k[0, 0, 3, 3] = math.nan
    s = stats()
    with pytest.raises(CalibrationError, match="keys: expected finite values"):
        s.update(q[:, :, 10:], k, 1.0)
    assert s.tokens == 0


def test_a_layer_never_reached_is_no_profile() -> None:
    with pytest.raises(CalibrationError, match=r"model\.layers\.3\.self_attn: expected at least 2 tokens, found 0"):
        stats().layer_profile("l", 2)
    one = stats()
    one.update(*text(1), 1.0)
    for ask in (one.energy, one.key_mean, lambda: one.rank("score_variance"), lambda: one.layer_profile("l", 2)):
        with pytest.raises(CalibrationError, match="found 1"):
            ask()


@pytest.mark.parametrize("q_scale, k_scale", [(0.0, 1.0), (1.0, 0.0)])
def test_a_layer_in_which_nothing_varies_is_no_profile(q_scale: float, k_scale: float) -> None:
    q, k = text(20)
    s = stats()
    s.update(q * q_scale, k * k_scale + 1, 1.0)
    with pytest.raises(CalibrationError, match="that vary"):
        s.layer_profile("l", 2)


@pytest.mark.parametrize(
    "q, k, valid",
    [
        ((1, HQ + 1, 5, D), (1, HKV, 5, D), None),
        ((1, HQ, 5, D), (1, HKV + 1, 5, D), None),
        ((1, HQ, 5, D), (1, HKV, 5, D + 2), None),
        ((1, HQ, 5, D), (1, HKV, 4, D), None),
        ((2, HQ, 5, D), (1, HKV, 5, D), None),
        ((1, HQ, 5, D), (1, HKV, 5, D), torch.ones(1, 4, dtype=torch.bool)),
        ((1, HQ, 5, D), (1, HKV, 5, D), torch.ones(1, 5, dtype=torch.int64)),
    ],
)
def test_other_shapes_are_refused(q: tuple, k: tuple, valid: Tensor | None) -> None:
    with pytest.raises(CalibrationError, match=r"model\.layers\.3\.self_attn: \w+: expected"):
        stats().update(torch.ones(q), torch.ones(k), 1.0, valid)


def test_impossible_requests_are_refused() -> None:
    s = stats()
    s.update(*text(20), 1.0)
    for n_tip in (0, 5):
        with pytest.raises(ValueError, match="n_tip: expected 1 to 4"):
            s.layer_profile("l", n_tip)
    with pytest.raises(ValueError, match="expected a method"):
        s.rank("best")
    with pytest.raises(ValueError, match="reduction"):
        s.rank("greedy_mass", reduction="mean")
    with pytest.raises(ValueError, match="top"):
        s.rank("greedy_mass", top=0)
    with pytest.raises(CalibrationError, match="equal groups"):
        LayerStats(5, 2, D, ROPE, "cpu", "l")


# --- the profile --------------------------------------------------------------------------------------------------------


def test_profile_values_against_their_definitions() -> None:
    q, k = text(120)
    scale = 0.2
    s = stats()
    s.update(q, k, scale)
    one = s.layer_profile("name", 2)
    q64, k64 = q[0].double(), k[0].double()
    assert (one.layer, one.num_heads, one.num_kv_heads, one.head_dim, one.rope) == ("name", HQ, HKV, D, ROPE)
    assert one.fcs.tolist() == [sorted(row.topk(2).indices.tolist()) for row in brute_energy(q64, k64)]
    close(one.centre, k64.mean(1).float())
    rms = q64.square().mean(1).view(HKV, G, D).sum(1).sqrt()
    close(one.spread, (k64.std(1, correction=0) / rms).sqrt().float(), 1e-6)

    # norm: all 120 keys are in the sample, and 60 queries of the later half.
    for h in range(HQ):
        dims = one.dims()[h // G].long()
        total = []
        for t in range(60, 120):
            seen = k64[h // G, : t + 1] - one.centre[h // G]
            total.append(((scale * q64[h, t, dims]) @ seen[:, dims].T).logsumexp(0) - math.log(t + 1))
        close(one.norm[h], torch.stack(total).mean(), 1e-5)

    energy = brute_energy(q64, k64)
    kept = energy.gather(1, one.fcs.long()).sum(1) / energy.sum(1)
    assert one.stats["energy_kept"] == pytest.approx(kept.mean().item())
    assert one.stats["energy_rotated"] == pytest.approx(1.0)
    assert one.stats["tokens"] == 120
    first, second = brute_energy(q64[:, :60], k64[:, :60]), brute_energy(q64[:, 60:], k64[:, 60:])

    def shared(one: Tensor, other: Tensor) -> float:
        pairs = zip(one.topk(2).indices.tolist(), other.topk(2).indices.tolist(), strict=True)
        return sum(len(set(a) & set(b)) / 2 for a, b in pairs) / HKV

    assert one.stats["stability"] == pytest.approx(shared(first, second))
    assert one.stats["stability_length"] == pytest.approx(shared(first, energy)) != one.stats["stability"]


def test_the_norm_makes_single_pass_reduction_comparable() -> None:
    # exp(s_h - c_h) summed over the keys a query sees is near their number, however large the head's scores are.
    s = stats()
    q, k = text(400)
    q = q * torch.tensor([0.1, 1.0, 0.3, 2.0]).view(1, HQ, 1, 1) / 10
    s.update(q, k, 1.0)
    one = s.layer_profile("l", 4)
    for h in range(HQ):
        scores = (q[0, h, -50:] @ (k[0, h // G] - one.centre[h // G]).T).double()
        off = (scores - one.norm[h]).exp().mean(1).log()
        assert off.mean().abs() < 0.25


def test_a_bias_counts_in_the_norm_and_in_what_ranks_by_scores() -> None:
    """ALiBi against the definition: without it, the constant of a head with a steep slope would be far too high."""
    q, k = text(40)
    q = q / 20
    slopes = torch.tensor([0.02, 0.1, 0.5, 2.0])
    back = torch.arange(40) - torch.arange(40)[:, None]
    bias = (slopes[:, None, None] * back.clamp(max=0))[None]  # [1, Hq, T, L]
    s = stats(RopeFacts(D, ()))
    s.update(q, k, 0.7, bias=bias)
    one = s.layer_profile("l", D)
    plain = stats(RopeFacts(D, ()))
    plain.update(q, k, 0.7)
    for h in range(HQ):
        centred = (k[0, h // G] - one.centre[h // G]).double()
        sums = []
        for t in range(20, 40):  # queries of the later half
            scores = 0.7 * centred[: t + 1] @ q[0, h, t].double() + slopes[h].double() * back[t, : t + 1]
            sums.append(scores.logsumexp(0) - math.log(t + 1))
        assert abs(one.norm[h] - sum(sums) / len(sums)) < 1e-4
    assert plain.layer_profile("l", D).norm[3] > one.norm[3] + 1.0
    agree = s.rank("contextual_agreement", top=8)
    assert not torch.equal(agree, plain.rank("contextual_agreement", top=8))


def test_single_dims_are_ranked_by_what_each_carries() -> None:
    q, k = text(200)
    s = stats(RopeFacts(D, ()))
    s.update(q, k, 1.0)
    expected = torch.zeros(HKV, D, dtype=torch.float64)
    for h in range(HQ):
        expected[h // G] += (q[0, h].double() ** 2).mean(0) * k[0, h // G].double().var(0, correction=0)
    close(s.energy(), expected)
    one = s.layer_profile("l", 3)
    assert one.dims().tolist() == expected.topk(3).indices.sort(1).values.tolist()


def test_the_affine_normaliser_follows_the_query() -> None:
    """Keys of two kinds: a query's log-sum-exp rises with its share along what tells them apart, and the slope finds it."""
    s, n = stats(), 600
    q, k = text(n)
    k = k * 0.3
    k[..., :4] += torch.where(torch.rand(1, HKV, n, 1) < 0.1, 3.0, 0.0)  # one key in ten is far off
    s.update(q, k, 1.0)
    one = s.layer_profile("l", 4)
    assert one.fcs.tolist() == [[0, 1, 2, 3]] * HKV  # all: what lies outside has no slope to find
    left: list[float] = []
    constant: list[float] = []
    for h in range(HQ):
        scores = (q[0, h, -150:] @ (k[0, h // G] - one.centre[h // G]).T).double()
        true = scores.exp().mean(1).log()
        constant.append(float((true - true.mean()).square().mean()))
        left.append(float((true - one.affine[h, 0] - q[0, h, -150:] @ one.affine[h, 1:]).square().mean()))
    assert max(a / b for a, b in zip(left, constant, strict=True)) < 0.5


def test_mass_kept_is_what_the_selection_holds_of_the_softmax() -> None:
    s, n = stats(), 300
    q, k = text(n)
    s.update(q, k, 0.2)
    one = s.layer_profile("l", 4)  # all dims: scores are exact
    budget = Budget(20, 2, 3)
    found = s.mass_kept(one, budget, [8, 20, 140])
    sample = calibration_stats._half_of(s._samples[0], 1)
    sample = sample.thinned(calibration_stats.MASS_QUERIES, n, torch.Generator())
    total = {"softmax_sum": [0.0] * 3, "static": [0.0] * 3}
    norm, _ = calibration_stats._normalisers(
        [calibration_stats._half_of(s._samples[0], 0)], one.centre.double(), one.dims().long()
    )
    for at in sample.q_at.tolist():
        for h in range(HKV):
            heads = [
                torch.tensor([float(q[0, h * G + g, at] @ k[0, h, t]) * 0.2 for t in range(at + 1)]) for g in range(G)
            ]
            shift = [float(q[0, h * G + g, at].double() @ one.centre[h].double()) * 0.2 for g in range(G)]
            p = torch.stack([x.softmax(0) for x in heads])
            constant = sum(
                (x - c - float(norm[h * G + g])).exp() for g, (x, c) in enumerate(zip(heads, shift, strict=True))
            )
            for name, key in (("softmax_sum", p.sum(0)), ("static", constant)):
                key[:2] = key[-3:] = torch.inf
                for i, tokens in enumerate((8, 20, (at + 1) // 2)):  # 140 are more than half of what most queries see
                    total[name][i] += float(p[:, key.topk(min(tokens, 140)).indices].sum())
    for name, mass in total.items():
        assert found[name] == pytest.approx([m / (len(sample.q_at) * HQ) for m in mass], rel=1e-3)
    assert s.mass_kept(one, budget)["static"] == pytest.approx([found["static"][1]])


def test_ridge_gives_no_slopes_to_noise_and_the_right_ones_to_signal() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 200, 6, generator=g, dtype=torch.float64)
    x = x - x.mean(1, keepdim=True)
    true = torch.tensor([1.0, -2.0, 0.0, 0.5, 0.0, 3.0], dtype=torch.float64)
    noise = torch.randn(2, 200, generator=g, dtype=torch.float64)
    y = torch.stack([x[0] @ true + 0.1 * noise[0], noise[1]])
    found = calibration_stats._ridge(x, y - y.mean(1, keepdim=True))
    assert (found[0] - true).abs().max() < 0.05
    assert found[1].abs().max() < 0.1
    assert torch.equal(calibration_stats._ridge(x * 0, y), torch.zeros(2, 6, dtype=torch.float64))


def test_dims_without_variance_or_queries_get_a_finite_scale() -> None:
    q, k = text(50)
    k[..., 0] = 3.0  # a key dim that is constant
    q[..., 5] = 0.0  # a query dim that is off
    q[:, 2:] = 0.0  # a KV head that no query asks
    s = stats()
    s.update(q, k, 1.0)
    one = s.layer_profile("l", 2)
    assert bool((one.spread > 0).all()) and bool(one.spread.isfinite().all())
    assert one.spread.max() / one.spread.min() < 1e5
    assert one.norm[2:].abs().max() < 1e-6  # no scores: exp(0), summed over n, is n


def test_partial_rotary_reports_what_no_fc_sees() -> None:
    rope = half_split(D, 4)
    q, k = text(60)
    s = stats(rope)
    s.update(q, k, 1.0)
    one = s.layer_profile("l", 1)
    per_dim = q[0].double().square().mean(1).view(HKV, G, D).sum(1) * k[0].double().var(1, correction=0)
    assert one.stats["energy_rotated"] == pytest.approx((per_dim[:, :4].sum(1) / per_dim.sum(1)).mean().item())
    assert one.dims().max() < 4


def test_the_same_data_gives_the_same_profile() -> None:
    made = []
    for _ in range(2):
        s = stats()
        for seed in range(6):  # more texts than the sample holds
            s.update(*text(24, seed), 0.5)
        made.append([s.layer_profile("l", 2, method) for method in METHODS])
    assert made[0] == made[1]


# --- the sample ---------------------------------------------------------------------------------------------------------


def test_the_sample_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_stats, "MAX_KEYS", 256)
    s = stats()
    for seed in range(9):
        s.update(*text(300, seed), 0.5)
        assert sum(x.k.shape[1] for x in s._samples) <= 256
        assert sum(x.q.shape[1] for x in s._samples) <= calibration_stats.MAX_QUERIES
        for x in s._samples:
            assert x.k.shape[1] == len(x.k_at) and x.q.shape[1] == len(x.q_at)
            assert x.k_at[:16].tolist() == list(range(16))
            assert bool((x.k_at[1:] > x.k_at[:-1]).all())
            assert int(x.q_at.min()) >= 150 and int(x.q_at.max()) == 299
            # Nothing of the model's own tensors is kept alive or can change under it.
            assert x.k.untyped_storage().nbytes() == x.k.numel() * x.k.element_size()
    assert len(s._samples) == calibration_stats.MAX_TEXTS


def test_the_sample_is_a_copy() -> None:
    q, k = text(40)
    s = stats()
    s.update(q, k, 0.5)
    before = s.layer_profile("l", 2).norm
    q.zero_(), k.zero_()
    assert torch.equal(s.layer_profile("l", 2).norm, before)


def test_a_thinned_sample_estimates_the_same_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = text(2000)
    whole = stats()
    whole.update(q, k, 0.1)
    monkeypatch.setattr(calibration_stats, "MAX_KEYS", 500)
    thin = stats()
    thin.update(q, k, 0.1)
    assert thin._samples[0].k.shape[1] == 500
    torch.testing.assert_close(thin.layer_profile("l", 2).norm, whole.layer_profile("l", 2).norm, rtol=0, atol=0.1)


def test_every_text_is_as_likely_to_be_sampled() -> None:
    counts = torch.zeros(8)
    for trial in range(200):
        s = stats()
        s._generator.manual_seed(trial)
        for i in range(8):
            q, k = torch.full((1, HQ, 2, D), float(i)), torch.zeros(1, HKV, 2, D)
            s.update(q, k, 1.0)
        for x in s._samples:
            counts[int(x.q[0, 0, 0])] += 1
    # 200 trials x 4 of 8: 100 each, standard deviation 7.
    assert bool(((counts - 100).abs() < 30).all()), counts


# --- finding FCs --------------------------------------------------------------------------------------------------------

PLANTED = ((1, 6), (0, 9))
WIDE = half_split(24)  # 12 FCs


def planted(length: int, bias: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and queries of 2 KV heads x 2 query heads whose score variance lies in ``PLANTED``; ``bias`` on other FCs' keys."""
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(1, HQ, length, 24, generator=g), torch.randn(1, HKV, length, 24, generator=g)
    loud = torch.full((HKV, 24), 0.15)
    offset = torch.zeros(HKV, 24)
    for h, fcs in enumerate(PLANTED):
        for f in range(12):
            a, b = WIDE.pairs[f]
            if f in fcs:
                loud[h, a] = loud[h, b] = 2.0
            else:
                offset[h, a], offset[h, b] = bias, -bias
    k = k * loud[None, :, None] + offset[None, :, None]
    return q, k


@pytest.mark.parametrize("bias", [0.0, 350.0])
@pytest.mark.parametrize("method", METHODS)
def test_planted_fcs_are_found(method: str, bias: float) -> None:
    s = stats(WIDE, head_dim=24)
    for seed in range(2):
        s.update(*planted(400, bias, seed), 24**-0.5)
    one = s.layer_profile("l", 2, method, top=64)
    assert one.fcs.tolist() == [list(row) for row in PLANTED]
    assert one.stats["energy_kept"] > 0.9
    assert one.stats["stability"] == 1.0
    order = s.rank(method, top=64, limit=2)
    assert order.shape == (HKV, 12)
    assert all(sorted(row) == list(range(12)) for row in order.tolist())
    assert [sorted(row[:2]) for row in order.tolist()] == [list(row) for row in PLANTED]


def test_planted_fcs_are_found_among_padding_and_pairs_of_any_shape() -> None:
    g = torch.Generator().manual_seed(0)
    dims = torch.randperm(D, generator=g).tolist()
    rope = RopeFacts(D, tuple((dims[2 * f], dims[2 * f + 1]) for f in range(4)))
    q, k = torch.randn(2, HQ, 90, D, generator=g), torch.randn(2, HKV, 90, D, generator=g) * 0.1
    k[:, 0, :, list(rope.pairs[2])] *= 20
    k[:, 1, :, list(rope.pairs[0])] *= 20
    valid = torch.ones(2, 90, dtype=torch.bool)
    valid[1, :40] = False
    k[1, :, :40, :] = 1e4 * torch.randn(40, D, generator=g)
    for method in METHODS:
        s = stats(rope)
        s.update(q, k, 0.3, valid)
        assert s.layer_profile("l", 1, method, top=16).fcs.tolist() == [[2], [0]]


def test_contextual_agreement_against_its_definition() -> None:
    q, k = text(64)
    s = stats()
    s.update(q, k, 0.5)
    top = 7
    expected = torch.zeros(HKV, 4, dtype=torch.float64)
    for h in range(HQ):
        for t in range(32, 64):
            keys, n = k[0, h // G, : t + 1].double(), round(top * 1.0)
            full = set((keys @ q[0, h, t].double()).topk(n).indices.tolist())
            for f, pair in enumerate(ROPE.pairs):
                partial = keys[:, list(pair)] @ q[0, h, t, list(pair)].double()
                expected[h // G, f] += len(full & set(partial.topk(n).indices.tolist())) / n
    samples = s._samples
    assert len(samples) == 1
    got = calibration_stats._agreement(samples[0], s.key_mean(), ROPE.pairs, top)
    close(got, expected, 1e-6)
    order = expected.sort(dim=1, descending=True, stable=True).indices
    assert s.rank("contextual_agreement", top=top).tolist() == order.tolist()


def test_a_top_beyond_the_text_still_tells_fcs_apart() -> None:
    s = stats(WIDE, head_dim=24)
    s.update(*planted(60), 24**-0.5)
    for method in METHODS:
        assert s.layer_profile("l", 2, method, top=10_000).fcs.tolist() == [list(row) for row in PLANTED]


def test_greedy_sees_that_two_fcs_say_the_same() -> None:
    # FCs 0 and 1 carry one signal, twice; FC 2 a weaker one of its own. Ranked one by one, 0 and 1 come first, and the
    # second adds nothing: scores 2s rank tokens like s. The full scores are 4s + 1.8w, which s + 0.9w ranks better than s.
    g = torch.Generator().manual_seed(0)
    length = 600
    q, k = torch.zeros(1, 1, length, D), torch.randn(1, 1, length, D, generator=g) * 0.05
    signal, weaker = torch.randn(2, length, generator=g)
    k[0, 0, :, 0] = k[0, 0, :, 1] = signal
    k[0, 0, :, 2] = weaker
    q[..., 0] = q[..., 1] = 2.0
    q[..., 2] = 1.8
    s = LayerStats(1, 1, D, ROPE, "cpu", "l")
    s.update(q, k, 1.0)
    assert s.layer_profile("l", 2, "score_variance").fcs.tolist() == [[0, 1]]
    assert 2 in s.layer_profile("l", 2, "greedy_mass", top=60).fcs[0].tolist()


def test_greedy_mass_rises_with_each_fc() -> None:
    s = stats(WIDE, head_dim=24)
    s.update(*planted(300), 24**-0.5)
    sample = s._samples[0].thinned(16, 300, torch.Generator().manual_seed(0))
    text_ = calibration_stats._GreedyText(sample, 0, s.key_mean(), WIDE.pairs, 50)
    masses = []
    for f in s.rank("greedy_mass", top=50)[0].tolist():
        masses.append(text_.mass([f], "static").item())
        text_.sum += text_.partial[f]
    assert masses[1] > masses[0]
    # All FCs are the full scores: one query head's own top tokens, or the group's compromise between two.
    true = text_.true.masked_fill(~text_.eligible, 0.0)
    best = sum(true[i].topk(int(n)).values.sum().item() for i, n in enumerate(text_.top))
    assert 0.9 * best < masses[-1] <= best * (1 + 1e-5)


def test_softcap_does_not_depend_on_the_keys_mean() -> None:
    q, k = text(80)
    s = stats()
    s.update(q, k, 0.5, softcap=4.0)
    sample, centre = s._samples[0], s.key_mean()
    for h in range(HKV):
        got = calibration_stats._full_scores(sample, h, centre)
        queries = sample.q[h * G : (h + 1) * G].double()
        raw = 0.5 * queries @ sample.k[h].double().T
        want = (4.0 * torch.tanh(raw / 4.0)).masked_fill(~sample.visible(), -math.inf)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_the_gpu_finds_the_same() -> None:
    q, k = planted(3000, bias=350.0)
    made = []
    for device in ("cpu", "cuda"):
        s = LayerStats(HQ, HKV, 24, WIDE, device, "l")
        s.update(q.to(device), k.to(device), 24**-0.5)
        made.append([s.layer_profile("l", 2, method) for method in METHODS])
    for cpu, gpu in zip(*made, strict=True):
        assert torch.equal(cpu.fcs, gpu.fcs)
        close(cpu.centre, gpu.centre, 1e-6)
        close(cpu.spread, gpu.spread, 1e-6)
        close(cpu.norm, gpu.norm, 1e-3)
