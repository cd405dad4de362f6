"""`auto`: for every KV head the kind of search that is the fastest where it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from pydantic import BaseModel, Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._auto_costs import GraphTrial, ScanTrial, SketchTrial, TimedSearch, measured
from hybrid_kv.index._choice import (
    Cost,
    Pace,
    cheapest,
    core_clock,
    decoding_pace,
    mean_cost,
)
from hybrid_kv.index._file import refusing_what_is_damaged
from hybrid_kv.index._graph_learner import GraphLearner, rows_of, walks_of_each
from hybrid_kv.index._graph_trials import GraphTrials, Payback, build_forecast, hoped
from hybrid_kv.index._parts import joined, runs
from hybrid_kv.index._saved import SavedIndex
from hybrid_kv.index._sketch_head import HeadSketch
from hybrid_kv.index._sketch_learn import SketchLearner, SketchReport
from hybrid_kv.index._stand_in import StandIn
from hybrid_kv.index._trial import HeadReport
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.index.sketch import SketchIndex
from hybrid_kv.ops.key_graph import KeyGraph
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.plugins import INDEXES, Index
from hybrid_kv.types import Needs, SearchResult

_TIMED_SCANS = 2
"""Heads whose scan is timed; all cost the same."""


@dataclass(frozen=True, slots=True)
class Part:
    """An index over some heads, whose keys are a view of the layer's."""

    heads: slice
    index: SketchIndex | GraphIndex


@dataclass(frozen=True, slots=True)
class Sketched:
    """A layer as sketches serve it: what to build graphs beside.

    costs: of what serves, by head; wanted: the heads that shall try a graph, with the reason.
    """

    reports: tuple[SketchReport, ...]
    sketches: dict[int, HeadSketch]
    costs: dict[int, Cost]
    wanted: dict[int, str]


@INDEXES.register("auto", paper="this project; arXiv:2409.10516 for the graph")
class AutoIndex(SavedIndex):
    """Serves each head by a sketch, a scan or a graph: by what takes the least time where it runs.

    Sketches come first, because they are learned quickly. Sketch and scan are timed on queries of
    the prompt, on one thread, and the bytes that they read are counted: what takes less time with
    the threads and the memory of decoding serves the head, and the head's report has the figures.

    Where a graph is forecast to win back its build, its layer has a `successor`, which builds
    graphs while the sketches or scans serve, times them too, and keeps what is the fastest. It
    tries one head after the other, and what was found decides for heads that are like it
    (`GraphTrials`). All is decided from the keys and queries of this context alone. A context that
    is scanned as a whole is decided anew whenever it has doubled.
    """

    ranks = True

    file_kind = "auto"

    class Params(SketchIndex.Params, GraphIndex.Params):
        """graph_tokens: decoded tokens in which a head's graph has to win back its build, 0 for no
        graphs; graph_min_keys: no graph is tried with fewer keys; target_recall: of a graph too;
        target_mass: of sketches only; max_scanned: of graphs; graph_trial_seconds: of a core, that
        a layer spends on graphs of no use before it tries no more; min_keys: fewer are scanned;
        gain: below 1, where forecasts of sketch and scan are close, both are timed.
        """

        graph_tokens: config.Tokens = 32768
        graph_min_keys: config.Count = 16384
        gain: float = Field(default=0.8, ge=0)
        max_scanned: float = Field(default=0.25, gt=0, le=1)
        graph_trial_seconds: float = Field(default=30.0, ge=0)

    def __init__(self, params: Any, before: Sketched | None = None) -> None:
        super().__init__(params)
        own = _params_of_kinds(params)
        self._sketcher = SketchLearner(own[0], self._cancellation)
        self._grapher = GraphLearner(own[1], self._cancellation)
        self._before = before
        self._sketched: Sketched | None = None  # what a successor begins with
        self._parts: tuple[Part, ...] = ()
        self._chosen_keys = 0

    @classmethod
    def serving(
        cls,
        params: Any,
        keys: Tensor,
        reports: Sequence[SketchReport],
        sketches: Mapping[int, HeadSketch],
    ) -> AutoIndex:
        """See `SketchIndex.serving`; no graph is tried."""
        index = cls(params)
        index._known, index._chosen_keys = keys, keys.shape[1]
        index._parts = index._composed(reports, sketches, {}, 0)
        return index

    @property
    def sketched(self) -> Mapping[int, tuple[HeadSketch, SketchReport]]:
        """See `SketchIndex.sketched`."""
        return {
            range(len(self._keys))[part.heads][head]: one
            for part in self._parts
            if isinstance(part.index, SketchIndex)
            for head, one in part.index.sketched.items()
        }

    @classmethod
    def needs(cls, params: Any) -> Needs:
        return SketchIndex.needs(params)

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        sketch, graph = _params_of_kinds(params)
        most = SketchIndex.bytes_per_key(sketch, num_keys, head_dim)
        if params.graph_tokens:
            most = max(most, GraphIndex.bytes_per_key(graph, num_keys, head_dim))
        return most

    @property
    def relearn_keys(self) -> int:
        horizon = int(self.params.horizon_tokens)
        waits = [keys for part in self._parts if (keys := part.index.relearn_keys)]
        if waits or not self._parts:
            return min(waits, default=horizon)
        return max(self._chosen_keys, horizon) if horizon else 0

    @property
    def memory_bytes(self) -> int:
        return sum(part.index.memory_bytes for part in self._parts)

    def describe(self) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = [{} for _ in range(len(self._keys))]
        for part in self._parts:
            told[part.heads] = part.index.describe()
        return told

    def stand_in(self, keys: Tensor, samples: Tensor | None) -> Index | None:
        return None if self._sketcher.why_flat(keys, samples) else StandIn()

    def successor(self) -> AutoIndex | None:
        before, self._sketched = self._sketched, None
        if before is None:
            return None
        copies = {head: sketch.copy() for head, sketch in before.sketches.items()}
        return AutoIndex(self.params, replace(before, sketches=copies))

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        self._chosen_keys = len(self)
        if self._before is None:
            self._sketched = self._serve_sketches(samples)
            return
        assert samples is not None
        self._serve_graphs(self._before, samples, nearest)
        self._before = None

    def _serve_sketches(self, samples: Tensor | None) -> Sketched | None:
        """Serves heads by sketch or scan; what is left to do if graphs are likely to pay."""
        reports, sketches = self._sketcher.learn(self._keys, samples)
        is_unread = self._sketcher.why_flat(self._keys, samples) is not None
        if is_unread or engine_state().isa is None:
            self._parts = self._composed(reports, sketches, {}, 0)
            return None
        assert samples is not None
        pace, costs = decoding_pace(), self._sketch_costs(sketches, samples)
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
            is_wanted, why = self._forecast(served[head], costs["flat", 0], dim, samples, pace)
            told[head] = replace(told[head], reason=f"{told[head].reason}; {why}")
            if is_wanted:
                wanted[head] = why
        self._parts = self._composed(told, sketches, {}, 0)
        return Sketched(tuple(told), sketches, served, wanted) if wanted else None

    def _sketch_costs(
        self, sketches: Mapping[int, HeadSketch], samples: Tensor
    ) -> dict[tuple[str, int], Cost]:
        """Of every sketch by ("sketch", head); of a scan as ("flat", 0)."""
        group, top_k = samples.shape[1], min(self.params.check_top_k, len(self))
        trials: dict[tuple[str, int], TimedSearch] = {
            ("sketch", head): SketchTrial(self._keys[head : head + 1], sketch, group, top_k)
            for head, sketch in sketches.items()
        }
        for head in range(min(_TIMED_SCANS, len(self._keys))):
            trials["flat", head] = ScanTrial(self._keys[head : head + 1], group, top_k)
        costs = measured(trials, samples)
        scans = [cost for (kind, _), cost in costs.items() if kind == "flat"]
        return costs | {("flat", 0): mean_cost(scans)}

    def _forecast(
        self, served: Cost, scan: Cost, dim: float, samples: Tensor, pace: Pace
    ) -> tuple[bool, str]:
        """Whether a head of so many effective dimensions shall try a graph, and why or why not."""
        tokens, most_s = self.params.graph_tokens, self.params.graph_trial_seconds
        if not tokens:
            return False, "no graphs are wanted"
        if len(self) < self.params.graph_min_keys:
            return False, f"{len(self)} keys, a graph takes {self.params.graph_min_keys}"
        if not dim:
            return False, "no graph, for nothing is known of what queries see"
        build_s = build_forecast(served, scan, samples.shape[1], samples.shape[2])
        if build_s > most_s:
            return False, (
                f"a graph is forecast to take {build_s:.1f} core-seconds to build, "
                f"graph_trial_seconds is {most_s:g}"
            )
        is_wanted, why = Payback(tokens, pace).wins(served, hoped(served), build_s)
        return is_wanted, f"by forecast {why}"

    def _serve_graphs(self, before: Sketched, samples: Tensor, nearest: Tensor | None) -> None:
        """Graphs for the heads that shall try one, where they are the fastest then."""
        told: list[SketchReport | HeadReport] = list(before.reports)
        graphs: dict[int, KeyGraph] = {}
        trials: dict[tuple[str, int], TimedSearch] = {}
        reports: dict[int, HeadReport] = {}
        pace = decoding_pace()
        dims = {head: before.reports[head].effective_dim for head in before.wanted}
        payback = Payback(self.params.graph_tokens, pace)
        tried = GraphTrials(before.costs, dims, payback, self.params.graph_trial_seconds)
        clock, threads = core_clock()
        for head in tried.order(before.wanted):
            if (why_not := tried.why_not(head)) is not None:
                told[head] = _said(told[head], why_not)
                continue
            begin = clock()
            graph, reports[head] = self._grapher.learn_head(
                self._keys[head],
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
            own = self._graph_and_served(before, head, graph, reports[head], samples.shape[1])
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
        self._parts = self._composed(told, before.sketches, graphs, samples.shape[1])

    def _graph_and_served(
        self, before: Sketched, head: int, graph: KeyGraph, served: HeadReport, group: int
    ) -> dict[tuple[str, int], TimedSearch]:
        """A head's search by graph, and by what serves it now."""
        keys, top_k = self._keys[head : head + 1], min(self.params.check_top_k, len(self))
        trials: dict[tuple[str, int], TimedSearch] = {
            ("graph", head): GraphTrial(keys, graph, rows_of(keys[0], graph), served, top_k)
        }
        if (sketch := before.sketches.get(head)) is not None:
            trials["sketch", head] = SketchTrial(keys, sketch, group, top_k)
        else:
            trials["flat", head] = ScanTrial(keys, group, top_k)
        return trials

    def _composed(
        self,
        reports: Sequence[SketchReport | HeadReport],
        sketches: Mapping[int, HeadSketch],
        graphs: Mapping[int, KeyGraph],
        group: int,
    ) -> tuple[Part, ...]:
        """An index for each run of heads with a graph, and of heads without one."""
        parts: list[Part] = []
        for heads in runs(sorted(graphs)):
            own = range(len(reports))[heads]
            told = [report for n in own if isinstance(report := reports[n], HeadReport)]
            keys, params = self._keys[heads], self._grapher.params
            index = GraphIndex.serving(params, keys, told, [graphs[n] for n in own], group)
            parts.append(Part(heads, index))
        for heads in runs(n for n in range(len(reports)) if n not in graphs):
            own = range(len(reports))[heads]
            told_ = [report for n in own if isinstance(report := reports[n], SketchReport)]
            local = {place: sketches[n] for place, n in enumerate(own) if n in sketches}
            part = SketchIndex.serving(self._sketcher.params, self._keys[heads], told_, local)
            parts.append(Part(heads, part))
        return tuple(parts)

    def _append(self, known: int) -> None:
        for part in self._parts:
            part.index.add(self._keys[part.heads])

    @property
    def innermost(self) -> Index:
        return self._parts[0].index if len(self._parts) == 1 else self

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        return self._search(queries, count, most, None)

    def _find_near(self, queries: Tensor, count: int, most: int, near: Tensor) -> SearchResult:
        return self._search(queries, count, most, near)

    def _plan(self, count: int, most: int) -> list[EngineSearch] | None:
        searches: list[EngineSearch] = []
        for part in self._parts:
            planned = part.index.plan(count, most)
            if planned is None:
                return None
            heads = range(len(self._keys))[part.heads]
            searches += (search.of(heads) for search in planned)
        return searches

    def _search(self, queries: Tensor, count: int, most: int, near: Tensor | None) -> SearchResult:
        if len(self._parts) == 1:
            return self._parts[0].index.search(queries, count, most, near)
        parts = []
        for part in self._parts:
            own = None if near is None else near[part.heads]
            parts.append((part.heads, part.index.search(queries[part.heads], count, most, own)))
        heads = range(len(queries))
        rows = [
            len(heads[own]) * len(self) if found.rows_read is None else found.rows_read
            for own, found in parts
        ]
        return joined(queries, parts, sum(rows))

    def over(self, keys: Tensor) -> AutoIndex:
        """See `SavedIndex`."""
        new = super().over(keys)
        parts = self._parts
        new._parts = tuple(Part(part.heads, part.index.over(keys[part.heads])) for part in parts)
        return new

    def shortened(self, keys: Tensor) -> AutoIndex | None:
        """See `SavedIndex`."""
        new, parts = super().over(keys), []
        for part in self._parts:
            if (index := part.index.shortened(keys[part.heads])) is None:
                return None
            parts.append(Part(part.heads, index))
        new._parts = tuple(parts)
        return new

    def to_file(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """See `SavedIndex`: what serves the heads, part by part."""
        parts: list[dict[str, Any]] = []
        arrays: dict[str, NDArray[Any]] = {}
        for number, part in enumerate(self._parts):
            meta, own = part.index.to_file()
            heads = list(range(len(self._keys))[part.heads])
            parts.append({"kind": part.index.file_kind, "heads": heads, "meta": meta})
            arrays |= {f"{number}/{name}": array for name, array in own.items()}
        meta = {"params": self.params.model_dump(mode="json"), "parts": parts}
        return {**meta, "chosen_keys": self._chosen_keys}, arrays

    @classmethod
    def from_file(
        cls, path: Path, meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], keys: Tensor
    ) -> AutoIndex:
        """See `SavedIndex`."""
        with refusing_what_is_damaged(path):
            known = {n: meta["params"][n] for n in cls.Params.model_fields if n in meta["params"]}
            index = cls(cls.Params.model_validate(known))  # older files have `remember`
            index._known, index._chosen_keys = keys, int(meta["chosen_keys"])
            index._parts = tuple(
                _part_of(path, number, part, arrays, keys)
                for number, part in enumerate(meta["parts"])
            )
            heads = sorted(n for part in index._parts for n in range(len(keys))[part.heads])
            if heads != list(range(len(keys))):
                raise ValueError(f"its parts serve heads {heads} of {len(keys)}")
        return index


def _params_of_kinds(params: Any) -> tuple[BaseModel, BaseModel]:
    """The share of the parameters that sketches have, and that graphs have."""

    def own(kind: type[BaseModel], **changed: Any) -> BaseModel:
        shared = {name: getattr(params, name) for name in kind.model_fields}
        return kind.model_validate(shared | changed)

    graph = own(GraphIndex.Params, target_mass=1.0, min_keys=params.graph_min_keys)
    return own(SketchIndex.Params), graph


def _part_of(
    path: Path,
    number: int,
    what: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    keys: Tensor,
) -> Part:
    """A part as a file holds it; raises whatever is wrong with it by itself."""
    wanted = [int(head) for head in what["heads"]]
    found = runs(wanted) if wanted == sorted({*wanted} & {*range(len(keys))}) else []
    if len(found) != 1:
        raise ValueError(f"part {number} serves heads {wanted[:9]}")
    own = {
        name.removeprefix(f"{number}/"): array
        for name, array in arrays.items()
        if name.startswith(f"{number}/")
    }
    classes: tuple[type[SketchIndex | GraphIndex], ...] = (SketchIndex, GraphIndex)
    kinds = {kind.file_kind: kind for kind in classes}
    index = kinds[what["kind"]].from_file(path, what["meta"], own, keys[found[0]])
    return Part(found[0], index)


def _said(report: SketchReport | HeadReport, why: str) -> SketchReport | HeadReport:
    """A report with a further reason."""
    return replace(report, reason=f"{report.reason}; {why}")
