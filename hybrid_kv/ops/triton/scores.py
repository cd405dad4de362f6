"""Page scores of a query group: each digest is read once for all its query heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops import reference_pages
from hybrid_kv.ops.devices import on
from hybrid_kv.ops.triton._common import padded

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
