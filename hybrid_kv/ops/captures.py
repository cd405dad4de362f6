"""Captures of CUDA graphs exclude whatever another thread may tell the device meanwhile.

A capture of one thread is ended by a wait in any other, and page-locking host memory is one: so
index builds and locks wait for a capture, no capture begins beside them, and memory that is freed
while one is under way is unlocked behind it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


class CaptureBusyError(RuntimeError):
    """No capture can begin now: others use the device. Try again later."""


class _Turns:
    """Turns of using the devices of this process: any number of users, or one capture."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._users = 0
        self._capturing: int | None = None  # the thread whose capture is under way
        self._after: list[Callable[[], None]] = []

    @contextmanager
    def used(self) -> Iterator[None]:
        with self._changed:
            if self._capturing == threading.get_ident():
                raise RuntimeError("operation not permitted while this thread captures a graph")
            self._changed.wait_for(lambda: self._capturing is None)
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1

    @contextmanager
    def captured(self) -> Iterator[None]:
        with self._changed:
            if self._users or self._capturing is not None:
                raise CaptureBusyError("another thread uses the device")
            self._capturing = threading.get_ident()
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()
            with self._changed:
                self._capturing = None
                waiting, self._after = self._after, []
                self._changed.notify_all()
            for work in waiting:
                work()

    def after(self, work: Callable[[], None]) -> None:
        with self._changed:
            if self._capturing is not None:
                self._after.append(work)
                return
        work()


_turns = _Turns()


def device_in_use() -> AbstractContextManager[None]:
    """A block of work that no capture may run beside; waits for one that is under way.

    Raises:
        RuntimeError: this thread's own capture is under way.
    """
    return _turns.used()


def captures() -> AbstractContextManager[None]:
    """A block in which a graph is captured; Python's collector is paused in all threads, since it
    may free memory that waits for the device.

    Raises:
        CaptureBusyError: somebody uses the device, or captures.
    """
    return _turns.captured()


def after_captures(work: Callable[[], None]) -> None:
    """Does something that waits for the device now, or when the capture under way has ended."""
    _turns.after(work)
