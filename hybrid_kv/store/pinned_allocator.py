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
from hybrid_kv.ops.pinned_rows import PinnedRows
from hybrid_kv.store.memory import require_free


class _Kind(NamedTuple):
    """Arguments of `PinnedAllocator.take`."""

    size: tuple[int, ...]
    dtype: torch.dtype
    locked: int


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

    def begin(self) -> None:
        """What is taken from here on is one layer's."""
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
