"""Snapshots: the state of a sealed layer as values, from which another cache is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybrid_kv.entries import Entries
from hybrid_kv.errors import ConfigError, IntegrityError
from hybrid_kv.index._base import SavedIndex
from hybrid_kv.index.auto import AutoIndex
from hybrid_kv.index.device_sketch import DeviceSketch
from hybrid_kv.index.sketch import SketchIndex
from hybrid_kv.ops.tail import Tail
from hybrid_kv.plugins import Index
from hybrid_kv.runtime.layer import LayerCache
from hybrid_kv.store import ColdExtent, ExtentView, LayerStore, Row
from hybrid_kv.store.index_builder import MakeIndex
from hybrid_kv.store.live_index import IndexRefresh, LiveIndex


@dataclass(frozen=True, slots=True)
class ExtentSnapshot:
    """A run of cold entries.

    index: what finds them, and no others; None where the layer's own kind is to be built over them,
        without samples. aging: what it learns from later; None for nothing. moments: what is known
        of them in sum; None where that is to be worked out when somebody asks.
    """

    length: int
    index: Index | None
    aging: IndexRefresh | None
    moments: Tail | None = None


@dataclass(frozen=True, slots=True)
class LayerSnapshot:
    """The entries of one row of a layer.

    k, v: [Hkv, N, D], resident and cold together, oldest first. length: tokens stored so far, of
    which N are here. num_first: those of them before the first cold or dropped one; as many
    positions as are missing lie behind them and the cold ones. extents: of the cold entries. kept:
    what the method has of tokens that left the window, on any device. shadows: nobody attends the
    cold entries, which are there for audits.
    """

    k: Tensor
    v: Tensor
    length: int
    num_first: int
    extents: Sequence[ExtentSnapshot]
    kept: Entries | None
    shadows: bool

    @property
    def num_cold(self) -> int:
        return sum(extent.length for extent in self.extents)

    @property
    def dropped(self) -> int:
        """Tokens that are in neither tier."""
        return self.length - self.k.shape[1]

    @classmethod
    def of(cls, layer: LayerStore) -> LayerSnapshot:
        """Snapshot of a sealed layer of one row; waits for an index that is being built.

        k and v are copies on the host, the rest is shared with the layer.

        Raises:
            ConfigError: something finds its cold entries that only lives on its device.
        """
        (row,) = layer.rows
        extents = [
            replace(_extent_of(layer, span), moments=span.share_known()) for span in row.chain.spans
        ]
        k, v = row.table.view()
        moved = row.chain.num_tokens + row.dropped > 0
        first = row.sink_tokens if moved else k.shape[1]
        _check_order(row, first, k.shape[1])
        cold = [span.extent.first(span.length) for span in row.chain.spans]
        keys = [k[:, :first].cpu(), *(keys for keys, _ in cold), k[:, first:].cpu()]
        values = [v[:, :first].cpu(), *(values for _, values in cold), v[:, first:].cpu()]
        return cls(
            *(torch.cat(keys, 1), torch.cat(values, 1), row.length, first),
            extents=extents,
            kept=row.kept,
            shadows=row.shadows,
        )

    def revived(self, layer: LayerCache, device: torch.device) -> None:
        """Makes this what an empty layer of another cache holds, whose method is the same.

        Cold entries stay where they lie and are never written; resident ones are copied to
        `device`. Where that finds cold entries by itself they are copied to page-locked memory,
        and what finds them to the device.
        """
        means, count = layer.means, self.k.shape[1]
        placement = means.method.seal(layer.shape.layer_idx, ())
        behind = self.num_first + self.num_cold
        room = count - self.num_cold
        store = LayerStore(
            *(layer.shape, means.page_size, 1, self.k.dtype, device, room, means.ops),
            pinned=means.pinned_on(device),
        )
        (row,) = store.rows
        for start, stop, position in (
            (0, self.num_first, 0),
            (behind, count, behind + self.dropped),
        ):
            k, v = self.k[:, start:stop].to(device), self.v[:, start:stop].to(device)
            row.table.append(k, v, position)
        store.seal(placement.shadowed() if self.shadows else placement, shadows=self.shadows)
        if placement.digests:
            store.resident.pool.enable_digests()
        row.length = self.length
        row.dropped = self.dropped
        layer.take(store, placement)
        self._fill_chain(layer, row)
        if self.kept is not None:
            offloads = row.placement is not None and row.placement.offloads
            row.keep(self.kept, self.kept.positions.cpu() if offloads else None)

    def _fill_chain(self, layer: LayerCache, row: Row) -> None:
        if self._fill_selected(layer, row):
            return
        start, chain = self.num_first, row.chain
        make = None if row.placement is None else row.placement.index
        for held in self.extents:
            stop = start + held.length
            extent = ColdExtent.of(self.k[:, start:stop], self.v[:, start:stop], start)
            runner = layer.means.builds
            if make is not None and held.index is not None:
                extent.index = LiveIndex.resumed(make, held.index, runner, held.aging)
            elif make is not None:
                extent.index = LiveIndex(make, extent.keys, None, runner)
            chain.spans.append(ExtentView(extent, held.length, known=held.moments))
            chain.num_tokens += held.length
            start = stop

    def _fill_selected(self, layer: LayerCache, row: Row) -> bool:
        """Fills the chain for a device that finds its entries; False where the host does."""
        store, means = layer.held, layer.means
        try:
            makes = means.selectors.restored(store, [held.index for held in self.extents])
            if not makes:
                return False
            spans = list(self._pinned(layer, row, [own for own, _ in makes]))
        except (torch.OutOfMemoryError, MemoryError) as error:
            device = store.resident.pool.device
            means.selectors.ran_out(store.shape.layer_idx, device, self.num_cold, error)
            return False
        if len(spans) < len(makes):
            return False
        row.chain.spans += spans
        row.chain.num_tokens += self.num_cold
        row.later_index = makes[-1][1]
        return True

    def _pinned(
        self, layer: LayerCache, row: Row, makes: Sequence[MakeIndex]
    ) -> Iterator[ExtentView]:
        """The cold entries in page-locked memory, with their indexes; none if it is refused."""
        start, chain = self.num_first, row.chain
        device = layer.held.resident.pool.device
        by_itself = row.placement is not None and row.placement.select == "auto"
        for held, make in zip(self.extents, makes, strict=True):
            behind = start - self.num_first
            extent = ColdExtent(
                chain.shape, chain.dtype, held.length, pinned=chain.pinned, behind=behind
            )
            if by_itself and not extent.k.is_pinned():
                return
            stop = start + held.length
            extent.fill(self.k[:, start:stop], self.v[:, start:stop], start)
            extent.index = LiveIndex(make, extent.keys, None, layer.means.builds)
            known = None if held.moments is None else held.moments.to(device)
            yield ExtentView(extent, held.length, known=known)
            start = stop


def _extent_of(layer: LayerStore, span: ExtentView) -> ExtentSnapshot:
    live = span.extent.index
    if live is None:
        return ExtentSnapshot(span.length, None, None)
    live.wait(span.extent.keys)
    index = live.serving
    if isinstance(index, DeviceSketch):
        assert layer.placement is not None
        assert layer.placement.index is not None
        empty = layer.placement.index()
        assert isinstance(empty, SketchIndex | AutoIndex)
        index = index.on_host(empty)
    elif index.selects:
        raise ConfigError(
            f"layer {layer.shape.layer_idx} finds its cold entries by a {type(index).__name__} in "
            f"the memory of {layer.resident.pool.device}, which no file holds; make the context "
            "with select='host' to save it"
        )
    if span.length == span.extent.length:
        return ExtentSnapshot(span.length, index, live.aging)
    return _cropped(live, index, span.extent.keys[:, : span.length])


def _cropped(live: LiveIndex, index: Index, keys: Tensor) -> ExtentSnapshot:
    """Of an extent of which the row sees the first keys only: no index tells of the others.

    One that cannot leave them out is built again from the prompt's samples, as decoding would do.
    """
    count = keys.shape[1]
    if (aging := live.aging) is not None:
        aging = aging.behind(0)
        aging.forget_asked()
        aging.num_keys = min(aging.num_keys, count)
    if isinstance(index, SavedIndex) and (shorter := index.shortened(keys)) is not None:
        return ExtentSnapshot(count, shorter, aging)
    if aging is None:
        return ExtentSnapshot(count, None, None)
    index = live.builder.build(live.builder.make(), keys, aging.renew(count))
    return ExtentSnapshot(count, index, aging)


def _check_order(row: Row, first: int, count: int) -> None:
    """Raises IntegrityError unless resident positions are a run from 0 on and one at the end."""
    rest = count - first
    if row.table.positions() != [*range(first), *range(row.length - rest, row.length)]:
        raise IntegrityError(f"row {row.number}: resident tokens are not sinks and window")
