"""`graph`: an attention-aware graph of the keys, projected from prefill queries.

Sources: RetrievalAttention (Liu et al. 2024, arXiv:2409.10516), section 3.2; RoarGraph (Chen et al.
2024), whose idea of learning from queries it takes and whose projection it replaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import mul
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_kv.errors import FileFormatError
from hybrid_kv.former import is_removed
from hybrid_kv.index._base import SavedIndex
from hybrid_kv.index._file import check_fingerprint, fingerprint, refusing_what_is_damaged
from hybrid_kv.index._graph_learner import GraphLearner, rows_of, walks_of_each
from hybrid_kv.index._trial import GraphParams, HeadReport
from hybrid_kv.index.flat import KeyScan, StandIn, int8_scan, num_candidates, planned
from hybrid_kv.ops.key_graph import KeyGraph, check_graph, no_graph, node_bytes
from hybrid_kv.ops.native.graph import GraphSearcher
from hybrid_kv.ops.native.library import pool_here
from hybrid_kv.ops.native.rows import scanned_bytes
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.plugins import INDEXES, Index
from hybrid_kv.types import Needs, SearchReads, SearchResult

_RERANK = 1.5
"""Keys that a search ranks exactly per key that it is asked for."""

_ARRAYS = ("keys_of", "lists", "entries")


@INDEXES.register("graph", paper="arXiv:2409.10516, section 3.2; RoarGraph (Chen et al. 2024)")
class GraphIndex(SavedIndex):
    """Walks a graph that prefill queries built; heads that it does not suit are scanned.

    One graph per KV head, from the queries of all its query heads, which also search it together.
    Every head proves itself on queries that took no part in its build (`reports`): where it misses
    the goal, or has few keys, all keys are scored in 8 bits and the best ranked exactly.

    Such scans are divided over the threads. Keys that are added later are scanned one and all.
    """

    ranks = True

    file_kind = "graph"

    Params = GraphParams

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._learner = GraphLearner(params, self._cancellation)
        self.reports: tuple[HeadReport, ...] = ()
        self._graphs: tuple[KeyGraph, ...] = ()
        self._walks: GraphWalks | None = None
        self._scan: KeyScan | None = None  # of all heads, where none has a graph
        self._learned_keys = 0

    @classmethod
    def needs(cls, params: Any) -> Needs:
        listed = max(params.list_length, params.check_top_k)
        return Needs(params.sampled_queries, params.recent_queries, listed, params.horizon_tokens)

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        scanned = scanned_bytes(head_dim)
        if num_keys < params.min_keys:
            return scanned
        return max(scanned, node_bytes(params.max_degree, num_keys, head_dim))

    @property
    def relearn_keys(self) -> int:
        horizon = int(self.params.horizon_tokens)
        if any(len(graph) for graph in self._graphs) or not self.reports or not horizon:
            return horizon
        return max(horizon, self._learned_keys)  # scanned: once more when there are twice as many

    @property
    def memory_bytes(self) -> int:
        parts = (self._walks, self._scan)
        return sum(part.memory_bytes for part in parts if part is not None)

    def describe(self) -> list[dict[str, Any]]:
        return [report.to_dict() for report in self.reports]

    def stand_in(self, keys: Tensor, samples: Tensor | None) -> Index | None:
        return None if self._learner.why_flat(keys, samples) else StandIn()

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        self._learned_keys = len(self)
        if (reason := self._learner.why_flat(self._keys, samples)) is not None:
            self.reports = tuple(HeadReport("flat", reason) for _ in self._keys)
            self._serve(tuple(no_graph() for _ in self._keys))
            return
        assert samples is not None
        walks = walks_of_each(len(self._keys))
        learned = [
            self._learner.learn_head(
                self._keys[head],
                samples[head],
                None if nearest is None else nearest[head],
                walks=walks,
            )
            for head in range(len(self._keys))
        ]
        self.reports = tuple(report for _, report in learned)
        self._serve(tuple(graph or no_graph() for graph, _ in learned))

    @classmethod
    def serving(
        cls,
        params: Any,
        keys: Tensor,
        reports: Sequence[HeadReport],
        graphs: Sequence[KeyGraph],
    ) -> GraphIndex:
        """An index over keys [Hkv, N, D] of graphs that are there already, one per head."""
        index = cls(params)
        index._known, index.reports = keys, tuple(reports)
        index._learned_keys = keys.shape[1]
        index._serve(tuple(graphs))
        return index

    def _serve(self, graphs: tuple[KeyGraph, ...]) -> None:
        """Searches run on these graphs from now on; an empty one has its head scanned."""
        self._walks = self._scan = None
        self._graphs = graphs
        if not any(len(graph) for graph in graphs):
            self._scan = int8_scan(_RERANK)
            self._scan.rebuild(self._keys)
            return
        self._walks = GraphWalks(self._keys, graphs, self.reports)

    def _append(self, known: int) -> None:
        if self._scan is not None:
            self._scan.append(self._keys)
        elif self._walks is not None:
            self._walks.append(self._keys)

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        return self._find_near(queries, count, most, None)

    def _find_near(
        self, queries: Tensor, count: int, most: int, near: Tensor | None
    ) -> SearchResult:
        if self._scan is not None:
            return self._scan.find(queries, count, most)
        assert self._walks is not None
        beams, ranked = self._effort(self._walks, count, most)
        return self._walks.search(queries, min(most, ranked), beams, ranked, near)

    def _plan(self, count: int, most: int) -> list[EngineSearch] | None:
        if self._walks is None:
            return planned(self._scan, count, most)
        beams, ranked = self._effort(self._walks, count, most)
        return self._walks.plan(min(most, ranked), beams, ranked)

    def _effort(self, walks: GraphWalks, count: int, most: int) -> tuple[list[int], int]:
        """Of a search for so many keys: the beam of each head, and how many are ranked exactly."""
        checked = self.params.check_top_k
        fixed = self.params.beam
        beams = walks.beams if fixed == "auto" else [fixed] * len(self._graphs)
        if count > checked:  # the check was for so many keys; to find more, more are expanded
            beams = [-(-beam * count // checked) for beam in beams]
        ranked = num_candidates(_RERANK, count, len(self))
        if most > count:
            ranked = max(ranked, min(most, max(beams)))
        return beams, ranked

    def shortened(self, keys: Tensor) -> GraphIndex | None:
        """See `SavedIndex`: a graph leads through all that it has linked."""
        return self.over(keys) if _linked(self._graphs) <= keys.shape[1] else None

    def to_file(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """See `SavedIndex`: graphs and reports."""
        arrays = {
            f"{head}.{name}": getattr(graph, name).numpy()
            for head, graph in enumerate(self._graphs)
            for name in _ARRAYS
        }
        meta = {
            "params": self.params.model_dump(mode="json"),
            "reports": self.describe(),
            "keys": fingerprint(self._keys, _linked(self._graphs)),
            "linked": [len(graph) for graph in self._graphs],
            "degrees": [graph.degree for graph in self._graphs],
        }
        return meta, arrays

    @classmethod
    def from_file(
        cls, path: Path, meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], keys: Tensor
    ) -> GraphIndex:
        """See `SavedIndex`."""
        with refusing_what_is_damaged(path):
            written = meta["params"]  # older files have settings that were removed
            params = cls.Params.model_validate(
                {name: written[name] for name in written if not is_removed(name)}
            )
            reports = tuple(HeadReport.from_dict(report) for report in meta["reports"])
            graphs = tuple(_graph_of(head, meta, arrays) for head in range(len(reports)))
            check_fingerprint(path, meta["keys"], keys, _linked(graphs))
        if len(graphs) != len(keys):
            raise FileFormatError(
                f"{path} is damaged: it has {len(graphs)} graphs for {len(keys)} heads; build the "
                "index again"
            )
        return cls.serving(params, keys, reports, graphs)


def _linked(graphs: Sequence[KeyGraph]) -> int:
    """Rows that the graphs of some heads know; later ones are scanned."""
    return max((len(graph) for graph in graphs), default=0)


def _graph_of(head: int, meta: Mapping[str, Any], arrays: Mapping[str, Any]) -> KeyGraph:
    """One head's graph as a file holds it; raises whatever is wrong with it."""
    graph = KeyGraph(
        **{name: torch.from_numpy(arrays[f"{head}.{name}"]) for name in _ARRAYS},
        num_keys=int(meta["linked"][head]),
        degree=int(meta["degrees"][head]),
    )
    check_graph(graph)
    return graph


class GraphWalks:
    """Searches keys by walks through graphs, one graph per KV head; an empty one has all scanned.

    beams, walks: of each head's searches, as its report says.

    Args:
        keys: [Hkv, N, D].
    """

    def __init__(
        self, keys: Tensor, graphs: Sequence[KeyGraph], reports: Sequence[HeadReport]
    ) -> None:
        rows = [rows_of(keys[head], graph) for head, graph in enumerate(graphs)]
        self._searcher = GraphSearcher(keys, rows, graphs, pool=pool_here())
        self._keys, self._graphs = keys, graphs
        # A head that is scanned has no beam, which no search minds.
        self.beams = [max(1, report.beam) for report in reports]
        self.walks = [report.walks for report in reports]

    @property
    def memory_bytes(self) -> int:
        return self._searcher.memory_bytes

    def append(self, keys: Tensor) -> None:
        """Takes the later rows of keys [Hkv, N, D]."""
        self._keys = keys
        self._searcher.append(keys, pool_here())

    def search(
        self, queries: Tensor, width: int, beams: list[int], ranked: int, near: Tensor | None
    ) -> SearchResult:
        """The best `width` keys of queries [Hkv, M, D].

        Args:
            beams: of each head, keys that are expanded. ranked: keys that are ranked exactly.
            near: as for `Index.search`.
        """
        found = self._searcher.search(
            queries,
            width,
            beam=beams,
            walks=self.walks,
            pool_size=ranked,
            warm=near,
            pool=pool_here(),
        )
        read = self._reads(beams, ranked)
        walked = round(found.rows_visited * read.walked)
        return SearchResult(
            *(found.ids, found.scores, found.dots, found.rows_visited),
            read_bytes=walked + read.of(queries.shape[1], 0),
        )

    def plan(self, width: int, beams: list[int], ranked: int) -> list[EngineSearch]:
        """The same search, for the engine."""
        plan = self._searcher.plan(width, beam=beams, walks=self.walks, pool_size=ranked)
        return [replace(plan, reads=self._reads(beams, ranked))]

    def _reads(self, beams: Sequence[int], ranked: int) -> SearchReads:
        """Of a search: 8-bit rows that walks score, lists of the expanded, keys ranked exactly.

        Keys that are no nodes are scored with the walked ones, and are as wide.
        """
        heads, num_keys, dim = self._keys.shape
        row = dim * self._keys.itemsize
        lists = [graph.lists.shape[1] if len(graph) else 0 for graph in self._graphs]
        expanded = sum(map(mul, beams, lists))
        return SearchReads(
            ranked=expanded + heads * ranked * row,
            most=sum(graph.lists.nbytes for graph in self._graphs) + heads * num_keys * row,
            walked=self._searcher.rows[0].row_bytes + 1,
            walks=sum(self.walks) / heads,
        )
