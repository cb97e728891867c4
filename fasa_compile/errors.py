"""Every error this package raises on purpose. Each message names the thing, what was expected, what was found, what to do."""

from __future__ import annotations


class FasaError(Exception):
    """Base class of the errors of this package."""


class ProfileError(FasaError, ValueError):
    """A profile is malformed, too new, or does not belong to the model it was used with."""


class BudgetError(FasaError, ValueError):
    """A token budget is impossible (zero, negative, not an integer, or smaller than its forced tokens)."""


class NoSitesError(FasaError, RuntimeError):
    """``strict=True`` and a decode graph had no attention site that could be rewritten."""


class CalibrationError(FasaError, RuntimeError):
    """Calibration data did not reach every layer, or held values no statistic can be made of."""


class ModelError(FasaError, RuntimeError):
    """A model's files are not where they were said to be, or cannot be read, traced or run."""


class OffloadError(FasaError, RuntimeError):
    """Memory for a KV cache on the host, or for its packed FC cache and hot buffer on the GPU, is not there or cannot be mapped."""


class FasaWarning(UserWarning):
    """The package fell back to dense attention, or was asked for something that has no effect."""
