"""Host arrays of cold entries, written once, head-major: their index, what rows see and find."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from hybrid_kv.ops.tail import Tail
from hybrid_kv.store.live_index import LiveIndex
from hybrid_kv.store.memory import Stamps, allocate, enlarge
from hybrid_kv.types import LayerShape

if TYPE_CHECKING:
    from hybrid_kv.store.pinned_allocator import PinnedAllocator, PinnedExtent


class ColdExtent:
    """Consecutive cold entries of one row: keys, values [Hkv, capacity, D], positions [capacity].

    Capacity is reserved generously, because host memory that was never written is not committed.
    Page-locked memory is, and locking and copying gigabytes would hold up a step for seconds: it is
    locked some entries ahead, and more is locked where it lies. What CUDA does not let grow is
    followed by another extent.

    readers: the spans that see it, of any row, layer or cache; one that is gone is none any more.
    stamps: of plans that describe its memory or how much of it is filled.

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
        pinned: PinnedAllocator | None = None,
        behind: int = 0,
    ) -> None:
        host, heads, dim = torch.device("cpu"), shape.num_kv_heads, shape.head_dim
        self._pinned: PinnedExtent | None = None
        self._is_fixed = False
        if pinned is not None:
            self._pinned = pinned.extent(shape, dtype, count, behind)
            self.k, self.v = self._pinned.rows.rows.unbind()
        else:
            capacity = count + max(256, count)
            self.k, self.v = (allocate([heads, capacity, dim], dtype, host) for _ in range(2))
        self.positions = allocate([self.k.shape[1]], torch.int32, host)
        self.length = 0
        self.readers: WeakSet[ExtentView] = WeakSet()
        self.rewritten = 0  # how often entries were forgotten and others written in their place
        self.index: LiveIndex | None = None
        self.stamps = Stamps()

    @classmethod
    def of(cls, k: Tensor, v: Tensor, first_position: int) -> ColdExtent:
        """An extent of k, v [Hkv, n, D] where they lie, which may be a file; nothing follows them.

        Args:
            first_position: of the n consecutive ones.
        """
        extent = cls.__new__(cls)
        count = k.shape[1]
        extent._pinned, extent._is_fixed = None, True
        extent.k, extent.v = k, v
        extent.positions = allocate([count], torch.int32, torch.device("cpu"))
        extent.positions.copy_(torch.arange(first_position, first_position + count))
        extent.length, extent.readers = count, WeakSet()
        extent.rewritten, extent.index, extent.stamps = 0, None, Stamps()
        return extent

    def fill(self, k: Tensor, v: Tensor, first_position: int) -> None:
        """Copies entries k, v [Hkv, n, D] of consecutive positions into an empty extent."""
        count = k.shape[1]
        self.k[:, :count], self.v[:, :count] = k, v
        self.positions[:count] = torch.arange(first_position, first_position + count)
        self.length = count

    def make_room(self, count: int) -> bool:
        """Whether `count` entries in all have room here, after giving them what lacks; amortised
        O(1) per token.

        Raises:
            CapacityError: host memory does not suffice.
        """
        if self._pinned is not None:
            return self._pinned.make_room(count)
        if count <= self.positions.shape[0]:
            return True
        if self._is_fixed:
            return False
        capacity = count + max(256, count)
        self.k, self.v = enlarge(self.k, 1, capacity), enlarge(self.v, 1, capacity)
        self.positions = enlarge(self.positions, 0, capacity)
        self.stamps.mark("an extent has moved")
        return True

    def make_room_ahead(self) -> None:
        """Begins to give room to the entries that follow, so that no step waits for it."""
        if self._pinned is not None:
            self._pinned.make_room_ahead(self.length)

    @property
    def keys(self) -> Tensor:
        """[Hkv, length, D], a view."""
        return self.k[:, : self.length]

    @property
    def values(self) -> Tensor:
        """[Hkv, length, D], a view."""
        return self.v[:, : self.length]

    def first(self, length: int) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, length, D] of the oldest entries, views."""
        return self.k[:, :length], self.v[:, :length]


class ComingTail:
    """Moments of entries k, v [Hkv, n, D] of a host, taken in the background.

    Who needs them takes them himself where that has not begun, or runs in a copy of the process,
    which has none of its threads.

    Args:
        begin: `Executor.soon`.
    """

    def __init__(
        self, k: Tensor, v: Tensor, begin: Callable[[Callable[[], None]], Future[None]]
    ) -> None:
        taken: list[Tail] = []

        def work() -> None:  # it does not know who waits, so that a queue keeps the entries alone
            taken.append(Tail.of(k, v))

        self.count, self._taken, self._work = k.shape[1], taken, work
        self._future, self._process = begin(work), os.getpid()

    def take(self) -> Tail:
        """The moments, which are waited for.

        Raises:
            Exception: what the work in the background has raised.
        """
        if os.getpid() != self._process:
            if not self._taken:
                self._work()
        elif self._future.cancel():
            self._work()
        else:
            self._future.result()
        return self._taken[0]


@dataclass(slots=True, eq=False, weakref_slot=True)
class ExtentView:
    """The first `length` entries of an extent, as one row sees it.

    near: [Hkv, M, K] what its latest search found, where the next one begins. known: these entries
    in sum, as of when somebody asked last. known_without: the same without some, and which.
    known_is_own: whether nobody else has the tensors of `known`. coming: what `known` will be; None
    for nothing that is under way.
    """

    extent: ColdExtent
    length: int
    near: Tensor | None = None
    known: Tail | None = None
    known_without: tuple[Tensor, Tail] | None = None
    known_is_own: bool = False
    coming: ComingTail | None = None

    def __post_init__(self) -> None:
        self.extent.readers.add(self)

    def tail(self, device: torch.device) -> Tail:
        """Moments of these entries by KV head; those of late may not be in them yet.

        On a device they stay where they lie, so that a captured step goes on reading them.
        """
        if self.coming is not None:  # steps ask here
            self.settle()
        known = self.known
        if known is None or known.is_outgrown(self.length):
            k, v = self.extent.first(self.length)
            new = Tail.of(k, v, device=device) if known is None else known.grown(k, v)
            if known is not None and self.known_is_own and known.keys.is_cuda:
                new = known.filled(new)
            known, self.known_is_own = new, True
        if known.keys.device != device:
            known, self.known_is_own = known.to(device), True
        self.known = known
        return known

    def share_known(self) -> Tail | None:
        """Moments of these entries so far, for somebody who will keep them."""
        self.settle()
        self.known_is_own = False
        return self.known

    def settle(self) -> None:
        """Takes up the moments that are under way; waits for them."""
        if self.coming is not None:
            self.known, self.known_is_own = self.coming.take(), True
            self.coming = None

    def cut(self, length: int) -> None:
        """Forgets the newest entries until `length` are left."""
        self.length, self.near = length, None
        self.known_without = None
        if self.known is not None and self.known.count > length:
            self.known = None
        if self.coming is not None and self.coming.count > length:
            self.coming = None


class RetrievedPart(NamedTuple):
    """Entries of one extent that queries attend.

    ids: [Hkv, M, K] of its entries, -1 for none. bias: [Hkv, M, K] float32 log weights, or None.
    scores: [Hkv, M, K] float32 dot products of these, or more of them; None where nobody asks.
    """

    extent: ColdExtent
    ids: Tensor
    bias: Tensor | None = None
    scores: Tensor | None = None


class Retrieved(NamedTuple):
    """Cold entries that one row's queries attend.

    parts: by extent of the row.
    scored, read_bytes: dot products spent on finding them, and what the searches read.
    ranked: ids like those of parts, before they were cut to the budget; None if nothing was cut.
    estimated: [Hkv, M] float32, log-sum-exp of what is estimated of the unread entries, by whoever
        looks at the step; None for nothing.
    half: [Hkv, M] float32, as `LayerPlan.tell` takes it; None where it has to be computed.
    """

    parts: list[RetrievedPart]
    scored: int = 0
    ranked: list[Tensor] | None = None
    read_bytes: int = 0
    estimated: Tensor | None = None
    half: Tensor | None = None
