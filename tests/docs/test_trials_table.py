"""docs/trials.md: every case once, and every test that it or docs/testing.md names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = {
    "A": "1 3 4",
    "B": "1 2 5 6 8 9 10 11 13 15",
    "C": "1 2 4 7 9",
    "D": "1 3 5",
    "E": "1 2 4",
    "F": "1 2 4 6",
    "G": "1 3",
    "H": "1 3 5 7 8 9 10 12 14",
    "I": "1 2 4 5 7 8 9",
    "J": "1 2 5 7 9",
    "K": "1 3 5 6 7",
    "L": "1 2 5 6",
    "M": "1 4 5",
    "N": "1 2 4",
    "O": "1",
    "P": "1 3",
    "Q": "1 3 5 7",
    "R": "1 2",
}
CASES = [letter + number for letter, numbers in NUMBERS.items() for number in numbers.split()]


def rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "trials.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return cells[2:]


def test_every_case_is_there_once():
    assert [row[0] for row in rows()] == CASES
    assert all(len(row) == 3 and all(row) for row in rows())


def test_every_test_that_is_named_exists():
    named = [name for row in rows() for name in re.findall(r"`([\w/]+\.py::\w+)`", row[2])]
    others = re.findall(r"`([\w/]+\.py::\w+)`", (ROOT / "docs" / "testing.md").read_text())
    assert len(named) >= 75 and len(others) >= 15
    for name in named + others:
        file, function = name.split("::")
        assert re.search(rf"^def {function}\(", (ROOT / "tests" / file).read_text(), re.M), name
