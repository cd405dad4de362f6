"""Torch's fused CUDA attention, which returns the log-sum-exp that merging needs.

Half precisions go to FlashAttention, float32 to the memory-efficient kernel; both read K and V once
and accumulate in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.types import PartialAttention

_flash = torch.ops.aten._scaled_dot_product_flash_attention
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention

_LARGEST_HEAD_DIM = 256
_ALIGNED_BYTES = 16
"""Of a row, without which neither kernel reads it."""


def expresses(q: Tensor, bias: Tensor | None) -> bool:
    """Whether there is a kernel for such queries; a bias has other rules in every version."""
    dim = q.shape[-1]
    aligned = dim * q.element_size() % _ALIGNED_BYTES == 0
    return bias is None and aligned and dim <= _LARGEST_HEAD_DIM


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, bias: None = None, softcap: None = None
) -> PartialAttention:
    """As `reference.attend` without bias and softcap; out in the dtype of q."""
    return _fused(q, k, v, scale=scale, causal=False)


def attend_causal(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: None = None, window: None = None
) -> PartialAttention:
    """As `reference.attend_causal` for T == N (the kernels align at the upper left)."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) if group > 1 else t for t in (k, v))
    return _fused(q, k, v, scale=scale, causal=True)


def _fused(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> PartialAttention:
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    if q.dtype is torch.float32:
        out, lse = _efficient(q, k, v, None, True, is_causal=causal, scale=scale)[:2]
    else:
        out, lse = _flash(q, k, v, is_causal=causal, scale=scale)[:2]
    return PartialAttention(out, lse[:, :, : q.shape[2]])  # some versions pad the queries
