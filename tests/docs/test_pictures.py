"""The README's pictures are those of the records: drawn anew they are the same files, and show the records' numbers."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "benchmarks" / "pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def points(svg: str) -> dict[str, list[tuple[float, float]]]:
    """``name: [(x, y)]`` of the points' own titles."""
    ElementTree.fromstring(svg)  # well formed
    found: dict[str, list[tuple[float, float]]] = {}
    for name, x, y in re.findall(r"<title>([^<]+): ([\d.e+]+), ([\d.e+]+)</title>", svg):
        found.setdefault(name, []).append((float(x), float(y)))
    return found


def test_the_files_are_what_the_records_give(pictures, tmp_path):
    pictures.main(["--out", str(tmp_path)])
    for name in pictures.PICTURES:
        drawn, kept = (tmp_path / f"{name}.svg").read_text(), (ROOT / "docs" / f"{name}.svg").read_text()
        assert drawn == kept, f"docs/{name}.svg is not of the record: run benchmarks/pictures.py"
    readme = (ROOT / "README.md").read_text()
    assert all(f"docs/{name}.svg" in readme for name in pictures.PICTURES)


def test_a_picture_shows_the_numbers_of_its_record(pictures):
    results = ROOT / "benchmarks" / "results"
    record = json.loads((results / "attention-h100.json").read_text())
    (row,) = [r for r in record["rows"] if (r["B"], r["L"]) == (1, 131072)]
    (case,) = [c for c in row["sparse"] if (c["fmt"], c["n_tip"]) == ("int4", 32)]
    best = min(x for x in (row["SDPA flash us"], row["SDPA cuDNN us"]) if isinstance(x, float))
    assert (131072.0, float(f"{best / case['us']:.4g}")) in points(pictures.attention(record))["batch 1"]
    compare = json.loads((results / "compare-smollm2-135m-instruct-q4_1.json").read_text())
    found = points(pictures.quality(compare))
    budgets = compare["budgets"]
    expected = [(float(n), float(f"{e['methods']['Quest']['perplexity_ratio']:.4g}")) for n, e in budgets.items()]
    assert found["Quest"] == expected and len(expected) == 2


def test_what_was_not_measured_is_not_drawn(pictures):
    record = {
        "n_fac": 1024,
        "card": "a card",
        "cases": {"1x4096": {"hf": {"ms_per_step": 3.0}, "flash": {"error": "no"}}},
    }
    assert points(pictures.step(record)) == {"Hugging Face, batch 1": [(4096.0, 3.0)]}
