"""Page slots with reference counts: one arena of slots per batch row, pages shared by counting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.ops import Ops
from hybrid_kv.store.memory import allocate, enlarge
from hybrid_kv.store.stamps import Stamps
from hybrid_kv.types import HIDDEN, LayerShape, PagedKV

ARENA_BITS = 32
PLACE = 2**ARENA_BITS - 1
"""Parts of a page id."""


def arena_of(page: int) -> int:
    """The arena in whose memory a page lies."""
    return page >> ARENA_BITS


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
