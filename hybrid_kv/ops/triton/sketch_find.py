"""The search by codes: a limit from a sample, what lies above it, the exact scores of that, and the
attention over the best, whose values may lie in page-locked memory of the host.

Eight launches whatever is found. Counts and limits stay on the device, grids follow from room and
not from length, so the launches can be recorded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.devices import on
from hybrid_kv.ops.sketch_select import DeviceCodes, sampled_share
from hybrid_kv.ops.triton._common import MIN_DOT, finite, padded, upcast
from hybrid_kv.ops.triton.paged import capped, reduced, weighed
from hybrid_kv.ops.triton.sketch_lists import Lists, empty, keep_best, keys_in
from hybrid_kv.ops.triton.sketch_scan import find_recent, scan
from hybrid_kv.types import Candidates, PartialAttention

_LISTED_BYTES = 2**27
"""Of lists with room for every key; more tokens than fit are searched for some at a time."""


def find(
    by: DeviceCodes, q: Tensor, k: Tensor, *, new: int, width: int, times: float = 1.0
) -> Candidates:
    """See `sketch_select.find`."""
    group = q.shape[1] // new
    together = max(1, _LISTED_BYTES // (4 * (1 + group) * len(q) * keys_in(by)))
    if new <= together:
        return _find(by, q, k, new=new, width=width, times=times)
    each = q.unflatten(1, (-1, new)).split(together, 2)
    parts = [
        _find(by, some.flatten(1, 2), k, new=some.shape[2], width=width, times=times)
        for some in each
    ]
    scores = [
        part.scores.unflatten(1, (-1, some.shape[2]))
        for part, some in zip(parts, each, strict=True)
    ]
    return Candidates(
        torch.cat([part.ids for part in parts], 1), torch.cat(scores, 2).flatten(1, 2)
    )


def _find(
    by: DeviceCodes, q: Tensor, k: Tensor, *, new: int, width: int, times: float
) -> Candidates:
    heads, rows, _ = q.shape
    q, device = q.contiguous(), q.device
    lists = Lists.of(by, rows, new, width)
    with on(q):
        codes, scales = quantise(by, q)
        sample = torch.empty(heads, rows, by.num_samples, dtype=torch.float32, device=device)
        none = torch.empty(0, dtype=torch.float32, device=device)
        scan(by, q, codes, scales, none, sample, lists, new=new, is_sample=True)
        limit = rank_limit(sample, by.wanted, sampled_share(by, times))
        empty(by, limit, lists)
        scan(by, q, codes, scales, limit, none, lists, new=new, is_sample=False)
        find_recent(by, q, scales, limit, lists, new=new)
        keep_best(lists)
        scores = exact_scores(q, k, lists.ids, lost=(lists.counts, by.lost))
    return Candidates(lists.ids, scores)


_BLOCK_CHANNELS = 32


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


def _bounds(by: DeviceCodes) -> tuple[int, int]:
    """Dims with 8 bits, and dims with 4 bits or more."""
    dims = {bits: num_dims for num_dims, bits in by.plan.groups}
    return dims.get(8, 0), dims.get(8, 0) + dims.get(4, 0)


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


_RANKED = 32
"""Candidates of one program: their rows come over the bus, so many programs ask."""


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


# Attention over the best candidates ---------------------------------------------------------------


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
