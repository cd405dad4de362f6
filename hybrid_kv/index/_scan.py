"""The exact scan over rows and the order of results, shared by the kinds that need them."""

from __future__ import annotations

import torch
from torch import Tensor

SCRATCH_BYTES = 32 * 2**20
"""Temporary scores of one scan; a further few MiB hold a block of rows in float32."""
_BLOCK_BYTES = 2**20


def scan(queries: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best rows of each query, unordered.

    Rows are read once for all queries of a head and turned to float32 block by block, so that a
    block is still in the cache when it is multiplied. The top-k runs over far wider stretches,
    because its cost per call hardly depends on their width.

    Args:
        queries: [Hkv, M, D] float32.
        rows: [Hkv, N, D], any float dtype; 1 <= count <= N.

    Returns:
        scores [Hkv, M, count] float32 and ids [Hkv, M, count] int64.
    """
    heads, num_queries, _ = queries.shape
    stretch = max(count, SCRATCH_BYTES // (4 * heads * num_queries))
    best, best_ids = queries.new_empty(heads, num_queries, 0), None
    for start in range(0, rows.shape[1], stretch):
        scores = scores_of(queries, rows[:, start : start + stretch])
        top = scores.topk(min(count, scores.shape[2]), sorted=False)
        ids = top.indices + start
        if best_ids is not None:
            both, both_ids = torch.cat([best, top.values], -1), torch.cat([best_ids, ids], -1)
            top = both.topk(count, sorted=False)
            ids = both_ids.gather(-1, top.indices)
        best, best_ids = top.values, ids
    assert best_ids is not None
    return best, best_ids


def scores_of(queries: Tensor, rows: Tensor) -> Tensor:
    """[Hkv, M, N] float32 dot products of queries [Hkv, M, D] and rows [Hkv, N, D]."""
    heads, length, dim = rows.shape
    block = max(16, _BLOCK_BYTES // (4 * heads * dim))
    scores = queries.new_empty(*queries.shape[:2], length)
    for start in range(0, length, block):
        part = rows[:, start : start + block].float()
        scores[:, :, start : start + block] = torch.matmul(queries, part.transpose(1, 2))
    return scores


def true_scores(queries: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """[Hkv, M, K] float32 dot products of queries [Hkv, M, D] with the keys [Hkv, N, D] of these
    ids [Hkv, M, K]; -inf where an id is -1.
    """
    heads = torch.arange(len(ids))[:, None, None]
    step = max(1, SCRATCH_BYTES // (4 * len(ids) * max(1, ids.shape[-1]) * keys.shape[-1]))
    parts = [
        torch.matmul(keys[heads, some.clamp_min(0)].float(), q[..., None])[..., 0]
        for q, some in zip(queries.split(step, 1), ids.split(step, 1), strict=True)
    ]
    return torch.cat(parts, 1).masked_fill(ids < 0, -torch.inf)


def rank(scores: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best entries, best first; of equal scores the lower id comes first.

    Args:
        scores, ids: [Hkv, M, C], C >= count; an entry of score -inf is no entry.

    Returns:
        scores, ids [Hkv, M, count]; ids -1 where there is no entry.
    """
    ids, order = ids.sort(-1)
    scores, order = scores.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    scores, ids = scores[..., :count], ids[..., :count]
    return scores, ids.masked_fill(scores == -torch.inf, -1)
