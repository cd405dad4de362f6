"""Which cold entries a query attends: what the index finds, cut to the budget."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_kv.store import ColdExtent, ColdStore
from hybrid_kv.types import SearchResult, TokenBudget


class Retrieved(NamedTuple):
    """What one row's queries attend.

    parts: extents with ids [Hkv, M, K] of their entries, -1 for none.
    counts: [Hkv, M] entries of each query, all parts together.
    scored: dot products spent on finding them.
    """

    parts: list[tuple[ColdExtent, Tensor]]
    counts: Tensor
    scored: int


def retrieve(
    cold: ColdStore,
    row: int,
    queries: Tensor,
    budget: TokenBudget,
    *,
    scale: float,
    softcap: float | None = None,
) -> Retrieved:
    """Searches a row that has cold entries, again and wider where `budget.beta` asks for more.

    Args:
        queries: [Hkv, M, D] on the host.
        scale, softcap: what turns a score into a logit.
    """
    top_k, scored = budget.top_k, 0
    while True:
        found = cold.search(row, queries, top_k, budget.most)
        scored += sum(result.scored for _, result in found)
        ids = [result.ids for _, result in found]
        if budget.beta is not None:
            ids = _near_the_best([result for _, result in found], budget.beta, scale, softcap)
            cut = any(
                kept.shape[-1] < min(budget.most, extent.length) and bool((kept >= 0).all(-1).any())
                for (extent, _), kept in zip(found, ids, strict=True)
            )
            if cut and top_k < budget.most:
                top_k = min(4 * top_k, budget.most)
                continue
        parts = [(extent, kept) for (extent, _), kept in zip(found, ids, strict=True)]
        counts = torch.stack([(kept >= 0).sum(-1) for kept in ids]).sum(0)
        return Retrieved(parts, counts, scored)


def _near_the_best(
    results: list[SearchResult], beta: float, scale: float, softcap: float | None
) -> list[Tensor]:
    """The ids of each result, -1 where the logit is more than `beta` below the query's best."""
    logits = [result.scores * scale for result in results]
    if softcap is not None:
        logits = [softcap * torch.tanh(logit / softcap) for logit in logits]
    best = torch.stack([logit.amax(-1, keepdim=True) for logit in logits]).amax(0)
    return [
        result.ids.masked_fill(logit < best - beta, -1)
        for result, logit in zip(results, logits, strict=True)
    ]
