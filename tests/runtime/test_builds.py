"""How many builds may wait, by what they hold and what the host has left."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

from hybrid_kv.runtime.cache_context import IndexBuilds
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.watch.phases import Phases
from tests.store.scene import HeldBuild


class Later(SyncExecutor):
    """Holds builds back until a test lets them go."""

    def __init__(self) -> None:
        self.held: list[HeldBuild] = []

    def background(self, work: Callable[[], None]) -> Future[None]:
        self.held.append(HeldBuild(work))
        return self.held[-1].future


def test_builds_wait_for_each_other_only_where_memory_is_short() -> None:
    """What a prompt's builds hold came to 6 GiB that nobody counted."""
    executor, spare = Later(), 0
    builds = IndexBuilds(executor, Phases(), lambda: spare)
    for _ in range(3):
        builds.beside(lambda: None, holds=100)
    assert builds.held_bytes == 300
    assert len(executor.held) == 3
    spare = -1
    next_one = Thread(target=lambda: builds.beside(lambda: None, holds=100))
    next_one.start()
    executor.held[0].run()
    next_one.join(0.2)
    assert next_one.is_alive(), "one has ended, and memory still lacks"
    executor.held[1].run()
    spare = 0
    executor.held[2].run()
    next_one.join(30)
    assert not next_one.is_alive()
    assert len(executor.held) == 4
    assert builds.held_bytes == 100


def test_a_build_that_nothing_precedes_begins_whatever_is_free() -> None:
    builds = IndexBuilds(SyncExecutor(), Phases(), lambda: -1)
    assert builds.beside(lambda: None, holds=100).done()
    assert builds.held_bytes == 0
