"""Questions with known answers, from files that the user has or from the hub: LongBench, MATH-500, AIME 2024, or any of their form.

``load`` makes ``Task``s of JSON lines; ``evaluation.evaluate`` has a model answer them, dense and sparse, and ``summary`` scores
what was said. Nothing is downloaded unless ``hub`` is called, which needs the package ``datasets``.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

#: Name -> (dataset on the hub, its configuration or None, split, tokens of an answer).
SETS: dict[str, tuple[str, str | None, str, int]] = {
    "longbench": ("THUDM/LongBench", "hotpotqa", "test", 64),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", 2048),
    "aime24": ("HuggingFaceH4/aime_2024", None, "train", 8192),
}


@dataclass(frozen=True)
class Task:
    """``score`` is ``"f1"`` (words in common with the best of ``answers``, as LongBench has it) or ``"boxed"`` (the last
    ``\\boxed{...}`` of what was said, or its last number, is one of ``answers``)."""

    prompt: str
    answers: tuple[str, ...]
    score: str
    max_new_tokens: int
    chat: bool = True


def load(path: str | Path, kind: str) -> list[Task]:
    """Tasks of a ``.jsonl`` file. ``kind`` is one of ``SETS``: LongBench rows have ``input``, ``context`` and ``answers``, the others
    ``problem`` and ``answer``.

    Raises ``ValueError`` that names the line for a row of another form, and for an unknown kind.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append((f"{path}:{number}", json.loads(line)))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: expected a JSON object ({error})") from None
    return _tasks(rows, kind)


def hub(kind: str, configuration: str | None = None) -> list[Task]:
    """Tasks of the data set on the hub that ``SETS`` names; LongBench in ``configuration``. Raises ``ImportError`` without ``datasets``."""
    datasets = import_module("datasets")  # by name: it is no dependency of this package
    name, usual, split, _ = SETS[_known(kind)]
    rows = datasets.load_dataset(name, configuration or usual, split=split)
    return _tasks(((f"{name}[{i}]", row) for i, row in enumerate(rows)), kind)


def _known(kind: str) -> str:
    if kind not in SETS:
        raise ValueError(f"kind: expected one of {', '.join(SETS)}, found {kind!r}")
    return kind


def _tasks(rows: Iterable[tuple[str, Any]], kind: str) -> list[Task]:
    tokens = SETS[_known(kind)][3]
    found = []
    for where, row in rows:
        keys = ("input", "context", "answers") if kind == "longbench" else ("problem", "answer")
        missing = [key for key in keys if not isinstance(row, dict) or key not in row]
        if missing:
            raise ValueError(f"{where}: expected the keys {', '.join(keys)}; {missing[0]!r} is missing")
        if kind == "longbench":
            prompt = (
                "Answer the question based on the given text. Give only the answer, without other words.\n\n"
                f"{row['context']}\n\nQuestion: {row['input']}\nAnswer:"
            )
            answers = row["answers"] if isinstance(row["answers"], list) else [row["answers"]]
            found.append(Task(prompt, tuple(map(str, answers)), "f1", tokens))
        else:
            prompt = f"{row['problem']}\n\nReason step by step, and put the final answer within \\boxed{{}}."
            found.append(Task(prompt, (str(row["answer"]),), "boxed", tokens))
    return found


def score(task: Task, said: str) -> float:
    """0 to 1."""
    if task.score == "f1":
        return max(_f1(said, answer) for answer in task.answers)
    final = _final(said)
    return float(any(final == _plain(answer) for answer in task.answers))


def summary(tasks: Sequence[Task], said: Sequence[str]) -> dict[str, Any]:
    """``mean`` score, their ``number``, and each task's ``scores``."""
    scores = [score(task, text) for task, text in zip(tasks, said, strict=True)]
    return {"mean": sum(scores) / len(scores), "number": len(scores), "scores": scores}


def _words(text: str) -> list[str]:
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return [w for w in text.split() if w not in ("a", "an", "the")]


def _f1(said: str, answer: str) -> float:
    a, b = _words(said), _words(answer)
    same = sum((Counter(a) & Counter(b)).values())
    return 2 * same / (len(a) + len(b)) if same else 0.0


def _final(said: str) -> str:
    """The content of the last ``\\boxed{...}``, braces balanced; without one the last number."""
    at = said.rfind("\\boxed{")
    if at >= 0:
        depth, start = 0, at + len("\\boxed")
        for i in range(start, len(said)):
            depth += (said[i] == "{") - (said[i] == "}")
            if depth == 0:
                return _plain(said[start + 1 : i])
    numbers = re.findall(r"-?\d+(?:\.\d+)?", said.replace(",", ""))
    return _plain(numbers[-1]) if numbers else ""


def _plain(answer: str) -> str:
    answer = answer.strip().strip("$").replace(" ", "").replace("\\!", "").replace("\\left", "").replace("\\right", "")
    answer = answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
    return str(int(answer)) if re.fullmatch(r"-?\d+", answer) else answer  # 073 is 73
