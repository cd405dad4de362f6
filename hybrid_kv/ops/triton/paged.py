"""Decode attention over what each KV head has: pages of its own, split over programs and reduced,
or flat rows; and the merge of partial attentions in one pass, whatever their dtypes are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.devices import Uploads, on
from hybrid_kv.ops.triton._common import MIN_DOT, finite, padded, upcast
from hybrid_kv.types import HIDDEN, PagedKV, PartialAttention

PROGRAMS = 256
"""Programs wanted: about two for each multiprocessor of a large GPU."""

MAX_SPLITS = 64
"""Parts that one program of the reduction holds in registers, at head_dim 128."""

_HIDDEN = tl.constexpr(HIDDEN)


def attend_pages(
    q: Tensor,
    pages: PagedKV,
    slots: Tensor,
    query_positions: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    count: Tensor | None = None,
) -> PartialAttention:
    """See `reference.attend_pages`; out and lse are float32.

    Pages behind the counted ones are not read: the programs share the counted ones among them.
    """
    heads, rows, dim = q.shape
    _, num_slots, page_size, _ = pages.k.shape
    slots = slots if slots.stride(-1) == 1 else slots.contiguous()
    new, num_pages = slots.shape[1:]
    if slots.numel() == 0:
        empty = torch.full((heads, rows), -torch.inf, device=q.device)
        return PartialAttention(torch.zeros(q.shape, device=q.device), empty)
    block = block_tokens(dim, pages.k.dtype)
    tiles_per_split, splits = split_tiles(triton.cdiv(num_pages * page_size, block), heads * new)
    out = torch.empty(splits, heads, rows, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(splits, heads, rows, dtype=torch.float32, device=q.device)
    with on(q):
        _attend_kernel[(heads * new, splits)](
            q.contiguous(),
            pages.k,
            pages.v,
            pages.positions,
            slots,
            query_positions,
            slots if count is None else count,
            out,
            lse,
            scale,
            softcap or 0.0,
            slots.stride(0),
            slots.stride(1),
            num_slots,
            num_pages,
            new,
            heads,
            GROUP=rows // new,
            PAGE=page_size,
            DIM=dim,
            BLOCK_ROWS=padded(rows // new, MIN_DOT),
            BLOCK_TOKENS=block,
            BLOCK_DIM=padded(dim, MIN_DOT),
            TILES=tiles_per_split,
            HAS_SOFTCAP=softcap is not None,
            HAS_COUNT=count is not None,
            UPCAST=upcast(q, pages.k),
            num_warps=4,
            num_stages=2,
        )
        return reduced(out, lse)


def block_tokens(dim: int, dtype: torch.dtype) -> int:
    """Tokens a tile: keys and values of two stages fit into 99 KiB of shared memory."""
    return 64 if padded(dim, MIN_DOT) * dtype.itemsize <= 256 else 32


def split_tiles(tiles: int, rows: int) -> tuple[int, int]:
    """Tiles of one program and programs of one of `rows` lists, of so many tiles altogether."""
    wanted = min(MAX_SPLITS, triton.cdiv(PROGRAMS, rows))
    # A power of two: each number of tiles is another compilation.
    tiles_per_split = padded(triton.cdiv(tiles, wanted))
    return tiles_per_split, triton.cdiv(tiles, tiles_per_split)


def reduced(out: Tensor, lse: Tensor) -> PartialAttention:
    """Partial results [splits, Hkv, M, D], [splits, Hkv, M] merged over the first axis."""
    splits, heads, rows, dim = out.shape
    if splits == 1:
        return PartialAttention(out[0], lse[0])
    merged, total = out.new_empty(heads, rows, dim), lse.new_empty(heads, rows)
    _reduce_kernel[(heads * rows,)](
        out,
        lse,
        merged,
        total,
        splits,
        heads * rows,
        DIM=dim,
        BLOCK_SPLITS=padded(splits),
        BLOCK_DIM=padded(dim),
    )
    return PartialAttention(merged, total)


@triton.jit
def capped(logits, softcap):
    """Logits up to softcap: tanh(x) = 1 - 2 / (exp(2 x) + 1), finite for every x."""
    return softcap * (1.0 - 2.0 / (tl.exp(2.0 * logits / softcap) + 1.0))


@triton.jit
def weighed(logits, values, top, total, mixed):
    """The state of an online softmax with one more tile: largest logit, sum, weighted values."""
    new_top = tl.maximum(top, tl.max(logits, 1))
    shrink = tl.exp(top - finite(new_top))
    weights = tl.exp(logits - finite(new_top)[:, None])
    total = total * shrink + tl.sum(weights, 1)
    found = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_top, total, mixed * shrink[:, None] + found


@triton.jit
def _attend_kernel(
    q,
    k,
    v,
    positions,
    slots,
    query_positions,
    count,
    out,
    lse,
    scale,
    softcap,
    stride_head,
    stride_token,
    num_slots,
    num_pages,
    new,
    heads,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head = (tl.program_id(0) // new).to(tl.int64)
    token, split = tl.program_id(0) % new, tl.program_id(1)
    members, channels = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    in_dim = channels < DIM
    rows = (head * GROUP + members) * new + token
    real = (members < GROUP)[:, None] & in_dim[None, :]
    queries = tl.load(q + rows[:, None] * DIM + channels[None, :], mask=real, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    newest = tl.load(query_positions + token)
    slots += head * stride_head + token * stride_token

    top = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    mixed = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    tiles = TILES
    if HAS_COUNT:
        num_pages = tl.load(count).to(tl.int32)
        tiles = tl.cdiv(tl.cdiv(num_pages * PAGE, BLOCK_TOKENS), tl.num_programs(1))
    for tile in range(tiles):
        entries = (split * tiles + tile) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        listed = entries < num_pages * PAGE
        slot = tl.load(slots + entries // PAGE, mask=listed, other=0)
        place = slot * PAGE + entries % PAGE
        seen = tl.load(positions + place, mask=listed, other=_HIDDEN) <= newest
        at = (head * num_slots * PAGE + place)[:, None] * DIM + channels[None, :]
        wanted = seen[:, None] & in_dim[None, :]
        keys = tl.load(k + at, mask=wanted, other=0.0)
        values = tl.load(v + at, mask=wanted, other=0.0)
        if UPCAST:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        # "ieee": float32 operands are not rounded to the 10 bits of tf32.
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            logits = capped(logits, softcap)
        logits = tl.where(seen[None, :], logits, -float("inf"))
        top, total, mixed = weighed(logits, values, top, total, mixed)

    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    rows += split * heads * GROUP * new
    tl.store(out + rows[:, None] * DIM + channels[None, :], mixed, mask=real)
    tl.store(lse + rows, finite(top) + tl.log(total), mask=members < GROUP)


@triton.jit
def _reduce_kernel(
    outs,
    lses,
    out,
    lse,
    splits,
    num_rows,
    DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    parts, channels = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_DIM)
    in_dim = channels < DIM
    rows = parts.to(tl.int64) * num_rows + row
    part_lse = tl.load(lses + rows, mask=parts < splits, other=-float("inf"))
    top = finite(tl.max(part_lse, 0))
    weights = tl.exp(part_lse - top)
    wanted = (parts < splits)[:, None] & in_dim[None, :]
    some = tl.load(outs + rows[:, None] * DIM + channels[None, :], mask=wanted, other=0.0)
    total = tl.sum(weights, 0)
    mixed = tl.sum(weights[:, None] * some, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * DIM + channels, mixed, mask=in_dim)
    tl.store(lse + row, top + tl.log(total))


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


# Flat rows: each KV head reads as many as it has --------------------------------------------------


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
    block = block_tokens(dim, k.dtype)
    tiles = max(1, triton.cdiv(max(lengths), block))
    tiles_per_split, splits = split_tiles(tiles, heads * slices)
    out = torch.empty(splits, heads, rows, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(splits, heads, rows, dtype=torch.float32, device=q.device)
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (k, v))
    with on(q):
        _ragged_kernel[(heads * slices, splits)](
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
        return reduced(out, lse)


@triton.jit
def _ragged_kernel(
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
