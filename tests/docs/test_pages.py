"""The pages of docs/: links lead somewhere, Python blocks run, tests that are named exist, and every error of the troubleshooting page is
one that can be met."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "end_to_end"), str(ROOT / "tests" / "cli")]

from models import backend, cache_for, decode, llama_profile, tiny_llama  # noqa: E402

import fasa_compile  # noqa: E402

PAGES = sorted((ROOT / "docs").glob("*.md"))
RUN = ("index.md", "explain.md", "profile-format.md")
IDS = torch.randint(0, 512, (1, 300), generator=torch.Generator().manual_seed(1))


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_named_tests_and_files_exist():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{page.name}: {file}::{name}"
        for file in re.findall(r"`((?:benchmarks|examples|profiles|triton_kernels|docs)/[\w/.-]+\.\w+)`", text):
            assert (ROOT / file).exists(), f"{page.name}: {file}"


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert {page.name for page in PAGES} == set(re.findall(r": ([\w-]+\.md)$", nav, flags=re.M))


@pytest.fixture
def eager_in(tmp_path, monkeypatch):
    """A folder to write in, and the eager inner compiler where no other is asked for."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    for call in (fasa_compile.fasa_backend, fasa_compile.generate):
        monkeypatch.setattr(call, "__kwdefaults__", call.__kwdefaults__ | {"inner": "eager"})


def test_blocks_run(eager_in, capsys):
    """In the order of the navigation, in one namespace."""
    names: dict[str, Any] = {"model": tiny_llama(layers=1), "token_ids": IDS}
    names["model"].generation_config.eos_token_id = None
    ran = 0
    for page in RUN:
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.S):
            exec(compile(block, page, "exec"), names)
            ran += 1
    assert ran == 4
    assert fasa_compile.stats()["sparse_steps"] == 6
    assert capsys.readouterr().out.count("1 of 1 attention sites decode sparsely") >= 3


def test_blocks_that_take_more_run(eager_in):
    """Those of other pages, with what their text says is given: a tokenizer and a text, a driver, a long cache cut short. Those of
    docs/distributed.md take several processes: tests/distributed runs them."""
    pytest.importorskip("hypothesis")
    from tiny_folder import byte_tokenizer

    import correctness_in_ci as example

    model, tokenizer = tiny_llama(layers=1, vocab_size=260), byte_tokenizer()
    Path("some-text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4, encoding="utf-8")
    names: dict[str, Any] = {"torch": torch, "model": model, "tokenizer": tokenizer}
    names |= {"make_my_model": example.make, "MyDriver": example.OwnDriver}
    names |= {"token_ids": IDS % 260, "token": IDS[:, :1] % 260}
    ran = 0
    for page in ("profiles/README.md", "docs/testing.md", "docs/offload.md"):
        text = (ROOT / page).read_text(encoding="utf-8").replace("524288", "512")
        with torch.no_grad():
            for block in re.findall(r"```python\n(.*?)```", text, flags=re.S):
                exec(compile(block, page, "exec"), names)
                ran += 1
    assert ran == 6
    assert fasa_compile.stats()["sparse_steps"] > 0


def test_the_api_page_has_every_public_name():
    pytest.importorskip("transformers")
    named = set(re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), flags=re.M))
    for name in fasa_compile.__all__:
        module = getattr(fasa_compile, name).__module__
        assert {module, f"{module}.{name}"} & named, name


def test_the_site_builds(tmp_path):
    for needed in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(needed)
    if not (ROOT / "build" / "mapped").exists():
        subprocess.run(["make", "-s", "build/mapped"], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "fasa_backend" in (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")


# --- troubleshooting -----------------------------------------------------------------------------------------------------


def _step(profile: Any = None, grad: bool = False, **how: Any) -> None:
    """One decode step of a tiny model through a backend."""
    model = tiny_llama(layers=1)
    torch._dynamo.reset()
    given = llama_profile(1) if profile is None else profile
    step = torch.compile(model, backend=backend(given, **({"n_fac": 24, "strict": False} | how)))
    if not grad:
        decode(model, step, IDS[:, :40], cache_for(model, "static"), 1)
        return
    cache = cache_for(model, "static")
    with torch.no_grad():
        model(IDS[:, :40], past_key_values=cache)
    step(input_ids=IDS[:, 40:41], past_key_values=cache)


def _no_graph() -> None:
    print(fasa_compile.fasa_backend("all").explain())


def _uncompiled_generate() -> None:
    model = tiny_llama(layers=1)
    with torch._dynamo.config.patch(disable=True):
        fasa_compile.generate(
            model, IDS, profile="all", inner="eager", max_new_tokens=3, do_sample=False, pad_token_id=0
        )


def _without_rope() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=512)).eval()
    step = torch.compile(model, backend=backend("all", n_fac=24, strict=False))
    decode(model, step, IDS[:, :40], cache_for(model, "static"), 1)


def _unreadable() -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("planted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fasa_compile.backend.capture", fails)
        _step()


def _prompts_alone() -> None:
    import logging

    from fasa_compile.backend import warn_unused

    model = tiny_llama(layers=1)
    engine = backend("all", n_fac=24)
    with torch.no_grad():
        torch.compile(model, backend=engine)(IDS, use_cache=False)
    lines = logging.StreamHandler(sys.stdout)
    logging.getLogger("fasa_compile").addHandler(lines)
    try:
        warn_unused()
    finally:
        logging.getLogger("fasa_compile").removeHandler(lines)


def _first_step_fails() -> None:
    def no_kernel(gm: Any, example_inputs: Any) -> Any:
        def step(*_: Any) -> None:
            raise RuntimeError("planted: out of shared memory")

        return step

    _step(inner=no_kernel)


def _too_long_for_the_host() -> None:
    model = tiny_llama(layers=1)
    with torch.no_grad():
        model(IDS[:, :4], past_key_values=fasa_compile.FasaStaticCache(model.config, max_cache_len=1 << 36))


def _cli_with_a_text() -> None:
    _cli("explain", str(ROOT / "README.md"))


def _no_rope_to_calibrate() -> None:
    fasa_compile.calibrate(torch.nn.Embedding(512, 8), IDS, progress=False)


def _cli(*arguments: str) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from fasa_compile.cli import app

    print(CliRunner().invoke(app, list(arguments)).stderr)


def _cli_without_typer() -> None:
    code = "import sys; sys.modules['typer'] = None\nfrom fasa_compile.__main__ import main; main()"
    print(subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60).stderr)


def _cli_without_tokenizer() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        tiny_llama(layers=1).config.save_pretrained(folder)
        _cli("generate", folder, "--prompt", "x", "--dense", "--inner", "eager")


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _two_processes_that_differ() -> None:
    from fasa_compile import sharding

    with _process_group():
        ranks = (0, 1)
        key = f"fasa_compile/0-1/{sharding._met[ranks] + 1}/1"
        torch.distributed.distributed_c10d._get_default_store().set(
            key, json.dumps({"compiles or makes": "a graph", "budget": "32"})
        )
        sharding.meet(ranks, 0, "tensor-parallel", "a graph", {"budget": "24"})


def _without_peer_access() -> None:
    peers = pytest.importorskip("fasa_compile.triton_kernels.peers")

    def refused(*_: Any) -> None:
        raise RuntimeError("planted")

    with _process_group(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(peers, "_make", refused)
        peers.workspace(str(torch.distributed.group.WORLD.group_name))


TRIGGERS: dict[str, Callable[[], None]] = {
    "this backend has seen no graph yet": _no_graph,
    "a fasa backend was made and saw no decode step with a cache": _prompts_alone,
    "no decode step over a cache reached the backend": _uncompiled_generate,
    "no attention site of this decode graph could be made sparse": _without_rope,
    "the profile was made for other weights": lambda: _step(check_weights=True),
    "the profile belongs to another model": lambda: _step(profile=_renamed()),
    "the forced tokens are part of the budget": lambda: _step(n_fac=3, n_sink=4),
    "expected a path ending in .json or .safetensors, or the name of a shipped profile": lambda: _step(
        profile="nothing"
    ),
    "nothing to calibrate: no attention with a proven rotary embedding": _no_rope_to_calibrate,
    "expected at least 2 tokens": lambda: fasa_compile.calibrate(tiny_llama(layers=1), IDS[:, :1]) and None,
    "a decode graph was compiled while gradients are recorded": lambda: _step(grad=True),
    "a graph could not be read; it runs as it was": _unreadable,
    "the first step of a rewritten graph failed": _first_step_fails,
    "dense_below: expected a number of tokens": lambda: _step(dense_below=-1),
    "of host memory and": _too_long_for_the_host,
    "of a tensor-parallel group differ in": _two_processes_that_differ,
    "peer_memory needs inner='inductor'": lambda: (
        fasa_compile.fasa_backend("all", inner="eager", peer_memory=True) and None
    ),
    "cannot exchange through each other's memory": _without_peer_access,
    "expected a model folder, a .gguf file or a config.json": _cli_with_a_text,
    "there is no such file or folder": lambda: _cli("explain", "nowhere"),
    "found no tokenizer beside the model": _cli_without_tokenizer,
    "fasa-compile needs": _cli_without_typer,
}


def _renamed() -> Any:
    from models import half_split, profile_of

    return profile_of([("other.layers.0.attention", 8, 2, 32, half_split(32))], 8)


def test_every_message_has_a_trigger():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert re.findall(r"^### (.*)$", page, flags=re.M) == list(TRIGGERS)


@pytest.mark.parametrize("message", TRIGGERS)
def test_a_message_is_met(message, capsys):
    pytest.importorskip("transformers")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            TRIGGERS[message]()
            raised = ""
        except Exception as problem:
            raised = f"{problem} {problem.__cause__ or ''}"
    found = " ".join([raised, capsys.readouterr().out, *(str(w.message) for w in said)])
    assert message in re.sub(r"\s+", " ", found), found[-1500:]
