"""Torch's fused attention, which returns the log-sum-exp that merging needs.

All kernels read K and V once in their own dtype and accumulate in float32. On the CPU there is one;
on CUDA half precisions go to FlashAttention and float32 to the memory-efficient kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.types import PartialAttention

_for_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash = torch.ops.aten._scaled_dot_product_flash_attention
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention

_LARGEST_HEAD_DIM = 256
_ALIGNED_BYTES = 16
"""Of a row, without which no kernel of CUDA reads it."""


def expresses_on_cuda(q: Tensor, bias: Tensor | None) -> bool:
    """Whether CUDA has a kernel for such queries; a bias has other rules in every version."""
    dim = q.shape[-1]
    aligned = dim * q.element_size() % _ALIGNED_BYTES == 0
    return bias is None and aligned and dim <= _LARGEST_HEAD_DIM


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    softcap: None = None,
) -> PartialAttention:
    """As `reference.attend` on the CPU, without softcap; out in the dtype of q."""
    if bias is None:
        return PartialAttention(*_for_cpu(q, k, v, scale=scale))
    bias = bias.to(q.dtype).expand(*q.shape[:-1], k.shape[2])
    out, lse = _for_cpu(q, k, v, attn_mask=bias, scale=scale)
    # The kernel's answer for a row that sees nothing is not the identity of merging; ours must be.
    empty = ~(bias > -torch.inf).any(-1)
    return PartialAttention(
        out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
    )


def attend_causal(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: None = None, window: None = None
) -> PartialAttention:
    """As `reference.attend_causal` on the CPU for T == N (the kernel aligns at the upper left)."""
    return PartialAttention(*_for_cpu(q, k, v, is_causal=True, scale=scale))


def attend_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, bias: None = None, softcap: None = None
) -> PartialAttention:
    """As `reference.attend` without bias and softcap; out in the dtype of q."""
    return _on_cuda(q, k, v, scale=scale, causal=False)


def attend_causal_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: None = None, window: None = None
) -> PartialAttention:
    """As `reference.attend_causal` for T == N (the kernels align at the upper left)."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) if group > 1 else t for t in (k, v))
    return _on_cuda(q, k, v, scale=scale, causal=True)


def _on_cuda(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> PartialAttention:
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    if q.dtype is torch.float32:
        out, lse = _efficient(q, k, v, None, True, is_causal=causal, scale=scale)[:2]
    else:
        out, lse = _flash(q, k, v, is_causal=causal, scale=scale)[:2]
    return PartialAttention(out, lse[:, :, : q.shape[2]])  # some versions pad the queries
