"""The command line on tiny local models: what it prints, its JSON, its exit codes, its one-line errors. No network."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))

from models import tiny_llama
from tiny_folder import byte_tokenizer
from typer.testing import CliRunner

import fasa_compile
from fasa_compile import loading
from fasa_compile.cli import app
from fasa_compile.cli.app import numbers
from fasa_compile.cli.explain import _folded, _ranges
from fasa_compile.evaluation import plot

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model folder with weights and a tokenizer, a text, and a profile calibrated through the command line."""
    base = tmp_path_factory.mktemp("cli")
    model = tiny_llama(layers=2, vocab_size=260)
    model.generation_config.eos_token_id = None
    model.save_pretrained(base / "model")
    byte_tokenizer().save_pretrained(base / "model")
    (base / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 12, encoding="utf-8")
    profile = base / "profile.safetensors"
    done = run("calibrate", base / "model", "--text", base / "text.txt", "--out", profile, "--tokens", 256, "--json")
    return SimpleNamespace(model=base / "model", text=base / "text.txt", profile=profile, base=base, calibrated=done)


def run(*arguments: Any, code: int = 0, stdin: str | None = None) -> SimpleNamespace:
    """A command's ``stdout``, ``stderr`` and, with --json, ``json``; its exit code is checked."""
    done = CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)
    assert done.exit_code == code, (done.exit_code, done.stdout, done.stderr, done.exception)
    data = json.loads(done.stdout) if "--json" in arguments and code in (0, 3) else None
    return SimpleNamespace(out=done.stdout, err=done.stderr, json=data)


def test_calibrate_writes_a_profile_that_loads(home):
    loaded = fasa_compile.load_profile(str(home.profile))
    assert home.calibrated.json["out"] == str(home.profile)
    assert [row["layer"] for row in home.calibrated.json["layers"]] == [p.layer for p in loaded.layers]
    assert loaded.data["tokens"] == 256


def calibrated(home: SimpleNamespace, out: Path, *options: Any, code: int = 0) -> SimpleNamespace:
    return run("calibrate", home.model, "--text", home.text, "--out", out, "--tokens", 128, *options, code=code)


def test_calibrate_options_reach_the_profile(home, tmp_path):
    out = tmp_path / "p.json"
    common = (
        "--n-fac",
        64,
        "--fc-format",
        "int8",
        "--reduction",
        "max",
        "--method",
        "contextual_agreement",
        "--n-tip",
        3,
    )
    calibrated(home, out, *common, "--layer-budgets", "pyramid")
    made = fasa_compile.load_profile(str(out))
    assert (made.fc_format, made.reduction, made.method) == ("int8", "max", "contextual_agreement")
    # PyramidKV on two layers: the last has the forced tokens, 4 + 16, alone, and both together twice the mean.
    assert [(p.n_tip, p.n_fac, p.dense) for p in made.layers] == [(3, 108, False), (3, 20, False)]
    shown = calibrated(home, out, "--n-fac", 24, "--layer-budgets", "mass", "--dense-above", 0, "--json").json
    assert [(row["dense"], row["n_fac"]) for row in shown["layers"]] == [(True, None)] * 2
    assert all(0 < row["stats"]["mass_lost"] < 1 for row in shown["layers"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layer-budgets", "fitted"), "layer_budgets: expected one of equal, mass, pyramid, found 'fitted'"),
        (("--dense-above", "1.5"), "dense_above: expected a share of attention mass, 0 to 1, or None, found 1.5"),
        (
            ("--method", "best"),
            "method: expected one of score_variance, contextual_agreement, greedy_mass, found 'best'",
        ),
        (("--reduction", "mean"), "reduction: expected one of static, affine, softmax_sum, max, found 'mean'"),
        (("--fc-format", "int3"), "fc_format: expected one of fp32, bf16, fp16, fp8, int8, int4, found 'int3'"),
        (("--n-tip", "99"), "model.layers.0.self_attn: n_tip: expected 1 to 16 FCs per KV head, found 99"),
        (("--n-tip", "0"), "n_tip: expected at least 1 FC per KV head, or None, found 0"),
        (("--n-fac", "3"), "n_sink + n_recent"),
        (("--n-fac", "0.05"), "n_fac"),
    ],
)
def test_calibrate_refuses_in_one_line_and_writes_nothing(home, tmp_path, options, message):
    out = tmp_path / "p.json"
    done = calibrated(home, out, *options, code=1)
    assert done.err.count("error: ") == 1 and message in done.err and "Traceback" not in done.err
    assert not out.exists()


def test_explain_reads_a_configuration_alone(tmp_path):
    """Llama-3.1-8B's shapes at 32k tokens, two layers of them: no weights, no GPU."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B))
    found = run("explain", config, "--layers", 2, "--n-fac", 1024, "--json").json
    assert (found["sites"], found["sparse"], found["length"]) == (2, 2, 32768)
    cost = found["expected"][0]
    assert cost["dense_bytes"] == 32768 * 8 * 256 * 2
    # int4, 64 of 128 dims: 32 bytes and 4 of scale and zero per token and KV head; and 1024 rows of K and V.
    assert cost["sparse_bytes"] == 32768 * 8 * 36 + 1024 * 8 * 256 * 2
    assert cost["card"].startswith("NVIDIA H100")
    row = found["report"]["rows"][0]
    assert (row["layer"], row["rope"], row["heads"]) == ("model.layers.0.self_attn", "half-split 128/128", "32/8 x 128")
    text = run("explain", tmp_path, "--layers", 2).out
    assert "2 of 2 attention sites would decode sparsely" in text and "model.layers.0-1.self_attn" in text


def test_explain_says_why_not(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4}))
    done = run("explain", tmp_path, "--length", 256, code=3)
    assert "0 of 1 attention sites" in done.out
    assert "no-rope: the queries or keys carry no rotary embedding" in re.sub(r"\s+", " ", done.out)


def test_a_growing_cache_and_the_html(home, tmp_path):
    page = tmp_path / "report.html"
    found = run("explain", home.model, "--cache", "dynamic", "--length", 512, "--html", page, "--json").json
    assert found["sparse"] == 2 and found["report"]["rows"][0]["cache"].startswith("dynamic")
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_a_skeleton_is_never_run_and_takes_no_memory(tmp_path):
    """70B parameters are looked at in a process that never holds 1.5 GB."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B | {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 2}))
    code = (
        "import resource, sys\nfrom fasa_compile import loading, fasa_backend\n"
        f"model = loading.skeleton(loading.configuration(loading.source({str(config)!r})))\n"
        "backend = fasa_backend('all', n_fac=64, inner='eager')\nloading.survey(model, backend, length=131072, batch=4)\n"
        "size = sum(p.nbytes for p in model.parameters())\n"
        "print(len(backend.explain().sparse), size, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    sparse, size, peak = map(int, done.stdout.split())
    assert sparse == 2 and size > 4e9
    assert peak < 1.5e9


def test_profile_show(home):
    shown = run("profile", "show", home.profile, "--json").json
    assert [row["n_tip"] for row in shown["layers"]] == [8, 8] and shown["fc_format"] == "int4"
    text = run("profile", "show", home.profile).out
    for name, texts in (("stability", "calibration text"), ("stability_length", "half of that text and the whole")):
        share, layer = min((row["stats"][name], row["layer"]) for row in shown["layers"])
        mean = sum(row["stats"][name] for row in shown["layers"]) / 2
        assert f"{texts} share {mean:.2f} of their frequencies, least {share:.2f} in {layer}" in text
    text = run("profile", "show", "smollm2-135m-instruct-q4_1").out
    assert len(re.findall(r"^model\.layers\.", text, flags=re.M)) == 30 and "9/3 x 64" in text


def test_profile_diff(home, tmp_path):
    other = tmp_path / "other.json"
    run("calibrate", home.model, "--text", home.text, "--out", other, "--tokens", 256, "--n-tip", 4, "--n-fac", 99)
    assert "the same" in run("profile", "diff", home.profile, home.profile).out
    found = run("profile", "diff", home.profile, other, "--json", code=3).json
    budgets = [{"n_fac": 1024, "n_sink": 4, "n_recent": 16}, {"n_fac": 99, "n_sink": 4, "n_recent": 16}]
    assert found["fields"].pop("budget") == budgets
    assert set(found["fields"]) <= {"reduction"}  # calibration measures which is best with these frequencies
    # The best 4 of a ranking are among its best 8: half of the union is shared.
    assert [row["shared_fcs"] for row in found["layers"]] == [0.5, 0.5]
    assert "50 % of the union" in run("profile", "diff", home.profile, other, code=3).out


def test_profile_check(home, tmp_path):
    assert [c["ok"] for c in run("profile", "check", home.profile, home.model, "--json").json] == [True, True, True]
    tiny_llama(layers=2, num_key_value_heads=4).save_pretrained(tmp_path)
    done = run("profile", "check", home.profile, tmp_path, "--no-weights", code=3)
    assert "no  fits the model" in done.out


def test_generate_gives_text_and_statistics(home):
    common = ("generate", home.model, "--prompt", "The quick brown fox jumps over the lazy dog.", "--inner", "eager")
    common += ("--new-tokens", 6, "--json")
    (sparse,) = run(*common, "--profile", home.profile, "--n-fac", 24).json
    assert (sparse["prompt_tokens"], sparse["new_tokens"]) == (44, 6)
    assert (sparse["sites"], sparse["sparse_sites"], sparse["sparse_steps"]) == (2, 2, 5)
    assert 0 < sparse["kv_bytes_read"] < sparse["kv_bytes_dense"]
    (share,) = run(*common, "--profile", home.profile, "--n-fac", "0.9").json
    assert sparse["kv_bytes_read"] < share["kv_bytes_read"] < share["kv_bytes_dense"]
    (dense,) = run(*common, "--dense").json
    assert dense["sparse_steps"] == 0 and dense["answer"] == covering(home)


def covering(home: SimpleNamespace) -> str:
    """The answer by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(home.model), AutoTokenizer.from_pretrained(home.model)
    ids = tokenizer("The quick brown fox jumps over the lazy dog.", return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_chat_on_stdin(home):
    given = ("generate", home.model, "-p", home.profile, "--n-fac", 24, "--new-tokens", 3, "--inner", "eager")
    turns = run(*given, "--json", stdin="The first line.\n\nThe second one.\n").json
    assert [turn["prompt"] for turn in turns] == ["The first line.", "The second one."]
    assert turns[1]["prompt_tokens"] > turns[0]["prompt_tokens"] + len("The second one.")


def test_bench_has_every_variant_and_a_plot(home, tmp_path):
    record, plot = tmp_path / "bench.json", tmp_path / "bench.svg"
    given = ("bench", home.model, "--contexts", "256,512,16", "--n-fac", 32, "--steps", 2, "--inner", "eager")
    done = run(*given, "--out", record, "--plot", plot)
    cases = json.loads(record.read_text())["cases"]
    assert [c["context"] for c in cases] == [16, 256, 512] and "no room" in cases[0]["error"]
    for case in cases[1:]:
        rows = case["variants"]
        assert set(rows) == {"hf", "dense", "sparse"} and rows["sparse"]["sites"] == {"sparse": 2}
        assert rows["dense"]["sites"] == {"dense-kernel": 2}
        assert case["speedup_over_hf"] == rows["hf"]["ms_per_step"] / rows["sparse"]["ms_per_step"]
        assert case["kv_bytes"] == 2 * 2 * 2 * 32 * 4 * case["context"]
    assert "ours, sparse" in done.out and plot.read_text().count("<polyline") == 3
    assert (tmp_path / "bench-speedup.svg").read_text().count("<polyline") == 2


def test_doctor_says_what_works(monkeypatch):
    from fasa_compile import doctor

    monkeypatch.setattr(doctor, "inductor_problem", lambda: "Inductor cannot compile for cpu: no compiler")
    found = {f["name"]: f for f in run("doctor", "--json").json}
    assert found["torch"]["found"] == torch.__version__ and found["sparse decode, reference"]["state"] == "ok"
    assert found["Inductor"]["state"] == "note" and "build-essential" in found["Inductor"]["advice"]
    monkeypatch.setattr(doctor, "version", lambda name: "1.0" if name == "torch" else "")
    assert "older than 2.11" in run("doctor", code=3).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "nowhere"), "there is no such file or folder"),
        (("explain", "{base}"), "expected a config.json in this folder"),
        (("explain", "{text}"), "expected a model folder, a .gguf file or a config.json"),
        (("explain", "{model}", "--layers", "9"), "--layers: expected 1 to 2, found 9"),
        (("profile", "show", "{text}"), "expected"),
        (
            ("calibrate", "{model}", "--text", "{profile}", "--out", "{base}/x.json"),
            "profile.safetensors: expected a text in UTF-8",
        ),
        (
            ("profile", "show", "nothing"),
            "expected a path ending in .json or .safetensors, or the name of a shipped profile",
        ),
        (
            ("generate", "{model}", "--prompt", "x", "-p", "{profile}", "--n-fac", "3", "--inner", "eager"),
            "n_sink + n_recent",
        ),
        (("generate", "{bare}", "--prompt", "x", "--dense", "--inner", "eager"), "found no tokenizer"),
    ],
)
def test_errors_are_one_line(home, arguments, message):
    bare = home.base / "bare"
    bare.mkdir(exist_ok=True)
    (bare / "config.json").write_text((home.model / "config.json").read_text())
    names = {"base": home.base, "text": home.text, "model": home.model, "profile": home.profile, "bare": bare}
    done = run(*(a.format(**names) for a in arguments), code=1)
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and message in lines[0] and "Traceback" not in done.err


def test_wrong_usage_is_exit_code_two(home):
    for arguments in (
        ("explain",),
        ("explain", home.model, "--cache", "other"),
        ("explain", home.model, "--card", "no such card"),
        ("bench", home.model, "--contexts", "4x"),
        ("bench", home.model, "--n-fac", "many"),
        ("bench", home.model, "--variants", "hf,none", "--inner", "eager"),
        ("generate", home.model, "--prompt", "x", "--device", "cuda", "--inner", "eager"),
    ):
        if "cuda" not in arguments or not torch.cuda.is_available():
            run(*arguments, code=2)


def test_numbers_are_folded():
    assert _ranges([0, 1, 2, 5]) == "0-2,5" and _ranges([1, 3, 5, 7]) == "1-7 step 2" and _ranges([4]) == "4"
    assert numbers("32k,4096", "--contexts") == (4096, 32768)
    assert _folded([]) == []


def test_help_needs_no_torch():
    """The help and completion are quick: neither torch nor transformers is imported."""
    code = "import sys, fasa_compile.cli\nprint(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_an_error_is_the_last_word(tmp_path, home):
    """A backend that an error kept from being called is not reported at exit."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B))
    command = [
        sys.executable,
        "-P",
        "-m",
        "fasa_compile",
        "explain",
        config,
        "--layers",
        "1",
        "--profile",
        home.profile,
    ]
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: ") and "never called" not in done.stderr, done.stderr


def test_shell_completion():
    script = "import sys; sys.argv[0] = 'fasa-compile'\nfrom fasa_compile.__main__ import main; main()"
    asked = os.environ | {"_FASA_COMPILE_COMPLETE": "complete_bash", "COMP_WORDS": "fasa-compile ex", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-P", "-c", script], env=asked, capture_output=True, text=True, timeout=60)
    assert "explain" in done.stdout, (done.stdout, done.stderr)


def test_without_typer_it_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None\nfrom fasa_compile.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "pip install 'fasa-compile[cli]'" in done.stderr


def test_a_configuration_with_no_model_type(tmp_path):
    (tmp_path / "some.json").write_text("{}")
    with pytest.raises(fasa_compile.ModelError, match="expected a model_type"):
        loading.configuration(loading.source(tmp_path / "some.json"))


def test_report_is_one_file_of_a_run(home, tmp_path):
    page = tmp_path / "run.html"
    given = ("report", home.model, "--out", page, "--file", home.text, "-p", home.profile, "--n-fac", 32)
    facts = run(*given, "--new-tokens", 6, "--inner", "eager", "--json").json
    assert set(facts["lost_mass"]) == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    assert facts["sparse"]["sparse_steps"] == 5 and facts["dense"]["sparse_steps"] == 0
    text = page.read_text(encoding="utf-8")
    # 2 layers of 16 frequencies, and 4 KV heads of them.
    assert text.count("<title>model.layers.") == 2 * 16 + 4 * 16
    assert "Attention mass captured" in text and "dense / sparse" in text
    mean = sum(row["mean"] for row in facts["lost_mass"].values()) / 2
    assert f"{100 * (1 - mean):.1f} %" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "") and "<script" not in text


def panels(svg: str) -> dict[str, dict[str, tuple[float, list[float]]]]:
    """Of each picture in a grid, by title: of each dot, by its name, the number it stands at, and those where its bar ends.

    Read off the y axis: none of it is from what the picture says about itself, but for the names.
    """
    found: dict[str, dict[str, tuple[float, list[float]]]] = {}
    for panel in ElementTree.fromstring(svg).findall("{*}svg"):
        texts = panel.findall("{*}text")
        ticks = [(float(t.get("y", "")) - 4, float(t.text or "")) for t in texts if t.get("text-anchor") == "end"]
        (y0, low), (y1, high) = ticks[0], ticks[-1]
        bars = [re.match(r"M([\d.]+),([\d.]+)V([\d.]+)", path.get("d", "")) for path in panel.findall("{*}path")]

        def at(y: str, y0: float = y0, y1: float = y1, low: float = low, high: float = high) -> float:
            return low + (float(y) - y0) * (high - low) / (y1 - y0)

        rows = found[texts[0].text or ""] = {}
        for dot in panel.findall("{*}circle"):
            name = (dot.findtext("{*}title") or "").rsplit(":")[0]
            rows[name] = (
                at(dot.get("cy", "")),
                [at(y) for b in bars if b and b[1] == dot.get("cx") for y in b.groups()[1:]],
            )
    return found


def test_eval_compares_with_dense(home, tmp_path, monkeypatch):
    record, picture = tmp_path / "eval.json", tmp_path / "eval.svg"
    given = ("eval", home.model, "--text", home.text, "-p", home.profile, "--tokens", 200, "--inner", "eager")
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        '{"input": "Who jumps?", "context": "The fox jumps.", "answers": ["the fox"]}\n{"input": "Who?"}\n'
    )
    short = (*given, "--last", 6)
    run(*short, "--tasks", questions, code=2)  # its second line is no question
    run(*short, "--tasks", questions, "--kind", "riddles", code=2)
    for datasets, code, message in (
        (SimpleNamespace(load_dataset=lambda name, *_, **__: [{"problem": name}]), 2, "HuggingFaceH4/MATH-500"),
        (None, 1, "datasets is not installed"),
    ):
        monkeypatch.setitem(sys.modules, "datasets", datasets)
        assert message in run(*short, "--tasks", "hub", "--kind", "math500", code=code).err
    questions.write_text(questions.read_text().splitlines()[0])
    done = run(*short, "--n-fac", 24, "--stretches", 2, "--tasks", questions, "--out", record, "--plot", picture)
    found = json.loads(record.read_text())
    assert [found["tasks"][path]["number"] for path in ("dense", "sparse")] == [1, 1]
    assert "longbench, 1 questions, sparse: " in done.out
    rows = found["perplexity"]
    assert rows["dense"]["kl_to_dense"] == 0 and rows["sparse"]["kl_to_dense"] > 0
    assert f"{rows['sparse']['perplexity_ratio']:.4f}" in done.out
    run(*given, "--last", 300, code=2)
    run(*short, "--keys", 1, "--lengths", "1k", code=2)  # longer than the text's 200 tokens

    drawn = panels(picture.read_text(encoding="utf-8"))
    assert list(drawn) == ["Perplexity", "Perplexity over dense, same tokens", "Tasks"]
    for path in ("dense", "sparse"):
        for i, text in enumerate(rows[path]["texts"]):
            assert drawn["Perplexity"][f"{path}, {i + 1}"][0] == pytest.approx(text["perplexity"], rel=1e-3)
        over = drawn["Perplexity over dense, same tokens"][f"{path}, all"]
        assert over[0] == pytest.approx(rows[path]["perplexity_ratio"], rel=1e-3)
        # Of two differences the standard error is half of what they are apart.
        a, b = (x["nll"] - y["nll"] for x, y in zip(rows[path]["texts"], rows["dense"]["texts"], strict=True))
        ends = [rows[path]["perplexity_ratio"] * math.exp(sign * abs(a - b) / 2) for sign in (-1, 1)]
        assert over[1] == ([] if path == "dense" else pytest.approx(ends, rel=1e-3))
        assert drawn["Tasks"][f"{path}, 1 questions"][0] == pytest.approx(found["tasks"][path]["mean"], abs=1e-3)


def test_what_eval_recalls_is_drawn_by_depth():
    """A record as ``evaluate`` gives it: one text, two lengths; no fact lies in the second fifth."""
    rows = {"dense": [1.0, None, 0.5, 0.75, 1.0], "sparse": [0.8, None, 0.5, 0.25, 0.0]}
    asked = [1, 0, 3, 8, 4]
    recall = {path: {"by_depth": depths, "keys_by_depth": asked, "keys": 16} for path, depths in rows.items()}
    text = {"texts": [{"nll": 2.0}]}
    record = {"perplexity": {"dense": text, "sparse": text}, "passkey": {"200": recall}, "key_value": {"4096": recall}}
    drawn = panels(plot(record, "a title"))
    assert drawn["Perplexity"] == {f"{path}, 1": (pytest.approx(math.exp(2), rel=1e-3), []) for path in rows}
    for title in ("Pass keys, 200 tokens, 16 asked", "Key-value pairs, 4k tokens, 16 asked"):
        shares = {
            f"{path}, {20 * i}-{20 * i + 20} %": pytest.approx(x, abs=1e-3)
            for path, depths in rows.items()
            for i, x in enumerate(depths)
            if x is not None
        }
        assert {name: share for name, (share, _) in drawn[title].items()} == shares
        # All of n: from n / (n + 1) to 1; none: from 0 to 1 / (n + 1); half of three: 1/4 to 3/4 (Wilson's formula by hand).
        ends = {name: bar for name, (_, bar) in drawn[title].items()}
        for name, low, high in (
            ("dense, 0-20 %", 1 / 2, 1),
            ("dense, 80-100 %", 4 / 5, 1),
            ("sparse, 80-100 %", 0, 1 / 5),
            ("dense, 40-60 %", 1 / 4, 3 / 4),
        ):
            assert ends[name] == pytest.approx([low, high], abs=1e-3)
        # Each end is a share of which what was seen is one standard error away.
        for end in ends["dense, 60-80 %"]:
            assert abs(0.75 - end) == pytest.approx(math.sqrt(end * (1 - end) / 8), abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("eval", "--plot", "x.png"), "expected a name ending in .svg, found x.png"),
        (("bench", "--plot", "no folder/x.svg"), "there is no folder no folder"),
        (("eval", "--out", "{base}"), "cannot be written"),
        (("explain", "--html", "{base}/text.txt/x"), "there is no folder"),
        (("calibrate", "--out", "x.bin"), "expected a name ending in .safetensors or .json, found x.bin"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_first(home, arguments, message):
    """Before the model is looked for: the one named here is not there, which would be exit code 1."""
    command, *options = (a.format(base=home.base) for a in arguments)
    needed = ("--text", home.text) if command in ("eval", "calibrate") else ()
    needed += ("-p", home.profile) if command == "eval" else ()
    done = run(command, "nowhere", *needed, *options, code=2)
    assert message in re.sub(r"[\s│]+", " ", done.err)
