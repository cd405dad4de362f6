"""Pages: their digests and scores of these, a token that is appended with its digest, and copies.

A digest has the smallest and the largest key of a page per channel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops import reference_pages
from hybrid_kv.ops.devices import on
from hybrid_kv.ops.triton._common import padded
from hybrid_kv.types import HIDDEN, PagedKV

_HIDDEN = tl.constexpr(HIDDEN)


def update_digests(pages: PagedKV, slots: Tensor) -> None:
    """See `reference_pages.update_digests`."""
    if pages.key_min is None or pages.key_max is None or slots.numel() == 0:
        return
    heads, num_slots, page_size, dim = pages.k.shape
    with on(pages.k):
        _update_kernel[(slots.numel(), heads)](
            pages.k,
            pages.positions,
            slots,
            pages.key_min,
            pages.key_max,
            num_slots,
            PAGE=page_size,
            DIM=dim,
            BLOCK_PAGE=padded(page_size),
            BLOCK_DIM=padded(dim),
        )


def append_token(pages: PagedKV, k: Tensor, v: Tensor, place: int, position: int) -> None:
    """`PagedKV.store` of a token k, v [Hkv, D] and the digest of its page: one launch."""
    with on(pages.k):
        _append_kernel[(pages.k.shape[0],)](
            *_appended(pages, k, v), place, position, **_sizes(pages)
        )


def append_at(pages: PagedKV, k: Tensor, v: Tensor, numbers: Tensor, table: Tensor) -> None:
    """See `reference_pages.append_at`; the numbers are read when the kernel runs."""
    with on(pages.k):
        _append_at_kernel[(pages.k.shape[0],)](
            *_appended(pages, k, v), numbers, table, **_sizes(pages)
        )


def _appended(pages: PagedKV, k: Tensor, v: Tensor) -> tuple[Tensor | int, ...]:
    """The arguments of both kernels that store a token."""
    bounds = (pages.k, pages.k) if pages.key_min is None else (pages.key_min, pages.key_max)
    strides = pages.k.shape[1], k.stride(0), v.stride(0)
    return (k, v, pages.k, pages.v, pages.positions, *bounds, *strides)  # type: ignore[return-value]


def _sizes(pages: PagedKV) -> dict[str, int]:
    _, _, page_size, dim = pages.k.shape
    return {
        "PAGE": page_size,
        "DIM": dim,
        "BLOCK_PAGE": padded(page_size),
        "BLOCK_DIM": padded(dim),
        "HAS_DIGESTS": pages.key_min is not None,
    }


@triton.jit
def _store_bounds(keys, filled, key_min, key_max, at, channels, in_dim):
    lows = tl.min(tl.where(filled, keys, float("inf")), 0)
    highs = tl.max(tl.where(filled, keys, -float("inf")), 0)
    tl.store(key_min + at + channels, lows.to(key_min.dtype.element_ty), mask=in_dim)
    tl.store(key_max + at + channels, highs.to(key_max.dtype.element_ty), mask=in_dim)


@triton.jit
def _update_kernel(
    k,
    positions,
    slots,
    key_min,
    key_max,
    num_slots,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_PAGE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    slot = tl.load(slots + tl.program_id(0))
    page = tl.program_id(1).to(tl.int64) * num_slots + slot
    offsets, channels = tl.arange(0, BLOCK_PAGE), tl.arange(0, BLOCK_DIM)
    in_page, in_dim = offsets < PAGE, channels < DIM
    position = tl.load(positions + slot * PAGE + offsets, mask=in_page, other=_HIDDEN)
    # The first slot stands for all that are not filled, as in the reference.
    filled = (position != _HIDDEN) | (offsets == 0)
    wanted = filled[:, None] & in_dim[None, :]
    rows = k + page * (PAGE * DIM) + offsets[:, None] * DIM + channels[None, :]
    keys = tl.load(rows, mask=wanted, other=0.0).to(tl.float32)
    _store_bounds(keys, filled[:, None], key_min, key_max, page * DIM, channels, in_dim)


@triton.jit(do_not_specialize=["place", "position"])
def _append_kernel(
    new_k,
    new_v,
    k,
    v,
    positions,
    key_min,
    key_max,
    num_slots,
    stride_k,
    stride_v,
    place,
    position,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_PAGE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_DIGESTS: tl.constexpr,
):
    _append_one(
        new_k,
        new_v,
        k,
        v,
        positions,
        key_min,
        key_max,
        num_slots,
        stride_k,
        stride_v,
        place,
        position,
        PAGE,
        DIM,
        BLOCK_PAGE,
        BLOCK_DIM,
        HAS_DIGESTS,
    )


@triton.jit
def _append_at_kernel(
    new_k,
    new_v,
    k,
    v,
    positions,
    key_min,
    key_max,
    num_slots,
    stride_k,
    stride_v,
    numbers,
    table,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_PAGE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_DIGESTS: tl.constexpr,
):
    place, position, pages = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    tl.store(table + pages - 1, place // PAGE, mask=tl.program_id(0) == 0)
    _append_one(
        new_k,
        new_v,
        k,
        v,
        positions,
        key_min,
        key_max,
        num_slots,
        stride_k,
        stride_v,
        place,
        position,
        PAGE,
        DIM,
        BLOCK_PAGE,
        BLOCK_DIM,
        HAS_DIGESTS,
    )


@triton.jit
def _append_one(
    new_k,
    new_v,
    k,
    v,
    positions,
    key_min,
    key_max,
    num_slots,
    stride_k,
    stride_v,
    place,
    position,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_PAGE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_DIGESTS: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BLOCK_DIM)
    in_dim = channels < DIM
    key = tl.load(new_k + head * stride_k + channels, mask=in_dim, other=0.0)
    value = tl.load(new_v + head * stride_v + channels, mask=in_dim, other=0.0)
    at = (head * num_slots * PAGE + place) * DIM
    tl.store(k + at + channels, key, mask=in_dim)
    tl.store(v + at + channels, value, mask=in_dim)
    tl.store(positions + place, position, mask=head == 0)
    if HAS_DIGESTS:
        slot, own = place // PAGE, place % PAGE
        offsets = tl.arange(0, BLOCK_PAGE)
        old = (offsets < PAGE) & (offsets != own)
        found = tl.load(positions + slot * PAGE + offsets, mask=old, other=_HIDDEN)
        page = head * num_slots + slot
        rows = k + page * (PAGE * DIM) + offsets[:, None] * DIM + channels[None, :]
        filled = found != _HIDDEN
        keys = tl.load(rows, mask=filled[:, None] & in_dim[None, :], other=0.0).to(tl.float32)
        # The new key comes from registers: its store need not be visible to this program's loads.
        mine = (offsets == own)[:, None]
        keys = tl.where(mine, key.to(tl.float32)[None, :], keys)
        _store_bounds(keys, mine | filled[:, None], key_min, key_max, page * DIM, channels, in_dim)


_BLOCK = 1024


def copy_pages(
    source: PagedKV, target: PagedKV, source_slots: Tensor, target_slots: Tensor
) -> None:
    """See `reference_pages.copy_pages`; the slots lie on the device of the target.

    One launch for all pages of all heads: a copy each would cost microseconds of launch for 4 KiB.
    """
    if source_slots.numel() == 0:
        return
    heads, num_pages = source_slots.shape
    elements = target.k[0, 0].numel()
    with on(target.k):
        _copy_kernel[(num_pages, heads)](
            source.k,
            source.v,
            target.k,
            target.v,
            source_slots.contiguous(),
            target_slots.contiguous(),
            source.k.stride(0),
            target.k.stride(0),
            ELEMENTS=elements,
            BLOCK=min(_BLOCK, padded(elements)),
        )


@triton.jit
def _copy_kernel(
    source_k,
    source_v,
    target_k,
    target_v,
    source_slots,
    target_slots,
    source_stride,
    target_stride,
    ELEMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    pair = head * tl.num_programs(0) + tl.program_id(0)
    source_slot, target_slot = tl.load(source_slots + pair), tl.load(target_slots + pair)
    # A limit rather than a mask of one value: the interpreter widens that to integers.
    limit = tl.where((source_slot >= 0) & (target_slot >= 0), ELEMENTS, 0)
    from_ = head * source_stride + source_slot * ELEMENTS
    to = head * target_stride + target_slot * ELEMENTS
    for start in range(0, ELEMENTS, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < limit
        keys = tl.load(source_k + from_ + offsets, mask=inside)
        values = tl.load(source_v + from_ + offsets, mask=inside)
        tl.store(target_k + to + offsets, keys, mask=inside)
        tl.store(target_v + to + offsets, values, mask=inside)


_BLOCK_PAGES = 32


def group_page_scores(q: Tensor, key_min: Tensor, key_max: Tensor, *, new: int) -> Tensor:
    """The highest of `reference_pages.page_scores` over the query heads of a group.

    Args:
        q: [Hkv, M, D], M = G * T with row g * T + t.
        key_min, key_max: [Hkv, P, D] of one layout, channels contiguous.
        new: T.

    Returns:
        [Hkv, T, P] float32.
    """
    heads, rows, dim = q.shape
    num_pages = key_min.shape[1]
    scores = torch.empty(heads, new, num_pages, dtype=torch.float32, device=q.device)
    if scores.numel() == 0:
        return scores
    with on(q):
        _scores_kernel[(triton.cdiv(num_pages, _BLOCK_PAGES), new, heads)](
            q.contiguous(),
            key_min,
            key_max,
            scores,
            num_pages,
            new,
            key_min.stride(0),
            key_min.stride(1),
            GROUP=rows // new,
            DIM=dim,
            BLOCK_PAGES=_BLOCK_PAGES,
            BLOCK_DIM=padded(dim),
        )
    return scores


def page_scores(q: Tensor, key_min: Tensor, key_max: Tensor) -> Tensor:
    """See `reference_pages.page_scores`."""
    return group_page_scores(q, key_min, key_max, new=q.shape[1])


def choose_pages(
    q: Tensor, key_min: Tensor, key_max: Tensor, *, new: int, oldest: int, newest: int, count: int
) -> Tensor:
    """See `reference_pages.choose_pages`."""
    shared = group_page_scores(q, key_min, key_max, new=new)
    return reference_pages.best_pages(shared, oldest, newest, count)


def listed_page_scores(
    q: Tensor, key_min: Tensor, key_max: Tensor, table: Tensor, numbers: Tensor, oldest: int
) -> Tensor:
    """See `reference_pages.listed_page_scores`; reads digests where they lie, of counted pages."""
    heads, group, dim = q.shape
    scores = torch.empty(heads, 1, len(table), dtype=torch.float32, device=q.device)
    with on(q):
        _listed_scores_kernel[(triton.cdiv(len(table), _BLOCK_PAGES), heads)](
            q.contiguous(),
            key_min,
            key_max,
            table,
            numbers,
            scores,
            len(table),
            key_min.stride(0),
            key_min.stride(1),
            oldest,
            GROUP=group,
            DIM=dim,
            BLOCK_PAGES=_BLOCK_PAGES,
            BLOCK_DIM=padded(dim),
        )
    return scores


@triton.jit
def _listed_scores_kernel(
    q,
    key_min,
    key_max,
    table,
    numbers,
    scores,
    capacity,
    stride_head,
    stride_page,
    oldest,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    pages = tl.program_id(0) * BLOCK_PAGES + tl.arange(0, BLOCK_PAGES)
    num_pages, newest = tl.load(numbers + 2), tl.load(numbers + 3)
    channels = tl.arange(0, BLOCK_DIM)
    in_dim, counted = channels < DIM, pages < num_pages
    slots = tl.load(table + pages, mask=counted, other=0)
    wanted = counted[:, None] & in_dim[None, :]
    at = head * stride_head + slots[:, None] * stride_page + channels[None, :]
    lows = tl.load(key_min + at, mask=wanted, other=0.0).to(tl.float32)
    highs = tl.load(key_max + at, mask=wanted, other=0.0).to(tl.float32)
    best = tl.full((BLOCK_PAGES,), -float("inf"), tl.float32)
    for member in tl.static_range(GROUP):
        row = (head * GROUP + member) * DIM
        query = tl.load(q + row + channels, mask=in_dim, other=0.0).to(tl.float32)[None, :]
        best = tl.maximum(best, tl.sum(tl.maximum(query * lows, query * highs), 1))
    best = tl.where((pages < oldest) | (pages >= num_pages - newest), float("inf"), best)
    best = tl.where(counted, best, -float("inf"))
    tl.store(scores + head * capacity + pages, best, mask=pages < capacity)


@triton.jit
def _scores_kernel(
    q,
    key_min,
    key_max,
    scores,
    num_pages,
    new,
    stride_head,
    stride_page,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    pages = tl.program_id(0) * BLOCK_PAGES + tl.arange(0, BLOCK_PAGES)
    channels = tl.arange(0, BLOCK_DIM)
    in_dim = channels < DIM
    wanted = (pages < num_pages)[:, None] & in_dim[None, :]
    at = head * stride_head + pages.to(tl.int64)[:, None] * stride_page + channels[None, :]
    lows = tl.load(key_min + at, mask=wanted, other=0.0).to(tl.float32)
    highs = tl.load(key_max + at, mask=wanted, other=0.0).to(tl.float32)
    best = tl.full((BLOCK_PAGES,), -float("inf"), tl.float32)
    for member in tl.static_range(GROUP):
        row = (head * GROUP + member) * new + token
        query = tl.load(q + row * DIM + channels, mask=in_dim, other=0.0).to(tl.float32)[None, :]
        best = tl.maximum(best, tl.sum(tl.maximum(query * lows, query * highs), 1))
    tl.store(scores + (head * new + token) * num_pages + pages, best, mask=pages < num_pages)
