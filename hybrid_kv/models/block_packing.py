"""Packing of plain weights into blocks of 32 values, in the layouts of GGUF.

Each value is rounded to the nearest that its block can hold: in Q8_0 a 16-bit scale and 32 whole
numbers of 8 bits, in Q4_1 a 16-bit step, the least value and 32 whole numbers of 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from hybrid_kv.models import gguf_file
from hybrid_kv.ops.native.packed import PACKED_KINDS

_VALUES = 32
_PIECE = 2**20
"""Values that are packed at a time, so that what is between lies in caches."""


def packed(weight: Tensor, kind: str) -> Tensor:
    """Blocks of a matrix, uint8 [N, bytes of a row].

    Args:
        weight: [N, K] of any floating dtype in host memory, K a multiple of 32.
        kind: a key of `PACKERS`.
    """
    rows, columns = weight.shape
    blocks = torch.empty(rows, PACKED_KINDS[kind].row_bytes(columns), dtype=torch.uint8)
    size = max(1, _PIECE // columns)
    for start in range(0, rows, size):
        piece = weight[start : start + size].float()
        made = PACKERS[kind](piece.reshape(-1, _VALUES))
        blocks[start : start + size] = made.view(len(piece), -1)
    return blocks


def unpacked(rows: Tensor, kind: str) -> Tensor:
    """Values [..., K] in float32 of packed rows [..., bytes of a row].

    Raises:
        ModelNotFoundError: nothing here unpacks this kind.
    """
    if kind != "Q8_0":
        return gguf_file.unpacked(rows, kind)
    blocks = rows.reshape(-1, PACKED_KINDS[kind].bytes)
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    return (blocks[:, 2:].view(torch.int8) * scale).view(*rows.shape[:-1], -1)


def _q8_0(values: Tensor) -> Tensor:
    scale = (values.abs().amax(1, keepdim=True) / 127).half()
    return torch.cat([_bytes(scale), _rounded(values, scale, -127, 127).view(torch.uint8)], dim=1)


def _q4_1(values: Tensor) -> Tensor:
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    step, low = ((high - low) / 15).half(), low.half()
    numbers = _rounded(values - low.float(), step, 0, 15).view(torch.uint8)
    half = _VALUES // 2
    return torch.cat([_bytes(step), _bytes(low), numbers[:, :half] | numbers[:, half:] << 4], dim=1)


def _rounded(values: Tensor, step: Tensor, least: int, most: int) -> Tensor:
    """The whole number of steps nearest to each value, int8; 0 where a step is too small for 16
    bits.
    """
    wide = step.float()
    inverse = torch.where(wide > 0, 1 / wide, 0.0)
    return values.mul(inverse).round_().clamp_(least, most).to(torch.int8)


def _bytes(halves: Tensor) -> Tensor:
    return halves.view(torch.uint8)


PACKERS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"Q4_1": _q4_1, "Q8_0": _q8_0})
"""By kind the function that packs values [n, 32] in float32: blocks [n, bytes of a block]."""
