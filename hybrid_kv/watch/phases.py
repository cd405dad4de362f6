"""Time of a step by phase."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Protocol

PHASES = ("search", "cold_attention", "resident_attention", "select", "merge", "transfer", "wait")


INDEX_BUILD = "index_build"
"""Not a phase of a decode step: what was waited for index builds, measured beside them."""

ATTENTION, FORWARD, BETWEEN = "attention", "forward", "between"
"""Spans that hold the phases: a layer's attention; the model that calls it; the time between two
calls of the model, which only a profile measures."""


class Observer(Protocol):
    """Is told of each piece of work that `Phases` measures."""

    def begin(self, phase: str | None) -> Any:
        """A piece of work begins, of a phase that may be told at its end only; what this returns
        comes back with the end.
        """
        ...

    def end(
        self, phase: str, layer_idx: int | None, begin_s: float, end_s: float, mark: Any
    ) -> None:
        """It has ended; times are those of `perf_counter`."""
        ...


class _Begun(NamedTuple):
    """A moment of which somebody is told."""

    observer: Observer
    mark: Any
    begin_s: float


class Phases:
    """Seconds per phase since the last reset; host clock, no device synchronisation.

    A decode step enters several pieces of work in each layer, so they cost one call:

        begin = phases.now()
        ...
        phases.book("search", begin)

    layer_idx: whose attention is computed. entered: pieces of work measured.
    now: the moment at which a piece of work begins, for `book`.
    """

    now: Callable[[], Any]

    def __init__(self) -> None:
        self.layer_idx: int | None = None
        self.entered = 0
        self.observe(None)
        self.reset()

    def book(self, phase: str, begin: Any) -> None:
        """A piece of work that began at `begin` has ended; it belongs to a phase."""
        end_s = perf_counter()
        begin_s = begin if type(begin) is not _Begun else begin.begin_s
        self.seconds[phase] += end_s - begin_s
        self.entered += 1
        if type(begin) is _Begun:
            begin.observer.end(phase, self.layer_idx, begin_s, end_s, begin.mark)

    def book_parts(self, begin: Any, parts: Sequence[tuple[str, float]]) -> None:
        """Pieces of work of so many seconds each that followed each other, from `begin` on.

        For what measures itself, and was entered by one call.
        """
        begin_s = begin if type(begin) is not _Begun else begin.begin_s
        for phase, taken_s in parts:
            self.seconds[phase] += taken_s
            if type(begin) is _Begun:  # no mark: it is a device's, and none took part
                begin.observer.end(phase, self.layer_idx, begin_s, begin_s + taken_s, None)
            begin_s += taken_s
        self.entered += 1

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """A block whose time is booked under `phase`, even if it fails."""
        begin = perf_counter() if self.observer is None else _begun(self.observer, phase)
        try:
            yield
        finally:
            self.book(phase, begin)

    def observe(self, observer: Observer | None) -> None:
        """Tells `observer` of all that is measured from now on; nothing is paid for None."""
        self.observer = observer
        self.now = perf_counter if observer is None else partial(_begun, observer)

    def reset(self) -> None:
        self.seconds = dict.fromkeys((*PHASES, INDEX_BUILD, ATTENTION, FORWARD, BETWEEN), 0.0)


def _begun(observer: Observer, phase: str | None = None) -> _Begun:
    return _Begun(observer, observer.begin(phase), perf_counter())


def cost_of_measuring(phases: Phases, rounds: int = 20_000) -> float:
    """Seconds that one measured piece of work takes beside the work, on an idle `phases`."""
    before = phases.seconds["merge"], phases.entered
    begin = perf_counter()
    for _ in range(rounds):
        phases.book("merge", phases.now())
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
