"""What a search left, attended as an estimate of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_kv.errors import MethodError
from hybrid_kv.ops.ranking import rank_named
from hybrid_kv.ops.tail import capped
from hybrid_kv.runtime.retrieve import RetrievedPart
from hybrid_kv.runtime.step import Step
from hybrid_kv.store import Row
from hybrid_kv.types import PartialAttention


def by_index(
    step: Step, row: Row, q: Tensor, found: Sequence[RetrievedPart]
) -> list[PartialAttention]:
    """By extent what its index knows of the entries that were not found; see `Index.estimate`.

    Raises:
        MethodError: the device attends some of them, which would count twice.
    """
    if row.hot.capacity or row.copied is not None:
        raise MethodError(
            "estimate 'index' must go with a placement without hot_tokens and copies, got "
            f"{row.hot.capacity} hot pages in row {row.number}: what the device attends would be "
            "estimated as well; choose estimate 'gaussian' or 'none'"
        )
    for span, part in zip(row.chain.spans, found, strict=True):
        if span.extent.index is not None:
            count = int((part.ids >= 0).sum())
            step.work.estimate_bytes += span.extent.index.estimate_bytes(q.shape[1], count)
    return [
        span.estimate(q, part.ids, scale=step.scale, softcap=step.softcap)
        for span, part in zip(row.chain.spans, found, strict=True)
    ]


def by_moments(
    step: Step,
    row: Row,
    q: Tensor,
    found: Sequence[RetrievedPart],
    attended: Sequence[Tensor],
    taken: Tensor | None,
) -> list[PartialAttention]:
    """By extent what the moments of its entries say of those that nobody attended; see `Tail`.

    Args:
        q: [Hkv, M, D] on the host.
        attended: by extent ids like those that were found, -1 for what the device attends.
        taken: [Hkv, T, H] bool, the hot pages that the device attends; None for all of them.

    Raises:
        MethodError: what was found are samples, which weigh for the others already.
    """
    if any(part.bias is not None for part in found):
        raise MethodError(
            "estimate 'gaussian' must go with an index that ranks, got one whose samples stand for "
            f"what is left, in layer {step.layer.shape.layer_idx}; choose estimate 'none'"
        )
    limit = _lowest_logit(step, q, found)
    beside = _attended_beside(step, row, q, taken)
    parts = []
    for span, ids, there in zip(row.chain.spans, attended, beside, strict=True):
        left = (span.length - there - (ids >= 0).sum(-1)).clamp_min(0)
        parts.append(
            span.tail(q.device).attend(q, left, limit, scale=step.scale, softcap=step.softcap)
        )
    return parts


def _lowest_logit(step: Step, q: Tensor, found: Sequence[RetrievedPart]) -> Tensor:
    """[Hkv, M] of all that was found, +inf for nothing."""
    lowest = torch.full(q.shape[:2], torch.inf)
    for part in found:
        ids, scores = part.ids, part.scores
        if 0 in ids.shape:
            continue
        if scores is None:  # whole pages, which nobody ranked
            ids, scores = rank_named(q, part.extent.keys, ids, ids.shape[-1])
        lowest = torch.minimum(lowest, scores.masked_fill(ids < 0, torch.inf).amin(-1))
    return capped(step.scale * lowest, step.softcap)


def _attended_beside(step: Step, row: Row, q: Tensor, taken: Tensor | None) -> list[Tensor]:
    """By span how many of its entries the device attends for each query, [Hkv, M] or what expands
    to it: in hot pages, or as copies of its own.
    """
    spans, heads = row.chain.spans, q.shape[0]
    if not row.hot.capacity and row.copied is None:
        return [torch.zeros(heads, 1, dtype=torch.int64)] * len(spans)
    copied = row.copied_by_span()
    counts = [
        torch.zeros(heads, 1, dtype=torch.int64) if c is None else c.sum(-1, keepdim=True)
        for c in copied
    ]
    if not len(row.hot):
        return counts
    pages, first = torch.tensor(row.hot.pages), row.chain.first_pages(row.page_size)
    all_taken = torch.ones(heads, step.new, len(pages), dtype=torch.bool)
    taken = all_taken if taken is None else taken
    for number in range(len(spans)):
        own = (pages >= first[number]) & (pages < first[number + 1])
        hot = row.page_size * taken[..., own].sum(-1).repeat(1, q.shape[1] // step.new)
        counts[number] = counts[number] + hot
    return counts
