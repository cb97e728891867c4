"""What `doctor` says of machines that are not this one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fasa_compile import doctor
from fasa_compile.cost import cards
from fasa_compile.triton_kernels import reference


def with_cards(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, int, int]) -> None:
    cards = [SimpleNamespace(name=n, major=a, minor=b, total_memory=80 << 30) for n, a, b in found]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: cards[i])


def test_each_card_is_told_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, ("Tesla T4", 7, 5), ("NVIDIA L40S", 8, 9), (cards()[0].name, 9, 0))
    old, unmeasured, known = doctor._card()
    assert (old.name, old.state) == ("GPU 0", "bad") and "8.0 and above" in old.advice
    assert unmeasured.state == "note" and "fasa-compile bench" in unmeasured.advice
    assert known.state == "ok" and "80 GiB, sm_90" in known.found


@pytest.mark.parametrize(("built", "advice"), [("12.8", "check nvidia-smi"), (None, "install the CUDA build")])
def test_no_card(built: str | None, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    (found,) = doctor._card()
    assert found.state == "note" and advice in found.advice


def test_an_apple_gpu_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    (found,) = doctor._card()
    assert found.state == "note" and "Apple" in found.found


def test_triton_is_missed_only_where_there_is_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "" if name == "triton" else "99.0")
    for there, state in ((True, "bad"), (False, "note")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        (triton,) = (f for f in doctor._versions() if f.name == "triton")
        assert (triton.state, triton.found) == (state, "not installed") and "pip install triton" in triton.advice


def test_a_step_that_is_wrong_or_fails_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._decode("cpu").state == "ok"
    whole = reference.sparse_decode
    monkeypatch.setattr(reference, "sparse_decode", lambda *a, **how: 1.1 * whole(*a, **how))
    wrong = doctor._decode("cpu")
    assert wrong.state == "bad" and "differs from dense attention by" in wrong.found
    monkeypatch.setattr(reference, "sparse_decode", lambda *a, **how: 1 / 0)
    failing = doctor._decode("cpu")
    assert failing.state == "bad" and failing.found.startswith("ZeroDivisionError: ")


@pytest.mark.parametrize("there", [True, False])
def test_a_compiler_that_fails(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(*args: object, **how: object) -> object:
        raise RuntimeError("planted: no header\nand more")

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/bin/c++" if there else None)
    problem = doctor.inductor_problem()
    assert problem.endswith("RuntimeError: planted: no header")
    assert ("there is no C++ compiler" in problem) != there
    assert doctor._inductor().state == "note" and "build-essential" in doctor._inductor().advice


def test_names_of_the_processor_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.version("no such distribution") == ""
    assert doctor._number("2.11.0+cu128") == (2, 11) and doctor._number("3.6rc1") == (3, 61)

    def unreadable(*args: object, **how: object) -> str:
        raise OSError

    monkeypatch.setattr(doctor.Path, "read_text", unreadable)
    monkeypatch.setattr(doctor.platform, "processor", lambda: "")
    monkeypatch.setattr(doctor.platform, "machine", lambda: "riscv64")
    assert doctor.processor() == "riscv64"


def test_a_record_names_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    found = doctor.environment("cuda")
    assert found["card"] == "NVIDIA L40S" and found["torch"] == torch.__version__ and "cuda" in found
    assert "threads" in doctor.environment()["card"]
