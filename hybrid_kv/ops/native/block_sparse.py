"""The engine's block-sparse prefill; see `ops.block_sparse` for the definitions."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hybrid_kv.ops.native.library import Pool
from hybrid_kv.ops.native.prompt import attend_prompt
from hybrid_kv.types import KEY_BLOCK, BlockMask, PartialAttention


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    *,
    scale: float,
    softcap: float | None = None,
    pool: Pool | None = None,
) -> PartialAttention:
    """See `block_sparse.attend_blocks`. Out is in the dtype of q."""
    return attend_prompt(q, k, v, scale=scale, softcap=softcap, mask=mask, pool=pool)


def attend_at(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    pool: Pool | None = None,
) -> PartialAttention:
    """See `block_sparse.attend_at`. Out is in the dtype of q."""
    return attend_prompt(q, k, v, scale=scale, softcap=softcap, positions=positions, pool=pool)


def block_masses(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """See `block_sparse.block_masses`."""
    masses = torch.empty(*q.shape[:3], k.shape[2] // KEY_BLOCK)
    attend = partial(attend_prompt, scale=scale, softcap=softcap, positions=positions, pool=pool)
    attend(q, k, k, block_masses=masses)
    return masses
