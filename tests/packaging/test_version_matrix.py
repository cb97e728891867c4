"""What the version matrix writes down: a row for each combination, and a page that shows it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("version_matrix", Path(__file__).with_name("version_matrix.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_row_takes_the_place_of_the_same_versions(matrix, monkeypatch, tmp_path):
    monkeypatch.setattr(matrix, "RECORD", tmp_path / "versions.json")
    row = {
        "python": "3.12.1",
        "torch": "2.13.0",
        "transformers": "5.24.0",
        "triton": None,
        "import_s": 0.1,
        "backend_s": 0.5,
    }
    row |= {"tests": {"passed": 3}, "failed": [], "date": "2026-01-01"}
    matrix.keep(row)
    matrix.keep(row | {"python": "3.11.7"})
    matrix.keep(row | {"tests": {"passed": 2, "failed": 1}, "failed": ["match/test_x.py::test_y"]})
    rows = json.loads((tmp_path / "versions.json").read_text())["rows"]
    assert [(r["python"], r["tests"]["passed"]) for r in rows] == [("3.11.7", 3), ("3.12.1", 2)]
    page = matrix.page(rows)
    assert re.search(r"\| 3\.12\.1 \| 2\.13\.0 \| 5\.24\.0 \| none \| 0\.100 \| 0\.50 \| 2 \| 1 \| 0 \|", page)
    assert "match/test_x.py::test_y" in page


def test_every_test_that_is_run_exists(matrix):
    for name in matrix.TESTS:
        path, _, test = name.partition("::")
        assert (ROOT / "tests" / path).exists()
        assert f"def {test}" in (ROOT / "tests" / path).read_text() if test else True
