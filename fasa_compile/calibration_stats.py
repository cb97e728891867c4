"""Streaming statistics of one attention layer, from post-RoPE queries and keys, and the profile they make.

Moments are exact over all tokens. What needs scores (the paper's contextual agreement, the greedy method, the constants of
the group reduction) is computed at the end from a bounded sample of whole texts: queries of their later half, and their keys.
Memory does not grow with the text. Dimension letters as in ``fasa_compile.sites``; ``n_fc`` counts the frequency chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fasa_compile.errors import CalibrationError
from fasa_compile.profiles.schema import REDUCTIONS, Budget, LayerProfile, RopeFacts, dims_of

if TYPE_CHECKING:
    from fasa_compile.sites import Rope

METHODS = ("score_variance", "contextual_agreement", "greedy_mass")

CHUNK = 1024  # tokens whose float64 copy is alive at a time
MAX_TEXTS = 4  # texts sampled; later ones replace earlier ones with the chance that makes every text as likely
MAX_QUERIES = 256  # over all sampled texts
RANKING_QUERIES = 64  # of one text, that contextual agreement and greedy_mass rank by
MAX_KEYS = 4096  # over all sampled texts: one text of up to this length is kept whole
SINKS = 16  # first keys of a text, never thinned out: few, and they carry most of the mass
MASS_QUERIES = 64  # over all sampled texts, that mass_kept measures on
GREEDY_QUERIES = 16  # greedy_mass weighs every FC at every step, so it sees a part of the sample
GREEDY_KEYS = 1024
GREEDY_FORCED = (4, 16)  # first and last keys that every selection has anyway, and that the choice need not catch

#: A dim whose keys' deviation, or queries' rms, is below this share of its head's largest is taken at that share.
FLOOR = 1e-4

#: Penalties of the normaliser's ridge regression, as shares of the mean eigenvalue.
RIDGES = (1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)


@dataclass(frozen=True)
class _Moments:
    """Count, mean and sum of squared deviations of keys, sum of squares of queries; float64, ``n`` tokens."""

    n: int
    mean: Tensor  # [Hkv, D]
    m2: Tensor  # [Hkv, D]
    q2: Tensor  # [Hq, D]

    def merged(self, other: _Moments) -> _Moments:
        """Chan, Golub and LeVeque's pairwise update: no difference of large sums, so a mean of 350 costs no digits."""
        n = self.n + other.n
        if n == 0:
            return self
        delta = other.mean - self.mean
        return _Moments(
            n,
            self.mean + delta * (other.n / n),
            self.m2 + other.m2 + delta.square() * (self.n * other.n / n),
            self.q2 + other.q2,
        )

    def key_variance(self) -> Tensor:
        return self.m2 / max(self.n, 1)  # [Hkv, D]

    def query_square(self) -> Tensor:
        """Mean of q_d^2, summed over the query group: ``[Hkv, D]``."""
        hkv = self.mean.shape[0]
        return (self.q2 / max(self.n, 1)).view(hkv, -1, self.q2.shape[1]).sum(1)


@dataclass(frozen=True)
class _Sample:
    """Queries of one text's later half, and keys of it. Positions count the text's valid tokens."""

    q: Tensor  # [Hq, nq, D], dtype of the model
    k: Tensor  # [Hkv, nk, D]
    q_at: Tensor  # int64 [nq]: the query's position; it sees the keys up to it
    k_at: Tensor  # int64 [nk], ascending
    scale: float
    softcap: float
    bias: Tensor | None = None  # [Hq or 1, nq, nk]: what the attention adds to the scores (ALiBi), finite

    def thinned(self, queries: int, keys: int, generator: torch.Generator) -> _Sample:
        """At most that many queries, evenly spread, and keys, drawn at random after the first ``SINKS``."""
        q_at, k_at, q, k, bias = self.q_at, self.k_at, self.q, self.k, self.bias
        if len(q_at) > queries:
            pick = _spread_out(len(q_at), queries).to(q_at.device)
            q_at, q = q_at[pick], q[:, pick].clone()
            bias = None if bias is None else bias[:, pick]
        if len(k_at) > keys:
            sinks = int((k_at < SINKS).sum())
            drawn = sinks + torch.randperm(len(k_at) - sinks, generator=generator)[: keys - sinks].sort().values
            pick = torch.cat([torch.arange(sinks), drawn]).to(k_at.device)
            k_at, k = k_at[pick], k[:, pick].clone()
            bias = None if bias is None else bias[:, :, pick]
        return replace(self, q=q, k=k, q_at=q_at, k_at=k_at, bias=bias)

    def biased(self, scores: Tensor, h: int) -> Tensor:
        """``scores [..., G, nq, nk]`` of KV head ``h`` with what the attention adds to them."""
        if self.bias is None:
            return scores
        group = self.q.shape[0] // self.k.shape[0]
        return scores + (self.bias[h * group : (h + 1) * group] if len(self.bias) > 1 else self.bias).float()

    def visible(self) -> Tensor:
        """bool ``[nq, nk]``."""
        return self.k_at[None, :] <= self.q_at[:, None]

    def log_weights(self) -> Tensor:
        """fp32 ``[nq, nk]``: log of the number of the text's keys that a sampled key stands for; -inf where invisible."""
        visible, sink = self.visible(), self.k_at < SINKS
        sinks = (visible & sink).sum(1, keepdim=True)
        rest = (visible & ~sink).sum(1, keepdim=True)
        stands_for = (self.q_at[:, None] + 1 - sinks) / rest.clamp(min=1)  # [nq, 1]
        weights = torch.where(sink[None, :], 1.0, stands_for).log()
        return weights.masked_fill(~visible, -math.inf)

    def top(self, tokens: int, among: Tensor) -> Tensor:
        """int64 ``[nq]``: how many sampled keys are the top ``tokens`` of the text, of those in ``among`` (bool ``[nq, nk]``).

        At most half of them: when nearly every token is in the top, all FCs agree and the ranking would say nothing.
        """
        seen = among.sum(1)
        share = tokens * seen / (self.q_at + 1)
        return torch.minimum(share.round().long(), seen // 2).clamp(min=1)


class LayerStats:
    """Statistics of one attention layer over the forwards of a calibration.

    ``rope`` gives the FCs' dims; ``device`` (with float64) is where the sums live, ``layer`` the name for errors.
    ``update`` takes one forward's queries and keys, ``layer_profile`` makes the result.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope: Rope | RopeFacts,
        device: torch.device | str,
        layer: str = "attention",
    ) -> None:
        if num_heads % num_kv_heads:
            raise CalibrationError(
                f"{layer}: expected query heads in equal groups, found {num_heads} query and {num_kv_heads} KV heads."
                " Leave this layer dense."
            )
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.rope = RopeFacts(rope.head_dim, tuple((int(a), int(b)) for a, b in rope.pairs), float(rope.magnitude))
        self.layer = layer
        self.device = torch.device(device)
        # The first and the second half of every text, apart: how alike are the sets that each would choose?
        self._halves = [self._nothing(), self._nothing()]
        self._samples: list[_Sample] = []
        self._texts = 0
        self._generator = torch.Generator().manual_seed(0)

    def _nothing(self) -> _Moments:
        def zeros(heads: int) -> Tensor:
            return torch.zeros(heads, self.head_dim, dtype=torch.float64, device=self.device)

        return _Moments(0, zeros(self.num_kv_heads), zeros(self.num_kv_heads), zeros(self.num_heads))

    @property
    def tokens(self) -> int:
        """Valid tokens seen so far."""
        return sum(half.n for half in self._halves)

    @torch.no_grad()
    def update(
        self,
        q: Tensor,
        k: Tensor,
        scale: float,
        valid: Tensor | None = None,
        softcap: float = 0.0,
        bias: Tensor | None = None,
    ) -> None:
        """Adds one forward of a calibration text.

        ``q [B, Hq, T, D]`` and ``k [B, Hkv, L, D]`` are as the attention sees them, after RoPE, in any float dtype; ``k`` holds
        all keys that these queries may see, ``L >= T``: query ``t`` sees the valid keys up to ``L - T + t``. Each key is counted
        once, in the call that brings its query (the last ``T``). ``scale`` multiplies q.k; ``valid`` is bool ``[B, L]``, false
        on padding; ``softcap`` is the attention's, 0 for none; ``bias [B or 1, Hq or 1, T, L]`` is what it adds to the scores that a
        query may see, finite (ALiBi).

        Raises ``CalibrationError`` for other shapes and for NaN or infinite values at a valid position.
        """
        self._check_shapes(q, k, valid)
        if valid is not None and valid.dtype != torch.bool:  # would be taken as indices
            raise CalibrationError(
                f"{self.layer}: valid: expected dtype bool, found {valid.dtype}. Compare the mask with 0."
            )
        for b in range(q.shape[0]):
            q_row, k_row = q[b], k[b]
            bias_row = None if bias is None else bias[b if len(bias) > 1 else 0]
            if valid is not None:
                new = valid[b, k.shape[2] - q.shape[2] :]
                q_row, k_row = q_row[:, new], k_row[:, valid[b]]
                bias_row = None if bias_row is None else bias_row[:, new][:, :, valid[b]]
            if q_row.shape[1]:
                self._add_text(q_row, k_row, float(scale), float(softcap), bias_row)

    def _check_shapes(self, q: Tensor, k: Tensor, valid: Tensor | None) -> None:
        b, t, length, d = q.shape[0], q.shape[-2], k.shape[-2], self.head_dim
        for name, x, want in (
            ("queries", q, (b, self.num_heads, t, d)),
            ("keys", k, (b, self.num_kv_heads, max(length, t), d)),
            ("valid", valid, (b, length)),
        ):
            if x is not None and tuple(x.shape) != want:
                raise CalibrationError(
                    f"{self.layer}: {name}: expected shape {list(want)}, found {list(x.shape)}. Give every layer its own LayerStats."
                )

    def _add_text(self, q: Tensor, k: Tensor, scale: float, softcap: float, bias: Tensor | None) -> None:
        """``q [Hq, T, D]``, ``k [Hkv, L, D]``, all valid: query ``t`` sees the keys up to ``L - T + t``."""
        t, length = q.shape[1], k.shape[1]
        earlier, own = k[:, : length - t], k[:, length - t :]
        self._check_finite("keys", earlier)
        halves = list(self._halves)
        middle = (t + self._texts % 2) // 2  # alternating, so that calls of one token fill both halves
        for half, start, stop in ((0, 0, middle), (1, middle, t)):
            for at in range(start, stop, CHUNK):
                end = min(at + CHUNK, stop)
                part = self._moments(q[:, at:end], own[:, at:end])
                # One value that is not finite makes its dim's sum so, and the sums are small.
                self._check_finite("queries", part.q2)
                self._check_finite("keys", part.m2)
                halves[half] = halves[half].merged(part)
        self._halves = halves
        self._keep_sample(q, k, scale, softcap, bias)

    def _check_finite(self, name: str, x: Tensor) -> None:
        if not bool(x.isfinite().all()):
            raise CalibrationError(
                f"{self.layer}: {name}: expected finite values, found NaN or infinity after RoPE. Check the model's"
                " dtype (fp16 overflows where bf16 does not) and the calibration text, or leave this layer dense."
            )

    def _moments(self, q: Tensor, k: Tensor) -> _Moments:
        k64 = k.to(self.device, torch.float64)
        mean = k64.mean(1)
        m2 = (k64 - mean[:, None]).square().sum(1)
        return _Moments(k.shape[1], mean, m2, q.to(self.device, torch.float64).square().sum(1))

    def _keep_sample(self, q: Tensor, k: Tensor, scale: float, softcap: float, bias: Tensor | None) -> None:
        self._texts += 1
        slot = len(self._samples)
        if slot == MAX_TEXTS:  # reservoir sampling
            slot = int(torch.randint(self._texts, (), generator=self._generator))
            if slot >= MAX_TEXTS:
                return
        t, length = q.shape[1], k.shape[1]
        q_at = torch.arange(length - t, length)
        later = (q_at >= length // 2).nonzero().flatten()
        pick = later[_spread_out(len(later), min(len(later), MAX_QUERIES))]
        sample = _Sample(
            q=q[:, pick.to(q.device)].to(self.device),
            k=k,  # a view until it is thinned
            q_at=q_at[pick].to(self.device),
            k_at=torch.arange(length, device=k.device),
            scale=scale,
            softcap=softcap,
            bias=None if bias is None else bias[:, pick.to(bias.device)].to(self.device),
        )
        texts = self._samples if slot < len(self._samples) else [*self._samples, sample]
        queries, keys = MAX_QUERIES // len(texts), MAX_KEYS // len(texts)
        sample = sample.thinned(queries, keys, self._generator)
        kept = k.clone() if sample.k is k else sample.k  # never the model's own tensor: it may be written again
        sample = replace(sample, k=kept.to(self.device), k_at=sample.k_at.to(self.device))
        self._samples = [x.thinned(queries, keys, self._generator) for x in self._samples]
        self._samples[slot : slot + 1] = [sample]

    # --- what the sums say ----------------------------------------------------------------------------------------------

    def _total(self, half: int | None = None) -> _Moments:
        moments = self._halves[0].merged(self._halves[1]) if half is None else self._halves[half]
        if moments.n < 2 and half is None:
            raise CalibrationError(
                f"{self.layer}: expected at least 2 tokens, found {moments.n}. The calibration did not reach this layer, or its"
                " text is too short: give a longer text, or leave this layer dense."
            )
        return moments

    def key_mean(self) -> Tensor:
        """float64 ``[Hkv, D]``."""
        return self._total().mean

    def key_variance(self) -> Tensor:
        """float64 ``[Hkv, D]``: population variance over all valid tokens."""
        return self._total().key_variance()

    def query_square(self) -> Tensor:
        """float64 ``[Hq, D]``: mean of q_d^2."""
        total = self._total()
        return total.q2 / total.n

    def _dim_energy(self, half: int | None = None) -> Tensor:
        total = self._total(half)
        return total.query_square() * total.key_variance()  # [Hkv, D]

    def energy(self) -> Tensor:
        """float64 ``[Hkv, n_fc]``: the score variance an FC carries.

        E[q_d^2] Var[k_d], summed over the FC's dims and over the query group (``docs/method.md``: measured better than the
        paper's contextual agreement). Raises ``CalibrationError`` when fewer than 2 tokens were seen.
        """
        return self._chunk_sum(self._dim_energy())

    def _chunk_sum(self, per_dim: Tensor) -> Tensor:
        chunks = torch.tensor(self.rope.chunks, device=per_dim.device)  # [n_fc, 1 or 2]
        return per_dim[:, chunks].sum(-1)

    def rank(
        self, method: str = "score_variance", *, top: int = 256, reduction: str = "static", limit: int | None = None
    ) -> Tensor:
        """int64 ``[Hkv, n_fc]``: FC indices of every KV head, best first; equals go by index.

        ``score_variance``        by ``energy``
        ``contextual_agreement``  arXiv 2602.03152: per query head, overlap of the ``top`` tokens by the FC's own q.k with
                                  those by the full q.k, mean over the sampled queries, summed over the query group
        ``greedy_mass``           adds the FC that most raises the attention mass that the group's ``top`` tokens hold, up to
                                  ``limit`` FCs, then by ``energy``; ``reduction`` is the group's (``max``, or else softmax-sum)

        The last two use the sample, in which ``top`` is scaled to the keys kept and is at most half of those a query sees.
        Raises ``CalibrationError`` when fewer than 2 tokens were seen or nothing varies.
        """
        return self._rank(method, top, reduction, limit, None)

    def _rank(self, method: str, top: int, reduction: str, limit: int | None, half: int | None) -> Tensor:
        if method not in METHODS or reduction not in REDUCTIONS:
            raise ValueError(
                f"{self.layer}: expected a method of {METHODS} and a reduction of {REDUCTIONS}, found {method!r}, {reduction!r}"
            )
        if top < 1:
            raise ValueError(f"{self.layer}: expected a top of at least 1 token, found {top}")
        if not bool((self._dim_energy() > 0).any()):
            raise CalibrationError(
                f"{self.layer}: expected queries and keys that vary, found none that do in {self.tokens} tokens. Give a longer or"
                " more varied text, or leave this layer dense."
            )
        by_energy = _best_first(self._chunk_sum(self._dim_energy(half)))
        if method == "score_variance":
            return by_energy
        centre, chunks = self.key_mean(), self.rope.chunks
        thin, texts = torch.Generator().manual_seed(0), len(self._samples)
        if method == "contextual_agreement":
            samples = [_half_of(s.thinned(RANKING_QUERIES, MAX_KEYS, thin), half) for s in self._samples]
            return _best_first(torch.stack([_agreement(s, centre, chunks, top) for s in samples]).sum(0))
        samples = [
            _half_of(s.thinned(max(GREEDY_QUERIES // texts, 2), max(GREEDY_KEYS // texts, 2 * SINKS), thin), half)
            for s in self._samples
        ]
        steps = len(chunks) if limit is None else min(limit, len(chunks))
        chosen = _greedy(samples, centre, chunks, top, reduction, steps)  # [Hkv, steps]
        rest = [
            [f for f in row if f not in set(head)]
            for row, head in zip(by_energy.tolist(), chosen.tolist(), strict=True)
        ]
        return torch.cat(
            [chosen, torch.tensor(rest, dtype=torch.int64, device=chosen.device).view(len(rest), -1)], dim=1
        )

    def layer_profile(
        self,
        name: str,
        n_tip: int,
        method: str = "score_variance",
        reduction: str = "static",
        *,
        top: int = 256,
        dense: bool = False,
    ) -> LayerProfile:
        """The layer's profile with the ``n_tip`` best FCs of every KV head.

        ``stats``: ``tokens``; ``energy_kept``, the share of the rotated dims' score variance that the FCs hold, mean over KV
        heads; ``energy_rotated``, the rotated dims' share of all dims'; ``stability``, the overlap of the sets that the first and
        the second halves of the texts would choose; ``stability_length``, that of the first halves' sets, which texts half as long
        would give, with these. Raises ``CalibrationError`` as ``rank`` does, and ``ValueError`` for an
        impossible ``n_tip``.
        """
        n_fc = len(self.rope.chunks)
        if not 1 <= n_tip <= n_fc:
            raise ValueError(f"{name}: n_tip: expected 1 to {n_fc} FCs per KV head, found {n_tip}")
        fcs = self._rank(method, top, reduction, n_tip, None)[:, :n_tip].sort(1).values
        halves = [self._rank(method, top, reduction, n_tip, h)[:, :n_tip] for h in (0, 1)]

        def overlap(one: Tensor, other: Tensor) -> float:
            return float((one[:, :, None] == other[:, None, :]).any(2).double().mean())

        energy, all_dims = self.energy(), self._dim_energy().sum(1)
        kept, rotated = energy.gather(1, fcs).sum(1), energy.sum(1)
        centre = self.key_mean().float().cpu()
        dims = dims_of(self.rope, fcs)  # [Hkv, W]
        norm, affine = _normalisers(self._samples, centre.to(self.device, torch.float64), dims)
        return LayerProfile(
            layer=name,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope=self.rope,
            dense=dense,
            fcs=fcs.to("cpu", torch.int32),
            centre=centre,
            spread=self._spread().float().cpu(),
            norm=norm.float().cpu(),
            affine=affine.float().cpu(),
            stats={
                "tokens": float(self.tokens),
                # A head whose rotated dims never vary loses nothing by any choice.
                "energy_kept": float(torch.where(rotated > 0, kept / rotated, 1.0).mean()),
                "energy_rotated": float(torch.where(all_dims > 0, rotated / all_dims, 1.0).mean()),
                "stability": overlap(*halves),
                "stability_length": overlap(halves[0], fcs),
            },
        )

    @torch.no_grad()
    def mass_kept(
        self, profile: LayerProfile, budget: Budget, tokens: Sequence[int] | None = None
    ) -> dict[str, list[float]]:
        """Attention mass that a selection by ``profile``'s FCs keeps within each number of ``tokens`` (``budget.n_fac``), the forced
        tokens of ``budget`` among them: by reduction, mean over query heads.

        Queries are of the sample's later halves; the normalisers are fitted to the earlier ones. Scores are taken unquantised. A
        query keeps at most half of the keys that it sees, whatever ``tokens`` says.
        """
        tokens = (budget.n_fac,) if tokens is None else tokens
        centre, dims = profile.centre.to(self.device, torch.float64), profile.dims().to(self.device).long()
        norm, affine = _normalisers([_half_of(s, 0) for s in self._samples], centre, dims)
        norm, affine = norm.float(), affine.float()
        kept = dict.fromkeys(("static", "affine", "softmax_sum"), torch.zeros(len(tokens), device=self.device))
        group, rows = self.num_heads // self.num_kv_heads, 0
        queries, unused = max(MASS_QUERIES // max(len(self._samples), 1), 1), torch.Generator()
        for sample in (_half_of(s, 1).thinned(queries, len(s.k_at), unused) for s in self._samples):
            visible, weights = sample.visible(), sample.log_weights()
            forced = visible & (
                (sample.k_at < budget.n_sink)[None, :] | (sample.k_at[None, :] > sample.q_at[:, None] - budget.n_recent)
            )
            keep = torch.stack([sample.top(n, visible) for n in tokens], 1)  # [nq, tokens]
            most = int(keep.max())
            for h in range(self.num_kv_heads):
                q, k = _grouped(sample, h, centre)
                heads = slice(h * group, (h + 1) * group)
                scores = sample.biased(q[..., dims[h]] @ k[:, dims[h]].T, h)  # [G, nq, nk]
                true = (_full_scores(sample, h, centre) + weights).softmax(-1).sum(0)  # [nq, nk]: mass over the group
                levels = {
                    "static": norm[heads, None],
                    "affine": affine[heads, :1] + (q * affine[heads, None, 1:]).sum(-1),
                    "softmax_sum": (scores + weights).logsumexp(-1),
                }
                for name, level in levels.items():
                    key = (scores - level[..., None]).logsumexp(0)
                    key = key.masked_fill(~visible, -math.inf).masked_fill(forced, math.inf)
                    held = true.gather(-1, key.topk(most, dim=-1).indices).cumsum(
                        -1
                    )  # [nq, most]: by the best n tokens
                    kept[name] = kept[name] + held.gather(-1, keep - 1).sum(0)
                rows += group * len(sample.q_at)
        return {name: (total / rows).tolist() for name, total in kept.items()}

    def _spread(self) -> Tensor:
        """float64 ``[Hkv, D]``: sqrt(sd k / rms q), which shares a dim's range between key and query."""
        total = self._total()
        return (_floored(total.key_variance().sqrt()) / _floored(total.query_square().sqrt())).sqrt()


def _floored(x: Tensor) -> Tensor:
    """``x [Hkv, D]`` with what is (nearly) zero raised to a small share of its head's largest; ones for a head of zeros."""
    largest = x.amax(1, keepdim=True)
    return torch.where(largest > 0, torch.maximum(x, largest * FLOOR), 1.0)


def _spread_out(size: int, count: int) -> Tensor:
    """int64 ``[count]``: ``count`` of ``range(size)``, evenly spread, the last one included."""
    return (torch.arange(1, count + 1) * size).div(max(count, 1), rounding_mode="floor") - 1


def _best_first(score: Tensor) -> Tensor:
    return score.sort(dim=1, descending=True, stable=True).indices


def _half_of(sample: _Sample, half: int | None) -> _Sample:
    """The sample with the first or second half of its queries (all, where there are too few to halve)."""
    n = len(sample.q_at)
    if half is None or n < 2:
        return sample
    part = slice(0, n // 2) if half == 0 else slice(n // 2, n)
    bias = None if sample.bias is None else sample.bias[:, part]
    return replace(sample, q=sample.q[:, part], q_at=sample.q_at[part], bias=bias)


def _grouped(sample: _Sample, h: int, centre: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 scaled queries ``[G, nq, D]`` of KV head ``h`` and its centred keys ``[nk, D]``.

    Centred in float64: a query's scores all shift alike, and fp32 keeps its digits for what tells tokens apart.
    """
    group = sample.q.shape[0] // sample.k.shape[0]
    q = sample.q[h * group : (h + 1) * group].double() * sample.scale
    return q.float(), (sample.k[h].double() - centre[h]).float()


def _full_scores(sample: _Sample, h: int, centre: Tensor) -> Tensor:
    """fp32 ``[G, nq, nk]``: the attention's scores up to a constant per query, softcap applied, -inf where invisible."""
    q, k = _grouped(sample, h, centre)
    scores = q @ k.T
    if sample.softcap:  # not indifferent to the shift by the centre
        shift = (q.double() @ centre[h])[..., None].float()
        scores = sample.softcap * torch.tanh((scores + shift) / sample.softcap)
    return sample.biased(scores, h).masked_fill(~sample.visible(), -math.inf)


def _top_mask(scores: Tensor, top: Tensor) -> Tensor:
    """bool like ``scores [..., nq, nk]``: the ``top[nq]`` largest of every row."""
    most = int(top.max())
    alike = bool((top == most).all())
    indices = scores.topk(most, dim=-1, sorted=not alike).indices
    mask = torch.zeros_like(scores, dtype=torch.bool)
    if alike:
        return mask.scatter_(-1, indices, True)
    wanted = torch.arange(most, device=top.device) < top[:, None]  # [nq, most]
    return mask.scatter_(-1, indices, wanted.expand_as(indices))


def _agreement(sample: _Sample, centre: Tensor, chunks: tuple[tuple[int, ...], ...], top: int) -> Tensor:
    """float64 ``[Hkv, n_fc]``: contextual agreement, summed over the text's sampled queries and the query group."""
    agreement = torch.zeros(len(centre), len(chunks), dtype=torch.float64, device=centre.device)
    hidden = ~sample.visible()
    tops = sample.top(top, ~hidden)
    for h in range(len(centre)):
        q, k = _grouped(sample, h, centre)
        full = _top_mask(_full_scores(sample, h, centre), tops)  # [G, nq, nk]
        for f, dims in enumerate(chunks):
            partial = sample.biased(q[..., dims] @ k[:, dims].T, h).masked_fill(hidden, -math.inf)
            both = (_top_mask(partial, tops) & full).sum(-1) / tops  # [G, nq]
            agreement[h, f] = both.sum(dtype=torch.float64)
    return agreement


def _greedy(
    samples: list[_Sample], centre: Tensor, chunks: tuple[tuple[int, ...], ...], top: int, reduction: str, steps: int
) -> Tensor:
    """int64 ``[Hkv, steps]``: at each step the FC with which the group's top tokens hold the most attention mass.

    The mass of forced tokens (sinks, recent ones) is left out, and so are they: a selection has them anyway.
    """
    chosen = torch.empty(len(centre), steps, dtype=torch.int64, device=centre.device)
    for h in range(len(centre)):
        texts = [_GreedyText(s, h, centre, chunks, top) for s in samples]
        left = list(range(len(chunks)))
        for step in range(steps):
            gain = torch.stack([text.mass(left, reduction) for text in texts]).sum(0)  # [left]
            best = left.pop(int(gain.argmax()))
            chosen[h, step] = best
            for text in texts:
                text.sum += text.partial[best]
    return chosen


class _GreedyText:
    """One KV head on one sampled text: every FC's partial scores, and the sum of those chosen so far."""

    def __init__(self, sample: _Sample, h: int, centre: Tensor, chunks: tuple[tuple[int, ...], ...], top: int) -> None:
        visible = sample.visible()
        first, last = GREEDY_FORCED
        free = visible & (sample.k_at >= first)[None, :] & (sample.k_at[None, :] <= sample.q_at[:, None] - last)
        self.eligible = torch.where((free.sum(1) >= 2)[:, None], free, visible)  # a short text has forced tokens only
        self.top = sample.top(top, self.eligible)
        q, k = _grouped(sample, h, centre)
        self.partial = torch.stack([q[..., dims] @ k[:, dims].T for dims in chunks])  # [n_fc, G, nq, nk]
        self.sum = sample.biased(torch.zeros_like(self.partial[0]), h)
        self.weights = sample.log_weights()  # [nq, nk]
        self.true = (_full_scores(sample, h, centre) + self.weights).softmax(-1).sum(0)  # [nq, nk]: mass over the group

    def mass(self, candidates: list[int], reduction: str) -> Tensor:
        """float64 ``[candidates]``: mass held by the top tokens, summed over queries and the group."""
        scores = self.sum + self.partial[candidates]  # [candidates, G, nq, nk]
        # A head counts by its softmax over all that it sees, the forced tokens too.
        heads = scores - (scores + self.weights).logsumexp(-1, keepdim=True)
        group = heads.amax(1) if reduction == "max" else heads.logsumexp(1)
        kept = _top_mask(group.masked_fill_(~self.eligible, -math.inf), self.top)  # [candidates, nq, nk]
        return (self.true * kept).sum((1, 2), dtype=torch.float64)


def _normalisers(samples: list[_Sample], centre: Tensor, dims: Tensor) -> tuple[Tensor, Tensor]:
    """``norm`` float64 ``[Hq]`` and ``affine [Hq, 1 + D]`` of ``LayerProfile``: what a query's log-sum-exp of centred scores over
    ``dims [Hkv, W]``, less log(keys seen), is on average over the sampled queries, and as an affine function of the query."""
    group = samples[0].q.shape[0] // len(dims)
    columns = dims.repeat_interleave(group, 0)[:, None, :]  # [Hq, 1, W]
    queries, sums = [], []
    for sample in samples:
        weights, seen = sample.log_weights(), (sample.q_at + 1).double().log()
        for_text = []
        for h in range(len(dims)):
            q, k = _grouped(sample, h, centre)
            scores = sample.biased(q[..., dims[h]] @ k[:, dims[h]].T, h) + weights  # [G, nq, nk]
            for_text.append(scores.logsumexp(-1).double() - seen)
        sums.append(torch.cat(for_text))  # [Hq, nq]
        q = sample.q.double() * sample.scale
        queries.append(q.gather(2, columns.expand(-1, q.shape[1], -1)))
    x, y = torch.cat(queries, 1), torch.cat(sums, 1)  # [Hq, n, W], [Hq, n]
    level = y.mean(1)
    slopes = _ridge(x - x.mean(1, keepdim=True), y - level[:, None])  # [Hq, W]
    affine = level.new_zeros(len(level), 1 + samples[0].q.shape[2])
    affine[:, 0] = level - (x.mean(1) * slopes).sum(1)
    affine[:, 1:].scatter_(1, columns[:, 0], slopes)
    return level, affine


def _ridge(x: Tensor, y: Tensor) -> Tensor:
    """``[H, W]``: the slopes of ``y [H, n]`` in ``x [H, n, W]`` (both centred, float64), by ridge regression.

    A row's penalty is that of ``RIDGES`` with the least generalised cross-validation error (Golub, Heath and Wahba 1979), or
    infinite, which gives zeros.
    """
    n = x.shape[1]
    values, vectors = torch.linalg.eigh(x.transpose(1, 2) @ x)  # [H, W], [H, W, W]
    values = values.clamp(min=0)
    along = (vectors.transpose(1, 2) @ (x.transpose(1, 2) @ y[..., None]))[..., 0]  # [H, W]
    penalty = values.mean(1, keepdim=True) * torch.tensor(RIDGES, dtype=x.dtype, device=x.device)[:, None, None]
    shrunk = torch.where(values + penalty > 0, along / (values + penalty), 0.0)  # [ridges, H, W]
    left = (y[..., None] - x @ (vectors @ shrunk[..., None])[..., 0].movedim(0, 2)).square().sum(1)  # [H, ridges]
    freedom = torch.where(values + penalty > 0, values / (values + penalty), 0.0).sum(2).T  # [H, ridges]
    error = left / (1 - (1 + freedom) / n).clamp(min=1e-6).square()
    none = y.square().sum(1) / max(1 - 1 / n, 1e-6) ** 2
    best, which = error.min(1)
    slopes = (vectors @ shrunk[which, torch.arange(len(y), device=y.device)][..., None])[..., 0]
    return torch.where((best < none)[:, None], slopes, 0.0)
