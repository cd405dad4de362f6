"""Codes of keys, and keys above a limit: by the scores of their codes, and by their own where they
have none yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.devices import on
from hybrid_kv.ops.sketch_select import SAMPLE_RUN, DeviceCodes
from hybrid_kv.ops.triton._common import MIN_DOT, padded, upcast
from hybrid_kv.ops.triton.sketch_lists import Lists

_TILE_KEYS = 128


def scan(
    by: DeviceCodes,
    q: Tensor,
    codes: Tensor,
    scales: Tensor,
    limit: Tensor,
    sample: Tensor,
    lists: Lists,
    *,
    new: int,
    is_sample: bool,
) -> None:
    """Writes the scores of a sample of the codes, or adds those above the limit to the lists.

    Args:
        codes, scales: the queries, see `sketch_find.quantise`.
        limit: [Hkv, M]. sample: [Hkv, M, samples].
        is_sample: which of the two; the other one's tensors are not touched.
    """
    heads, rows, _ = q.shape
    capacity = by.codes.shape[1]
    dims = {bits: num_dims for num_dims, bits in by.plan.groups}
    total = by.num_samples if is_sample else capacity
    sizes = {bits: dims.get(bits, 0) * bits // 8 for bits in (8, 4, 2)}
    _scan_kernel[(triton.cdiv(total, _TILE_KEYS), heads * new)](
        by.codes,
        codes,
        scales,
        limit,
        by.state,
        sample,
        *lists,
        lists.capacity,
        new,
        capacity,
        by.num_samples,
        by.sample_stride,
        GROUP=rows // new,
        BLOCK_ROWS=padded(rows // new, MIN_DOT),
        CODE_DIMS=by.plan.num_dims,
        CODE_BYTES=by.plan.code_bytes,
        BYTES_8=sizes[8],
        BYTES_4=sizes[4],
        BYTES_2=sizes[2],
        BLOCK_8=padded(sizes[8], MIN_DOT),
        BLOCK_4=padded(sizes[4], MIN_DOT),
        BLOCK_2=padded(sizes[2], MIN_DOT),
        WIDTH=lists.width,
        TILE=_TILE_KEYS,
        RUN=SAMPLE_RUN,
        IS_SAMPLE=is_sample,
        num_warps=4,
    )


def find_recent(
    by: DeviceCodes,
    q: Tensor,
    scales: Tensor,
    limit: Tensor,
    lists: Lists,
    *,
    new: int,
) -> None:
    """Adds the keys that have no codes yet and lie above the limit, by their exact scores."""
    heads, rows, _ = q.shape
    widened, block_dim = upcast(q, by.recent), padded(q.shape[2], MIN_DOT)
    if widened or q.dtype == torch.float32:
        # Such a product has both operands in registers: 128 dims at once spilled 6 KiB a thread.
        block_dim = min(block_dim, 16)
    _recent_kernel[(triton.cdiv(by.recent.shape[1], _TILE_KEYS), heads * new)](
        q,
        by.recent,
        scales,
        limit,
        by.state,
        *lists,
        lists.capacity,
        new,
        by.recent.shape[1],
        GROUP=rows // new,
        DIM=q.shape[2],
        WIDTH=lists.width,
        BLOCK_ROWS=padded(rows // new, MIN_DOT),
        BLOCK_DIM=block_dim,
        TILE=_TILE_KEYS,
        UPCAST=widened,
        num_warps=4,
    )


@triton.jit
def _products(
    base,
    codes,
    at,
    rows,
    there,
    members,
    FIRST_BYTE: tl.constexpr,
    FIRST_DIM: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    CODE_BYTES: tl.constexpr,
):
    """Sums over one group of dims: [BLOCK_ROWS, TILE] float32, whole numbers."""
    byte = tl.arange(0, BLOCK_BYTES)
    in_group = byte < BYTES
    from_ = rows.to(tl.int64)[:, None] * CODE_BYTES + FIRST_BYTE + byte[None, :]
    some = tl.load(base + from_, mask=there[:, None] & in_group[None, :], other=0).to(tl.int32)
    total = tl.zeros((at.shape[0], rows.shape[0]), tl.float32)
    for part in tl.static_range(8 // BITS):
        dims = FIRST_DIM + (byte // 4) * (32 // BITS) + 4 * part + byte % 4
        wanted = members[:, None] & in_group[None, :]
        query = tl.load(codes + at[:, None] + dims[None, :], mask=wanted, other=0.0)
        values = ((some >> (BITS * part)) & ((1 << BITS) - 1)).to(tl.float16)
        total += tl.dot(query, tl.trans(values))
    return total


@triton.jit
def _keep(
    above,
    scores,
    members,
    queries,
    keys,
    ids,
    count,
    rows,
    row_scores,
    list_,
    capacity,
    WIDTH: tl.constexpr,
):
    """Adds the keys [TILE] that are above a limit for any query of a group to their list; those
    beyond its width are there for `sketch_lists.keep_best`.

    Args:
        above, scores: [GROUP, TILE]. members, queries: [GROUP], which queries there are.
    """
    wanted = tl.max(above.to(tl.int32), 0) > 0
    found = tl.sum(wanted.to(tl.int32), 0)
    if found > 0:
        first = tl.atomic_add(count + list_, found)
        place = first + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(ids + list_ * WIDTH + place, keys, mask=wanted & (place < WIDTH))
        tl.store(rows + list_ * capacity + place, keys, mask=wanted)
        to = queries[:, None] * capacity + place[None, :]
        tl.store(row_scores + to, scores, mask=members[:, None] & wanted[None, :])


@triton.jit
def _scan_kernel(
    base,
    codes,
    scales,
    limit,
    state,
    sample,
    ids,
    count,
    listed_rows,
    listed_scores,
    room,
    new,
    capacity,
    num_samples,
    sample_stride,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CODE_DIMS: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    BYTES_8: tl.constexpr,
    BYTES_4: tl.constexpr,
    BYTES_2: tl.constexpr,
    BLOCK_8: tl.constexpr,
    BLOCK_4: tl.constexpr,
    BLOCK_2: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
    IS_SAMPLE: tl.constexpr,
):
    list_ = tl.program_id(1).to(tl.int64)
    head, token = list_ // new, list_ % new
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    rows = number
    if IS_SAMPLE:
        rows = (number // RUN) * (RUN * sample_stride) + number % RUN
    # A row that was cropped sees fewer keys than have codes.
    coded = tl.minimum(tl.load(state), tl.load(state + 1))
    there = rows < coded
    member = tl.arange(0, BLOCK_ROWS)
    members = member < GROUP
    queries = (head * GROUP + member) * new + token
    at = queries * CODE_DIMS
    base += head * capacity * CODE_BYTES
    total = tl.zeros((BLOCK_ROWS, TILE), tl.float32)
    if tl.min(rows, 0) < coded:
        if BYTES_8 > 0:
            total += _products(
                base, codes, at, rows, there, members, 0, 0, 8, BYTES_8, BLOCK_8, CODE_BYTES
            )
        if BYTES_4 > 0:
            total += _products(
                base, codes, at, rows, there, members,
                BYTES_8, BYTES_8, 4, BYTES_4, BLOCK_4, CODE_BYTES,
            )  # fmt: skip
        if BYTES_2 > 0:
            total += _products(
                base, codes, at, rows, there, members,
                BYTES_8 + BYTES_4, BYTES_8 + 2 * BYTES_4, 2, BYTES_2, BLOCK_2, CODE_BYTES,
            )  # fmt: skip
    half_scale = tl.load(scales + queries * 3, mask=members, other=0.0)
    twice_zero = tl.load(scales + queries * 3 + 1, mask=members, other=0.0)
    scores = (2.0 * total - twice_zero[:, None]) * half_scale[:, None]
    if IS_SAMPLE:
        scores = tl.where(there[None, :], scores, -float("inf"))
        to = queries[:, None] * num_samples + number[None, :]
        tl.store(sample + to, scores, mask=members[:, None] & (number < num_samples)[None, :])
    else:
        least = tl.load(limit + queries, mask=members, other=float("inf"))
        above = (scores >= least[:, None]) & members[:, None] & there[None, :]
        _keep(
            above, scores, members, queries, rows,
            ids, count, listed_rows, listed_scores, list_, room, WIDTH,
        )  # fmt: skip


@triton.jit
def _recent_kernel(
    q,
    recent,
    scales,
    limit,
    state,
    ids,
    count,
    listed_rows,
    listed_scores,
    listed_room,
    new,
    room,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    list_ = tl.program_id(1).to(tl.int64)
    head, token = list_ // new, list_ % new
    slots = tl.program_id(0) * TILE + tl.arange(0, TILE)
    length, coded = tl.load(state), tl.load(state + 1)
    # Key n lies in slot n % room, and there are those from `coded` on.
    rows = coded + (slots - coded % room + room) % room
    there = (slots < room) & (rows < length)
    if tl.max(there.to(tl.int32), 0) > 0:
        member = tl.arange(0, BLOCK_ROWS)
        members = member < GROUP
        queries = (head * GROUP + member) * new + token
        scores = tl.zeros((BLOCK_ROWS, TILE), tl.float32)
        for first in range(0, DIM, BLOCK_DIM):
            channels = first + tl.arange(0, BLOCK_DIM)
            in_dim = channels < DIM
            real = members[:, None] & in_dim[None, :]
            some = tl.load(q + queries[:, None] * DIM + channels[None, :], mask=real, other=0.0)
            at = (head * room + slots)[:, None] * DIM + channels[None, :]
            keys = tl.load(recent + at, mask=there[:, None] & in_dim[None, :], other=0.0)
            if UPCAST:
                some, keys = some.to(tl.float32), keys.to(tl.float32)
            scores += tl.dot(some, tl.trans(keys), input_precision="ieee")
        shift = tl.load(scales + queries * 3 + 2, mask=members, other=0.0)
        least = tl.load(limit + queries, mask=members, other=float("inf"))
        scores -= shift[:, None]
        above = (scores >= least[:, None]) & members[:, None] & there[None, :]
        _keep(
            above, scores, members, queries, rows,
            ids, count, listed_rows, listed_scores, list_, listed_room, WIDTH,
        )  # fmt: skip


_ENCODED_KEYS = 64
_BLOCK_CHANNELS = 32


def encode(to: DeviceCodes, keys: Tensor, first: int) -> None:
    """See `sketch_select.encode`."""
    heads, num_keys, dim = keys.shape
    if not keys.numel():
        return
    with on(keys):
        begin = byte = 0
        for num_dims, bits in to.plan.groups:
            lines = num_dims * bits // 32
            _encode_kernel[(triton.cdiv(num_keys, _ENCODED_KEYS), heads)](
                keys,
                to.key_map,
                to.start,
                to.codes,
                num_keys,
                first,
                to.codes.shape[1],
                keys.stride(0),
                keys.stride(1),
                DIM=dim,
                CHANNELS=_BLOCK_CHANNELS,
                CODE_DIMS=to.plan.num_dims,
                CODE_BYTES=to.plan.code_bytes,
                FIRST_DIM=begin,
                FIRST_BYTE=byte,
                BITS=bits,
                BYTES=4 * lines,
                BLOCK_BYTES=padded(4 * lines, MIN_DOT),
                TILE=_ENCODED_KEYS,
                num_warps=4,
            )
            begin, byte = begin + num_dims, byte + 4 * lines


@triton.jit(do_not_specialize=["num_keys", "first"])
def _encode_kernel(
    keys,
    key_map,
    start,
    codes,
    num_keys,
    first,
    capacity,
    stride_head,
    stride_key,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    CODE_DIMS: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    FIRST_DIM: tl.constexpr,
    FIRST_BYTE: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = rows < num_keys
    byte = tl.arange(0, BLOCK_BYTES)
    in_group = byte < BYTES
    packed = tl.zeros((TILE, BLOCK_BYTES), tl.int32)
    for part in tl.static_range(8 // BITS):
        # A line of 4 bytes holds 8 / BITS quads of dims, one above the other.
        dims = FIRST_DIM + (byte // 4) * (32 // BITS) + 4 * part + byte % 4
        at = head * CODE_DIMS + dims
        values = tl.zeros((TILE, BLOCK_BYTES), tl.float32)
        for begin in range(0, DIM, CHANNELS):
            channels = begin + tl.arange(0, CHANNELS)
            in_dim = channels < DIM
            from_ = head * stride_head + rows.to(tl.int64)[:, None] * stride_key + channels[None, :]
            some = tl.load(keys + from_, mask=there[:, None] & in_dim[None, :], other=0.0)
            weights = tl.load(
                key_map + at[None, :] * DIM + channels[:, None],
                mask=in_dim[:, None] & in_group[None, :],
                other=0.0,
            )
            values += tl.dot(some.to(tl.float32), weights, input_precision="ieee")
        values += tl.load(start + at, mask=in_group, other=0.0)[None, :]
        # Halves go to the even neighbour, as torch rounds: codes shall not hang on who made them.
        low = tl.floor(values)
        above = values - low
        odd = (low.to(tl.int32) & 1) == 1
        up = (above > 0.5) | ((above == 0.5) & odd)
        code = low.to(tl.int32) + up.to(tl.int32)
        code = tl.minimum(tl.maximum(code, 0), (1 << BITS) - 1)
        packed |= code << (BITS * part)
    to = (head * capacity + first + rows)[:, None] * CODE_BYTES + FIRST_BYTE + byte[None, :]
    tl.store(codes + to, packed.to(tl.uint8), mask=there[:, None] & in_group[None, :])
