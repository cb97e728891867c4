"""What every test runs under: fixed seeds, few threads, no compiler state from the test before, and caches of its own."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

# Before torch is imported. Thread pools read these once; compile workers in processes of their own cost more than they
# give on a small machine; a hub that cannot be reached must fail at once and not after a minute of retries.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_THREADS = max(1, min(2, (os.cpu_count() or 1) // _WORKERS))
os.environ.setdefault("OMP_NUM_THREADS", str(_THREADS))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # workers share the cores: spinning at a barrier takes them away
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np  # noqa: E402
import torch  # noqa: E402

try:
    import hypothesis
except ImportError:  # a GPU machine may have pytest and torch only; property tests skip themselves there
    hypothesis = None  # type: ignore[assignment]

if hypothesis is not None:
    from fasa_compile.testing import hypothesis_profiles  # noqa: F401  # registers `ci` and `nightly`

    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped where there is none")
    config.addinivalue_line("markers", "slow: takes more than a few seconds (real weights, long contexts)")
    config.addinivalue_line("markers", "inductor: compiles C++ on the CPU; skipped where there is no working compiler")
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): limit of one test (needs pytest-timeout to act)")
    torch.set_num_threads(_THREADS)
    if not hasattr(config, "workerinput"):
        # One compile cache for the whole run: the workers of pytest-xdist inherit it, and the user's own is never touched.
        root = Path(tempfile.mkdtemp(prefix="fasa-compile-tests-"))
        for variable in _CACHE_VARIABLES:
            os.environ[variable] = str(root / variable.removesuffix("_CACHE_DIR").lower())
        config.add_cleanup(lambda: shutil.rmtree(root, ignore_errors=True))


@cache
def _inductor_problem() -> str:
    """Empty where Inductor can compile for the CPU, else why not, in one line."""
    try:
        torch.compile(lambda x: x * 2 + 1, backend="inductor")(torch.ones(4))
    except Exception as error:  # a missing compiler, missing Python headers, a missing OpenMP runtime
        return f"Inductor cannot compile for the CPU here: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if item.get_closest_marker("inductor") and _inductor_problem():
        pytest.skip(_inductor_problem())


def pytest_sessionfinish() -> None:
    """Under `make coverage`, what was measured is saved at once: pytest-xdist kills a worker that takes more than 10 seconds to exit,
    and coverage saves at the end of that."""
    if "coverage" in sys.modules and (measuring := sys.modules["coverage"].Coverage.current()) is not None:
        measuring.save()


@pytest.fixture(autouse=True)
def isolation() -> Iterator[None]:
    """Seeds before each test; compiled graphs, counters and grad mode of one test are gone before the next."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    grad = torch.is_grad_enabled()
    yield
    torch.set_grad_enabled(grad)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    package = sys.modules.get("fasa_compile")
    if package is not None and hasattr(package, "reset_stats"):
        package.reset_stats()


@pytest.fixture(scope="session")
def smollm2() -> SimpleNamespace:
    """SmolLM2-135M-Instruct in fp32 on the CPU: ``.model`` and ``.tokenizer``. The first use downloads 90 MB.

    One model serves all tests of a worker: put back what you change on it (``forward``, ``config``).
    """
    import smollm2 as helper

    model, tokenizer = helper.load(helper.fetch(), device="cpu")
    return SimpleNamespace(model=model, tokenizer=tokenizer)
