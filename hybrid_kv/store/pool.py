"""Page slots with reference counts: one arena of slots per batch row, pages shared by counting; and
the page table of a row over them, with its list as kernels take it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.errors import IntegrityError
from hybrid_kv.ops import Ops
from hybrid_kv.store.memory import Stamps, allocate, enlarge
from hybrid_kv.types import HIDDEN, LayerShape, PagedKV

ARENA_BITS = 32
PLACE = 2**ARENA_BITS - 1
"""Parts of a page id."""


@dataclass(frozen=True, slots=True)
class ResidentView:
    """All resident entries of all rows.

    k, v: [B, Hkv, N, D], views of the pool wherever every row's pages lie in its own arena.
    positions: [B, N] int64, later than any query where a slot is empty; None when slot n of every
        row holds position n, so that no mask is needed.
    """

    k: Tensor
    v: Tensor
    positions: Tensor | None


class PagePool:
    """K, V, positions and digests of the resident pages of one layer.

    Layout [Hkv, arenas * capacity, S, D], head-major: a head's pages are one strided view, and
    `head * num_pages + page` numbers pages per KV head for kernels that want that. A page id is
    `arena << 32 | place`, so it survives growth; `slots` turns ids into today's slots.

    pages: the memory as it lies now; growing the pool replaces it. writer: stores single tokens in
        it where the engine does; else None. view: all that is resident, as
        the store has shown it last; None where that is no longer all.
    """

    def __init__(
        self,
        shape: LayerShape,
        page_size: int,
        num_arenas: int,
        dtype: torch.dtype,
        device: torch.device,
        capacity_pages: int = 1,
        ops: Ops | None = None,
    ) -> None:
        self.shape, self.page_size, self.num_arenas = shape, page_size, num_arenas
        self.dtype, self.device = dtype, device
        self.ops = ops or Ops()
        self.capacity = max(1, capacity_pages)
        size = (shape.num_kv_heads, num_arenas * self.capacity, page_size, shape.head_dim)
        # Zeros, not what memory happens to hold: a hidden slot has weight 0, and 0 * NaN is NaN.
        self.k = allocate(size, dtype, device, 0)
        self.v = allocate(size, dtype, device, 0)
        self.positions = allocate(size[1:3], torch.int64, device, HIDDEN)
        self.key_min: Tensor | None = None
        self.key_max: Tensor | None = None
        self.refs = np.zeros((num_arenas, self.capacity), dtype=np.int64)
        self.high = [0] * num_arenas
        self.free: list[list[int]] = [[] for _ in range(num_arenas)]
        self.has_shared = False  # some page was once shared, and may still be
        self.stores: WeakSet[Any] = WeakSet()  # whose rows have their arenas here
        self.stamps = Stamps()  # of plans that describe `pages`
        self.pages = self._pages()
        self.view: ResidentView | None = None

    def has_room(self, arena: int) -> bool:
        """Whether another page of an arena fits the memory as it is."""
        return bool(self.free[arena]) or self.high[arena] < self.capacity

    def slots(self, pages: Sequence[int]) -> npt.NDArray[np.int64]:
        """Slot numbers in `k`, `v` and `positions` of page ids."""
        ids = np.asarray(pages, dtype=np.int64)
        slots: npt.NDArray[np.int64] = (ids >> ARENA_BITS) * self.capacity + (ids & PLACE)
        return slots

    def allocate(self, arena: int, count: int) -> list[int]:
        """`count` page ids with one reference each; freed places first, so arenas stay compact."""
        free, first = self.free[arena], self.high[arena]
        reused = min(count, len(free))
        fresh = range(first, first + count - reused)
        if fresh.stop > self.capacity:  # before anything else, as memory may run out
            self._grow(max(fresh.stop, 2 * self.capacity))
        if fresh:
            self.high[arena] = fresh.stop
            self.view = None
        first_free = len(free) - reused
        places = [*reversed(free[first_free:]), *fresh]
        del free[first_free:]
        self.refs[arena, places] = 1
        return [arena << ARENA_BITS | place for place in places]

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to each page."""
        np.add.at(self.refs.reshape(-1), self.slots(pages), 1)
        self.has_shared = True

    def release(self, pages: Sequence[int]) -> None:
        """One reference less; a page without any is hidden and its place may be reused."""
        refs = self.refs.reshape(-1)
        slots = self.slots(pages)
        np.subtract.at(refs, slots, 1)
        gone = refs[slots] == 0
        if not gone.any():
            return
        self.positions.index_fill_(0, self.ops.uploads(slots[gone], self.device), HIDDEN)
        for page, is_free in sorted(zip(pages, gone, strict=True), reverse=True):
            if is_free:
                self.free[page >> ARENA_BITS].append(page & PLACE)

    def is_shared(self, page: int) -> bool:
        return bool(self.refs[page >> ARENA_BITS, page & PLACE] > 1)

    def private_copy(self, page: int, arena: int) -> int:
        """A page of `arena` with the same content; the shared original loses a reference."""
        copy = self.allocate(arena, 1)[0]
        source, target = self.slots([page, copy]).tolist()
        for tensor in (self.k, self.v):
            tensor[:, target] = tensor[:, source]
        self.positions[target] = self.positions[source]
        self._digest(np.asarray([target]))
        self.release([page])
        return copy

    def _pages(self) -> PagedKV:
        pages = PagedKV(self.k, self.v, self.positions, self.key_min, self.key_max)
        self.writer = self.ops.page_writer(pages)
        return pages

    def append(
        self, k: Tensor, v: Tensor, places: npt.NDArray[np.int64] | range, first_position: int
    ) -> None:
        """See `Ops.append`."""
        writer = self.writer
        if writer is not None and len(places) == 1 and writer.takes(k, v):
            writer.append(k, v, int(places[0]), first_position)
        else:
            self.ops.append(self.pages, k, v, places, first_position)

    def upload(self, slots: npt.NDArray[np.int64]) -> Tensor:
        """Slot numbers on the pool's device; read only."""
        return self.ops.uploads(slots, self.device)

    def hide(self, page: int, offset: int) -> None:
        """Forgets the tokens of a private page from `offset` on; its digest stays a valid bound."""
        self.positions[int(self.slots([page])[0]), offset:] = HIDDEN

    def enable_digests(self) -> None:
        """From now on keeps key_min and key_max [Hkv, arenas * capacity, D] of every page."""
        if self.key_min is None:
            size = (self.k.shape[0], self.k.shape[1], self.k.shape[3])
            low, high = (allocate(size, self.dtype, self.device, 0) for _ in range(2))
            self.key_min, self.key_max = low, high
            self.pages = self._pages()
            used = [a * self.capacity + np.arange(h) for a, h in enumerate(self.high)]
            self._digest(np.concatenate(used))
            self.stamps.mark("a pool keeps digests")

    def _digest(self, slots: npt.NDArray[np.int64]) -> None:
        self.ops.update_digests(self.pages, slots)

    def _grow(self, capacity: int) -> None:
        # Doubling makes appending amortised O(1). Where memory runs out, nothing has changed.
        old, arenas = self.capacity, self.num_arenas

        def grown(tensor: Tensor, axis: int, fill: int = 0) -> Tensor:
            by_arena = tensor.unflatten(axis, (arenas, old))
            return enlarge(by_arena, axis + 1, capacity, fill).flatten(axis, axis + 1)

        k, v, positions = grown(self.k, 1), grown(self.v, 1), grown(self.positions, 0, HIDDEN)
        if self.key_min is not None and self.key_max is not None:  # both of them, or none
            self.key_min, self.key_max = grown(self.key_min, 1), grown(self.key_max, 1)
        self.k, self.v, self.positions = k, v, positions
        self.pages, self.view = self._pages(), None
        refs = np.zeros((arenas, capacity), dtype=np.int64)
        refs[:, :old] = self.refs
        self.refs, self.capacity = refs, capacity
        self.stamps.mark("a pool has grown")

    @property
    def memory_bytes(self) -> int:
        """Bytes reserved for K, V, positions and digests."""
        tensors = (self.k, self.v, self.positions, self.key_min, self.key_max)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


_LEAST = 64


class PageList:
    """The slots of a table's pages, in its order, on the pool's device.

    Kept until the table changes, which most steps do not do: a GPU need not be sent it again. After
    `stay_in_place` it lies at one address until it needs more room.

    num_pages: in the list; other than those of the table where it has to be made anew. last: the
        list as it was made last, another tensor for each. there: on a device, with room for more,
        where it stays in place; else None. stamps: of plans that describe where it stays.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool, self.num_pages, self.stamps = pool, -1, Stamps()
        self.there: Tensor | None = None
        self.last: Tensor | None = None
        self._here = np.empty(0, dtype=np.int64)  # in host memory, with room for more
        self._num_right = 0  # entries at its begin that need not be written again
        self._capacity = pool.capacity  # by which slots are numbered

    def slots(self, pages: Sequence[int]) -> Tensor:
        """[P] int64 on the pool's device, where these pages of the table lie; read only."""
        pool, count = self._pool, len(pages)
        if self._capacity != pool.capacity:
            self.forget(0)
        if self.last is None or self.num_pages != count:
            if pool.device.type == "cpu":
                self.last = torch.from_numpy(self._written(pages))
            elif self.there is not None:
                self.last = self._sent(self.there, pages)
            else:
                self.last = pool.upload(pool.slots(pages))
            self.num_pages, self._capacity = count, pool.capacity
        return self.last

    def forget(self, start: int) -> None:
        """The pages from `start` on are others now, or none."""
        self._num_right, self.num_pages = min(self._num_right, start), -1

    def advance(self, pages: Sequence[int]) -> None:
        """Counts the last page where a kernel lists it; lists all pages where none does."""
        count, there = len(pages), self.there
        begins = self.num_pages == count - 1 and self._capacity == self._pool.capacity
        if begins and there is not None and count <= len(there):
            self.num_pages, self.last = count, there[:count]
        elif self.num_pages != count:
            self.slots(pages)

    def stay_in_place(self, pages: Sequence[int]) -> None:
        """From now on the list of a device stays where it is; `advance` needs that."""
        if self.there is None:
            self.there = self._new_list(len(pages))
            self.num_pages = -1
        self.slots(pages)

    def _new_list(self, count: int) -> Tensor:
        # A power of two: each number of places is another compilation of kernels.
        room = 1 << (max(_LEAST, count + 1 + count // 16) - 1).bit_length()
        return allocate([room], torch.int64, self._pool.device, 0)

    def _written(self, pages: Sequence[int]) -> npt.NDArray[np.int64]:
        """The list in host memory, with what it lacked."""
        count, first = len(pages), self._num_right
        if count > len(self._here):
            kept = self._here[:first]
            self._here = np.empty(max(_LEAST, 2 * count), dtype=np.int64)
            self._here[:first] = kept
        self._here[first:count] = self._pool.slots(pages[first:])
        self._num_right = count
        return self._here[:count]

    def _sent(self, there: Tensor, pages: Sequence[int]) -> Tensor:
        """The list on the pool's device, written anew in place."""
        pool, count = self._pool, len(pages)
        if len(there) < count:
            self.there = there = self._new_list(count)
            self.stamps.mark("a page table has moved")
        there[:count].copy_(pool.upload(pool.slots(pages)))
        return there[:count]


class PageTable:
    """The resident pages of a row in logical order: sinks, spare pages, window.

    Appending is amortised O(1) per token.

    pages: ids in the pool. num_tokens: in all of them. tail_fill: in the last one; page_size where
        there is none. in_order: slot n of the row's arena holds its position n. listed: where its
        pages lie.
    """

    def __init__(self, pool: PagePool, arena: int) -> None:
        self.pool, self.arena = pool, arena
        self.pages: list[int] = []  # the same list for ever: who lends its pages remembers it
        self.num_tokens, self.tail_fill = 0, pool.page_size
        self.in_order = True
        self._end: weakref.finalize[..., PageTable] | None = None
        self.listed = PageList(pool)

    def __len__(self) -> int:
        return len(self.pages)

    # Writing ------------------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor, first_position: int) -> None:
        """Adds k, v [Hkv, n, D] at consecutive positions from `first_position` on.

        Where memory runs out, nothing was added.
        """
        count, before = k.shape[1], self.num_tokens
        if count == 0:
            return
        places = self._reserve(count)
        try:
            self.pool.append(k, v, places, first_position)
        except BaseException:
            self.truncate(before)
            raise
        if first_position != before:
            self.in_order = False

    def takes(self, k: Tensor, v: Tensor) -> bool:
        """Whether one token's k, v [1, Hkv, 1, D] have room in the last page, which is this row's
        alone, or in one that the pool has yet, and its writer stores them from where they lie.
        """
        pool = self.pool
        if pool.has_shared or pool.writer is None or not pool.writer.takes(k, v):
            return False
        return self.tail_fill < pool.page_size or pool.has_room(self.arena)

    def count(self, position: int) -> None:
        """Counts one token more, which the table `takes`; `truncate` takes that back.

        Args:
            position: of the token.
        """
        if self.tail_fill == self.pool.page_size:
            self.pages += self.pool.allocate(self.arena, 1)
            self.tail_fill = 0
        if position != self.num_tokens:
            self.in_order = False
        self.tail_fill += 1
        self.num_tokens += 1

    def _reserve(self, count: int) -> npt.NDArray[np.int64] | range:
        """Token places for `count` new tokens: what the last page has left, then new pages."""
        pool, pages = self.pool, self.pages
        size = pool.page_size
        room = size - self.tail_fill
        if room and pool.has_shared:
            self._own_tail()
        if count <= room:  # nearly every decode step
            slot = (pages[-1] >> ARENA_BITS) * pool.capacity + (pages[-1] & PLACE)
            first = slot * size + self.tail_fill
            self.tail_fill += count
            self.num_tokens += count
            return range(first, first + count)
        first = len(pages) - 1 if room else len(pages)
        pages.extend(pool.allocate(self.arena, -(-max(0, count - room) // size)))
        places = pool.slots(pages[first:])[:, None] * size + np.arange(size)
        self.tail_fill = (self.tail_fill + count - 1) % size + 1
        self.num_tokens += count
        return places.reshape(-1)[size - room if room else 0 :][:count]

    def advance(self, position: int) -> int:
        """Reserves one token's place, which it returns; a kernel stores it and lists its page.

        That is `Ops.append_at`, which a step runs before anything reads the table.

        Args:
            position: of the token.
        """
        place = int(self._reserve(1)[0])
        if position != self.num_tokens - 1:
            self.in_order = False
        self.listed.advance(self.pages)
        return place

    def _own_tail(self) -> None:
        """Copy-on-write: before a row changes its last page, nobody else may read it."""
        if self.pool.is_shared(self.pages[-1]):
            self.pages[-1] = self.pool.private_copy(self.pages[-1], self.arena)
            self.listed.forget(len(self.pages) - 1)

    def remove(self, start: int, stop: int) -> None:
        """Forgets the pages start..stop, which are full."""
        if start < stop:
            self.pool.release(self.pages[start:stop])
            del self.pages[start:stop]
            self.listed.forget(start)
            self.num_tokens -= (stop - start) * self.pool.page_size
            self.in_order = False

    def truncate(self, num_tokens: int) -> None:
        """Forgets the newest tokens until `num_tokens` are left."""
        size, pages = self.pool.page_size, self.pages
        keep = -(-num_tokens // size)
        self.pool.release(pages[keep:])
        del pages[keep:]
        self.listed.forget(keep)
        fill = num_tokens - (keep - 1) * size if keep else size
        if fill < self.tail_fill or fill < size:
            self._own_tail()
            self.pool.hide(pages[-1], fill)
        self.tail_fill, self.num_tokens = fill, num_tokens

    def take(self, other: PageTable) -> None:
        """Copies all pages of another pool's table into this one, which is empty."""
        if not other.pages:
            return
        fresh = self.pool.allocate(self.arena, len(other.pages))
        from_, to = other.slots(), self.pool.upload(self.pool.slots(fresh))
        for mine, its in ((self.pool.k, other.pool.k), (self.pool.v, other.pool.v)):
            mine[:, to] = its[:, from_]
        self.pool.positions[to] = other.pool.positions[from_]
        self.pages[:] = fresh
        self.listed.forget(0)
        self.num_tokens, self.tail_fill = other.num_tokens, other.tail_fill
        self.in_order = self.positions() == list(range(self.num_tokens))

    def share(self, source: PageTable) -> None:
        """Lets go of all pages and reads those of another row from now on, beside that row."""
        pages = list(source.pages)
        self.pool.share(pages)
        self.pool.release(self.pages)
        self.pages[:] = pages
        self.num_tokens, self.tail_fill = source.num_tokens, source.tail_fill
        self.in_order = False
        self.listed.forget(0)

    def returns_pages(self) -> None:
        """Lets go of them when nobody has this table any more: the pool outlives it."""
        if self._end is None:
            self._end = weakref.finalize(self, _give_back, self.pool, self.pages)
            self._end.atexit = False

    # Reading ------------------------------------------------------------------------------------

    def view(self) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, N, D] in the order of the table; a copy unless the pages lie in order."""
        return self.read(0, len(self.pages), self.num_tokens)

    def read(self, start: int, stop: int, limit: int) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, n, D] of the pages start..stop, at most `limit` tokens."""
        slots = self.pool.slots(self.pages[start:stop])
        together = len(slots) and (slots[1:] - slots[:-1] == 1).all()
        where = slice(slots[0], slots[-1] + 1) if together else self.pool.upload(slots)
        k, v = self.pool.k[:, where].flatten(1, 2), self.pool.v[:, where].flatten(1, 2)
        return k[:, :limit], v[:, :limit]

    def slots(self) -> Tensor:
        """[P] int64 on the pool's device: where the pages lie, in table order; read only."""
        return self.listed.slots(self.pages)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """key_min, key_max [Hkv, P, D] of the pages in table order."""
        pool = self.pool
        if pool.key_min is None or pool.key_max is None:
            raise IntegrityError("page digests were not enabled; the placement must ask for them")
        slots = pool.slots(self.pages)
        together = (np.diff(slots) == 1).all()
        where = slice(slots[0], slots[-1] + 1) if together else self.slots()
        return pool.key_min[:, where], pool.key_max[:, where]

    def positions(self) -> list[int]:
        """Positions of the tokens in table order."""
        flat = self.pool.positions[self.slots()].flatten()
        found: list[int] = flat[flat != HIDDEN].tolist()
        return found


def _give_back(pool: PagePool, pages: list[int]) -> None:
    pool.release(pages)
    pages.clear()
