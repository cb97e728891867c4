"""The evaluation harness itself: what it calls a decode is one, its scores are what they say, and its two sparse paths agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fasa_compile
from fasa_compile import evaluation as ev
from fasa_compile.evaluation import decode, like, prefill, restore, score, step_of
from fasa_compile.profiles import Budget
from fasa_compile.tasks import Task

transformers = pytest.importorskip("transformers")

from hooked_attention import hooked  # noqa: E402

LENGTH, LAST = 96, 24


def prepared(model: Any) -> tuple[Tensor, Any, Tensor]:
    """``(ids [1, LENGTH], cache filled up to the decoded tokens, tokens to decode [LAST])``."""
    ids = torch.randint(1, 128, (1, LENGTH))
    start = LENGTH - LAST - 1
    return ids, prefill(model, ids[:, :start], LENGTH), ids[0, start:-1]


def test_decode_equals_one_pass_over_the_text(model: Any) -> None:
    ids, filled, tokens = prepared(model)
    whole = model(ids).logits[0, -LAST - 1 : -1].log_softmax(-1)
    done = decode(step_of(model.forward), like(model, filled), tokens)
    torch.testing.assert_close(done.log_probs, whole, atol=1e-4, rtol=1e-4)
    assert done.steps_per_second > 0


def test_restore_brings_back_the_prefill_in_place(model: Any) -> None:
    _, filled, tokens = prepared(model)
    cache = like(model, filled)
    places = [layer.keys.data_ptr() for layer in cache.layers]
    first = decode(step_of(model.forward), cache, tokens)
    assert not torch.equal(cache.layers[0].keys, filled.layers[0].keys)
    restore(cache, filled)
    again = decode(step_of(model.forward), cache, tokens)
    assert torch.equal(first.log_probs, again.log_probs)
    assert places == [layer.keys.data_ptr() for layer in cache.layers]


def test_scores_of_known_distributions() -> None:
    dense = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    got = score(other, dense, torch.tensor([0, 1]))
    assert got.nll == pytest.approx(-(math.log(0.25) + math.log(0.8)) / 2, rel=1e-6)
    assert got.perplexity == pytest.approx(math.exp(got.nll), rel=1e-6)
    assert got.kl == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2, rel=1e-5)
    assert got.top1 == 0.5


def calibrated(model: Any, fc_format: str, reduction: str | None = None) -> Any:
    ids = torch.randint(1, 128, (1, LENGTH))
    return fasa_compile.calibrate(model, ids, fc_format=fc_format, reduction=reduction, progress=False)


def test_hook_is_dense_with_a_budget_for_everything_and_sparse_below(model: Any) -> None:
    _, filled, tokens = prepared(model)
    step = step_of(model.forward)
    dense = decode(step, like(model, filled), tokens).log_probs
    profile = calibrated(model, "int4")
    for given in (profile, None):
        with hooked(model, given, Budget(LENGTH, 4, 8)):
            same = decode(step, like(model, filled), tokens).log_probs
        torch.testing.assert_close(same, dense, atol=1e-4, rtol=1e-4)
        with hooked(model, given, Budget(16, 2, 4)):
            fewer = decode(step, like(model, filled), tokens).log_probs
        assert (fewer - dense).abs().max() > 1e-3
    assert torch.equal(decode(step, like(model, filled), tokens).log_probs, dense)  # and it is gone afterwards


@pytest.mark.parametrize("fc_format", ["fp32", "int4"])
@pytest.mark.parametrize("n_fac", [16, 48])
def test_compiled_path_selects_what_the_hook_selects(model: Any, fc_format: str, n_fac: int) -> None:
    _, filled, tokens = prepared(model)
    profile = calibrated(model, fc_format, "affine" if n_fac == 16 else "static")
    with hooked(model, profile, Budget(n_fac, 2, 4)):
        by_hook = decode(step_of(model.forward), like(model, filled), tokens).log_probs
    backend = fasa_compile.fasa_backend(profile, n_fac=n_fac, n_sink=2, n_recent=4, inner="eager")
    fasa_compile.reset_stats()
    compiled: Callable[..., Any] = torch.compile(model.forward, backend=backend)
    by_graph = decode(step_of(compiled), like(model, filled), tokens).log_probs
    stats = fasa_compile.stats()
    assert stats["sparse_steps"] == LAST and not stats["declined"]
    torch.testing.assert_close(by_graph, by_hook, atol=1e-4, rtol=1e-4)


class Letters:
    """A tokenizer of one token per character."""

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_haystack_hides_each_answer_once() -> None:
    filler = torch.full((500,), ord("x"))
    hay = ev.haystack(Letters(), filler, keys=5, seed=3)
    text = Letters().decode(hay.text[0].tolist())
    assert len(text) == 500 and len(hay.questions) == len(hay.answers) == 5
    stretches = [len(part) for part in text.split("\n\n") if part.startswith("xx")]
    assert len(stretches) == 6 and max(stretches) - min(stretches) <= 1  # evenly spread
    for question, answer in zip(hay.questions, hay.answers, strict=True):
        asked, value = Letters().decode(question.tolist()), Letters().decode(answer.tolist())
        name = asked.split("pass key of ")[1].split("?")[0]
        assert len(value) == ev.DIGITS and value.isdigit()
        assert text.count(f"The pass key of {name} is {value}.") == 1
        assert asked.endswith(f"The pass key of {name} is ")
    other = ev.haystack(Letters(), filler, keys=5, seed=4)
    assert not torch.equal(other.text, hay.text)
    with pytest.raises(ValueError, match="no room"):
        ev.haystack(Letters(), filler[:200], keys=5, seed=3)
    with pytest.raises(ValueError, match="keys"):
        ev.haystack(Letters(), filler, keys=99, seed=0)


def test_recall_counts_digits() -> None:
    """A step that always says the digit that is due gets 1, one that never does gets 0, from the same cache."""
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, head_dim=16
    )
    model = transformers.LlamaForCausalLM(config).eval()
    hay = ev.haystack(Letters(), torch.full((200,), ord("x")), keys=2, seed=0)
    script = [
        token for q, a in zip(hay.questions, hay.answers, strict=True) for token in [*[0] * (len(q) - 1), *a.tolist()]
    ]

    def saying(tokens: list[int]) -> Callable[[Tensor, Any], Tensor]:
        due = iter(tokens)
        return lambda token, cache: torch.nn.functional.one_hot(torch.tensor([next(due)]), 128).float() * 9

    got = ev.recall(model, {"right": saying(script), "wrong": saying([0] * len(script))}, hay)
    assert got == {"right": [1.0, 1.0], "wrong": [0.0, 0.0]}


def test_facts_say_how_deep_they_lie() -> None:
    hay = ev.haystack(Letters(), torch.full((600,), ord("x")), keys=5, seed=1, kind="key_value")
    text = Letters().decode(hay.text[0].tolist())
    for question, answer, depth in zip(hay.questions, hay.answers, hay.depths, strict=True):
        asked, value = Letters().decode(question.tolist()), Letters().decode(answer.tolist())
        fact = asked.strip() + " " + value
        assert text.count(fact) == 1
        assert depth == pytest.approx((text.index(fact) + len(fact) + 1) / 600, abs=1e-9)
    assert sorted(hay.depths) != list(hay.depths) and min(hay.depths) < 0.25 < 0.7 < max(hay.depths)


def test_evaluate_is_dense_against_the_compiled_model(model: Any) -> None:
    """With a budget for everything both paths say the same; with a small one they do not. All numbers are plain data."""
    import json

    texts = torch.randint(1, 128, (1, 200))
    profile = calibrated(model, "int4")
    task = Task("abcd" * 20, ("efgh",), "f1", 5, chat=False)

    class Tokens(Letters):
        eos_token_id = -1

        def __call__(self, text: str, **kwargs: Any) -> dict[str, Any]:
            ids = [ord(c) for c in text]
            return {"input_ids": torch.tensor([ids]) if kwargs.get("return_tensors") else ids}

        def decode(self, ids: list[int], **kwargs: Any) -> str:
            return super().decode(ids)

    how: dict[str, Any] = {"n_sink": 2, "n_recent": 4, "dense_below": 0, "inner": "eager"}
    found = ev.evaluate(model, Tokens(), profile, texts, last=12, keys=1, tasks=[task], n_fac=24, **how)
    json.dumps(found, allow_nan=False)
    assert found["perplexity"]["dense"]["kl_to_dense"] == 0
    assert found["perplexity"]["sparse"]["kl_to_dense"] > 1e-4
    by_hand = [
        -model(text[None, :-1]).logits[0, -12:].log_softmax(-1).gather(1, text[-12:, None]).mean() for text in texts
    ]
    assert found["perplexity"]["dense"]["nll"] == pytest.approx(float(torch.stack(by_hand).mean()), rel=1e-4)
    for kind in ("passkey", "key_value"):
        rows = found[kind]["200"]
        assert rows["dense"]["keys"] == rows["sparse"]["keys"] == 1
        for row in rows.values():
            assert [x is not None for x in row["by_depth"]] == row["keys_by_depth"]  # one fact: 1 where it lies, else 0
            assert sum(row["keys_by_depth"]) == 1
    assert found["tasks"]["dense"]["number"] == 1
    torch._dynamo.reset()
    said = ev.answer(model, Tokens(), step_of(model.forward), task)
    ids = model.generate(Tokens()(task.prompt, return_tensors="pt")["input_ids"], max_new_tokens=5, do_sample=False)
    assert [ord(c) for c in said] == ids[0, len(task.prompt) :].tolist()
    with pytest.raises(ValueError, match="last"):
        ev.perplexity(model, {"dense": step_of(model.forward)}, texts, 200)
