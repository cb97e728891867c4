"""docs/explain.md: what reading a graph costs is what benchmarks/passes.py recorded."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_is_the_record():
    record = json.loads((ROOT / "benchmarks" / "results" / "passes-cpu.json").read_text())
    most = max(row["layers"] for row in record["rows"])
    expected = []
    for row in record["rows"]:
        if row["layers"] == most:
            (short,) = (
                r for r in record["rows"] if (r["model"], r["cache"], r["layers"]) == (row["model"], row["cache"], 2)
            )
            cells = (
                f"{short['per_layer']:.2f} | {row['per_layer']:.2f} | {row['passes']:.2f} | {row['torch_compile']:.0f}"
            )
            expected.append(f"| {row['model']}, {row['cache']} | {cells} |")
    page = (ROOT / "docs" / "explain.md").read_text().partition("## What reading a graph costs")[2]
    assert [line for line in page.splitlines() if line.startswith("| ")][1:] == expected
