"""Real weights: SmolLM2 decodes 4k contexts sparsely, compiled, at next to no cost, and still finds what was buried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fasa_compile

pytest.importorskip("transformers")
pytest.importorskip("gguf")

import smollm2 as helper
from fasa_compile.evaluation import Step, perplexity, retrieval, step_of

pytestmark = [pytest.mark.slow, pytest.mark.inductor]

LENGTH, N_FAC = 4096, 128


@pytest.fixture(scope="module")
def texts(smollm2: SimpleNamespace) -> torch.Tensor:
    """``[4, LENGTH]``: one to calibrate on, three to evaluate on."""
    return helper.windows(smollm2.tokenizer, LENGTH, 4)


@pytest.fixture(scope="module")
def profile(smollm2: SimpleNamespace, texts: torch.Tensor) -> Any:
    return fasa_compile.calibrate(smollm2.model, texts[:1], progress=False)


def paths(model: Any, profile: Any) -> dict[str, Step]:
    backend = fasa_compile.fasa_backend(profile, n_fac=N_FAC, n_sink=4, n_recent=16, strict=True)
    compiled = torch.compile(model.forward, backend=backend)
    return {"dense": step_of(model.forward), "compiled": step_of(compiled)}


@pytest.mark.timeout(1200)
def test_perplexity_at_4k(smollm2: SimpleNamespace, texts: torch.Tensor, profile: Any) -> None:
    layers = len(smollm2.model.model.layers)
    last = 96
    fasa_compile.reset_stats()
    both = paths(smollm2.model, profile)
    result = perplexity(smollm2.model, both, texts[1:], last)
    stats = fasa_compile.stats()
    assert stats["sites"] == stats["rewritten_sites"] == layers == 30 and not stats["declined"]
    assert stats["sparse_steps"] == 3 * last and stats["dense_steps"] == 0
    assert result["compiled"]["perplexity_ratio"] <= 1.08
    # Keeping only the first and last tokens costs 0.4 nats on such texts, a perfect selection 0.06.
    assert result["compiled"]["kl_to_dense"] <= 0.12
    assert result["compiled"]["top1_agreement"] >= 0.8


@pytest.mark.timeout(1200)
def test_retrieval_at_3k(smollm2: SimpleNamespace, texts: torch.Tensor, profile: Any) -> None:
    both = paths(smollm2.model, profile)
    found = retrieval(smollm2.model, smollm2.tokenizer, both, texts[1:2, :3072], keys=4)
    assert fasa_compile.stats()["sparse_steps"] > 0
    assert found["dense"]["digits"] >= 0.7  # else the question is too hard for the model and shows nothing
    assert found["compiled"]["digits"] >= found["dense"]["digits"] - 0.1
