"""Cold entries asked op by op: searches of a row's extents, and what is known of unread entries.

The engine does all of this in its one call; `runtime.cold` does it where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from hybrid_kv.errors import IntegrityError
from hybrid_kv.ops.tail import Tail
from hybrid_kv.store.cold_tier import ColdChain
from hybrid_kv.store.extent import ColdExtent, ExtentView
from hybrid_kv.types import PartialAttention, SearchResult

ByExtent: TypeAlias = list[tuple[ColdExtent, SearchResult]]
"""Results of a search of a row, by extent."""


def search_row(
    chain: ColdChain,
    queries: Tensor,
    top_k: int,
    most: int | None = None,
    first: SearchResult | None = None,
    new: int = 1,
) -> ByExtent:
    """The best `top_k` entries of a row per query, by extent.

    Args:
        queries: [Hkv, M, D] on the host.
        most: as for `Index.search`.
        first: what a search of the first extent gives; None searches it.
        new: T; query m is that of token m % T.

    Returns:
        For each extent a result whose ids are rows of that extent, -1 (and score -inf)
        where another extent had the better entry.
    """
    most = top_k if most is None else most
    found = []
    for number, span in enumerate(chain.spans):
        known = first if number == 0 else None
        found.append((span.extent, known or search_extent(span, queries, top_k, most, new)))
    return best_of(found, most)


def search_extent(
    span: ExtentView, queries: Tensor, top_k: int, most: int, new: int = 1
) -> SearchResult:
    """The best entries that a row sees of an extent, for queries [Hkv, M, D]; see `Index.search`.

    Args:
        new: T; query m is that of token m % T.
    """
    extent, near = span.extent, span.near
    if extent.index is None:
        raise IntegrityError("the cold tier was searched, but its placement named no index")
    if new > 1 and extent.index.serving.joint:
        found = [search_extent(span, queries[:, token::new], top_k, most) for token in range(new)]
        return _interleaved(found)
    beyond = extent.length - span.length  # entries that this row does not see any more
    if near is not None and near.shape[1] != queries.shape[1]:
        near = None
    result = extent.index.search(queries, top_k + beyond, most + beyond, near)
    if result.read_bytes is None:
        row = queries.shape[2] * extent.keys.itemsize
        result = result._replace(read_bytes=result.scored * row)
    span.near = result.ids[..., :top_k]
    if not beyond:
        return result
    hidden = result.ids >= span.length
    scores = result.scores.masked_fill(hidden, -torch.inf)
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    ids = result.ids.masked_fill(hidden, -1).gather(-1, order)[..., :most]
    bias = None if result.bias is None else result.bias.gather(-1, order)[..., :most]
    return result._replace(ids=ids, scores=scores[..., :most], bias=bias)


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
