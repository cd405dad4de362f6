"""Block-sparse attention of prompts: the queries of a block read the key blocks on its list."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.devices import on
from hybrid_kv.ops.triton._common import MIN_DOT, finite, padded, upcast
from hybrid_kv.ops.triton.paged import capped, weighed
from hybrid_kv.types import KEY_BLOCK, BlockMask, PartialAttention


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    *,
    scale: float,
    softcap: float | None = None,
) -> PartialAttention:
    """See `reference.attend_blocks`; out is in the dtype of q, lse in float32.

    A program attends some rows of a query block for one KV head. Its rows are pairs of a token and
    a query head, all query heads of a token together: each key is loaded once for many of them.
    """
    batch, num_q_heads, new, dim = q.shape
    heads, stored, value_dim = k.shape[1], k.shape[2], v.shape[3]
    out = q.new_empty(batch, num_q_heads, new, value_dim)
    lse = q.new_empty(batch, num_q_heads, new, dtype=torch.float32)
    if lse.numel() == 0:
        return PartialAttention(out, lse)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    group, widest = num_q_heads // heads, padded(max(dim, value_dim), MIN_DOT)
    is_upcast = upcast(q, k, v)
    row_bytes = widest * (torch.float32 if is_upcast else k.dtype).itemsize
    rows, block_tokens = tile_sizes(row_bytes)
    rows = min(rows, padded(group * min(new, mask.tokens), MIN_DOT))
    slices = triton.cdiv(group * min(new, mask.tokens), rows)
    blocks = mask.listed.shape[2]
    with on(q):
        lists, counts = _lists(mask, stored - new)
        _attend_blocks_kernel[(slices * blocks, heads, batch)](
            q,
            k,
            v,
            lists,
            counts,
            out,
            lse,
            scale,
            softcap or 0.0,
            q.stride()[:3],
            k.stride()[:3],
            v.stride()[:3],
            new,
            stored - new,
            mask.tokens,
            blocks,
            lists.shape[-1],
            slices,
            PAST_BLOCK=KEY_BLOCK,
            GROUP=group,
            DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_ROWS=rows,
            BLOCK_TOKENS=block_tokens,
            BLOCK_DIM=padded(dim, MIN_DOT),
            BLOCK_VALUE_DIM=padded(value_dim, MIN_DOT),
            HAS_SOFTCAP=softcap is not None,
            UPCAST=is_upcast,
            num_warps=4,
            num_stages=2,
        )
    return PartialAttention(out, lse)


def tile_sizes(row_bytes: int) -> tuple[int, int]:
    """Rows of queries and keys a tile, for rows of so many bytes as they are multiplied.

    Keys and values of two stages fit into 99 KiB of shared memory with the queries.
    """
    if row_bytes <= 256:
        return 64, 64
    return (64, 32) if row_bytes <= 512 else (32, 16)


def _lists(mask: BlockMask, old: int) -> tuple[Tensor, Tensor]:
    """The key blocks that count, one after the other: [B, Hkv, query blocks, N // KEY_BLOCK] int32
    with undefined ends, and how many there are, [B, Hkv, query blocks] int32.
    """
    batch, heads, blocks, width = mask.listed.shape
    lists = torch.empty(mask.listed.shape, dtype=torch.int32, device=mask.listed.device)
    counts = lists.new_empty(batch, heads, blocks)
    _list_blocks_kernel[(blocks, heads, batch)](
        mask.listed.view(torch.uint8),
        lists,
        counts,
        mask.listed.stride(),
        old,
        mask.tokens,
        width,
        PAST_BLOCK=KEY_BLOCK,
        BLOCK=min(1024, padded(width)),
    )
    return lists, counts


@triton.jit
def _list_blocks_kernel(
    listed,
    lists,
    counts,
    strides,
    old,
    tokens,
    width,
    PAST_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    listed += row * strides[0] + head * strides[1] + block * strides[2]
    list_ = (row * tl.num_programs(1) + head) * tl.num_programs(0) + block
    lists += list_ * width
    past = (old + block * tokens) // PAST_BLOCK
    count = 0
    for first in range(0, past, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        read = tl.load(listed + ids.to(tl.int64) * strides[3], mask=ids < past, other=0) != 0
        ends = count + tl.cumsum(read.to(tl.int32), 0)
        tl.store(lists + ends - 1, ids, mask=read)
        count += tl.sum(read.to(tl.int32), 0)
    tl.store(counts + list_, count)


@triton.jit
def _attend_blocks_kernel(
    q,
    k,
    v,
    lists,
    counts,
    out,
    lse,
    scale,
    softcap,
    strides_q,
    strides_k,
    strides_v,
    new,
    old,
    tokens,
    blocks,
    width,
    slices,
    PAST_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    block, first_row = tl.program_id(0) // slices, tl.program_id(0) % slices * BLOCK_ROWS
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    members = first_row + tl.arange(0, BLOCK_ROWS)
    channels, value_channels = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE_DIM)
    in_dim, in_value_dim = channels < DIM, value_channels < VALUE_DIM
    first = block * tokens
    last = tl.minimum(first + tokens, new)
    token, q_head = first + members // GROUP, head * GROUP + members % GROUP
    real = token < last
    at = row * strides_q[0] + q_head.to(tl.int64) * strides_q[1] + token.to(tl.int64) * strides_q[2]
    wanted = real[:, None] & in_dim[None, :]
    queries = tl.load(q + at[:, None] + channels[None, :], mask=wanted, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)

    list_ = (row * tl.num_programs(1) + head) * blocks + block
    lists += list_ * width
    listed_tiles = tl.load(counts + list_) * (PAST_BLOCK // BLOCK_TOKENS)
    own = (old + first) // PAST_BLOCK * PAST_BLOCK
    # No row of this program sees an entry behind that of its last token.
    end = old + tl.minimum(first + (first_row + BLOCK_ROWS - 1) // GROUP + 1, last)
    tiles = listed_tiles + tl.cdiv(end - own, BLOCK_TOKENS)
    tiles = tl.where(first + first_row // GROUP < last, tiles, 0)
    inside = tl.arange(0, BLOCK_TOKENS)
    k += row * strides_k[0] + head.to(tl.int64) * strides_k[1]
    v += row * strides_v[0] + head.to(tl.int64) * strides_v[1]

    top = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    mixed = tl.zeros((BLOCK_ROWS, BLOCK_VALUE_DIM), tl.float32)
    for tile in range(tiles):
        key_block = tl.load(
            lists + tile * BLOCK_TOKENS // PAST_BLOCK, mask=tile < listed_tiles, other=0
        )
        start = tl.where(
            tile < listed_tiles,
            key_block * PAST_BLOCK + tile * BLOCK_TOKENS % PAST_BLOCK,
            own + (tile - listed_tiles) * BLOCK_TOKENS,
        )
        place = start + inside
        there, far = (place < end)[:, None], place.to(tl.int64)[:, None]
        keys = tl.load(
            k + far * strides_k[2] + channels[None, :], mask=there & in_dim[None, :], other=0.0
        )
        values = tl.load(
            v + far * strides_v[2] + value_channels[None, :],
            mask=there & in_value_dim[None, :],
            other=0.0,
        )
        if UPCAST:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        # "ieee": float32 operands are not rounded to the 10 bits of tf32.
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            logits = capped(logits, softcap)
        logits = tl.where(place[None, :] <= old + token[:, None], logits, -float("inf"))
        top, total, mixed = weighed(logits, values, top, total, mixed)

    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    at = (row * tl.num_programs(1) * GROUP + q_head) * new + token
    wanted = real[:, None] & in_value_dim[None, :]
    tl.store(out + at[:, None] * VALUE_DIM + value_channels[None, :], mixed, mask=wanted)
    tl.store(lse + at, finite(top) + tl.log(total), mask=real)
