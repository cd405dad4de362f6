"""Which cold entries a query attends: what the index finds, cut to the budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid_kv.store import ColdExtent, ColdStore, Span
from hybrid_kv.types import SearchResult, TokenBudget


class Retrieved(NamedTuple):
    """What one row's queries attend.

    parts: the row's extents with ids [Hkv, M, K] of their entries, -1 for none.
    scored: dot products spent on finding them.
    """

    parts: list[tuple[ColdExtent, Tensor]]
    scored: int = 0

    def counted(self) -> tuple[int, int]:
        """Entries of all queries together, and of a single query at most."""
        found = [ids.numpy() >= 0 for _, ids in self.parts]
        total = sum(map(np.count_nonzero, found))
        if total == sum(part.size for part in found):  # nearly always as many as asked for
            return total, sum(part.shape[-1] for part in found)
        return total, int(np.max(sum(part.sum(-1) for part in found)))


def retrieve(
    cold: ColdStore,
    row: int,
    queries: Tensor,
    budget: TokenBudget,
    *,
    scale: float,
    softcap: float | None = None,
    chosen: Mapping[int, Tensor] | None = None,
) -> Retrieved:
    """Searches a row that has cold entries, again and wider where `budget.beta` asks for more.

    Args:
        queries: [Hkv, M, D] on the host.
        scale, softcap: what turns a score into a logit.
        chosen: ids [Hkv, M, K] of extents, by their number in the row, whose entries are chosen
            already; the budget is that of the others.
    """
    spans, chosen = cold.rows[row], chosen or {}
    if len(chosen) == len(spans):
        return Retrieved([(span.extent, chosen[n]) for n, span in enumerate(spans)])
    searched, scored = _search(cold, row, queries, budget, scale, softcap, chosen)
    rest = iter(searched)
    parts = [
        (span.extent, chosen[number] if number in chosen else next(rest))
        for number, span in enumerate(spans)
    ]
    return Retrieved(parts, scored)


def entries_of(pages: Tensor, span: Span, group_size: int) -> Tensor:
    """Ids [Hkv, M, C * S] of the entries in pages [Hkv, T, C] of an extent; -1 beyond the row's."""
    size = 1 if span.extent.index is None else span.extent.index.page_tokens
    ids = (pages[..., None] * size + torch.arange(size)).flatten(2)
    return ids.masked_fill(ids >= span.length, -1).repeat(1, group_size, 1)


def _search(
    cold: ColdStore,
    row: int,
    queries: Tensor,
    budget: TokenBudget,
    scale: float,
    softcap: float | None,
    without: Mapping[int, Tensor],
) -> tuple[list[Tensor], int]:
    """Ids by extent that is searched, and the dot products spent."""
    top_k, scored = budget.top_k, 0
    while True:
        found = cold.search(row, queries, top_k, budget.most, without)
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
        return ids, scored


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
