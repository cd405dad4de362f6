"""One page-locked area through which large tensors pass on their way to plain memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_kv.ops.pinned import pinned_array

_ALIGNMENT = 256


class StagingArea:
    """Hands out parts of one array, from its beginning again when all parts have come back.

    It grows to what is needed at once and is given to each layer in turn. Torch's pool would round
    every part up to a power of two, make new ones while old ones are in use, and keep them all.
    """

    def __init__(self) -> None:
        self._area = torch.empty(0, dtype=torch.uint8)
        self._used = self._out = self._wanted = 0

    @property
    def num_bytes(self) -> int:
        """Page-locked now."""
        return self._area.nbytes

    def take(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of undefined content, until `give_back`.

        Raises:
            CapacityError: host memory does not suffice.
        """
        count = math.prod(size) * dtype.itemsize
        room = -(-count // _ALIGNMENT) * _ALIGNMENT
        if not self._out:
            self._wanted = max(self._wanted, self._used)
            self._used = 0
        if self._used + room > self._area.nbytes:
            self._wanted = max(self._wanted, self._used + room)
            self._area = pinned_array([self._wanted], torch.uint8)  # parts keep the old one alive
            self._used = 0
        part = self._area[self._used : self._used + count]
        self._used += room
        self._out += 1
        return part.view(dtype).view(list(size))

    def give_back(self) -> None:
        """One part is not needed any more."""
        self._out -= 1
