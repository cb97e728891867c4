"""The command line, ``fasa-compile`` or ``python -m fasa_compile``."""

from __future__ import annotations

import atexit
import sys


def main() -> None:
    """Run it; says what to install where typer and rich are missing."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as problem:
        sys.exit(f"fasa-compile needs {problem.name}: pip install 'fasa-compile[cli]'")
    from fasa_compile.cli import app

    try:
        app()
    finally:
        # A backend that an error kept from being called is a command's own affair, and no news at exit.
        if (backend := sys.modules.get("fasa_compile.backend")) is not None:
            atexit.unregister(backend.warn_unused)


if __name__ == "__main__":
    main()
