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

_TILE_BYTES = 16 * 2**10


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    *,
    scale: float,
    softcap: float | None = None,
) -> PartialAttention:
    """See `reference.attend_blocks`; out is in the dtype of q.

    A program attends some rows of a query block for one KV head. A row is a token and a query head,
    and all query heads of a token follow one another: they read the same keys.
    """
    batch, num_q_heads, new, dim = q.shape
    heads, old, value_dim = k.shape[1], k.shape[2] - new, v.shape[3]
    out = q.new_empty(batch, num_q_heads, new, value_dim)
    lse = q.new_empty(batch, num_q_heads, new, dtype=torch.float32)
    if lse.numel() == 0:
        return PartialAttention(out, lse)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    group, blocks, needs_float32 = num_q_heads // heads, mask.listed.shape[2], upcast(q, k, v)
    rows = group * min(new, mask.tokens)
    most_rows, tokens = tile_sizes(max(dim, value_dim), torch.float32 if needs_float32 else q.dtype)
    block_rows = min(most_rows, padded(rows, MIN_DOT))
    slices = triton.cdiv(rows, block_rows)
    with on(q):
        lists, counts = _listed(mask, old)
        _attend_blocks_kernel[(blocks * slices, heads, batch)](
            *(q, k, v, lists, counts, out, lse, scale, softcap or 0.0),
            *(t.stride()[:3] for t in (q, k, v)),
            *(new, old, mask.tokens, slices, lists.shape[3]),
            GROUP=group,
            DIM=dim,
            VALUE_DIM=value_dim,
            KEY_BLOCK=KEY_BLOCK,
            BLOCK_ROWS=block_rows,
            BLOCK_TOKENS=tokens,
            BLOCK_DIM=padded(dim, MIN_DOT),
            BLOCK_VALUE_DIM=padded(value_dim, MIN_DOT),
            HAS_SOFTCAP=softcap is not None,
            UPCAST=needs_float32,
            num_warps=8,
            num_stages=2,
        )
    return PartialAttention(out, lse)


def tile_sizes(dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Most rows of queries a tile, and keys, for products in a dtype.

    Queries, and keys and values of two stages, fit into 99 KiB of shared memory. float32 has no
    tensor cores: of more rows its products leave the registers.
    """
    tokens = max(MIN_DOT, min(KEY_BLOCK, _TILE_BYTES // (padded(dim, MIN_DOT) * dtype.itemsize)))
    return (32 if dtype.itemsize > 2 else 2 * tokens), tokens


def _listed(mask: BlockMask, old: int) -> tuple[Tensor, Tensor]:
    """Numbers of the key blocks that are read, [B, Hkv, query blocks, N // KEY_BLOCK] int32 with
    anything behind them, and how many there are, [B, Hkv, query blocks] int32.
    """
    batch, heads, blocks, width = mask.listed.shape
    lists = torch.empty(mask.listed.shape, dtype=torch.int32, device=mask.listed.device)
    counts = lists.new_empty(batch, heads, blocks)
    _list_blocks_kernel[(blocks, heads, batch)](
        *(mask.listed.view(torch.uint8), lists, counts),
        *(mask.listed.stride(), old, mask.tokens, width),
        KEY_BLOCK=KEY_BLOCK,
        BLOCK=min(1024, padded(width)),
    )
    return lists, counts


@triton.jit
def _list_blocks_kernel(
    listed, lists, counts, strides, old, tokens, width, KEY_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    listed += row * strides[0] + head.to(tl.int64) * strides[1] + block.to(tl.int64) * strides[2]
    list_ = (row * tl.num_programs(1) + head) * tl.num_programs(0) + block
    past = (old + block * tokens) // KEY_BLOCK
    count = 0
    for first in range(0, past, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        read = tl.load(listed + ids.to(tl.int64) * strides[3], mask=ids < past, other=0) != 0
        ends = count + tl.cumsum(read.to(tl.int32), 0)
        tl.store(lists + list_ * width + ends - 1, ids, mask=read)
        count += tl.sum(read.to(tl.int32), 0)
    tl.store(counts + list_, count)


@triton.jit
def _loaded(rows, at, there, SIZE: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    """Rows of some size as a tile, zeros for those that are not there."""
    channels = tl.arange(0, BLOCK)
    wanted = there[:, None] & (channels < SIZE)[None, :]
    found = tl.load(rows + at[:, None] + channels[None, :], mask=wanted, other=0.0)
    if UPCAST:
        found = found.to(tl.float32)
    return found


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
    slices,
    width,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    block, first_row = tl.program_id(0) // slices, (tl.program_id(0) % slices) * BLOCK_ROWS
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first, members = block * tokens, first_row + tl.arange(0, BLOCK_ROWS)
    token, q_head = first + members // GROUP, head * GROUP + members % GROUP
    end = tl.minimum(first + tokens, new)
    real = token < end
    at = row * strides_q[0] + q_head * strides_q[1] + token.to(tl.int64) * strides_q[2]
    queries = _loaded(q, at, real, DIM, BLOCK_DIM, UPCAST)

    list_ = (row * tl.num_programs(1) + head) * (tl.num_programs(0) // slices) + block
    lists += list_ * width
    k += row * strides_k[0] + head * strides_k[1]
    v += row * strides_v[0] + head * strides_v[1]
    listed = tl.load(counts + list_) * (KEY_BLOCK // BLOCK_TOKENS)
    own = (old + first) // KEY_BLOCK * KEY_BLOCK
    # What lies behind the last token of these rows is hidden from all of them.
    end = old + tl.minimum(first + (first_row + BLOCK_ROWS - 1) // GROUP + 1, end)
    tiles = listed + tl.cdiv(end - own, BLOCK_TOKENS)
    # The last query block may be a short one, whose last programs have no rows.
    tiles = tl.where(old + first + first_row // GROUP < end, tiles, 0)

    top = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    mixed = tl.zeros((BLOCK_ROWS, BLOCK_VALUE_DIM), tl.float32)
    for tile in range(tiles):
        start = tile * BLOCK_TOKENS
        number = tl.load(lists + start // KEY_BLOCK, mask=tile < listed, other=0)
        past = number * KEY_BLOCK + start % KEY_BLOCK
        start = tl.where(tile < listed, past, own + start - listed * BLOCK_TOKENS)
        place = start + tl.arange(0, BLOCK_TOKENS)
        there, far = place < end, place.to(tl.int64)
        keys = _loaded(k, far * strides_k[2], there, DIM, BLOCK_DIM, UPCAST)
        values = _loaded(v, far * strides_v[2], there, VALUE_DIM, BLOCK_VALUE_DIM, UPCAST)
        # "ieee": float32 operands are not rounded to the 10 bits of tf32.
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            logits = capped(logits, softcap)
        logits = tl.where(place[None, :] <= old + token[:, None], logits, -float("inf"))
        top, total, mixed = weighed(logits, values, top, total, mixed)

    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    at = (row * tl.num_programs(1) * GROUP + q_head) * new + token
    channels = tl.arange(0, BLOCK_VALUE_DIM)
    wanted = real[:, None] & (channels < VALUE_DIM)[None, :]
    tl.store(out + at[:, None] * VALUE_DIM + channels[None, :], mixed, mask=wanted)
    tl.store(lse + at, finite(top) + tl.log(total), mask=real)
