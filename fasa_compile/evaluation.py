"""What sparse decode costs a model: perplexity at long context, pass keys and key-value recall, tasks, each dense and sparse.

Teacher forced: the tokens of a text go through a decode path one at a time, behind a dense prefill, so every prediction that
is scored comes from a decode step (one query token against a filled static cache). An evaluation that runs the text through in
one pass would never touch what decode attention does.

Dimension letters: L tokens of the text and slots of the cache, N tokens at its end that are predicted, V the vocabulary.
"""

from __future__ import annotations

import inspect
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasa_compile import charts
from fasa_compile.backend import fasa_backend
from fasa_compile.tasks import Task, summary

#: One decode step: ``(token ids [1, 1], cache) -> logits [1, V]``; the cache grows by one token.
Step = Callable[[Tensor, Any], Tensor]


def cache_argument(forward: Callable[..., Any]) -> str:
    """What a model's ``forward`` calls its KV cache: transformers renames ``past_key_values`` to ``cache``."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def step_of(forward: Callable[..., Any]) -> Step:
    """A decode step out of a model's ``forward``, as it is or compiled."""
    name = cache_argument(forward)

    def step(token: Tensor, cache: Any) -> Tensor:
        return forward(input_ids=token, use_cache=True, **{name: cache}).logits[:, -1]

    return step


@torch.no_grad()
def prefill(model: Any, ids: Tensor, slots: int) -> Any:
    """A static cache of ``slots`` tokens that holds those of ``ids [1, n]``, n <= slots, as dense attention left them."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=slots)
    model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_argument(model.forward): cache})
    return cache


def like(model: Any, source: Any) -> Any:
    """Another cache with the content of ``source``; decode on it, and ``restore`` it, while ``source`` stays as it is."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=source.layers[0].max_cache_len)
    for new, old in zip(cache.layers, source.layers, strict=True):
        new.lazy_initialization(old.keys, old.values)
    restore(cache, source)
    return cache


def restore(cache: Any, source: Any) -> None:
    """Gives ``cache`` the content of ``source`` again, in place: the tensors stay the ones that a compiled graph knows."""
    for new, old in zip(cache.layers, source.layers, strict=True):
        new.keys.copy_(old.keys)
        new.values.copy_(old.values)
        new.cumulative_length.copy_(old.cumulative_length)


@dataclass(frozen=True)
class Decoded:
    """``log_probs`` fp32 ``[N, V]`` on the CPU: of each of the N tokens, given the text before it.

    ``seconds`` is the time of the N steps, less the first two (they compile).
    """

    log_probs: Tensor
    seconds: float

    @property
    def steps_per_second(self) -> float:
        return max(len(self.log_probs) - 2, 0) / self.seconds if self.seconds else float("nan")


@torch.no_grad()
def decode(step: Step, cache: Any, tokens: Tensor) -> Decoded:
    """Feeds ``tokens [N]`` one by one; the cache holds what comes before them. Row i predicts the token after ``tokens[i]``."""
    out, started = [], time.perf_counter()
    for i, token in enumerate(tokens):
        if i == 2:
            started = time.perf_counter()
        logits = step(token.reshape(1, 1), cache)
        out.append(logits[0].float().log_softmax(-1).cpu())
    return Decoded(torch.stack(out), time.perf_counter() - started if len(tokens) > 2 else 0.0)


@dataclass(frozen=True)
class Scores:
    """Of N predictions. ``nll`` in nats per token; ``kl`` is KL(dense || this), nats; ``top1`` the share of equal argmaxes."""

    nll: float
    kl: float
    top1: float

    @property
    def perplexity(self) -> float:
        return float(torch.tensor(self.nll).exp())


def score(log_probs: Tensor, dense: Tensor, targets: Tensor) -> Scores:
    """``log_probs`` and ``dense`` fp32 ``[N, V]``, ``targets`` int64 ``[N]``, the tokens that came."""
    targets = targets.cpu()
    nll = -log_probs.gather(1, targets[:, None]).double().mean()
    kl = (dense.exp() * (dense - log_probs)).sum(-1).double().mean()
    top1 = (log_probs.argmax(-1) == dense.argmax(-1)).double().mean()
    return Scores(float(nll), float(kl), float(top1))


# --- retrieval ----------------------------------------------------------------------------------------------------------

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

#: How a fact is put into the text, and how it is asked for; ``{key}`` and ``{value}``, which comes last in a question.
FACTS = {
    "passkey": (
        "\n\nThe pass key of {key} is {value}. Remember it.\n\n",
        "\n\nQuestions about the text above.\n\n",
        "What is the pass key of {key}? The pass key of {key} is {value}",
    ),
    "key_value": ("\n{key}: {value}\n", "\n\nThe values again:\n", "\n{key}: {value}"),
}


@dataclass(frozen=True)
class Haystack:
    """``text [1, n]`` int64 with facts in it; ``questions[i] [q]`` and ``answers[i] [DIGITS]`` continue it.

    ``depths[i]``: where in the text the fact lies that question i asks for, 0 at its beginning and 1 at its end.
    """

    text: Tensor
    questions: tuple[Tensor, ...]
    answers: tuple[Tensor, ...]
    depths: tuple[float, ...]


def haystack(tokenizer: Any, filler: Tensor, keys: int, seed: int, kind: str = "passkey") -> Haystack:
    """``[n]`` tokens out of ``filler [n]``, cut short to make room for ``keys`` facts (one of ``FACTS``) spread evenly over it.

    Their order and digits are drawn from ``seed``. Raises ``ValueError`` where there are not that many names or there is no
    room, or the tokenizer does not give a digit a token of its own.
    """
    if not 1 <= keys <= len(CITIES):
        raise ValueError(f"keys: expected 1 to {len(CITIES)}, got {keys}")
    stated, before, asked = FACTS[kind]
    rng = random.Random(seed)
    names = rng.sample(CITIES, keys)
    values = ["".join(rng.choices("0123456789", k=DIGITS)) for _ in names]

    def encode(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)

    facts = [encode(stated.format(key=name, value=value)) for name, value in zip(names, values, strict=True)]
    facts.append(encode(before))
    room = len(filler) - sum(map(len, facts))
    if room <= keys:
        raise ValueError(f"{keys} facts leave no room in {len(filler)} tokens of filler")
    parts = filler[:room].tensor_split(keys + 1)
    pieces = [piece for pair in zip(parts, facts, strict=True) for piece in pair]
    ends = [sum(map(len, pieces[: 2 * i + 2])) for i in range(keys)]
    questions, answers, depths = [], [], []
    for i in rng.sample(range(keys), keys):
        whole = encode(asked.format(key=names[i], value=values[i]))
        answer = whole[-DIGITS:]
        if [tokenizer.decode([t]).strip() for t in answer.tolist()] != list(values[i]):
            raise ValueError("this tokenizer does not give every digit a token of its own")
        questions.append(whole[:-DIGITS])
        answers.append(answer)
        depths.append(ends[i] / len(filler))
    return Haystack(torch.cat(pieces)[None], tuple(questions), tuple(answers), tuple(depths))


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


# --- a model, dense and sparse ------------------------------------------------------------------------------------------


def paths(model: Any, profile: Any, **backend: Any) -> dict[str, Step]:
    """``dense``: the model's own uncompiled forward; ``sparse``: it compiled with ``fasa_backend(profile, **backend)``."""
    compiled = torch.compile(model.forward, backend=fasa_backend(profile, **backend))
    return {"dense": step_of(model.forward), "sparse": step_of(compiled)}


def perplexity(model: Any, steps: dict[str, Step], texts: Tensor, last: int) -> dict[str, dict[str, Any]]:
    """Of each path, over the last ``last`` tokens of ``texts [n, L]``: ``nll``, ``perplexity`` (geometric mean), ``kl_to_dense``,
    ``top1_agreement``, ``steps_per_second``, ``perplexity_ratio`` to the first path, and ``texts`` with the same for each.

    The first of ``steps`` is what the others are compared with. Raises ``ValueError`` for ``last`` outside ``(2, L)``.
    """
    if not 2 < last < texts.shape[1]:
        raise ValueError(f"last: expected more than 2 and less than {texts.shape[1]} tokens, got {last}")
    device = next(model.parameters()).device
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    for text in texts.to(device):
        # The last token that is fed predicts the last token of the text; the first comes right after the prefill.
        start = len(text) - last - 1
        tokens, targets = text[start:-1], text[start + 1 :]
        filled = prefill(model, text[None, :start], len(text))
        dense: Decoded | None = None
        for name, step in steps.items():
            done = decode(step, like(model, filled), tokens)
            dense = dense or done
            scores = score(done.log_probs, dense.log_probs, targets)
            row = {
                "nll": scores.nll,
                "perplexity": scores.perplexity,
                "kl_to_dense": scores.kl,
                "top1_agreement": scores.top1,
                "steps_per_second": done.steps_per_second,
            }
            rows[name].append(row)
    out: dict[str, dict[str, Any]] = {}
    for name, per_text in rows.items():
        over_all: dict[str, Any] = {key: _mean([row[key] for row in per_text]) for key in per_text[0]}
        over_all["perplexity"] = math.exp(over_all["nll"])
        out[name] = {**over_all, "texts": per_text}
    first = next(iter(out.values()))
    for entry in out.values():
        entry["perplexity_ratio"] = entry["perplexity"] / first["perplexity"]
    return out


def retrieval(
    model: Any, tokenizer: Any, steps: dict[str, Step], texts: Tensor, keys: int, kind: str = "passkey"
) -> dict[str, dict[str, Any]]:
    """Of each path: ``digits``, the share of digits recalled, ``whole_keys``, ``keys`` (questions asked: ``keys`` per text),
    ``by_depth``, digits by fifth of the text in which the fact lies (None where none does), and ``keys_by_depth``."""
    shares: dict[str, list[float]] = {name: [] for name in steps}
    depths: list[float] = []
    for seed, text in enumerate(texts):
        hay = haystack(tokenizer, text, keys, seed, kind)
        depths += hay.depths
        for name, values in recall(model, steps, hay).items():
            shares[name] += values
    out = {}
    for name, found in shares.items():
        fifths = [[x for x, d in zip(found, depths, strict=True) if min(int(5 * d), 4) == i] for i in range(5)]
        out[name] = {
            "digits": _mean(found),
            "whole_keys": _mean([float(x == 1) for x in found]),
            "keys": len(found),
            "by_depth": [_mean(x) if x else None for x in fifths],
            "keys_by_depth": [len(x) for x in fifths],
        }
    return out


def evaluate(
    model: Any,
    tokenizer: Any,
    profile: Any,
    texts: Tensor,
    *,
    last: int = 256,
    keys: int = 8,
    lengths: Sequence[int] = (),
    tasks: Sequence[Task] = (),
    **backend: Any,
) -> dict[str, Any]:
    """A record, plain JSON data, of what ``fasa_backend(profile, **backend)`` costs a transformers model on ``texts [n, L]`` int64.

    ``perplexity`` over the last ``last`` tokens of each text; ``passkey`` and ``key_value`` recall with ``keys`` facts a text, at
    each of ``lengths`` tokens (by default L; ``keys=0`` leaves them out); ``tasks`` (``fasa_compile.tasks``) by their own scores.
    Everything is decoded step by step behind a dense prefill.
    """
    steps = paths(model, profile, **backend)
    record: dict[str, Any] = {"perplexity": perplexity(model, steps, texts, last)}
    for length in lengths or (texts.shape[1],):
        for kind in FACTS if keys else ():
            found = retrieval(model, tokenizer, steps, texts[:, :length], keys, kind)
            record.setdefault(kind, {})[str(length)] = found
    if tasks:
        record["tasks"] = {
            name: summary(tasks, [answer(model, tokenizer, step, task) for task in tasks])
            for name, step in steps.items()
        }
    return record


@torch.no_grad()
def answer(model: Any, tokenizer: Any, step: Step, task: Task) -> str:
    """Greedy decode of a task's prompt, behind a dense prefill, up to ``task.max_new_tokens`` or the end-of-text token."""
    device = next(model.parameters()).device
    ids = _prompt(tokenizer, task).to(device)
    cache = prefill(model, ids[:, :-1], ids.shape[1] + task.max_new_tokens)
    stops = getattr(model.generation_config, "eos_token_id", None)
    ends = set(stops if isinstance(stops, list) else [stops]) | {tokenizer.eos_token_id}
    token, said = ids[:, -1:], []
    for _ in range(task.max_new_tokens):
        token = step(token, cache).argmax(-1, keepdim=True)
        if int(token) in ends:
            break
        said.append(int(token))
    return str(tokenizer.decode(said, skip_special_tokens=True))


#: What the y axis of a share is marked with.
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def plot(record: dict[str, Any], title: str) -> str:
    """An SVG of a record of ``evaluate``: perplexity by text, as it is and over dense; recall by depth for each kind of fact and
    length; scores of the tasks. Error bars are one standard error: of the mean over texts or tasks, where there are several, and
    by Wilson's interval over the facts at a depth.
    """
    found = record["perplexity"]
    first, number = next(iter(found)), len(found[next(iter(found))]["texts"])
    nll = {name: [text["nll"] for text in row["texts"]] for name, row in found.items()}
    less = {name: [x - dense for x, dense in zip(row, nll[first], strict=True)] for name, row in nll.items()}
    groups = [str(i + 1) for i in range(number)] + (["all"] if number > 1 else [])
    over = f"stretch of the text; all: mean of {number}, ± 1 standard error" if number > 1 else "stretch of the text"

    def panel(name: str, values: dict[str, list[float]], y_label: str) -> str:
        series = {
            path: [(math.exp(x),) * 3 for x in row] + ([_exp(_with_error(row))] if number > 1 else [])
            for path, row in values.items()
        }
        return charts.dots(name, groups, series, x_label=over, y_label=y_label)

    panels = [
        panel("Perplexity", nll, "perplexity"),
        panel(f"Perplexity over {first}, same tokens", less, f"perplexity / {first}"),
    ]
    fifths = [f"{20 * i}-{20 * i + 20} %" for i in range(5)]
    for kind, label in (("passkey", "Pass keys"), ("key_value", "Key-value pairs")):
        for length, rows in record.get(kind, {}).items():
            series = {
                path: [
                    None if share is None else _share_with_error(share, number)
                    for share, number in zip(row["by_depth"], row["keys_by_depth"], strict=True)
                ]
                for path, row in rows.items()
            }
            name = f"{label}, {charts.tokens(int(length))} tokens, {rows[first]['keys']} asked"
            at = "depth of the fact, ± 1 standard error (Wilson)"
            panels.append(charts.dots(name, fifths, series, x_label=at, y_label="digits recalled", ticks=SHARES))
    if tasks := record.get("tasks"):
        scores = {path: [_with_error(row["scores"])] for path, row in tasks.items()}
        asked = f"{tasks[first]['number']} questions" + (", ± 1 standard error" if tasks[first]["number"] > 1 else "")
        panels.append(charts.dots("Tasks", [asked], scores, x_label="", y_label="score", ticks=SHARES))
    return charts.grid(title, panels)


def _with_error(values: Sequence[float]) -> charts.Dot:
    """Their mean, and it less and more one standard error (0 of a single value)."""
    mean, error = _mean(values), 0.0
    if len(values) > 1:
        error = statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - error, mean + error


def _share_with_error(share: float, number: int) -> charts.Dot:
    """A mean of ``number`` shares, and the ends of Wilson's score interval at one standard error: those x for which
    (share - x)^2 = x (1 - x) / number. Unlike the mean's own error it stays within 0 and 1 and is no point at either.

    A fact is one trial, however many digits it has: they are recalled together more often than not, and no number between 0
    and 1 varies more than a yes or no of the same mean.
    """
    centre, half = share + 0.5 / number, math.sqrt(share * (1 - share) / number + 0.25 / number**2)
    low, high = ((centre + sign * half) / (1 + 1 / number) for sign in (-1, 1))
    return share, max(0.0, low), min(1.0, high)


def _exp(dot: charts.Dot) -> charts.Dot:
    return math.exp(dot[0]), math.exp(dot[1]), math.exp(dot[2])


def _prompt(tokenizer: Any, task: Task) -> Tensor:
    if task.chat and getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": task.prompt}]
        found = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        found = tokenizer(task.prompt, return_tensors="pt", verbose=False)
    return torch.as_tensor(found["input_ids"])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
