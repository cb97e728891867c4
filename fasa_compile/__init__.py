"""fasa_compile: a torch.compile backend that makes RoPE language models decode sparsely (FASA, arXiv 2602.03152)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fasa_compile.counters import reset_stats, stats
from fasa_compile.errors import (
    BudgetError,
    CalibrationError,
    FasaError,
    FasaWarning,
    ModelError,
    NoSitesError,
    OffloadError,
    ProfileError,
)

if TYPE_CHECKING:
    from fasa_compile.backend import FasaBackend, explain, fasa_backend
    from fasa_compile.calibration import calibrate
    from fasa_compile.generation import generate
    from fasa_compile.offload import offloaded_cache, staged
    from fasa_compile.placement import traceable_device_map
    from fasa_compile.profiles.files import load_profile
    from fasa_compile.profiles.schema import FCProfile
    from fasa_compile.report import Report
    from fasa_compile.sequence import SequenceShard
    from fasa_compile.sequence_cache import SequenceShardedCache
    from fasa_compile.static_cache import FasaStaticCache

__version__ = "0.1.0"

_LAZY = {
    "FasaBackend": "fasa_compile.backend",
    "explain": "fasa_compile.backend",
    "fasa_backend": "fasa_compile.backend",
    "calibrate": "fasa_compile.calibration",
    "generate": "fasa_compile.generation",
    "offloaded_cache": "fasa_compile.offload",
    "staged": "fasa_compile.offload",
    "traceable_device_map": "fasa_compile.placement",
    "FasaStaticCache": "fasa_compile.static_cache",
    "FCProfile": "fasa_compile.profiles.schema",
    "load_profile": "fasa_compile.profiles.files",
    "Report": "fasa_compile.report",
    "SequenceShard": "fasa_compile.sequence",
    "SequenceShardedCache": "fasa_compile.sequence_cache",
}

__all__ = [
    "BudgetError",
    "CalibrationError",
    "FCProfile",
    "FasaBackend",
    "FasaError",
    "FasaStaticCache",
    "FasaWarning",
    "ModelError",
    "NoSitesError",
    "OffloadError",
    "ProfileError",
    "Report",
    "SequenceShard",
    "SequenceShardedCache",
    "calibrate",
    "explain",
    "fasa_backend",
    "generate",
    "load_profile",
    "offloaded_cache",
    "reset_stats",
    "staged",
    "stats",
    "traceable_device_map",
]


def __getattr__(name: str) -> Any:
    # The heavy parts load on first use: `import fasa_compile` stays cheap where only the errors or the version are wanted.
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
