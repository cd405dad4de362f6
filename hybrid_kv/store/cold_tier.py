"""The cold tier of one layer: for each batch row a chain of extents.

A forked row shares the extents of its source, in this cache or in another one; the first row to add
to a shared extent starts one of its own, so nothing is ever copied or overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybrid_kv.errors import NonFiniteError
from hybrid_kv.rotary import Samples
from hybrid_kv.store.extent import ColdExtent, ExtentView
from hybrid_kv.store.index_builder import BuildRunner, InlineRunner, MakeIndex
from hybrid_kv.store.live_index import IndexRefresh, LiveIndex
from hybrid_kv.store.memory import Stamps
from hybrid_kv.types import LayerShape

if TYPE_CHECKING:
    from hybrid_kv.store.pinned_allocator import PinnedAllocator


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for new entries behind those of a row, which sees them when they are committed.

    k, v: [Hkv, n, D], to be written; positions: [n].
    """

    span: ExtentView
    k: Tensor
    v: Tensor
    positions: Tensor


class ColdChain:
    """The cold entries of one row, oldest first.

    spans: of its extents. num_tokens: in all of them. stamps: of plans that describe its row.

    Args:
        pinned: makes page-locked arrays, for a GPU that fills and reads them by itself; None for
            plain ones.
    """

    def __init__(
        self, shape: LayerShape, dtype: torch.dtype, pinned: PinnedAllocator | None = None
    ) -> None:
        self.shape, self.dtype, self.pinned = shape, dtype, pinned
        self.spans: list[ExtentView] = []
        self.num_tokens = 0
        self.stamps = Stamps()

    def reserve(self, positions: Tensor) -> Reservation:
        """Room for entries at positions [n] behind those of the row; until it is committed or given
        up, nothing else may change the row.
        """
        count, spans = positions.shape[0], self.spans
        span = spans[-1] if spans and len(spans[-1].extent.readers) == 1 else None
        if span is not None and not span.extent.make_room(span.length + count):
            span = None
        if span is None:
            behind = self.num_tokens
            new = ColdExtent(self.shape, self.dtype, count, pinned=self.pinned, behind=behind)
            span = ExtentView(new, 0)
        extent = span.extent
        if extent.length > span.length:  # the row was cropped since: forget what lies beyond
            extent.length = span.length
            extent.rewritten += 1
            extent.stamps.mark("an extent forgot entries")
            if extent.index is not None:
                extent.index.rebuild(extent.keys)
        places = slice(extent.length, extent.length + count)
        return Reservation(span, extent.k[:, places], extent.v[:, places], positions)

    def commit(
        self,
        new: Reservation,
        make_index: MakeIndex | None,
        samples: Samples | None = None,
        runner: BuildRunner | None = None,
        nearest: Tensor | None = None,
    ) -> None:
        """Makes reserved entries, which are written by now, part of their row.

        Args:
            make_index: the index of a new extent; None attends all of it.
            samples: queries for an index that learns from them.
            runner: where an index is built; None for here, at once.
            nearest: [Hkv, G, M, K] int32, the best of the new entries for each sample, if known.

        Raises:
            Exception: the index failed; the row does not see the new entries.
        """
        span, extent = new.span, new.span.extent
        stop = extent.length + new.positions.shape[0]
        extent.positions[extent.length : stop] = new.positions
        extent.length = stop
        if extent.index is not None:
            extent.index.add(extent.k[:, :stop])
        elif make_index is not None:
            own = samples, runner or InlineRunner(), nearest
            extent.index = LiveIndex(make_index, extent.keys, *own, self._aging())
        # Last: where the index failed, the row does not see the new entries and forgets them later.
        if span.length == 0:
            self.spans.append(span)
            self.stamps.mark("pages have left the window")
        else:
            self.stamps.grow()  # of this row alone: who shares an extent does not add to it
        self.num_tokens += stop - span.length
        span.length = stop
        extent.make_room_ahead()

    def _aging(self) -> IndexRefresh | None:
        """Source of learning for an extent behind all others: that of the nearest; None of none."""
        behind = 0
        for span in reversed(self.spans):
            behind += span.length
            index = span.extent.index
            if index is not None and index.aging is not None:
                return index.aging.behind(behind)
        return None

    def append(
        self,
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
        new = self.reserve(positions)
        new.k.copy_(k)
        new.v.copy_(v)
        self.commit(new, make_index, samples, runner)

    def entries(self) -> list[tuple[Tensor, Tensor]]:
        """k, v [Hkv, n, D] of all entries, by extent; views."""
        return [span.extent.first(span.length) for span in self.spans]

    def truncate(self, num_tokens: int) -> None:
        """Forgets the newest entries until `num_tokens` are left."""
        spans = self.spans
        while (excess := self.num_tokens - num_tokens) > 0:
            if spans[-1].length <= excess:
                self.num_tokens -= spans[-1].length
                spans.pop()
            else:
                spans[-1].cut(spans[-1].length - excess)
                self.num_tokens -= excess
        self.stamps.mark("a row was cropped")

    def shared(self) -> ColdChain:
        """A chain that continues from the same entries; `release` it when it is done."""
        new = ColdChain(self.shape, self.dtype, self.pinned)
        new.spans = [
            ExtentView(span.extent, span.length, known=span.share_known()) for span in self.spans
        ]
        new.num_tokens = self.num_tokens
        return new

    def release(self) -> None:
        """Gives up all entries."""
        self.spans, self.num_tokens = [], 0
        self.stamps.mark("a row gave up its entries")

    def positions(self) -> list[int]:
        """Positions of the entries in order."""
        return [p for span in self.spans for p in span.extent.positions[: span.length].tolist()]


class ColdStore:
    """The chains of all rows of a layer.

    Args:
        pinned: see `ColdChain`.
    """

    def __init__(
        self,
        shape: LayerShape,
        dtype: torch.dtype,
        num_rows: int,
        *,
        pinned: PinnedAllocator | None = None,
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.chains = [ColdChain(shape, dtype, pinned) for _ in range(num_rows)]

    def settle(self) -> None:
        """Lets the indexes that have been built since take over; not while a search runs on them.

        Warns:
            IndexBuildWarning: one has failed, and its keys are scanned.
        """
        for span in self.spans():
            index = span.extent.index
            if index is not None and index.builder.pending is not None:
                index.settle(span.extent.keys)

    def cancel_builds(self) -> None:
        """Gives up the indexes that are still being built, but for those that another store reads;
        their stand-ins serve on.
        """
        own = set(self.spans())
        for extent in self.extents():
            if extent.index is not None and own.issuperset(extent.readers):
                extent.index.cancel()

    def fork(self, sources: Sequence[int]) -> None:
        """Row r continues from what row sources[r] holds; any number of rows."""
        chains = [self.chains[source].shared() for source in sources]
        self.release()
        self.chains = chains

    def branch(self) -> ColdStore:
        """A store that continues from the same entries; `release` it when it is done."""
        new = ColdStore(self.shape, self.dtype, 0)
        new.chains = [chain.shared() for chain in self.chains]
        return new

    def release(self) -> None:
        """Gives up all entries."""
        for chain in self.chains:
            chain.release()

    def spans(self) -> Iterator[ExtentView]:
        """The spans of all rows."""
        return (span for chain in self.chains for span in chain.spans)

    def extents(self) -> list[ColdExtent]:
        """Extents of all rows, shared ones once."""
        return list({id(span.extent): span.extent for span in self.spans()}.values())

    @property
    def kv_bytes(self) -> int:
        """Bytes of stored K and V, shared extents once, without reserved room."""
        per_token = 2 * self.shape.num_kv_heads * self.shape.head_dim * self.dtype.itemsize
        return sum(extent.length * per_token for extent in self.extents())

    @property
    def overhead_bytes(self) -> int:
        """Bytes of positions beside K and V."""
        return sum(extent.length * 4 for extent in self.extents())

    def describe_indexes(self) -> list[dict[str, Any]]:
        """Description of what serves each row, extent and KV head; see `Index.describe`.

        entries: of the extent, as the row sees it.
        """
        return [
            {"row": row, "extent": number, "entries": span.length, "kv_head": head, **what}
            for row, chain in enumerate(self.chains)
            for number, span in enumerate(chain.spans)
            if span.extent.index is not None
            for head, what in enumerate(span.extent.index.describe())
        ]

    @property
    def index_bytes(self) -> int:
        """Bytes held by indexes beside the keys."""
        return sum(e.index.memory_bytes for e in self.extents() if e.index is not None)


def check_finite(k: Tensor, v: Tensor, positions: Tensor) -> None:
    """Raises NonFiniteError naming the first KV head and position with NaN or infinity."""
    if bool(all_finite(k, v)):
        return
    for name, rows in (("keys", k), ("values", v)):
        bad = ~torch.isfinite(rows).all(-1)
        if bad.any():
            head, row = bad.nonzero()[0].tolist()
            raise NonFiniteError(
                f"{name} must be finite, got NaN or infinity in KV head {head} at position "
                f"{int(positions[row])}; check the model's weights and dtype"
            )


def all_finite(*tensors: Tensor) -> Tensor:
    """[] bool on the tensors' device, which is not waited for."""
    # Least and greatest carry NaN; a mask as large as the entries takes twenty times as long.
    bounds = [tensors[0].new_zeros(())]
    for tensor in tensors:
        bounds += tensor.aminmax() if tensor.numel() else ()
    return torch.isfinite(torch.stack(bounds)).all()
