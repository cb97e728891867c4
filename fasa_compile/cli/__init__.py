"""The commands of ``fasa-compile``, a module each. Each is a thin face of the Python API; torch is imported when a command runs.

Exit codes: 0 done, 1 an error (one line on stderr), 2 wrong usage, 3 the answer is no (nothing would be sparse, a profile does not
fit, two profiles differ, something that a GPU needs is missing).
"""

from fasa_compile.cli.app import app

# Importing a command's module registers it; help lists them in this order.
from fasa_compile.cli import explain, calibrate, profile, doctor, generate, bench, evaluate, report  # isort: skip  # noqa: F401

__all__ = ["app"]
