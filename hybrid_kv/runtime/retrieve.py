"""Retrieval of the cold entries that a query attends: what the index finds, cut to the budget.

A budget may be a share of the softmax. That needs everything that is attended beside, sinks and
window too: the best cold entry of a head that looks at its sinks weighs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybrid_kv.store import ColdChain, ColdExtent, Retrieved, RetrievedPart
from hybrid_kv.store.search import ByExtent, search_row
from hybrid_kv.types import SearchResult, TokenBudget


def retrieve(
    chain: ColdChain,
    queries: Tensor,
    budget: TokenBudget,
    *,
    new: int = 1,
    scale: float,
    softcap: float | None = None,
    near: Callable[[], Tensor] | None = None,
    copied: Sequence[Tensor | None] = (),
    first: ByExtent | None = None,
) -> Retrieved:
    """Searches a row's cold entries, again and wider where `budget.min_share` asks for more.

    Args:
        queries: [Hkv, M, D] on the host.
        new: T; query m is that of token m % T.
        scale, softcap: what turns a score into a logit.
        near: gives the log-sum-exp [Hkv, M] of what is attended beside, asked for after the search
            where weights count; None for nothing.
        copied: by span which of its entries [Hkv, n] bool are attended elsewhere; empty for none.
        first: what the first search would give, where that is known already.
    """
    width, scored, read = budget.width, 0, 0
    while True:
        found, first = first or search_row(chain, queries, width, budget.most, new=new), None
        if copied:
            found = _without_copies(found, copied)
        for _, result in found:
            scored += result.scored
            read += result.read_bytes or 0
        if not budget.weighs:
            parts = [RetrievedPart(extent, r.ids, r.bias, r.scores) for extent, r in found]
            return Retrieved(parts, scored, read_bytes=read)
        ranked = [result.ids for _, result in found]
        logits = [logits_of_found(result, scale, softcap) for _, result in found]
        masks = cut(logits, budget, new=new, near=None if near is None else near())
        ids = [part.masked_fill(~kept, -1) for part, kept in zip(ranked, masks, strict=True)]
        if width >= budget.most or not _wants_more(found, ids, budget):
            cuts = zip(found, ids, strict=True)
            parts = [RetrievedPart(extent, kept, r.bias, r.scores) for (extent, r), kept in cuts]
            return Retrieved(parts, scored, ranked, read)
        width = min(4 * width, budget.most)


def logits_of_found(result: SearchResult, scale: float, softcap: float | None) -> Tensor:
    """[Hkv, M, K] float32, -inf for none."""
    logits = result.scores * scale
    if softcap is not None:  # what was not found stays -inf, which tanh would raise to -softcap
        logits = (softcap * torch.tanh(logits / softcap)).masked_fill(result.ids < 0, -torch.inf)
    return logits if result.bias is None else logits + result.bias


def _without(ids: Tensor, hidden: Tensor | None) -> Tensor:
    """Ids [Hkv, M, K] of a span with -1 for its entries [Hkv, n] that are hidden."""
    if hidden is None or not ids.numel():
        return ids
    there = hidden[:, None].expand(-1, ids.shape[1], -1).gather(-1, ids.clamp_min(0))
    return ids.masked_fill(there, -1)


def _without_copies(found: ByExtent, copied: Sequence[Tensor | None]) -> ByExtent:
    left = []
    for (extent, result), hidden in zip(found, copied, strict=True):
        ids = _without(result.ids, hidden)
        scores = result.scores.masked_fill(ids < 0, -torch.inf)
        left.append((extent, result._replace(ids=ids, scores=scores)))
    return left


def _wants_more(found: ByExtent, ids: list[Tensor], budget: TokenBudget) -> bool:
    """Whether a query attends all that was ranked, of an extent that has more."""
    if budget.min_share is None:
        return False
    return any(
        kept.shape[-1] < min(budget.most, extent.length) and _all_kept(extent, result, kept)
        for (extent, result), kept in zip(found, ids, strict=True)
    )


def _all_kept(extent: ColdExtent, result: SearchResult, kept: Tensor) -> bool:
    """Whether a query found as many entries as it asked for, and attends them all.

    By pages it may have found fewer: the last one need not be full.
    """
    size = 1 if extent.index is None else extent.index.serving.page_tokens
    num_found, num_kept = ((ids >= 0).sum(-1) for ids in (result.ids, kept))
    return bool(((num_kept == num_found) & (num_found > kept.shape[-1] - size)).any())


def cut(
    logits: Sequence[Tensor], budget: TokenBudget, *, new: int, near: Tensor | None
) -> list[Tensor]:
    """Masks of the entries that a budget keeps, by part [Hkv, M, K] bool.

    Args:
        logits: by part [Hkv, M, K] float32 of the entries that were found, -inf for none.
        new: T; query m is that of token m % T, and heads share within a token.
        near: [Hkv, M] log-sum-exp of what is attended beside; None for nothing.
    """
    joined = logits[0] if len(logits) == 1 else torch.cat(list(logits), -1)
    total = joined.logsumexp(-1)
    if near is not None:
        total = torch.logaddexp(total, near)
    # Log shares; a head that found nothing has -inf everywhere, and no total to subtract.
    shares = joined - total.nan_to_num(neginf=0.0)[..., None]
    kept = joined > -torch.inf
    if budget.min_share:
        kept &= shares.exp() >= budget.min_share
    if budget.shared:
        kept &= _best_together(shares.masked_fill(~kept, -torch.inf), budget.top_k, new)
    return list(kept.split([part.shape[-1] for part in logits], -1))


def _best_together(shares: Tensor, top_k: int, new: int) -> Tensor:
    """The best top_k entries a head of each token, on average; [Hkv, M, K] bool."""
    heads, queries, count = shares.shape
    by_token = shares.unflatten(1, (-1, new)).movedim(2, 0)  # [T, Hkv, G, K]
    flat = by_token.flatten(1)
    budget = top_k * heads * (queries // new)
    if budget >= flat.shape[1]:
        return torch.ones_like(shares, dtype=torch.bool)
    kept = torch.zeros_like(flat, dtype=torch.bool)
    kept.scatter_(1, flat.topk(budget, sorted=False).indices, value=True)
    return kept.view(by_token.shape).movedim(0, 2).reshape(heads, queries, count)
