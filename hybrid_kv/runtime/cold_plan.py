"""The cold entries of a row as one call of the engine: searched, ranked, attended, estimated.

That is the host's part of a step whose model computes on a device, where it is all that the device
waits for; and of steps of several rows or tokens. `EnginePlan` makes whole steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_kv.ops.native.library import pool_here
from hybrid_kv.ops.native.step import LayerPlan, StepResult
from hybrid_kv.runtime.engine_plan import SearchedEntries
from hybrid_kv.runtime.step import ColdBudget, Step
from hybrid_kv.store import Row
from hybrid_kv.transfer import Transfer
from hybrid_kv.types import PartialAttention, SearchResult


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
