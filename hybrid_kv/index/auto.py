"""`auto`: for every KV head the kind of search that is the fastest where it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from numpy.typing import NDArray
from pydantic import BaseModel, Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._auto_choice import Chosen, KindChooser, Sketched
from hybrid_kv.index._base import SavedIndex, joined, runs
from hybrid_kv.index._sketch_head import HeadSketch
from hybrid_kv.index._sketch_learn import SketchLearner, SketchReport
from hybrid_kv.index._trial import GraphParams, HeadReport
from hybrid_kv.index.flat import StandIn
from hybrid_kv.index.sketch import Codes, SketchIndex
from hybrid_kv.ops.native.rows import scanned_bytes
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.plugins import INDEXES, Index
from hybrid_kv.types import Needs, SearchResult

if TYPE_CHECKING:
    from hybrid_kv.index._graph_choice import GraphChooser
    from hybrid_kv.index.graph import GraphIndex


@dataclass(frozen=True, slots=True)
class Part:
    """An index over some heads, whose keys are a view of the layer's."""

    heads: slice
    index: SketchIndex | GraphIndex


class PartedIndex(SavedIndex):
    """An index of which runs of heads are served by parts, each head by one.

    What chooses the parts fills in `_rebuild`, and what a file has of them.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._parts: tuple[Part, ...] = ()

    @property
    def memory_bytes(self) -> int:
        return sum(part.index.memory_bytes for part in self._parts)

    def describe(self) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = [{} for _ in range(len(self._keys))]
        for part in self._parts:
            told[part.heads] = part.index.describe()
        return told

    @property
    def sketched(self) -> Mapping[int, tuple[HeadSketch, SketchReport]]:
        """See `SketchIndex.sketched`."""
        return {
            range(len(self._keys))[part.heads][head]: one
            for part in self._parts
            if isinstance(part.index, SketchIndex)
            for head, one in part.index.sketched.items()
        }

    def _append(self, known: int) -> None:
        keys = self._keys
        for part in self._parts:
            part.index.grow(keys[part.heads])

    @property
    def innermost(self) -> Index:
        return self._parts[0].index if len(self._parts) == 1 else self

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        return self._find_near(queries, count, most, None)

    def _find_near(
        self, queries: Tensor, count: int, most: int, near: Tensor | None
    ) -> SearchResult:
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

    def _plan(self, count: int, most: int) -> list[EngineSearch] | None:
        searches: list[EngineSearch] = []
        for part in self._parts:
            planned = part.index.plan(count, most)
            if planned is None:
                return None
            heads = range(len(self._keys))[part.heads]
            searches += (search.of(heads) for search in planned)
        return searches

    def over(self, keys: Tensor) -> Self:
        """See `SavedIndex`."""
        new = super().over(keys)
        parts = self._parts
        new._parts = tuple(Part(part.heads, part.index.over(keys[part.heads])) for part in parts)
        return new

    def shortened(self, keys: Tensor) -> Self | None:
        """See `SavedIndex`."""
        new, parts = super().over(keys), []
        for part in self._parts:
            if (index := part.index.shortened(keys[part.heads])) is None:
                return None
            parts.append(Part(part.heads, index))
        new._parts = tuple(parts)
        return new


def composed(
    chosen: Chosen, keys: Tensor, sketch_params: BaseModel, graph_params: BaseModel
) -> tuple[Part, ...]:
    """Indexes over keys [Hkv, N, D]: one for each run of heads with a graph, or without one."""
    reports, graphs, parts = chosen.reports, chosen.graphs, list[Part]()
    for heads in runs(sorted(graphs)):
        own = range(len(reports))[heads]
        told = [report for n in own if isinstance(report := reports[n], HeadReport)]
        mine = [graphs[n] for n in own]
        graph = _graph_index()
        index = graph.serving(graph_params, keys[heads], told, mine)
        parts.append(Part(heads, index))
    for heads in runs(n for n in range(len(reports)) if n not in graphs):
        own = range(len(reports))[heads]
        told_ = [report for n in own if isinstance(report := reports[n], SketchReport)]
        local = {place: chosen.sketches[n] for place, n in enumerate(own) if n in chosen.sketches}
        part = SketchIndex.serving(sketch_params, keys[heads], told_, local)
        parts.append(Part(heads, part))
    return tuple(parts)


def part_of_file(
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
    kind: type[SketchIndex | GraphIndex] = SketchIndex
    if what["kind"] != kind.file_kind:
        kind = _graph_index()
    if what["kind"] != kind.file_kind:
        raise ValueError(f"part {number} is of kind {what['kind']!r}")
    return Part(found[0], kind.from_file(path, what["meta"], own, keys[found[0]]))


def _graph_index() -> type[GraphIndex]:
    """Loaded for the first head that a graph serves."""
    from hybrid_kv.index.graph import GraphIndex

    return GraphIndex


class AutoSizes(config.Params):
    """Constants of an auto index; tests and measurements may give others.

    min_keys: fewer are scanned, which takes less than a search beside the rest of a step.
    sampled_queries, recent_queries: prefill queries per query head to learn from, spread evenly
    (up to twice as many) and from the prompt's end; horizon_tokens: they are turned to so many
    positions behind the prompt (RoPE), and all is learned again when so many further keys have
    come, since what was learned ages; 0 for neither. target_mass: of the softmax, beside
    target_recall, for sketches alone; check_queries, check_positions: held out for the self-check
    of a sketch and of a graph; check_top_k: the best keys that it asks for; codes, num_rerank,
    beam: "auto" for what the self-check found. gain: how much more work a scan must be for a head
    to get a sketch: below 1, so that both are timed where their forecasts are close.

    graph_tokens: of decoding, in which a graph has to win back its build, eight times
    horizon_tokens, since every token waits for a search and none for a build; 0 for no graphs.
    graph_min_keys: no graph is tried with fewer; graph_trial_seconds: of a core, that a layer
    spends on graphs of no use before it tries no more; max_scanned: larger than for `graph`, since
    each is timed against what serves. max_degree, list_length, candidates, cap and
    alpha are those of `graph`.
    """

    sampled_queries: config.Tokens = 1024
    recent_queries: config.Tokens = 1024
    horizon_tokens: config.Tokens = 4096
    min_keys: config.Count = 4096
    target_mass: float = Field(default=0.997, gt=0, le=1)
    check_queries: config.Count = 192
    check_top_k: config.Count = 100
    gain: float = Field(default=0.8, ge=0)
    codes: Codes = "auto"
    num_rerank: config.Count | Literal["auto"] = "auto"
    max_degree: int = Field(default=64, ge=2, le=256)
    list_length: config.Count = 100
    candidates: config.Count = 512
    cap: int = Field(default=32, ge=2, le=255)
    alpha: float = Field(default=1.2, gt=0)
    beam: config.Count | Literal["auto"] = "auto"
    check_positions: config.Count = 128
    max_scanned: float = Field(default=0.25, gt=0, le=1)
    graph_tokens: config.Tokens = 32768
    graph_min_keys: config.Count = 16384
    graph_trial_seconds: float = Field(default=30.0, ge=0)


@INDEXES.register("auto", paper="this project; arXiv:2409.10516 for the graph")
class AutoIndex(PartedIndex):
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

    class Params(config.Params):
        """target_recall: of the best keys, those that a head's sketch or graph finds on held-out
        queries, or the head is scanned.
        """

        owner = "auto"
        in_python = frozenset({"sizes"})

        target_recall: float = Field(default=0.96, gt=0, le=1)
        sizes: AutoSizes = AutoSizes()

        @property
        def min_keys(self) -> int:
            """With fewer keys all heads are scanned."""
            return self.sizes.min_keys

    def __init__(self, params: Any, before: Sketched | None = None) -> None:
        super().__init__(params)
        sketch, graph = _params_of_kinds(params)
        self._chooser = KindChooser(params.sizes, SketchLearner(sketch, self._cancellation))
        self._before, self._graph_params = before, graph
        self._graphs: GraphChooser | None = None  # of what follows sketches
        if before is not None:
            from hybrid_kv.index._graph_choice import GraphChooser

            self._graphs = GraphChooser(params.sizes, graph, self._cancellation)
        self._sketched: Sketched | None = None  # what a successor begins with

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
        index._known = keys
        index._serve(Chosen(reports, sketches))
        return index

    @property
    def goals(self) -> SketchIndex.Params:
        """See `SketchIndex.goals`."""
        return self._chooser.sketcher.params  # type: ignore[no-any-return]

    @classmethod
    def needs(cls, params: Any) -> Needs:
        return SketchIndex.needs(params.sizes)

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        sizes = params.sizes
        scanned = scanned_bytes(head_dim)  # codes of a sketch are less
        if not sizes.graph_tokens or num_keys < sizes.graph_min_keys:
            return scanned
        from hybrid_kv.ops.key_graph import node_bytes

        return max(scanned, node_bytes(sizes.max_degree, num_keys, head_dim))

    @property
    def relearn_keys(self) -> int:
        horizon = int(self.params.sizes.horizon_tokens)
        return min((part.index.relearn_keys for part in self._parts), default=horizon)

    def stand_in(self, keys: Tensor, samples: Tensor | None) -> Index | None:
        return None if self._chooser.sketcher.why_flat(keys, samples) else StandIn()

    def successor(self) -> AutoIndex | None:
        before, self._sketched = self._sketched, None
        if before is None:
            return None
        copies = {head: sketch.copy() for head, sketch in before.sketches.items()}
        return AutoIndex(self.params, replace(before, sketches=copies))

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        if self._before is None:
            chosen, self._sketched = self._chooser.without_graphs(self._keys, samples)
        else:
            assert samples is not None
            assert self._graphs is not None
            chosen = self._graphs.choose(self._before, self._keys, samples, nearest)
            self._before = None
        self._serve(chosen)

    def _serve(self, chosen: Chosen) -> None:
        sketch_params = self._chooser.sketcher.params
        self._parts = composed(chosen, self._keys, sketch_params, self._graph_params)

    def to_file(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """See `SavedIndex`: what serves the heads, part by part."""
        parts: list[dict[str, Any]] = []
        arrays: dict[str, NDArray[Any]] = {}
        for number, part in enumerate(self._parts):
            meta, own = part.index.to_file()
            heads = list(range(len(self._keys))[part.heads])
            parts.append({"kind": part.index.file_kind, "heads": heads, "meta": meta})
            arrays |= {f"{number}/{name}": array for name, array in own.items()}
        own = self.params.model_dump(mode="json")
        return {"params": {**own.pop("sizes"), **own}, "parts": parts}, arrays

    @classmethod
    def from_file(
        cls, path: Path, meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], keys: Tensor
    ) -> AutoIndex:
        """See `SavedIndex`."""
        from hybrid_kv.index._file import refusing_what_is_damaged

        with refusing_what_is_damaged(path):
            written = meta["params"]  # older files have `remember` too
            sizes = {name: written[name] for name in AutoSizes.model_fields if name in written}
            index = cls(cls.Params(target_recall=written["target_recall"], sizes=sizes))
            index._known = keys
            index._parts = tuple(
                part_of_file(path, number, part, arrays, keys)
                for number, part in enumerate(meta["parts"])
            )
            heads = sorted(n for part in index._parts for n in range(len(keys))[part.heads])
            if heads != list(range(len(keys))):
                raise ValueError(f"its parts serve heads {heads} of {len(keys)}")
        return index


def _params_of_kinds(params: Any) -> tuple[BaseModel, BaseModel]:
    """The share of the parameters that sketches have, and that graphs have."""
    sizes, recall = params.sizes, params.target_recall

    def own(kind: type[BaseModel], **changed: Any) -> BaseModel:
        shared = {name: getattr(sizes, name, None) for name in kind.model_fields}
        return kind.model_validate({**shared, "target_recall": recall, **changed})

    graph = own(GraphParams, target_mass=1.0, min_keys=sizes.graph_min_keys)
    return own(SketchIndex.Params), graph
