"""Selection on the device: which layers have it, and what a step attends by it.

Such a layer's part of a step has no host in it: the codes are scanned where the queries are, and
kernels read the few keys and values that count from page-locked host memory. No thread waits, and
what is found decides no shape and no branch, so that the work can be recorded once for many steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from warnings import warn

import torch
from torch import Tensor

from hybrid_kv.errors import DeviceSelectWarning
from hybrid_kv.index._device_keys import device_bytes
from hybrid_kv.index.auto import AutoIndex
from hybrid_kv.index.device_sketch import longest_code, restored, sketch_of
from hybrid_kv.index.sketch import SketchIndex
from hybrid_kv.ops import Ops
from hybrid_kv.ops.tail import Tail
from hybrid_kv.plugins import DeviceIndex, Index, Placement
from hybrid_kv.runtime.step import Step, empty_partial, merge_partials, stacked
from hybrid_kv.store import ExtentView, LayerStore, Retrieved, RetrievedPart, Row, SelectFor
from hybrid_kv.store.index_builder import MakeIndex
from hybrid_kv.store.live_index import LiveIndex
from hybrid_kv.types import Candidates, PartialAttention, TokenBudget, Work, bytes_per_token

_log = logging.getLogger(__name__)

CODE_BYTES = (64, 48, 32, 24, 16)
"""Of a key at 128 channels, the best first: the fewer, the more keys are read over the bus."""
_AIR_BYTES = 2**30
"""Of a device, for learning codes and for nobody."""
_ALL_AT_ONCE = 4096


class Selectors:
    """Chooses for the layers of one prompt, all alike: the first one that is sealed decides.

    Args:
        num_layers: tiered layers of the model: codes are as large as fit for all of them beside all
            that stays resident.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._sizes: dict[torch.device, int | None] = {}
        self._has_warned = False

    def of(self, layer: LayerStore) -> SelectFor | None:
        """Makes the indexes of a layer that selects on its device; None where the host does."""
        place, device = layer.placement, layer.resident.pool.device
        if place is None or place.index is None or place.select == "host":
            return None
        by_itself = place.select == "auto"
        if by_itself and device.type != "cuda":
            return None
        if device not in self._sizes:
            self._sizes[device] = self._fitting(layer)
            _log.info("selection on %s: codes of %s B a key", device, self._sizes[device])
        size = self._sizes[device]
        if size is None:
            if by_itself:
                return None
            size = CODE_BYTES[-1]
        # Not the layer, which will keep this: a cycle would hold its memory when it is dropped.
        return partial(self._learned, layer.resident.pool.ops, layer.shape.layer_idx, place, size)

    def _fitting(self, layer: LayerStore) -> int | None:
        """The largest codes that fit for all layers; None where the smallest do not."""
        device = layer.resident.pool.device
        if device.type != "cuda":
            return CODE_BYTES[0]
        free = free_bytes(device) - _AIR_BYTES
        for size in CODE_BYTES:
            if self._num_layers * (code_bytes(layer, size) + resident_bytes(layer)) <= free:
                return size
        return None

    def _learned(
        self,
        ops: Ops,
        layer_idx: int,
        place: Placement,
        size: int,
        keys: Tensor,
        samples: Tensor,
        far: Tensor,
    ) -> tuple[MakeIndex, MakeIndex] | None:
        """See `SelectFor`; one warning where the device has no memory for it."""
        assert place.index is not None
        goals = _goals(place.index())
        if place.select == "auto" and (keys.shape[1] < goals.min_keys or not far.is_pinned()):
            return None
        if not bool(torch.isfinite(keys).all() & torch.isfinite(samples).all()):
            return None  # whoever stores them refuses them
        try:
            return sketch_of(ops, keys, samples, size, goals)
        except (torch.OutOfMemoryError, MemoryError) as error:
            self.ran_out(layer_idx, keys.device, keys.shape[1], error)
            return None

    def ran_out(
        self, layer_idx: int, device: torch.device, num_keys: int, error: Exception
    ) -> None:
        """Warns, once, that there was no memory for a layer's codes."""
        if self._has_warned:
            return
        self._has_warned = True
        what = " ".join(str(error).split())[:200]
        warn(
            f"layer {layer_idx} cannot select on {device}: memory "
            f"ran out while codes of {num_keys} keys were made ({what}); the host searches for "
            "this layer, more slowly; shorten the prompt, keep fewer tokens resident or set "
            "select='host'",
            DeviceSelectWarning,
            stacklevel=3,
        )

    def restored(
        self, layer: LayerStore, indexes: Sequence[Index | None]
    ) -> list[tuple[MakeIndex, MakeIndex]] | None:
        """As `SelectFor`, for each extent that a file held; None where the host searches.

        Args:
            indexes: what the file held of the extents, to be searched on a host.

        Raises:
            torch.OutOfMemoryError: the device has too little memory.
        """
        place, pool = layer.placement, layer.resident.pool
        if self.of(layer) is None or place is None or place.index is None:
            return None
        goals, size = _goals(place.index()), self._sizes[pool.device]
        found: list[tuple[MakeIndex, MakeIndex]] = []
        for index in indexes:
            if not isinstance(index, SketchIndex | AutoIndex):
                return None
            if (
                place.select == "auto"
                and size is not None
                and longest_code(index) > _scaled(size, layer)
            ):
                return None
            makes = restored(pool.ops, index, pool.device, pool.dtype, goals)
            if makes is None:
                return None
            found.append(makes)
        return found


def code_bytes(layer: LayerStore, size: int) -> int:
    """Device bytes that all rows of a layer take with codes of `size` bytes at 128 channels."""
    shape, item = layer.shape, layer.resident.pool.dtype.itemsize
    code = _scaled(size, layer)
    lengths = [row.length for row in layer.rows]
    return sum(device_bytes(n, shape.num_kv_heads, shape.head_dim, item, code) for n in lengths)


def resident_bytes(layer: LayerStore) -> int:
    """Of what a layer's placement keeps on the device, digests included."""
    place, size = layer.placement, layer.page_size
    if place is None:
        return 0
    kept = place.sink_tokens + place.window_tokens + place.spare_tokens
    pages = len(layer.rows) * (kept // size + 2)  # the window holds up to two pages more
    return pages * (size + 1) * bytes_per_token(layer.shape, layer.resident.pool.dtype)


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that no process has taken; torch's own reserves are not counted."""
    return int(torch.cuda.mem_get_info(device)[0])


def _scaled(size: int, layer: LayerStore) -> int:
    """Bytes of a key's code in this layer, where one of 128 channels takes `size`."""
    return -(-size * layer.shape.head_dim // 128)


def attend_selected(step: Step, budget: TokenBudget | str) -> PartialAttention:
    """Cold entries that the device finds and attends; [B, Hkv, M, D] and [B, Hkv, M]."""
    begin, parts = step.phases.now(), []
    for row in step.layer.rows:
        part = _attend_row(step, row, budget)
        if len(step.layer.rows) > 1:  # graphs share memory: the next row's may overwrite this one's
            part = PartialAttention(part.out.clone(), part.lse.clone())
        parts.append(part)
    step.phases.book("select", begin)
    return stacked(parts)


@dataclass(frozen=True, slots=True)
class Selection:
    """State of the host on which the selection of a row's step depends.

    places: where its extents, codes and moments lie, or how long they are where all of it is
    attended. tails: by extent the moments of what is estimated.
    """

    places: tuple[Hashable, ...] = ()
    tails: tuple[Tail, ...] = field(default=(), compare=False)


def tell_selection(
    row: Row, budget: TokenBudget | str, work: Work, *, queries: int, device: torch.device
) -> Selection:
    """The host's half of a selection: the device is told how many entries there are, and what is
    going to be attended is counted.

    Args:
        queries: of all KV heads.
    """
    shape, stored = row.table.pool.shape, row.chain.num_tokens
    if stored == 0:
        return Selection()
    heads = shape.num_kv_heads
    rows, row_bytes = queries // heads, 2 * shape.head_dim * row.table.pool.dtype.itemsize
    if not isinstance(budget, TokenBudget) or budget.top_k >= stored:
        _count(work, queries, stored)
        work.cold_bytes += heads * stored * row_bytes
        return Selection(tuple(span.length for span in row.chain.spans))
    work.scored += queries * stored
    work.cold_bytes += heads * min(rows * budget.top_k, stored) * row_bytes // 2
    _count(work, queries, budget.top_k)
    places: list[Hashable] = []
    for span in row.chain.spans:
        k, v = span.extent.k, span.extent.v
        live, index = _indexes_of(span)
        live.note(None)
        seen = index.see(span.length)
        work.select_bytes += index.selection_bytes(rows, budget.top_k)
        places.append((seen, k.data_ptr(), k.stride(), v.data_ptr(), v.stride()))
    tails = [span.tail(device) for span in row.chain.spans] if budget.form else []
    places += [one.data_ptr() for tail in tails for one in tail.tensors().values()]
    work.estimate_bytes += sum(tail.nbytes for tail in tails)
    return Selection(tuple(places), tuple(tails))


def _attend_row(step: Step, row: Row, budget: TokenBudget | str) -> PartialAttention:
    q = step.grouped[row.number]
    queries = q.shape[0] * q.shape[1]
    told = tell_selection(row, budget, step.work, queries=queries, device=q.device)
    return attend_told(step, row, budget, told)


def attend_told(
    step: Step, row: Row, budget: TokenBudget | str, told: Selection
) -> PartialAttention:
    """The device's half: a row's cold entries, found and attended; [Hkv, M, D] and [Hkv, M]."""
    q, stored = step.grouped[row.number], row.chain.num_tokens
    if stored == 0:
        return empty_partial(q)
    if not isinstance(budget, TokenBudget) or budget.top_k >= stored:
        return _attend_all(step, row, q)
    tails = told.tails
    signature = told.places, tuple(q.shape), budget, step.scale, step.softcap
    if step.found is not None:  # somebody looks at this step, and waits for it
        part, retrieved = _search(step, row, q, budget, tails)
        step.found[row.number] = budget, retrieved()
        return part
    values = (span.extent.v for span in row.chain.spans)
    if step.new > 1 or not all(step.ops.finds_in_place(q, v) for v in values):
        return _search(step, row, q, budget, tails)[0]
    work = lambda given: _search(step, row, given, budget, tails)[0]  # noqa: E731
    return step.executor.repeat(row, signature, work, q)


def _indexes_of(span: ExtentView) -> tuple[LiveIndex, DeviceIndex]:
    """The index of an extent, and what of it serves on the device."""
    live = span.extent.index
    assert live is not None
    assert live.selector is not None
    return live, live.selector


def _search(
    step: Step, row: Row, q: Tensor, budget: TokenBudget, tails: Sequence[Tail]
) -> tuple[PartialAttention, Callable[[], Retrieved]]:
    """The best of all extents together, attended where they lie, and by the moments of each extent
    (none where nothing is estimated) what is left of it; and what the best are, if asked.
    """
    spans, top_k, form = row.chain.spans, budget.top_k, budget.form
    indexes = [_indexes_of(span)[1] for span in spans]
    pairs = zip(indexes, spans, strict=True)
    found = [index.candidates(q, s.extent.k, step.new, top_k) for index, s in pairs]
    scores = found[0].scores if len(found) == 1 else torch.cat([one.scores for one in found], -1)
    limit = step.ops.best_limit(scores, top_k)
    parts, lses, first = [], list[Tensor](), 0
    for number, (span, one) in enumerate(zip(spans, found, strict=True)):
        discount = None
        if form is not None:
            own = slice(first, first + one.scores.shape[-1])
            out, lse, discount = step.ops.attend_unread(
                *(tails[number], q, scores, limit, own, indexes[number].seen),
                scale=step.scale,
                softcap=step.softcap,
                form=form,
            )
            parts.append(PartialAttention(out, lse))
            lses.append(lse)
            first = own.stop
        part = step.ops.attend_candidates(
            *(one, span.extent.v, limit),
            scale=step.scale,
            softcap=step.softcap,
            discount=discount,
        )
        parts.append(part)
    part = merge_partials(parts, ops=step.ops)
    return part, partial(_retrieved, step, row, found, limit, top_k, lses)


def _attend_all(step: Step, row: Row, q: Tensor) -> PartialAttention:
    """Every entry is a candidate, some thousands at a time."""
    parts = []
    for span in row.chain.spans:
        for first in range(0, span.length, _ALL_AT_ONCE):
            stop = min(span.length, first + _ALL_AT_ONCE)
            ids = torch.arange(first, stop, dtype=torch.int32, device=q.device)
            ids = ids.expand(len(q), step.new, -1).contiguous()
            scores = step.ops.score_candidates(q, span.extent.k, ids)
            limit = scores.new_full(scores.shape[:2], -torch.inf)
            part = step.ops.attend_candidates(
                *(Candidates(ids, scores), span.extent.v, limit),
                scale=step.scale,
                softcap=step.softcap,
            )
            parts.append(part)
    return merge_partials(parts, ops=step.ops)


def _retrieved(
    step: Step, row: Row, found: list[Candidates], limit: Tensor, top_k: int, lses: list[Tensor]
) -> Retrieved:
    """Entries that a step attended, on the host."""
    parts = []
    for one, span in zip(found, row.chain.spans, strict=True):
        scores = one.scores.masked_fill(one.scores < limit[..., None], -torch.inf)
        best = scores.topk(min(top_k, scores.shape[-1]), -1)
        group = scores.shape[1] // step.new
        ids = one.ids[:, None].expand(-1, group, -1, -1).flatten(1, 2).gather(-1, best.indices)
        ids = ids.masked_fill(best.values == -torch.inf, -1).long()
        parts.append(RetrievedPart(span.extent, step.executor.send(ids).open()))
    estimated = torch.stack(lses).logsumexp(0).cpu() if lses else None
    return Retrieved(parts, estimated=estimated)


def _count(work: Work, queries: int, most: int) -> None:
    """Books entries that all queries of a row attend, and one of them; which, only the device
    knows.
    """
    work.attended += queries * most
    work.retrieved += queries * most
    work.most_retrieved = max(work.most_retrieved, most)


def _goals(index: Index) -> SketchIndex.Params:
    """Goals of the sketch of an index; the settings of a method allow other kinds no device."""
    assert isinstance(index, SketchIndex | AutoIndex)
    return index.goals
