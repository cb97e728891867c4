"""The FlashInfer baseline of ``benchmarks/attention.py``: which memory its page table names, and what is said without it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FILE = Path(__file__).parents[2] / "benchmarks" / "_flashinfer.py"


@pytest.fixture
def baseline() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flashinfer_baseline", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("B", [1, 3])
def test_pages_are_the_cache_in_place(baseline, B):
    H, D, P = 2, 8, baseline.PAGE
    cache = torch.randn(B, H, 3 * P, D)
    paged, table = baseline.pages(cache), baseline.page_table(cache)
    assert paged.data_ptr() == cache.data_ptr()
    assert table.dtype == torch.int32 and table.shape == (B, 3)
    assert table.max() == len(paged) - 1  # the last page ends where the cache does: nothing is read beyond
    for b in range(B):
        for n, page in enumerate(table[b].tolist()):
            assert torch.equal(paged[page], cache[b, :, n * P : (n + 1) * P])


def test_without_flashinfer_the_record_says_why(baseline, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # an import of it now fails
    assert not baseline.available()
    assert baseline.version().startswith("not measured: ModuleNotFoundError: ")
