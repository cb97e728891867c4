"""The README's Python blocks run as they stand, one after the other, on a small model."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "end_to_end"))

from models import tiny_llama  # noqa: E402

import fasa_compile  # noqa: E402


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)


@pytest.mark.inductor
def test_blocks_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    model = tiny_llama(layers=1)
    token_ids = torch.randint(0, 512, (1, 300), generator=torch.Generator().manual_seed(1))
    names = {
        "torch": torch,
        "model": model,
        "token_ids": token_ids,
        "inputs": {
            "input_ids": token_ids,
            "max_new_tokens": 4,
            "min_new_tokens": 4,
            "do_sample": False,
            "pad_token_id": 0,
        },
        "fasa_backend": fasa_compile.fasa_backend,
        "profile": fasa_compile.calibrate(model, token_ids, progress=False),
    }
    assert len(blocks()) >= 2
    whole = model.forward
    for block in blocks():
        model.forward = whole
        fasa_compile.reset_stats()
        torch._dynamo.reset()
        exec(compile(block, "README.md", "exec"), names)
    assert fasa_compile.stats()["sparse_steps"] == 3
    assert "1 of 1 attention sites decode sparsely" in capsys.readouterr().out
    assert (tmp_path / "my-model.safetensors").exists()


def test_the_benchmark_command_runs(tmp_path, monkeypatch):
    """As it stands in the README and on the page of the command line, but for smaller shapes and settings."""
    for needed in ("typer", "transformers"):
        pytest.importorskip(needed)
    from typer.testing import CliRunner

    from fasa_compile.cli import app

    pages = [(ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/cli.md")]
    (command,) = {line for page in pages for line in re.findall(r"^fasa-compile (bench .*)$", page, flags=re.M)}
    for given, small in (("llama-3.1-8b", "smollm2-135m"), ("--layers 4", "--layers 1"), ("8k,32k,64k", "64")):
        assert given in command
        command = command.replace(given, small)
    monkeypatch.chdir(tmp_path)
    small = ["--n-fac", "24", "--steps", "1", "--inner", "eager", "--device", "cpu"]
    done = CliRunner().invoke(app, [*command.split(), *small])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "bench.svg").read_text(encoding="utf-8").count("<polyline") == 3


def test_links_lead_somewhere():
    for page in [
        ROOT / "README.md",
        ROOT / "ARCHITECTURE.md",
        ROOT / "profiles" / "README.md",
        ROOT / "examples" / "README.md",
    ]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_architecture_names_rooms_that_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for name in set(re.findall(r"`((?:fasa_compile|patterns|profiles|triton_kernels|tests)/[\w/]*(?:\.py)?)`", text)):
        assert (ROOT / name).exists(), name
