"""Exact ranking of few keys that another search has named."""

from __future__ import annotations

import torch
from torch import Tensor


def rank_named(queries: Tensor, keys: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best of named keys by dot product.

    Args:
        queries: [H, M, D] on the host, any float dtype.
        keys: [H, N, D].
        ids: [H, M, C] int64 rows of keys, each once for a query; -1 for none.
        count: how many are wanted.

    Returns:
        ids [H, M, min(count, C)], best first, -1 for none; scores, the same, float32, -inf for
        none.
    """
    heads, num_queries, width = ids.shape
    flat = ids.clamp_min(0).view(heads, num_queries * width)
    named = torch.stack([own[rows] for own, rows in zip(keys, flat, strict=True)])
    named = named.view(heads, num_queries, width, keys.shape[2]).float()
    scores = torch.matmul(named, queries.float()[..., None])[..., 0]
    scores.masked_fill_(ids < 0, -torch.inf)
    best = scores.topk(min(count, width), -1)
    found = ids.gather(-1, best.indices)
    return found.masked_fill_(best.values == -torch.inf, -1), best.values
