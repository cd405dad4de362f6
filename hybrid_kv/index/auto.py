"""`auto`: a graph where it is faster than a scan on this machine, a scan elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter, thread_time
from typing import Any

from pydantic import Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._flat_scans import int8_scan
from hybrid_kv.index.crossover import read_crossover, write_crossover
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.ops.key_graph import KeyGraph
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native.pool import pool_here
from hybrid_kv.plugins import INDEXES

_ROUNDS = 15


@INDEXES.register("auto", paper="this project; arXiv:2409.10516 for the graph")
class AutoIndex(GraphIndex):
    """Builds a graph where one is likely to pay, and keeps it only if it is faster than a scan.

    Every build times both on queries of the prompt, over all KV heads of the layer in turn. What
    was measured is kept for the machine (`hybrid-kv doctor` shows it), so that later contexts that
    are clearly too short for a graph do not build one.
    """

    class Params(GraphIndex.Params):
        """min_keys: no graph is tried with fewer, whatever was measured; remember: keep and use
        what this machine has measured.
        """

        min_keys: config.Count = 4096
        remember: bool = Field(default=True)

    _file_kind = "auto"

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._samples: Tensor | None = None  # while it is built

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        self._samples = samples
        super()._rebuild(samples, nearest)
        self._samples = None

    def _why_flat(self, keys: Tensor, samples: Tensor | None) -> str | None:
        if samples is not None and self.params.remember:
            known = read_crossover(_machine_key(keys, samples))
            if known is not None and keys.shape[1] < 0.8 * known.keys:
                return f"{keys.shape[1]} keys; on this machine graphs pay from {known.keys:,} on"
        return super()._why_flat(keys, samples)

    def _serve(self, graphs: tuple[KeyGraph, ...]) -> None:
        super()._serve(graphs)
        if self._searcher is None or self._samples is None:
            return
        # One position after the other, as decoding asks: [Hkv, G, D] each.
        queries = [q.float() for q in self._samples[:, :, -_ROUNDS:].unbind(2)]
        top_k = min(self.params.check_top_k, len(self))
        scan = int8_scan(self._rerank)
        scan.rebuild(self._keys)
        graph_s = _median_time(lambda q: self._find(q, top_k, top_k), queries)
        scan_s = _median_time(lambda q: scan.find(q, top_k, top_k), queries)
        if self.params.remember:
            key = _machine_key(self._keys, self._samples)
            write_crossover(key, len(self), graph_s, scan_s)
        if scan_s < graph_s:
            self._serve_flat(
                f"the scan is faster here: {1e6 * scan_s:.0f} against {1e6 * graph_s:.0f} us"
            )


def _machine_key(keys: Tensor, samples: Tensor) -> str:
    """What the crossover depends on, beside the machine."""
    heads, group, _, dim = samples.shape
    shape = f"heads={heads} group={group} dim={dim} {keys.dtype}"
    return f"{engine_state().isa} threads={_num_threads()} {shape}"


def _num_threads() -> int:
    """Threads that share a search of the calling thread."""
    pool = pool_here() if engine_state().isa is not None else None
    return 1 if pool is None else pool.threads


def _median_time(search: Callable[[Tensor], Any], queries: list[Tensor]) -> float:
    """Seconds of one search, after one that warms up.

    Of one thread they are seconds of work, so that decoding beside a build does not count.
    """
    clock = thread_time if _num_threads() == 1 else perf_counter
    times = []
    search(queries[0])
    for query in queries:
        begin = clock()
        search(query)
        times.append(clock() - begin)
    return median(times)
