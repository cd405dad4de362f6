"""The cold tier of one layer: host arrays, written once, head-major, with their index.

A row is a chain of extents. A forked row shares the extents of its source; the first row to add to
a shared extent starts one of its own, so nothing is ever copied or overwritten.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.errors import IntegrityError, NonFiniteError
from hybrid_kv.rotary import Samples
from hybrid_kv.store.ahead import PinnedAhead
from hybrid_kv.store.live_index import BuildRunner, InlineRunner, LiveIndex, MakeIndex
from hybrid_kv.store.memory import allocate, enlarge
from hybrid_kv.types import LayerShape, PagedKV, SearchResult


def pinned_room(count: int) -> int:
    """Places beside `count` in a pinned extent; they are committed at once."""
    return max(256, count // 16)


class ColdExtent:
    """Consecutive cold entries of one row: keys, values [Hkv, capacity, D], positions [capacity].

    Capacity is reserved generously, because host memory that was never written is not committed;
    pinned memory is, so there is little more of it than is needed, and it never grows: locking and
    copying gigabytes would hold up a step for seconds, so what has no room begins an extent.

    Args:
        count: entries that are about to be stored.
        pinned: makes page-locked memory; None for plain.
        behind: entries of the row in extents before this one, which will not be its last.
    """

    def __init__(
        self,
        shape: LayerShape,
        dtype: torch.dtype,
        count: int,
        *,
        pinned: PinnedAhead | None = None,
        behind: int = 0,
    ) -> None:
        self._pinned = pinned is not None
        capacity = count + (pinned_room(behind + count) if self._pinned else max(256, count))
        size = (shape.num_kv_heads, capacity, shape.head_dim)
        host = torch.device("cpu")
        if pinned is not None:
            self.k, self.v = pinned.take(size, dtype), pinned.take(size, dtype)
        else:
            self.k, self.v = allocate(size, dtype, host), allocate(size, dtype, host)
        self.positions = allocate([capacity], torch.int32, host)
        self.length = 0
        self.refs = 1
        self.rewritten = 0  # how often entries were forgotten and others written in their place
        self.index: LiveIndex | None = None

    def takes(self, count: int) -> bool:
        """Whether so many entries in all have room here, or can be given it."""
        return not self._pinned or count <= self.positions.shape[0]

    def make_room(self, count: int) -> None:
        """Room for `count` more entries, which it `takes`; amortised O(1) per token."""
        stop = self.length + count
        if stop > self.positions.shape[0]:
            capacity = stop + max(256, stop)
            self.k, self.v = enlarge(self.k, 1, capacity), enlarge(self.v, 1, capacity)
            self.positions = enlarge(self.positions, 0, capacity)

    @property
    def keys(self) -> Tensor:
        """[Hkv, length, D], a view."""
        return self.k[:, : self.length]

    @property
    def values(self) -> Tensor:
        """[Hkv, length, D], a view."""
        return self.v[:, : self.length]

    def pages(self, size: int) -> PagedKV:
        """All memory as pages of `size` entries, views; the last ones may not be filled yet."""
        count = self.positions.shape[0] // size
        k, v, positions = (
            tensor.narrow(axis, 0, count * size).unflatten(axis, (count, size))
            for tensor, axis in ((self.k, 1), (self.v, 1), (self.positions, 0))
        )
        return PagedKV(k, v, positions)

    def first(self, length: int) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, length, D] of the oldest entries, views."""
        return self.k[:, :length], self.v[:, :length]


@dataclass(slots=True)
class Span:
    """The first `length` entries of an extent, as one row sees it.

    near: [Hkv, M, K] what its latest search found, where the next one begins.
    """

    extent: ColdExtent
    length: int
    near: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for new entries behind those of a row, which sees them when they are committed.

    k, v: [Hkv, n, D], to be written; positions: [n].
    """

    row: int
    span: Span
    k: Tensor
    v: Tensor
    positions: Tensor


class ColdStore:
    """Cold entries of all rows of a layer.

    Args:
        pinned: makes page-locked arrays, for a GPU that fills and reads them by itself; None for
            plain ones.
    """

    def __init__(
        self,
        shape: LayerShape,
        dtype: torch.dtype,
        num_rows: int,
        *,
        pinned: PinnedAhead | None = None,
    ) -> None:
        self.shape, self.dtype, self._pinned = shape, dtype, pinned
        self.rows: list[list[Span]] = [[] for _ in range(num_rows)]

    def num_tokens(self, row: int) -> int:
        return sum(span.length for span in self.rows[row])

    def first_pages(self, row: int, size: int) -> list[int]:
        """By span: the number of its first page of `size` entries; each span begins a page.

        One more stands at the end: the number of pages, those filled in part included.
        """
        counts = (-(-span.length // size) for span in self.rows[row])
        return list(accumulate(counts, initial=0))

    def reserve(self, row: int, positions: Tensor) -> Reservation:
        """Room for entries at positions [n] behind those of the row; until it is committed or given
        up, nothing else may change the row.
        """
        count, spans = positions.shape[0], self.rows[row]
        span = spans[-1] if spans and spans[-1].extent.refs == 1 else None
        if span is not None and not span.extent.takes(span.length + count):
            span = None
        if span is None:
            behind = self.num_tokens(row)
            new = ColdExtent(self.shape, self.dtype, count, pinned=self._pinned, behind=behind)
            span = Span(new, 0)
        extent = span.extent
        if extent.length > span.length:  # the row was cropped since: forget what lies beyond
            extent.length = span.length
            extent.rewritten += 1
            if extent.index is not None:
                extent.index.rebuild(extent.keys)
        extent.make_room(count)
        places = slice(extent.length, extent.length + count)
        return Reservation(row, span, extent.k[:, places], extent.v[:, places], positions)

    def commit(
        self,
        new: Reservation,
        make_index: MakeIndex | None,
        samples: Samples | None = None,
        runner: BuildRunner | None = None,
        nearest: Tensor | None = None,
        stand_in: MakeIndex | None = None,
    ) -> None:
        """Makes reserved entries, which are written by now, part of their row.

        Args:
            make_index: the index of a new extent; None attends all of it.
            samples: queries for an index that learns from them.
            runner: where an index is built; None for here, at once.
            nearest: [Hkv, G, M, K] int32, the best of the new entries for each sample, if known.
            stand_in: what serves while an index is built; None for what it names itself.

        Raises:
            Exception: the index failed; the row does not see the new entries.
        """
        span, extent = new.span, new.span.extent
        stop = extent.length + new.positions.shape[0]
        extent.positions[extent.length : stop] = new.positions
        extent.length = stop
        if extent.index is not None:
            extent.index.add(extent.keys)
        elif make_index is not None:
            runner = runner or InlineRunner()
            extent.index = LiveIndex(make_index, extent.keys, samples, runner, nearest, stand_in)
        # Last: where the index failed, the row does not see the new entries and forgets them later.
        if span.length == 0:
            self.rows[new.row].append(span)
        span.length = stop

    def append(
        self,
        row: int,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        make_index: MakeIndex | None,
        samples: Samples | None = None,
        runner: BuildRunner | None = None,
    ) -> None:
        """Reserves room for k, v [Hkv, n, D] at positions [n], writes and commits them.

        Raises:
            NonFiniteError: a key or value is NaN or infinite; nothing was added.
        """
        check_finite(k, v, positions)
        new = self.reserve(row, positions)
        new.k.copy_(k)
        new.v.copy_(v)
        self.commit(new, make_index, samples, runner)

    def settle(self) -> None:
        """Lets the indexes that have been built since take over; not while a search runs on them.

        Warns:
            IndexBuildWarning: one has failed, and its keys are scanned.
        """
        for span in self.spans():
            if span.extent.index is not None and span.extent.index.is_building:
                span.extent.index.settle(span.extent.keys)

    def cancel_builds(self) -> None:
        """Gives up the indexes that are still being built; their stand-ins serve on."""
        for span in self.spans():
            if span.extent.index is not None:
                span.extent.index.cancel()

    def search(
        self,
        row: int,
        queries: Tensor,
        top_k: int,
        most: int | None = None,
        without: Container[int] = (),
    ) -> list[tuple[ColdExtent, SearchResult]]:
        """The best `top_k` entries of a row per query, by extent.

        Args:
            queries: [Hkv, M, D] on the host.
            most: as for `Index.search`.
            without: numbers of extents that are not searched.

        Returns:
            For each other extent a result whose ids are rows of that extent, -1 (and score -inf)
            where another extent had the better entry.
        """
        most = top_k if most is None else most
        found = [
            (span.extent, _search_span(span, queries, top_k, most))
            for number, span in enumerate(self.rows[row])
            if number not in without
        ]
        if len(found) < 2:
            return found
        scores = torch.cat([result.scores for _, result in found], -1)
        best = scores.topk(min(most, scores.shape[-1]), -1).indices
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, value=True)
        parts = kept.split([result.ids.shape[-1] for _, result in found], -1)
        return [
            (extent, _keep_only(result, keep))
            for (extent, result), keep in zip(found, parts, strict=True)
        ]

    def truncate(self, row: int, num_tokens: int) -> None:
        """Forgets the newest entries of a row until `num_tokens` are left."""
        spans = self.rows[row]
        while (excess := self.num_tokens(row) - num_tokens) > 0:
            if spans[-1].length <= excess:
                spans.pop().extent.refs -= 1
            else:
                spans[-1].length -= excess
                spans[-1].near = None

    def fork(self, sources: Sequence[int]) -> None:
        """Row r continues from what row sources[r] holds; any number of rows."""
        rows = [[Span(s.extent, s.length) for s in self.rows[source]] for source in sources]
        for span in (span for spans in rows for span in spans):
            span.extent.refs += 1
        self.release()
        self.rows = rows

    def branch(self) -> ColdStore:
        """A store that continues from the same entries; `release` it when it is done."""
        new = ColdStore(self.shape, self.dtype, 0, pinned=self._pinned)
        new.rows = [[Span(span.extent, span.length) for span in spans] for spans in self.rows]
        for span in new.spans():
            span.extent.refs += 1
        return new

    def release(self) -> None:
        """Gives up all entries."""
        for span in self.spans():
            span.extent.refs -= 1
        self.rows = [[] for _ in self.rows]

    def spans(self) -> list[Span]:
        """The spans of all rows."""
        return [span for spans in self.rows for span in spans]

    def positions_of(self, row: int) -> list[int]:
        """Positions of a row's cold entries in order."""
        return [p for span in self.rows[row] for p in span.extent.positions[: span.length].tolist()]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless spans, reference counts and indexes agree."""
        counts: dict[int, int] = {}
        extents = {id(s.extent): s.extent for spans in self.rows for s in spans}
        for spans in self.rows:
            for span in spans:
                counts[id(span.extent)] = counts.get(id(span.extent), 0) + 1
                if not 0 < span.length <= span.extent.length:
                    raise IntegrityError(
                        f"a row sees {span.length} of {span.extent.length} cold entries"
                    )
        for key, extent in extents.items():
            if extent.refs != counts[key]:
                raise IntegrityError(f"extent counts {extent.refs} rows, {counts[key]} refer to it")
            if extent.index is not None and len(extent.index) != extent.length:
                raise IntegrityError(
                    f"index holds {len(extent.index)} of {extent.length} cold keys"
                )

    def _extents(self) -> list[ColdExtent]:
        return list({id(span.extent): span.extent for span in self.spans()}.values())

    @property
    def kv_bytes(self) -> int:
        """Bytes of stored K and V, shared extents once, without reserved room."""
        per_token = 2 * self.shape.num_kv_heads * self.shape.head_dim * self.dtype.itemsize
        return sum(extent.length * per_token for extent in self._extents())

    @property
    def overhead_bytes(self) -> int:
        """Bytes of positions beside K and V."""
        return sum(extent.length * 4 for extent in self._extents())

    def describe_indexes(self) -> list[dict[str, Any]]:
        """What serves each row, extent and KV head; see `Index.describe`."""
        return [
            {"row": row, "extent": number, "kv_head": head, **what}
            for row, spans in enumerate(self.rows)
            for number, span in enumerate(spans)
            if span.extent.index is not None
            for head, what in enumerate(span.extent.index.describe())
        ]

    @property
    def index_bytes(self) -> int:
        """Bytes held by indexes beside the keys."""
        return sum(e.index.memory_bytes for e in self._extents() if e.index is not None)


def _keep_only(result: SearchResult, keep: Tensor) -> SearchResult:
    ids = result.ids.masked_fill(~keep, -1)
    return result._replace(ids=ids, scores=result.scores.masked_fill(~keep, -torch.inf))


def _search_span(span: Span, queries: Tensor, top_k: int, most: int) -> SearchResult:
    extent = span.extent
    if extent.index is None:
        raise IntegrityError("the cold tier was searched, but its placement named no index")
    beyond = extent.length - span.length  # entries that this row does not see any more
    near = span.near
    if near is not None and near.shape[1] != queries.shape[1]:
        near = None
    result = extent.index.search(queries, top_k + beyond, most + beyond, near)
    span.near = result.ids[..., :top_k]
    if not beyond:
        return result
    hidden = result.ids >= span.length
    scores = result.scores.masked_fill(hidden, -torch.inf)
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    ids = result.ids.masked_fill(hidden, -1).gather(-1, order)
    return result._replace(ids=ids[..., :most], scores=scores[..., :most])


def check_finite(k: Tensor, v: Tensor, positions: Tensor) -> None:
    """Raises NonFiniteError naming the first KV head and position with NaN or infinity."""
    for name, rows in (("keys", k), ("values", v)):
        bad = ~torch.isfinite(rows).all(-1)
        if bad.any():
            head, row = bad.nonzero()[0].tolist()
            raise NonFiniteError(
                f"{name} must be finite, got NaN or infinity in KV head {head} at position "
                f"{int(positions[row])}; check the model's weights and dtype"
            )
