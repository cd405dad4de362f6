"""Numbers in 2 or 4 bits: between the minimum and the maximum of their group, packed in bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def encode(x: Tensor, bits: int, group_size: int, *, axis: int) -> tuple[Tensor, Tensor]:
    """Codes of x [..., N, D]; code c stands for zero + c * scale of its group.

    Args:
        axis: -2 for groups of consecutive rows, each column by itself; -1 for groups of consecutive
            columns, each row by itself. The last group may be smaller.

    Returns:
        codes [..., N, ceil(D * bits / 8)] uint8; scale and zero of every group, in the dtype of x,
        by which the codes were chosen: [..., ceil(N / group_size), 2, D] or [..., N, 2,
        ceil(D / group_size)].
    """
    rows = x if axis == -2 else x.transpose(-1, -2)
    count, most = rows.shape[-2], 2**bits - 1
    groups = -(-count // group_size)
    # Filled up with the last row, which changes neither minimum nor maximum.
    ids = torch.arange(groups * group_size, device=x.device).clamp_max(count - 1)
    members = rows.index_select(-2, ids).unflatten(-2, (groups, group_size)).float()
    zero = members.amin(-2).to(x.dtype)
    scale = ((members.amax(-2) - zero.float()) / most).to(x.dtype)
    steps = (members - zero.float()[..., None, :]) / scale.float().clamp_min(1e-30)[..., None, :]
    codes = steps.round_().clamp_(0, most).to(torch.uint8).flatten(-3, -2)[..., :count, :]
    if axis == -2:
        return pack(codes, bits), torch.stack([scale, zero], -2)
    by_row = torch.stack([scale, zero], -2).movedim(-1, -3)
    return pack(codes.transpose(-1, -2), bits), by_row.transpose(-1, -2)


def decode(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Numbers [..., D] of codes [..., ceil(D * bits / 8)], by scale and zero [..., 2, D]."""
    scale, zero = scales.float().unbind(-2)
    steps = unpack(codes, bits, scale.shape[-1]).float()
    return torch.addcmul(zero, steps, scale).to(scales.dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """[..., ceil(D * bits / 8)] uint8 of codes [..., D], the first in a byte's lowest bits."""
    each = 8 // bits
    filled = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    packed: Tensor = filled[..., 0].clone()
    for place in range(1, each):
        packed |= filled[..., place] << (place * bits)
    return packed


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The codes [..., count] uint8 that `pack` was given."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = torch.bitwise_right_shift(packed[..., None], shifts)
    return torch.bitwise_and(codes, 2**bits - 1).flatten(-2)[..., :count]
