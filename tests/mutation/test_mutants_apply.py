"""Every break of the mutation check still applies to the sources as they are. (The check itself: ``make mutants``.)"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent


def load():
    sys.path.insert(0, str(HERE))
    try:
        spec = importlib.util.spec_from_file_location("run_mutants", HERE / "run_mutants.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(HERE))
    return module


def test_every_break_applies_exactly_once():
    runner = load()
    for mutant in runner.MUTANTS:
        assert runner.mutated(mutant) != (runner.ROOT / mutant.file).read_text()
    names = [(m.file, m.name) for m in runner.MUTANTS]
    assert len(names) == len(set(names)) >= 40


def test_every_test_that_is_mapped_exists():
    runner = load()
    for mutant in runner.MUTANTS:
        for name in (*mutant.tests, *runner.WIDER[mutant.room]):
            file, _, test = name.partition("::")
            path = HERE.parent / file
            assert path.exists(), name
            assert not test or f"def {test}(" in path.read_text(), name


def test_the_recorded_results_leave_no_survivor():
    held = json.loads((HERE / "results.json").read_text())
    assert [r["name"] for r in held["mutants"] if not r["noticed_by"]] == []
    assert [(r["file"], r["name"]) for r in held["mutants"]] == [(m.file, m.name) for m in load().MUTANTS]
    assert len(held["mutants"]) == held["run"] == held["noticed"]
