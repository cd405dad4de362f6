"""What a search of one head costs by each kind, on queries of the prompt and on one thread."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from hybrid_kv.index._choice import Cost, work_s
from hybrid_kv.index._flat_scans import num_candidates
from hybrid_kv.index._sketch_head import HeadSketch
from hybrid_kv.ops.native import flat as native_flat
from hybrid_kv.ops.native.flat import FlatScan
from hybrid_kv.ops.native.memory import host_array
from hybrid_kv.ops.native.rows import QuantisedKeys
from hybrid_kv.ops.native.sketch import SketchSearcher

RERANK = 1.5
"""Keys that scan and graph rank exactly per result."""
_ROUNDS = 15
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_CACHE, _LARGEST_CACHE = 2**25, 2**27
"""Bytes; of a larger one a process has hardly ever all."""
_TURN_CACHES = 2
"""Last-level caches that are read in a turn: one would leave some of what was there."""


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
                native_flat.stream(part)
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
