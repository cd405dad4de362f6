"""Times per query head: hot (one head again and again) and cold (copies of it in turn)."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import numpy as np

from benchmarks.cold_search.engines import Copies, Engine
from benchmarks.cold_search.machine import Memory

CLOCKS = {"wall": perf_counter, "cpu": process_time}
WORKING_SET_L3 = 4
COLD_CAP = 4 * 2**30
"""Copies are made up to four times the L3, at most this much."""
MIN_COPIES = 4
MIN_VISITS = 12
"""Copies visited per repeat, at least: few copies are visited several times, caches emptied."""

Groups = Sequence[np.ndarray]


@dataclass(frozen=True)
class Stopwatch:
    """How times are taken. clock: seconds; repeats: of which the median is reported."""

    clock: Callable[[], float]
    repeats: int
    memory: Memory


def hot_us(engine: Engine, groups: Groups, grouped: bool, watch: Stopwatch) -> float:
    """Microseconds per query head: the median over repeats of the mean over queries."""
    times = []
    for _ in range(watch.repeats):
        begin = watch.clock()
        for group in groups:
            engine.answer(group, grouped)
        times.append(watch.clock() - begin)
    return 1e6 * statistics.median(times) / sum(map(len, groups))


def num_copies(held_bytes: int, l3_bytes: int, limit: int) -> int:
    """How many copies of a head are visited in turn; 0 where not even two fit into `limit`."""
    wanted = -(-min(WORKING_SET_L3 * l3_bytes, COLD_CAP) // held_bytes)
    copies = min(max(MIN_COPIES, wanted), limit // held_bytes)
    return copies if copies >= 2 else 0


def turns(groups: Groups, copies: int, count: int) -> list[list[np.ndarray]]:
    """Which group each copy gets in each turn; a copy is not asked the same again and again."""
    return [
        [groups[(turn * copies + copy) % len(groups)] for copy in range(copies)]
        for turn in range(count)
    ]


def cold_us(copies: Copies, count: int, groups: Groups, grouped: bool, watch: Stopwatch) -> float:
    """Microseconds per query head over `count` copies, caches emptied before every turn."""
    return cold_times({"": (copies, grouped)}, count, groups, watch)[""]["us"]


def cold_times(
    rivals: dict[str, tuple[Copies, bool]], count: int, groups: Groups, watch: Stopwatch
) -> dict[str, dict[str, Any]]:
    """The same for several ways, which take turns so that disturbances hit all of them.

    Returns:
        Per way the median `us` and all `times`, in the order of the turns.
    """
    planned = turns(groups, count, max(watch.repeats, -(-watch.repeats * MIN_VISITS // count)))
    for copies, grouped in rivals.values():
        copies.visit(planned[0], grouped)
    times: dict[str, list[float]] = {name: [] for name in rivals}
    gc.disable()
    for chosen in planned:
        for name, (copies, grouped) in rivals.items():
            watch.memory.flush()
            begin = watch.clock()
            copies.visit(chosen, grouped)
            times[name].append(1e6 * (watch.clock() - begin) / sum(map(len, chosen)))
    gc.enable()
    return {name: {"us": statistics.median(taken), "times": taken} for name, taken in times.items()}
