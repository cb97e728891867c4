"""Breaks the package in the ways of ``mutants.py``, one at a time, and shows which test notices.

Each break is made in a copy of the package that is laid out in links, never in place. Its tests run in a child that is forked
from a process with torch and transformers imported, so that a break costs seconds. Prints the breaks that nothing noticed, and
exits with 1 if there are any.

    python tests/mutation/run_mutants.py                    all of them
    python tests/mutation/run_mutants.py --only mask,int32  those whose names hold one of these words
    python tests/mutation/run_mutants.py --wider            tries more tests on a break before it counts as not noticed
    python tests/mutation/run_mutants.py --new --for 300    those without a result for the files as they are, for about 300 seconds
    python tests/mutation/run_mutants.py --table docs/mutations.md  writes the table from the results, and runs nothing
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import platform
import select
import shutil
import signal
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.json"
ROOMS = ("patterns", "profiles", "triton_kernels")
# A break may make a test run, or wait, for ever.
LIMIT_OF_ONE = 120  # seconds of processor time for one test, so that a busy machine does not matter
WAIT_OF_ONE = 600  # seconds by the clock for one test: it waits for something that does not come
LIMIT = 1800  # seconds by the clock for the tests of one break
CRASH = "a crash"

sys.path.insert(0, str(HERE))
from mutants import MUTANTS, WIDER, Mutant  # noqa: E402

#: Imported once, before any break: nothing of the package itself.
IMPORTS = (
    "numpy", "sympy", "safetensors.torch", "torch", "torch._dynamo", "torch.fx.experimental.symbolic_shapes",
    "torch._functorch.aot_autograd", "torch._inductor.compile_fx", "pytest", "hypothesis", "transformers",
    "transformers.models.llama.modeling_llama", "transformers.cache_utils", "transformers.generation.utils",
)  # fmt: skip


def mutated(mutant: Mutant) -> str:
    """The mutant's file with its edit. Raises ``ValueError`` where the edit does not apply exactly once."""
    text = (ROOT / mutant.file).read_text()
    if (times := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.name!r}: {mutant.file} holds {mutant.old!r} {times} times, not once")
    changed = text.replace(mutant.old, mutant.new)
    compile(changed, mutant.file, "exec")
    return changed


def lay_out(place: Path, mutant: Mutant | None) -> None:
    """The package as the wheel has it, in links, under ``place``; the mutant's file is a copy with its edit."""
    package = place / "fasa_compile"
    package.mkdir(parents=True)
    for file in (ROOT / "fasa_compile").iterdir():
        if file.name != "__pycache__":
            (package / file.name).symlink_to(file)
    for room in ROOMS:
        (package / room).mkdir()
        for file in (ROOT / room).iterdir():
            if file.name != "__pycache__":
                (package / room / file.name).symlink_to(file)
    if mutant is not None:
        changed = place / (mutant.file if mutant.room == "fasa_compile" else f"fasa_compile/{mutant.file}")
        changed.unlink()
        changed.write_text(mutated(mutant))


class Noted:
    """A pytest plugin: the first test that failed, be it for using more than ``LIMIT_OF_ONE`` seconds of processor time."""

    failed = ""

    def pytest_runtest_setup(self) -> None:
        signal.signal(signal.SIGPROF, self.too_long)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_OF_ONE)

    def pytest_runtest_teardown(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def too_long(self, *_: Any) -> None:
        import pytest

        # What it raises is no Exception, which the package would answer by going dense.
        pytest.fail(f"more than {LIMIT_OF_ONE} s of processor time")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"import of {report.nodeid}"


def run_tests(place: Path, tests: tuple[str, ...], log: Path) -> tuple[int, str, float]:
    """(pytest's exit code or 0 past the limit, the first test that failed, CPU seconds), run in a fork of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        code, noted = 3, Noted()
        try:
            os.chdir(ROOT)
            sys.path.insert(0, str(place))
            os.environ["PYTHONPATH"] = str(place)
            sys.dont_write_bytecode = True
            import pytest

            options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-m", "not gpu and not slow"]
            options += ["--timeout", str(WAIT_OF_ONE)]
            code = int(pytest.main([*options, *(f"tests/{t}" for t in tests)], plugins=[noted]))
        finally:
            os.write(write, json.dumps([code, noted.failed]).encode())
            os._exit(0)
    os.close(write)
    _children.append(child)
    ready, _, _ = select.select([read], [], [], LIMIT)
    answer = os.read(read, 1 << 16) if ready else b""
    os.close(read)
    if not ready:
        os.killpg(child, signal.SIGKILL)
    _, _, usage = os.wait4(child, 0)
    _children.remove(child)
    code, failed = json.loads(answer) if answer else ((0, "") if not ready else (4, CRASH))
    return code, failed.removeprefix("tests/"), usage.ru_utime + usage.ru_stime


_children: list[int] = []


def stop(*_: Any) -> None:
    """What SIGTERM does: no child is left behind."""
    for child in _children:
        os.killpg(child, signal.SIGTERM)
    os._exit(2)


def try_mutant(mutant: Mutant, widely: bool, passing: set[str], log: Path) -> dict[str, Any]:
    """What became of one break. ``widely``: try more tests than those that should notice it. ``passing``: tests that are known to
    pass without one."""
    total, failed = 0.0, ""
    wider = WIDER[mutant.room] if widely and not mutant.interpreted else ()
    for tests in (mutant.tests, wider) if wider else (mutant.tests,):
        with tempfile.TemporaryDirectory() as place:
            lay_out(Path(place), mutant)
            code, failed, seconds = run_tests(Path(place), tests, log)
        total += seconds
        if code != 0 and not failed:
            raise SystemExit(f"{mutant.name!r}: pytest ended with {code}\n{log.read_text()[-3000:]}")
        if code != 0:
            break
    again = (failed,) if "::" in failed else tests if failed == CRASH else ()
    if again and not passing.issuperset(again):
        with tempfile.TemporaryDirectory() as place:
            lay_out(Path(place), None)
            code, _, _ = run_tests(Path(place), again, log)
        if code != 0:
            raise SystemExit(
                f"{mutant.name!r}: {', '.join(again)} fails without the break too ({code})\n{log.read_text()[-3000:]}"
            )
        passing.update(again)
    result = {"name": mutant.name, "file": mutant.file, "noticed_by": failed, "seconds": round(total, 1)}
    return result | {"digest": digest(mutant, failed)}


def digest(mutant: Mutant, noticed_by: str) -> str:
    """Of the broken file and of that of the test that noticed it: a result holds while neither changes."""
    test = ROOT / "tests" / (noticed_by if "::" in noticed_by else mutant.tests[0]).split("::")[0]
    text = mutated(mutant) + (test.read_text() if test.is_file() else "")
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def changed_since(mutant: Mutant, result: dict[str, Any]) -> bool:
    return bool(result.get("digest") != digest(mutant, result["noticed_by"]))


def zygote(mutants: list[Mutant], interpreted: bool, widely: bool, until: float) -> bool:
    """Tries these breaks in forks of this process, in which the libraries are imported; whether all were noticed."""
    signal.signal(signal.SIGTERM, stop)
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
    for name in IMPORTS:
        importlib.import_module(name)
    assert not [m for m in sys.modules if m.split(".")[0] == "fasa_compile"]
    noticed, passing = True, set[str]()
    with tempfile.TemporaryDirectory() as scratch:
        for mutant in mutants:
            if time.monotonic() > until:
                break
            result = try_mutant(mutant, widely, passing, Path(scratch) / "log")
            print(
                f"{result['seconds']:6.1f} s  {mutant.file}: {mutant.name}: {result['noticed_by'] or 'SURVIVED'}",
                flush=True,
            )
            record(result)
            noticed &= bool(result["noticed_by"])
    return noticed


def record(result: dict[str, Any]) -> None:
    """Puts one result among those of the file, in the order of ``MUTANTS``."""
    import torch

    held = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"mutants": []}
    rows = {(r["file"], r["name"]): r for r in held["mutants"]} | {(result["file"], result["name"]): result}
    ordered = [rows[m.file, m.name] for m in MUTANTS if (m.file, m.name) in rows]
    noticed = sum(bool(r["noticed_by"]) for r in ordered)
    held = {
        "torch": torch.__version__, "python": platform.python_version(), "mutants_in_all": len(MUTANTS), "run": len(ordered),
        "noticed": noticed, "seconds": round(sum(r["seconds"] for r in ordered), 1), "mutants": ordered,
    }  # fmt: skip
    new = RESULTS.with_suffix(".new")
    new.write_text(json.dumps(held, indent=1) + "\n")
    new.replace(RESULTS)


def table(path: Path) -> None:
    """The results as a page of the docs."""
    held = json.loads(RESULTS.read_text())
    left = len(MUTANTS) - held["run"]
    by_name = {(m.file, m.name): m for m in MUTANTS}
    older = sum(changed_since(by_name[r["file"], r["name"]], r) for r in held["mutants"])
    lines = [
        "# What breaks, and which test notices",
        "",
        f"{len(MUTANTS)} ways to break the package, one small edit each (`tests/mutation/mutants.py`), and the first test that fails for it. "
        f"{held['run']} were run: {held['noticed']} are noticed, {held['run'] - held['noticed']} are not ({held['seconds']:.0f} s of CPU time, torch {held['torch']})."
        + (f" {left} wait for their first run." if left else "")
        + (
            f" For {older} the broken file or the test's file has changed since: `--new` runs them again."
            if older
            else ""
        ),
        "",
        "`make mutants` runs them all and writes this page; a test of the bounded suite checks that every edit still applies to the sources.",
        "Edits that change nothing anybody can see are not listed: where two checks refuse the same thing, either may go.",
        "",
        "| file | break | noticed by | s |",
        "|---|---|---|---|",
    ]
    for r in held["mutants"]:
        by = f"`{r['noticed_by'].split('[')[0]}`" if r["noticed_by"] else "**nothing**"
        if r["noticed_by"] == CRASH:
            by = f"a crash in `{by_name[r['file'], r['name']].tests[0]}`"
        lines.append(f"| `{r['file']}` | {r['name']} | {by} | {r['seconds']:.0f} |")
    path.write_text("\n".join(lines) + "\n")


def main() -> int:
    parse = argparse.ArgumentParser()
    parse.add_argument(
        "--only", default="", help="words, with commas between them: breaks whose name or file holds one"
    )
    parse.add_argument(
        "--for", dest="limit", type=float, default=1e9, help="seconds after which no other break is begun"
    )
    parse.add_argument(
        "--wider", action="store_true", help="where the mapped tests notice nothing, run those of the whole room"
    )
    parse.add_argument(
        "--new", action="store_true", help="only breaks that nothing noticed yet, with these files and tests"
    )
    parse.add_argument("--table", type=Path, help="write the table of the results here, and run nothing")
    given = parse.parse_args()
    if given.table:
        table(given.table)
        return 0
    words = [w for w in given.only.split(",") if w]
    chosen = [m for m in MUTANTS if not words or any(w in f"{m.file}: {m.name}" for w in words)]
    held: dict[tuple[str, str], dict[str, Any]] = {}
    if given.new and RESULTS.exists():
        held = {(r["file"], r["name"]): r for r in json.loads(RESULTS.read_text())["mutants"] if r["noticed_by"]}
        chosen = [m for m in chosen if not (r := held.get((m.file, m.name))) or changed_since(m, r)]
    for mutant in chosen:
        mutated(mutant)
    sys.path[:] = [p for p in sys.path if not (Path(p) / "fasa_compile").is_dir()]
    shutil.rmtree(ROOT / "tests" / "__pycache__", ignore_errors=True)
    signal.signal(signal.SIGTERM, stop)
    until, code = time.monotonic() + given.limit, 0
    for older, interpreted in product((False, True), (False, True)):  # first those that were never run
        some = [m for m in chosen if m.interpreted == interpreted and ((m.file, m.name) in held) == older]
        if not some or time.monotonic() > until:
            continue
        child = os.fork()
        if child == 0:
            mine = 2
            try:
                os.setsid()
                mine = int(not zygote(some, interpreted, given.wider, until))
            except SystemExit as problem:
                print(problem, file=sys.stderr)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(mine)
        _children.append(child)
        code = max(code, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        _children.remove(child)
    return code


if __name__ == "__main__":
    sys.exit(main())
