"""A decode step of a row as one call of the engine: append, search, rank, attend, merge.

`decode` is the definition, and serves where this does not; `compile_step` says where.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid_kv.errors import NonFiniteError
from hybrid_kv.ops.native.library import pool_here
from hybrid_kv.ops.native.step import ColdEntries, ExtentEntries, LayerPlan, NewToken, StepResult
from hybrid_kv.runtime.step import Step, count_cold, name_of_new, pinned_pages, reads_all
from hybrid_kv.store import ExtentView, Retrieved, RetrievedPart, Row
from hybrid_kv.store.live_index import LiveIndex
from hybrid_kv.types import PartialAttention, Read, SearchResult, TokenBudget

_NOTHING = (0, 0, 0)


class Begun(NamedTuple):
    """A step whose call of the engine has still to be made.

    new: its token, if that call stores it. resident: tokens attended in pages. estimated, half: see
    `LayerPlan.tell`. begin: the moment at which it began.
    """

    step: Step
    new: NewToken | None
    done: StepResult
    resident: int
    estimated: Tensor | None
    half: Tensor | None
    begin: Any


class EnginePlan:
    """The steps of one token of a layer's only row, each one call.

    Args:
        told: the engine's descriptor of what the row holds; an attribute, too.
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
        self.told, self._row, self._read, self._searched = told, row, read, searched
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
        self.told.take_cold(cold, whole)
        return True

    def described(self) -> list[tuple[str, object]]:
        """The fields of the engine's descriptor, with their values."""
        self._choose_pages()
        return self.told.described()

    def attend(self, step: Step) -> PartialAttention:
        """Result of `decode`.

        The step's token is stored already, or the plan `takes` it.

        Raises:
            NonFiniteError: its key is not finite, and it was not stored.
        """
        begun = self.begin(step)
        try:
            self.told.run(pool_here())
        except BaseException as error:
            self.take_back(begun)
            if isinstance(error, NonFiniteError):
                raise NonFiniteError.of(name_of_new(step.layer.shape.layer_idx)) from None
            raise
        return self.end(begun)

    def begin(self, step: Step) -> Begun:
        """The first half of `attend`: the token has its place, and the engine is told."""
        row, begin, new = self._row, step.phases.now(), None
        if step.unstored is not None:
            new, step.unstored = NewToken(*step.unstored, row.length), None
            self._table.count(row.length)
            row.length += 1
        try:
            resident = self._choose_pages()
            searched, told, asked = self._searched, self.told, step.asked
            estimated = half = None
            if step.found is not None and searched is not None:
                estimated, shape = searched.estimated(step), step.layer.shape
                half = torch.empty(shape.num_kv_heads, shape.group_size)
            done = told.tell(
                step.q,
                tail_fill=self._table.tail_fill,
                scale=step.scale,
                softcap=step.softcap,
                new=new,
                warm=None if searched is None else searched.ask(told, step),
                found=None if asked is None else (asked.ids, asked.scores),
                estimated=estimated,
                half=half,
            )
        except BaseException:
            self._forget(new)
            raise
        return Begun(step, new, done, resident, estimated, half, begin)

    def take_back(self, begun: Begun) -> None:
        """The engine has not made the step: its token has no place."""
        self._forget(begun.new)

    def end(self, begun: Begun) -> PartialAttention:
        """The last part of `attend`: counts what the engine has done."""
        step, row, searched, done = begun.step, self._row, self._searched, begun.done
        _count(step, row, begun.resident, self.told, done)
        if self._is_whole:
            heads, stored = step.layer.shape.num_kv_heads, row.chain.num_tokens
            count_cold(step.work, stored * step.layer.shape.num_q_heads, stored)
            step.work.cold_bytes += stored * heads * self.told.entry_bytes
        if searched is not None:
            searched.take_up(self.told, step, row, done, begun.estimated, begun.half)
        times = done.report
        step.phases.book_parts(
            begun.begin,
            (
                ("search", times.search_s),
                ("select", times.select_s),
                ("resident_attention", times.resident_s),
                ("cold_attention", times.cold_s),
                ("merge", times.merge_s),
            ),
        )
        return done.part

    def _forget(self, new: NewToken | None) -> None:
        if new is not None:
            self._row.length -= 1
            self._table.truncate(self._table.num_tokens - 1)

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
            self.told.choose_pages(self._slots, *chosen)
        size = table.pool.page_size
        return table.num_tokens - (every - count) * size


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


# Cold entries as the engine is told of them: extents, and their indexes ---------------------------


class SearchedEntries(NamedTuple):
    """The extents of a row, what finds their entries, and how many a query attends.

    Calls of the engine number the entries through all extents.
    """

    spans: tuple[ExtentView, ...]
    finders: list[LiveIndex]
    budget: TokenBudget

    @classmethod
    def of(cls, row: Row, budget: TokenBudget | str) -> SearchedEntries | None:
        """None where the engine cannot search for such a budget by itself."""
        if isinstance(budget, str) or budget.top_k >= row.chain.num_tokens:
            return None
        if budget.weighs or budget.estimate == "index":
            return None
        if row.copied is not None or row.later_index is not None:
            return None
        spans, finders = tuple(row.chain.spans), []
        for span in spans:
            index = span.extent.index
            if index is None or index.selector is not None:
                return None
            finders.append(index)
        return cls(spans, finders, budget)

    def entries(self) -> ColdEntries | None:
        """Cold entries for a plan; None where only Python can ask an index."""
        budget, extents = self.budget, []
        found = [0] * self.spans[0].extent.k.shape[0]  # by KV head
        for span, finder in zip(self.spans, self.finders, strict=True):
            extent = span.extent
            beyond = extent.length - span.length  # entries that this row does not see any more
            searches = finder.answers.plan(budget.width + beyond, budget.most + beyond)
            if searches is None:
                return None
            for search in searches:
                for head in search.heads:
                    found[head] += search.width
            tail = span.tail(extent.k.device) if budget.form else None
            k, v = extent.k[:, : span.length], extent.v[:, : span.length]
            extents.append(ExtentEntries(k, v, searches, tail, budget.form or "gaussian"))
        return ColdEntries(extents, min(max(found), budget.most))

    def ask(self, plan: LayerPlan, step: Step, queries: Tensor | None = None) -> Tensor | None:
        """Tells the indexes that queries are coming; returns where searches begin.

        Args:
            queries: [Hkv, M, D] of the row on the host; None for those of the step's only row.
        """
        for finder in self.finders:
            finder.note(step.q if queries is None else queries)
        if not plan.begins_warm:
            return None
        count = step.grouped.shape[2]
        begins = [
            _moved(span.near, first)
            for span, first in zip(self.spans, self._firsts(), strict=True)
            if span.near is not None and span.near.shape[1] == count
        ]
        return torch.cat(begins, -1) if begins else None

    def estimated(self, step: Step) -> Tensor | None:
        """[Hkv, M]: where a call says what it estimates for a row; None where nobody looks."""
        if step.found is None or self.budget.form is None:
            return None
        shape = step.layer.shape
        return torch.empty(shape.num_kv_heads, shape.group_size * step.new)

    def take_up(
        self,
        plan: LayerPlan,
        step: Step,
        row: Row,
        done: StepResult,
        estimated: Tensor | None,
        half: Tensor | None = None,
    ) -> None:
        """Keeps what was found, for the next searches and for who looks at it."""
        assert done.ids is not None
        if not plan.begins_warm and step.found is None:  # nearly every step
            return
        parts = [done.ids] if len(self.spans) == 1 else self._by_span(done.ids)
        width = self.budget.width
        for span, part in zip(self.spans, parts, strict=True):
            span.near = part if part.shape[2] <= width else part[..., :width]
        if step.found is not None:
            pairs = zip(self.spans, parts, strict=True)
            found = [RetrievedPart(span.extent, part) for span, part in pairs]
            retrieved = Retrieved(found, done.report.scored, estimated=estimated, half=half)
            step.found[row.number] = self.budget, retrieved

    def numbered(self, found: Sequence[SearchResult]) -> Tensor:
        """Ids of what was found, by extent, as those of one call."""
        pairs = zip(found, self._firsts(), strict=False)  # of the first extents
        return torch.cat([_moved(part.ids, first) for part, first in pairs], -1)

    def _firsts(self) -> list[int]:
        """By extent the number of its first entry."""
        return list(accumulate((span.length for span in self.spans[:-1]), initial=0))

    def _by_span(self, ids: Tensor) -> list[Tensor]:
        """Ids of one call as those of each span, -1 for what others have."""
        parts = []
        for span, first in zip(self.spans, self._firsts(), strict=True):
            own = (ids >= first) & (ids < first + span.length)
            parts.append((ids - first).masked_fill_(~own, -1))
        return parts


def _moved(ids: Tensor, first: int) -> Tensor:
    """Ids that begin with `first`, -1 for none as before."""
    return ids if first == 0 else torch.where(ids < 0, ids, ids + first)
