"""Exact scores of candidates, whose keys may lie in page-locked memory of the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.devices import on
from hybrid_kv.ops.triton._common import MIN_DOT, padded, upcast

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
