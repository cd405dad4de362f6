"""The cold side of a decode step: what the host finds, and who attends it.

A found entry is attended once: by the device where it lies in a hot page that the device attends
for the same KV head and token, else here. So nothing that was found is lost, whatever Quest chose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hybrid_kv.attention import attend, empty_partial, merge_partials
from hybrid_kv.runtime.cold_plan import ColdPlan, cold_bytes
from hybrid_kv.runtime.fetch import fetch
from hybrid_kv.runtime.retrieve import Retrieved, RetrievedPart, entries_of, retrieve
from hybrid_kv.runtime.step import Step, stacked
from hybrid_kv.runtime.unread import by_index, by_moments
from hybrid_kv.store import Row
from hybrid_kv.transfer import Parcel
from hybrid_kv.types import PartialAttention, TokenBudget, Work

ColdBudget: TypeAlias = TokenBudget | Literal["all"]

_NONE: Mapping[int, Tensor] = {}


@dataclass(frozen=True, slots=True)
class Asked:
    """What left for the host when a step began.

    queries: [B, Hkv, M, D]; None where they are there. pages: by row and extent, where the queries'
    device has chosen them: [Hkv, T, C] page numbers.
    """

    queries: Parcel | None
    pages: Sequence[Mapping[int, Parcel]]


def ask_cold(step: Step, budget: ColdBudget) -> Asked | None:
    """Sends the queries, and what they choose on their device; None where no row is cold."""
    rows, is_cold, choosing = step.layer.rows, False, False
    for row in rows:
        for span in row.chain.spans:
            is_cold, index = True, span.extent.index
            if index is not None:
                if index.is_building:
                    index.settle(span.extent.keys)
                choosing |= index.on_device
    if not is_cold:
        return None
    queries = None
    if not step.at_home:
        begin = step.phases.now()
        queries = step.executor.send(step.grouped)
        step.phases.book("transfer", begin)
    pages = [_choose_pages(step, row, budget) for row in rows] if choosing else ()
    return Asked(queries, pages)


def _choose_pages(step: Step, row: Row, budget: ColdBudget) -> Mapping[int, Parcel]:
    chosen: dict[int, Parcel] = {}
    if budget == "all" or reads_all(budget, row.chain.num_tokens):
        return chosen
    top_k = budget.top_k
    for number, span in enumerate(row.chain.spans):
        index = span.extent.index
        if index is not None and index.on_device:
            begin, q = step.phases.now(), step.grouped[row.number]
            pages = index.choose_pages(q, step.new)
            step.work.scored += len(q) * q.shape[1] * -(-len(index) // index.page_tokens)
            step.work.select_bytes += index.selection_bytes(q.shape[1], top_k)
            chosen[number] = step.executor.send(pages)
            step.phases.book("select", begin)
    return chosen


def reads_all(budget: ColdBudget | None, stored: int) -> bool:
    """Whether a budget is for all stored entries, so that nothing has to be chosen."""
    return budget is not None and (budget == "all" or budget.top_k >= stored)


def attend_cold(
    step: Step,
    asked: Asked,
    budget: ColdBudget,
    hot: Sequence[Parcel | None] | None,
    near: Parcel | None,
    plans: Sequence[ColdPlan | None],
) -> PartialAttention:
    """Retrieved cold entries, or all of them, without those that the device attends.

    Args:
        hot: by row the hot pages [Hkv, T, H] bool that the device attends; None for all of them.
        near: [B, Hkv, M] log-sum-exp of what the device attends, opened when the search is over;
            None for nothing.
        plans: by row its part as one call; None where it is made op by op.

    Returns:
        out [B, Hkv, M, D], lse [B, Hkv, M] on the query's device.
    """
    q = step.grouped
    if step.ahead is not None:
        begin = step.phases.now()
        step.ahead.wait()
        step.phases.book("wait", begin)
    taken: list[Tensor | None] = [None] * len(q)
    pages = [_NONE] * len(q)
    if hot is not None or asked.queries is not None or asked.pages:
        begin = step.phases.now()
        q = q if asked.queries is None else asked.queries.open()
        if hot is not None:
            taken = [None if parcel is None else parcel.open() for parcel in hot]
        if asked.pages:
            pages = [{n: parcel.open() for n, parcel in row.items()} for row in asked.pages]
        step.phases.book("wait", begin)
    parts = []
    for row in step.layer.rows:
        number = row.number
        plan = plans[number]
        part = None if plan is None else plan.attend(step, q[number], step.ahead)
        if part is None:
            own = q[number], budget, pages[number], taken[number]
            part = _attend_row(step, row, *own, near)
        parts.append(part)
    one = len(parts) == 1
    part = PartialAttention(parts[0].out[None], parts[0].lse[None]) if one else stacked(parts)
    if step.at_home or _fetches(step.layer.rows[0]):
        return part
    begin = step.phases.now()
    part = step.executor.deliver(part, step.q.device)
    step.phases.book("transfer", begin)
    return part


def _fetches(row: Row) -> bool:
    return row.placement is not None and row.placement.fetch


def _attend_row(
    step: Step,
    row: Row,
    q: Tensor,
    budget: ColdBudget,
    pages: Mapping[int, Tensor],
    taken: Tensor | None,
    near: Parcel | None,
) -> PartialAttention:
    stored = row.chain.num_tokens
    near_q = step.grouped[row.number] if _fetches(row) else q
    if stored == 0:
        return empty_partial(near_q)
    if budget == "all" or budget.top_k >= stored:
        return _attend_all(step, row, near_q, taken)
    ahead = None if pages else step.ahead
    spans, begin = row.chain.spans, step.phases.now()
    first = None if ahead is None else ahead.ranked(row, q, budget)
    if step.asked is not None:
        first = row.chain.search(q, budget.width, budget.most, first=step.asked)
    plain = not pages and not budget.weighs and row.copied is None and first is None
    if plain and len(spans) == 1:  # nearly every step
        result = spans[0].search(q, budget.width, budget.most, step.new)
        only = RetrievedPart(spans[0].extent, result.ids, result.bias, result.scores)
        found = Retrieved([only], result.scored, read_bytes=result.read_bytes or 0)
    else:
        group = q.shape[1] // step.new
        found = retrieve(
            *(row.chain, q, budget),
            new=step.new,
            scale=step.scale,
            softcap=step.softcap,
            near=None if near is None else lambda: near.open()[row.number],
            chosen={n: entries_of(page, spans[n], group) for n, page in pages.items()},
            copied=() if row.copied is None else row.copied_by_span(),
            first=first,
        )
    if ahead is not None:
        ahead.compare(row, q, found, step.scale, step.softcap)
    step.phases.book("search", begin)
    step.work.scored += found.scored
    step.work.search_bytes += found.read_bytes
    left = _leave_hot(step, row, found, taken)
    parts = [_attend_found(step, row, near_q, part) for part in left]
    if budget.estimate:
        guesses = _estimates(step, row, q, budget, found.parts, left, taken)
        parts += _as_queries(step, row, q, guesses)
        if step.found is not None:
            lses = torch.stack([guess.lse for guess in guesses])
            found = found._replace(estimated=lses.logsumexp(0))
    if step.found is not None:
        step.found[row.number] = (budget, found)
    return parts[0] if len(parts) == 1 else merge_partials(parts, ops=step.ops)


def _estimates(
    step: Step,
    row: Row,
    q: Tensor,
    budget: TokenBudget,
    found: Sequence[RetrievedPart],
    left: Sequence[RetrievedPart],
    taken: Tensor | None,
) -> list[PartialAttention]:
    """By extent what nobody attends of it, as an estimate, on the host."""
    begin = step.phases.now()
    if budget.estimate == "index":
        guesses = by_index(step, row, q, found)
    else:
        assert budget.form is not None
        ids = [part.ids for part in left]
        guesses = by_moments(step, row, q, budget.form, found, ids, taken)
    step.phases.book("search", begin)
    return guesses


def _as_queries(
    step: Step, row: Row, q: Tensor, guesses: Sequence[PartialAttention]
) -> list[PartialAttention]:
    """Estimates in the dtype of the queries, where these are."""
    parts = [PartialAttention(out.to(q.dtype), lse) for out, lse in guesses]
    if not _fetches(row):
        return parts
    begin = step.phases.now()
    parts = [step.executor.deliver(part, step.q.device) for part in parts]
    step.phases.book("search", begin)
    return parts


def _leave_hot(step: Step, row: Row, found: Retrieved, taken: Tensor | None) -> list[RetrievedPart]:
    """The parts of what was found, with -1 for what the device attends."""
    if row.hot.capacity:
        parts, spans, size = [], row.chain.spans, row.page_size
        first_pages, copied = row.chain.first_pages(size), row.copied_by_span()
        for number, part in enumerate(found.parts):
            first, pages = first_pages[number], spans[number].length // size
            covered = row.hot.book(part.ids, first, pages, taken, copied[number])
            step.work.hot += int(covered.sum())
            parts.append(part._replace(ids=part.ids.masked_fill(covered, -1)))
        found = Retrieved(parts)
    total, most = counted(found.parts)
    count_cold(step.work, total, most)
    by_pages = [part for part in found.parts if part.scores is None]
    step.work.cold_bytes += cold_bytes(step, row, total - counted(by_pages)[0])
    if by_pages:  # whole, with their keys, and for all query heads of a KV head
        entries = counted(by_pages)[0] // step.layer.shape.group_size
        step.work.cold_bytes += entries * step.row_bytes
    return found.parts


def counted(parts: Sequence[RetrievedPart]) -> tuple[int, int]:
    """Entries of all queries together, and of a single query at most."""
    total = places = most = 0
    for _, ids, _, _ in parts:
        total += int(np.count_nonzero(ids.numpy() >= 0))
        places += ids.numel()
        most += ids.shape[-1]
    if total == places:  # nearly always as many as asked for
        return total, most
    found = torch.cat([ids >= 0 for _, ids, _, _ in parts], -1)
    return total, int(found.sum(-1).max())


def count_cold(work: Work, entries: int, most: int) -> None:
    """Books cold entries attended by all query heads of a row together, and by one at most."""
    work.attended += entries
    work.retrieved += entries
    work.most_retrieved = max(work.most_retrieved, most)


def _attend_found(step: Step, row: Row, q: Tensor, found: RetrievedPart) -> PartialAttention:
    extent, ids, bias, _ = found
    if 0 in ids.shape:
        return empty_partial(q)
    k, v = extent.k, extent.v
    if _fetches(row):
        begin = step.phases.now()
        k, v, ids, count = fetch(step.ops, step.executor, extent, ids, q.device)
        bias = None if bias is None else step.executor.to_device(bias, q.device)
        step.work.fetched_bytes += count
        step.phases.book("transfer", begin)
    begin = step.phases.now()
    part = step.ops.attend_retrieved(
        q, k, v, ids, scale=step.scale, softcap=step.softcap, bias=bias
    )
    step.phases.book("cold_attention", begin)
    return part


def _attend_all(step: Step, row: Row, q: Tensor, taken: Tensor | None) -> PartialAttention:
    spans, parts = row.chain.spans, []
    for span, hidden in zip(spans, _hide_attended(step, row, q, taken), strict=True):
        (k, v), bias = span.extent.first(span.length), hidden
        if _fetches(row):
            begin = step.phases.now()
            k, v = (step.executor.to_device(entries, q.device) for entries in (k, v))
            bias = None if hidden is None else step.executor.to_device(hidden, q.device)
            step.work.fetched_bytes += k.nbytes + v.nbytes
            step.phases.book("transfer", begin)
        begin = step.phases.now()
        part = attend(
            step.ops,
            *(q[None], k[None], v[None]),
            scale=step.scale,
            softcap=step.softcap,
            bias=bias,
        )
        step.phases.book("cold_attention", begin)
        parts.append(PartialAttention(part.out[0], part.lse[0]))
    return merge_partials(parts, ops=step.ops)


def _hide_attended(step: Step, row: Row, q: Tensor, taken: Tensor | None) -> list[Tensor | None]:
    """For each extent of a row a bias [1, Hkv, M, N] that hides what the device attends, if it does
    attend any; counts what is left.
    """
    spans = row.chain.spans
    if not row.hot.capacity and row.copied is None:
        stored = row.chain.num_tokens
        count_cold(step.work, stored * q.shape[0] * q.shape[1], stored)
        step.work.cold_bytes += stored * q.shape[0] * step.row_bytes
        return [None] * len(spans)
    every = []
    for span, hidden in zip(spans, row.copied_by_span(), strict=True):
        ids = torch.arange(span.length).expand(*q.shape[:2], -1)
        ids = ids if hidden is None else ids.masked_fill(hidden[:, None], -1)
        every.append(RetrievedPart(span.extent, ids))
    left = _leave_hot(step, row, Retrieved(every), taken)
    return [torch.zeros(ids.shape).masked_fill_(ids < 0, -torch.inf)[None] for _, ids, _, _ in left]
