"""The cold entries of a row as one call of the engine: searched, ranked, attended, estimated.

That is the host's part of a step whose model computes on a device, where it is all that the device
waits for; and of steps of several rows or tokens. Where a layer was searched ahead, the call ranks
what was found in the place of a search. `OneCall` makes whole steps.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, TypeAlias

from torch import Tensor

from hybrid_kv.ops.native.step import LayerPlan, StepResult
from hybrid_kv.ops.native.workers import pool_here
from hybrid_kv.runtime.foreseen import Foreseen
from hybrid_kv.runtime.searched_entries import SearchedEntries
from hybrid_kv.runtime.step import Step
from hybrid_kv.store import Row
from hybrid_kv.types import PartialAttention, SearchResult, TokenBudget

ColdCalls: TypeAlias = defaultdict[int, "ColdCall"]
"""By row of a layer."""


class ColdCall:
    """The plan of a row's cold entries, made anew when what it describes has changed."""

    def __init__(self) -> None:
        self._plan: LayerPlan | None = None
        self._state: tuple[Any, ...] = ()
        self._keeps: SearchedEntries | None = None  # what is known by its id

    def attend(
        self, step: Step, row: Row, q: Tensor, budget: TokenBudget, ahead: Foreseen | None
    ) -> PartialAttention | None:
        """What the row's queries [Hkv, M, D] on the host attend, out and lse as these.

        None where the engine cannot say it: entries that the device attends too, budgets that weigh
        what was found, an index that only Python can ask, a layer on trial.
        """
        place = row.placement
        if row.hot.capacity or place is None or place.fetch:
            return None
        named: list[SearchResult] | None = None
        if ahead is not None:
            found = ahead.named(row, budget)
            if found is None:
                return None
            named = [result for _, result in found]
        searched = SearchedEntries.of(row, budget)
        plan = None if searched is None else self._plan_of(step, q, searched)
        if searched is None or plan is None:
            return None
        begin, estimated = step.phases.now(), searched.estimated(step, q)
        done = plan.attend(
            q,
            tail_fill=0,
            scale=step.scale,
            softcap=step.softcap,
            warm=searched.ask(plan, q) if named is None else None,
            named=None if named is None else searched.numbered(named),
            found=None if step.asked is None else (step.asked.ids, step.asked.scores),
            estimated=estimated,
            pool=pool_here(),
        )
        known = named or ([] if step.asked is None else [step.asked])
        if named is None:
            read = plan.search_bytes(done.report.scored, asked=step.asked is not None)
        else:
            read = done.report.scored * step.row_bytes // 2
        done.report.scored += sum(result.scored for result in known)
        step.work.search_bytes += read + sum(result.read_bytes or 0 for result in known)
        step.work.estimate_bytes += plan.estimate_bytes
        _count(step, row, done)
        searched.take_up(plan, step, row, done, estimated)
        times = done.report
        parts = ("search", times.search_s), ("cold_attention", times.cold_s + times.merge_s)
        step.phases.book_parts(begin, parts)
        return done.part

    def _plan_of(self, step: Step, q: Tensor, searched: SearchedEntries) -> LayerPlan | None:
        """None where there can be none."""
        state = (q.shape[1], *searched.state)
        if state != self._state:
            cold = searched.entries(len(q))
            self._plan = None if cold is None else step.ops.plan_step(q, None, cold, None)
            self._state, self._keeps = state, searched
        return self._plan


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
