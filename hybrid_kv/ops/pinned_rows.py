"""Page-locked rows that grow where they lie.

    [..., capacity, D]   address space of this process, of which nothing is committed
     ├─ locked ─┤        the first rows of each array: a GPU reads and writes them by itself

More rows are locked behind those that are: nothing is copied, and nothing that was told an address
(descriptors, captured graphs) is told another. A copy over the bus keeps within what was locked at
once, see `bus_copies`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import Lock

import torch

from hybrid_kv.ops import pinned
from hybrid_kv.ops.host_memory import HUGE_PAGE_BYTES, ReservedPages, as_tensor
from hybrid_kv.ops.pinned import PAGE_BYTES, lock_ranges


class PinnedRows:
    """Arrays of rows in host memory, of which the first are page-locked; plain memory where there
    is no CUDA, or it refuses the first of them.

    May be used by several threads. The memory lives, locked, as long as a view of `rows`.

    rows: [..., capacity, D], writable below `locked` of the second to last axis. grows: whether
    more may be locked.

    Args:
        size: [..., n, D]; the capacity is n or some more.

    Raises:
        CapacityError: the system has no such address space.
    """

    def __init__(self, size: Sequence[int], dtype: torch.dtype) -> None:
        *arrays, count, width = size
        self._row_bytes = width * dtype.itemsize
        is_large = count * self._row_bytes >= HUGE_PAGE_BYTES
        whole = self._rows_of(HUGE_PAGE_BYTES if is_large else PAGE_BYTES)
        self._num_arrays, self.capacity = math.prod(arrays), -(-count // whole) * whole
        self._array_bytes = self.capacity * self._row_bytes
        self._pages = ReservedPages(max(1, self._num_arrays * self._array_bytes))
        self.rows = as_tensor(self._pages.array, [*arrays, self.capacity, width], dtype)
        self.locked, self.grows = 0, True
        self._lock = Lock()

    def _rows_of(self, page_bytes: int) -> int:
        """The least number of rows that is whole pages."""
        return math.lcm(self._row_bytes, page_bytes) // self._row_bytes

    def bytes_to(self, count: int) -> int:
        """Bytes that the first `count` rows of each array commit beyond what is."""
        return max(0, count - self.locked) * self._row_bytes * self._num_arrays

    def lock(self, count: int) -> bool:
        """Locks the first `count` rows of each array; whether they may be written.

        False beyond the capacity, where CUDA refuses more, and where kernels would not reach more
        in the place behind.
        """
        with self._lock:
            if count <= self.locked:
                return True
            if count > self.capacity or not self.grows:
                return False
            return self._lock_to(count)

    def _lock_to(self, count: int) -> bool:
        whole = self._rows_of(PAGE_BYTES)
        stop = min(self.capacity, -(-count // whole) * whole) * self._row_bytes
        start, ranges = self.locked * self._row_bytes, list[tuple[int, int]]()
        for first in range(0, self._num_arrays * self._array_bytes, self._array_bytes):
            self._pages.use_huge(first + start, first + stop)
            ranges.append((self.rows.data_ptr() + first + start, stop - start))
        is_locked = lock_ranges(self._pages.array, ranges)
        if self.locked:
            self.grows = is_locked
        elif is_locked:
            address = self.rows.data_ptr()
            self.grows = pinned.device_address(address) == address
        if is_locked:
            self.locked = stop // self._row_bytes
        elif not self.locked:
            self.locked = self.capacity  # plain
        return count <= self.locked
