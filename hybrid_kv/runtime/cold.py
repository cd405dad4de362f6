"""The cold side of a decode step: what the host finds, attends and estimates.

`ColdPlan` has the engine do all of that for a row in one call: the host's part of a step whose
model computes on a device, where it is all that the device waits for, and of steps of several rows
or tokens. `EnginePlan` makes whole steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hybrid_kv.errors import MethodError
from hybrid_kv.ops.native.library import pool_here
from hybrid_kv.ops.native.step import LayerPlan, StepResult
from hybrid_kv.ops.tail import AttendedSums, Form, Tail, capped
from hybrid_kv.runtime.engine_plan import SearchedEntries
from hybrid_kv.runtime.step import (
    ColdBudget,
    Step,
    attend,
    count_cold,
    empty_partial,
    merge_partials,
    stacked,
)
from hybrid_kv.store import ColdExtent, Retrieved, RetrievedPart, Row
from hybrid_kv.store.search import (
    ByExtent,
    by_span,
    estimate_unread,
    retrieve,
    search_extent,
    search_row,
    tail_without,
)
from hybrid_kv.transfer import Transfer
from hybrid_kv.types import PartialAttention, SearchResult, TokenBudget


class ColdPlan:
    """The cold part of a row's steps, one call each.

    Args:
        told: the engine's descriptor of the entries.
    """

    def __init__(self, told: LayerPlan, row: Row, searched: SearchedEntries) -> None:
        self._told, self._row, self._searched = told, row, searched

    @classmethod
    def of(cls, step: Step, budget: ColdBudget, row: Row) -> ColdPlan | None:
        """Of a row in steps like this one; None where its cold part is no call of the engine."""
        if row.placement is None:
            return None
        searched = SearchedEntries.of(row, budget)
        if searched is None:
            return None
        cold = searched.entries()
        if cold is None:
            return None
        heads = step.layer.shape.num_kv_heads
        shape = heads, step.q.shape[1] // heads * step.new, step.q.shape[3]
        queries = torch.empty(shape, dtype=step.q.dtype)  # the host's; step.q may lie on a device
        told = step.ops.plan_step(queries, None, cold, None)
        return None if told is None else cls(told, row, searched)

    def follow(self) -> bool:
        """Takes up how many entries there are; False where they are searched in another way."""
        cold = self._searched.entries()
        if cold is not None:
            self._told.take_cold(cold)
        return cold is not None

    def described(self) -> list[tuple[str, object]]:
        """The fields of the engine's descriptor, with their values."""
        return self._told.described()

    def attend(
        self,
        step: Step,
        q: Tensor,
        near: Transfer | None = None,
        *,
        named: Sequence[SearchResult] | None = None,
    ) -> PartialAttention:
        """Attention of the row's queries [Hkv, M, D] on the host, out and lse as these.

        Args:
            near: no budget that the engine searches for asks for it.
            named: by extent entries of which the best are attended; None searches.
        """
        row, searched, told = self._row, self._searched, self._told
        begin, estimated = step.phases.now(), searched.estimated(step)
        done = told.attend(
            q,
            tail_fill=0,
            scale=step.scale,
            softcap=step.softcap,
            warm=searched.ask(told, step, q) if named is None else None,
            named=None if named is None else searched.numbered(named),
            found=None if step.asked is None else (step.asked.ids, step.asked.scores),
            estimated=estimated,
            pool=pool_here(),
        )
        known = named or ([] if step.asked is None else [step.asked])
        if named is None:
            read = told.search_bytes(done.report.scored, asked=step.asked is not None)
        else:
            read = done.report.scored * step.row_bytes // 2
        done.report.scored += sum(result.scored for result in known)
        step.work.search_bytes += read + sum(result.read_bytes or 0 for result in known)
        step.work.estimate_bytes += told.estimate_bytes
        _count(step, row, done)
        searched.take_up(told, step, row, done, estimated)
        times = done.report
        parts = ("search", times.search_s), ("cold_attention", times.cold_s + times.merge_s)
        step.phases.book_parts(begin, parts)
        return done.part


def _count(step: Step, row: Row, done: StepResult) -> None:
    work, report = step.work, done.report
    work.cold_bytes += cold_bytes(step, row, report.retrieved)
    work.scored += report.scored
    work.attended += report.retrieved
    work.retrieved += report.retrieved
    work.most_retrieved = max(work.most_retrieved, report.most_retrieved)


def cold_bytes(step: Step, row: Row, retrieved: int) -> int:
    """Bytes of the values of what a search has found for all query heads of a row together."""
    stored = row.chain.num_tokens * step.layer.shape.num_kv_heads
    return min(retrieved, stored) * step.row_bytes // 2


class Asked(NamedTuple):
    """Queries [B, Hkv, M, D] in transfer to the host for one step; None where they are there."""

    queries: Transfer | None


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


class ColdPart(Protocol):
    """The cold entries of one row, in steps like the one that it was made for."""

    def follow(self) -> bool:
        """Takes up how many entries there are; False: it has to be made anew."""
        ...

    def described(self) -> list[tuple[str, object]]:
        """The fields, with their values, that whoever attends was told beforehand."""
        ...

    def attend(self, step: Step, q: Tensor, near: Transfer | None) -> PartialAttention:
        """Attention of the row's queries [Hkv, M, D] on the host, out and lse as these.

        Args:
            near: see `attend_cold`.
        """
        ...


def attend_cold(
    step: Step, asked: Asked, near: Transfer | None, parts: Sequence[ColdPart]
) -> PartialAttention:
    """Retrieved cold entries, or all of them, without those that the method keeps copies of.

    Args:
        near: [B, Hkv, M] log-sum-exp of what the device attends, opened when the search is over;
            None for nothing.
        parts: by row.

    Returns:
        out [B, Hkv, M, D], lse [B, Hkv, M] on the query's device.
    """
    q = step.grouped
    if asked.queries is not None:
        begin = step.phases.now()
        q = asked.queries.open()
        step.phases.book("wait", begin)
    found = [part.attend(step, own, near) for part, own in zip(parts, q, strict=True)]
    part = stacked(found)
    if step.at_home:
        return part
    begin = step.phases.now()
    part = step.executor.deliver(part, step.q.device)
    step.work.transfer_bytes += part.out.nbytes + part.lse.nbytes
    step.phases.book("transfer", begin)
    return part


class ColdOps:
    """The cold entries of a row op by op: the definition of a `ColdPart`."""

    def __init__(self, row: Row, budget: ColdBudget) -> None:
        self._row, self._budget = row, budget

    def follow(self) -> bool:
        return False  # what was asked by Python may be asked otherwise now

    def described(self) -> list[tuple[str, object]]:
        return []

    def attend(self, step: Step, q: Tensor, near: Transfer | None) -> PartialAttention:
        row, budget = self._row, self._budget
        stored = row.chain.num_tokens
        if stored == 0:
            return empty_partial(q)
        if budget == "all" or budget.top_k >= stored:
            return _attend_all(step, row, q)
        return self.attend_found(step, q, self.search(step, q, near))

    def search(
        self, step: Step, q: Tensor, near: Transfer | None, first: ByExtent | None = None
    ) -> Retrieved:
        """Entries that the row's queries retrieve under a budget of tokens.

        Args:
            first: what a search would find, where that is known; None searches.
        """
        row, budget, begin = self._row, self._budget, step.phases.now()
        assert isinstance(budget, TokenBudget)
        if step.asked is not None:
            first = search_row(row.chain, q, budget.width, budget.most, first=step.asked)
        spans = row.chain.spans
        if not budget.weighs and row.copied is None and first is None and len(spans) == 1:
            (span,) = spans  # nearly every step
            result = search_extent(span, q, budget.width, budget.most, step.new)
            only = RetrievedPart(span.extent, result.ids, result.bias, result.scores)
            found = Retrieved([only], result.scored, read_bytes=result.read_bytes or 0)
        else:
            found = retrieve(
                *(row.chain, q, budget),
                new=step.new,
                scale=step.scale,
                softcap=step.softcap,
                near=None if near is None else lambda: near.open()[row.number],
                copied=row.copied,
                first=first,
            )
        step.phases.book("search", begin)
        return found

    def attend_found(self, step: Step, q: Tensor, found: Retrieved) -> PartialAttention:
        """Attention over what was retrieved, and the estimate of the rest where one is wanted."""
        row, budget = self._row, self._budget
        assert isinstance(budget, TokenBudget)
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
    for span, hidden in zip(row.chain.spans, by_span(row.chain, row.copied), strict=True):
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


# What a search left -------------------------------------------------------------------------------


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
        estimate_unread(span, q, part.ids, scale=step.scale, softcap=step.softcap, new=step.new)
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
    span, hidden = row.chain.spans[number], by_span(row.chain, row.copied)[number]
    if hidden is None or not bool(hidden.any()):
        count = torch.full((span.extent.k.shape[0], 1), span.length)
        return span.tail(torch.device("cpu")), count
    return tail_without(span, hidden), span.length - hidden.sum(-1, keepdim=True)
