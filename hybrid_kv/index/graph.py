"""`graph`: an attention-aware graph of the keys, projected from prefill queries.

Sources: RetrievalAttention (Liu et al. 2024, arXiv:2409.10516), section 3.2; RoarGraph (Chen et al.
2024), whose idea of learning from queries it takes and whose projection it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import mul
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.errors import FileFormatError
from hybrid_kv.index._file import (
    check_fingerprint,
    fingerprint,
    refusing_what_is_damaged,
)
from hybrid_kv.index._flat_scans import KeyScan, int8_scan, num_candidates, planned
from hybrid_kv.index._growth import GraphGrowth
from hybrid_kv.index._learn import BEAMS, DRIFT, learn
from hybrid_kv.index._saved import SavedIndex
from hybrid_kv.index._sketch_engine import TierSearcher
from hybrid_kv.index._sketch_head import HeadSketch
from hybrid_kv.index._stand_in import StandIn
from hybrid_kv.index._trial import Goal, HeadReport
from hybrid_kv.ops.graph_lists import list_bytes
from hybrid_kv.ops.key_graph import BuildParams, KeyGraph, check_graph, no_graph
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native import flat as native_flat
from hybrid_kv.ops.native.graph import GraphSearcher
from hybrid_kv.ops.native.graph_build import project
from hybrid_kv.ops.native.rows import DTYPES, QuantisedKeys, is_readable
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.ops.native.workers import default_pool, pool_here
from hybrid_kv.plugins import INDEXES, Index
from hybrid_kv.types import Needs, SearchReads, SearchResult

_ROW_ALIGNMENT = 64
_QUERIES_AT_ONCE = 8192
"""Of a search for nearest keys; a build that is cancelled ends after these."""
_SKETCHED_AT_ONCE, _LIST_RERANK = 1024, 3
"""Queries of a search by sketch for lists, and candidates per key of a list."""
_ARRAYS = ("keys_of", "lists", "entries")


@INDEXES.register("graph", paper="arXiv:2409.10516, section 3.2; RoarGraph (Chen et al. 2024)")
class GraphIndex(SavedIndex):
    """Walks a graph that prefill queries built; heads that it does not suit are scanned.

    One graph per KV head, from the queries of all its query heads, which also search it together.
    Every head proves itself on queries that took no part in its build (`reports`): where it misses
    the goal, or has few keys, all keys are scored in 8 bits and the best ranked exactly.

    Such scans are divided over the threads. Keys that are added later are scanned one and all, or,
    with `link_keys`, until there are so many: then they are linked through the searches that have
    found them, one head in an `add`, and the head proves itself anew. Those that no search has
    found by then are not found afterwards.
    """

    ranks = True

    file_kind = "graph"

    class Params(config.Params):
        """max_degree: longest list of neighbours; list_length: keys that a sampled query names;
        candidates, cap: neighbours considered per key, and the queries they are taken from; alpha:
        how much nearer one neighbour must be to stand for another; sampled_queries,
        recent_queries: prefill queries per query head to learn from, spread evenly (up to twice as
        many) and from the prompt's end; horizon_tokens: they are turned to so many positions behind
        the prompt (RoPE), and the graph is learned again, in the background, when so many further
        keys have come; 0 for neither; min_keys: fewer are scanned; beam: keys expanded per query,
        "auto" for what the self-check found; target_recall, target_mass: goals of the self-check,
        one of which has to be reached; check_positions: held out for it; check_top_k: the best keys
        that it asks for; max_scanned: largest share of the keys that a search may score; link_keys:
        later keys that are linked together, 0 for never; link_positions: the latest positions whose
        searches link them.
        """

        max_degree: int = Field(default=64, ge=2, le=256)
        list_length: config.Count = 100
        candidates: config.Count = 512
        cap: int = Field(default=32, ge=2, le=255)
        alpha: float = Field(default=1.2, gt=0)
        sampled_queries: config.Tokens = 2048
        recent_queries: config.Tokens = 2048
        horizon_tokens: config.Tokens = 4096
        min_keys: config.Count = 16384
        beam: config.Count | Literal["auto"] = "auto"
        target_recall: float = Field(default=0.95, gt=0, le=1)
        target_mass: float = Field(default=0.999, gt=0)
        check_positions: config.Count = 128
        check_top_k: config.Count = 100
        max_scanned: float = Field(default=0.12, gt=0, le=1)
        link_keys: config.Tokens = 0
        link_positions: config.Count = 1024

        def without_effect(self) -> dict[str, str]:
            return {} if self.link_keys else {"link_positions": "with link_keys 0"}

    _rerank: ClassVar[float] = 1.5
    """Keys that a search ranks exactly per key that it is asked for."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.reports: tuple[HeadReport, ...] = ()
        self._graphs: tuple[KeyGraph, ...] = ()
        self._searcher: GraphSearcher | None = None
        self._scan: KeyScan | None = None
        self._beams: list[int] = []
        self._walks: list[int] = []
        self._group_size = 0  # query heads, 0 if not known
        self._learned_keys = 0
        self._growth: GraphGrowth | None = None

    @classmethod
    def needs(cls, params: Any) -> Needs:
        listed = max(params.list_length, params.check_top_k)
        return Needs(params.sampled_queries, params.recent_queries, listed, params.horizon_tokens)

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        codes = -(-head_dim // _ROW_ALIGNMENT) * _ROW_ALIGNMENT + 1
        if num_keys < params.min_keys:
            return codes
        return codes + list_bytes(int(params.max_degree), num_keys) + 4  # if all keys are nodes

    @property
    def relearn_keys(self) -> int:
        horizon = int(self.params.horizon_tokens)
        if any(len(graph) for graph in self._graphs) or not self.reports or not horizon:
            return horizon
        return max(horizon, self._learned_keys)  # scanned: once more when there are twice as many

    @property
    def memory_bytes(self) -> int:
        recent = None if self._growth is None else self._growth.recent
        parts = (self._searcher, self._scan, recent)
        return sum(part.memory_bytes for part in parts if part is not None)

    def describe(self) -> list[dict[str, Any]]:
        return [report.to_dict() for report in self.reports]

    def stand_in(self, keys: Tensor, samples: Tensor | None) -> Index | None:
        return None if self._why_flat(keys, samples) else StandIn()

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        self._learned_keys = len(self)
        if (reason := self._why_flat(self._keys, samples)) is not None:
            self._serve_flat(reason)
            return
        assert samples is not None
        self._group_size = samples.shape[1]
        walks = walks_of_each(len(self._keys))
        learned = [
            self.learn_head(
                self._keys[head],
                samples[head],
                None if nearest is None else nearest[head],
                walks=walks,
            )
            for head in range(len(self._keys))
        ]
        self.reports = tuple(report for _, report in learned)
        self._serve(tuple(graph or no_graph() for graph, _ in learned))

    def _serve_flat(self, reason: str) -> None:
        self.reports = tuple(HeadReport("flat", reason) for _ in self._keys)
        self._serve(tuple(no_graph() for _ in self._keys))

    @classmethod
    def serving(
        cls,
        params: Any,
        keys: Tensor,
        reports: Sequence[HeadReport],
        graphs: Sequence[KeyGraph],
        group_size: int,
    ) -> GraphIndex:
        """An index over keys [Hkv, N, D] of graphs that are there already, one per head."""
        index = cls(params)
        index._known, index.reports, index._group_size = keys, tuple(reports), group_size
        index._learned_keys = keys.shape[1]
        index._serve(tuple(graphs))
        return index

    def learn_head(
        self,
        keys: Tensor,
        samples: Tensor,
        nearest: Tensor | None,
        sketch: HeadSketch | None = None,
        walks: int = 1,
    ) -> tuple[KeyGraph | None, HeadReport]:
        """The graph of a head's keys [N, D], if it reaches the goal; not served.

        Args:
            samples: [G, M, D].
            nearest: [G, M, K] where the lists are there already.
            sketch: of the same keys, which makes the lists.
            walks: that shall share the queries of a search.
        """
        p = self.params
        goal = Goal(
            top_k=p.check_top_k,
            recall=min(1.0, p.target_recall + DRIFT),
            mass=p.target_mass,
            max_scanned=p.max_scanned,
            positions=p.check_positions,
            beams=BEAMS if p.beam == "auto" else (p.beam, p.beam),
            recent=p.recent_queries,
        )
        engine = _HeadEngine(keys, self._check_cancelled, sketch)
        shared = min(walks, samples.shape[0])
        return learn(
            keys, samples, self._build_params, p.list_length, goal, engine, nearest, shared
        )

    @property
    def _build_params(self) -> BuildParams:
        p = self.params
        return BuildParams(
            max_degree=p.max_degree, cap=p.cap, candidates=p.candidates, alpha=p.alpha
        )

    def _why_flat(self, keys: Tensor, samples: Tensor | None) -> str | None:
        """Why no graph can be learned for keys [Hkv, N, D], whatever they are; None if one can."""
        if keys.shape[1] < self.params.min_keys:
            return f"{keys.shape[1]} keys, a graph takes {self.params.min_keys}"
        if samples is None or samples.shape[2] == 0:
            return "there are no prefill queries to learn from"
        return _why_unread(keys)

    def _serve(self, graphs: tuple[KeyGraph, ...]) -> None:
        """Searches run on these graphs from now on; an empty one has its head scanned."""
        self._searcher = self._scan = self._growth = None
        self._graphs = graphs
        self._follow_reports()
        if any(len(graph) for graph in graphs):
            rows = [rows_of(self._keys[head], graph) for head, graph in enumerate(graphs)]
            self._searcher = GraphSearcher(self._keys, rows, graphs, pool=pool_here())
            if self.params.link_keys and self._group_size:
                sizes = [len(graph) for graph in graphs]
                self._growth = GraphGrowth(self.params, self._build_params, sizes)
        else:
            self._scan = int8_scan(self._rerank)
            self._scan.rebuild(self._keys)

    def _append(self, known: int) -> None:
        if self._scan is not None:
            self._scan.append(self._keys)
        elif self._searcher is not None:
            self._searcher.append(self._keys, pool_here())
            self._link(self._searcher)

    def _link(self, searcher: GraphSearcher) -> None:
        if self._growth is None:
            return
        reports = self._growth.link_one(searcher, self._keys, self.reports)
        if reports is not None:
            self.reports, self._graphs = reports, searcher.graphs
            self._follow_reports()

    def _follow_reports(self) -> None:
        # A head that is scanned has no beam, which no search minds.
        self._beams = [max(1, report.beam) for report in self.reports]
        self._walks = [report.walks for report in self.reports]

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        return self._search(queries, count, most, None)

    def _find_near(self, queries: Tensor, count: int, most: int, near: Tensor) -> SearchResult:
        return self._search(queries, count, most, near)

    def _search(self, queries: Tensor, count: int, most: int, near: Tensor | None) -> SearchResult:
        if self._scan is not None:
            return self._scan.find(queries, count, most)
        assert self._searcher is not None
        beams, ranked = self._effort(count, most)
        found = self._searcher.search(
            queries,
            min(most, ranked),
            beam=beams,
            walks=self._walks,
            pool_size=ranked,
            warm=near,
            pool=pool_here(),
        )
        if self._growth is not None and queries.shape[1] % self._group_size == 0:
            per_position = (self._group_size, -1)  # of several new tokens the newest one counts
            newest = (part.unflatten(1, per_position)[:, :, -1] for part in (queries, found.ids))
            self._growth.recent.record(*newest)
        read = self._reads(beams, ranked)
        walked = round(found.rows_visited * read.walked)
        return SearchResult(
            *(found.ids, found.scores, found.dots, found.rows_visited),
            read_bytes=walked + read.of(queries.shape[1], 0),
        )

    def _plan(self, count: int, most: int) -> list[EngineSearch] | None:
        if self._growth is not None:  # it learns from what searches find
            return None
        if self._searcher is None:
            return planned(self._scan, count, most)
        beams, ranked = self._effort(count, most)
        width = min(most, ranked)
        plan = self._searcher.plan(width, beam=beams, walks=self._walks, pool_size=ranked)
        return [replace(plan, reads=self._reads(beams, ranked))]

    def _reads(self, beams: Sequence[int], ranked: int) -> SearchReads:
        """Of a search: 8-bit rows that walks score, lists of the expanded, keys ranked exactly.

        Keys that are no nodes are scored with the walked ones, and are as wide.
        """
        assert self._searcher is not None
        rows, heads, row = self._searcher.rows, len(self._graphs), self._key_bytes(1)
        lists = [graph.lists.shape[1] if len(graph) else 0 for graph in self._graphs]
        expanded = sum(map(mul, beams, lists))
        return SearchReads(
            ranked=expanded + heads * ranked * row,
            most=sum(graph.lists.nbytes for graph in self._graphs) + heads * len(self) * row,
            walked=rows[0].row_bytes + 1,
            walks=sum(self._walks) / heads,
        )

    def _effort(self, count: int, most: int) -> tuple[list[int], int]:
        """Of a search for so many keys: the beam of each head, and how many are ranked exactly."""
        checked = self.params.check_top_k
        fixed = self.params.beam
        beams = self._beams if fixed == "auto" else [fixed] * len(self._graphs)
        if count > checked:  # the check was for so many keys; to find more, more are expanded
            beams = [-(-beam * count // checked) for beam in beams]
        ranked = num_candidates(self._rerank, count, len(self))
        if most > count:
            ranked = max(ranked, min(most, max(beams)))
        return beams, ranked

    def shortened(self, keys: Tensor) -> GraphIndex | None:
        """See `SavedIndex`: a graph leads through all that it has linked."""
        return self.over(keys) if self._linked <= keys.shape[1] else None

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
            "keys": fingerprint(self._keys, self._linked),
            "linked": [len(graph) for graph in self._graphs],
            "degrees": [graph.degree for graph in self._graphs],
            "group_size": self._group_size,
        }
        return meta, arrays

    @classmethod
    def from_file(
        cls, path: Path, meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], keys: Tensor
    ) -> GraphIndex:
        """See `SavedIndex`."""
        with refusing_what_is_damaged(path):
            params = cls.Params.model_validate(meta["params"])
            reports = tuple(HeadReport.from_dict(report) for report in meta["reports"])
            group_size = int(meta["group_size"])
            if group_size < 0:
                raise ValueError(f"group_size must be at least 0, got {group_size}")
            graphs = tuple(_graph_of(head, meta, arrays) for head in range(len(reports)))
            linked = max((len(graph) for graph in graphs), default=0)
            check_fingerprint(path, meta["keys"], keys, linked)
        if len(graphs) != len(keys):
            raise FileFormatError(
                f"{path} is damaged: it has {len(graphs)} graphs for {len(keys)} heads; build the "
                "index again"
            )
        return cls.serving(params, keys, reports, graphs, group_size)

    @property
    def _linked(self) -> int:
        """Rows that the graphs know; later ones are scanned."""
        return max((len(graph) for graph in self._graphs), default=0)


class _HeadEngine:
    """What learning one head takes, from the native engine; keys [N, D] are quantised once.

    Args:
        check_cancelled: called between pieces of the work.
        sketch: of these keys or the first of them; it makes the lists of sampled queries.
    """

    def __init__(
        self, keys: Tensor, check_cancelled: Callable[[], None], sketch: HeadSketch | None
    ) -> None:
        self._check_cancelled = check_cancelled
        self._sketch = None if sketch is None else TierSearcher([keys], [sketch.tiers])
        self._num_later = 0 if sketch is None else len(keys) - sketch.count
        self._quantised = _quantise(keys[None], with_blocks=True)
        self._scan = native_flat.FlatScan(keys[None], self._quantised)

    def lists(self, queries: Tensor, count: int) -> Tensor:
        if self._sketch is None:
            return self.nearest(queries, count)
        ranked = min(_LIST_RERANK * count, self._scan.keys.shape[1])
        found = []
        for some in queries.split(_SKETCHED_AT_ONCE):
            self._check_cancelled()
            best = self._sketch.search(
                some[None].float(), count, num_rerank=[ranked], num_exact=self._num_later
            )
            found.append(best.ids[0].to(torch.int32))
        return torch.cat(found)

    def nearest(self, queries: Tensor, count: int) -> Tensor:
        rerank = count + count // 2
        found = []
        for some in queries.split(_QUERIES_AT_ONCE):
            self._check_cancelled()
            found.append(self._scan.nearest(0, some, count, rerank=rerank, pool=pool_here()))
        return torch.cat(found)

    def project(self, lists: Tensor, queries: Tensor, params: BuildParams) -> KeyGraph:
        self._check_cancelled()
        return project(lists, self._scan.keys[0], queries, params, pool_here())

    def searcher(self, graph: KeyGraph) -> GraphSearcher:
        keys = self._scan.keys
        rows = self._quantised.take(0, graph.keys_of.long())
        return GraphSearcher(keys, [rows], [graph])


def _graph_of(head: int, meta: Mapping[str, Any], arrays: Mapping[str, Any]) -> KeyGraph:
    """One head's graph as a file holds it; raises whatever is wrong with it."""
    graph = KeyGraph(
        **{name: torch.from_numpy(arrays[f"{head}.{name}"]) for name in _ARRAYS},
        num_keys=int(meta["linked"][head]),
        degree=int(meta["degrees"][head]),
    )
    check_graph(graph)
    return graph


def walks_of_each(num_heads: int) -> int:
    """How many walks share a head's queries, so that so many heads keep the threads busy.

    Two walks take some .6 of the time of one; more were not seen to pay.
    """
    if engine_state().isa is None:
        return 1
    return 2 if default_pool().threads >= 2 * num_heads else 1


def rows_of(keys: Tensor, graph: KeyGraph) -> QuantisedKeys:
    """What searches of one head's graph read, its nodes."""
    return _quantise(keys[None]).take(0, graph.keys_of.long())


def _quantise(keys: Tensor, *, with_blocks: bool = False) -> QuantisedKeys:
    heads, _, dim = keys.shape
    quantised = QuantisedKeys(heads, dim, with_rows=True, with_blocks=with_blocks)
    quantised.build(keys, pool_here())
    return quantised


def _why_unread(keys: Tensor) -> str | None:
    """Why the engine does not serve these keys; None if it does."""
    if (state := engine_state()).isa is None:
        return f"no native engine: {state.detail}"
    if keys.dtype not in DTYPES or not is_readable(keys):
        return f"the engine does not read {keys.dtype} rows of strides {list(keys.stride())}"
    return None
