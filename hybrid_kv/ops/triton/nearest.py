"""Exact nearest keys without a matrix of all scores.

The best score of each block of 64 keys is all that the first pass stores. The `count` blocks with
the highest ones hold the `count` best keys (a key outside of them is beaten by the best keys of
`count` blocks), so a second pass over those blocks alone finds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.devices import on
from hybrid_kv.ops.triton._common import MIN_DOT, padded, upcast

BLOCK_KEYS = 64
_BLOCKS_PER_PROGRAM = 8
_CANDIDATE_BYTES = 256 * 2**20


def nearest_keys(queries: Tensor, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See `reference.nearest_keys`."""
    heads, num_queries, _ = queries.shape
    num_keys = keys.shape[1]
    if heads * num_queries * count == 0:
        none = torch.empty(heads, num_queries, count, device=queries.device)
        return none, none.long()
    listed = min(count, triton.cdiv(num_keys, BLOCK_KEYS))
    # Candidates: a float32 score each, and what topk takes of its own.
    step = max(1, _CANDIDATE_BYTES // (16 * heads * listed * BLOCK_KEYS))
    found = [
        _nearest(some.contiguous(), keys, count, listed) for some in queries.split(step, dim=1)
    ]
    scores, ids = (torch.cat(tensors, 1) for tensors in zip(*found, strict=True))
    return scores, ids


def _nearest(queries: Tensor, keys: Tensor, count: int, listed: int) -> tuple[Tensor, Tensor]:
    blocks = block_maxima(queries, keys).topk(listed, -1, sorted=False).indices
    scores, best = _rescore(queries, keys, blocks).topk(count, -1)
    first = blocks.gather(-1, best // BLOCK_KEYS) * BLOCK_KEYS
    return scores, first + best % BLOCK_KEYS


def block_maxima(queries: Tensor, keys: Tensor) -> Tensor:
    """The highest dot product with each block of 64 keys: [H, Q, blocks] float32."""
    heads, num_queries, dim = queries.shape
    num_keys = keys.shape[1]
    num_blocks = triton.cdiv(num_keys, BLOCK_KEYS)
    maxima = torch.empty(heads, num_queries, num_blocks, device=queries.device)
    rows, stages = _tile(dim, keys.dtype)
    grid = (
        triton.cdiv(num_queries, rows),
        triton.cdiv(num_blocks, _BLOCKS_PER_PROGRAM),
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
            BLOCKS=_BLOCKS_PER_PROGRAM,
            UPCAST=upcast(queries, keys),
            num_warps=4,
            num_stages=stages,
        )
    return maxima


def _tile(dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Queries of a tile and pipeline stages that fit into 99 KiB of shared memory."""
    row_bytes = padded(dim, MIN_DOT) * dtype.itemsize
    if row_bytes <= 256:
        return 128, 3
    return (64, 2) if row_bytes <= 512 else (32, 1)


def _rescore(queries: Tensor, keys: Tensor, blocks: Tensor) -> Tensor:
    """Scores of the keys in blocks [H, Q, C]: [H, Q, C * 64] float32, -inf beyond the last key."""
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
    BLOCKS: tl.constexpr,
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
    for step in range(BLOCKS):
        block = tl.program_id(1) * BLOCKS + step
        ids = block * BLOCK + tl.arange(0, BLOCK)
        there = ids < num_keys
        # Keys as columns: [D, 64]
        at = head * stride_head + ids.to(tl.int64)[None, :] * stride_key + channels[:, None]
        some = tl.load(keys + at, mask=in_dim[:, None] & there[None, :], other=0.0)
        if UPCAST:
            some = some.to(tl.float32)
        scores = tl.dot(query, some, input_precision="ieee")
        best = tl.max(tl.where(there[None, :], scores, -float("inf")), 1)
        limit = tl.where(block < num_blocks, num_queries, 0)
        tl.store(maxima + all_rows * num_blocks + block, best, mask=rows < limit)


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
    LISTED: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    row = head * tl.num_programs(0) + tl.program_id(0)
    channels = tl.arange(0, BLOCK_DIM)
    in_dim = channels < DIM
    query = tl.load(queries + row * DIM + channels, mask=in_dim, other=0.0).to(tl.float32)
    for place in range(LISTED):
        ids = tl.load(blocks + row * LISTED + place) * BLOCK + tl.arange(0, BLOCK)
        there = ids < num_keys
        at = head * stride_head + ids[:, None] * stride_key + channels[None, :]
        some = tl.load(keys + at, mask=there[:, None] & in_dim[None, :], other=0.0)
        found = tl.sum(some.to(tl.float32) * query[None, :], 1)
        found = tl.where(there, found, -float("inf"))
        tl.store(scores + (row * LISTED + place) * BLOCK + tl.arange(0, BLOCK), found)
