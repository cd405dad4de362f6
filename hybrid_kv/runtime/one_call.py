"""A decode step of a layer as one call of the engine, where its descriptor can say what is read.

`decode` is the definition, and serves where this does not: several rows or new tokens, another
device, what was searched ahead, entries that a method keeps, hot pages, budgets that weigh what was
found, an index that only Python can ask. Of what it makes op by op, `ColdCall` makes the cold part
in one call where it can.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hybrid_kv.errors import NonFiniteError
from hybrid_kv.ops.native.step import LayerPlan, NewToken, ResidentPages, StepResult
from hybrid_kv.ops.native.workers import pool_here
from hybrid_kv.runtime.decode import pinned_pages
from hybrid_kv.runtime.finite import not_finite, of_layer
from hybrid_kv.runtime.searched_entries import SearchedEntries
from hybrid_kv.runtime.step import Step
from hybrid_kv.store import Row
from hybrid_kv.types import Demotion, PartialAttention, Read


def storable(step: Step) -> bool:
    """Whether a step's token could be stored by the call: in the last page of its only row."""
    rows, new = step.layer.rows, step.unstored
    alone = step.new == 1 and len(rows) == 1 and step.at_home and step.ahead is None
    return alone and new is not None and rows[0].table.takes(*new)


class OneCall:
    """The plan of a layer's only row, made anew when what it describes has changed.

    reason: why the last step was made op by op; "" where it was not, None before the first.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._plan: LayerPlan | None = None
        self._state: tuple[Any, ...] = ()
        self._keeps: tuple[Any, ...] = ()  # what is known by its id

    def attend(self, step: Step, read: Read) -> PartialAttention | None:
        """What `decode` returns; None where the engine cannot say this step, and then nothing was
        stored.

        The step's token is stored already, or `storable`.

        Raises:
            NonFiniteError: its key is not finite, and it was not stored.
        """
        rows = step.layer.rows
        if step.new != 1 or len(rows) != 1 or not step.at_home or step.ahead is not None:
            self.reason = _why_not_described(step)
            return None
        row, searched = rows[0], None
        if read.cold is not None and row.chain.num_tokens:
            searched = SearchedEntries.of(row, read.cold)
            if searched is None:
                self.reason = "its cold entries are not found by plain searches"
                return None
        plan = self._plan_of(step, row, searched)
        if plan is None:
            self.reason = step.ops.why_op_by_op or "its method or index is asked by Python"
            return None
        self.reason = ""
        begin = step.phases.now()
        new = None
        if step.unstored is not None:
            new, step.unstored = NewToken(*step.unstored, row.length), None
            row.count_token()
        try:
            total = _choose_pages(plan, row, read)
            estimated = None if searched is None else searched.estimated(step, step.grouped[0])
            done = _call(step, plan, row, searched, new, estimated)
        except BaseException:
            if new is not None:
                row.uncount_token()
            raise
        _count(step, row, total, plan, done)
        if searched is not None and done.ids is not None:
            searched.take_up(plan, step, row, done, estimated)
        times = done.report
        step.phases.book_parts(
            begin,
            (
                ("search", times.search_s),
                ("select", times.select_s),
                ("resident_attention", times.resident_s),
                ("cold_attention", times.cold_s),
                ("merge", times.merge_s),
            ),
        )
        return done.part

    def _plan_of(self, step: Step, row: Row, searched: SearchedEntries | None) -> LayerPlan | None:
        """None where there can be none."""
        table, queries = row.table, step.q.shape[1]
        pages, slots = table.pool.pages, table.slots()
        if searched is None:
            state: tuple[Any, ...] = (queries, id(pages), id(slots))
        else:
            state = (queries, id(pages), id(slots), *searched.state)
        if state != self._state:
            self._plan = _make_plan(step, row, searched)
            self._state, self._keeps = state, (pages, slots, searched)
        return self._plan


def _why_not_described(step: Step) -> str:
    if not step.at_home:
        return "the model computes on a device"
    if step.ahead is not None:
        return "it was searched ahead"
    return "several rows" if len(step.layer.rows) > 1 else "several new tokens"


def _make_plan(step: Step, row: Row, searched: SearchedEntries | None) -> LayerPlan | None:
    place, pages, slots = row.placement, row.table.pool.pages, row.table.slots()
    if place is None or place.rest is Demotion.ABSORB or place.fetch or row.hot.capacity:
        return None
    cold = None if searched is None else searched.entries(step.layer.shape.num_kv_heads)
    if searched is not None and cold is None:
        return None
    resident = ResidentPages(pages.k, pages.v, slots, pages.key_min, pages.key_max)
    return step.ops.plan_step(step.grouped[0], resident, cold, row.table.pool.writer)


def _choose_pages(plan: LayerPlan, row: Row, read: Read) -> int:
    """Says which pages are attended; returns how many tokens are."""
    table = row.table
    if read.pages != "all":
        size, (head, tail) = row.page_size, pinned_pages(row, 1)
        if head + tail + read.pages < len(table.pages):
            count = head + tail + read.pages
            plan.choose_pages(count, head, tail)
            return count * size - (size - table.tail_fill)
    plan.choose_pages(len(table.pages), 0, 1)
    return table.num_tokens


def _call(
    step: Step,
    plan: LayerPlan,
    row: Row,
    searched: SearchedEntries | None,
    new: NewToken | None,
    estimated: Tensor | None,
) -> StepResult:
    warm = None if searched is None else searched.ask(plan, step.grouped[0])
    try:
        return plan.attend(
            step.q,
            tail_fill=row.table.tail_fill,
            scale=step.scale,
            softcap=step.softcap,
            new=new,
            warm=warm,
            found=None if step.asked is None else (step.asked.ids, step.asked.scores),
            estimated=estimated,
            pool=pool_here(),
        )
    except NonFiniteError:
        raise not_finite(of_layer(step.layer.shape.layer_idx)) from None


def _count(step: Step, row: Row, resident: int, plan: LayerPlan, done: StepResult) -> None:
    """Without a call of anything: this is Python of every layer and step."""
    work, report, shape, table = step.work, done.report, step.layer.shape, row.table
    heads, entry = shape.num_q_heads, plan.entry_bytes
    scored, asked = report.scored, step.asked
    if resident < table.num_tokens:  # pages were chosen, by digests as wide as an entry
        pages = len(table.pages)
        scored -= heads * pages
        work.select_bytes += shape.num_kv_heads * pages * entry
    scanned, scores, walked = plan.read_costs[asked is not None]
    work.search_bytes += scanned + int(walked * max(0.0, scored - scores))
    if asked is not None:
        report.scored += asked.scored
        work.search_bytes += asked.read_bytes or 0
    work.resident_bytes += shape.num_kv_heads * resident * entry
    work.estimate_bytes += plan.estimate_bytes
    stored = row.chain.num_tokens * shape.num_kv_heads
    work.cold_bytes += min(report.retrieved, stored) * entry // 2
    work.scored += report.scored
    work.attended += report.retrieved + resident * heads
    work.retrieved += report.retrieved
    work.most_retrieved = max(work.most_retrieved, report.most_retrieved)
    work.visible += heads * row.length
    work.steps += heads
