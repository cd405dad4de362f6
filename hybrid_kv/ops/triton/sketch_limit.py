"""The score of a rank among many, found without sorting them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.devices import on
from hybrid_kv.ops.triton._common import padded


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
