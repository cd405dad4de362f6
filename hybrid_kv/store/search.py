"""Cold entries asked op by op: searches of a row's extents, cut to the budget, and unread entries.

The engine does all of this in its one call; `runtime.cold` does it where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from hybrid_kv.errors import IntegrityError
from hybrid_kv.ops.tail import Tail
from hybrid_kv.store.cold_tier import ColdChain
from hybrid_kv.store.extent import ColdExtent, ExtentView, Retrieved, RetrievedPart
from hybrid_kv.types import PartialAttention, SearchResult, TokenBudget

ByExtent: TypeAlias = list[tuple[ColdExtent, SearchResult]]
"""Results of a search of a row, by extent."""


def search_row(
    chain: ColdChain,
    queries: Tensor,
    top_k: int,
    most: int | None = None,
    first: SearchResult | None = None,
    new: int = 1,
    copied: Tensor | None = None,
) -> ByExtent:
    """The best `top_k` entries of a row per query, by extent.

    Args:
        queries: [Hkv, M, D] on the host.
        most: as for `Index.search`.
        new: T; query m is that of token m % T. first: what a search of the first extent gives.
        copied: [Hkv, entries] bool, which are attended elsewhere and not found; None for none.

    Returns:
        For each extent a result whose ids are rows of that extent, -1 (and score -inf)
        where another extent had the better entry.
    """
    most = top_k if most is None else most
    found = []
    for span, hidden in zip(chain.spans, by_span(chain, copied), strict=True):
        result, first = first or search_extent(span, queries, top_k, most, new, hidden), None
        found.append((span.extent, result))
    return best_of(found, most)


def search_extent(
    span: ExtentView,
    queries: Tensor,
    top_k: int,
    most: int,
    new: int = 1,
    copied: Tensor | None = None,
) -> SearchResult:
    """The best entries that a row sees of an extent, for queries [Hkv, M, D]; see `Index.search`.

    Args:
        new, copied: as for `search_row`; copied: [Hkv, length], of this extent.
    """
    extent, known = span.extent, span.near
    if extent.index is None:
        raise IntegrityError("the cold tier was searched, but its placement named no index")
    if new > 1 and extent.index.serving.joint:
        each = [queries[:, token::new] for token in range(new)]
        return _interleaved([search_extent(span, q, top_k, most, 1, copied) for q in each])
    beyond = extent.length - span.length  # entries that this row does not see any more
    copies = 0 if copied is None else span.length  # at most; to count them takes as long
    near = known if known is not None and known.shape[1] == queries.shape[1] else None
    scored, read, more = 0, 0, beyond + min(copies, top_k)
    while True:
        result = extent.index.search(queries, top_k + more, most + more, near)
        row = queries.shape[2] * extent.keys.itemsize
        scored += result.scored
        read += result.scored * row if result.read_bytes is None else result.read_bytes
        result = result._replace(scored=scored, read_bytes=read)
        span.near = result.ids[..., :top_k]
        if not more:
            return result
        ids = _seen(result.ids, span.length, copied)
        # Of an index that has found fewer than it was asked for nothing more is to be had.
        lacks = ((ids >= 0).sum(-1) < most) & (result.ids >= 0).all(-1)
        if more == beyond + copies or not lacks.any():
            break
        more = min(4 * more, beyond + copies)
    scores = result.scores.masked_fill(ids < 0, -torch.inf)
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)[..., :most]
    bias = None if result.bias is None else result.bias.gather(-1, order)[..., :most]
    return result._replace(ids=ids, scores=scores[..., :most], bias=bias)


def _seen(ids: Tensor, length: int, copied: Tensor | None) -> Tensor:
    """Ids [Hkv, M, K] of an extent with -1 for those from `length` on, and for copies."""
    ids = ids.masked_fill(ids >= length, -1)
    if copied is None or not length:
        return ids
    there = copied[:, None].expand(-1, ids.shape[1], -1).gather(-1, ids.clamp_min(0))
    return ids.masked_fill(there, -1)


def _interleaved(found: Sequence[SearchResult]) -> SearchResult:
    """Results for each of T tokens, [Hkv, G, K], from one search of [Hkv, G * T, K]."""

    def of_all(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts), 2).flatten(1, 2)

    biases = [one.bias for one in found if one.bias is not None]
    return found[0]._replace(
        ids=of_all([one.ids for one in found]),
        scores=of_all([one.scores for one in found]),
        bias=of_all(biases) if biases else None,
        scored=sum(one.scored for one in found),
        read_bytes=sum(one.read_bytes or 0 for one in found),
    )


def best_of(found: ByExtent, most: int) -> ByExtent:
    """The best `most` entries per query of all extents together; id -1, score -inf for others."""
    if len(found) < 2:
        return found
    scores = torch.cat([result.scores for _, result in found], -1)
    best = scores.topk(min(most, scores.shape[-1]), -1).indices
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, value=True)
    parts = kept.split([result.ids.shape[-1] for _, result in found], -1)
    return [
        (extent, _keep_only(result, keep))
        for (extent, result), keep in zip(found, parts, strict=True)
    ]


def _keep_only(result: SearchResult, keep: Tensor) -> SearchResult:
    ids = result.ids.masked_fill(~keep, -1)
    return result._replace(ids=ids, scores=result.scores.masked_fill(~keep, -torch.inf))


def by_span(chain: ColdChain, flags: Tensor | None) -> list[Tensor | None]:
    """Flags [Hkv, entries] of all entries as those of each span; None for none."""
    lengths = [span.length for span in chain.spans]
    return [None] * len(lengths) if flags is None else list(flags.split(lengths, 1))


def estimate_unread(
    span: ExtentView,
    queries: Tensor,
    found: Tensor,
    *,
    scale: float,
    softcap: float | None,
    new: int = 1,
) -> PartialAttention:
    """Attention over those entries of an extent that were not found; see `Index.estimate`.

    Args:
        new: as for `search_extent`.
    """
    extent = span.extent
    if extent.index is None:
        raise IntegrityError("an estimate was asked of a placement that named no index")
    estimate = partial(extent.index.answers.estimate, scale=scale, softcap=softcap)
    values = extent.v[:, : span.length]
    if new == 1 or not extent.index.serving.joint:
        return estimate(queries, found, values)
    own = [slice(token, None, new) for token in range(new)]
    parts = [estimate(queries[:, token], found[:, token], values) for token in own]
    return PartialAttention(
        torch.stack([part.out for part in parts], 2).flatten(1, 2),
        torch.stack([part.lse for part in parts], 2).flatten(1, 2),
    )


def tail_without(span: ExtentView, hidden: Tensor) -> Tail:
    """As `ExtentView.tail`, but for `hidden` [Hkv, length] bool of its entries; on the host.

    Computed anew where a sixteenth of what is hidden or of what there is has changed: the
    tensor is another one whenever something is hidden, and the entries number thousands.
    """
    if span.known_without is not None:
        before, known = span.known_without
        both = min(before.shape[1], hidden.shape[1])
        changed = 0 if before is hidden else int((before[:, :both] ^ hidden[:, :both]).sum())
        grown = known.is_outgrown(span.length) or before.shape[1] > hidden.shape[1]
        if not grown and 16 * changed <= int(hidden.sum()):
            return known
    known = Tail.of(*span.extent.first(span.length), hidden)
    span.known_without = hidden, known
    return known


# Retrieval: what the index finds, cut to the budget -----------------------------------------------
#
# A budget may be a share of the softmax. That needs everything that is attended beside, sinks and
# window too: the best cold entry of a head that looks at its sinks weighs nothing.


def retrieve(
    chain: ColdChain,
    queries: Tensor,
    budget: TokenBudget,
    *,
    new: int = 1,
    scale: float,
    softcap: float | None = None,
    near: Callable[[], Tensor] | None = None,
    copied: Tensor | None = None,
    first: ByExtent | None = None,
) -> Retrieved:
    """Searches a row's cold entries, again and wider where `budget.min_share` asks for more.

    Args:
        queries: [Hkv, M, D] on the host.
        new: T; query m is that of token m % T.
        scale, softcap: what turns a score into a logit.
        near: gives the log-sum-exp [Hkv, M] of what is attended beside, asked for after the search
            where weights count; None for nothing.
        copied: as for `search_row`.
        first: what the first search would give, where that is known already.
    """
    width, scored, read = budget.width, 0, 0
    while True:
        found = first or search_row(chain, queries, width, budget.most, None, new, copied)
        first = None
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
