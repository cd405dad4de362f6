"""Library of the engine: one per instruction set, chosen once per process.

`HYBRID_KV_ISA` forces one of them (`baseline`, `avx2`, `avxvnni`, `avx512`), or `none` for machines
without the engine. Nothing is loaded before the first call. What the engine is told can be compared
by the names of its fields.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hybrid_kv.errors import BackendUnavailable, CapacityError, ConfigError, NonFiniteError
from hybrid_kv.ops.native.bindings import ABI_VERSION, FUNCTIONS, INVALID, NO_MEMORY, NOT_FINITE

ISAS = ("baseline", "avx2", "avxvnni", "avx512")
"""From the slowest to the fastest; which of them a CPU runs, only the CPU can say."""
_ANYWHERE = "baseline"
_FOLDER = Path(__file__).parent


class EngineWarning(RuntimeWarning):
    """The native engine does not serve; everything works, more slowly."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """Engine as `doctor` shows it: the instruction set in use, or why there is none."""

    isa: str | None
    detail: str


def path_of(isa: str) -> Path:
    """Path of the library of an instruction set, built or not."""
    return _FOLDER / f"engine_{isa}.so"


def built() -> list[str]:
    """The instruction sets that have a library, the fastest last; few CPUs run all of them."""
    return [isa for isa in ISAS if path_of(isa).is_file()]


def runnable() -> list[str]:
    """Instruction sets of `built` that this CPU runs.

    Raises:
        OSError, BackendUnavailable: see `load`.
    """
    return [isa for isa in built() if isa in _known_to_cpu()]


def _known_to_cpu() -> list[str]:
    # A library for another CPU may not get as far as the answer.
    if not path_of(_ANYWHERE).is_file():
        return []
    names: str = load(_ANYWHERE).hkv_runnable_isas().decode()
    return names.split()


@cache
def engine() -> ctypes.CDLL | None:
    """The library in use, or None; the reason is in `engine_state`, and warned about once.

    Raises:
        ConfigError: HYBRID_KV_ISA names an instruction set that does not exist or cannot run here.
    """
    library, state = _choose(os.environ.get("HYBRID_KV_ISA", ""))
    if library is None and state.isa is None and os.environ.get("HYBRID_KV_ISA") != "none":
        warnings.warn(
            f"hybrid_kv runs without its native engine ({state.detail}); numba and torch serve, "
            "several times slower",
            EngineWarning,
            stacklevel=2,
        )
    return library


def engine_state() -> EngineState:
    """State of the engine in use, or why there is none; loads it on the first call."""
    return _choose(os.environ.get("HYBRID_KV_ISA", ""))[1]


@cache
def _choose(wanted: str) -> tuple[ctypes.CDLL | None, EngineState]:
    if wanted == "none":
        return None, EngineState(None, "switched off by HYBRID_KV_ISA=none")
    if wanted and wanted not in ISAS:
        raise ConfigError(
            f"HYBRID_KV_ISA must be one of none, {', '.join(ISAS)}, got '{wanted}'; unset it to "
            "let the CPU decide"
        )
    if not path_of(_ANYWHERE).is_file():
        return None, EngineState(
            None, "no compiler was found at install time; install g++ and install hybrid_kv again"
        )
    try:
        names = runnable()
    except OSError as error:
        return None, EngineState(None, f"{path_of(_ANYWHERE).name} cannot be loaded: {error}")
    if wanted and wanted not in names:
        raise ConfigError(
            f"HYBRID_KV_ISA={wanted} cannot run here; this CPU and installation run "
            f"{', '.join(names)}"
        )
    isa = wanted or names[-1]
    return load(isa), EngineState(isa, f"{isa}, of {', '.join(names)}{_what_is_lost(names)}")


def _what_is_lost(names: list[str]) -> str:
    lost = [isa for isa in _known_to_cpu() if isa not in names]
    return f"; {', '.join(lost)} would run too, but the compiler could not build it" if lost else ""


@cache
def load(isa: str) -> ctypes.CDLL:
    """The library of one instruction set, with its signatures.

    Raises:
        OSError: it was not built or cannot be loaded.
        BackendUnavailable: it was built from other sources than these, or for other CPUs.
    """
    if isa != _ANYWHERE and isa in built() and isa not in runnable():
        raise BackendUnavailable(
            f"{path_of(isa).name} cannot run here; this CPU and installation run "
            f"{', '.join(runnable())}"
        )
    library = ctypes.CDLL(str(path_of(isa)))
    version = library.hkv_abi_version()
    if version != ABI_VERSION:
        raise BackendUnavailable(
            f"{path_of(isa).name} has interface {version}, this package needs {ABI_VERSION}; "
            "install hybrid_kv again"
        )
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def find_engine(given: ctypes.CDLL | None) -> ctypes.CDLL:
    """`given`, or the engine in use.

    Raises:
        BackendUnavailable: there is none.
    """
    found = given or engine()
    if found is None:
        raise BackendUnavailable(
            "quantised rows and native scans need the engine; use hybrid_kv.ops.portable instead"
        )
    return found


def check(library: ctypes.CDLL, status: int) -> None:
    """Raises what a status other than 0 stands for, with the engine's sentence.

    Raises:
        ConfigError, CapacityError, NonFiniteError, RuntimeError
    """
    if status == 0:
        return
    message = library.hkv_last_error().decode(errors="replace")
    if status == INVALID:
        raise ConfigError(message)
    if status == NO_MEMORY:
        raise CapacityError(f"the native engine has run {message}; lower the context or top_k")
    if status == NOT_FINITE:
        raise NonFiniteError(message)
    raise RuntimeError(f"the native engine failed: {message}")


_OWN = frozenset({"extents", "whole", "searches", "heads", "head", "beams", "walks"})
"""Addresses of descriptors: each plan has its own, wherever they lie."""


def fields_of(name: str, told: object) -> list[tuple[str, object]]:
    """Fields of a structure, or of each of several, and of those that it points at, by name."""
    found: list[tuple[str, object]] = []
    if isinstance(told, ctypes.Structure):
        for field, kind, *_ in told._fields_:
            if field not in _OWN or not issubclass(kind, (ctypes.c_void_p, ctypes._Pointer)):
                found += fields_of(f"{name}.{field}", getattr(told, field))
    elif isinstance(told, ctypes._Pointer):
        found += fields_of(name, told.contents if told else None)
    elif isinstance(told, (ctypes.Array, list)):
        for place, one in enumerate(told):
            found += fields_of(f"{name}[{place}]", one)
    else:
        found.append((name, told))
    return found
