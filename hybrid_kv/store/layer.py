"""The store of one layer with its rows, that of its resident pages, and the bytes of each tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hybrid_kv.ops import Ops
from hybrid_kv.plugins import Placement
from hybrid_kv.store.cold_tier import ColdStore
from hybrid_kv.store.extent import ColdExtent
from hybrid_kv.store.index_builder import MakeIndex
from hybrid_kv.store.pool import PagePool, PageTable, ResidentView
from hybrid_kv.store.row import Row
from hybrid_kv.types import HIDDEN, Demotion, LayerShape, bytes_per_token

if TYPE_CHECKING:
    from hybrid_kv.store.pinned_allocator import PinnedAllocator

SelectFor: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[MakeIndex, MakeIndex] | None]
"""Makes what finds keys [Hkv, N, D] on their device, and those that follow, from a look at them, at
samples [Hkv, G, M, D] and at where they go on the host; None where the host finds them after all.
"""


class LayerStore:
    """The entries of one layer, for all batch rows.

    rows: what each row holds. resident, cold: the two tiers, for what concerns all rows at once;
    their tables and chains are those of the rows.
    """

    def __init__(
        self,
        shape: LayerShape,
        page_size: int,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        capacity_tokens: int = 0,
        ops: Ops | None = None,
        pinned: PinnedAllocator | None = None,
    ) -> None:
        self.shape, self.page_size = shape, page_size
        self.resident = ResidentStore(
            shape, page_size, num_rows, dtype, device, capacity_tokens, ops
        )
        if pinned is None and device.type == "cuda":
            from hybrid_kv.store.pinned_allocator import PinnedAllocator

            pinned = PinnedAllocator()
        self.cold = ColdStore(shape, dtype, num_rows, pinned=pinned)
        tiers = zip(self.resident.tables, self.cold.chains, strict=True)
        self.rows = [Row(number, *own) for number, own in enumerate(tiers)]
        self.placement: Placement | None = None
        self.select: SelectFor | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(row.length for row in self.rows)

    @property
    def moves_entries(self) -> bool:
        """Whether entries leave the window."""
        return self.placement is not None and self.placement.rest is not Demotion.KEEP

    def next_positions(self, count: int, valid: Tensor | None) -> Tensor:
        """Positions [B, T] that the next `count` tokens will get; padding repeats a neighbour's."""
        device = self.resident.pool.device
        start = torch.tensor([row.length for row in self.rows], device=device)[:, None]
        if valid is None:
            return start + torch.arange(count, device=device)
        return start + (valid.long().cumsum(1) - 1).clamp_min(0)

    def seal(self, placement: Placement, *, shadows: bool = False) -> None:
        """Fixes where entries live from now on.

        Args:
            shadows: the cold tier holds what the method drops, for audits alone.
        """
        self.placement = placement
        for row in self.rows:
            row.seal(placement)
            row.shadows = shadows

    def unseal(self) -> None:
        """Takes `seal` back, as long as nothing has moved."""
        self.placement = None
        for row in self.rows:
            row.unseal()

    def crop(self, count: int) -> None:
        """Forgets the newest `count` tokens of every row; raises MethodError as `check_crop`."""
        self.check_crop(count)
        for row in self.rows:
            row.crop(min(count, row.length))

    def check_crop(self, count: int) -> None:
        """Raises MethodError where a row's method has lost what would be the window."""
        for row in self.rows:
            row.check_crop(min(count, row.length))

    def compact(self, *, exactly: bool = False) -> None:
        """Gives the memory of demoted pages back (once, after the prompt is sealed).

        Args:
            exactly: what left did so to the token, and is taken out now; see
                `Row.outside_of_prompt`.
        """
        if exactly:
            self.resident = self._without_absorbed()
        else:
            self.resident = self.resident.select(range(len(self.rows)), self._room)
        for row, table in zip(self.rows, self.resident.tables, strict=True):
            row.take_table(table)

    @property
    def _room(self) -> int:
        """Tokens of a row at most, once a prompt has left: those that stay, and a page that leaves.

        A pool that has to grow moves all of its pages, and whoever captured a step captures again.
        Where a window is never filled, three pages more than there are.
        """
        size = self.resident.pool.page_size
        rows = [row for row in self.rows if row.drains]
        most = (min(row.full_tokens + size, row.table.num_tokens + 3 * size) for row in rows)
        return max(most, default=0)

    def _without_absorbed(self) -> ResidentStore:
        """The resident tier less what left it to the token; the window begins a page."""
        outside = [row.outside_of_prompt() for row in self.rows]
        rows = zip(self.rows, outside, strict=True)
        most = max(row.table.num_tokens - (stop - start) for row, (start, stop) in rows)
        new = self.resident.empty(len(self.rows), max(most, self._room))
        for row, table, (start, stop) in zip(self.rows, new.tables, outside, strict=True):
            k, v = row.table.view()
            table.append(k[:, :start], v[:, :start], 0)
            table.append(k[:, stop:], v[:, stop:], stop)
        return new

    def branch(self) -> LayerStore:
        """A layer that continues from the same entries: resident ones copied, cold ones shared."""
        return self._beside(self.resident.select(range(len(self.rows)), self._room))

    def forked(self) -> LayerStore:
        """A layer of another cache that continues from the same entries; this one must be sealed.

        Cold entries and their indexes are shared. Resident ones are copied, sinks and window; where
        everything is resident pages are shared, and copied when one of the two writes to them.
        """
        if self.placement is not None and self.placement.rest is Demotion.KEEP:
            return self._beside(self.resident.shared())
        return self.branch()

    def _beside(self, resident: ResidentStore) -> LayerStore:
        new = copy(self)
        new.resident, new.cold = resident, self.cold.branch()
        new.rows = self._continued(range(len(self.rows)), new)
        return new

    def fork(self, sources: Sequence[int]) -> None:
        """Row r continues from row sources[r]; pages and extents are shared, copied on write."""
        if len(sources) == len(self.rows):
            self.resident.fork(sources)
        else:
            self.resident = self.resident.select(sources, self._room)
        self.cold.fork(sources)
        self.rows = self._continued(sources, self)

    def _continued(self, sources: Sequence[int], into: LayerStore) -> list[Row]:
        tiers = zip(into.resident.tables, into.cold.chains, strict=True)
        rows = zip(sources, tiers, strict=True)
        return [self.rows[source].continued(n, *own) for n, (source, own) in enumerate(rows)]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every stored token has exactly one owner."""
        from hybrid_kv.store.integrity import check_cold, check_row

        self.resident.check_integrity()
        check_cold(self.cold)
        for row in self.rows:
            check_row(row)


class ResidentStore:
    """Pages on the device, a table for each row; forking copies tables, not pages."""

    def __init__(
        self,
        shape: LayerShape,
        page_size: int,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        capacity_tokens: int = 0,
        ops: Ops | None = None,
    ) -> None:
        pages = -(-capacity_tokens // page_size)
        self.pool = PagePool(shape, page_size, num_rows, dtype, device, pages, ops)
        self.pool.stores.add(self)
        self.tables = [PageTable(self.pool, row) for row in range(num_rows)]
        self._forked = False  # some row reads pages of another row's arena

    def fork(self, sources: Sequence[int]) -> None:
        """Row r continues from what row sources[r] holds; pages are shared, not copied."""
        if list(sources) == list(range(len(self.tables))):
            return
        before = self.tables
        self.tables = [PageTable(self.pool, row) for row in range(len(sources))]
        for table, source in zip(self.tables, sources, strict=True):
            table.share(before[source])
        for table in before:
            table.truncate(0)
        self._forked, self.pool.view = True, None

    def shared(self) -> ResidentStore:
        """A store of the same pages, in the same memory; who writes to a page copies it first.

        As long as both are there the rows of either lie among those of the other, so that `view` of
        both is a copy.
        """
        new = copy(self)
        new.pool.stores.add(new)
        new.tables = [PageTable(self.pool, row) for row in range(len(self.tables))]
        for table, source in zip(new.tables, self.tables, strict=True):
            table.share(source)
            source.in_order = False
        for table in (*new.tables, *self.tables):
            table.returns_pages()
        self.pool.view = None
        return new

    def select(self, sources: Sequence[int], room_tokens: int = 0) -> ResidentStore:
        """A new store whose row r is a copy of row sources[r]; any number of rows.

        Args:
            room_tokens: how many there is room for in a row, at least.
        """
        most = max((self.tables[source].num_tokens for source in sources), default=0)
        new = self.empty(len(sources), max(most, room_tokens))
        for table, source in zip(new.tables, sources, strict=True):
            table.take(self.tables[source])
        if self.pool.key_min is not None:
            new.pool.enable_digests()
        return new

    def empty(self, num_rows: int, capacity_tokens: int) -> ResidentStore:
        """A store without tokens for entries like these."""
        pool = self.pool
        return ResidentStore(
            pool.shape,
            pool.page_size,
            num_rows,
            pool.dtype,
            pool.device,
            capacity_tokens=capacity_tokens,
            ops=pool.ops,
        )

    # Views --------------------------------------------------------------------------------------

    @property
    def in_order(self) -> bool:
        """Slot n of every row holds its position n, and all rows are equally long."""
        first = self.tables[0].num_tokens
        return all(table.in_order and table.num_tokens == first for table in self.tables)

    def view(self) -> ResidentView:
        """Every resident entry; zero-copy unless rows share pages after a fork."""
        if self._forked or len(self.pool.stores) > 1:
            return self._gathered_view()
        if self.in_order:
            return ResidentView(*self._slots(self.tables[0].num_tokens), None)
        pool = self.pool
        if pool.view is None:  # it stays the same for many steps
            count = max(pool.high) * pool.page_size
            positions = pool.positions.view(len(self.tables), -1)[:, :count]
            pool.view = ResidentView(*self._slots(count), positions)
        return pool.view

    def _slots(self, count: int) -> tuple[Tensor, Tensor]:
        """k, v [B, Hkv, count, D]: the first slots of every arena, views."""
        pool = self.pool
        size = (pool.shape.num_kv_heads, len(self.tables), -1, pool.shape.head_dim)
        k, v = (memory.view(size).transpose(0, 1)[:, :, :count] for memory in (pool.k, pool.v))
        return k, v

    def _gathered_view(self) -> ResidentView:
        pool, most = self.pool, max(map(len, self.tables))
        slots = np.zeros((len(self.tables), most), dtype=np.int64)
        for row, table in enumerate(self.tables):
            slots[row, : len(table)] = pool.slots(table.pages)
        where = torch.from_numpy(slots).to(pool.device)
        lengths = torch.tensor(list(map(len, self.tables)), device=pool.device)
        padding = torch.arange(most, device=pool.device)[None] >= lengths[:, None]
        positions = pool.positions[where].masked_fill(padding[..., None], HIDDEN)
        k, v = (t[:, where].transpose(0, 1).flatten(2, 3) for t in (pool.k, pool.v))
        return ResidentView(k, v, positions.flatten(1))

    # Integrity ----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises IntegrityError unless counts, fills, order claims and digests are true."""
        from hybrid_kv.store.integrity import check_resident

        check_resident(self.pool, self.tables, has_forked=self._forked)


class TierBytes(NamedTuple):
    """K and V in the resident tier, those of the cold tier with their positions, and indexes."""

    device_kv: int = 0
    host_kv: int = 0
    host_index: int = 0


def tier_bytes(layers: Iterable[LayerStore]) -> TierBytes:
    """Of layers of one cache, or of several that were forked from each other.

    Tokens are counted as they come and go. Only pages of a pool in which some were shared are
    looked at, for those that several rows list.
    """
    device, extents = 0, dict[int, ColdExtent]()
    shared = dict[PagePool, list[PageTable]]()
    for layer in layers:
        each = bytes_per_token(layer.shape, layer.cold.dtype)
        for row in layer.rows:
            if row.table.pool.has_shared:
                shared.setdefault(row.table.pool, []).append(row.table)
            else:
                device += each * row.table.num_tokens
            device += 0 if row.kept is None else row.kept.nbytes
        extents |= {id(span.extent): span.extent for span in layer.cold.spans()}
    for pool, tables in shared.items():
        device += bytes_per_token(pool.shape, pool.dtype) * _tokens_of(tables, pool.page_size)
    own = extents.values()
    host = sum(e.keys.nbytes + e.values.nbytes + 4 * e.length for e in own)
    return TierBytes(device, host, sum(e.index.memory_bytes for e in own if e.index is not None))


def _tokens_of(tables: Iterable[PageTable], page_size: int) -> int:
    """Tokens of all pages that are listed, each once; the last page of a table may not be full."""
    pages, tails = set[int](), dict[int, int]()
    for table in tables:
        pages.update(table.pages)
        if table.pages:
            tails[table.pages[-1]] = table.tail_fill
    return len(pages) * page_size - sum(page_size - fill for fill in tails.values())
