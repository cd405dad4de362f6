"""Random packed weights of every kind, and what package gguf makes of them."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from hybrid_kv.ops.native.linear import PACKED_KINDS, PackedWeight

_SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Places of 16-bit floats in a block; others have one at its beginning, or a power of two."""


def random_weight(kind: str, rows: int, columns: int, gap: int = 0) -> PackedWeight:
    """Random codes; scales from .01 to .02, of both signs. gap: bytes between rows, all ones.

    The last row ends where the memory does, and the first begins at an odd address.
    """
    known = PACKED_KINDS[kind]
    row_bytes = known.row_bytes(columns)
    codes = np.random.default_rng(rows + columns)
    blocks = codes.integers(0, 256, (rows, row_bytes // known.bytes, known.bytes), dtype=np.uint8)
    for place in _SCALES.get(kind, (0,)):
        if kind == "MXFP4":  # a power of two, which both signs of its values have
            blocks[..., 0] = codes.integers(119, 121, blocks.shape[:2])
            continue
        scales = codes.uniform(0.01, 0.02, blocks.shape[:2]) * codes.choice(
            [-1, 1], blocks.shape[:2]
        )
        blocks[..., place : place + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    memory = torch.full((1 + rows * (row_bytes + gap) - gap,), 255, dtype=torch.uint8)
    lying = memory[1:].as_strided((rows, row_bytes), (row_bytes + gap, 1))
    lying.copy_(torch.from_numpy(blocks.reshape(rows, row_bytes)))
    return PackedWeight(kind, lying, columns)


def dequantised(weight: PackedWeight) -> Tensor:
    """[N, K] in float64."""
    kind = GGMLQuantizationType[weight.kind]
    return torch.from_numpy(quants.dequantize(weight.blocks.contiguous().numpy(), kind)).double()
