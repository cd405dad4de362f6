"""Attention over the best candidates; values may lie in page-locked memory of the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.devices import on
from hybrid_kv.ops.triton._common import MIN_DOT, finite, padded
from hybrid_kv.ops.triton.paged import capped, reduced, weighed
from hybrid_kv.types import Candidates, PartialAttention

_TILE = 32
_TILES = 4
"""Tiles of one program: values come over the bus, so many programs ask for them."""


def attend(
    found: Candidates,
    v: Tensor,
    limit: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    discount: Tensor | None = None,
) -> PartialAttention:
    """See `sketch_select.attend`. A row of values is read once for all queries that attend it."""
    ids, scores = found
    heads, rows, width = scores.shape
    new, dim = ids.shape[1], v.shape[-1]
    splits = triton.cdiv(width, _TILE * _TILES)
    out = torch.empty(splits, heads, rows, dim, dtype=torch.float32, device=scores.device)
    lse = torch.empty(splits, heads, rows, dtype=torch.float32, device=scores.device)
    v = v if v.stride(-1) == 1 else v.contiguous()
    with on(scores):
        _attend_kernel[(heads * new, splits)](
            ids.contiguous(),
            scores.contiguous(),
            limit,
            limit if discount is None else discount.contiguous(),
            v,
            out,
            lse,
            scale,
            softcap or 0.0,
            v.stride(0),
            v.stride(1),
            new,
            heads,
            width,
            GROUP=rows // new,
            DIM=dim,
            BLOCK_ROWS=padded(rows // new, MIN_DOT),
            BLOCK_DIM=padded(dim, MIN_DOT),
            TILE=_TILE,
            TILES=_TILES,
            HAS_SOFTCAP=softcap is not None,
            HAS_DISCOUNT=discount is not None,
            num_warps=4,
        )
        return reduced(out, lse)


@triton.jit
def _attend_kernel(
    ids,
    scores,
    limit,
    discount,
    v,
    out,
    lse,
    scale,
    softcap,
    stride_head,
    stride_row,
    new,
    heads,
    width,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DISCOUNT: tl.constexpr,
):
    list_, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, token = list_ // new, list_ % new
    member, channels = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    members, in_dim = member < GROUP, channels < DIM
    queries = (head * GROUP + member) * new + token
    least = tl.load(limit + queries, mask=members, other=float("inf"))
    top = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    mixed = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    plain = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    for tile in range(TILES):
        places = (split * TILES + tile) * TILE + tl.arange(0, TILE)
        listed = places < width
        rows = tl.load(ids + list_ * width + places, mask=listed, other=-1)
        some = tl.load(
            scores + queries[:, None] * width + places[None, :],
            mask=members[:, None] & listed[None, :],
            other=-float("inf"),
        )
        kept = (some >= least[:, None]) & (some > -float("inf")) & members[:, None]
        wanted = (tl.max(kept.to(tl.int32), 0) > 0) & (rows >= 0)
        logits = some * scale
        if HAS_SOFTCAP:
            logits = capped(tl.where(kept, logits, 0.0), softcap)
        logits = tl.where(kept, logits, -float("inf"))
        at = head * stride_head + rows.to(tl.int64)[:, None] * stride_row + channels[None, :]
        values = tl.load(v + at, mask=wanted[:, None] & in_dim[None, :], other=0.0)
        # Weights are not rounded to 16 bits: few rows are multiplied here, and each of them counts.
        values = values.to(tl.float32)
        top, total, mixed = weighed(logits, values, top, total, mixed)
        if HAS_DISCOUNT:
            plain += tl.dot(kept.to(tl.float32), values, input_precision="ieee")
    if HAS_DISCOUNT:  # at most the weight of the lowest logit: `top` is not below it
        gone = tl.load(discount + queries, mask=members, other=-float("inf"))
        gone = tl.where(total > 0, tl.exp(gone - finite(top)), 0.0)
        mixed -= gone[:, None] * plain
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    real = members[:, None] & in_dim[None, :]
    queries += split * heads * GROUP * new
    tl.store(out + queries[:, None] * DIM + channels[None, :], mixed, mask=real)
    tl.store(lse + queries, finite(top) + tl.log(total), mask=members)
