"""The index builds of one cache: where they run, and how long they take."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from hybrid_kv.runtime.stats import INDEX_BUILD, Phases, WorkClock
from hybrid_kv.transfer import Executor


class IndexBuilds:
    """Runs builds by an executor. What is waited for counts as a phase, all of it in `clock`."""

    def __init__(self, executor: Executor, phases: Phases) -> None:
        self._executor, self._phases = executor, phases
        self.clock = WorkClock()

    def here(self, build: Callable[[], None]) -> None:
        """Runs a build that is waited for."""
        with self._phases.measure(INDEX_BUILD), self.clock.running():
            build()

    def beside(self, build: Callable[[], None]) -> Future[None]:
        """Begins a build that need not be waited for."""
        clock = self.clock

        def measured() -> None:
            with clock.running():
                build()

        with self._phases.measure(INDEX_BUILD):
            return self._executor.background(measured)
