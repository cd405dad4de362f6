"""Which engine library is loaded: one per instruction set, chosen once per process.

`HYBRID_KV_ISA` forces one of them (`baseline`, `avx2`, `avx512`), or `none` for machines without
the engine. Nothing is loaded before the first call.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from ctypes import POINTER, c_char_p, c_int, c_int32, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hybrid_kv.errors import BackendUnavailable, CapacityError, ConfigError

ABI_VERSION = 6
ISAS = ("baseline", "avx2", "avx512")
"""From the least to the most demanding; each runs wherever a later one does."""
_FOLDER = Path(__file__).parent
_INVALID, _NO_MEMORY = 1, 2


class EngineWarning(RuntimeWarning):
    """The native engine does not serve; everything works, more slowly."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """What `doctor` shows: the instruction set in use, or why there is none."""

    isa: str | None
    detail: str


def path_of(isa: str) -> Path:
    """Where the library of an instruction set lies when it was built."""
    return _FOLDER / f"engine_{isa}.so"


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
    """Which library `engine` gives, or why none; loads it on the first call."""
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
    built = [isa for isa in ISAS if path_of(isa).is_file()]
    if not built:
        return None, EngineState(
            None, "no compiler was found at install time; install g++ and install hybrid_kv again"
        )
    try:
        best = load(built[0]).hkv_best_isa().decode()
    except OSError as error:
        return None, EngineState(None, f"{path_of(built[0]).name} cannot be loaded: {error}")
    runnable = [isa for isa in built if ISAS.index(isa) <= ISAS.index(best)]
    if wanted and wanted not in runnable:
        raise ConfigError(
            f"HYBRID_KV_ISA={wanted} cannot run here; this CPU and installation run "
            f"{', '.join(runnable)}"
        )
    isa = wanted or runnable[-1]
    return load(isa), EngineState(isa, f"{isa}, of {', '.join(runnable)}")


@cache
def load(isa: str) -> ctypes.CDLL:
    """The library of one instruction set, with its signatures; does not ask whether it can run.

    Raises:
        OSError: it was not built or cannot be loaded.
        BackendUnavailable: it was built from other sources than these.
    """
    library = ctypes.CDLL(str(path_of(isa)))
    version = library.hkv_abi_version()
    if version != ABI_VERSION:
        raise BackendUnavailable(
            f"{path_of(isa).name} has interface {version}, this package needs {ABI_VERSION}; "
            "install hybrid_kv again"
        )
    for name in ("hkv_isa", "hkv_best_isa", "hkv_last_error"):
        getattr(library, name).restype = c_char_p
    declare(library, "hkv_pool_create", c_int32, POINTER(c_int32), c_int32, POINTER(c_void_p))
    library.hkv_pool_destroy.argtypes = [c_void_p]
    library.hkv_pool_destroy.restype = None
    library.hkv_pool_threads.argtypes = [c_void_p]
    return library


def declare(library: ctypes.CDLL, name: str, *arguments: type) -> None:
    """Declares a function that returns a status."""
    function = getattr(library, name)
    function.argtypes, function.restype = list(arguments), c_int


def check(library: ctypes.CDLL, status: int) -> None:
    """Raises what a status other than 0 stands for, with the engine's sentence.

    Raises:
        ConfigError, CapacityError, RuntimeError
    """
    if status == 0:
        return
    message = library.hkv_last_error().decode(errors="replace")
    if status == _INVALID:
        raise ConfigError(message)
    if status == _NO_MEMORY:
        raise CapacityError(f"the native engine has run {message}; lower the context or top_k")
    raise RuntimeError(f"the native engine failed: {message}")
