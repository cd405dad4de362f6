"""A layer's keys on its device: codes of the older ones, and the newest as they are."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hybrid_kv.index._device_learn import SketchTransform
from hybrid_kv.ops import Ops
from hybrid_kv.ops.sketch_select import DeviceCodes, scratch_bytes
from hybrid_kv.ops.upload import bus_copies, staged

LATER_KEYS = 4096
"""The newest keys that came after the prompt stay on the device as they are; older ones get codes.
Codes that were learned from other keys lose a fifth of what is wanted of these (docs/lab.md)."""
_LEAST_ROOM, _ROOM_SHARE = 256, 16
_BLOCK_KEYS = 2**14
_STAGED_BYTES = 2**20
"""Up to here later keys of all heads go as one copy through staging memory."""


def with_room(num_keys: int) -> int:
    """Number of codes that are allocated for so many keys: those which follow move nothing."""
    return num_keys + max(_LEAST_ROOM, num_keys // _ROOM_SHARE)


def device_bytes(num_keys: int, num_heads: int, head_dim: int, itemsize: int, code: int) -> int:
    """Bytes of a device for a layer's codes of `code` bytes a key, its later keys and its maps."""
    maps = 4 * head_dim * (2 * head_dim + 2)
    later = LATER_KEYS * head_dim * itemsize
    return num_heads * (with_room(num_keys) * code + later + maps)


def search_bytes(num_keys: int, num_heads: int, group: int) -> int:
    """Bytes of a device that a search of a layer takes for one token, and gives back behind it."""
    return scratch_bytes(with_room(num_keys), LATER_KEYS, num_heads, group)


class DeviceKeys:
    """Copies of a layer's keys on its device: codes of the older ones, and the latest as they are.

    codes: what a search reads; another value after it has outgrown its room. count, coded: keys
    that are searched and keys that have a code, as the device was told.

    Args:
        ops: what makes codes.
        learned: how keys become codes.
        dtype: of the keys.
        num_codes: keys for which there is room.

    Raises:
        torch.OutOfMemoryError: the device has too little memory.
    """

    def __init__(
        self, ops: Ops, learned: SketchTransform, dtype: torch.dtype, num_codes: int
    ) -> None:
        self._ops = ops
        self.codes: DeviceCodes = learned.codes_for(with_room(num_codes), LATER_KEYS, dtype)
        self.count = self.coded = 0

    def fill(self, keys: Tensor, codes: Tensor | None) -> None:
        """Begins again with keys [Hkv, N, D] of the host.

        Args:
            codes: [Hkv, n, B] of the first n keys, if they are known.
        """
        count, coded = keys.shape[1], 0
        if codes is not None and codes.shape[1] <= count:
            coded = codes.shape[1]
            self.codes.codes[:, :coded] = codes
        self.tell(0, coded)
        if count - coded > LATER_KEYS:
            self._encode(keys, coded, count - LATER_KEYS)
        self._take_later(keys, self.coded)

    def append(self, keys: Tensor, known: int) -> None:
        """Takes the rows of keys [Hkv, N, D] from `known` on."""
        count = keys.shape[1]
        if count - self.coded > LATER_KEYS:  # seldom: half of the later ones at once
            stop = max(self.coded, count - LATER_KEYS // 2)
            self._encode(keys, self.coded, min(stop, count))
        self._take_later(keys, known)

    def _take_later(self, keys: Tensor, first: int) -> None:
        """Brings the keys from `first` on that have no code to the device."""
        first, room = max(first, self.coded), LATER_KEYS
        while first < keys.shape[1]:
            place = first % room
            stop = min(keys.shape[1], first + room - place)
            _copy(keys[:, first:stop], self.codes.recent[:, place : place + stop - first])
            first = stop
        self.tell(keys.shape[1], self.coded)

    def _encode(self, keys: Tensor, first: int, stop: int) -> None:
        """Makes codes of the keys first..stop, which were read back from the host."""
        if stop > self.codes.codes.shape[1]:
            codes = self.codes.codes
            grown = codes.new_zeros(codes.shape[0], with_room(stop), codes.shape[2])
            grown[:, :first] = codes[:, :first]
            self.codes = replace(self.codes, codes=grown)
        for begin in range(first, stop, _BLOCK_KEYS):
            some = keys[:, begin : min(stop, begin + _BLOCK_KEYS)]
            there = torch.empty(some.shape, dtype=some.dtype, device=self.codes.state.device)
            _copy(some, there)
            self._ops.encode_sketch(self.codes, there, begin)
        self.tell(self.count, stop)

    def tell(self, count: int, coded: int) -> None:
        """Tells the device how many keys are searched and have a code; it is not waited for."""
        if count != self.count:
            self.codes.state[0].fill_(count)
        if coded != self.coded:
            self.codes.state[1].fill_(coded)
        self.count, self.coded = count, coded


def _copy(rows: Tensor, there: Tensor) -> None:
    if rows.nbytes <= _STAGED_BYTES:
        there.copy_(staged(rows, there.device))
        return
    for target, source in bus_copies(there, rows):
        target.copy_(source, non_blocking=True)
