"""Where a step's time goes, by phase."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType

PHASES = ("search", "cold_attention", "resident_attention", "select", "merge", "transfer", "wait")


INDEX_BUILD = "index_build"
"""Not a phase of a decode step: what was waited for index builds, measured beside them."""


class Phases:
    """Seconds per phase since the last reset; host clock, no device synchronisation."""

    def __init__(self) -> None:
        self.reset()

    def measure(self, phase: str) -> Measured:
        """A context whose time is booked under `phase`."""
        return Measured(self.seconds, phase)

    def reset(self) -> None:
        self.seconds = dict.fromkeys((*PHASES, INDEX_BUILD), 0.0)


class Measured:
    """One piece of work. Steps enter several of them, so it is no generator, which takes longer."""

    __slots__ = ("_begin", "_phase", "_seconds")

    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self._seconds, self._phase = seconds, phase

    def __enter__(self) -> None:
        self._begin = perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._seconds[self._phase] += perf_counter() - self._begin


class WorkClock:
    """Wall time of pieces of work in any threads, those in progress included; each one counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = 0.0
        self._begun: dict[object, float] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        piece = object()
        with self._lock:
            self._begun[piece] = perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._done += perf_counter() - self._begun.pop(piece)

    @property
    def seconds(self) -> float:
        with self._lock:
            now = perf_counter()
            return self._done + sum(now - begin for begin in self._begun.values())
