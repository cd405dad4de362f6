"""Page-locked host memory: who locked it, and what a device has yet to read or write there."""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(eq=False)
class Locked:
    """A range of host memory that a device reaches.

    of_torch: torch's pool gives it out again only when copies are over, but knows of no kernel.
    users: points (a queue and a number of its launches) up to which a device uses it.
    """

    address: int
    num_bytes: int
    of_torch: bool
    users: list[Any] = field(default_factory=list)
    is_locked: bool = True


class PinnedMemory:
    """All page-locked ranges."""

    def __init__(self) -> None:
        self._ranges: dict[int, Locked] = {}
        self._starts: list[int] = []  # in order

    def lock(self, address: int, num_bytes: int, *, of_torch: bool) -> None:
        if address not in self._ranges:
            insort(self._starts, address)
        self._ranges[address] = Locked(address, num_bytes, of_torch)

    def unlock(self, address: int) -> Locked | None:
        found = self._ranges.pop(address, None)
        if found is not None:
            self._starts.remove(address)
            found.is_locked = False
        return found

    def of(self, tensor: Tensor) -> Locked | None:
        """The range in which a tensor begins; None where it is plain memory."""
        start = tensor.data_ptr()
        place = bisect_right(self._starts, start) - 1
        if place < 0:
            return None
        one = self._ranges[self._starts[place]]
        return one if start < one.address + one.num_bytes else None


class Borrowed:
    """A host tensor that a launch will use; of page-locked memory it keeps nothing alive.

    A kernel's may go on behind its range, in others that are locked as long: it reads and writes
    what is locked, by what the host has told it. A copy's may not.

    Raises:
        RuntimeError: a copy of what lies in several ranges, which CUDA refuses.
    """

    def __init__(self, tensor: Tensor, within: Locked | None, *, is_copy: bool = False) -> None:
        self._kept, self._within = (tensor, None) if within is None else (None, within)
        self._address = tensor.data_ptr()
        self._size, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        places = sum((n - 1) * step for n, step in zip(self._size, self._stride, strict=True)) + 1
        self._num_bytes = places * tensor.itemsize if tensor.numel() else 0
        if within is not None and is_copy:
            end = within.address + within.num_bytes
            if self._address + self._num_bytes > end:
                raise RuntimeError("CUDA error: invalid argument")

    def reach(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: its memory was unlocked meanwhile.
        """
        if (within := self._within) is None:
            assert self._kept is not None
            return self._kept
        if not within.is_locked:
            raise RuntimeError("an illegal memory access was encountered: host memory was unlocked")
        raw = (ctypes.c_uint8 * self._num_bytes).from_address(self._address)
        flat = torch.from_numpy(np.ctypeslib.as_array(raw)).view(self._dtype)
        return flat.as_strided(self._size, self._stride)
