"""Typed errors; every message is one sentence: name, expected, got, way out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class HybridKVError(Exception):
    """Base class of every error this package raises on purpose.

    `exit_code` is what the command line returns: 2 for a user's mistake, 1 for a failure.
    """

    exit_code = 1


class ConfigError(HybridKVError, ValueError):
    """A setting, argument or name is wrong."""

    exit_code = 2


class ShapeError(HybridKVError, ValueError):
    """Tensors do not fit together."""


class NonFiniteError(HybridKVError, ValueError):
    """Keys or values hold NaN or infinity."""


class CapacityError(HybridKVError, MemoryError):
    """The context does not fit into the memory that is free."""

    exit_code = 2


class DeviceMemoryError(CapacityError):
    """The memory of a GPU ran out; what was kept before is still there."""

    exit_code = 1


class UnsupportedModelError(HybridKVError, NotImplementedError):
    """The model's attention cannot be served by a tiered KV cache."""

    exit_code = 2


class ModelNotFoundError(HybridKVError, OSError):
    """The model folder or id cannot be read."""

    exit_code = 2


class WriteError(HybridKVError, OSError):
    """A file could not be written; what was there before still is."""


class FileFormatError(HybridKVError, ValueError):
    """A file is damaged, foreign, or of another version."""

    exit_code = 2


class BackendUnavailable(HybridKVError, RuntimeError):
    """A back end was asked for by name and cannot serve here."""

    exit_code = 2


class AuditError(HybridKVError, RuntimeError):
    """The audit found a worse approximation than the settings allow."""


class RecallWarning(RuntimeWarning):
    """The audit found a worse approximation than the settings allow; decoding goes on."""


class BackendWarning(RuntimeWarning):
    """A device is served by plain torch; everything works, more slowly."""


class IndexBuildWarning(RuntimeWarning):
    """An index could not be built; everything works, more slowly."""


class PinnedMemoryWarning(RuntimeWarning):
    """Host memory could not be page-locked; everything works, with slower transfers."""


class IntegrityError(HybridKVError, AssertionError):
    """The cache broke one of its own invariants."""


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """An error for `name` that lists the known names, the nearest one first."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return ConfigError(f"unknown {what} '{name}'; {hint}known: {', '.join(names) or '(none)'}")
