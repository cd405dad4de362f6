"""Chain of hashes over blocks of tokens, by which common beginnings are found.

The hash of a block is taken over its tokens and the hash of the block before, so that equal hashes
mean equal beginnings, however long.
"""

from __future__ import annotations

from hashlib import sha256

import torch
from torch import Tensor

BLOCK_TOKENS = 256
"""Prompts that share less than this are computed anew: that is quicker than opening a file."""


def chain_of(ids: Tensor) -> list[bytes]:
    """The hash of each whole block of ids [tokens], oldest first."""
    raw, size = ids.to(torch.int64).cpu().contiguous().numpy(), BLOCK_TOKENS
    hashes, last = [], b""
    for start in range(0, len(raw) - size + 1, size):
        last = sha256(last + raw[start : start + size].tobytes()).digest()
        hashes.append(last)
    return hashes


def common_tokens(first: Tensor, second: Tensor) -> int:
    """Number of tokens that ids [tokens] of both have in common at the start."""
    shorter = min(len(first), len(second))
    differing = (first[:shorter] != second[:shorter]).nonzero()
    return int(differing[0]) if len(differing) else shorter
