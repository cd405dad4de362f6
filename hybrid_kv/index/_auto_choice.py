"""Choice between sketch and scan for each head of a layer: what is learned is timed.

The quickest kind where it will run serves; where a graph is forecast to pay, `_graph_choice` goes
on. A search is bound by work, which threads share, or by memory, which they do not. Timed alone, a
scan looks as good as on all cores, where it waits for memory and a graph does not. Searches are
timed on queries of the prompt and on one thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.index._sketch_head import HeadSketch
from hybrid_kv.index._sketch_learn import SketchLearner, SketchReport
from hybrid_kv.index._trial import HeadReport
from hybrid_kv.index.flat import num_candidates
from hybrid_kv.ops.host_memory import host_array
from hybrid_kv.ops.native import engine_state, scans
from hybrid_kv.ops.native.library import default_pool, pool_here
from hybrid_kv.ops.native.rows import QuantisedKeys
from hybrid_kv.ops.native.scans import FlatScan, SketchSearcher

if TYPE_CHECKING:
    from hybrid_kv.ops.key_graph import KeyGraph

_STREAMED_BYTES = 2**27
_STREAMS = 3
_HOPED = 0.5
"""Share that a graph is hoped to take of the time of what serves, before one was tried."""
_SKETCH_LISTS, _SCAN_LISTS = 0.6, 0.25
"""Of a search, what one sampled position takes where lists are made so: many share what is read."""
_COPIES = 128
"""Scans in whose time a head is copied and the self-check is answered exactly."""
_PROJECTED_S = 1.5e-4
"""Of one sampled query in the projection and the trials, which hardly grow with the keys: 8e-5 on
heads of few dimensions and 2.8e-4 on those of many (docs/lab.md)."""
RERANK = 1.5
"""Keys that scan and graph rank exactly per result."""
_ROUNDS = 15
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_CACHE, _LARGEST_CACHE = 2**25, 2**27
"""Bytes; of a larger one a process has hardly ever all."""
_TURN_CACHES = 2
"""Last-level caches that are read in a turn: one would leave some of what was there."""


@dataclass(frozen=True, slots=True)
class SearchRate:
    """Speed of this machine while it decodes: threads, and the bytes/s that they read together."""

    threads: int
    bandwidth: float

    def __str__(self) -> str:
        return f"{self.threads} threads, {1e-9 * self.bandwidth:.0f} GB/s"


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a kind of search for one head and position.

    work_s: seconds of one thread; read_bytes: what it reads, once.
    """

    kind: str
    work_s: float
    read_bytes: float

    def seconds(self, pace: SearchRate) -> float:
        """Its share of a layer's search, whose heads keep all threads busy."""
        return max(self.work_s / pace.threads, self.read_bytes / pace.bandwidth)

    def describe(self, pace: SearchRate) -> str:
        is_work = self.work_s / pace.threads >= self.read_bytes / pace.bandwidth
        bound = "work" if is_work else "memory"
        return f"{self.kind} {1e6 * self.seconds(pace):.0f} us ({bound})"


def cheapest(costs: Sequence[Cost], pace: SearchRate) -> tuple[str, str]:
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
def decoding_pace() -> SearchRate:
    """Of this process; measured once, beside whatever else runs.

    In time of the threads, as work is: waiting for a core is no lack of bandwidth.
    """
    threads = default_pool().threads
    array = host_array([_STREAMED_BYTES], torch.uint8).fill_(1)
    parts = array.chunk(threads)
    with ThreadPoolExecutor(threads) as readers:
        list(readers.map(scans.stream, parts))  # starts the threads
        times = [max(readers.map(_streaming_s, parts)) for _ in range(_STREAMS)]
    return SearchRate(threads, _STREAMED_BYTES / median(times))


def _streaming_s(part: torch.Tensor) -> float:
    return work_s(partial(scans.stream, part))


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
    """Decoded tokens within which a graph wins back its build, at the pace of decoding."""

    tokens: int
    pace: SearchRate

    def wins(self, served: Cost, graph: Cost, build_s: float) -> tuple[bool, str]:
        """Whether it does, and the figures."""
        graph_s = graph.seconds(self.pace)
        saved_s = (served.seconds(self.pace) - graph_s) * self.pace.threads * self.tokens
        verb = "wins" if saved_s > build_s else "does not win"
        return saved_s > build_s, (
            f"a graph ({1e6 * graph_s:.0f} us, {build_s:.1f} core-seconds to build) {verb} that "
            f"back in {self.tokens} tokens"
        )


class TimedSearch(Protocol):
    """A search of one head."""

    @property
    def read_bytes(self) -> float:
        """Of a search."""
        ...

    def search(self, queries: Tensor) -> Any:
        """Asks [1, G, D] on the calling thread alone."""
        ...


class ScanTrial:
    """All keys [1, N, D] in 8 bits, the best ranked exactly."""

    def __init__(self, keys: Tensor, group: int, top_k: int) -> None:
        quantised = QuantisedKeys(1, keys.shape[2])
        quantised.build(keys)
        self._scan = FlatScan(keys, quantised)
        self._top_k, self._ranked = top_k, num_candidates(RERANK, top_k, keys.shape[1])
        self.read_bytes = quantised.memory_bytes + ranked_bytes(keys, group * self._ranked)

    def search(self, queries: Tensor) -> Any:
        return self._scan.search(queries, self._top_k, rerank=self._ranked)


class SketchTrial:
    """The codes of one head over its keys [1, N, D]."""

    def __init__(self, keys: Tensor, sketch: HeadSketch, group: int, top_k: int) -> None:
        tiers: list[Any] = list(sketch.tiers)
        self._searcher = SketchSearcher([keys[0]], [tiers])
        self._top_k, self._ranked = top_k, min(sketch.num_rerank, keys.shape[1])
        codes = sum(tier.count * tier.map.plan.code_bytes for tier in sketch.tiers)
        self.read_bytes = codes + ranked_bytes(keys, group * self._ranked)

    def search(self, queries: Tensor) -> Any:
        return self._searcher.search(queries, self._top_k, num_rerank=[self._ranked])


def measured(
    trials: Mapping[tuple[str, int], TimedSearch], queries: Tensor
) -> dict[tuple[str, int], Cost]:
    """The cost of each trial, named by kind and head.

    They run one after the other, and more than the last cache holds is read from one turn to the
    next: decoding comes back to a head when all others of all layers have been read, so none may
    find its own in the cache.

    Args:
        queries: [Hkv, G, M, D]; the latest positions are asked one by one, as decoding does.
    """
    times: dict[tuple[str, int], list[float]] = {name: [] for name in trials}
    asked = [position.float() for position in queries[:, :, -_ROUNDS:].unbind(2)]
    others = [torch.empty(0)] * len(trials)
    for turn, position in enumerate((asked[0], *asked)):
        if turn == 1:  # what a search reads is known when it has run once
            missing = _TURN_CACHES * last_cache_bytes() - sum(t.read_bytes for t in trials.values())
            each = max(0, int(missing)) // len(trials)
            others = list(host_array([len(trials), each], torch.uint8).fill_(1))
        # A part before each: what comes right behind it pays for more than its own bytes.
        for (name, trial), part in zip(trials.items(), others, strict=True):
            if part.numel():
                scans.stream(part)
            head = name[1]
            search: Callable[[], Any] = partial(trial.search, position[head : head + 1])
            times[name].append(work_s(search))
    return {
        name: Cost(name[0], median(times[name][1:]), trial.read_bytes)
        for name, trial in trials.items()
    }


@cache
def last_cache_bytes() -> int:
    """Of the largest cache that the first core sees; a usual one where the system does not say."""
    sizes = [
        int(found[1]) * {"": 1, "K": 2**10, "M": 2**20}[found[2]]
        for path in _CACHES.glob("index*/size")
        if (found := re.match(r"(\d+)([KM]?)", path.read_text()))
    ]
    return min(max(sizes, default=_USUAL_CACHE), _LARGEST_CACHE)


def ranked_bytes(keys: Tensor, count: int) -> int:
    """Of keys [1, N, D], so many of which are ranked exactly."""
    return count * keys.shape[2] * keys.itemsize


_TIMED_SCANS = 2
"""Heads whose scan is timed; all cost the same."""

Report: TypeAlias = SketchReport | HeadReport


@dataclass(frozen=True, slots=True)
class Chosen:
    """Choice for a layer: a report of each head, and sketches and graphs by head.

    Heads with neither are scanned.
    """

    reports: Sequence[Report]
    sketches: Mapping[int, HeadSketch]
    graphs: Mapping[int, KeyGraph] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sketched:
    """A layer as sketches serve it: what to build graphs beside.

    costs: of what serves, by head; wanted: the heads that shall try a graph, with the reason.
    """

    reports: tuple[SketchReport, ...]
    sketches: dict[int, HeadSketch]
    costs: dict[int, Cost]
    wanted: dict[int, str]


class KindChooser:
    """Chooses between sketch and scan for each head of a layer, and the heads that try a graph.

    sketcher: learns sketches.

    Args:
        params: of an auto index.
    """

    def __init__(self, params: Any, sketcher: SketchLearner) -> None:
        self._params, self.sketcher = params, sketcher

    def without_graphs(
        self, keys: Tensor, samples: Tensor | None
    ) -> tuple[Chosen, Sketched | None]:
        """Sketches or scans of keys [Hkv, N, D]; and what to do next if graphs are likely to pay.

        Args:
            samples: [Hkv, G, M, D], or None for scans.
        """
        reports, sketches = self.sketcher.learn(keys, samples)
        is_unread = self.sketcher.why_flat(keys, samples) is not None
        if is_unread or engine_state().isa is None:
            return Chosen(reports, sketches), None
        assert samples is not None
        pace, costs = decoding_pace(), self._sketch_costs(keys, sketches, samples)
        told, served = list(reports), {}
        for head in list(sketches):
            able = [costs["sketch", head], costs["flat", 0]]
            kind, why = cheapest(able, pace)
            served[head] = next(cost for cost in able if cost.kind == kind)
            told[head] = replace(told[head], serves=kind, reason=f"{told[head].reason}; {why}")
            if kind == "flat":
                told[head] = replace(told[head], tiers=(), num_rerank=0, recall=0.0, mass=0.0)
                del sketches[head]
        wanted = {}
        for head in range(len(told)):
            served.setdefault(head, costs["flat", 0])
            dim = told[head].effective_dim
            is_wanted, why = self._forecast(
                served[head], costs["flat", 0], dim, (keys.shape[1], *samples.shape[1:3]), pace
            )
            told[head] = replace(told[head], reason=f"{told[head].reason}; {why}")
            if is_wanted:
                wanted[head] = why
        after = Sketched(tuple(told), sketches, served, wanted) if wanted else None
        return Chosen(told, sketches), after

    def _sketch_costs(
        self, keys: Tensor, sketches: Mapping[int, HeadSketch], samples: Tensor
    ) -> dict[tuple[str, int], Cost]:
        """Of every sketch by ("sketch", head); of a scan as ("flat", 0)."""
        group, top_k = samples.shape[1], min(self._params.check_top_k, keys.shape[1])
        trials: dict[tuple[str, int], TimedSearch] = {
            ("sketch", head): SketchTrial(keys[head : head + 1], sketch, group, top_k)
            for head, sketch in sketches.items()
        }
        for head in range(min(_TIMED_SCANS, len(keys))):
            trials["flat", head] = ScanTrial(keys[head : head + 1], group, top_k)
        costs = measured(trials, samples)
        scans = [cost for (kind, _), cost in costs.items() if kind == "flat"]
        return costs | {("flat", 0): mean_cost(scans)}

    def _forecast(
        self, served: Cost, scan: Cost, dim: float, sizes: tuple[int, ...], pace: SearchRate
    ) -> tuple[bool, str]:
        """Whether a head of so many effective dimensions shall try a graph, and why or why not.

        Args:
            sizes: keys, query heads and sampled positions.
        """
        num_keys, group, positions = sizes
        tokens, most_s = self._params.graph_tokens, self._params.graph_trial_seconds
        if not tokens:
            return False, "no graphs are wanted"
        if num_keys < self._params.graph_min_keys:
            return False, f"{num_keys} keys, a graph takes {self._params.graph_min_keys}"
        if not dim:
            return False, "no graph, for nothing is known of what queries see"
        build_s = build_forecast(served, scan, group, positions)
        if build_s > most_s:
            return False, (
                f"a graph is forecast to take {build_s:.1f} core-seconds to build, "
                f"graph_trial_seconds is {most_s:g}"
            )
        is_wanted, why = Payback(tokens, pace).wins(served, hoped(served), build_s)
        return is_wanted, f"by forecast {why}"
