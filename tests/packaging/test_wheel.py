"""What a user gets: the wheel built from the sdist built from this tree, installed where nothing of the tree is in reach."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_FOLDERS = {
    "fasa_compile": "fasa_compile",
    "patterns": "fasa_compile/patterns",
    "profiles": "fasa_compile/profiles",
    "triton_kernels": "fasa_compile/triton_kernels",
}
PROFILE_DATA = {".json", ".safetensors", ".md"}


@dataclass(frozen=True)
class Installed:
    python: Path
    home: Path  # an empty folder to run in
    wheel: Path
    sdist: Path

    def run(self, code: str) -> str:
        """Output of ``code`` in the fresh environment; nothing of this tree is on its path."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        command = [str(self.python), "-W", "ignore", "-c", code]
        done = subprocess.run(command, cwd=self.home, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    pytest.importorskip("build")
    base = tmp_path_factory.mktemp("wheel")
    tree = base / "tree"
    # A copy: building writes into the tree it builds.
    hidden = shutil.ignore_patterns(
        ".*", "build", "dist", "*.egg-info", "__pycache__", "tests", "examples", "benchmarks"
    )
    shutil.copytree(ROOT, tree, ignore=hidden)
    dist = base / "dist"
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(tree)], base)
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    env = base / "env"
    _run([sys.executable, "-m", "venv", "--without-pip", str(env)], base)
    python = env / ("Scripts" if os.name == "nt" else "bin") / "python"
    _run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            str(wheel),
        ],
        base,
    )
    # torch and the other dependencies are the ones of this environment. A .pth file appends its folder to the path and
    # runs no .pth file in it, so that an editable install of this tree stays out of reach.
    purelib = _run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], base).strip()
    Path(purelib, "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    home = base / "home"
    home.mkdir()
    return Installed(python, home, wheel, sdist)


def _run(command: list[str], cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _shipped(folder: str) -> set[str]:
    """Files of a package folder that belong into the wheel, relative to the folder."""
    files = (p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    wanted = {".py"} | (PROFILE_DATA if folder == "profiles" else set())
    return {
        str(p.relative_to(ROOT / folder))
        for p in files
        if p.suffix in wanted or p.name in ("py.typed", "cards.json") or p.parent.name == "shapes"
    }


def test_wheel_has_one_import_name_and_every_file(installed: Installed) -> None:
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    top = {n.split("/")[0] for n in names}
    assert {n for n in top if not n.endswith(".dist-info")} == {"fasa_compile"}
    expected = {f"{target}/{file}" for folder, target in PACKAGE_FOLDERS.items() for file in _shipped(folder)}
    assert "fasa_compile/py.typed" in expected
    assert {n for n in names if n.startswith("fasa_compile/")} == expected


def test_sdist_builds_and_carries_the_licence(installed: Installed) -> None:
    with tarfile.open(installed.sdist) as archive:
        names = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    assert {"LICENSE", "README.md", "pyproject.toml", "patterns/__init__.py", "triton_kernels/__init__.py"} <= names
    assert not {n for n in names if n.endswith((".gguf", ".whl"))}
    licences = [n for n in zipfile.ZipFile(installed.wheel).namelist() if n.endswith("licenses/LICENSE")]
    assert len(licences) == 1


def test_subpackages_import_from_the_wheel(installed: Installed) -> None:
    modules = [
        f"fasa_compile.{name}"
        for name in ("patterns", "profiles", "testing", "triton_kernels", "backend", "calibration")
    ]
    code = (
        "import importlib, fasa_compile\n"
        f"for name in {modules!r}:\n    print(importlib.import_module(name).__file__)\n"
        "print(fasa_compile.__file__)\n"
    )
    places = installed.run(code).split()
    assert len(places) == len(modules) + 1
    assert all(Path(p).is_relative_to(installed.python.parents[1]) for p in places), places
    assert not any(Path(p).is_relative_to(ROOT) for p in places), places


def test_the_bare_names_of_our_folders_are_not_taken(installed: Installed) -> None:
    code = (
        "import importlib.util as u, json\n"
        "found = {n: u.find_spec(n) for n in ('triton_kernels', 'patterns', 'profiles')}\n"
        "print(json.dumps({n: s and (s.origin or list(s.submodule_search_locations)) for n, s in found.items()}))"
    )
    # Another package of that name may be there; it must not be ours.
    for name, place in json.loads(installed.run(code)).items():
        for path in [place] if isinstance(place, str) else place or []:
            assert not Path(path).is_relative_to(ROOT), (name, place)
            assert not Path(path).is_relative_to(installed.python.parents[1]), (name, place)


def test_shipped_profiles_load_by_name(installed: Installed) -> None:
    code = (
        "import json\nfrom fasa_compile.profiles import load_profile, shipped_profiles\n"
        "print(json.dumps({n: len(load_profile(n).layers) for n in shipped_profiles()}))"
    )
    found = json.loads(installed.run(code))
    assert set(found) == {Path(f).stem for f in _shipped("profiles") if Path(f).suffix in {".json", ".safetensors"}}
    assert all(layers > 0 for layers in found.values())


def test_dynamo_finds_the_backend_by_name(installed: Installed) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "(entry,) = entry_points(group='torch_dynamo_backends', name='fasa')\n"
        "import fasa_compile, torch._dynamo\n"
        "assert callable(entry.load())\n"
        "print(entry.value, 'fasa' in torch._dynamo.list_backends(exclude_tags=None))"
    )
    assert installed.run(code).split() == ["fasa_compile.backend:fasa", "True"]


def test_version_is_one(installed: Installed) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    code = "import fasa_compile, importlib.metadata as m; print(fasa_compile.__version__, m.version('fasa-compile'))"
    assert installed.run(code).split() == [declared, declared]
    assert re.search(rf"^## \[?{re.escape(declared)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_import_is_light(installed: Installed) -> None:
    code = (
        "import sys, time, torch\n"
        "before = set(sys.modules)\n"
        "start = time.perf_counter()\n"
        "import fasa_compile\n"
        "took = time.perf_counter() - start\n"
        "import json\n"
        "print(json.dumps([took, sorted(set(sys.modules) - before)]))"
    )
    runs = [json.loads(installed.run(code)) for _ in range(3)]
    brought = {name.split(".")[0] for _, names in runs for name in names}
    assert not brought & {"transformers", "triton", "hypothesis"}, brought
    assert "fasa_compile" in brought
    assert min(took for took, _ in runs) <= 0.3


def test_public_names_resolve_and_stay(installed: Installed) -> None:
    # A submodule that is imported becomes an attribute of the package, and may hide a function of the same name.
    code = (
        "import types, importlib, pkgutil, fasa_compile as f\n"
        "for module in pkgutil.iter_modules(f.__path__):\n    importlib.import_module(f'fasa_compile.{module.name}')\n"
        "print([n for _ in range(2) for n in f.__all__ if isinstance(getattr(f, n), types.ModuleType)], len(f.__all__) > 0)"
    )
    assert installed.run(code).strip() == "[] True"
