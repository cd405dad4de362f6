"""Learning of a head's graph from prefill queries, by the native engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.index._base import Cancellation
from hybrid_kv.index._learn import BEAMS, DRIFT, learn
from hybrid_kv.index._sketch_head import HeadSketch, TierSearcher
from hybrid_kv.index._trial import Goal, HeadReport
from hybrid_kv.ops.key_graph import BuildParams, KeyGraph
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native import flat as native_flat
from hybrid_kv.ops.native.graph import GraphSearcher
from hybrid_kv.ops.native.graph_build import project
from hybrid_kv.ops.native.rows import DTYPES, QuantisedKeys, is_readable
from hybrid_kv.ops.native.workers import default_pool, pool_here

_QUERIES_AT_ONCE = 8192
"""Of a search for nearest keys; a build that is cancelled ends after these."""
_SKETCHED_AT_ONCE, _LIST_RERANK = 1024, 3
"""Queries of a search by sketch for lists, and candidates per key of a list."""


class GraphLearner:
    """Learns the graphs of heads, one after the other, and proves each of them.

    Args:
        params: of a graph index.
        cancellation: looked at between pieces of the work.
    """

    def __init__(self, params: Any, cancellation: Cancellation) -> None:
        self.params, self._cancellation = params, cancellation

    @property
    def build_params(self) -> BuildParams:
        """Parameters by which graphs are built, and grow."""
        p = self.params
        return BuildParams(
            max_degree=p.max_degree, cap=p.cap, candidates=p.candidates, alpha=p.alpha
        )

    def why_flat(self, keys: Tensor, samples: Tensor | None) -> str | None:
        """Reason why no graph can be learned for keys [Hkv, N, D], whatever they are; None if one
        can.
        """
        if keys.shape[1] < self.params.min_keys:
            return f"{keys.shape[1]} keys, a graph takes {self.params.min_keys}"
        if samples is None or samples.shape[2] == 0:
            return "there are no prefill queries to learn from"
        return _why_unread(keys)

    def learn_head(
        self,
        keys: Tensor,
        samples: Tensor,
        nearest: Tensor | None,
        sketch: HeadSketch | None = None,
        walks: int = 1,
    ) -> tuple[KeyGraph | None, HeadReport]:
        """The graph of a head's keys [N, D], if it reaches the goal.

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
        engine = _HeadEngine(keys, self._cancellation.check, sketch)
        shared = min(walks, samples.shape[0])
        return learn(keys, samples, self.build_params, p.list_length, goal, engine, nearest, shared)


class _HeadEngine:
    """Native engine of one head that is learned; keys [N, D] are quantised once.

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


def walks_of_each(num_heads: int) -> int:
    """Number of walks that share a head's queries, so that so many heads keep all threads busy.

    Two walks take some .6 of the time of one; more were not seen to pay.
    """
    if engine_state().isa is None:
        return 1
    return 2 if default_pool().threads >= 2 * num_heads else 1


def rows_of(keys: Tensor, graph: KeyGraph) -> QuantisedKeys:
    """Rows that searches of one head's graph read: its nodes."""
    return _quantise(keys[None]).take(0, graph.keys_of.long())


def _quantise(keys: Tensor, *, with_blocks: bool = False) -> QuantisedKeys:
    heads, _, dim = keys.shape
    quantised = QuantisedKeys(heads, dim, with_rows=True, with_blocks=with_blocks)
    quantised.build(keys, pool_here())
    return quantised


def _why_unread(keys: Tensor) -> str | None:
    """Reason why the engine does not serve these keys; None if it does."""
    if (state := engine_state()).isa is None:
        return f"no native engine: {state.detail}"
    if keys.dtype not in DTYPES or not is_readable(keys):
        return f"the engine does not read {keys.dtype} rows of strides {list(keys.stride())}"
    return None
