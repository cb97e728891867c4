"""Task files: rows of each known form are read, others are refused by line, and answers are scored as their sets say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fasa_compile import tasks

LONG = {"input": "Who?", "context": "Ada did it.", "answers": ["Ada Lovelace", "Ada"], "_id": "7"}
MATH = {"problem": "1 + 1?", "answer": "\\frac{1}{2}", "level": 1}


def write(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in rows) + "\n\n", encoding="utf-8")
    return path


def test_longbench_rows(tmp_path: Path) -> None:
    (task,) = tasks.load(write(tmp_path, LONG), "longbench")
    assert "Ada did it." in task.prompt and task.prompt.index("Ada did it.") < task.prompt.index("Who?")
    assert task.answers == ("Ada Lovelace", "Ada") and task.max_new_tokens == 64
    assert tasks.score(task, "Ada.") == 1.0
    assert tasks.score(task, "It was the Ada Lovelace") == pytest.approx(2 * 2 / (4 + 2))  # "the" does not count
    assert tasks.score(task, "Bob") == 0.0


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (r"so \boxed{\frac{1}{2}}.", 1.0),
        (r"\boxed{3}, no, \boxed{\dfrac{1}{2}}", 1.0),
        (r"\boxed{ \tfrac{1}{2} }", 1.0),
        (r"\boxed{2} and \frac{1}{2}", 0.0),
        ("nothing", 0.0),
    ],
)
def test_math_answers_are_read_from_the_last_box(tmp_path: Path, said: str, right: float) -> None:
    (task,) = tasks.load(write(tmp_path, MATH), "math500")
    assert tasks.score(task, said) == right


def test_aime_answers_are_whole_numbers(tmp_path: Path) -> None:
    first, second = tasks.load(
        write(tmp_path, {"problem": "a", "answer": 73}, {"problem": "b", "answer": "204"}), "aime24"
    )
    assert tasks.score(first, "the answer is 073") == 1.0
    assert tasks.score(second, r"\boxed{204}") == 1.0 and tasks.score(second, "1,204") == 0.0
    found = tasks.summary([first, second], ["73", "7"])
    assert found == {"mean": 0.5, "number": 2, "scores": [1.0, 0.0]}


def test_other_rows_are_refused_by_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows.jsonl:2: expected the keys problem, answer; 'answer' is missing"):
        tasks.load(write(tmp_path, MATH, {"problem": "x"}), "math500")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: expected a JSON object"):
        tasks.load(write(tmp_path, "{"), "math500")
    with pytest.raises(ValueError, match="longbench, math500, aime24"):
        tasks.load(write(tmp_path, MATH), "gsm8k")


def test_the_hub_is_asked_for_the_named_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def load_dataset(name: str, configuration: str | None, split: str) -> list[dict[str, object]]:
        asked.append((name, configuration, split))
        return [LONG]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert tasks.hub("longbench", "qasper") == tasks.hub("longbench")
    assert asked == [("THUDM/LongBench", "qasper", "test"), ("THUDM/LongBench", "hotpotqa", "test")]
    with pytest.raises(ValueError, match=r"HuggingFaceH4/MATH-500\[0\]: expected the keys problem, answer"):
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *a, **k: [LONG]))
        tasks.hub("math500")
