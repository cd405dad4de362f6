"""Which cold entries a query attends: what the index finds, cut to the budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_kv.runtime.share import cut
from hybrid_kv.store import ColdChain, ColdExtent, Span
from hybrid_kv.types import SearchResult, TokenBudget


class RetrievedPart(NamedTuple):
    """What queries attend of one extent.

    ids: [Hkv, M, K] of its entries, -1 for none. bias: [Hkv, M, K] float32 log weights, or None.
    scores: [Hkv, M, K] float32 dot products of these, or more of them; None where nobody knows.
    """

    extent: ColdExtent
    ids: Tensor
    bias: Tensor | None = None
    scores: Tensor | None = None


class Retrieved(NamedTuple):
    """What one row's queries attend.

    parts: by extent of the row.
    scored, read_bytes: dot products spent on finding them, and what the searches read.
    ranked: ids like those of parts, before they were cut to the budget; None if nothing was cut.
    estimated: [Hkv, M] float32, log-sum-exp of what is estimated of the unread entries, by whoever
        looks at the step; None for nothing.
    """

    parts: list[RetrievedPart]
    scored: int = 0
    ranked: list[Tensor] | None = None
    read_bytes: int = 0
    estimated: Tensor | None = None


def retrieve(
    chain: ColdChain,
    queries: Tensor,
    budget: TokenBudget,
    *,
    new: int = 1,
    scale: float,
    softcap: float | None = None,
    near: Callable[[], Tensor] | None = None,
    chosen: Mapping[int, Tensor] | None = None,
    copied: Sequence[Tensor | None] = (),
    first: list[tuple[ColdExtent, SearchResult]] | None = None,
) -> Retrieved:
    """Searches a row's cold entries, again and wider where `budget.min_share` asks for more.

    Args:
        queries: [Hkv, M, D] on the host.
        new: T; query m is that of token m % T.
        scale, softcap: what turns a score into a logit.
        near: gives the log-sum-exp [Hkv, M] of what is attended beside, asked for after the search
            where weights count; None for nothing.
        chosen: ids [Hkv, M, K] of extents, by their number in the row, whose entries are chosen
            already; the budget is that of the others.
        copied: by span which of its entries [Hkv, n] bool are attended elsewhere; empty for none.
        first: what the first search would give, where that is known already.
    """
    spans, chosen = chain.spans, chosen or {}
    if copied:
        chosen = {n: _without(ids, copied[n]) for n, ids in chosen.items()}
    if len(chosen) == len(spans):
        return Retrieved([RetrievedPart(span.extent, chosen[n]) for n, span in enumerate(spans)])
    width, scored, read = budget.width, 0, 0
    while True:
        found, first = first or chain.search(queries, width, budget.most, chosen, new=new), None
        if copied:
            found = _without_copies(found, [c for n, c in enumerate(copied) if n not in chosen])
        for _, result in found:
            scored += result.scored
            read += result.read_bytes or 0
        if not budget.weighs:
            parts = [RetrievedPart(extent, r.ids, r.bias, r.scores) for extent, r in found]
            return Retrieved(_with_chosen(spans, parts, chosen), scored, read_bytes=read)
        ranked = [result.ids for _, result in found]
        logits = [logits_of_found(result, scale, softcap) for _, result in found]
        masks = cut(logits, budget, new=new, near=None if near is None else near())
        ids = [part.masked_fill(~kept, -1) for part, kept in zip(ranked, masks, strict=True)]
        if width >= budget.most or not _wants_more(found, ids, budget):
            cuts = zip(found, ids, strict=True)
            parts = [RetrievedPart(extent, kept, r.bias, r.scores) for (extent, r), kept in cuts]
            before = None if chosen else ranked
            return Retrieved(_with_chosen(spans, parts, chosen), scored, before, read)
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


def _without_copies(
    found: list[tuple[ColdExtent, SearchResult]], copied: Sequence[Tensor | None]
) -> list[tuple[ColdExtent, SearchResult]]:
    left = []
    for (extent, result), hidden in zip(found, copied, strict=True):
        ids = _without(result.ids, hidden)
        scores = result.scores.masked_fill(ids < 0, -torch.inf)
        left.append((extent, result._replace(ids=ids, scores=scores)))
    return left


def _wants_more(
    found: list[tuple[ColdExtent, SearchResult]], ids: list[Tensor], budget: TokenBudget
) -> bool:
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
    size = 1 if extent.index is None else extent.index.page_tokens
    num_found, num_kept = ((ids >= 0).sum(-1) for ids in (result.ids, kept))
    return bool(((num_kept == num_found) & (num_found > kept.shape[-1] - size)).any())


def _with_chosen(
    spans: Sequence[Span], parts: list[RetrievedPart], chosen: Mapping[int, Tensor]
) -> list[RetrievedPart]:
    if not chosen:
        return parts
    searched = iter(parts)
    return [
        RetrievedPart(span.extent, chosen[number]) if number in chosen else next(searched)
        for number, span in enumerate(spans)
    ]


def entries_of(pages: Tensor, span: Span, group_size: int) -> Tensor:
    """Ids [Hkv, M, C * S] of the entries in pages [Hkv, T, C] of an extent; -1 beyond the row's."""
    size = 1 if span.extent.index is None else span.extent.index.page_tokens
    ids = (pages[..., None] * size + torch.arange(size)).flatten(2)
    return ids.masked_fill(ids >= span.length, -1).repeat(1, group_size, 1)
