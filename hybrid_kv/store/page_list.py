"""The list of a row's pages in the form that kernels take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.store.memory import allocate
from hybrid_kv.store.pool import PagePool
from hybrid_kv.store.stamps import Stamps

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
