"""Searches in the caller's thread, builds on threads of low priority: machines without a GPU."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from queue import Empty, SimpleQueue
from typing import TypeAlias

from hybrid_kv.errors import ConfigError
from hybrid_kv.ops.native.workers import work_alone
from hybrid_kv.store.index_builder import run_into
from hybrid_kv.transfer.executor import SyncExecutor

_NICENESS = 10
"""Added to the process's own."""
_NICEST = 19
_CPUS_PER_THREAD = 4

_Job: TypeAlias = tuple[list[Callable[[], None]], "Future[None]"]
"""Work in a list, which is emptied when the work is cancelled or begins: a job that waits for its
turn in vain shall not keep its keys."""


class ThreadExecutor(SyncExecutor):
    """Runs work in the background beside the caller, in the order in which it came.

    Threads start with the first work. They end with `close`, with the executor, or with the
    process, which waits for the work that has begun. They share nothing with the threads that
    decoding uses, so that no step waits for them.

    Args:
        threads: that work in the background; None for `build_threads()`.

    Raises:
        ConfigError: HYBRID_KV_BUILD_THREADS is no number of threads.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._crew = _Crew(build_threads() if threads is None else threads)
        # Not at exit: `_end_at_exit` waits for the threads too, which a collection must not.
        weakref.finalize(self, self._crew.end).atexit = False

    def background(self, work: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        held = [work]
        future.add_done_callback(lambda _: held.clear())
        self._crew.take((held, future))
        return future

    def close(self) -> None:
        """See `Executor.close`; further work starts new threads."""
        self._crew.end()
        self._crew.join()


class _Crew:
    """Threads that take jobs in turn. It does not know its executor, which it may outlive."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def take(self, job: _Job) -> None:
        self._jobs.put(job)
        if len(self._threads) == self._size:
            return
        name = f"hybrid-kv-build-{len(self._threads)}"
        # Daemons, because the process would else wait for them before it tells them to end.
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        _at_work.add(self)
        _wait_at_exit()
        thread.start()

    def end(self) -> None:
        """Cancels the jobs that have not begun; the threads end after those that have."""
        with suppress(Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job[1].cancel()
        for _ in self._threads:
            self._jobs.put(None)

    def join(self) -> None:
        """Waits for the threads that were told to end."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        _at_work.discard(self)

    def _work(self) -> None:
        _be_nice()
        work_alone()
        while (job := self._jobs.get()) is not None:
            held, future = job
            if future.set_running_or_notify_cancel():
                run_into(future, held.pop(), BaseException)
            del job, held, future  # nobody shall keep its keys while this thread waits


_at_work: set[_Crew] = set()


@cache
def _wait_at_exit() -> None:
    # Finalizers run in the reverse order of their making: builds are cancelled before this one.
    weakref.finalize(_Crew, _end_at_exit)


def _end_at_exit() -> None:
    for crew in list(_at_work):
        crew.end()
        crew.join()


def build_threads() -> int:
    """`HYBRID_KV_BUILD_THREADS`, or one per four CPUs that the process may use, at least one.

    Raises:
        ConfigError: it is no number of threads.
    """
    wanted = os.environ.get("HYBRID_KV_BUILD_THREADS", "")
    if not wanted:
        return max(1, len(os.sched_getaffinity(0)) // _CPUS_PER_THREAD)
    if not wanted.isdecimal() or not 1 <= int(wanted) <= 1024:
        raise ConfigError(
            f"HYBRID_KV_BUILD_THREADS must be a number of threads, 1..1024, got '{wanted}'; unset "
            "it for one per four CPUs"
        )
    return int(wanted)


def _be_nice() -> None:
    """Decoding goes first. Only Linux has priorities by thread."""
    if sys.platform == "linux":
        with suppress(OSError):
            thread = threading.get_native_id()
            nicer = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, min(nicer, _NICEST))
