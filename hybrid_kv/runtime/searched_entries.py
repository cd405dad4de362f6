"""A row's cold entries as calls of the engine are told of them: extents, and their indexes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_kv.ops.native.step import ColdEntries, ExtentEntries, LayerPlan, StepResult
from hybrid_kv.runtime.step import Step
from hybrid_kv.store import ExtentView, Retrieved, RetrievedPart, Row
from hybrid_kv.store.live_index import LiveIndex
from hybrid_kv.types import SearchResult, TokenBudget


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
        return torch.empty(step.grouped.shape[1:3])

    def take_up(
        self,
        plan: LayerPlan,
        step: Step,
        row: Row,
        done: StepResult,
        estimated: Tensor | None,
    ) -> None:
        """Keeps what was found, for the next searches and for who looks at it."""
        assert done.ids is not None
        if not plan.begins_warm and step.found is None:  # nearly every step
            return
        parts = [done.ids] if len(self.spans) == 1 else self._by_span(done.ids)
        for span, part in zip(self.spans, parts, strict=True):
            span.near = (
                part if part.shape[2] <= self.budget.width else part[..., : self.budget.width]
            )
        if step.found is not None:
            found = [
                RetrievedPart(span.extent, part)
                for span, part in zip(self.spans, parts, strict=True)
            ]
            step.found[row.number] = (
                self.budget,
                Retrieved(found, done.report.scored, estimated=estimated),
            )

    def numbered(self, found: Sequence[SearchResult]) -> Tensor:
        """Ids of what was found, by extent, as those of one call."""
        firsts = self._firsts()[: len(found)]
        moved = [_moved(part.ids, first) for part, first in zip(found, firsts, strict=True)]
        return torch.cat(moved, -1)

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
