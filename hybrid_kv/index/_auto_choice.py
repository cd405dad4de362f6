"""Choice between sketch and scan for each head of a layer: what is learned is timed.

Where a graph is forecast to pay, `_graph_choice` goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from hybrid_kv.index._auto_costs import (
    Cost,
    Payback,
    ScanTrial,
    SearchRate,
    SketchTrial,
    TimedSearch,
    build_forecast,
    cheapest,
    decoding_pace,
    hoped,
    mean_cost,
    measured,
)
from hybrid_kv.index._sketch_head import HeadSketch
from hybrid_kv.index._sketch_learn import SketchLearner, SketchReport
from hybrid_kv.index._trial import HeadReport
from hybrid_kv.ops.native import engine_state

if TYPE_CHECKING:
    from hybrid_kv.ops.key_graph import KeyGraph

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
    """Chooses between sketch and scan for each head of a layer, and the heads that try a graph.

    sketcher: learns sketches.

    Args:
        params: of an auto index.
    """

    def __init__(self, params: Any, sketcher: SketchLearner) -> None:
        self._params, self.sketcher = params, sketcher

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
        self, served: Cost, scan: Cost, dim: float, sizes: tuple[int, ...], pace: SearchRate
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
