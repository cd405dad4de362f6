"""The cold side of a decode step: what the host finds, and who attends it.

A found entry is attended once: by the device where it lies in a hot page that the device attends
for the same KV head and token, else here. So nothing that was found is lost, whatever Quest chose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.attention import attend, attend_retrieved, empty_partial, merge_partials
from hybrid_kv.runtime.fetch import fetch
from hybrid_kv.runtime.retrieve import Retrieved, entries_of, retrieve
from hybrid_kv.runtime.step import Step, stacked
from hybrid_kv.store import ColdExtent
from hybrid_kv.transfer import Parcel
from hybrid_kv.types import PartialAttention, TokenBudget, Work

ColdBudget: TypeAlias = TokenBudget | Literal["all"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What left for the host when a step began.

    queries: [B, Hkv, M, D]. pages: by row and extent, where the queries' device has chosen them:
    [Hkv, T, C] page numbers.
    """

    queries: Parcel
    pages: Sequence[Mapping[int, Parcel]]


def ask_cold(step: Step, budget: ColdBudget) -> Asked | None:
    """Sends the queries, and what they choose on their device; None where no row is cold."""
    if not any(step.layer.cold.rows):
        return None
    with step.phases.measure("transfer"):
        queries = step.executor.send(step.grouped)
    with step.phases.measure("select"):
        pages = [_choose_pages(step, row, budget) for row in range(step.layer.num_rows)]
    return Asked(queries, pages)


def _choose_pages(step: Step, row: int, budget: ColdBudget) -> dict[int, Parcel]:
    q, chosen, stored = step.grouped[row], {}, step.layer.cold.num_tokens(row)
    if _covers(budget, stored):
        return {}
    for number, span in enumerate(step.layer.cold.rows[row]):
        index = span.extent.index
        if index is not None and index.on_device:
            pages = index.choose_pages(q, step.q.shape[2])
            step.work.scored += len(q) * q.shape[1] * -(-len(index) // index.page_tokens)
            chosen[number] = step.executor.send(pages)
    return chosen


def _covers(budget: ColdBudget, stored: int) -> bool:
    """Whether a budget is for everything, so that nothing has to be chosen."""
    return budget == "all" or budget.top_k >= stored


def attend_cold(
    step: Step,
    asked: Asked,
    budget: ColdBudget,
    hot: Sequence[Parcel | None],
    near: Parcel | None = None,
) -> PartialAttention:
    """Retrieved cold entries, or all of them, without those that the device attends.

    Args:
        hot: by row the hot pages [Hkv, T, H] bool that the device attends; None for all of them.
        near: [B, Hkv, M] log-sum-exp of what the device attends, opened when the search is over;
            None for nothing.

    Returns:
        out [B, Hkv, M, D], lse [B, Hkv, M] on the query's device.
    """
    with step.phases.measure("wait"):
        q = asked.queries.open()
        taken = [None if parcel is None else parcel.open() for parcel in hot]
        pages = [{n: parcel.open() for n, parcel in row.items()} for row in asked.pages]
    rows = [
        _attend_row(step, row, q[row], budget, pages[row], taken[row], near)
        for row in range(step.layer.num_rows)
    ]
    if _fetches(step):
        return stacked(rows)
    with step.phases.measure("transfer"):
        return step.executor.deliver(stacked(rows), step.q.device)


def _fetches(step: Step) -> bool:
    return step.layer.placement is not None and step.layer.placement.fetch


def _attend_row(
    step: Step,
    row: int,
    q: Tensor,
    budget: ColdBudget,
    pages: Mapping[int, Tensor],
    taken: Tensor | None,
    near: Parcel | None,
) -> PartialAttention:
    cold, new = step.layer.cold, step.q.shape[2]
    stored, near_q = cold.num_tokens(row), step.grouped[row] if _fetches(step) else q
    if stored == 0:
        return empty_partial(near_q)
    if budget == "all" or _covers(budget, stored):
        return _attend_all(step, row, near_q, taken)
    chosen = {
        number: entries_of(page, cold.rows[row][number], q.shape[1] // new)
        for number, page in pages.items()
    }
    with step.phases.measure("search"):
        found = retrieve(
            *(cold, row, q, budget),
            new=new,
            scale=step.scale,
            softcap=step.softcap,
            near=lambda: None if near is None else near.open()[row],
            chosen=chosen,
        )
    if step.found is not None:
        step.found[row] = (budget, found)
    step.work.scored += found.scored
    left = _leave_hot(step, row, found, taken)
    return merge_partials([_attend_found(step, near_q, *part) for part in left], ops=step.ops)


def _leave_hot(
    step: Step, row: int, found: Retrieved, taken: Tensor | None
) -> list[tuple[ColdExtent, Tensor]]:
    """The parts of what was found, with -1 for what the device attends."""
    cold, hot, size = step.layer.cold, step.layer.hot[row], step.layer.page_size
    if hot.capacity:
        parts, first_pages = [], cold.first_pages(row, size)
        for (extent, ids), span, first in zip(
            found.parts, cold.rows[row], first_pages, strict=False
        ):
            covered = hot.book(ids, first, span.length // size, taken)
            step.work.hot += int(covered.sum())
            parts.append((extent, ids.masked_fill(covered, -1)))
        found = Retrieved(parts)
    _count(step.work, *found.counted())
    return found.parts


def _count(work: Work, entries: int, most: int) -> None:
    """Books cold entries attended by all query heads of a row together, and by one at most."""
    work.attended += entries
    work.retrieved += entries
    work.most_retrieved = max(work.most_retrieved, most)


def _attend_found(step: Step, q: Tensor, extent: ColdExtent, ids: Tensor) -> PartialAttention:
    k, v = extent.keys, extent.values
    if _fetches(step):
        with step.phases.measure("transfer"):
            k, v, ids, count = fetch(step.ops, step.executor, extent, ids, q.device)
            step.work.fetched_bytes += count
    with step.phases.measure("cold_attention"):
        return attend_retrieved(step.ops, q, k, v, ids, scale=step.scale, softcap=step.softcap)


def _attend_all(step: Step, row: int, q: Tensor, taken: Tensor | None) -> PartialAttention:
    spans, parts = step.layer.cold.rows[row], []
    for span, hidden in zip(spans, _hide_hot(step, row, q, taken), strict=True):
        (k, v), bias = span.extent.first(span.length), hidden
        if _fetches(step):
            with step.phases.measure("transfer"):
                k, v = (step.executor.to_device(entries, q.device) for entries in (k, v))
                bias = None if hidden is None else step.executor.to_device(hidden, q.device)
            step.work.fetched_bytes += k.nbytes + v.nbytes
        with step.phases.measure("cold_attention"):
            part = attend(
                step.ops,
                *(q[None], k[None], v[None]),
                scale=step.scale,
                softcap=step.softcap,
                bias=bias,
            )
        parts.append(PartialAttention(part.out[0], part.lse[0]))
    return merge_partials(parts, ops=step.ops)


def _hide_hot(step: Step, row: int, q: Tensor, taken: Tensor | None) -> list[Tensor | None]:
    """For each extent of a row a bias [1, Hkv, M, N] that hides what the device attends, if it does
    attend any; counts what is left.
    """
    spans = step.layer.cold.rows[row]
    if not step.layer.hot[row].capacity:
        stored = step.layer.cold.num_tokens(row)
        _count(step.work, stored * q.shape[0] * q.shape[1], stored)
        return [None] * len(spans)
    every = [(span.extent, torch.arange(span.length).expand(*q.shape[:2], -1)) for span in spans]
    left = _leave_hot(step, row, Retrieved(every), taken)
    return [torch.zeros(ids.shape).masked_fill_(ids < 0, -torch.inf)[None] for _, ids in left]
