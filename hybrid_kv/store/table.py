"""The page table of one batch row over a pool of pages."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.errors import IntegrityError
from hybrid_kv.store.memory import allocate
from hybrid_kv.store.pool import ARENA_BITS, PLACE, PagePool
from hybrid_kv.store.stamps import Stamps
from hybrid_kv.types import HIDDEN

_LEAST_LISTED = 64


class PageTable:
    """The resident pages of a row in logical order: sinks, spare pages, window.

    Appending is amortised O(1) per token.

    pages: ids in the pool. num_tokens: in all of them. tail_fill: in the last one; page_size where
        there is none. in_order: slot n of the row's arena holds its position n. num_listed: pages
        in the list of `slots`; other than those of the table where it has to be made anew. stamps:
        of plans that describe where that list lies.
    """

    def __init__(self, pool: PagePool, arena: int) -> None:
        self.pool, self.arena = pool, arena
        self.pages: list[int] = []  # the same list for ever: who lends its pages remembers it
        self.num_tokens, self.tail_fill = 0, pool.page_size
        self.in_order = True
        self._end: weakref.finalize[..., PageTable] | None = None
        self.stamps = Stamps()
        self.num_listed = -1
        self._slots: Tensor | None = None
        self._list = np.empty(0, dtype=np.int64)  # in host memory, with room for more
        self._num_right = 0  # entries at its begin that need not be written again
        self._listed_capacity = pool.capacity  # of the pool, by which slots are numbered
        self.listed: Tensor | None = None  # on a device, with room for more; see `list_in_place`

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
        """Whether one token's k, v [1, Hkv, 1, D] fit the last page, which is this row's alone, and
        the pool's writer stores them from where they lie.
        """
        pool = self.pool
        room = self.tail_fill < pool.page_size and not pool.has_shared
        return room and pool.writer is not None and pool.writer.takes(k, v)

    def count(self, position: int, tokens: int) -> None:
        """Counts one token more in the last page, which `takes` it, or for -1 one less.

        Args:
            position: of the token.
        """
        self.tail_fill += tokens
        self.num_tokens += tokens
        if position != self.num_tokens - max(0, tokens):
            self.in_order = False

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
        count, listed = len(self.pages), self.listed
        begins = self.num_listed == count - 1 and self._listed_capacity == self.pool.capacity
        if begins and listed is not None and count <= len(listed):
            self.num_listed, self._slots = count, listed[:count]
        elif self.num_listed != count:
            self.slots()
        return place

    def _own_tail(self) -> None:
        """Copy-on-write: before a row changes its last page, nobody else may read it."""
        if self.pool.is_shared(self.pages[-1]):
            self.pages[-1] = self.pool.private_copy(self.pages[-1], self.arena)
            self._unlist(len(self.pages) - 1)

    def remove(self, start: int, stop: int) -> None:
        """Forgets the pages start..stop, which are full."""
        if start < stop:
            self.pool.release(self.pages[start:stop])
            del self.pages[start:stop]
            self._unlist(start)
            self.num_tokens -= (stop - start) * self.pool.page_size
            self.in_order = False

    def truncate(self, num_tokens: int) -> None:
        """Forgets the newest tokens until `num_tokens` are left."""
        size, pages = self.pool.page_size, self.pages
        keep = -(-num_tokens // size)
        self.pool.release(pages[keep:])
        del pages[keep:]
        self._unlist(keep)
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
        self._unlist(0)
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
        self._unlist(0)

    def returns_pages(self) -> None:
        """Lets go of them when nobody has this table any more: the pool outlives it."""
        if self._end is None:
            self._end = weakref.finalize(self, _give_back, self.pool, self.pages)
            self._end.atexit = False

    # Reading ------------------------------------------------------------------------------------

    def view(self) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, N, D] in the order of the table; a copy unless the pages lie in order."""
        return self._read(self.pages, self.num_tokens)

    def read(self, start: int, stop: int, limit: int) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, n, D] of the pages start..stop, at most `limit` tokens."""
        return self._read(self.pages[start:stop], limit)

    def _read(self, pages: Sequence[int], limit: int) -> tuple[Tensor, Tensor]:
        slots = self.pool.slots(pages)
        together = len(slots) and (np.diff(slots) == 1).all()
        where = slice(slots[0], slots[-1] + 1) if together else self.pool.upload(slots)
        k, v = (t[:, where].flatten(1, 2)[:, :limit] for t in (self.pool.k, self.pool.v))
        return k, v

    def slots(self) -> Tensor:
        """[P] int64 on the pool's device: where the pages lie, in table order; read only.

        In host memory, and after `list_in_place`, always at one address, until the list needs more
        room. Kept until the table changes, which most steps do not do: a GPU need not be sent it
        again.
        """
        pool, count = self.pool, len(self.pages)
        if self._listed_capacity != pool.capacity:
            self._unlist(0)
        if self._slots is None or self.num_listed != count:
            if pool.device.type == "cpu":
                self._slots = torch.from_numpy(self._listed())
            elif self.listed is not None:
                self._slots = self._listed_there(self.listed)
            else:
                self._slots = pool.upload(pool.slots(self.pages))
            self.num_listed, self._listed_capacity = count, pool.capacity
        return self._slots

    def _unlist(self, start: int) -> None:
        """The pages from `start` on are others now, or none."""
        self._num_right, self.num_listed = min(self._num_right, start), -1

    def _listed(self) -> npt.NDArray[np.int64]:
        """The list in host memory, with what it lacked."""
        count, first = len(self.pages), self._num_right
        moves = count > len(self._list)
        if moves:
            kept = self._list[:first]
            self._list = np.empty(max(_LEAST_LISTED, 2 * count), dtype=np.int64)
            self._list[:first] = kept
        self._list[first:count] = self.pool.slots(self.pages[first:])
        self._num_right = count
        if moves:
            self.stamps.mark("a page table has moved")
        return self._list[:count]

    def list_in_place(self) -> None:
        """From now on the list of a device stays where it is; `advance` needs that."""
        if self.listed is None:
            self.listed = self._new_list()
            self.num_listed = -1
        self.slots()

    def _new_list(self) -> Tensor:
        count = len(self.pages)
        # A power of two: each number of places is another compilation of kernels.
        room = 1 << (max(_LEAST_LISTED, count + 1 + count // 16) - 1).bit_length()
        return allocate([room], torch.int64, self.pool.device, 0)

    def _listed_there(self, listed: Tensor) -> Tensor:
        """The list on the pool's device, written anew in place."""
        pool, count = self.pool, len(self.pages)
        if len(listed) < count:
            self.listed = listed = self._new_list()
            self.stamps.mark("a page table has moved")
        listed[:count].copy_(pool.upload(pool.slots(self.pages)))
        return listed[:count]

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

    def check_integrity(self) -> None:
        """Raises IntegrityError unless counts, the claim of order and digests are true."""
        row, pool, positions = self.arena, self.pool, self.positions()
        counted = len(self.pages) * pool.page_size - (pool.page_size - self.tail_fill)
        if not len(positions) == self.num_tokens == counted:
            raise IntegrityError(
                f"row {row}: {len(positions)} filled slots, {self.num_tokens} tokens counted, "
                f"{counted} by its pages"
            )
        slots = pool.slots(self.pages)
        if self.in_order:
            places = range(row * pool.capacity, row * pool.capacity + len(slots))
            if positions != list(range(len(positions))) or slots.tolist() != list(places):
                raise IntegrityError(f"row {row} claims to be in order and is not")
        if pool.key_min is None or not self.pages:
            return
        low, high = self.bounds()
        where = torch.from_numpy(slots).to(pool.device)
        keys = pool.k[:, where]
        inside = (keys >= low[:, :, None]) & (keys <= high[:, :, None])
        filled = (pool.positions[where] != HIDDEN)[None, :, :, None]
        if not (inside | ~filled).all():
            raise IntegrityError(f"row {row}: a page digest does not bound its keys")


def _give_back(pool: PagePool, pages: list[int]) -> None:
    pool.release(pages)
    pages.clear()
