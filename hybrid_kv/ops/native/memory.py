"""Host arrays for the engine: aligned, on huge pages where the system has them."""

from __future__ import annotations

import errno
import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.errors import CapacityError
from hybrid_kv.ops.host_memory import free_memory

HUGE_PAGE_BYTES = 2 * 2**20
"""Arrays of this size on have a mapping of their own."""


def host_array(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the host, aligned to 64 bytes at least, of undefined content.

    A search reads rows all over a large array, and with small pages most of these reads also miss
    the TLB; so a large one lies on huge pages if the system grants them. Memory that is never
    written is not committed. May be written inside and outside of inference mode.

    Raises:
        CapacityError: the system grants no such array.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    if num_bytes >= HUGE_PAGE_BYTES:
        return as_tensor(map_pages(num_bytes), size, dtype)
    with torch.inference_mode(False):
        return torch.empty(list(size), dtype=dtype)


def host_zeros(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `host_array`, of zeros; these take no memory either before they are written."""
    num_bytes = math.prod(size) * dtype.itemsize
    if num_bytes >= HUGE_PAGE_BYTES:
        return as_tensor(map_pages(num_bytes), size, dtype)
    with torch.inference_mode(False):
        return torch.zeros(list(size), dtype=dtype)


def as_tensor(pages: npt.NDArray[np.uint8], size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The memory of `pages`, which lives as long as the tensor and its views, under a shape."""
    with torch.inference_mode(False):
        return torch.from_numpy(pages).view(dtype).view(list(size))


def map_pages(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Fresh zeros [num_bytes] from the system, on huge pages and aligned to them.

    Raises:
        CapacityError: the system refuses.
    """
    pages = _mapped(num_bytes)
    with suppress(AttributeError, OSError):  # not every system knows them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return _aligned(pages, num_bytes)


class ReservedPages:
    """Address space of the process whose memory is committed as it is written, on small pages.

    array: [num_bytes] zeros, aligned to huge pages.

    Raises:
        CapacityError: the system refuses.
    """

    def __init__(self, num_bytes: int) -> None:
        self._pages = _mapped(num_bytes, _NO_RESERVE)
        self.array = _aligned(self._pages, num_bytes)
        self._skip = self.array.ctypes.data - _address(self._pages)

    def use_huge(self, start: int, stop: int) -> None:
        """Lets whole huge pages within some bytes be huge; before these are written."""
        first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        last = stop // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if first < last:
            with suppress(AttributeError, OSError):  # not every system knows them
                self._pages.madvise(mmap.MADV_HUGEPAGE, self._skip + first, last - first)


_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which `mmap` has no name for: swap is not set aside for all of it."""


def _mapped(num_bytes: int, flags: int = 0) -> mmap.mmap:
    """A mapping of so many bytes, and of a huge page more, so that its start can be aligned."""
    # Private, as huge pages are seldom granted to shared memory, which is the default here. A
    # copy of the process sees its own memory from then on.
    flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        return mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise CapacityError(
            f"host memory ran out: the system grants no array of {num_bytes:,} bytes, "
            f"{free_memory()}; shorten the context or free memory"
        ) from error


def _address(pages: mmap.mmap) -> int:
    return int(np.frombuffer(pages, dtype=np.uint8).ctypes.data)


def _aligned(pages: mmap.mmap, num_bytes: int) -> npt.NDArray[np.uint8]:
    """The first bytes of a mapping that begin a huge page; they keep it alive."""
    raw = np.frombuffer(pages, dtype=np.uint8)
    skip = -raw.ctypes.data % HUGE_PAGE_BYTES
    return raw[skip : skip + num_bytes]
