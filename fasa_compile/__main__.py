"""The command line, ``fasa-compile`` or ``python -m fasa_compile``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run it; says what to install where typer and rich are missing."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as problem:
        sys.exit(f"fasa-compile needs {problem.name}: pip install 'fasa-compile[cli]'")
    from fasa_compile.cli import app

    app()


if __name__ == "__main__":
    main()
