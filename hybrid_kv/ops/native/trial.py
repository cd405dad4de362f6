"""Trials: how long a call takes here, where flags of a CPU do not tell which way is faster."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

_ROUNDS = 2


def least_seconds(call: Callable[[], object], clock: Callable[[], float] = perf_counter) -> float:
    """The least of a few rounds; the first, which sets things up, does not count."""
    call()
    times = []
    for _ in range(_ROUNDS):
        begin = clock()
        call()
        times.append(clock() - begin)
    return max(min(times), 1e-9)
