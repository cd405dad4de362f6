"""One layer's entries in both tiers, and the rule who owns what.

Positions count a row's stored tokens from 0; padding is never stored. In every row the order is
sinks, cold entries, spare pages, window: what leaves the window is always the oldest page behind
the sinks, so the cold tier is one run of positions. Hot pages are copies of cold pages and own
nothing: their entries are the cold tier's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from hybrid_kv.errors import IntegrityError
from hybrid_kv.ops import Ops
from hybrid_kv.plugins import Placement
from hybrid_kv.store.ahead import PinnedAhead
from hybrid_kv.store.cold import ColdStore
from hybrid_kv.store.hot import HotPages
from hybrid_kv.store.live_index import MakeIndex
from hybrid_kv.store.resident import ResidentStore
from hybrid_kv.types import Demotion, LayerShape

StandInFor: TypeAlias = Callable[[Tensor], MakeIndex]
"""Makes what serves keys [Hkv, N, D] that are about to leave their device, from a look at them."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """Resident entries that belong elsewhere: k, v [Hkv, n, D] (views), positions [n] (host)."""

    k: Tensor
    v: Tensor
    positions: Tensor


class LayerKV:
    """The stores of one layer, for all batch rows."""

    def __init__(
        self,
        shape: LayerShape,
        page_size: int,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        capacity_tokens: int = 0,
        ops: Ops | None = None,
        pinned: PinnedAhead | None = None,
    ) -> None:
        self.shape, self.page_size, self.num_rows = shape, page_size, num_rows
        self.resident = ResidentStore(
            shape, page_size, num_rows, dtype, device, capacity_tokens, ops
        )
        if pinned is None and device.type == "cuda":
            pinned = PinnedAhead()
        self.cold = ColdStore(shape, dtype, num_rows, pinned=pinned)
        self.placement: Placement | None = None
        self.lengths = [0] * num_rows  # stored tokens ever, less cropped ones
        self.dropped = [0] * num_rows
        self.hot = [HotPages(page_size, 0) for _ in range(num_rows)]
        self.stand_in: StandInFor | None = None

    def append(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        """Stores new tokens k, v [B, Hkv, T, D]; valid [B, T] bool leaves padding out."""
        for row in range(self.num_rows):
            rows_k, rows_v = k[row], v[row]
            if valid is not None:
                rows_k, rows_v = rows_k[:, valid[row]], rows_v[:, valid[row]]
            self.resident.append(row, rows_k, rows_v, self.lengths[row])
            self.lengths[row] += rows_k.shape[1]

    def next_positions(self, count: int, valid: Tensor | None) -> Tensor:
        """Positions [B, T] that the next `count` tokens will get; padding repeats a neighbour's."""
        device = self.resident.pool.device
        start = torch.tensor(self.lengths, device=device)[:, None]
        if valid is None:
            return start + torch.arange(count, device=device)
        return start + (valid.long().cumsum(1) - 1).clamp_min(0)

    def seal(self, placement: Placement) -> None:
        """Fixes where entries live from now on; `overflow` then says what has to move."""
        self.placement = placement
        capacity = placement.hot_tokens // self.page_size
        self.hot = [HotPages(self.page_size, capacity) for _ in range(self.num_rows)]

    def unseal(self) -> None:
        """Takes `seal` back, as long as nothing has moved."""
        self.placement = None

    @property
    def overflows(self) -> bool:
        """Whether any row has an `overflow`."""
        return any(start < stop for start, stop in map(self._outside, range(self.num_rows)))

    def overflow(self, row: int) -> Overflow | None:
        """The pages between sinks and window that the placement does not keep, or None.

        Nothing changes yet: the caller copies what shall live on, then calls `forget_overflow`.
        """
        start, stop = self._outside(row)
        if start >= stop:
            return None
        count = (stop - start) * self.page_size
        behind = self.resident.num_tokens(row) - start * self.page_size
        first = self.lengths[row] - behind
        k, v = self.resident.read_pages(row, start, stop, count)
        return Overflow(k, v, torch.arange(first, first + count))

    def forget_overflow(self, row: int) -> None:
        """Takes those pages out of the resident tier; what was not copied is dropped."""
        start, stop = self._outside(row)
        self.resident.remove_pages(row, start, stop)
        if self.placement is not None and self.placement.rest is Demotion.DROP:
            self.dropped[row] += (stop - start) * self.page_size

    def _outside(self, row: int) -> tuple[int, int]:
        """The table's pages behind the sinks and before spare pages and window."""
        place = self.placement
        if place is None or place.rest is Demotion.KEEP:
            return 0, 0
        start = self.hot_range(row).stop
        pages, fill = len(self.resident.tables[row]), self.resident.tail_fill[row]
        # The last page is always kept; whole pages before it fill the window up.
        kept = 1 + -(-max(0, place.window_tokens + place.spare_tokens - fill) // self.page_size)
        return start, pages - kept

    def compact(self) -> None:
        """Gives the memory of demoted pages back (once, after the prompt is sealed)."""
        self.resident = self.resident.select(range(self.num_rows), self._hot_tokens)

    # Hot pages ----------------------------------------------------------------------------------

    @property
    def _hot_tokens(self) -> int:
        return 0 if self.placement is None else self.placement.hot_tokens

    def hot_range(self, row: int) -> range:
        """Where in a row's page table the hot pages stand: behind the sinks."""
        sinks = 0 if self.placement is None else self.placement.sink_tokens // self.page_size
        return range(sinks, sinks + len(self.hot[row]))

    def owned_view(self, row: int) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, N, D] of the entries that the resident tier owns, oldest first."""
        return self.resident.row_view(row, self.hot_range(row))

    def promote(self, row: int) -> int:
        """Ends a step: copies the cold pages to the device that have become worth it.

        Returns:
            How many pages.
        """
        promotions = self.hot[row].next_step()
        if not promotions:
            return 0
        pool, hot = self.resident.pool, self.hot[row]
        fresh = pool.allocate(row, len(promotions))
        first_pages = self.cold.first_pages(row, self.page_size)
        for number, span in enumerate(self.cold.rows[row]):
            first, stop = first_pages[number : number + 2]
            pages = {new: p.page - first for new, p in zip(fresh, promotions, strict=True)}
            pages = {new: slot for new, slot in pages.items() if 0 <= slot < stop - first}
            if pages:
                source = span.extent.pages(self.page_size)
                pool.load(list(pages), source, list(pages.values()))
        for page, promotion in zip(fresh, promotions, strict=True):
            index = self.hot_range(row).start + promotion.place
            self.resident.put_page(row, index, page, instead=promotion.place < len(hot))
            hot.take(promotion)
        return len(promotions)

    def cool(self, row: int) -> None:
        """Forgets the hot pages of a row."""
        hot = self.hot_range(row)
        self.resident.remove_pages(row, hot.start, hot.stop)
        self.hot[row].clear()

    # Rows ---------------------------------------------------------------------------------------

    def crop(self, row: int, count: int) -> None:
        """Forgets the newest `count` tokens of a row, from whichever tier holds them."""
        self.lengths[row] -= count
        moved = self.cold.num_tokens(row) + self.dropped[row] > 0
        sinks = self.placement.sink_tokens if self.placement is not None and moved else 0
        owned = self.resident.num_tokens(row) - len(self.hot[row]) * self.page_size
        near = min(count, owned - sinks)
        if near < count:  # cold entries go as well, and with them the pages that were copied
            self.cool(row)
        resident = self.resident.num_tokens(row)
        far = min(count - near, self.cold.num_tokens(row))
        lost = min(count - near - far, self.dropped[row])
        if far:
            self.cold.truncate(row, self.cold.num_tokens(row) - far)
            self.hot[row].truncate(self.cold.first_pages(row, self.page_size)[-1])
        self.dropped[row] -= lost
        self.resident.truncate(row, resident - near - (count - near - far - lost))

    def branch(self) -> LayerKV:
        """A layer that continues from the same entries: resident ones copied, cold ones shared.

        Until the branch is released, each of the two counts references of the other as well.
        """
        new = copy(self)
        new.resident = self.resident.select(range(self.num_rows), self._hot_tokens)
        new.hot = [hot.copy() for hot in self.hot]
        new.cold = self.cold.branch()
        new.lengths, new.dropped = list(self.lengths), list(self.dropped)
        return new

    def fork(self, sources: Sequence[int]) -> None:
        """Row r continues from row sources[r]; pages and extents are shared, copied on write."""
        if len(sources) == self.num_rows:
            self.resident.fork(sources)
        else:
            self.resident = self.resident.select(sources, self._hot_tokens)
        self.hot = [self.hot[source].copy() for source in sources]
        self.cold.fork(sources)
        self.num_rows = len(sources)
        self.lengths = [self.lengths[source] for source in sources]
        self.dropped = [self.dropped[source] for source in sources]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every stored token has exactly one owner."""
        self.resident.check_integrity()
        self.cold.check_integrity()
        for row in range(self.num_rows):
            near, far = self.resident.positions_of(row), self.cold.positions_of(row)
            self._check_hot(row, near)
            hot = self.hot_range(row)
            del near[hot.start * self.page_size : hot.stop * self.page_size]
            owned = set(near) | set(far)
            if len(owned) != len(near) + len(far):
                twice = sorted(set(near) & set(far)) or "a position within one tier"
                raise IntegrityError(f"row {row}: owned twice: {twice}")
            if len(owned) + self.dropped[row] != self.lengths[row]:
                raise IntegrityError(
                    f"row {row}: {len(owned)} owned and {self.dropped[row]} dropped tokens do not "
                    f"make up the {self.lengths[row]} stored"
                )
            if owned and max(owned) >= self.lengths[row]:
                raise IntegrityError(f"row {row}: position {max(owned)} lies beyond its end")

    def _check_hot(self, row: int, near: Sequence[int]) -> None:
        """Every hot page is a copy of the cold page that it says it is."""
        size, first_pages = self.page_size, self.cold.first_pages(row, self.page_size)
        if len(self.hot[row]) > self.hot[row].capacity:
            raise IntegrityError(
                f"row {row}: {len(self.hot[row])} hot pages, room for {self.hot[row].capacity}"
            )
        for index, page in zip(self.hot_range(row), self.hot[row].pages, strict=True):
            number = bisect_right(first_pages, page) - 1
            slot = page - first_pages[number]
            if number >= len(self.cold.rows[row]) or (
                (slot + 1) * size > self.cold.rows[row][number].length
            ):
                raise IntegrityError(f"row {row}: hot page {page} is no full cold page")
            backing = self.cold.rows[row][number].extent.pages(size)
            k, v = self.resident.read_pages(row, index, index + 1, size)
            same = list(near[index * size : (index + 1) * size]) == backing.positions[slot].tolist()
            for copied, original in ((k, backing.k), (v, backing.v)):
                same &= torch.equal(copied, original[:, slot].to(copied.device))
            if not same:
                raise IntegrityError(f"row {row}: hot page {page} differs from its cold page")
