"""Which kind of search serves a KV head: the one that takes the least time where it will run.

A search is bound by work, which threads share, or by memory, which they do not. Timed alone, a scan
looks as good as on all cores, where it waits for memory and a graph does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch

from hybrid_kv.ops.native import flat as native_flat
from hybrid_kv.ops.native.memory import host_array
from hybrid_kv.ops.native.workers import default_pool, pool_here

_STREAMED_BYTES = 2**27
_STREAMS = 3
_HOPED = 0.5
"""What a graph is hoped to take of the time of what serves, before one was tried."""
_SKETCH_LISTS, _SCAN_LISTS = 0.6, 0.25
"""Of a search, what one sampled position takes where lists are made so: many share what is read."""
_COPIES = 128
"""Scans in whose time a head is copied and the self-check is answered exactly."""
_PROJECTED_S = 1.5e-4
"""Of one sampled query in the projection and the trials, which hardly grow with the keys: 8e-5 on
heads of few dimensions and 2.8e-4 on those of many (docs/lab.md)."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How decoding searches: threads, and the bytes/s that they read together."""

    threads: int
    bandwidth: float

    def __str__(self) -> str:
        return f"{self.threads} threads, {1e-9 * self.bandwidth:.0f} GB/s"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a kind of search takes for one head and position.

    work_s: seconds of one thread; read_bytes: what it reads, once.
    """

    kind: str
    work_s: float
    read_bytes: float

    def seconds(self, pace: Pace) -> float:
        """Its share of a layer's search, whose heads keep all threads busy."""
        return max(self.work_s / pace.threads, self.read_bytes / pace.bandwidth)

    def describe(self, pace: Pace) -> str:
        is_work = self.work_s / pace.threads >= self.read_bytes / pace.bandwidth
        bound = "work" if is_work else "memory"
        return f"{self.kind} {1e6 * self.seconds(pace):.0f} us ({bound})"


def cheapest(costs: Sequence[Cost], pace: Pace) -> tuple[str, str]:
    """The kind that takes the least time, of equal ones the first, and why."""
    ranked = sorted(costs, key=lambda cost: cost.seconds(pace))
    found = ", ".join(cost.describe(pace) for cost in ranked)
    return ranked[0].kind, f"{found}; {pace}"


def work_s(search: Callable[[], Any]) -> float:
    """Seconds of the calling thread."""
    begin = thread_time()
    search()
    return thread_time() - begin


def core_clock() -> tuple[Callable[[], float], int]:
    """A clock in seconds, and how many threads work while it runs, as whoever calls builds.

    In the background that is one thread, which may have to wait for its core.
    """
    pool = pool_here()
    return (thread_time, 1) if pool is None else (perf_counter, pool.threads)


def mean_cost(costs: Sequence[Cost]) -> Cost:
    """Of a head, where all of them are served so."""
    work = sum(cost.work_s for cost in costs) / len(costs)
    return Cost(costs[0].kind, work, sum(cost.read_bytes for cost in costs) / len(costs))


@cache
def decoding_pace() -> Pace:
    """Of this process; measured once, beside whatever else runs.

    In time of the threads, as work is: waiting for a core is no lack of bandwidth.
    """
    threads = default_pool().threads
    array = host_array([_STREAMED_BYTES], torch.uint8).fill_(1)
    parts = array.chunk(threads)
    with ThreadPoolExecutor(threads) as readers:
        list(readers.map(native_flat.stream, parts))  # starts the threads
        times = [max(readers.map(_streaming_s, parts)) for _ in range(_STREAMS)]
    return Pace(threads, _STREAMED_BYTES / median(times))


def _streaming_s(part: torch.Tensor) -> float:
    return work_s(partial(native_flat.stream, part))


# Whether a graph pays ---------------------------------------------------------------------------


def build_forecast(served: Cost, scan: Cost, group: int, positions: int) -> float:
    """Core-seconds that a head's first graph takes: only its lists and copies grow with the keys.

    Args:
        served: a search of what makes the lists.
        scan: a search of all keys in 8 bits.
        group: query heads.
        positions: that are sampled of each.
    """
    share = _SKETCH_LISTS if served.kind == "sketch" else _SCAN_LISTS
    lists = share * positions * served.work_s
    return lists + _COPIES * scan.work_s + _PROJECTED_S * group * positions


def hoped(served: Cost) -> Cost:
    """A search by graph, where nothing was tried."""
    return Cost("graph", _HOPED * served.work_s, _HOPED * served.read_bytes)


@dataclass(frozen=True, slots=True)
class Payback:
    """When a graph wins back its build: within so many decoded tokens, at the pace of decoding."""

    tokens: int
    pace: Pace

    def wins(self, served: Cost, graph: Cost, build_s: float) -> tuple[bool, str]:
        """Whether it does, and the figures."""
        graph_s = graph.seconds(self.pace)
        saved_s = (served.seconds(self.pace) - graph_s) * self.pace.threads * self.tokens
        verb = "wins" if saved_s > build_s else "does not win"
        return saved_s > build_s, (
            f"a graph ({1e6 * graph_s:.0f} us, {build_s:.1f} core-seconds to build) {verb} that "
            f"back in {self.tokens} tokens"
        )
