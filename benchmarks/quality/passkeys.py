"""Retrieval: pass keys of five digits buried in a long text, asked for one after the other through the decode path."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from teacher_forced import Step, decode, like, prefill, restore

CITIES = [
    "Bergen",
    "Cusco",
    "Dakar",
    "Galway",
    "Hobart",
    "Izmir",
    "Jaipur",
    "Kazan",
    "Lagos",
    "Malmo",
    "Nantes",
    "Odessa",
    "Perth",
    "Quito",
    "Riga",
    "Seville",
    "Tunis",
    "Utrecht",
    "Vilnius",
    "Windhoek",
    "Yerevan",
    "Zagreb",
]
DIGITS = 5


@dataclass(frozen=True)
class Haystack:
    """``text [1, n]`` int64 with the facts in it; ``questions[i] [q]`` and ``answers[i] [DIGITS]`` continue it."""

    text: Tensor
    questions: tuple[Tensor, ...]
    answers: tuple[Tensor, ...]


def haystack(tokenizer: Any, filler: Tensor, keys: int, seed: int) -> Haystack:
    """``[n]`` tokens out of ``filler [n]``, cut short to make room for ``keys`` facts spread evenly over it.

    Their order and digits are drawn from ``seed``. Raises ``ValueError`` where there are not that many names or there is no
    room, or the tokenizer does not give a digit a token of its own.
    """
    if not 1 <= keys <= len(CITIES):
        raise ValueError(f"keys: expected 1 to {len(CITIES)}, got {keys}")
    rng = random.Random(seed)
    names = rng.sample(CITIES, keys)
    values = ["".join(rng.choices("0123456789", k=DIGITS)) for _ in names]

    def encode(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)

    facts = [
        encode(f"\n\nThe pass key of {name} is {value}. Remember it.\n\n")
        for name, value in zip(names, values, strict=True)
    ]
    facts.append(encode("\n\nQuestions about the text above.\n\n"))
    room = len(filler) - sum(map(len, facts))
    if room <= keys:
        raise ValueError(f"{keys} facts leave no room in {len(filler)} tokens of filler")
    parts = filler[:room].tensor_split(keys + 1)
    pieces = [piece for pair in zip(parts, facts, strict=True) for piece in pair]
    questions, answers = [], []
    for i in rng.sample(range(keys), keys):
        whole = encode(f"What is the pass key of {names[i]}? The pass key of {names[i]} is {values[i]}")
        answer = whole[-DIGITS:]
        if [tokenizer.decode([t]).strip() for t in answer.tolist()] != list(values[i]):
            raise ValueError("this tokenizer does not give every digit a token of its own")
        questions.append(whole[:-DIGITS])
        answers.append(answer)
    return Haystack(torch.cat(pieces)[None], tuple(questions), tuple(answers))


def recall(model: Any, steps: dict[str, Step], hay: Haystack) -> dict[str, list[float]]:
    """Share of digits that each path predicts, per question, greedily and given the right digits before; question by decode.

    ``steps`` maps a path's name to its decode step; all start from one dense prefill of the text.
    """
    device = next(model.parameters()).device
    longest = max(len(q) + len(a) for q, a in zip(hay.questions, hay.answers, strict=True))
    # Rounded up, so that texts of one length share a cache shape and with it a compiled graph.
    slots = hay.text.shape[1] + -(-longest // 64) * 64
    filled = prefill(model, hay.text.to(device), slots)
    out: dict[str, list[float]] = {}
    for name, step in steps.items():
        cache = like(model, filled)
        shares = []
        for question, answer in zip(hay.questions, hay.answers, strict=True):
            restore(cache, filled)
            # The last token of the question predicts the first digit, the last digit but one predicts the last.
            tokens = torch.cat([question, answer[:-1]]).to(device)
            predicted = decode(step, cache, tokens).log_probs[-len(answer) :].argmax(-1)
            shares.append(float((predicted == answer).double().mean()))
        out[name] = shares
    return out
