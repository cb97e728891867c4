"""Which versions of Python, torch and transformers the package was tried with: builds it there, installs the wheel, runs tests on it.

    python tests/packaging/version_matrix.py --python python3.12 --torch 2.13.0 --transformers 5.24.0
    python tests/packaging/version_matrix.py --env path/to/venv      an environment that has torch and transformers already

Each call makes (or takes) one environment, builds sdist and wheel with its Python, installs the wheel into it, measures what the
import takes beyond torch, runs ``TESTS`` on what is installed, and puts a row into benchmarks/results/versions.json. docs/versions.md
is written from that file. ``--table`` writes the page alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD, PAGE = ROOT / "benchmarks" / "results" / "versions.json", ROOT / "docs" / "versions.md"

#: What has to do with the versions of others: what torch traces to, how transformers keeps its caches, the operators, files.
TESTS = (
    "internals", "match/test_cache.py", "kernels/test_ops.py", "kernels/test_reference.py", "profiles/test_profile_files.py",
    "end_to_end/test_parity.py::test_sparse_equals_the_plain_reference",
)  # fmt: skip
#: What the tests need beside torch and transformers.
NEEDED = (
    "safetensors", "numpy", "sympy", "pytest", "pytest-timeout", "hypothesis", "typer", "rich", "build", "setuptools>=77",
)  # fmt: skip

VERSIONS = """
import json, platform
from importlib.metadata import version
def of(name):
    try:
        return version(name)
    except ImportError:
        return None
print(json.dumps({"python": platform.python_version(), **{n: of(n) for n in ("torch", "transformers", "triton")}}))
"""
IMPORT = """
import sys, time
import torch
began = time.perf_counter()
import fasa_compile
took = time.perf_counter() - began
early = sorted({"transformers", "triton", "typer"} & set(sys.modules))
import torch._dynamo
began = time.perf_counter()
fasa_compile.fasa_backend
print(took, time.perf_counter() - began, fasa_compile.__file__, *early)
"""


def run(command: Sequence[str | Path], cwd: Path, **how: Any) -> str:
    """A command's stdout, away from this tree and from what PYTHON* variables say. Raises ``RuntimeError`` with its stderr."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(x) for x in command], cwd=cwd, env=env, capture_output=True, text=True, check=False, **how
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    return done.stdout


def environment(python: str, torch: str, transformers: str, home: Path) -> Path:
    """The Python of a new virtual environment with these versions."""
    run([python, "-m", "venv", home / "venv"], home)
    made = home / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    run([made, "-m", "pip", "install", "-q", f"torch=={torch}"], home)
    run([made, "-m", "pip", "install", "-q", f"transformers=={transformers}", *NEEDED], home)
    return made


def build(python: Path, home: Path) -> tuple[Path, Path]:
    """``(sdist, wheel)`` of this tree, the wheel from the sdist, by that Python; from a copy, since building writes into its tree."""
    tree, dist = home / "tree", home / "dist"
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=left_out)
    run([python, "-m", "build", "--no-isolation", "--outdir", dist, tree], home)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return sdist, wheel


def import_times(python: Path, home: Path, times: int = 7) -> tuple[float, float]:
    """Seconds that importing the package takes after torch, and reaching for ``fasa_backend`` after that and torch._dynamo; the least of
    ``times`` processes each. Raises ``RuntimeError`` where the import brings more than the package."""
    found = [run([python, "-W", "ignore", "-c", IMPORT], home).split() for _ in range(times)]
    for _, _, place, *early in found:
        if early or Path(place).is_relative_to(ROOT):
            raise RuntimeError(f"importing {place} imported {early or 'this tree'}")
    return min(float(seconds) for seconds, *_ in found), min(float(seconds) for _, seconds, *_ in found)


def tests(python: Path, home: Path, chosen: Sequence[str]) -> dict[str, Any]:
    """How the tests ended: numbers, the names of those that failed, seconds."""
    began = time.monotonic()
    log = home / "tests.log"
    files = [ROOT / "tests" / name for name in chosen]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    with log.open("w") as out:
        command = [
            python,
            "-P",
            "-m",
            "pytest",
            "-q",
            "-rf",
            "-p",
            "no:cacheprovider",
            "-c",
            ROOT / "pyproject.toml",
            *files,
        ]
        subprocess.run([str(x) for x in command], cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, check=False)
    text = log.read_text()
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", text.splitlines()[-1])}
    if not counts.get("passed"):
        raise RuntimeError(f"no test passed: {text[-2000:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) (?:\S*tests/)?(\S+)", text, flags=re.M)
    return {"tests": counts, "failed": failed, "seconds": round(time.monotonic() - began)}


def keep(row: dict[str, Any]) -> None:
    """Puts a row in the place of the one with the same versions."""
    rows = json.loads(RECORD.read_text())["rows"] if RECORD.exists() else []
    same = ("python", "torch", "transformers")
    rows = [r for r in rows if any(r[name] != row[name] for name in same)] + [row]
    rows.sort(key=lambda r: [[int(n) for n in re.findall(r"\d+", r[name].partition("+")[0])] for name in same])
    RECORD.write_text(json.dumps({"benchmark": "version matrix", "suite": list(TESTS), "rows": rows}, indent=1) + "\n")


def page(rows: Sequence[dict[str, Any]]) -> str:
    """docs/versions.md."""
    lines = [
        "# Versions",
        "",
        "Combinations that were tried: sdist and wheel built with that Python, the wheel installed, its import timed (after torch; the aim",
        "is 0.3 s) and what `fasa_compile.fasa_backend` takes to load after that and torch._dynamo (least of seven processes each), and the",
        "tests that have to do with other packages' versions run on what is installed. Made by `tests/packaging/version_matrix.py`; the record is `benchmarks/results/versions.json`.",
        "",
        "| Python | torch | transformers | triton | import, s | backend, s | passed | failed | skipped | date |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        counts = row["tests"]
        numbers = (counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0))
        seconds = (f"{row['import_s']:.3f}", f"{row['backend_s']:.2f}")
        cells = [row["python"], row["torch"], row["transformers"], row["triton"] or "none", *seconds]
        lines.append("| " + " | ".join([*cells, *map(str, numbers), str(counts.get("skipped", 0)), row["date"]]) + " |")
    notes = [f"- Python {r['python']}, torch {r['torch']}: `{name}` failed" for r in rows for name in r["failed"]]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the Python of a new environment")
    parser.add_argument("--torch", default="2.13.0")
    parser.add_argument("--transformers", default="5.24.0")
    parser.add_argument(
        "--env", type=Path, help="an environment to use in place of a new one; the wheel is installed into it"
    )
    parser.add_argument(
        "--table", action="store_true", help="write docs/versions.md from the record and do nothing else"
    )
    args = parser.parse_args(argv)
    if not args.table:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            if args.env:
                python = args.env.absolute() / ("Scripts" if os.name == "nt" else "bin") / "python"
            else:
                python = environment(args.python, args.torch, args.transformers, home)
            sdist, wheel = build(python, home)
            run([python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", wheel], home)
            row: dict[str, Any] = json.loads(run([python, "-c", VERSIONS], home))
            imported, reached = import_times(python, home)
            row |= {
                "sdist": sdist.name,
                "wheel": wheel.name,
                "import_s": round(imported, 3),
                "backend_s": round(reached, 3),
            }
            row |= tests(python, home, TESTS)
            keep(row | {"date": datetime.datetime.now(datetime.UTC).date().isoformat()})
            print(json.dumps(row, indent=1))
    PAGE.write_text(page(json.loads(RECORD.read_text())["rows"]), encoding="utf-8")


if __name__ == "__main__":
    main()
