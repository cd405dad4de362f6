"""Host arrays for the engine: aligned, on huge pages where the system has them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_HUGE_PAGE = 2 * 2**20


def host_array(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the host, aligned to 64 bytes at least, of undefined content.

    A search reads rows all over a large array, and with small pages most of these reads also miss
    the TLB; so a large one lies on huge pages if the system grants them. Memory that is never
    written is not committed. May be written inside and outside of inference mode.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    with torch.inference_mode(False):
        if num_bytes < _HUGE_PAGE:
            return torch.empty(list(size), dtype=dtype)
        return _huge_pages(num_bytes).view(dtype).view(list(size))


def host_zeros(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `host_array`, of zeros; these take no memory either before they are written."""
    num_bytes = math.prod(size) * dtype.itemsize
    with torch.inference_mode(False):
        if num_bytes < _HUGE_PAGE:
            return torch.zeros(list(size), dtype=dtype)
        return _huge_pages(num_bytes).view(dtype).view(list(size))


def _huge_pages(num_bytes: int) -> Tensor:
    """Fresh zeros [num_bytes] from the system."""
    # Private, as huge pages are seldom granted to shared memory, which is the default here. A
    # copy of the process sees its own memory from then on. There is room to align the start.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=flags)
    with suppress(AttributeError, OSError):  # not every system knows them
        pages.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(pages, dtype=torch.uint8)  # keeps `pages` alive
    skip = -raw.data_ptr() % _HUGE_PAGE
    return raw[skip : skip + num_bytes]
