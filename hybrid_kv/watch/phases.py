"""Where a step's time goes, by phase."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

PHASES = ("search", "cold_attention", "resident_attention", "select", "merge", "transfer", "wait")


INDEX_BUILD = "index_build"
"""Not a phase of a decode step: what was waited for index builds, measured beside them."""

ATTENTION, FORWARD, BETWEEN = "attention", "forward", "between"
"""What holds the phases: a layer's attention; the model that calls it; the time between two calls
of the model, which only a profile measures."""


class Observer(Protocol):
    """Is told of each piece of work that `Phases` measures."""

    def begin(self, phase: str) -> Any:
        """A piece of work begins; what this returns comes back with its end."""
        ...

    def end(
        self, phase: str, layer_idx: int | None, begin_s: float, end_s: float, mark: Any
    ) -> None:
        """It has ended; times are those of `perf_counter`."""
        ...


class Phases:
    """Seconds per phase since the last reset; host clock, no device synchronisation.

    layer_idx: whose attention is computed. entered: pieces of work measured.
    """

    def __init__(self) -> None:
        self.layer_idx: int | None = None
        self.entered = 0
        self._kind: type[PhaseTimer] = PhaseTimer
        self.observer: Observer | None = None
        self.reset()

    def measure(self, phase: str) -> PhaseTimer:
        """A context whose time is booked under `phase`."""
        return self._kind(self, phase)

    def observe(self, observer: Observer | None) -> None:
        """Tells `observer` of all that is measured from now on; nothing is paid for None."""
        self.observer = observer
        self._kind = PhaseTimer if observer is None else _ObservedTimer

    def reset(self) -> None:
        self.seconds = dict.fromkeys((*PHASES, INDEX_BUILD, ATTENTION, FORWARD, BETWEEN), 0.0)


class PhaseTimer:
    """One piece of work. Steps enter several of them, so it is no generator, which takes longer."""

    __slots__ = ("_begin", "_phase", "_phases")

    def __init__(self, phases: Phases, phase: str) -> None:
        self._phases, self._phase = phases, phase

    def __enter__(self) -> None:
        self._begin = perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._book(perf_counter())

    def _book(self, end: float) -> None:
        phases = self._phases
        phases.seconds[self._phase] += end - self._begin
        phases.entered += 1


class _ObservedTimer(PhaseTimer):
    """A piece of work that somebody is told of."""

    __slots__ = ("_mark", "_observer")

    def __enter__(self) -> None:
        self._observer = self._phases.observer
        self._mark = None if self._observer is None else self._observer.begin(self._phase)
        super().__enter__()

    def _book(self, end: float) -> None:
        super()._book(end)
        if self._observer is not None:
            layer_idx = self._phases.layer_idx
            self._observer.end(self._phase, layer_idx, self._begin, end, self._mark)


def cost_of_measuring(phases: Phases, rounds: int = 20_000) -> float:
    """Seconds that one measured piece of work takes beside the work, on an idle `phases`."""
    before = phases.seconds["merge"], phases.entered
    begin = perf_counter()
    for _ in range(rounds):
        with phases.measure("merge"):
            pass
    cost = (perf_counter() - begin) / rounds
    phases.seconds["merge"], phases.entered = before
    return cost


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
