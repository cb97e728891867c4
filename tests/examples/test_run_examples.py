"""The examples run, with small settings, and show what they say they show."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import custom_model
import fasa_compile
import read_report
import regional

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("end_to_end", "cli")]
SMALL = ["--inner", "eager"]


def test_quickstart(capsys):
    pytest.importorskip("transformers")
    import quickstart

    quickstart.main(["--tiny", "--new-tokens", "4", "--n-fac", "64", *SMALL])
    assert "2 of 2 attention sites decode sparsely" in capsys.readouterr().out
    assert fasa_compile.stats()["sparse_steps"] == 3


def test_the_question_about_a_long_document(capsys, monkeypatch):
    """The demo, with a tiny random model in place of SmolLM2: what it says of the run, not what the model answers."""
    pytest.importorskip("transformers")
    from models import tiny_llama
    from tiny_folder import byte_tokenizer

    import demo

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    model = tiny_llama(layers=1, vocab_size=260)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    monkeypatch.setattr(demo.smollm2, "fetch", lambda: None)
    monkeypatch.setattr(demo.smollm2, "load", lambda *_: (model, tokenizer))
    demo.main(["--tokens", "500", "--new-tokens", "5", "--n-fac", "64", "--device", "cpu", *SMALL])
    printed = capsys.readouterr().out
    assert "tokens of story, among them: The secret code of the lighthouse is 71948." in printed
    # Four steps after a prompt's token, of the answer and of the text that is read.
    assert "1 of 1 layers decode sparsely; 8 sparse steps" in printed


def test_custom_model(capsys):
    report = custom_model.main(["--tokens", "100", "--steps", "6", *SMALL])
    assert [row.layer for row in report.sparse] == ["layers.0", "layers.1"]
    assert {row.rope for row in report.sparse} == {"half-split 16/16"}
    custom_model.main(["--tokens", "100", "--steps", "6", "--n-fac", "512", *SMALL])
    assert "6 of 6 tokens are those of dense attention" in capsys.readouterr().out


def test_regional_compilation():
    reports = regional.main(["--tokens", "100", "--steps", "3", *SMALL])
    assert {row.decision for row in reports["all"].rows if row.reason != "prefill"} == {"sparse"}
    assert {row.decision for row in reports["exact"].rows if row.reason != "prefill"} == {"dense-kernel"}
    assert "unknown-layer" in {row.reason for row in reports["profile"].rows}


def test_reading_the_report(tmp_path, capsys):
    report = read_report.main(["--html", str(tmp_path / "r.html")])
    assert [(row.decision, row.reason) for row in report.rows if row.graph == report.rows[-1].graph] == [
        ("sparse", ""),
        ("dense", "dropout"),
    ]
    assert "layers.1: dense, because attention dropout is active" in capsys.readouterr().out
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.skipif(torch.cuda.is_available(), reason="its defaults on a GPU take minutes")
def test_benchmark(tmp_path):
    pytest.importorskip("transformers")
    import benchmark_gpu

    record = benchmark_gpu.main(
        ["--contexts", "256", "--steps", "2", "--n-fac", "32", "--plot", str(tmp_path / "b.svg")]
    )
    assert set(record["cases"][0]["variants"]) == {"hf", "dense", "sparse"}
    assert (tmp_path / "b.svg").read_text(encoding="utf-8").startswith("<svg")
