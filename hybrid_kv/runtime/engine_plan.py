"""A decode step of a row as one call of the engine: append, search, rank, attend, merge.

`decode` is the definition, and serves where this does not; `compile_step` says where.
"""

from __future__ import annotations

from torch import Tensor

from hybrid_kv.errors import NonFiniteError
from hybrid_kv.ops.native.step import LayerPlan, NewToken, StepResult
from hybrid_kv.ops.native.workers import pool_here
from hybrid_kv.runtime.finite import not_finite, of_layer
from hybrid_kv.runtime.searched_entries import SearchedEntries
from hybrid_kv.runtime.step import Step, count_cold, pinned_pages, reads_all
from hybrid_kv.store import Row
from hybrid_kv.types import PartialAttention, Read

_NOTHING = (0, 0, 0)


class EnginePlan:
    """The steps of one token of a layer's only row, each one call.

    Args:
        told: the engine's descriptor of what the row holds.
        searched: its cold entries; None where none are searched.
        is_whole: whether all of them are attended instead.
    """

    reason = table = by_numbers = None

    def __init__(
        self,
        told: LayerPlan,
        row: Row,
        read: Read,
        searched: SearchedEntries | None,
        *,
        is_whole: bool,
    ) -> None:
        self._told, self._row, self._read, self._searched = told, row, read, searched
        self._table, self._is_whole = row.table, is_whole
        self._slots, self._chosen = row.table.slots(), _NOTHING
        self.takes = row.table.takes  # the call stores what the table has room for

    def follow(self) -> bool:
        """Takes up how many cold entries there are; False where they are read in another way."""
        row, searched, cold = self._row, self._searched, None
        whole: list[tuple[Tensor, Tensor]] = []
        if self._is_whole:
            if not reads_all(self._read.cold, row.chain.num_tokens):
                return False
            whole = row.chain.entries()
        elif searched is not None and (cold := searched.entries()) is None:
            return False
        self._told.take_cold(cold, whole)
        return True

    def described(self) -> list[tuple[str, object]]:
        """What the engine is told, field by field."""
        self._choose_pages()
        return self._told.described()

    def attend(self, step: Step) -> PartialAttention:
        """What `decode` returns.

        The step's token is stored already, or the plan `takes` it.

        Raises:
            NonFiniteError: its key is not finite, and it was not stored.
        """
        row, searched, begin = self._row, self._searched, step.phases.now()
        new = None
        if step.unstored is not None:
            new, step.unstored = NewToken(*step.unstored, row.length), None
            self._table.count(row.length)
            row.length += 1
        try:
            resident = self._choose_pages()
            estimated = None if step.found is None else self._estimated(step)
            done = self._call(step, new, estimated)
        except BaseException:
            if new is not None:
                row.length -= 1
                self._table.truncate(self._table.num_tokens - 1)
            raise
        _count(step, row, resident, self._told, done)
        if self._is_whole:
            heads, stored = step.layer.shape.num_kv_heads, row.chain.num_tokens
            count_cold(step.work, stored * step.layer.shape.num_q_heads, stored)
            step.work.cold_bytes += stored * heads * self._told.entry_bytes
        if searched is not None:
            searched.take_up(self._told, step, row, done, estimated)
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

    def _estimated(self, step: Step) -> Tensor | None:
        return None if self._searched is None else self._searched.estimated(step)

    def _choose_pages(self) -> int:
        """Says which pages are attended; returns how many tokens are."""
        table, budget, head, tail = self._table, self._read.pages, 0, 1
        count = every = len(table.pages)
        if budget != "all":
            sinks, window = pinned_pages(self._row, 1)
            if sinks + window + budget < every:
                head, tail, count = sinks, window, sinks + window + budget
        chosen = count, head, tail
        listed = table.listed
        if listed.num_pages != every or listed.last is not self._slots or chosen != self._chosen:
            self._slots, self._chosen = table.slots(), chosen  # hardly ever
            self._told.choose_pages(self._slots, *chosen)
        size = table.pool.page_size
        return table.num_tokens - (every - count) * size

    def _call(self, step: Step, new: NewToken | None, estimated: Tensor | None) -> StepResult:
        searched, told = self._searched, self._told
        warm = None if searched is None else searched.ask(told, step)
        try:
            return told.attend(
                step.q,
                tail_fill=self._table.tail_fill,
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
    scored, retrieved, asked = report.scored, report.retrieved, step.asked
    if resident < table.num_tokens:  # pages were chosen, by digests as wide as an entry
        pages = len(table.pages)
        scored -= heads * pages
        work.select_bytes += shape.num_kv_heads * pages * entry
    scanned, scores, walked = plan.read_costs[asked is not None]
    work.search_bytes += scanned
    if walked and scored > scores:
        work.search_bytes += int(walked * (scored - scores))
    if asked is not None:
        report.scored += asked.scored
        work.search_bytes += asked.read_bytes or 0
    work.resident_bytes += shape.num_kv_heads * resident * entry
    work.estimate_bytes += plan.estimate_bytes
    stored = row.chain.num_tokens * shape.num_kv_heads
    work.cold_bytes += min(retrieved, stored) * entry // 2
    work.scored += report.scored
    work.attended += retrieved + resident * heads
    work.retrieved += retrieved
    work.most_retrieved = max(work.most_retrieved, report.most_retrieved)
    work.visible += heads * row.length
    work.steps += heads
