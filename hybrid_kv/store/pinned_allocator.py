"""Pinned memory that is made before it is asked for.

Locking memory for a GPU touches all of it, some hundred milliseconds for a layer's keys at 128K.
The layers of a model ask for the same one after the other, so the next one's is made in a thread
while it is computed; and rows that fill up are locked further in a thread while there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from threading import Lock, Thread
from typing import NamedTuple

import torch

from hybrid_kv.errors import CapacityError
from hybrid_kv.ops.pinned import PinnedRows
from hybrid_kv.store.memory import require_free
from hybrid_kv.types import LayerShape


class _Kind(NamedTuple):
    """Arguments of `PinnedAllocator.take`."""

    size: tuple[int, ...]
    dtype: torch.dtype
    locked: int


class PinnedExtent:
    """Keys and values of an extent in pinned rows, which are locked some entries ahead.

    rows: [2, Hkv, capacity, D].
    """

    def __init__(self, maker: PinnedAllocator, rows: PinnedRows) -> None:
        self._maker, self.rows = maker, rows

    def make_room(self, count: int) -> bool:
        """Whether `count` entries in all are locked, after locking what lacks.

        Raises:
            CapacityError: host memory does not suffice.
        """
        return count <= self.rows.locked or self._maker.lock(self.rows, self._with_room(count))

    def make_room_ahead(self, length: int) -> None:
        """Begins to lock memory for the entries that follow `length`, so that no step waits."""
        rows, wanted = self.rows, self._with_room(length)
        if rows.grows and rows.locked < wanted and rows.locked - length < pinned_room(length) // 2:
            self._maker.begin_lock(rows, wanted)

    def _with_room(self, count: int) -> int:
        """Number of rows to lock for `count` entries and some of those that follow."""
        return max(count, min(self.rows.capacity, count + pinned_room(count)))


def pinned_room(count: int) -> int:
    """Places that are locked beside `count`; they are committed at once."""
    return max(256, count // 16)


def _most(count: int) -> int:
    """Places that an extent may be given beside `count`: address space, which costs nothing.

    So many that a row has no more than four extents up to millions of entries.
    """
    return max(2**15, 3 * count)


class PinnedAllocator:
    """Makes pinned rows when they are asked for, or earlier. For one thread that asks."""

    def __init__(self) -> None:
        self._ready: dict[_Kind, list[Future[PinnedRows]]] = {}
        self._asked: list[_Kind] = []
        self._one_at_a_time = Lock()

    def take(self, size: Sequence[int], dtype: torch.dtype, locked: int) -> PinnedRows:
        """Rows [..., n, D] of undefined content, the first `locked` of them locked; some that were
        made ahead if there are any.

        Raises:
            CapacityError: host memory does not suffice.
        """
        kind = _Kind(tuple(size), dtype, locked)
        self._asked.append(kind)
        made = self._ready.get(kind)
        return made.pop(0).result() if made else _made(kind)

    def extent(
        self, shape: LayerShape, dtype: torch.dtype, count: int, behind: int
    ) -> PinnedExtent:
        """Memory of an extent for `count` entries that come now, of a row with `behind` others."""
        total = behind + count
        size = 2, shape.num_kv_heads, count + _most(total), shape.head_dim
        return PinnedExtent(self, self.take(size, dtype, count + pinned_room(total)))

    def begin(self) -> None:
        """Begins a layer: what is taken from here on is of one."""
        self._asked.clear()

    def repeat(self) -> None:
        """Begins to make, in a thread, what has been taken since `begin`; waits for nothing."""
        wanted = []
        for kind in self._asked:
            future: Future[PinnedRows] = Future()
            self._ready.setdefault(kind, []).append(future)
            wanted.append((kind, future))
        self._asked.clear()
        if wanted:
            Thread(target=_make_all, args=(wanted,), name="hybrid-kv-pin", daemon=True).start()

    def lock(self, rows: PinnedRows, count: int) -> bool:
        """See `PinnedRows.lock`.

        Raises:
            CapacityError: host memory does not suffice.
        """
        require_free(rows.bytes_to(count))
        return rows.lock(count)

    def begin_lock(self, rows: PinnedRows, count: int) -> None:
        """Begins to do so in a thread; who needs them meanwhile waits, and is told what fails."""
        Thread(
            target=self._lock_quietly, args=(rows, count), name="hybrid-kv-pin", daemon=True
        ).start()

    def _lock_quietly(self, rows: PinnedRows, count: int) -> None:
        with self._one_at_a_time:  # all layers of a model fill up at the same step
            try:
                self.lock(rows, count)
            except CapacityError:
                return  # nobody has asked yet; who does is told

    def clear(self) -> None:
        """Gives up what nobody has asked for."""
        self._ready.clear()
        self._asked.clear()


def _made(kind: _Kind) -> PinnedRows:
    try:
        rows = PinnedRows(kind.size, kind.dtype)
    except CapacityError:  # a system that sets memory aside for address space: no room to grow
        rows = PinnedRows((*kind.size[:-2], kind.locked, kind.size[-1]), kind.dtype)
    require_free(rows.bytes_to(kind.locked))
    rows.lock(kind.locked)
    return rows


def _make_all(wanted: list[tuple[_Kind, Future[PinnedRows]]]) -> None:
    while wanted:
        kind, future = wanted.pop(0)
        try:
            future.set_result(_made(kind))
        except BaseException as error:  # whoever asks for the rows is told
            future.set_exception(error)
        del future
