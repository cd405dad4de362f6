"""The engine's worker threads, and how many there are."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ctypes import byref, c_int32, c_void_p
from functools import cache
from pathlib import Path
from weakref import finalize

import torch

from hybrid_kv.errors import BackendUnavailable, ConfigError
from hybrid_kv.ops.native.library import check, engine


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
