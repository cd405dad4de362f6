"""Merge of partial attentions: one pass over all parts, whatever their dtypes are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hybrid_kv.ops.devices import on
from hybrid_kv.ops.triton._common import finite, padded
from hybrid_kv.types import PartialAttention


def merge(
    parts: Sequence[PartialAttention],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> PartialAttention:
    """See `reference.merge`. A part may lie in pinned host memory; the result is on `device`.

    Args:
        device: that of the first part if None.
    """
    shape = parts[0].out.shape
    out = torch.empty(shape, dtype=dtype, device=device or parts[0].out.device)
    lse = torch.empty(shape[:-1], dtype=torch.float32, device=out.device)
    if lse.numel():
        with on(out):
            _merge_kernel[(lse.numel(),)](
                tuple(part.out.contiguous() for part in parts),
                tuple(part.lse.contiguous() for part in parts),
                out,
                lse,
                DIM=shape[-1],
                BLOCK_DIM=padded(shape[-1]),
                num_warps=1,
            )
    return PartialAttention(out, lse)


@triton.jit
def _merge_kernel(outs, lses, out, lse, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BLOCK_DIM)
    in_dim = channels < DIM
    top = tl.full((), -float("inf"), tl.float32)
    for part in tl.static_range(len(lses)):
        top = tl.maximum(top, tl.load(lses[part] + row).to(tl.float32))
    total = tl.zeros((), tl.float32)
    mixed = tl.zeros((BLOCK_DIM,), tl.float32)
    for part in tl.static_range(len(lses)):
        weight = tl.exp(tl.load(lses[part] + row).to(tl.float32) - finite(top))
        some = tl.load(outs[part] + row * DIM + channels, mask=in_dim, other=0.0)
        total += weight
        mixed += weight * some.to(tl.float32)
    # A row without any entry has total 0: its output is 0 and log gives the -inf that says so.
    mixed = mixed / tl.where(total > 0, total, 1.0)
    tl.store(out + row * DIM + channels, mixed.to(out.dtype.element_ty), mask=in_dim)
    tl.store(lse + row, finite(top) + tl.log(total))
