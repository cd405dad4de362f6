"""Indexes of a layer whose heads are served by indexes of several kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from numpy.typing import NDArray
from pydantic import BaseModel
from torch import Tensor

from hybrid_kv.index._auto_choice import Chosen
from hybrid_kv.index._base import joined, runs
from hybrid_kv.index._saved import SavedIndex
from hybrid_kv.index._sketch_head import HeadSketch
from hybrid_kv.index._sketch_learn import SketchReport
from hybrid_kv.index._trial import HeadReport
from hybrid_kv.index.sketch import SketchIndex
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.plugins import Index
from hybrid_kv.types import SearchResult

if TYPE_CHECKING:
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
        index = graph.serving(graph_params, keys[heads], told, mine, chosen.group_size)
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
