"""A decode step of one layer as one call of the engine, which is told once what the layer holds."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref, c_int32
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid_kv.errors import ShapeError
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.attend import folded
from hybrid_kv.ops.native.bindings import (
    SEARCH_GRAPH,
    ColdStruct,
    ExtentStruct,
    KVStruct,
    LayerStruct,
    OneStepStruct,
    PageDigestsStruct,
    ResidentStruct,
    SearchStruct,
    StepReportStruct,
    StepStruct,
    TailStruct,
)
from hybrid_kv.ops.native.library import Pool, fields_of, find_engine
from hybrid_kv.ops.native.rows import DTYPES, PageWriter, described
from hybrid_kv.ops.tail import Form, Tail, sizes_of_moments
from hybrid_kv.types import PartialAttention, SearchReads

_STEPS_AT_ONCE = 16
"""For so many steps results are made together."""


@dataclass(frozen=True, slots=True)
class EngineSearch:
    """Search of some KV heads by the engine; made anew when what is searched has changed.

    kind: SEARCH_FLAT, SEARCH_GRAPH or SEARCH_SKETCH. heads: KV heads of the layer. structs: the
    engine's descriptors of them. keeps: what they point at. width: results per query. first_row:
    what is added to ids. num_ranked: keys that are ranked exactly (sketches say it by head). beams,
    walks, num_expanded: of graphs, see `GraphSearcher.search`. reads: bytes that it reads.
    """

    kind: int
    heads: Sequence[int]
    structs: Any
    keeps: tuple[Any, ...]
    width: int
    first_row: int = 0
    num_ranked: int = 0
    beams: Sequence[int] = ()
    walks: Sequence[int] = ()
    num_expanded: int = 0
    reads: SearchReads = field(default_factory=SearchReads)

    def of(self, heads: Sequence[int], first_row: int = 0) -> EngineSearch:
        """The same for these heads of a larger layer, whose keys begin `first_row` rows earlier."""
        own = [*map(heads.__getitem__, self.heads)]
        return replace(self, heads=own, first_row=self.first_row + first_row)


class ResidentPages(NamedTuple):
    """The pages of a row that a step attends.

    k, v: [Hkv, slots, S, D], all pages of the pool. slots: [P] int64 on the host, the newest last;
    later steps may read another list, see `LayerPlan.choose_pages`.
    key_min, key_max: [Hkv, slots, D], read only where pages are chosen.
    """

    k: Tensor
    v: Tensor
    slots: Tensor
    key_min: Tensor | None = None
    key_max: Tensor | None = None


class ExtentEntries(NamedTuple):
    """Cold entries of a row that lie together, and how they are searched.

    k, v: [Hkv, N, D], N >= 1; what a search finds behind them is passed over. tail: their moments,
    by which what is not found is attended, in one of the forms of the estimate; None leaves it out.
    """

    k: Tensor
    v: Tensor
    searches: Sequence[EngineSearch]
    tail: Tail | None = None
    form: Form = "gaussian"


class ColdEntries(NamedTuple):
    """The cold entries of a row, numbered through its extents, of which there is at least one.

    width: entries that a query attends at most, the best of all extents.
    """

    extents: Sequence[ExtentEntries]
    width: int


class StepResult(NamedTuple):
    """Result of a step.

    part: out as the queries, lse as these without their last axis, float32. ids: [Hkv, M, width]
    the cold entries that were attended, best first, then -1; None where nothing is cold. report:
    times and counts, those of the plan's latest step.
    """

    part: PartialAttention
    ids: Tensor | None
    report: StepReportStruct


class NewToken(NamedTuple):
    """A token that its step stores.

    k, v: [1, Hkv, 1, D], as the plan's writer takes them. position: in the row.
    """

    k: Tensor
    v: Tensor
    position: int


class LayerPlan:
    """A layer of one batch row, described once for the steps of one token until it changes.

    Between two steps the rest of the model has emptied the caches, and every small operation waits
    for memory. So what a step needs is made beforehand: arguments once, results many at a time.
    Where pages have filled or left, `choose_pages` and `take_cold` say what there is now.

    Not for several threads at once. engine: the library. reads: tensors that the next `run` reads.
    one: its step among those of several plans. begins_warm: whether a search begins at what was
    found before. estimate_bytes: moments that a step reads; entry_bytes: of the key and value of an
    entry; read_costs: of searches, of all extents and of all but the first: bytes that a step
    scans, for so many dot products, and bytes for each beyond these.

    Args:
        num_queries: M, query heads of a KV head.
        resident, cold: what is attended; no pages or no cold entries for None, but one of them.
        whole: k, v [Hkv, N, D] of cold entries that every query attends.
        writer: of the same pages, where steps store their tokens; None for those that do not.
        engine: another library than the one in use.

    Raises:
        ShapeError, ConfigError: they cannot be read or do not fit together.
        BackendUnavailable: there is no engine.
    """

    def __init__(
        self,
        num_queries: int,
        resident: ResidentPages | None,
        cold: ColdEntries | None,
        *,
        whole: Sequence[tuple[Tensor, Tensor]] = (),
        writer: PageWriter | None = None,
        engine: ctypes.CDLL | None = None,
    ) -> None:
        self.engine = find_engine(engine)
        extents = () if cold is None else cold.extents
        if resident is None and not extents:
            raise ShapeError("a plan must hold pages or cold entries, got neither")
        k = extents[0].k if resident is None else resident.k
        heads, dim = k.shape[0], k.shape[-1]
        self._size, self._dim = (heads, num_queries), dim
        self.entry_bytes = 2 * dim * k.itemsize
        self.layer = LayerStruct(
            heads, num_queries, _no_pages(extents[0]) if resident is None else _pages(resident)
        )
        if writer is not None:
            self.layer.pages = ctypes.pointer(writer.struct)
        self._kept_pages = resident, writer
        self._results: list[_Results] = []
        self._width = 0
        self.take_cold(cold, whole)
        self._step, self._report = StepStruct(), StepReportStruct()
        self.reads: tuple[Any, ...] = ()
        pointers = map(ctypes.pointer, (self.layer, self._step, self._report))
        self.one = OneStepStruct(*pointers)
        self._arguments = byref(self.layer), byref(self._step), byref(self._report)
        self._shape, self._dtype = torch.Size(), torch.float32  # of the queries that came last

    def described(self) -> list[tuple[str, object]]:
        """The fields that the engine is told, with their values, for comparisons of plans."""
        told = [told for told in self._kept_cold if isinstance(told, ctypes.Array)]
        costs = [("read_costs", self.read_costs), ("estimate_bytes", self.estimate_bytes)]
        return [*fields_of("layer", self.layer), *fields_of("cold", told), *costs]

    def choose_pages(self, slots: Tensor, count: int, oldest: int, newest: int) -> None:
        """From now on a KV head attends `count` of the row's pages, all or those of the highest
        bounds.

        Args:
            slots: as `ResidentPages.slots`.
            oldest, newest: how many pages at the two ends are always among them, newest at least 1.
        """
        resident, self._slots = self.layer.resident, slots
        resident.slots, resident.num_pages = slots.data_ptr(), slots.shape[0]
        resident.num_chosen = count
        resident.oldest, resident.newest = oldest, newest

    def take_cold(
        self, cold: ColdEntries | None, whole: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        """From now on a step attends these cold entries; see the constructor.

        Raises:
            ShapeError, ConfigError: they cannot be read or do not fit together.
        """
        extents, width = ((), 0) if cold is None else cold
        structs = (ExtentStruct * len(extents))()
        entries = (KVStruct * len(whole))()
        keeps: list[Any] = [cold, whole, structs, entries]
        self.begins_warm, self.estimate_bytes = False, 0
        reads: list[SearchReads] = []
        for struct, extent in zip(structs, extents, strict=True):
            self._tell(struct, extent, keeps)
            for search in extent.searches:
                reads.append(search.reads)
        for place, (k, v) in enumerate(whole):
            entries[place] = described(k, v)
        self.layer.cold = ColdStruct(structs if extents else None, len(extents), width)
        self.layer.whole, self.layer.num_whole = entries, len(entries)
        self._kept_cold = keeps  # and no longer what was told before
        if width != self._width:
            self._width, self._results = width, []
        first = len(extents[0].searches) if extents else 0
        self.read_costs, count = [], self._size[1]
        for some in (reads, reads[first:]):
            one = SearchReads.joined(some, count) if some else SearchReads()
            cost = round(one.scanned), count * one.scores, one.walked * one.walks / count
            self.read_costs.append(cost)

    def _tell(self, struct: ExtentStruct, extent: ExtentEntries, keeps: list[Any]) -> None:
        """Fills in the engine's descriptor of an extent; `keeps` takes what it points at."""
        searches = (SearchStruct * len(extent.searches))()
        for one, search in zip(searches, extent.searches, strict=True):
            count = one.num_heads = len(search.heads)
            one.kind, one.head = search.kind, addressof(search.structs)
            one.first_row, one.width = search.first_row, search.width
            one.num_ranked, one.num_expanded = search.num_ranked, search.num_expanded
            heads = (c_int32 * count)(*search.heads)
            one.heads = addressof(heads)
            keeps += [heads, search.structs]
            if search.kind == SEARCH_GRAPH:
                beams, walks = (c_int32 * count)(*search.beams), (c_int32 * count)(*search.walks)
                one.beams, one.walks = addressof(beams), addressof(walks)
                keeps += [beams, walks]
                self.begins_warm = True
        keeps.append(searches)
        struct.kv = described(extent.k, extent.v)
        struct.searches, struct.num_searches = searches, len(searches)
        if extent.tail is not None:
            self._tell_tail(struct.tail, extent.tail)
            struct.tail.first_order = extent.form == "first_order"

    def _tell_tail(self, struct: TailStruct, tail: Tail) -> None:
        struct.clusters = clusters = tail.keys.shape[1]
        for name, size in sizes_of_moments(self._size[0], clusters, self._dim).items():
            tensor: Tensor = getattr(tail, name)
            if tensor.shape != size or tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise ShapeError(
                    f"moments '{name}' must be {list(size)} float32, contiguous, got "
                    f"{list(tensor.shape)} {tensor.dtype}"
                )
            setattr(struct, name, tensor.data_ptr())
            self.estimate_bytes += tensor.nbytes

    def attend(self, queries: Tensor, *, pool: Pool | None = None, **how: Any) -> StepResult:
        """`tell` and `run`: one token's queries over what the plan holds."""
        done = self.tell(queries, **how)
        self.run(pool)
        return done

    def tell(
        self,
        queries: Tensor,
        *,
        tail_fill: int,
        scale: float,
        softcap: float | None = None,
        new: NewToken | None = None,
        warm: Tensor | None = None,
        named: Tensor | None = None,
        found: tuple[Tensor, Tensor] | None = None,
        estimated: Tensor | None = None,
        half: Tensor | None = None,
    ) -> StepResult:
        """Tells the engine of the next step: one token's queries over what the plan holds.

        Returns:
            What `run` writes.

        Args:
            queries: [..., D] of a dtype of DTYPES, as many as [Hkv, M] in that order.
            tail_fill: filled tokens of the newest page, the new one among them; 0 without pages.
            new: the token, where it is stored by this; for plans with a writer. Where this fails it
                was not stored.
            warm: [Hkv, M, W] int64, where graphs begin; None for none.
            named: [Hkv, M, C] int64 cold entries, each once for a query, -1 for none, of which the
                best are attended in the place of a search; None searches.
            found: ids int64 and scores float32, [Hkv, M, F], of what a search of the first extent
                finds, best first, then -1; None searches it as well.
            estimated: [Hkv, M] float32, takes the log-sum-exp of what is estimated, -inf for
                nothing, which is a part of the result's; None where nobody asks.
            half: [Hkv, M] float32, takes how far the output moves where of what a query finds only
                the better half is read, as a share of it; see `hkv_step`. None: nobody asks.

        Raises:
            ShapeError: the queries do not fit.
        """
        if queries.shape != self._shape or queries.dtype != self._dtype:
            self._take_shape(queries)
        if not queries.is_contiguous():
            queries = queries.contiguous()
        if not self._results:
            self._results = self._make_results()
        step, results = self._step, self._results.pop()
        step.queries = queries.data_ptr()
        step.out, step.lse, step.ids = results.addresses
        step.tail_fill, step.scale, step.softcap = tail_fill, scale, softcap or 0.0
        if warm is not None:
            warm = warm.contiguous()
            step.warm, step.num_warm = warm.data_ptr(), warm.shape[2]
        else:
            step.warm = None
        if named is not None:
            named = named.contiguous()
            step.named, step.num_named = named.data_ptr(), named.shape[2]
        else:
            step.named = None
        if found is not None:
            found = found[0].contiguous(), found[1].contiguous()
            step.found, step.found_scores = found[0].data_ptr(), found[1].data_ptr()
            step.num_found = found[0].shape[2]
        else:
            step.found = None
        if new is not None:
            k, v, step.new_position = new
            step.new_keys, step.new_values = k.data_ptr(), v.data_ptr()
            step.new_key_step, step.new_value_step = k.stride(1), v.stride(1)
        else:
            step.new_keys = None
        step.estimated = None if estimated is None else estimated.data_ptr()
        step.half = None if half is None else half.data_ptr()
        self.reads = queries, warm, named, found, new, estimated, half
        return StepResult(results.part, results.ids, self._report)

    def run(self, pool: Pool | None = None) -> None:
        """Makes the step that the engine was told of.

        Args:
            pool: threads that share the work; None for the calling one.

        Raises:
            ConfigError: what it was told does not fit.
            NonFiniteError: a key of the new token is NaN or infinite.
        """
        handle = None if pool is None else pool.handle
        status = self.engine.hkv_attend_step(handle, *self._arguments)
        self.reads = ()
        if status:
            library.check(self.engine, status)

    def search_bytes(self, scored: int, *, asked: bool = False) -> int:
        """Bytes that the searches of a step read which computed so many dot products.

        Args:
            asked: the first extent was searched elsewhere.
        """
        scanned, scores, walked = self.read_costs[asked]
        return scanned + int(walked * max(0.0, scored - scores))

    def _take_shape(self, queries: Tensor) -> None:
        dtype, (heads, count) = DTYPES.get(queries.dtype), self._size
        fits = queries.shape[-1] == self._dim and queries.numel() == heads * count * self._dim
        if dtype is None or not fits:
            raise ShapeError(
                f"queries must be {[*self._size, self._dim]} in float32, float16 or bfloat16, got "
                f"{list(queries.shape)} {queries.dtype}"
            )
        self._shape, self._dtype = queries.shape, queries.dtype
        self._step.query_dtype = self._step.out_dtype = dtype
        self._results = []

    def _make_results(self) -> list[_Results]:
        """Of some steps; whoever keeps one keeps the memory of all of them."""
        count = _STEPS_AT_ONCE
        ids: Sequence[Tensor | None] = [None] * count
        with torch.inference_mode(False):  # who gets one may write to it anywhere
            outs = torch.empty((count, *self._shape), dtype=self._dtype)
            lses = torch.empty((count, *self._shape[:-1]))
            if self._width:
                ids = torch.empty((count, *self._size, self._width), dtype=torch.int64).unbind()
        results = []
        for out, lse, found in zip(outs.unbind(), lses.unbind(), ids, strict=True):
            address = None if found is None else found.data_ptr()
            addresses = out.data_ptr(), lse.data_ptr(), address
            results.append(_Results(PartialAttention(out, lse), found, addresses))
        return results


class _Results(NamedTuple):
    """Memory that one step will write."""

    part: PartialAttention
    ids: Tensor | None
    addresses: tuple[int, int, int | None]


def _pages(resident: ResidentPages) -> ResidentStruct:
    heads, slots, size, _ = resident.k.shape
    flat = (tensor.view(heads, slots * size, -1) for tensor in (resident.k, resident.v))
    count = len(resident.slots)
    return ResidentStruct(
        described(*flat),
        *(resident.slots.data_ptr(), count, size, count, 0, 1),
        *_digests(resident),
    )


def _no_pages(cold: ExtentEntries) -> ResidentStruct:
    """None of the sizes of cold entries."""
    return ResidentStruct(described(cold.k[:, :0], cold.v[:, :0]))


def _digests(pages: ResidentPages) -> tuple[PageDigestsStruct, int]:
    if pages.key_min is None or pages.key_max is None:
        return PageDigestsStruct(), 0
    kv = described(pages.key_min, pages.key_max)
    if kv.key_step_1 != kv.value_step_1:
        raise ShapeError("key_min and key_max must have one layout")
    return PageDigestsStruct(*folded(kv)), kv.key_step_1
