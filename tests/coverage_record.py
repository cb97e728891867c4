"""Writes down what `make coverage` measured: `benchmarks/results/coverage.json`, and its table, `docs/untested.md`.

    coverage json -o build/coverage.json
    python tests/coverage_record.py build/coverage.json --not-run "tests that need a GPU, slow tests"

A line counts as run where any test ran it, in a worker or a subprocess, and in Triton's interpreter; a branch is one way out of a
line that has several.
"""

from __future__ import annotations

import argparse
import json
import platform
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "coverage.json"
PAGE = ROOT / "docs" / "untested.md"


def ranges(lines: list[int]) -> list[str]:
    """``[1, 2, 3, 7]`` as ``["1-3", "7"]``."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(lines)), lambda x: x[1] - x[0])]
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def share(covered: int, of: int) -> float:
    return round(100 * covered / of, 1) if of else 100.0


def numbers(summary: dict[str, Any]) -> dict[str, Any]:
    lines, branches = summary["num_statements"], summary["num_branches"]
    return {
        "lines": lines,
        "lines_run": summary["covered_lines"],
        "lines_percent": share(summary["covered_lines"], lines),
        "branches": branches,
        "branches_taken": summary["covered_branches"],
        "branches_percent": share(summary["covered_branches"], branches),
        "percent": share(summary["covered_lines"] + summary["covered_branches"], lines + branches),
    }


def record(measured: dict[str, Any], not_run: str) -> dict[str, Any]:
    """The record of a report that ``coverage json`` wrote."""
    import torch

    files = {}
    for name, file in sorted(measured["files"].items()):
        missing = set(file["missing_lines"])
        ways = [(a, b) for a, b in file["missing_branches"] if a not in missing and abs(b) not in missing]
        files[name] = numbers(file["summary"]) | {
            "lines_not_run": ranges(file["missing_lines"]),
            "branches_not_taken": [f"{a}->{'exit' if b < 0 else b}" for a, b in ways],
        }
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "coverage": measured["meta"]["version"],
    }
    return {"what": "lines and branches of the package that tests run", "not_run": not_run, **versions} | {
        "total": numbers(measured["totals"]),
        "files": files,
    }


def page(held: dict[str, Any]) -> str:
    total = held["total"]
    lines = [
        "# Lines that no test runs",
        "",
        f"`make coverage` measures lines and branches of the package and writes this page. {total['lines_run']} of {total['lines']} lines are "
        f"run ({total['lines_percent']} %) and {total['branches_taken']} of {total['branches']} branches taken "
        f"({total['branches_percent']} %), together {total['percent']} %; the target fails below 92 %. "
        f"Left out: {held['not_run']} (torch {held['torch']}, Python {held['python']}). Kernels are run by Triton's interpreter.",
        "",
        "Files that are not listed are run whole. `12->15`: line 12 is run, and never goes on to line 15.",
        "",
        "| file | lines % | branches % | not run | branches not taken |",
        "|---|---|---|---|---|",
    ]
    for name, file in held["files"].items():
        if file["lines_not_run"] or file["branches_not_taken"]:
            left, ways = ", ".join(file["lines_not_run"]), ", ".join(file["branches_not_taken"])
            lines.append(f"| `{name}` | {file['lines_percent']} | {file['branches_percent']} | {left} | {ways} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parse = argparse.ArgumentParser()
    parse.add_argument("report", type=Path, help="what `coverage json` wrote")
    parse.add_argument("--not-run", required=True, help="tests that were left out")
    given = parse.parse_args()
    held = record(json.loads(given.report.read_text()), given.not_run)
    RECORD.write_text(json.dumps(held, indent=1) + "\n")
    PAGE.write_text(page(held))


if __name__ == "__main__":
    main()
