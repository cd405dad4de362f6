"""The cold side of a decode step: what the host finds, attends and estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hybrid_kv.attention import attend, empty_partial, merge_partials
from hybrid_kv.runtime.cold_plan import ColdPlan, cold_bytes
from hybrid_kv.runtime.retrieve import Retrieved, RetrievedPart, retrieve
from hybrid_kv.runtime.step import Step, stacked
from hybrid_kv.runtime.unread import by_index, by_moments
from hybrid_kv.store import Row
from hybrid_kv.transfer import Parcel
from hybrid_kv.types import PartialAttention, TokenBudget, Work

ColdBudget: TypeAlias = TokenBudget | Literal["all"]


class Asked(NamedTuple):
    """Queries [B, Hkv, M, D] in transfer to the host for one step; None where they are there."""

    queries: Parcel | None


def ask_cold(step: Step) -> Asked | None:
    """Sends the queries; None where no row is cold."""
    is_cold = False
    for row in step.layer.rows:
        for span in row.chain.spans:
            is_cold, index = True, span.extent.index
            if index is not None and index.builder.pending is not None:
                index.settle(span.extent.keys)
    if not is_cold:
        return None
    queries = None
    if not step.at_home:
        begin = step.phases.now()
        queries = step.executor.send(step.grouped)
        step.work.transfer_bytes += step.grouped.nbytes
        step.phases.book("transfer", begin)
    return Asked(queries)


def reads_all(budget: ColdBudget | None, stored: int) -> bool:
    """Whether a budget is for all stored entries, so that nothing has to be chosen."""
    return budget is not None and (budget == "all" or budget.top_k >= stored)


def attend_cold(
    step: Step,
    asked: Asked,
    budget: ColdBudget,
    near: Parcel | None,
    plans: Sequence[ColdPlan | None],
) -> PartialAttention:
    """Retrieved cold entries, or all of them, without those that the method keeps copies of.

    Args:
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
        if asked.queries is not None:
            step.work.transfer_bytes += q.nbytes  # as predicted, of the same shape
    if asked.queries is not None:
        begin = step.phases.now()
        q = asked.queries.open()
        step.phases.book("wait", begin)
    parts = []
    for row in step.layer.rows:
        number = row.number
        plan = plans[number]
        part = None if plan is None else plan.attend(step, q[number], step.ahead)
        if part is None:
            part = _attend_row(step, row, q[number], budget, near)
        parts.append(part)
    one = len(parts) == 1
    part = PartialAttention(parts[0].out[None], parts[0].lse[None]) if one else stacked(parts)
    if step.at_home:
        return part
    begin = step.phases.now()
    part = step.executor.deliver(part, step.q.device)
    step.work.transfer_bytes += part.out.nbytes + part.lse.nbytes
    step.phases.book("transfer", begin)
    return part


def _attend_row(
    step: Step,
    row: Row,
    q: Tensor,
    budget: ColdBudget,
    near: Parcel | None,
) -> PartialAttention:
    stored = row.chain.num_tokens
    if stored == 0:
        return empty_partial(q)
    if budget == "all" or budget.top_k >= stored:
        return _attend_all(step, row, q)
    ahead = step.ahead
    spans, begin = row.chain.spans, step.phases.now()
    first = None if ahead is None else ahead.ranked(row, q, budget)
    if step.asked is not None:
        first = row.chain.search(q, budget.width, budget.most, first=step.asked)
    plain = not budget.weighs and row.copied is None and first is None
    if plain and len(spans) == 1:  # nearly every step
        result = spans[0].search(q, budget.width, budget.most, step.new)
        only = RetrievedPart(spans[0].extent, result.ids, result.bias, result.scores)
        found = Retrieved([only], result.scored, read_bytes=result.read_bytes or 0)
    else:
        found = retrieve(
            *(row.chain, q, budget),
            new=step.new,
            scale=step.scale,
            softcap=step.softcap,
            near=None if near is None else lambda: near.open()[row.number],
            copied=() if row.copied is None else row.chain.by_span(row.copied),
            first=first,
        )
    if ahead is not None:
        ahead.compare(row, q, found, step.scale, step.softcap)
    step.phases.book("search", begin)
    step.work.scored += found.scored
    step.work.search_bytes += found.read_bytes
    _count_found(step, row, found.parts)
    parts = [_attend_found(step, q, part) for part in found.parts]
    if budget.estimate:
        guesses = _estimates(step, row, q, budget, found.parts)
        parts += [PartialAttention(out.to(q.dtype), lse) for out, lse in guesses]
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
) -> list[PartialAttention]:
    """By extent what nobody attends of it, as an estimate, on the host."""
    begin = step.phases.now()
    if budget.estimate == "index":
        guesses = by_index(step, row, q, found)
    else:
        assert budget.form is not None
        guesses = by_moments(step, row, q, budget.form, found)
    step.phases.book("search", begin)
    return guesses


def _count_found(step: Step, row: Row, found: Sequence[RetrievedPart]) -> None:
    total, most = counted(found)
    count_cold(step.work, total, most)
    step.work.cold_bytes += cold_bytes(step, row, total)


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


def _attend_found(step: Step, q: Tensor, found: RetrievedPart) -> PartialAttention:
    extent, ids, bias, _ = found
    if 0 in ids.shape:
        return empty_partial(q)
    begin = step.phases.now()
    part = step.ops.attend_retrieved(
        q, extent.k, extent.v, ids, scale=step.scale, softcap=step.softcap, bias=bias
    )
    step.phases.book("cold_attention", begin)
    return part


def _attend_all(step: Step, row: Row, q: Tensor) -> PartialAttention:
    parts = []
    for span, hidden in zip(row.chain.spans, row.chain.by_span(row.copied), strict=True):
        k, v = span.extent.first(span.length)
        begin = step.phases.now()
        part = attend(
            step.ops,
            *(q[None], k[None], v[None]),
            scale=step.scale,
            softcap=step.softcap,
            bias=None if hidden is None else _hiding(hidden, q.shape[1]),
        )
        step.phases.book("cold_attention", begin)
        parts.append(PartialAttention(part.out[0], part.lse[0]))
    _count_all(step, row, q)
    return merge_partials(parts, ops=step.ops)


def _hiding(hidden: Tensor, num_queries: int) -> Tensor:
    """A bias [1, Hkv, M, N] that hides entries [Hkv, N] bool from all queries."""
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return bias[:, None].expand(-1, num_queries, -1)[None]


def _count_all(step: Step, row: Row, q: Tensor) -> None:
    """Books all cold entries of a row but those that the method keeps copies of."""
    stored, (heads, queries, _) = row.chain.num_tokens, q.shape
    if row.copied is None:
        total, most = stored * heads, stored
    else:
        left = (~row.copied).sum(-1)
        total, most = int(left.sum()), int(left.max())
    count_cold(step.work, total * queries, most)
    step.work.cold_bytes += total * step.row_bytes
