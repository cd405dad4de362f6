"""The search by codes: a limit from a sample, what lies above it, and the exact scores of that.

Six launches whatever is found. Counts and limits stay on the device, grids follow from room and not
from length, so the launches can be recorded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.devices import on
from hybrid_kv.ops.sketch_select import SAMPLE_RUN, DeviceCodes, sampled_share
from hybrid_kv.ops.triton._common import MIN_DOT, padded, upcast
from hybrid_kv.types import Candidates

_TILE_KEYS = 128
_BLOCK_CHANNELS = 32
_RANKED = 32
"""Candidates of one program that ranks: their rows come over the bus, so many programs ask."""


def find(
    by: DeviceCodes, q: Tensor, k: Tensor, *, new: int, width: int, times: float = 1.0
) -> Candidates:
    """See `sketch_select.find`."""
    heads, rows, _ = q.shape
    q, device = q.contiguous(), q.device
    ids = torch.empty(heads, new, width, dtype=torch.int32, device=device)
    count = torch.empty(heads, new, dtype=torch.int32, device=device)
    with on(q):
        codes, scales = quantise(by, q)
        sample = torch.empty(heads, rows, by.num_samples, dtype=torch.float32, device=device)
        empty = torch.empty(0, dtype=torch.float32, device=device)
        _scan(by, q, codes, scales, empty, sample, ids, count, new=new, is_sample=True)
        limit = rank_limit(sample, by.wanted, sampled_share(by, times))
        _prepare_kernel[(heads * new,)](
            limit,
            by.state,
            count,
            ids,
            rows // new,
            new,
            WIDTH=width,
            BLOCK=padded(width),
            GROUP=padded(rows // new),
        )
        _scan(by, q, codes, scales, limit, empty, ids, count, new=new, is_sample=False)
        _recent_kernel[(triton.cdiv(by.recent.shape[1], _TILE_KEYS), heads * new)](
            q,
            by.recent,
            scales,
            limit,
            by.state,
            ids,
            count,
            new,
            by.recent.shape[1],
            GROUP=rows // new,
            DIM=q.shape[2],
            WIDTH=width,
            BLOCK_ROWS=padded(rows // new, MIN_DOT),
            BLOCK_DIM=padded(q.shape[2], MIN_DOT),
            TILE=_TILE_KEYS,
            UPCAST=upcast(q, by.recent),
            num_warps=4,
        )
        scores = exact_scores(q, k, ids, lost=(count, by.lost))
    return Candidates(ids, scores)


def quantise(by: DeviceCodes, q: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [Hkv, M, d] float16, whole numbers; half_scale, twice_zero, shift as [Hkv, M, 3]."""
    heads, rows, dim = q.shape
    dims = by.plan.num_dims
    codes = torch.empty(heads, rows, dims, dtype=torch.float16, device=q.device)
    scales = torch.empty(heads, rows, 3, dtype=torch.float32, device=q.device)
    first_8, first_4 = _bounds(by)
    _quantise_kernel[(heads * rows,)](
        q.contiguous(),
        by.query_map,
        by.mean,
        codes,
        scales,
        rows,
        DIM=dim,
        BLOCK_DIM=padded(dim),
        CHANNELS=_BLOCK_CHANNELS,
        CODE_DIMS=dims,
        BLOCK_CODE=padded(dims),
        UNTIL_8=first_8,
        UNTIL_4=first_4,
    )
    return codes, scales


def exact_scores(
    q: Tensor, k: Tensor, ids: Tensor, lost: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """See `sketch_select.exact_scores`; k may lie in page-locked memory of the host.

    Args:
        lost: candidates that there were [Hkv, T], and where those without room are counted [Hkv].
    """
    heads, rows, dim = q.shape
    new, width = ids.shape[1:]
    scores = torch.empty(heads, rows, width, dtype=torch.float32, device=q.device)
    k = k if k.stride(-1) == 1 else k.contiguous()
    count, counter = (ids, ids) if lost is None else lost
    with on(q):
        _rank_kernel[(triton.cdiv(width, _RANKED), heads * new)](
            q.contiguous(),
            k,
            ids,
            scores,
            count,
            counter,
            new,
            width,
            k.stride(0),
            k.stride(1),
            GROUP=rows // new,
            DIM=dim,
            BLOCK_ROWS=padded(rows // new, MIN_DOT),
            BLOCK_DIM=padded(dim, MIN_DOT),
            TILE=_RANKED,
            COUNTS=lost is not None,
            UPCAST=upcast(q, k),
            num_warps=4,
        )
    return scores


def best_limit(scores: Tensor, top_k: int) -> Tensor:
    """See `sketch_select.best_limit`."""
    return rank_limit(scores, None, float(min(top_k, scores.shape[-1])))


def rank_limit(scores: Tensor, wanted: Tensor | None, share: float) -> Tensor:
    """[H, M]: the score of rank `share` times `wanted` [H] int32 (None: 1), among [H, M, n].

    The highest has rank 1; beyond the last the score is -inf.
    """
    heads, rows, count = scores.shape
    limit = torch.empty(heads, rows, dtype=torch.float32, device=scores.device)
    with on(scores):
        _limit_kernel[(heads * rows,)](
            scores.contiguous(),
            limit if wanted is None else wanted,
            share,
            limit,
            count,
            rows,
            BLOCK=padded(count),
            HAS_WANTED=wanted is not None,
            num_warps=8 if count > 1024 else 4,
        )
    return limit


def _bounds(by: DeviceCodes) -> tuple[int, int]:
    """Dims with 8 bits, and dims with 4 bits or more."""
    dims = {bits: num_dims for num_dims, bits in by.plan.groups}
    return dims.get(8, 0), dims.get(8, 0) + dims.get(4, 0)


def _scan(
    by: DeviceCodes,
    q: Tensor,
    codes: Tensor,
    scales: Tensor,
    limit: Tensor,
    sample: Tensor,
    ids: Tensor,
    count: Tensor,
    *,
    new: int,
    is_sample: bool,
) -> None:
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
        ids,
        count,
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
        WIDTH=ids.shape[2],
        TILE=_TILE_KEYS,
        RUN=SAMPLE_RUN,
        IS_SAMPLE=is_sample,
        num_warps=4,
    )


@triton.jit
def _quantise_kernel(
    q,
    query_map,
    mean,
    codes,
    scales,
    num_rows,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    CODE_DIMS: tl.constexpr,
    BLOCK_CODE: tl.constexpr,
    UNTIL_8: tl.constexpr,
    UNTIL_4: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = row // num_rows
    dims = tl.arange(0, BLOCK_CODE)
    in_code = dims < CODE_DIMS
    x = tl.zeros((BLOCK_CODE,), tl.float32)
    for begin in range(0, DIM, CHANNELS):
        channels = begin + tl.arange(0, CHANNELS)
        in_dim = channels < DIM
        some = tl.load(q + row * DIM + channels, mask=in_dim, other=0.0).to(tl.float32)
        at = (head * CODE_DIMS + dims)[:, None] * DIM + channels[None, :]
        weights = tl.load(query_map + at, mask=in_code[:, None] & in_dim[None, :], other=0.0)
        x += tl.sum(weights * some[None, :], 1)
    every = tl.arange(0, BLOCK_DIM)
    query = tl.load(q + row * DIM + every, mask=every < DIM, other=0.0).to(tl.float32)
    centre = tl.load(mean + head * DIM + every, mask=every < DIM, other=0.0)
    scale = tl.max(tl.abs(x), 0) / 127.0
    inverse = tl.where(scale >= 1.1754943508222875e-38, 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)
    # Rounded as torch does, halves to even, by adding what has no room for a fraction.
    rounded = tl.minimum(tl.maximum(x * inverse, -127.0), 127.0) + 12582912.0 - 12582912.0
    top = tl.where(dims < UNTIL_8, 255.0, tl.where(dims < UNTIL_4, 15.0, 3.0))
    tl.store(codes + row * CODE_DIMS + dims, rounded.to(tl.float16), mask=in_code)
    tl.store(scales + row * 3, 0.5 * scale)
    tl.store(scales + row * 3 + 1, tl.sum(tl.where(in_code, rounded * top, 0.0), 0))
    tl.store(scales + row * 3 + 2, tl.sum(query * centre, 0))


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
def _keep(above, rows, ids, count, list_, WIDTH: tl.constexpr):
    """Adds the rows [TILE] that are above to a list, as far as it has room; counts them all."""
    found = tl.sum(above.to(tl.int32), 0)
    if found > 0:
        first = tl.atomic_add(count + list_, found)
        place = first + tl.cumsum(above.to(tl.int32), 0) - 1
        tl.store(ids + list_ * WIDTH + place, rows, mask=above & (place < WIDTH))


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
        _keep(tl.max(above.to(tl.int32), 0) > 0, rows, ids, count, list_, WIDTH)


@triton.jit
def _recent_kernel(
    q,
    recent,
    scales,
    limit,
    state,
    ids,
    count,
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
        member, channels = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
        members, in_dim = member < GROUP, channels < DIM
        queries = (head * GROUP + member) * new + token
        real = members[:, None] & in_dim[None, :]
        some = tl.load(q + queries[:, None] * DIM + channels[None, :], mask=real, other=0.0)
        at = (head * room + slots)[:, None] * DIM + channels[None, :]
        keys = tl.load(recent + at, mask=there[:, None] & in_dim[None, :], other=0.0)
        if UPCAST:
            some, keys = some.to(tl.float32), keys.to(tl.float32)
        scores = tl.dot(some, tl.trans(keys), input_precision="ieee")
        shift = tl.load(scales + queries * 3 + 2, mask=members, other=0.0)
        least = tl.load(limit + queries, mask=members, other=float("inf"))
        above = (scores - shift[:, None] >= least[:, None]) & members[:, None] & there[None, :]
        _keep(tl.max(above.to(tl.int32), 0) > 0, rows, ids, count, list_, WIDTH)


@triton.jit
def _prepare_kernel(
    limit,
    state,
    count,
    ids,
    group,
    new,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Empties a list of candidates; where all keys have room in it there is no limit."""
    list_ = tl.program_id(0).to(tl.int64)
    head, token = list_ // new, list_ % new
    places = tl.arange(0, BLOCK)
    tl.store(ids + list_ * WIDTH + places, tl.full((BLOCK,), -1, tl.int32), mask=places < WIDTH)
    tl.store(count + list_, 0)
    member = tl.arange(0, GROUP)
    # A bound rather than a mask of one value: the interpreter widens that to integers.
    bound = tl.where(tl.load(state) <= WIDTH, group, 0)
    at = (head * group + member) * new + token
    tl.store(limit + at, tl.full((GROUP,), -float("inf"), tl.float32), mask=member < bound)


@triton.jit
def _rank_kernel(
    q,
    k,
    ids,
    scores,
    count,
    lost,
    new,
    width,
    stride_head,
    stride_key,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
    COUNTS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    list_ = tl.program_id(1).to(tl.int64)
    head, token = list_ // new, list_ % new
    if COUNTS:
        missing = tl.load(count + list_) - width
        if (tl.program_id(0) == 0) & (missing > 0):
            tl.atomic_add(lost + head, missing.to(tl.int64))
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    rows = tl.load(ids + list_ * width + places, mask=places < width, other=-1)
    member, channels = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    members, in_dim = member < GROUP, channels < DIM
    queries = (head * GROUP + member) * new + token
    found = tl.full((BLOCK_ROWS, TILE), -float("inf"), tl.float32)
    if tl.max(rows, 0) >= 0:
        real = members[:, None] & in_dim[None, :]
        some = tl.load(q + queries[:, None] * DIM + channels[None, :], mask=real, other=0.0)
        at = head * stride_head + rows.to(tl.int64)[:, None] * stride_key + channels[None, :]
        keys = tl.load(k + at, mask=(rows >= 0)[:, None] & in_dim[None, :], other=0.0)
        if UPCAST:
            some, keys = some.to(tl.float32), keys.to(tl.float32)
        exact = tl.dot(some, tl.trans(keys), input_precision="ieee")
        found = tl.where((rows >= 0)[None, :], exact, found)
    to = queries[:, None] * width + places[None, :]
    tl.store(scores + to, found, mask=members[:, None] & (places < width)[None, :])


@triton.jit
def _limit_kernel(
    scores,
    wanted,
    share,
    limit,
    count,
    num_rows,
    BLOCK: tl.constexpr,
    HAS_WANTED: tl.constexpr,
):
    """Finds a score of a rank bit by bit: floats are turned into numbers of the same order."""
    row = tl.program_id(0).to(tl.int64)
    aimed = share
    if HAS_WANTED:
        aimed = tl.load(wanted + row // num_rows).to(tl.float32) * share
    rank = tl.maximum(tl.ceil(aimed).to(tl.int32), 1)
    places = tl.arange(0, BLOCK)
    found = tl.load(scores + row * count + places, mask=places < count, other=-float("inf"))
    bits = found.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    best = tl.zeros((), tl.int64)
    for step in range(32):
        bit = tl.full((), 2147483648, tl.int64) >> step
        tried = best + bit
        enough = tl.sum((ordered >= tried).to(tl.int32), 0) >= rank
        best = tl.where(enough, tried, best)
    turned = (best - 2147483648).to(tl.int32)
    value = (turned ^ ((turned >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(limit + row, tl.where(rank > count, -float("inf"), value))
