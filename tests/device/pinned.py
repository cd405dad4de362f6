"""Page-locked host memory: who locked it, and what a device has yet to read or write there."""

from __future__ import annotations

import ctypes
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

    def lock(self, address: int, num_bytes: int, *, of_torch: bool) -> None:
        self._ranges[address] = Locked(address, num_bytes, of_torch)

    def unlock(self, address: int) -> Locked | None:
        found = self._ranges.pop(address, None)
        if found is not None:
            found.is_locked = False
        return found

    def of(self, tensor: Tensor) -> Locked | None:
        """The range in which a tensor lies; None where it is plain memory."""
        start = tensor.data_ptr()
        for one in list(self._ranges.values()):
            if one.address <= start < one.address + one.num_bytes:
                return one
        return None


class Borrowed:
    """A host tensor that a launch will use; of page-locked memory it keeps nothing alive."""

    def __init__(self, tensor: Tensor, within: Locked | None) -> None:
        self._kept, self._within = (tensor, None) if within is None else (None, within)
        self._offset = 0 if within is None else tensor.data_ptr() - within.address
        self._size, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype

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
        room = (within.num_bytes - self._offset) // self._dtype.itemsize * self._dtype.itemsize
        raw = (ctypes.c_uint8 * room).from_address(within.address + self._offset)
        flat = torch.from_numpy(np.ctypeslib.as_array(raw)).view(self._dtype)
        return flat.as_strided(self._size, self._stride)
