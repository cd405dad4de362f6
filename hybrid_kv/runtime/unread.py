"""What a search left, attended as an estimate of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_kv.errors import MethodError
from hybrid_kv.ops.tail import AttendedSums, Form, Tail, capped
from hybrid_kv.runtime.retrieve import RetrievedPart
from hybrid_kv.runtime.step import Step
from hybrid_kv.store import ColdExtent, Row
from hybrid_kv.types import PartialAttention


def by_index(
    step: Step, row: Row, q: Tensor, found: Sequence[RetrievedPart]
) -> list[PartialAttention]:
    """By extent what its index knows of the entries that were not found; see `Index.estimate`.

    Raises:
        MethodError: the method keeps copies of some of them, which would count twice.
    """
    if row.copied is not None:
        raise MethodError(
            "estimate 'index' must go with a placement without copies, got some in row "
            f"{row.number}: what the method keeps would be estimated as well; choose estimate "
            "'gaussian' or 'none'"
        )
    for span, part in zip(row.chain.spans, found, strict=True):
        if span.extent.index is not None:
            count = int((part.ids >= 0).sum())
            step.work.estimate_bytes += span.extent.index.answers.estimate_bytes(q.shape[1], count)
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
) -> list[PartialAttention]:
    """By extent what the moments of its entries say of those that nobody attended; see `Tail`.

    Args:
        q: [Hkv, M, D] on the host.

    Raises:
        MethodError: what was found are samples, which weigh for the others already.
    """
    if any(part.bias is not None for part in found):
        raise MethodError(
            f"estimate '{form}' must go with an index that ranks, got one whose samples stand for "
            f"what is left, in layer {step.layer.shape.layer_idx}; choose estimate 'none'"
        )
    limit = _lowest_logit(step, q, found)
    parts = []
    for number, part in enumerate(found):
        known, count = _not_copied(row, number)
        step.work.estimate_bytes += known.nbytes
        asked = q, part.ids, limit
        parts.append(_unread_of(step, part.extent, known, count, form, *asked))
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
        if part.scores is not None and 0 not in part.ids.shape:
            scores = part.scores.masked_fill(part.ids < 0, torch.inf)
            lowest = torch.minimum(lowest, scores.amin(-1))
    return capped(step.scale * lowest, step.softcap)


def _not_copied(row: Row, number: int) -> tuple[Tail, Tensor]:
    """The moments of a span's entries that the method has no copies of, and how many they are,
    [Hkv, 1].
    """
    span, hidden = row.chain.spans[number], row.chain.by_span(row.copied)[number]
    if hidden is None or not bool(hidden.any()):
        count = torch.full((span.extent.k.shape[0], 1), span.length)
        return span.tail(torch.device("cpu")), count
    return span.tail_without(hidden), span.length - hidden.sum(-1, keepdim=True)
