"""What a search left, attended as an estimate of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_kv.errors import MethodError
from hybrid_kv.ops.tail import AttendedSums, Form, Tail, capped
from hybrid_kv.runtime.retrieve import RetrievedPart
from hybrid_kv.runtime.step import Step
from hybrid_kv.store import ColdExtent, Row, Span
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
        span.estimate(q, part.ids, scale=step.scale, softcap=step.softcap, new=step.new)
        for span, part in zip(row.chain.spans, found, strict=True)
    ]


def by_moments(
    step: Step,
    row: Row,
    q: Tensor,
    form: Form,
    found: Sequence[RetrievedPart],
    attended: Sequence[Tensor],
    taken: Tensor | None,
) -> list[PartialAttention]:
    """By extent what the moments of its entries say of those that nobody attended; see `Tail`.

    Where pages are chosen as a whole, nothing is known of the logits that were left: of their
    extents it is to "first_order".

    Args:
        q: [Hkv, M, D] on the host.
        attended: by extent ids like those that were found, -1 for what the device attends.
        taken: [Hkv, T, H] bool, the hot pages that the device attends; None for all of them.

    Raises:
        MethodError: what was found are samples, which weigh for the others already.
    """
    if any(part.bias is not None for part in found):
        raise MethodError(
            f"estimate '{form}' must go with an index that ranks, got one whose samples stand for "
            f"what is left, in layer {step.layer.shape.layer_idx}; choose estimate 'none'"
        )
    limit = _lowest_logit(step, q, found)
    forms: list[Form] = ["first_order" if part.scores is None else form for part in found]
    parts = []
    for number, ids in enumerate(attended):
        out, lse = torch.empty(*q.shape), torch.empty(q.shape[:2])
        known = _left_beside(row, number, taken)
        step.work.estimate_bytes += known[0][0].nbytes
        for token in range(len(known)):
            own = slice(token, None, len(known))
            moments, count = known[token]
            asked = q[:, own], ids[:, own], limit[:, own]
            extent = row.chain.spans[number].extent
            part = _unread_of(step, extent, moments, count, forms[number], *asked)
            out[:, own], lse[:, own] = part
        parts.append(PartialAttention(out, lse))
    return parts


def _unread_of(
    step: Step,
    extent: ColdExtent,
    known: Tail,
    count: Tensor,
    form: Form,
    q: Tensor,
    ids: Tensor,
    limit: Tensor,
) -> PartialAttention:
    """Of the `count` [Hkv, 1] entries of an extent that are not among `ids` [Hkv, M, K]."""
    scores, values = torch.zeros(q.shape[:2]), torch.zeros(q.shape)
    heads = torch.arange(len(q))[:, None]
    there = ids >= 0
    for query in range(q.shape[1] if ids.shape[-1] else 0):  # rows of one query at a time
        rows, mine = ids[:, query].clamp_min(0), there[:, query, :, None]
        total = (extent.values[heads, rows].float() * mine).sum(1)
        values[:, query] = total
        if form == "first_order":
            keys = (extent.keys[heads, rows].float() * mine).sum(1)
            scores[:, query] = (keys * q[:, query].float()).sum(-1)
    sums = AttendedSums(there.sum(-1), scores)
    part = known.attend(*(q, count, sums, limit), scale=step.scale, softcap=step.softcap, form=form)
    return part.without(values)


def _lowest_logit(step: Step, q: Tensor, found: Sequence[RetrievedPart]) -> Tensor:
    """[Hkv, M] of all that was found by rank, +inf for nothing."""
    lowest = torch.full(q.shape[:2], torch.inf)
    for part in found:
        ids, scores = part.ids, part.scores
        if 0 in ids.shape or scores is None:  # nobody ranked whole pages
            continue
        lowest = torch.minimum(lowest, scores.masked_fill(ids < 0, torch.inf).amin(-1))
    return capped(step.scale * lowest, step.softcap)


def _left_beside(row: Row, number: int, taken: Tensor | None) -> list[tuple[Tail, Tensor]]:
    """The moments of a span's entries that the device does not attend, and how many they are,
    [Hkv, 1]: by new token where their hot pages differ, else once.

    Entries that the device has copies of leave all moments, hot pages the means alone: which of
    them are attended changes from step to step.
    """
    span, hidden = row.chain.spans[number], row.copied_by_span()[number]
    heads = span.extent.k.shape[0]
    if hidden is None or not bool(hidden.any()):
        hidden, known = None, span.tail(torch.device("cpu"))
        count = torch.full((heads, 1), span.length)
    else:
        known = span.tail_without(hidden)
        count = span.length - hidden.sum(-1, keepdim=True)
    first = row.chain.first_pages(row.page_size)
    hot = [at for at, page in enumerate(row.hot.pages) if first[number] <= page < first[number + 1]]
    if not hot:
        return [(known, count)]
    sums = [_sums_of_page(row, span, row.hot.pages[at], first[number], hidden) for at in hot]
    nums, keys, values = (torch.stack(same, 1) for same in zip(*sums, strict=True))
    chosen = torch.ones(heads, 1, len(hot)) if taken is None else taken[..., hot].float()
    left = []
    for token in range(chosen.shape[1]):
        weight = chosen[:, token]
        num = (weight * nums).sum(1).long()
        gone = (weight[..., None] * keys).sum(1), (weight[..., None] * values).sum(1)
        rest = count[:, 0] - num
        left.append((known.less(count[:, 0], num, *gone), rest[:, None]))
    return left


def _sums_of_page(
    row: Row, span: Span, page: int, first_page: int, hidden: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a hot page the entries [Hkv] that are not hidden, and the sums of their keys and values
    [Hkv, D]; kept with the page, so that a step reads none of what the device attends.
    """
    begin = (page - first_page) * row.page_size
    rows = slice(begin, begin + row.page_size)

    def summed(visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = visible.float()[..., None]
        k, v = (weight * t[:, rows].float() for t in (span.extent.k, span.extent.v))
        return visible.sum(-1), k.sum(1), v.sum(1)

    if hidden is not None and bool(hidden[:, rows].any()):
        return summed(~hidden[:, rows])
    everything = torch.ones(span.extent.k.shape[0], row.page_size, dtype=torch.bool)
    return row.hot.summed(page, lambda: summed(everything))
