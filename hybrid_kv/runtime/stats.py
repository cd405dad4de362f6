"""Where a step's time goes, by phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

PHASES = ("search", "cold_attention", "resident_attention", "select", "merge", "transfer")


INDEX_BUILD = "index_build"
"""Not a phase of a decode step: measured beside them."""


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
