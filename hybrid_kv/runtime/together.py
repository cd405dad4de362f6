"""One decode step of several caches: as one call of the engine, or with what they share read once.

Caches that have nothing in common but the call have each a plan of its own. As in Hydragen
(arXiv:2402.05099) a common beginning is attended with the queries of all rows at once: cold entries
of an extent that several rows see, resident pages that several rows read; each row's own part is
merged by log-sum-exp. Where only some of an extent's entries are attended, it is searched with the
queries of all rows at once, and each row goes on with what was found for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.bindings import (
    OneStepStruct,
)
from hybrid_kv.ops.native.library import Pool, pool_here
from hybrid_kv.ops.native.step import LayerPlan
from hybrid_kv.runtime.cache import KVCache
from hybrid_kv.runtime.engine_plan import Begun, EnginePlan
from hybrid_kv.runtime.layer import LayerCache
from hybrid_kv.runtime.step import Step, attend, count_cold, merge_partials
from hybrid_kv.store import ExtentView, Row
from hybrid_kv.store.live_index import LiveIndex
from hybrid_kv.store.search import search_extent
from hybrid_kv.types import Demotion, PartialAttention, Read, SearchResult, TokenBudget

_LEAST_PAGES = 8
"""Fewer shared ones are not worth a call of their own."""


@dataclass(slots=True, eq=False)
class JointRow:
    """One row of a step of one layer: q [1, Hq, 1, D], and its new k, v [1, Hkv, 1, D].

    outcome: what it gets, or what went wrong with it; None where it shares with nobody, and then
    nothing was stored.
    """

    kv: KVCache
    layer_idx: int
    q: Tensor
    new: tuple[Tensor, Tensor]
    outcome: PartialAttention | Exception | None = None
    _step: Step | None = None
    _read: Read | None = None

    @property
    def layer(self) -> LayerCache:
        return self.kv.layers[self.layer_idx]

    @property
    def own(self) -> Row:
        """Row that the layer holds."""
        return self.layer.held.rows[0]

    @property
    def step(self) -> Step:
        assert self._step is not None
        return self._step

    @property
    def read(self) -> Read:
        """Entries that its method reads, once it is known that it may share."""
        assert self._read is not None
        return self._read

    def shares(self) -> Hashable | None:
        """Entries that it may attend together with others; None where it attends by itself."""
        kv, layer = self.kv, self.layer
        if kv.watchers or kv.more_prompt or not layer.is_sealed or len(layer.held.rows) != 1:
            return None
        own, place = self.own, layer.held.placement
        if place is None or not (self.q.is_cpu and kv.executor.at_once):
            return None
        if own.kept is not None or own.later_index is not None:
            return None
        pool = own.table.pool
        if place.rest is Demotion.KEEP and len(pool.stores) > 1:
            self._read = layer.method.read(self.layer_idx, self.q)
            return id(pool) if self.read.pages == "all" else None
        shared = place.rest is Demotion.OFFLOAD and bool(own.chain.spans)
        return self._extent() if shared else None

    def _extent(self) -> Hashable | None:
        own = self.own
        span, index = own.chain.spans[0], own.chain.spans[0].extent.index
        if len(span.extent.readers) < 2:
            return None
        if index is not None and index.builder.pending is not None:
            index.settle(span.extent.keys)
        self._read = self.layer.method.read(self.layer_idx, self.q)
        cold = self.read.cold
        if cold == "all" or (cold is not None and cold.top_k >= own.chain.num_tokens):
            return id(span.extent), span.length, "all"
        if cold is None or cold.weighs or cold.estimate == "index" or not _asked_by_many(index):
            return None
        return id(span.extent), span.length, cold

    def begin(self, scale: float, softcap: float | None) -> PartialAttention:
        """Stores its token and attends what it reads beside the cold tier."""
        layer = self.layer
        layer.settle()
        self._step = layer.steps.make(layer.held, self.q, scale, softcap, new=self.new)
        return layer.steps.attend(self._step, replace(self.read, cold=None))

    def store(self, scale: float, softcap: float | None) -> None:
        """Stores its token, and counts the step as `decode` does."""
        layer = self.layer
        self._step = layer.steps.make(layer.held, self.q, scale, softcap)
        layer.append(*self.new, None)
        work, heads = self.step.work, self.q.shape[1]
        work.attended += heads * self.own.table.num_tokens
        shape = layer.shape
        work.resident_bytes += shape.num_kv_heads * self.own.table.num_tokens * self.step.row_bytes
        work.visible += heads * self.own.length
        work.steps += heads

    def complete(self, asked: SearchResult, scale: float, softcap: float | None) -> None:
        """Takes the whole step, with what a search of the first extent has found for it."""
        layer = self.layer
        try:
            layer.settle()
            step = layer.steps.make(layer.held, self.q, scale, softcap, new=self.new, asked=asked)
            self.outcome = layer.steps.attend(step, self.read)
            self.kv.layers.end_step(layer)
        except Exception as error:
            self.outcome = error

    def taken(self) -> PartialAttention | None:
        """Its outcome; None where it has none.

        Raises:
            Exception: what went wrong with it.
        """
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def end(self, parts: Sequence[PartialAttention]) -> None:
        """Merges what it attended, each [1, Hq, 1, D]."""
        self.outcome = merge_partials(parts, dtype=self.q.dtype, ops=self.step.ops)
        self.kv.layers.end_step(self.layer)

    @property
    def grouped(self) -> Tensor:
        """[Hkv, G, D]."""
        return self.step.grouped[0]

    def spread(self, part: PartialAttention) -> PartialAttention:
        """[Hkv, G, D] as [1, Hq, 1, D]."""
        return PartialAttention(part.out.reshape(self.q.shape), part.lse.reshape(self.q.shape[:3]))


_by_many: WeakKeyDictionary[LiveIndex, tuple[int, bool]] = WeakKeyDictionary()


def _asked_by_many(index: LiveIndex | None) -> bool:
    """Whether queries of several rows may be asked together: of an index that the engine can search
    by itself, which therefore remembers nothing of a row.
    """
    if index is None or index.selector is not None:
        return False
    known = _by_many.get(index)
    if known is None or known[0] != index.revision:
        known = _by_many[index] = index.revision, index.answers.plan(1, 1) is not None
    return known[1]


def attend_shared(rows: Sequence[JointRow], *, scale: float, softcap: float | None) -> None:
    """Gives outcomes to the rows that share entries with another one; leaves the others alone."""
    groups: dict[Hashable, list[JointRow]] = defaultdict(list)
    for row in rows:
        if (what := row.shares()) is not None:
            groups[what].append(row)
    for what, group in groups.items():
        if len(group) < 2:
            continue
        if not isinstance(what, tuple):
            _attend_pages(group, scale, softcap)
        elif isinstance(what[2], TokenBudget):
            _search_extent(group, what[2], scale, softcap)
        else:
            _attend_extent(group, scale, softcap)


def _split(part: PartialAttention, rows: int) -> list[PartialAttention]:
    """[Hkv, R * G, D] by row."""
    parts = zip(part.out.chunk(rows, 1), part.lse.chunk(rows, 1), strict=True)
    return [PartialAttention(*each) for each in parts]


# Shared cold entries ----------------------------------------------------------------------------


def _search_extent(
    rows: Sequence[JointRow], budget: TokenBudget, scale: float, softcap: float | None
) -> None:
    """The first extent of each row is the same, and is searched for all of them."""
    q = torch.cat(
        [row.q.reshape(row.layer.shape.num_kv_heads, -1, row.q.shape[3]) for row in rows], 1
    )
    try:
        found = search_extent(rows[0].own.chain.spans[0], q, budget.width, budget.most)
    except Exception as error:
        for row in rows:
            row.outcome = error
        return
    each, count = found.scored // len(rows), len(rows)
    read = (found.read_bytes or 0) // count
    for row, ids, scores in zip(
        rows, found.ids.chunk(count, 1), found.scores.chunk(count, 1), strict=True
    ):
        row.complete(SearchResult(ids, scores, each, read_bytes=read), scale, softcap)


def _attend_extent(rows: Sequence[JointRow], scale: float, softcap: float | None) -> None:
    """The first extent of each row is the same, and is attended whole; what follows is its own."""
    near: list[tuple[JointRow, PartialAttention]] = []
    for row in rows:
        try:
            near.append((row, row.begin(scale, softcap)))
        except Exception as error:
            row.outcome = error
    if not near:
        return
    whole = [row for row, _ in near]

    def attended(step: Step, q: Tensor, span: ExtentView) -> PartialAttention:
        k, v = (tensor[None] for tensor in span.extent.first(span.length))
        part = attend(step.ops, q[None], k, v, scale=scale, softcap=softcap)
        return PartialAttention(part.out[0], part.lse[0])

    try:
        first = whole[0].own.chain.spans[0]
        shared = _split(attended(whole[0].step, _stacked(whole), first), len(whole))
        for (row, part), own in zip(near, shared, strict=True):
            chain = row.own.chain
            later = [attended(row.step, row.grouped, span) for span in chain.spans[1:]]
            count_cold(row.step.work, chain.num_tokens * row.q.shape[1], chain.num_tokens)
            heads, size = row.layer.shape.num_kv_heads, row.step.row_bytes
            row.step.work.cold_bytes += chain.num_tokens * heads * size
            row.end([part, *map(row.spread, [own, *later])])
    except Exception as error:
        for row in whole:
            row.outcome = error


# Shared resident pages --------------------------------------------------------------------------


def _attend_pages(rows: Sequence[JointRow], scale: float, softcap: float | None) -> None:
    """Everything is resident, in one pool, and the rows' tables begin with the same pages."""
    shared = _common_pages([row.own.table.pages for row in rows])
    if shared < _LEAST_PAGES:
        return
    whole = []
    for row in rows:
        try:
            row.store(scale, softcap)
            whole.append(row)
        except Exception as error:
            row.outcome = error
    if not whole:
        return
    tokens = shared * whole[0].own.page_size
    try:
        every = _over(whole[0], _stacked(whole), 0, shared, tokens, scale, softcap)
        for row, part in zip(whole, _split(every, len(whole)), strict=True):
            table = row.own.table
            left = table.num_tokens - tokens
            own = _over(row, row.grouped, shared, len(table), left, scale, softcap)
            row.end([row.spread(part), row.spread(own)])
    except Exception as error:
        for row in whole:
            row.outcome = error


def _over(
    row: JointRow,
    q: Tensor,
    start: int,
    stop: int,
    tokens: int,
    scale: float,
    softcap: float | None,
) -> PartialAttention:
    """Attention of q [Hkv, M, D] over some pages of a row's table."""
    k, v = row.own.table.read(start, stop, tokens)
    part = attend(row.step.ops, q[None], k[None], v[None], scale=scale, softcap=softcap)
    return PartialAttention(part.out[0], part.lse[0])


def _common_pages(tables: Sequence[Sequence[int]]) -> int:
    """With how many full pages all tables begin; the last one of each may still be written to."""
    first, low = tables[0], 0
    high = min(map(len, tables)) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if all(table[low:middle] == first[low:middle] for table in tables[1:]):
            low = middle
        else:
            high = middle - 1
    return max(0, low)


def _stacked(rows: Sequence[JointRow]) -> Tensor:
    """The queries of all rows, [Hkv, R * G, D]."""
    return torch.cat([row.grouped for row in rows], 1)


class JointPlan:
    """The steps of several rows, each of which its own plan could make alone.

    Rows have nothing in common but the call, so that one that fails leaves the others alone.

    plans: by row.
    """

    def __init__(self, plans: Sequence[EnginePlan]) -> None:
        self.plans = plans
        self._run = JointRun([plan.told for plan in plans])

    def attend(self, steps: Sequence[Step]) -> list[PartialAttention | None]:
        """By row what its plan's `attend` returns; None where that would raise, and nothing of the
        step was stored.
        """
        begun: list[Begun] = []
        try:
            for plan, step in zip(self.plans, steps, strict=True):
                begun.append(plan.begin(step))
            made = self._run.run(pool_here())
        except BaseException:
            for plan, one in zip(self.plans, begun, strict=False):  # those that had begun
                plan.take_back(one)
            raise
        parts: list[PartialAttention | None] = []
        for plan, one, is_made in zip(self.plans, begun, made, strict=True):
            if is_made:
                parts.append(plan.end(one))
            else:
                plan.take_back(one)
                parts.append(None)
        return parts


class JointRun:
    """The steps that several plans were told of, as one call; a step that fails fails alone.

    Args:
        plans: of one engine; not for several threads at once.
    """

    def __init__(self, plans: Sequence[LayerPlan]) -> None:
        self._plans = tuple(plans)
        self._engine = plans[0].engine
        self._steps = (OneStepStruct * len(plans))(*[plan.one for plan in plans])

    def run(self, pool: Pool | None = None) -> list[bool]:
        """By plan whether its step was made; one that was not says why when it is made alone.

        Args:
            pool: threads that share the work; None for the calling one.
        """
        handle, steps = None if pool is None else pool.handle, self._steps
        status = self._engine.hkv_attend_steps(handle, len(steps), steps)
        for plan in self._plans:
            plan.reads = ()
        if status:
            library.check(self._engine, status)
        return [step.status == 0 for step in steps]
