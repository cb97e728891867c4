"""Texts of different kinds to evaluate on: stretches of tokens, none of them used for calibration."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import smollm2

CODE = ("argparse.py", "typing.py", "tarfile.py")  # of Python's standard library


def _records(seed: int, count: int) -> str:
    """Key-value records, some of which come again: what is asked for is far back in the text."""
    rng = random.Random(seed)
    fields = ("city", "colour", "owner", "year", "weight", "status")
    values = ("amber", "birch", "cobalt", "delta", "ember", "fjord", "granite", "harbour", "indigo", "juniper")
    known: list[str] = []
    lines = []
    for i in range(count):
        if known and i % 3 == 2:
            lines.append(rng.choice(known))
            continue
        name = f"{rng.choice(values)}-{rng.randrange(1000)}"
        known.append(f"{name}: " + ", ".join(f"{f}={rng.choice(values)}{rng.randrange(100)}" for f in fields))
        lines.append(known[-1])
    return "\n".join(lines)


def sources(wikitext: Path | None) -> dict[str, str]:
    """Kind -> text. ``wikitext``: a file of WikiText-2's test split, which does not ship here."""
    from pydoc_data import topics

    library = Path(sysconfig.get_path("stdlib"))
    found = {
        "fiction": smollm2.TEXT.read_text(encoding="utf-8"),
        "code": "\n".join((library / name).read_text(encoding="utf-8") for name in CODE),
        "manual": "\n\n".join(topics.topics.values()),
        "records": _records(0, 900),
    }
    if wikitext is not None:
        found = {"encyclopedia": wikitext.read_text(encoding="utf-8"), **found}
    return found


def begun(tokenizer: Any, ids: Tensor) -> Tensor:
    """``ids [..., n]`` with the first token replaced by the one that this tokenizer begins every text with, if it does."""
    first = tokenizer("a", verbose=False)["input_ids"]
    if tokenizer.bos_token_id is not None and first[0] == tokenizer.bos_token_id:
        ids = ids.clone()
        ids[..., 0] = tokenizer.bos_token_id
    return ids


def stretches(tokenizer: Any, wikitext: Path | None, length: int, each: int, calibration: int) -> dict[str, Tensor]:
    """Kind -> int64 ``[each, length]``, spread over the text; the first ``calibration`` tokens of the fiction are left out."""
    out = {}
    for kind, text in sources(wikitext).items():
        ids = tokenizer(text, verbose=False)["input_ids"]
        if kind == "fiction":
            ids = ids[calibration:]
        if len(ids) < length * each:
            raise ValueError(f"{kind}: {len(ids)} tokens, {each} stretches of {length} need {length * each}")
        stride = (len(ids) - length) // max(each - 1, 1)
        out[kind] = begun(tokenizer, torch.tensor([ids[i * stride : i * stride + length] for i in range(each)]))
    return out
