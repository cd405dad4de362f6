"""Decode attention over flat rows: each KV head reads as many as it has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.devices import Uploads, on
from hybrid_kv.ops.triton import paged
from hybrid_kv.ops.triton._common import MIN_DOT, finite, padded, upcast
from hybrid_kv.ops.triton.paged import capped, weighed
from hybrid_kv.types import PartialAttention


def attend_ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    uploads: Uploads,
) -> PartialAttention:
    """See `reference.attend_ragged`; out and lse are float32."""
    extents = uploads(np.asarray([*starts, *lengths], np.int64), q.device)
    heads, rows, dim = q.shape
    block_rows = min(64, padded(rows, MIN_DOT))
    slices = triton.cdiv(rows, block_rows)
    block = paged.block_tokens(dim, k.dtype)
    tiles = max(1, triton.cdiv(max(lengths), block))
    tiles_per_split, splits = paged.split_tiles(tiles, heads * slices)
    out = torch.empty(splits, heads, rows, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(splits, heads, rows, dtype=torch.float32, device=q.device)
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (k, v))
    with on(q):
        _attend_kernel[(heads * slices, splits)](
            q.contiguous(),
            k,
            v,
            extents,
            extents if bias is None else bias.contiguous(),
            out,
            lse,
            scale,
            softcap or 0.0,
            k.stride(0),
            v.stride(0),
            heads,
            slices,
            rows,
            DIM=dim,
            BLOCK_ROWS=block_rows,
            BLOCK_TOKENS=block,
            BLOCK_DIM=padded(dim, MIN_DOT),
            TILES=tiles_per_split,
            HAS_BIAS=bias is not None,
            HAS_SOFTCAP=softcap is not None,
            UPCAST=upcast(q, k),
            num_warps=4,
            num_stages=2,
        )
        return paged.reduced(out, lse)


@triton.jit
def _attend_kernel(
    q,
    k,
    v,
    extents,
    bias,
    out,
    lse,
    scale,
    softcap,
    stride_k,
    stride_v,
    heads,
    slices,
    num_rows,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head = (tl.program_id(0) // slices).to(tl.int64)
    split = tl.program_id(1)
    members = (tl.program_id(0) % slices) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    channels = tl.arange(0, BLOCK_DIM)
    in_dim = channels < DIM
    rows = head * num_rows + members
    real = (members < num_rows)[:, None] & in_dim[None, :]
    queries = tl.load(q + rows[:, None] * DIM + channels[None, :], mask=real, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    start, length = tl.load(extents + head), tl.load(extents + heads + head)

    top = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    mixed = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    for tile in range(TILES):
        entries = (split * TILES + tile) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        there = entries < length
        place = start + entries
        wanted = there[:, None] & in_dim[None, :]
        keys = tl.load(k + place[:, None] * stride_k + channels[None, :], mask=wanted, other=0.0)
        values = tl.load(v + place[:, None] * stride_v + channels[None, :], mask=wanted, other=0.0)
        if UPCAST:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        # "ieee": float32 operands are not rounded to the 10 bits of tf32.
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            logits = capped(logits, softcap)
        if HAS_BIAS:
            logits += tl.load(bias + place, mask=there, other=0.0)[None, :]
        logits = tl.where(there[None, :], logits, -float("inf"))
        top, total, mixed = weighed(logits, values, top, total, mixed)

    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    rows += split * heads * num_rows
    tl.store(out + rows[:, None] * DIM + channels[None, :], mixed, mask=real)
    tl.store(lse + rows, finite(top) + tl.log(total), mask=members < num_rows)
