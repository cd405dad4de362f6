"""Where a step's time goes, by phase."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

PHASES = ("search", "cold_attention", "resident_attention", "select", "merge", "transfer", "wait")


INDEX_BUILD = "index_build"
"""Not a phase of a decode step: what was waited for index builds, measured beside them."""


class Phases:
    """Seconds per phase since the last reset; host clock, no device synchronisation."""

    def __init__(self) -> None:
        self.reset()

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        begin = perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += perf_counter() - begin

    def reset(self) -> None:
        self.seconds = dict.fromkeys((*PHASES, INDEX_BUILD), 0.0)


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
