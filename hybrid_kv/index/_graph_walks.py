"""Searches of a layer by graphs of its keys, which may grow while it is searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import mul

from torch import Tensor

from hybrid_kv.index._graph_learner import rows_of
from hybrid_kv.index._growth import GraphGrowth
from hybrid_kv.index._trial import HeadReport
from hybrid_kv.ops.key_graph import KeyGraph
from hybrid_kv.ops.native.graph import GraphSearcher
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.ops.native.workers import pool_here
from hybrid_kv.types import SearchReads, SearchResult


class GraphWalks:
    """Searches keys by walks through graphs, one graph per KV head; an empty one has all scanned.

    graphs, reports: of each head; others when one has grown. beams, walks: of each head's searches,
    as its report says.

    Args:
        keys: [Hkv, N, D].
        group_size: query heads of a KV head, 0 if not known.
        growth: links later keys from what searches find; None where they are scanned one and all.
    """

    def __init__(
        self,
        keys: Tensor,
        graphs: Sequence[KeyGraph],
        reports: Sequence[HeadReport],
        group_size: int,
        growth: GraphGrowth | None,
    ) -> None:
        rows = [rows_of(keys[head], graph) for head, graph in enumerate(graphs)]
        self._searcher = GraphSearcher(keys, rows, graphs, pool=pool_here())
        self._keys, self._group_size, self.growth = keys, group_size, growth
        self._follow(tuple(graphs), tuple(reports))

    def _follow(self, graphs: tuple[KeyGraph, ...], reports: tuple[HeadReport, ...]) -> None:
        self.graphs, self.reports = graphs, reports
        # A head that is scanned has no beam, which no search minds.
        self.beams = [max(1, report.beam) for report in reports]
        self.walks = [report.walks for report in reports]

    @property
    def memory_bytes(self) -> int:
        grown = 0 if self.growth is None else self.growth.recent.memory_bytes
        return self._searcher.memory_bytes + grown

    def append(self, keys: Tensor) -> None:
        """Takes the later rows of keys [Hkv, N, D]; a head may link its own into its graph."""
        self._keys = keys
        self._searcher.append(keys, pool_here())
        if self.growth is None:
            return
        reports = self.growth.link_one(self._searcher, keys, self.reports)
        if reports is not None:
            self._follow(tuple(self._searcher.graphs), reports)

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
        if self.growth is not None and queries.shape[1] % self._group_size == 0:
            per_position = (self._group_size, -1)  # of several new tokens the newest one counts
            newest = (part.unflatten(1, per_position)[:, :, -1] for part in (queries, found.ids))
            self.growth.recent.record(*newest)
        read = self._reads(beams, ranked)
        walked = round(found.rows_visited * read.walked)
        return SearchResult(
            *(found.ids, found.scores, found.dots, found.rows_visited),
            read_bytes=walked + read.of(queries.shape[1], 0),
        )

    def plan(self, width: int, beams: list[int], ranked: int) -> list[EngineSearch] | None:
        """The same search, for the engine; None where it is learned from."""
        if self.growth is not None:
            return None
        plan = self._searcher.plan(width, beam=beams, walks=self.walks, pool_size=ranked)
        return [replace(plan, reads=self._reads(beams, ranked))]

    def _reads(self, beams: Sequence[int], ranked: int) -> SearchReads:
        """Of a search: 8-bit rows that walks score, lists of the expanded, keys ranked exactly.

        Keys that are no nodes are scored with the walked ones, and are as wide.
        """
        heads, num_keys, dim = self._keys.shape
        row = dim * self._keys.itemsize
        lists = [graph.lists.shape[1] if len(graph) else 0 for graph in self.graphs]
        expanded = sum(map(mul, beams, lists))
        return SearchReads(
            ranked=expanded + heads * ranked * row,
            most=sum(graph.lists.nbytes for graph in self.graphs) + heads * num_keys * row,
            walked=self._searcher.rows[0].row_bytes + 1,
            walks=sum(self.walks) / heads,
        )
