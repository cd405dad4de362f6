"""The index builds of one cache: where they run, how many may wait, and how long they take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

from hybrid_kv.transfer import Executor
from hybrid_kv.watch.phases import INDEX_BUILD, Phases, WorkClock


class IndexBuilds:
    """Runs builds by an executor. What is waited for counts as a phase, all of it in `clock`.

    A build that waits holds its prompt's queries and their best keys, 170 MB for a layer of an 8B
    model. Where host memory is short, a new one waits until enough of those before it have ended.

    Args:
        spare_bytes: host memory that is free and that nothing else will need.
    """

    def __init__(
        self, executor: Executor, phases: Phases, spare_bytes: Callable[[], int] | None = None
    ) -> None:
        self._executor, self._phases, self._spare_bytes = executor, phases, spare_bytes
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self.clock = WorkClock()

    @property
    def held_bytes(self) -> int:
        """Kept for builds that have not ended."""
        self._forget_ended()
        return sum(holds for _, holds in self._waiting)

    def here(self, build: Callable[[], None]) -> None:
        """Runs a build that is waited for."""
        with self._phases.measure(INDEX_BUILD), self.clock.running(), self._executor.building():
            build()

    def beside(self, build: Callable[[], None], holds: int = 0) -> Future[None]:
        """Begins a build that need not be waited for."""
        clock, building = self.clock, self._executor.building

        def measured() -> None:
            with clock.running(), building():
                build()

        with self._phases.measure(INDEX_BUILD):
            self._make_room()
            future = self._executor.background(measured)
        if holds:
            self._waiting.append((future, holds))
        return future

    def _make_room(self) -> None:
        self._forget_ended()
        while self._waiting and self._spare_bytes is not None and self._spare_bytes() < 0:
            wait([self._waiting[0][0]])
            self._forget_ended()

    def _forget_ended(self) -> None:
        self._waiting = deque(build for build in self._waiting if not build[0].done())
