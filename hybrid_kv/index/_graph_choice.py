"""Graphs for the heads of a layer that shall try one: built, and timed beside what serves.

A graph is hard to search where queries see many dimensions of the keys (`effective_dim`). So a head
whose graph was of no use speaks for those of as many dimensions or more, and one whose graph is
faster says what those near it have to expect. Nothing is known beyond the layer and its keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hybrid_kv.index._auto_choice import (
    RERANK,
    Chosen,
    Cost,
    Payback,
    Report,
    ScanTrial,
    Sketched,
    SketchTrial,
    TimedSearch,
    cheapest,
    core_clock,
    decoding_pace,
    measured,
    ranked_bytes,
)
from hybrid_kv.index._base import Cancellation
from hybrid_kv.index._graph_learner import GraphLearner, rows_of, walks_of_each
from hybrid_kv.index._trial import HeadReport
from hybrid_kv.index.flat import num_candidates
from hybrid_kv.ops.key_graph import KeyGraph
from hybrid_kv.ops.native.graph import GraphSearcher
from hybrid_kv.ops.native.rows import QuantisedKeys


class GraphChooser:
    """Tries graphs for heads of a layer, one after the other, and keeps what is the fastest.

    learner: builds them.

    Args:
        params: of an auto index.
        graph_params: of its graphs.
    """

    def __init__(self, params: Any, graph_params: Any, cancellation: Cancellation) -> None:
        self._params, self.learner = params, GraphLearner(graph_params, cancellation)

    def choose(
        self, before: Sketched, keys: Tensor, samples: Tensor, nearest: Tensor | None
    ) -> Chosen:
        """The same with graphs for the heads that shall try one, where they are the fastest then.

        Args:
            samples: [Hkv, G, M, D]. nearest: as for `Index.build`.
        """
        told: list[Report] = list(before.reports)
        graphs: dict[int, KeyGraph] = {}
        trials: dict[tuple[str, int], TimedSearch] = {}
        reports: dict[int, HeadReport] = {}
        pace = decoding_pace()
        dims = {head: before.reports[head].effective_dim for head in before.wanted}
        payback = Payback(self._params.graph_tokens, pace)
        tried = GraphTrials(before.costs, dims, payback, self._params.graph_trial_seconds)
        clock, threads = core_clock()
        for head in tried.order(before.wanted):
            if (why_not := tried.why_not(head)) is not None:
                told[head] = _said(told[head], why_not)
                continue
            begin = clock()
            graph, reports[head] = self.learner.learn_head(
                keys[head],
                samples[head],
                None if nearest is None else nearest[head],
                before.sketches.get(head),
                walks_of_each(len(before.wanted)),
            )
            build_s = threads * (clock() - begin)
            if graph is None:
                tried.note(head, None, build_s)
                told[head] = _said(told[head], reports[head].reason)
                continue
            graphs[head] = graph
            own = self._graph_and_served(before, head, keys, graph, reports[head], samples.shape[1])
            found = measured(own, samples)
            served = found[before.costs[head].kind, head]
            tried.note(head, found["graph", head], build_s, served)
            trials |= own
        costs = measured(trials, samples) if trials else {}
        for head in list(graphs):
            kind, why = cheapest(
                [costs[what, head] for what in ("graph", before.costs[head].kind)], pace
            )
            if kind == "graph":
                told[head] = _said(reports[head], why)
            else:
                told[head] = _said(told[head], why)
                del graphs[head]
        return Chosen(told, before.sketches, graphs)

    def _graph_and_served(
        self,
        before: Sketched,
        head: int,
        keys: Tensor,
        graph: KeyGraph,
        served: HeadReport,
        group: int,
    ) -> dict[tuple[str, int], TimedSearch]:
        """A head's search by graph, and by what serves it now."""
        own, top_k = keys[head : head + 1], min(self._params.check_top_k, keys.shape[1])
        trials: dict[tuple[str, int], TimedSearch] = {
            ("graph", head): GraphTrial(own, graph, rows_of(own[0], graph), served, top_k)
        }
        if (sketch := before.sketches.get(head)) is not None:
            trials["sketch", head] = SketchTrial(own, sketch, group, top_k)
        else:
            trials["flat", head] = ScanTrial(own, group, top_k)
        return trials


def _said(report: Report, why: str) -> Report:
    """A report with a further reason."""
    return replace(report, reason=f"{report.reason}; {why}")


class GraphTrial:
    """A graph over its keys [1, N, D]; read_bytes are those of the latest search."""

    def __init__(
        self,
        keys: Tensor,
        graph: KeyGraph,
        rows: QuantisedKeys,
        served: HeadReport,
        top_k: int,
    ) -> None:
        self._searcher = GraphSearcher(keys, [rows], [graph])
        self._keys, self._graph, self._rows = keys, graph, rows
        self._served, self._top_k = served, top_k
        self._ranked = num_candidates(RERANK, top_k, keys.shape[1])
        self.read_bytes = 0.0

    def search(self, queries: Tensor) -> Any:
        found = self._searcher.search(
            queries,
            self._top_k,
            beam=self._served.beam,
            walks=self._served.walks,
            pool_size=self._ranked,
        )
        group = queries.shape[1]
        scored = found.rows_visited * (self._rows.row_bytes + 1)
        expanded = group * self._served.beam * self._graph.lists.shape[1]
        self.read_bytes = scored + expanded + ranked_bytes(self._keys, group * self._ranked)
        return found


@dataclass(frozen=True, slots=True)
class _Tried:
    """cost: of the graph, None where it missed its goal or is slower than what serves."""

    head: int
    dim: float
    cost: Cost | None
    build_s: float


class GraphTrials:
    """The trials of one layer, head by head, in the order that `order` gives.

    Args:
        served: cost of what serves, by head.
        dims: effective dimensions, by head.
        payback: when a graph is worth its build.
        most_lost_s: core-seconds that graphs without use may take; then no more are tried.
    """

    def __init__(
        self,
        served: Mapping[int, Cost],
        dims: Mapping[int, float],
        payback: Payback,
        most_lost_s: float,
    ) -> None:
        self._served, self._dims = served, dims
        self._payback, self._most_lost_s = payback, most_lost_s
        self._tried: list[_Tried] = []

    def order(self, heads: Iterable[int]) -> list[int]:
        """Order of heads: the most time to win first; of equal ones the fewest dimensions."""
        pace = self._payback.pace
        return sorted(heads, key=lambda n: (-self._served[n].seconds(pace), self._dims[n], n))

    def why_not(self, head: int) -> str | None:
        """Reason why this head tries no graph after what others have found; None if it does."""
        dim = self._dims[head]
        for one in self._tried:
            if one.cost is None and one.dim <= dim:
                return (
                    f"no graph, for that of head {one.head} was of no use and queries see "
                    f"{dim:.1f} dimensions here, {one.dim:.1f} there"
                )
        lost_s = sum(one.build_s for one in self._tried if one.cost is None)
        if lost_s >= self._most_lost_s:
            return (
                f"no graph, for {lost_s:.1f} core-seconds went into graphs of no use and "
                f"{self._most_lost_s:g} may"
            )
        useful = [one for one in self._tried if one.cost is not None]
        if not useful:
            return None
        near = min(useful, key=lambda one: abs(one.dim - dim))
        assert near.cost is not None
        wins, why = self._payback.wins(self._served[head], near.cost, near.build_s)
        return None if wins else f"as head {near.head} tells, {why}"

    def note(
        self, head: int, graph: Cost | None, build_s: float, served: Cost | None = None
    ) -> None:
        """Takes the result of a trial.

        Args:
            graph: its cost, None where it missed its goal.
            served: the cost of what serves, as it was timed in turn with the graph. Where the
                machine has become faster or slower since all were timed, so has the graph.
        """
        pace, before = self._payback.pace, self._served[head]
        served = served or before
        if graph is not None and graph.seconds(pace) >= served.seconds(pace):
            graph = None
        if graph is not None:
            graph = replace(graph, work_s=graph.work_s * before.work_s / served.work_s)
        self._tried.append(_Tried(head, self._dims[head], graph, build_s))
