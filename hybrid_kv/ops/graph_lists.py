"""Layout of a graph's neighbours in memory and in files: two bytes and a few bits each.

A list has a slot for each of `degree` neighbours, rounded up to 16. First come the low 16 bits of
all slots, little-endian, then one plane for every higher bit that node numbers need: bit i of plane
p, counted from the lowest bit of its first byte, is bit 16 + p of slot i. Slots without a neighbour
name the node itself, which a search has always visited by then. A list is filled with zeros to
whole cache lines where that adds at most an eighth, else to a multiple of 8 bytes.

This is the oracle of the engine's `native/src/graph_lists.h`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_SLOTS = 16
_LOW_BITS = 16


def num_slots(degree: int) -> int:
    """Places for neighbours in a packed list."""
    return -(-degree // _SLOTS) * _SLOTS


def num_planes(num_nodes: int) -> int:
    """Bits of a node's number beyond the first 16."""
    return max(0, (num_nodes - 1).bit_length() - _LOW_BITS)


def list_bytes(degree: int, num_nodes: int) -> int:
    """Bytes of a packed list."""
    used = num_slots(degree) * (16 + num_planes(num_nodes)) // 8
    lines, words = -(-used // 64) * 64, -(-used // 8) * 8
    return lines if 8 * lines <= 9 * used else words


def pack_lists(neighbours: Tensor) -> Tensor:
    """[num_nodes, list_bytes] uint8 of neighbours [num_nodes, degree] int32, -1 for none."""
    nodes, degree = neighbours.shape
    slots = np.tile(np.arange(nodes, dtype=np.int32)[:, None], num_slots(degree))
    given = neighbours.numpy()
    slots[:, :degree] = np.where(given < 0, slots[:, :degree], given)
    packed = np.zeros((nodes, list_bytes(degree, nodes)), np.uint8)
    at = 2 * slots.shape[1]
    packed[:, :at] = slots.astype("<u2").view(np.uint8)
    for plane in range(num_planes(nodes)):
        bits = np.packbits(slots >> (_LOW_BITS + plane) & 1, axis=1, bitorder="little")
        packed[:, at : at + bits.shape[1]] = bits
        at += bits.shape[1]
    return torch.from_numpy(packed)


def unpack_lists(lists: Tensor, degree: int) -> Tensor:
    """[num_nodes, degree] int32 of what `pack_lists` gives; -1 for none, wherever it stood."""
    nodes, at = len(lists), 2 * num_slots(degree)
    packed = lists.numpy()
    found = np.ascontiguousarray(packed[:, :at]).view("<u2").astype(np.int32)
    for plane in range(num_planes(nodes)):
        bits = packed[:, at : at + found.shape[1] // 8]
        found |= np.unpackbits(bits, axis=1, bitorder="little").astype(np.int32) << (
            _LOW_BITS + plane
        )
        at += found.shape[1] // 8
    found = found[:, :degree]
    return torch.from_numpy(np.where(found == np.arange(nodes)[:, None], np.int32(-1), found))
