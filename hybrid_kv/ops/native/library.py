"""Library of the engine, one per instruction set and chosen once per process; its worker threads.

`HYBRID_KV_ISA` forces one of them (`baseline`, `avx2`, `avxvnni`, `avx512`), or `none` for machines
without the engine. Nothing is loaded before the first call. What the engine is told can be compared
by the names of its fields.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from ctypes import byref, c_int32, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import finalize

import torch

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
        for field in _told_fields(type(told)):
            found += fields_of(f"{name}.{field}", getattr(told, field))
    elif isinstance(told, ctypes._Pointer):
        found += fields_of(name, told.contents if told else None)
    elif isinstance(told, (ctypes.Array, list)):
        for place, one in enumerate(told):
            found += fields_of(f"{name}[{place}]", one)
    else:
        found.append((name, told))
    return found


@cache
def _told_fields(structure: type[ctypes.Structure]) -> list[str]:
    addresses = ctypes.c_void_p, ctypes._Pointer
    fields = ((name, kind) for name, kind, *_ in structure._fields_)
    return [name for name, kind in fields if name not in _OWN or not issubclass(kind, addresses)]


# Worker threads -----------------------------------------------------------------------------------


class Pool:
    """Spinning worker threads; the calling thread works too, so one thread starts none.

    Args:
        threads: including the caller.
        affinity: CPU numbers that the workers are pinned to in turn; empty leaves them free.

    Raises:
        ConfigError: threads or affinity out of range.
        BackendUnavailable: there is no engine.
    """

    def __init__(self, threads: int, affinity: Sequence[int] = ()) -> None:
        library = engine()
        if library is None:
            raise BackendUnavailable(
                "a pool needs the native engine; run `hybrid-kv doctor` to see why it is absent"
            )
        cpus = (c_int32 * len(affinity))(*affinity) if affinity else None
        handle = c_void_p()
        check(library, library.hkv_pool_create(threads, cpus, len(affinity), byref(handle)))
        self.handle = handle
        self.threads = threads
        self._library = library
        finalize(self, library.hkv_pool_destroy, handle)  # a call that has the pool keeps it alive

    def close(self) -> None:
        """Stops the threads; who still uses the pool works on its own thread from now on."""
        check(self._library, self._library.hkv_pool_close(self.handle))


class _Here(threading.local):
    """State of the calling thread: whether it shares its work with others."""

    is_alone = False
    pool: Pool | None = None  # of its own


here = _Here()


@cache
def default_pool() -> Pool:
    """One pool per process, with `HYBRID_KV_THREADS` threads, or as many as `default_threads`."""
    wanted = os.environ.get("HYBRID_KV_THREADS", "")
    if not wanted:
        return Pool(default_threads())
    if not wanted.isdecimal():
        raise ConfigError(
            f"HYBRID_KV_THREADS must be a number of threads, got '{wanted}'; unset it for one per "
            "core"
        )
    return Pool(int(wanted))


def work_alone() -> None:
    """From now on this thread shares its work with no others: torch's operations run in it alone,
    and `pool_here` gives it no pool.

    A pool runs one loop at a time, so that a long loop of a thread in the background would hold up
    the searches of decoding.
    """
    here.is_alone = True
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Threads that begin later get the number that was set last, by whichever thread.
    restoring = threading.Thread(target=torch.set_num_threads, args=(threads,))
    restoring.start()
    restoring.join()


def work_beside() -> None:
    """From now on this thread shares its work with threads of its own, where there is an engine.

    A pool runs one loop at a time: what is found for one layer would else hold up the attention of
    the layer before it, which is short, so that it gets a quarter of the cores.
    """
    if engine() is not None:
        here.pool = Pool(max(1, default_pool().threads * 3 // 4))


def pool_here() -> Pool | None:
    """The threads that share the calling thread's work: the default pool unless it has its own,
    None for itself alone.
    """
    return None if here.is_alone else here.pool or default_pool()


# Trials: timed choices between the engine and torch -----------------------------------------------


class Trials:
    """How the trials of this process end.

    agree: called with what was tried and how it has ended here; returns the end that counts, where
    several processes are to choose alike.
    """

    def __init__(self) -> None:
        self.agree: Callable[[Hashable, Any], Any] = lambda tried, end: end


trials = Trials()


# How many threads a search may keep busy ----------------------------------------------------------


_SPARED_FROM = 4
"""Cores from which on one is left to the device's driver, to builds and to everybody else."""


def default_threads() -> int:
    """One per core that this process may use, less one where there are four and more.

    The threads of one core share its loads and its memory, which searches are made of.
    """
    cores = num_cores(os.sched_getaffinity(0))
    if (quota := cpu_quota()) is not None:
        cores = min(cores, max(1, int(quota)))
    return cores - 1 if cores >= _SPARED_FROM else cores


def num_cores(cpus: Iterable[int], system: Path = Path("/sys/devices/system/cpu")) -> int:
    """Physical cores of some CPUs; one per CPU where the system does not say."""
    cores = set()
    for cpu in cpus:
        siblings = f"{cpu}"
        with suppress(OSError):
            siblings = (system / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        cores.add(siblings)
    return len(cores)


def cpu_quota(control: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """CPUs' worth of time that a container grants (cgroup v2); None for no limit."""
    try:
        quota, period = control.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
