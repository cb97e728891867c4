"""What works on this machine: versions, the card, compilers, a decode step of each kind, and what to do about what does not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

#: The oldest versions that the tests were run with.
LEAST = {"torch": "2.11", "transformers": "5.17", "triton": "3.6"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``advice`` says what to do, and is empty where there is nothing to do."""

    name: str
    state: Literal["ok", "note", "bad"]
    found: str
    advice: str = ""


def version(name: str) -> str:
    """The version of an installed distribution, "" where there is none."""
    if name == "torch":
        return torch.__version__  # with the build's tag, which the distribution's version may lack
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What a record must say to be compared: versions and the card, or the CPU and its threads."""
    device = torch.device(device)
    found: dict[str, Any] = {
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "triton")},
        "fasa_compile": version("fasa-compile"),
    }
    if device.type == "cuda":
        return {"card": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda), **found}
    return {"card": f"{processor()}, {torch.get_num_threads()} threads", **found}


def _number(text: str) -> tuple[int, ...]:
    parts = text.split("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)


def _versions() -> list[Finding]:
    out = [Finding("Python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}")]
    for name, why in (
        ("torch", ""),
        ("transformers", "for Hugging Face models: pip install 'fasa-compile[demo]'"),
        ("triton", "the GPU kernels need it: pip install triton (Linux)"),
    ):
        found = version(name)
        if not found:
            needed = name == "triton" and torch.cuda.is_available()
            out.append(Finding(name, "bad" if needed else "note", "not installed", why))
        elif _number(found) < _number(LEAST[name]):
            out.append(Finding(name, "bad", found, f"older than {LEAST[name]}: pip install -U {name}"))
        else:
            out.append(Finding(name, "ok", found))
    return out


def _card() -> list[Finding]:
    from fasa_compile.cost import cards

    if not torch.cuda.is_available():
        built = torch.version.cuda
        if torch.backends.mps.is_available():
            return [
                Finding(
                    "GPU",
                    "note",
                    "Apple GPU: no kernels for it",
                    "models run there as they are; sparse steps run on the CPU",
                )
            ]
        advice = (
            "torch sees no card: check nvidia-smi and the driver"
            if built
            else "this torch is a CPU build: on a machine with an NVIDIA card, install the CUDA build of torch"
        )
        return [Finding("GPU", "note", "none: decode steps run the plain-torch reference, right and not fast", advice)]
    out = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        name = f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}"
        if (p.major, p.minor) < (8, 0):
            out.append(
                Finding(f"GPU {i}", "bad", name, "the kernels are compiled for compute capability 8.0 and above")
            )
        elif p.name not in {card.name for card in cards()}:
            advice = f"expected times and break-even lengths are those of an {cards()[0].name}; measure yours: fasa-compile bench"
            out.append(Finding(f"GPU {i}", "note", name, advice))
        else:
            out.append(Finding(f"GPU {i}", "ok", name))
    return out


def _line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {(str(problem).strip() or '-').splitlines()[0][:120]}"


def inductor_problem() -> str:
    """Empty where Inductor can compile for the GPU or, where there is none, for the CPU; else why not, in one line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.compile(lambda x: x * 2 + 1, backend="inductor")(torch.ones(4, device=device))
    except Exception as problem:  # a missing compiler, missing Python headers, a missing OpenMP runtime
        found = "" if shutil.which("c++") or shutil.which("clang++") else " (there is no C++ compiler)"
        return f"Inductor cannot compile for {device}{found}: {_line(problem)}"
    return ""


def _inductor() -> Finding:
    problem = inductor_problem()
    if problem:
        advice = "install a C++ compiler and Python's headers (build-essential, python3-dev), or use inner='eager'"
        return Finding("Inductor", "note", problem.removeprefix("Inductor "), advice)
    return Finding("Inductor", "ok", f"compiles for {'cuda' if torch.cuda.is_available() else 'cpu'}")


def _decode(device: str) -> Finding:
    """Sparse decode through the operators on ``device`` against dense attention, with a budget for every token."""
    from fasa_compile.triton_kernels import ops

    name = "sparse decode, GPU kernels" if device == "cuda" else "sparse decode, reference"
    g = torch.Generator().manual_seed(0)
    B, Hq, Hkv, L, D, W = 1, 4, 2, 256, 64, 32

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(device)

    q, k, v = draw(B, Hq, 1, D), draw(B, Hkv, L, D), draw(B, Hkv, L, D)
    dims = torch.stack([torch.randperm(D, generator=g)[:W] for _ in range(Hkv)]).to(torch.int32).to(device)
    centre, spread = torch.zeros(Hkv, W, device=device), torch.ones(Hkv, W, device=device)
    try:
        data, meta = torch.ops.fasa.pack(k, dims, centre, spread, "int4", ops.KERNEL_VERSION)
        state = (data, meta, dims, centre, spread, None, None, None, None, None)
        how: dict[str, Any] = dict(scale=D**-0.5, n_fac=L, n_sink=0, n_recent=1, softcap=0.0, sinks=None)
        got = torch.ops.fasa.sparse_decode(
            q, k, v, *state, **how, fmt="int4", reduction="softmax_sum", version=ops.KERNEL_VERSION
        )
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        error = float((got - want).abs().max())
    except Exception as problem:
        return Finding(name, "bad", _line(problem), "please report it with this output")
    if error > 1e-3:
        return Finding(name, "bad", f"differs from dense attention by {error:.1e}", "please report it with this output")
    return Finding(name, "ok", f"equals dense attention with a budget for all tokens (to {error:.0e})")


def _profiles() -> Finding:
    from fasa_compile.profiles import shipped_profiles

    return Finding("shipped profiles", "ok", ", ".join(shipped_profiles()) or "none")


def _caches() -> Finding:
    path = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    return Finding("compile cache", "ok", path or "torch's default folder (TORCHINDUCTOR_CACHE_DIR is not set)")


def examine() -> list[Finding]:
    """Everything that is looked at, in order."""
    found = [*_versions(), *_card(), _inductor(), _decode("cpu")]
    if torch.cuda.is_available() and version("triton"):
        found.append(_decode("cuda"))
    return [*found, _profiles(), _caches()]
