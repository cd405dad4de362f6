"""A row's cold entries as calls of the engine are told of them: an extent, and its index."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hybrid_kv.ops.native.step import ColdEntries, LayerPlan, StepResult
from hybrid_kv.runtime.retrieve import Retrieved, RetrievedPart
from hybrid_kv.runtime.step import Step
from hybrid_kv.store import Row, Span
from hybrid_kv.store.live_index import LiveIndex
from hybrid_kv.types import TokenBudget


class SearchedEntries(NamedTuple):
    """The only extent of a row, what finds its entries, and how many a query attends.

    state: differs where a plan of these entries has to be made anew.
    """

    span: Span
    finder: LiveIndex
    budget: TokenBudget
    state: tuple[object, ...]

    @classmethod
    def of(cls, row: Row, budget: TokenBudget | str) -> SearchedEntries | None:
        """None where the engine cannot search for such a budget by itself."""
        spans = row.chain.spans
        if isinstance(budget, str) or budget.top_k >= row.chain.num_tokens:
            return None
        if budget.weighs or budget.estimate == "index":
            return None
        span, extent = spans[0], spans[0].extent
        index = extent.index
        if len(spans) > 1 or index is None or row.copied is not None or row.later_index is not None:
            return None
        if index.is_building:
            index.settle(extent.keys)
        if index.on_device or index.selects or span.length != extent.length:
            return None
        return cls(span, index, budget, (id(span), span.length, index.revision, budget))

    def entries(self, num_kv_heads: int) -> ColdEntries | None:
        """What a plan is told; None where only Python can ask the index."""
        extent, budget = self.span.extent, self.budget
        searches = self.finder.plan(budget.width, budget.most)
        if searches is None:
            return None
        width = max(
            sum(search.width for search in searches if head in search.heads)
            for head in range(num_kv_heads)
        )
        tail = self.span.tail(extent.keys.device) if budget.estimate else None
        # The row sees all of the extent.
        return ColdEntries(extent.keys, extent.values, searches, min(width, budget.most), tail)

    def ask(self, plan: LayerPlan, queries: Tensor) -> Tensor | None:
        """Tells the index that queries [Hkv, M, D] are coming; returns where the search begins."""
        self.finder.note(queries if self.finder.listens else None)
        near = self.span.near
        warm = plan.begins_warm and near is not None and near.shape[1] == queries.shape[1]
        return near if warm else None

    def take_up(self, step: Step, row: Row, done: StepResult) -> None:
        """Keeps what was found, for the next search and for who looks at it."""
        ids = done.ids
        assert ids is not None
        self.span.near = ids if ids.shape[2] <= self.budget.width else ids[..., : self.budget.width]
        if step.found is not None:
            part = RetrievedPart(self.span.extent, ids)
            step.found[row.number] = self.budget, Retrieved([part], done.report.scored)
