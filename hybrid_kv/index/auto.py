"""`auto`: for every KV head the kind of search that is the fastest where it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, Protocol

from pydantic import Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._choice import Cost, Pace, cheapest, decoding_pace, mean_cost, work_s
from hybrid_kv.index._flat_scans import num_candidates
from hybrid_kv.index.crossover import read_crossover, write_crossover
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.ops.key_graph import KeyGraph, Searched, no_graph
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native.flat import FlatScan
from hybrid_kv.ops.native.graph import GraphSearcher
from hybrid_kv.ops.native.pool import default_pool
from hybrid_kv.ops.native.rows import QuantisedKeys
from hybrid_kv.plugins import INDEXES

_ROUNDS = 15


@INDEXES.register("auto", paper="this project; arXiv:2409.10516 for the graph")
class AutoIndex(GraphIndex):
    """Builds graphs where they are likely to pay; a head keeps its own if that beats a scan.

    Every build times both on queries of the prompt, on one thread, and counts the bytes that they
    read: the one that takes less time with the threads and the memory of decoding serves the head
    (`reports` has both figures). What was measured is kept for the machine (`hybrid-kv doctor`
    shows it), so that later contexts that are clearly too short for a graph do not build one. A
    context that is scanned as a whole is decided anew whenever it has doubled.
    """

    class Params(GraphIndex.Params):
        """min_keys: no graph is tried with fewer, whatever was measured; remember: keep and use
        what this machine has measured.
        """

        min_keys: config.Count = 4096
        max_scanned: float = Field(default=0.25, gt=0, le=1)
        remember: bool = Field(default=True)

    _file_kind = "auto"

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._samples: Tensor | None = None  # while it is built
        self._chosen_keys = 0

    @property
    def relearn_keys(self) -> int:
        again = super().relearn_keys
        if again or not self.params.horizon_tokens:
            return again
        return max(self._chosen_keys, int(self.params.horizon_tokens))

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        self._samples, self._chosen_keys = samples, len(self)
        super()._rebuild(samples, nearest)
        self._samples = None

    def _why_flat(self, keys: Tensor, samples: Tensor | None) -> str | None:
        if (reason := super()._why_flat(keys, samples)) is not None:
            return reason
        if samples is not None and self.params.remember:
            known = read_crossover(_machine_key(keys, samples))
            if known is not None and keys.shape[1] < 0.8 * known.keys:
                return f"{keys.shape[1]} keys; on this machine graphs pay from {known.keys:,} on"
        return None

    def _serve(self, graphs: tuple[KeyGraph, ...]) -> None:
        super()._serve(graphs)
        if self._searcher is None or self._samples is None:
            return
        # One position after the other, as decoding asks: [Hkv, G, D] each.
        queries = [q.float() for q in self._samples[:, :, -_ROUNDS:].unbind(2)]
        top_k = min(self.params.check_top_k, len(self))
        ranked = num_candidates(self._rerank, top_k, len(self))
        candidates: list[Candidate] = [
            _Graphs(self._searcher, self._beams, top_k, ranked),
            _Scan(self._keys, top_k, ranked),
        ]
        self._choose([candidate.costs(queries) for candidate in candidates], decoding_pace())

    def _choose(self, costs: Sequence[Sequence[Cost | None]], pace: Pace) -> None:
        """Serves each head by the cheapest of the kinds that can; costs: by kind and head."""
        reports, graphs = list(self.reports), list(self._graphs)
        compared = []
        for head, report in enumerate(reports):
            if report.serves != "graph":
                continue
            able = [cost for kind in costs if (cost := kind[head]) is not None]
            compared.append(able)
            kind, why = cheapest(able, pace)
            reports[head] = replace(report, reason=f"{report.reason}; {why}")
            if kind != "graph":
                reports[head] = replace(reports[head], serves=kind, beam=0)
                graphs[head] = no_graph()
        assert self._samples is not None
        if self.params.remember:
            graph_s, scan_s = (
                mean_cost([cost for able in compared for cost in able if cost.kind == kind], pace)
                for kind in ("graph", "flat")
            )
            key = _machine_key(self._keys, self._samples)
            write_crossover(key, len(self), graph_s, scan_s)
        self.reports = tuple(reports)
        if [len(graph) for graph in graphs] != [len(graph) for graph in self._graphs]:
            super()._serve(tuple(graphs))


class Candidate(Protocol):
    """A kind of search that may serve a head."""

    def costs(self, queries: Sequence[Tensor]) -> list[Cost | None]:
        """By head, None where it cannot serve; queries [Hkv, G, D], of one position each."""
        ...


class _Graphs:
    """The graphs of a layer's heads."""

    def __init__(
        self, searcher: GraphSearcher, beams: Sequence[int], top_k: int, ranked: int
    ) -> None:
        self._searcher, self._beams = searcher, beams
        self._top_k, self._ranked = top_k, ranked

    def costs(self, queries: Sequence[Tensor]) -> list[Cost | None]:
        graphs = self._searcher.graphs
        alone = [self._searcher.of_head(head) for head in range(len(graphs))]
        times: list[list[float]] = [[] for _ in graphs]
        # Head after head, so that none finds what it reads in the cache.
        for asked in (queries[0], *queries):
            for head in range(len(graphs)):
                if len(graphs[head]):
                    times[head].append(work_s(partial(self._find, alone[head], head, asked)))
        return [
            Cost("graph", median(times[head][1:]), self._bytes(alone[head], head, queries[0]))
            if len(graph)
            else None
            for head, graph in enumerate(graphs)
        ]

    def _find(self, searcher: GraphSearcher, head: int, queries: Tensor) -> Searched:
        return searcher.search(
            queries[head : head + 1],
            self._top_k,
            beam=self._beams[head],
            pool_size=self._ranked,
        )

    def _bytes(self, searcher: GraphSearcher, head: int, queries: Tensor) -> float:
        """Rows in 8 bits, the lists of what is expanded, and the keys that are ranked."""
        graph, rows = searcher.graphs[0], searcher.rows[0]
        group = queries.shape[1]
        scored = self._find(searcher, head, queries).rows_visited * (rows.row_bytes + 1)
        expanded = group * self._beams[head] * graph.lists.shape[1]
        return scored + expanded + group * self._ranked * 2 * queries.shape[2]


class _Scan:
    """The scan of all keys in 8 bits."""

    def __init__(self, keys: Tensor, top_k: int, ranked: int) -> None:
        heads, _, dim = keys.shape
        self._quantised = QuantisedKeys(heads, dim)
        self._quantised.build(keys)
        self._scan = FlatScan(keys, self._quantised)
        self._top_k, self._ranked = top_k, ranked

    def costs(self, queries: Sequence[Tensor]) -> list[Cost | None]:
        heads, group, dim = queries[0].shape
        times = [
            work_s(partial(self._scan.search, asked, self._top_k, rerank=self._ranked))
            for asked in (queries[0], *queries)
        ]
        read = self._quantised.memory_bytes / heads + group * self._ranked * 2 * dim
        return [Cost("flat", median(times[1:]) / heads, read)] * heads


def _machine_key(keys: Tensor, samples: Tensor) -> str:
    """What the crossover depends on, beside the machine."""
    heads, group, _, dim = samples.shape
    shape = f"heads={heads} group={group} dim={dim} {keys.dtype}"
    return f"{engine_state().isa} threads={default_pool().threads} {shape}"
