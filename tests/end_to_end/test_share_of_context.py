"""``n_fac`` as a share of the context: the number of tokens that it is of the cache's length."""

from __future__ import annotations

import pytest
import torch
from models import backend as backend_of
from models import cache_for, compiled, decode, llama_profile, tiny_llama

import fasa_compile
from fasa_compile import fasa_backend
from fasa_compile.errors import BudgetError
from fasa_compile.plan import Policy

IDS = torch.randint(0, 512, (1, 110), generator=torch.Generator().manual_seed(5))


def logits(n_fac: float) -> torch.Tensor:
    model = tiny_llama(layers=2)
    return decode(model, compiled(model, llama_profile(2), n_fac=n_fac), IDS, cache_for(model, "static", 160), 6)


def test_a_share_is_that_many_tokens_of_the_cache() -> None:
    quarter = logits(0.25)
    assert {row.budget.split()[0] for row in fasa_compile.explain().rows[-2:]} == {"40"}
    assert torch.equal(quarter, logits(40))
    assert not torch.equal(quarter, logits(20))


def test_budgets_by_layer_keep_their_proportions_and_forced_tokens_their_place() -> None:
    profile = llama_profile(2, n_fac=100, n_sink=4, n_recent=16)
    own = type(profile.layers[0])(**{**profile.layers[0].__dict__, "n_fac": 150})
    policy = Policy(profile, share=0.1)
    assert policy.budget_for(profile.layers[1], 4000).n_fac == 400
    assert policy.budget_for(own, 4000).n_fac == 600
    assert policy.budget_for(None, 50).n_fac == 20  # the forced ones, were the share smaller


def test_all_of_the_context_is_dense() -> None:
    logits(1.0)
    assert {row.reason for row in fasa_compile.explain().rows[-2:]} == {"within-budget"}


def test_a_cache_that_grows_has_no_share_and_says_so() -> None:
    model = tiny_llama(layers=2)
    backend = backend_of(llama_profile(2), strict=False, n_fac=0.25)
    torch._dynamo.reset()
    step = torch.compile(model, backend=backend)
    with pytest.warns(fasa_compile.FasaWarning, match="no-fixed-length"):
        found = decode(model, step, IDS, cache_for(model, "dynamic"), 2)
    dense = decode(model, model, IDS, cache_for(model, "dynamic"), 2)
    torch.testing.assert_close(found, dense, atol=1e-4, rtol=1e-4)
    assert {row.reason for row in backend.explain().rows} == {"no-fixed-length"}


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_what_is_no_share_is_an_error(share: float) -> None:
    with pytest.raises(BudgetError, match="share of the context"):
        fasa_backend("all", n_fac=share)
