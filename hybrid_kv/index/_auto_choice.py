"""Choice of the kind of search for each head of a layer: what is learned is timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor

from hybrid_kv.index._auto_costs import GraphTrial, ScanTrial, SketchTrial, TimedSearch, measured
from hybrid_kv.index._choice import (
    Cost,
    Pace,
    cheapest,
    core_clock,
    decoding_pace,
    mean_cost,
)
from hybrid_kv.index._graph_learner import GraphLearner, rows_of, walks_of_each
from hybrid_kv.index._graph_trials import GraphTrials, Payback, build_forecast, hoped
from hybrid_kv.index._sketch_head import HeadSketch
from hybrid_kv.index._sketch_learn import SketchLearner, SketchReport
from hybrid_kv.index._trial import HeadReport
from hybrid_kv.ops.key_graph import KeyGraph
from hybrid_kv.ops.native import engine_state

_TIMED_SCANS = 2
"""Heads whose scan is timed; all cost the same."""

Report: TypeAlias = SketchReport | HeadReport


@dataclass(frozen=True, slots=True)
class Chosen:
    """Choice for a layer: a report of each head, and sketches and graphs by head.

    Heads with neither are scanned. group_size: query heads that a graph was learned from, 0 for
    none.
    """

    reports: Sequence[Report]
    sketches: Mapping[int, HeadSketch]
    graphs: Mapping[int, KeyGraph] = field(default_factory=dict)
    group_size: int = 0


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
    """Chooses the kind of search for each head of a layer: sketch or scan first, graphs later.

    sketcher, grapher: what learns them.

    Args:
        params: of an auto index.
    """

    def __init__(self, params: Any, sketcher: SketchLearner, grapher: GraphLearner) -> None:
        self._params, self.sketcher, self.grapher = params, sketcher, grapher

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
        self, served: Cost, scan: Cost, dim: float, sizes: tuple[int, ...], pace: Pace
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

    def with_graphs(
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
            graph, reports[head] = self.grapher.learn_head(
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
        return Chosen(told, before.sketches, graphs, samples.shape[1])

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
