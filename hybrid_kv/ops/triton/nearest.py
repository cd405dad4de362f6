"""Exact nearest keys without a matrix of all scores.

The best score of each block of 16 keys is all that the first pass stores. The `count` blocks with
the highest ones hold the `count` best keys (a key outside of them is beaten by the best keys of
`count` blocks), so a second pass over those blocks alone finds them. What it reads grows with the
block, what the first pass stores shrinks: at 128K keys and 100 wanted, blocks of 64 would make both
passes move 2.5 times as much.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.devices import on
from hybrid_kv.ops.triton import BLOCK_KEYS, portion
from hybrid_kv.ops.triton._common import MIN_DOT, padded, upcast

_TILE_KEYS = 64
"""Keys that a program multiplies or reads at a time: some whole blocks."""
_TILES_PER_PROGRAM = 8


def nearest_keys(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    """See `reference.nearest_keys`."""
    heads, num_queries, _ = queries.shape
    found = torch.empty(heads, num_queries, count, dtype=torch.int32, device=queries.device)
    if found.numel() == 0:
        return found
    step = portion(heads, keys.shape[1], count)
    for start in range(0, num_queries, step):
        some = queries[:, start : start + step].contiguous()
        found[:, start : start + step] = _nearest(some, keys, count)
    return found


def _nearest(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    maxima = block_maxima(queries, keys)
    blocks = maxima.topk(min(count, maxima.shape[-1]), -1, sorted=False).indices.to(torch.int32)
    del maxima
    best = _rescore(queries, keys, blocks).topk(count, -1).indices
    return blocks.gather(-1, best // BLOCK_KEYS) * BLOCK_KEYS + best % BLOCK_KEYS


def block_maxima(queries: Tensor, keys: Tensor) -> Tensor:
    """The highest dot product with each block of keys: [H, Q, blocks] float32."""
    heads, num_queries, dim = queries.shape
    num_keys = keys.shape[1]
    num_blocks = triton.cdiv(num_keys, BLOCK_KEYS)
    maxima = torch.empty(heads, num_queries, num_blocks, device=queries.device)
    rows, stages = _tile(dim, keys.dtype)
    grid = (
        triton.cdiv(num_queries, rows),
        triton.cdiv(num_keys, _TILE_KEYS * _TILES_PER_PROGRAM),
        heads,
    )
    with on(queries):
        _maxima_kernel[grid](
            queries,
            keys,
            maxima,
            num_queries,
            num_keys,
            num_blocks,
            keys.stride(0),
            keys.stride(1),
            DIM=dim,
            BLOCK_DIM=padded(dim, MIN_DOT),
            BLOCK_QUERIES=rows,
            BLOCK=BLOCK_KEYS,
            TILE=_TILE_KEYS,
            TILES=_TILES_PER_PROGRAM,
            UPCAST=upcast(queries, keys),
            num_warps=4,
            num_stages=stages,
        )
    return maxima


def _tile(dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Queries of a tile and pipeline stages that fit into 99 KiB of shared memory."""
    row_bytes = padded(dim, MIN_DOT) * dtype.itemsize
    if dtype == torch.float32:
        # Both operands of such a product lie in registers: 64 queries of 128 dims spilled 6 KiB a
        # thread, 32 spill nothing.
        return (32, 2) if row_bytes <= 512 else (16, 1)
    if row_bytes <= 256:
        return 128, 3
    return (64, 2) if row_bytes <= 512 else (32, 1)


def _rescore(queries: Tensor, keys: Tensor, blocks: Tensor) -> Tensor:
    """Scores of the keys in blocks [H, Q, C]: [H, Q, C * 16] float32, -inf beyond the last key."""
    heads, num_queries, dim = queries.shape
    listed = blocks.shape[-1]
    scores = torch.empty(heads, num_queries, listed * BLOCK_KEYS, device=queries.device)
    with on(queries):
        _rescore_kernel[(num_queries, heads)](
            queries,
            keys,
            blocks,
            scores,
            keys.shape[1],
            keys.stride(0),
            keys.stride(1),
            DIM=dim,
            BLOCK_DIM=padded(dim),
            BLOCK=BLOCK_KEYS,
            TILE=_TILE_KEYS,
            LISTED=listed,
        )
    return scores


@triton.jit
def _maxima_kernel(
    queries,
    keys,
    maxima,
    num_queries,
    num_keys,
    num_blocks,
    stride_head,
    stride_key,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    channels = tl.arange(0, BLOCK_DIM)
    in_dim = channels < DIM
    all_rows = head * num_queries + rows
    wanted = (rows < num_queries)[:, None] & in_dim[None, :]
    query = tl.load(queries + all_rows[:, None] * DIM + channels[None, :], mask=wanted, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    for step in range(TILES):
        tile = tl.program_id(1) * TILES + step
        ids = tile * TILE + tl.arange(0, TILE)
        there = ids < num_keys
        # Keys as columns: [D, 64]
        at = head * stride_head + ids.to(tl.int64)[None, :] * stride_key + channels[:, None]
        some = tl.load(keys + at, mask=in_dim[:, None] & there[None, :], other=0.0)
        if UPCAST:
            some = some.to(tl.float32)
        scores = tl.dot(query, some, input_precision="ieee")
        scores = tl.where(there[None, :], scores, -float("inf"))
        best = tl.max(tl.reshape(scores, (BLOCK_QUERIES, TILE // BLOCK, BLOCK)), 2)
        blocks = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
        known = (rows < num_queries)[:, None] & (blocks < num_blocks)[None, :]
        tl.store(maxima + all_rows[:, None] * num_blocks + blocks[None, :], best, mask=known)


@triton.jit
def _rescore_kernel(
    queries,
    keys,
    blocks,
    scores,
    num_keys,
    stride_head,
    stride_key,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    LISTED: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    row = head * tl.num_programs(0) + tl.program_id(0)
    channels = tl.arange(0, BLOCK_DIM)
    in_dim = channels < DIM
    query = tl.load(queries + row * DIM + channels, mask=in_dim, other=0.0).to(tl.float32)
    for start in range(0, LISTED * BLOCK, TILE):
        places = start + tl.arange(0, TILE)
        listed = places < LISTED * BLOCK
        block = tl.load(blocks + row * LISTED + places // BLOCK, mask=listed, other=0)
        ids = block * BLOCK + places % BLOCK
        there = listed & (ids < num_keys)
        at = head * stride_head + ids.to(tl.int64)[:, None] * stride_key + channels[None, :]
        some = tl.load(keys + at, mask=there[:, None] & in_dim[None, :], other=0.0)
        found = tl.sum(some.to(tl.float32) * query[None, :], 1)
        found = tl.where(there, found, -float("inf"))
        tl.store(scores + row * (LISTED * BLOCK) + places, found, mask=listed)
