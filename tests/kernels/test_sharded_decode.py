"""Attention over a cache whose tokens lie on several processes, against the reference over all of them. The processes are threads here;
``tests/distributed`` has real ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fasa_compile.testing.steps import Case, make_case
from fasa_compile.testing.strategies import Step, steps
from fasa_compile.triton_kernels import reference, sharded_decode

NAMES = ("scale", "n_sink", "n_recent", "softcap", "fmt", "reduction", "slopes")


class Ranks:
    """``ranks`` threads that exchange tensors where processes would."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.sent = ranks, [[] for _ in range(ranks)]
        self._rank, self._meet, self._slots = threading.local(), threading.Barrier(ranks, timeout=60), [None] * ranks

    def all_gather(self, x: Tensor, ranks: int, group: str) -> Tensor:
        assert (ranks, group) == (self.ranks, "threads")
        rank = self._rank.value
        self.sent[rank].append(x.numel() * x.element_size())
        self._slots[rank] = x
        self._meet.wait()
        found = torch.stack(list(self._slots))
        self._meet.wait()
        return found

    def run(self, work: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """``work(rank)`` of each."""
        results: list[Any] = [None] * self.ranks

        def one(rank: int) -> None:
            self._rank.value = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:
                results[rank] = error
                self._meet.abort()

        with monkeypatch.context() as patch:
            patch.setattr(sharded_decode, "all_gather", self.all_gather)
            threads = [threading.Thread(target=one, args=(r,)) for r in range(self.ranks)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
                raise result
        return results


def sharded(
    case: Case, ranks: int, monkeypatch: pytest.MonkeyPatch, v: Tensor | None = None, dense: bool = False
) -> Any:
    """``(results, bytes sent)`` of each rank; every buffer has a row more, poisoned, which nobody may read."""
    rows = case.k.shape[2] // ranks
    assert rows * ranks == case.k.shape[2]
    v = case.v if v is None else v
    data, meta, *constants = case.cache
    threads = Ranks(ranks)

    def part(x: Tensor | None, rank: int) -> Tensor | None:
        if x is None:
            return None
        own = x[:, :, rank * rows : (rank + 1) * rows]
        spill = torch.full_like(own[:, :, :1].float(), torch.nan if x.is_floating_point() else 77.0).to(x.dtype)
        return (
            torch.cat([own.float(), spill.float()], 2).to(x.dtype)
            if x.is_floating_point()
            else torch.cat([own, spill], 2)
        )

    def work(rank: int) -> Tensor:
        k, own_v, d, m = (part(x, rank) for x in (case.k, v, data, meta))
        where = {"rows": rows, "rank": rank, "ranks": ranks, "group": "threads"}
        if dense:
            how = {name: case.how[name] for name in ("scale", "softcap", "sinks")}
            return sharded_decode.dense_decode(case.q, k, own_v, case.mask, None, **where, **how)
        return sharded_decode.sparse_decode(
            case.q, k, own_v, d, m, *constants, case.norm, case.mask, None, **where, **case.how
        )

    return threads.run(work, monkeypatch), threads.sent


def selected(case: Case) -> tuple[Tensor, bool]:
    """The tokens that the reference selects, bool ``[B, Hkv, L]``, and whether rounding could not change which."""
    data, meta, dims, _, spread = case.cache
    ranked = {name: case.how[name] for name in NAMES}
    key = reference.tip_keys(case.q, case.k, data, meta, dims, spread, case.norm, case.mask, None, **ranked)
    n, L = case.how["n_fac"], key.shape[2]
    chosen = reference.best(key, n)
    taken = torch.zeros(*key.shape[:2], L + n, dtype=torch.bool).scatter_(2, chosen, True)[..., :L] & (key > -torch.inf)
    ordered = torch.nn.functional.pad(key.sort(-1, descending=True).values, (0, 1), value=-torch.inf)
    if n >= L:
        return taken, True
    last, after = ordered[..., n - 1], ordered[..., n]
    clear = (
        (last - after > 1e-5 * (1 + last.abs())) | (last == torch.inf) & (after == torch.inf) | (after == -torch.inf)
    )
    return taken, bool(clear.all())


def expected(case: Case) -> Tensor:
    return reference.sparse_decode(case.q, case.k, case.v, *case.cache, case.norm, case.mask, None, **case.how)


def check(case: Case, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, clear = selected(case)
    if not clear:
        hypothesis.reject()  # in a test of one case: an error
    # Values of tokens that must not be attended to spread: a wrong set cannot go unnoticed.
    v = torch.where(taken[..., None], case.v, torch.nan)
    results, _ = sharded(case, ranks, monkeypatch, v)
    whole = expected(case)
    for result in results:
        assert torch.equal(result, results[0]) and result.dtype == whole.dtype
    tolerance = 1e-4 if whole.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(results[0].float(), whole.float(), atol=tolerance, rtol=tolerance, equal_nan=True)


@given(step=steps(), ranks=st.integers(1, 5))
def test_the_same_tokens_and_the_same_attention_as_in_one_process(step: Step, ranks: int) -> None:
    L = dict(step.options)["L"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        check(step.case(L=-(-L // ranks) * ranks), ranks, monkeypatch)


@given(step=steps(), ranks=st.integers(1, 5))
def test_exact_attention_is_that_of_one_process(step: Step, ranks: int) -> None:
    case = step.case(L=-(-dict(step.options)["L"] // ranks) * ranks)
    how = {name: case.how[name] for name in ("scale", "softcap", "sinks")}
    with pytest.MonkeyPatch.context() as monkeypatch:
        results, _ = sharded(case, ranks, monkeypatch, dense=True)
    whole = reference.dense_decode(case.q, case.k, case.v, case.mask, None, **how)
    tolerance = 1e-4 if whole.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(results[0].float(), whole.float(), atol=tolerance, rtol=tolerance, equal_nan=True)
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("n_fac", [1, 7, 40, 100])
def test_equal_keys_go_to_the_lower_position_whoever_holds_it(ranks, n_fac, monkeypatch):
    """Small whole numbers, of which sums are exact: many tokens tie, some at the threshold."""
    torch.manual_seed(n_fac)
    case = make_case("fp32", L=160, n_fac=n_fac, n_sink=0, n_recent=0, reduction="max", all_dims=True, D=4, W=2, G=2)
    for x in (case.q, case.k):
        x.copy_(x.round().clamp(-1, 1))
    case.how["scale"] = 1.0
    case.norm.zero_()
    data, meta, dims, _, spread = case.cache
    ranked = {name: case.how[name] for name in NAMES}
    key = reference.tip_keys(case.q, case.k, data, meta, dims, spread, case.norm, **ranked)
    ordered = key.sort(-1, descending=True).values
    assert (ordered[..., n_fac - 1] == ordered[..., n_fac]).any()  # else this shows nothing
    taken, _ = selected(case)
    results, _ = sharded(case, ranks, monkeypatch, torch.where(taken[..., None], case.v, torch.nan))
    torch.testing.assert_close(results[0], expected(case), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("mask", "n_fac"),
    [("lengths", 40), ("left", 40), ("few", 40), ("nothing", 8), ("", 120), ("", 239), ("one row", 30)],
)
def test_uneven_parts_and_budgets_larger_than_a_part(mask, n_fac, monkeypatch):
    """4 processes of 60 tokens: cached tokens that end in the second one's part, budgets of several parts, and all but one token."""
    torch.manual_seed(3)
    check(make_case("int4", L=240, n_fac=n_fac, mask=mask, reduction="softmax_sum", sinks=True), 4, monkeypatch)


@pytest.mark.parametrize(("reduction", "exchanges"), [("static", 2), ("affine", 2), ("max", 2), ("softmax_sum", 3)])
def test_what_a_step_sends(reduction, exchanges, monkeypatch):
    """The bytes that the documentation's formulas are made of: lists of 40 have room for 4 more (12 %), in fours."""
    B, Hkv, G, DV, n_fac = 2, 2, 3, 16, 40
    case = make_case("int4", B=B, Hkv=Hkv, G=G, L=240, DV=DV, n_fac=n_fac, reduction=reduction)
    _, sent = sharded(case, 4, monkeypatch)
    want = [4 * B * Hkv * G] * (exchanges - 2) + [4 * B * Hkv * 44, 4 * B * Hkv * G * (DV + 1)]
    assert all(found == want for found in sent)
    _, sent = sharded(case, 4, monkeypatch, dense=True)
    assert all(found == want[-1:] for found in sent)


@pytest.mark.parametrize(
    "changed", [{"fmt": "int5"}, {"reduction": "mean"}, {"n_fac": 5}, {"n_fac": 0, "n_sink": 0, "n_recent": 0}]
)
def test_arguments_are_refused_as_by_the_reference(changed, monkeypatch):
    case = make_case("int4", L=8)
    case.how |= changed
    with pytest.raises(ValueError) as here:
        sharded(case, 2, monkeypatch)
    with pytest.raises(ValueError) as there:
        expected(case)
    assert str(here.value) == str(there.value)


def test_candidates_are_in_order_of_position():
    case = make_case("fp32", L=60, n_fac=20)
    data, meta, dims, _, spread = case.cache
    how = {name: case.how[name] for name in ("n_fac", "n_sink", "n_recent", "scale", "softcap", "fmt", "reduction")}
    bounds = torch.tensor([[0, 60]], dtype=torch.int32)
    of = (case.q, case.k, data, meta, dims, spread, case.norm, None, bounds)
    listed, tokens = sharded_decode.candidates(*of, rows=60, **how)
    assert (tokens[..., :20].diff() > 0).all()
    assert (listed[..., :20] > -torch.inf).all() and (listed[..., 20:] == -torch.inf).all()
