"""What all commands share: the application, how errors and warnings are shown, options, and small helpers."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fasa_compile.errors import FasaError, FasaWarning

if TYPE_CHECKING:
    from fasa_compile.profiles.schema import FCProfile

NO = 3  # exit code: the answer is no

app = typer.Typer(
    help="Make long-context language models decode sparsely, and see what happened.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
profile_app = typer.Typer(help="Look at profiles: show, diff, check.", no_args_is_help=True)
app.add_typer(profile_app, name="profile")

MODEL = Annotated[
    str,
    typer.Argument(
        help="A local model folder, a .gguf file, a config.json, or shapes that ship: llama-3.1-8b, smollm2-135m.",
        show_default=False,
    ),
]
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
PROFILE = Annotated[
    str | None, typer.Option("--profile", "-p", help="A profile's file, or the name of one that ships.")
]


def _tokens_or_share(text: str) -> int | float:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise typer.BadParameter(
            f"expected a number of tokens, or a share of the context like 0.05, found {text}"
        ) from None


N_FAC = Annotated[
    float | None,
    typer.Option(
        "--n-fac",
        parser=_tokens_or_share,
        metavar="TOKENS|SHARE",
        help="Tokens attended to per KV head and step, or a share of the context below 1 (the profile's).",
    ),
]
DEVICE = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... (a GPU where there is one)")]
INNER = Annotated[str | None, typer.Option(help="inductor or eager (inductor where it can compile)")]
ANYWAY = Annotated[bool, typer.Option("--any-weights", help="Accept a profile made for other weights.")]


def stdout() -> Console:
    # Piped output has no width of its own; rich would take 80.
    return Console(width=None if sys.stdout.isatty() else 120)


def stderr() -> Console:
    return Console(stderr=True, width=None if sys.stderr.isatty() else 120)


def command(group: typer.Typer, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a command whose errors are one line on stderr and whose warnings are shown as such."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=FutureWarning)
                warnings.filterwarnings("ignore", category=UserWarning)
                warnings.filterwarnings("always", category=FasaWarning)
                warnings.showwarning = _show_warning
                try:
                    return function(*arguments, **keywords)
                except (FasaError, OSError) as problem:
                    stderr().print(f"[bold red]error:[/] {escape(str(problem))}", highlight=False, soft_wrap=True)
                    raise typer.Exit(1) from None
                except ImportError as problem:
                    stderr().print(f"[bold red]error:[/] {problem.name or problem} is not installed", highlight=False)
                    raise typer.Exit(1) from None
                except KeyboardInterrupt:
                    raise typer.Exit(130) from None

        group.command(name)(run)
        return run

    return wrap


def _show_warning(message: Any, category: Any, *_: Any, **__: Any) -> None:
    if issubclass(category, FasaWarning):
        stderr().print(f"[yellow]warning:[/] {escape(str(message))}", highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


@contextlib.contextmanager
def busy(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr while something is done; the value changes what it says."""
    with stderr().status(text) as status:
        yield status.update


def pick_device(given: str | None) -> str:
    import torch

    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if given.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter(f"--device {given}: torch sees no CUDA device (fasa-compile doctor says more)")
    return given


def pick_inner(given: str | None) -> Any:
    if given is None:
        from fasa_compile.doctor import inductor_problem

        problem = inductor_problem()
        if problem:
            stderr().print(f"[yellow]note:[/] graphs run uncompiled: {escape(problem)}", highlight=False)
        return "eager" if problem else "inductor"
    if given not in ("inductor", "eager"):
        raise typer.BadParameter(f"--inner: expected inductor or eager, found {given}")
    return given


def read_text(path: Path) -> str:
    from fasa_compile.errors import ModelError

    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise ModelError(f"{path}: expected a text in UTF-8 ({problem})") from None


def writes(*endings: str) -> Callable[[Path | None], Path | None]:
    """An option's callback: a file that could not be written is refused before the work whose result it would hold."""

    def check(path: Path | None) -> Path | None:
        if path is None:
            return None
        if endings and path.suffix not in endings:
            raise typer.BadParameter(f"expected a name ending in {' or '.join(endings)}, found {path.name}")
        if not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.parent}")
        if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise typer.BadParameter(f"{path} cannot be written")
        return path

    return check


def numbers(text: str, option: str) -> tuple[int, ...]:
    """``4k,32768``, given for ``option``, as tokens, ascending."""
    out = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*([kK]?)\s*", part)
        if not match or not int(match[1]):
            raise typer.BadParameter(f"{option}: expected numbers of tokens like 4k,32k, found {part!r}")
        out.append(int(match[1]) * (1024 if match[2] else 1))
    return tuple(sorted(set(out)))


def read_profile(name: str | None) -> FCProfile | None:
    from fasa_compile.profiles.files import load_profile

    return None if name is None else load_profile(name)


def need_tokenizer(tokenizer: Any, model: str) -> Any:
    if tokenizer is None:
        from fasa_compile.errors import ModelError

        raise ModelError(f"{model}: found no tokenizer beside the model, and text needs one (tokenizer.json)")
    return tokenizer


def budget_options(n_fac: float | None, n_sink: int | None = None, n_recent: int | None = None) -> dict[str, Any]:
    given = {"n_fac": n_fac, "n_sink": n_sink, "n_recent": n_recent}
    return {name: value for name, value in given.items() if value is not None}


def plain_table(columns: Sequence[str], right: Sequence[str] = ()) -> Table:
    """A borderless table. The first column gives way where the terminal is narrow, the others do not."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=i > 0,
            overflow="fold" if i == 0 else "ellipsis",
            min_width=8 if i == 0 else None,
        )
    return table


def short(n: float) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e8 else f"{n / 1e6:.2f} M"
