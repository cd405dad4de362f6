"""Time of an index build, before it begins: some cannot be ended early."""

from __future__ import annotations

import math
from collections import defaultdict
from time import perf_counter

from torch import Tensor

from hybrid_kv.config import IndexConfig

_PROBES = (2048, 8192)
"""Keys of the builds that are tried first."""
_GROWTH = 1.2
"""Exponent of the build time in the number of keys where only one build is known."""
_STEEPEST = 2.0


class BuildForecast:
    """Learns from builds what the next one will take.

    Builds are known by a name (of a method) and the keys of one KV head; seconds are those of all
    heads of all layers together.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[int, float]] = defaultdict(dict)

    def note(self, name: str, num_keys: int, seconds: float) -> None:
        """A build has taken so long."""
        if num_keys and seconds > 0:
            self._known[name][num_keys] = seconds

    def knows(self, name: str) -> bool:
        return bool(self._known[name])

    def seconds(self, name: str, num_keys: int) -> float | None:
        """Forecast of a build's seconds, from the two largest that are known; None from none."""
        known = sorted(self._known[name].items())
        if not known or not num_keys:
            return None
        keys, taken = known[-1]
        growth = _GROWTH
        if len(known) > 1:
            fewer, less = known[-2]
            growth = math.log(taken / less) / math.log(keys / fewer)
            growth = min(_STEEPEST, max(1.0, growth))
        return taken * math.pow(num_keys / keys, growth)

    def probe(self, name: str, index: IndexConfig, keys: Tensor, num_heads: int) -> None:
        """Builds two small indexes over the first of keys [1, N, D] for a first forecast.

        Args:
            num_heads: KV heads of all layers, which are built one after the other.
        """
        for count in _PROBES:
            if count <= keys.shape[1]:
                begin = perf_counter()
                index.build().build(keys[:, :count].contiguous(), None)
                self.note(name, count, num_heads * (perf_counter() - begin))
