"""Torch's fused CPU attention, which returns the log-sum-exp that merging needs.

Reads K and V once in their own dtype and accumulates in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.types import PartialAttention

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    softcap: None = None,
) -> PartialAttention:
    """As `reference.attend` without softcap; out in the dtype of q."""
    if bias is None:
        return PartialAttention(*_flash(q, k, v, scale=scale))
    bias = bias.to(q.dtype).expand(*q.shape[:-1], k.shape[2])
    out, lse = _flash(q, k, v, attn_mask=bias, scale=scale)
    # The kernel's answer for a row that sees nothing is not the identity of merging; ours must be.
    empty = ~(bias > -torch.inf).any(-1)
    return PartialAttention(
        out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
    )


def attend_causal(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: None = None, window: None = None
) -> PartialAttention:
    """As `reference.attend_causal` for T == N (the kernel aligns at the upper left)."""
    return PartialAttention(*_flash(q, k, v, is_causal=True, scale=scale))
