"""The decode steps of a layer and their plan: decided once, until something changes.

    PlannedSteps, compile_step ─┬─ EnginePlan   the whole step of a row is one call of the engine
                                ├─ DevicePlan   a device is told of a step by numbers in its memory
                                └─ OpsPlan      op by op; a row's cold part may be one call

A plan holds as long as its stamp has no reason: pools, tables, chains, extents and indexes mark the
stamps of the plans that describe them. Nothing else asks how a step may be made.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hybrid_kv.errors import IntegrityError
from hybrid_kv.ops.native.step import LayerPlan, ResidentPages
from hybrid_kv.plugins import Method
from hybrid_kv.runtime.cache_context import CacheContext, append, reads_alike, stores_as_is
from hybrid_kv.runtime.engine_plan import EnginePlan, SearchedEntries
from hybrid_kv.runtime.step import Found, PlanReason, Step, reads_all
from hybrid_kv.store import LayerStore, Row
from hybrid_kv.store.live_index import LiveIndex
from hybrid_kv.store.memory import Stamp, Stamps
from hybrid_kv.store.pool import PageTable
from hybrid_kv.types import Demotion, LayerShape, PartialAttention, Read, SearchResult

if TYPE_CHECKING:
    from hybrid_kv.runtime.checked_method import CheckedMethod
    from hybrid_kv.runtime.device_plan import DevicePlan
    from hybrid_kv.runtime.look_ahead_state import LookAheadResults


CHECK_PLANS = "HYBRID_KV_CHECK_PLANS"
"""Environment variable: "1" compares, before each step, what a plan was made from with what is."""

_TOLD_EVERY = 3
"""Steps from one comparison of what was told to the next, where steps are checked."""


class PlannedSteps:
    """A layer's decode steps, and how they are made: it holds on to what its plan describes.

    keeper: the method, where it keeps entries, from the prompt's end on; None where it does not.
    """

    def __init__(self, shape: LayerShape, method: Method, means: CacheContext) -> None:
        self._layer_idx, self._method, self._means = shape.layer_idx, method, means
        self._stores_as_is = stores_as_is(method)
        self._reads_alike = reads_alike(method)
        self._regular = means if self._stores_as_is and self._reads_alike else None
        self._read: Read | None = None  # where it is the same in every step
        self._compiled: CompiledStep | None = None  # how the last step was made
        self._num_plans = 0
        self.keeper: CheckedMethod | None = None

    def make(
        self,
        store: LayerStore,
        q: Tensor,
        scale: float,
        softcap: float | None,
        *,
        new: tuple[Tensor, Tensor] | None = None,
        found: Found | None = None,
        ahead: LookAheadResults | None = None,
        asked: SearchResult | None = None,
    ) -> Step:
        """A step of q [B, Hq, T, D].

        Args:
            new: k, v [B, Hkv, T, D] of its tokens, which `attend` stores; None where they are.
            found, ahead, asked: see `Step`.
        """
        means = self._means
        return Step(
            ops=means.ops,
            executor=means.executor,
            phases=means.phases,
            work=means.work,
            layer=store,
            q=q,
            new=q.shape[2],
            scale=scale,
            softcap=softcap,
            at_home=q.is_cpu and means.executor.at_once,
            found=found,
            ahead=ahead,
            asked=asked,
            unstored=new,
        )

    def attend(
        self, step: Step, read: Read | None = None, *, widening: int = 1
    ) -> PartialAttention:
        """Stores the tokens of a step, and attends what the method reads for it.

        Args:
            read: what to read instead; None asks the method.
            widening: times so many cold entries.

        Returns:
            out [B, Hq, T, D] in the dtype of q, lse [B, Hq, T] float32.

        Raises:
            NonFiniteError: see `append`.
        """
        if read is None and (read := self._read) is None:
            read = self._method.read(self._layer_idx, step.q)
            self._read = read if self._reads_alike else None
        if widening != 1:
            read = read.widened(widening)
        compiled, numbers = self._compiled, self._means.numbers
        if numbers is not None:
            numbers.store(step)
        if compiled is not None and not compiled.serves(step, read):
            compiled = None
        new = step.unstored
        if new is not None and (
            compiled is None or not self._stores_as_is or not compiled.plan.takes(*new)
        ):
            step.unstored = None
            append(step.layer, self._means, self._method, *new, None)
            if compiled is not None and not compiled.serves(step, read):  # pages have moved
                compiled = None
        if compiled is None:
            compiled = self._compiled = compile_step(step, read, self._regular)
            self._num_plans += 1
        part, keeper = compiled.plan.attend(step), self.keeper
        if keeper is not None and keeper.follows:
            told = self._means.executor, step.layer, step.q, part.lse
            keeper.follow(*told, scale=step.scale, softcap=step.softcap)
        return part

    def joint_plan(self, step: Step) -> EnginePlan | None:
        """The plan by which a step, its token included, is one call of the engine; None where it is
        made otherwise, or something has to be done before.
        """
        compiled, new = self._compiled, step.unstored
        if compiled is None or new is None or self._regular is None:
            return None
        plan = compiled.plan
        if not isinstance(plan, EnginePlan) or not compiled.serves(step, compiled.read):
            return None
        return plan if plan.takes(*new) else None

    def device_plan(self, store: LayerStore) -> DevicePlan | None:
        """The plan of the next step where it can be advanced already; see `Layers.advance`."""
        return None if self._compiled is None else self._compiled.device_plan(store.rows)

    def renew(self, store: LayerStore, scale: float, softcap: float | None) -> None:
        """Makes the plan of the next step anew where something has changed since the last one."""
        compiled = self._compiled
        if compiled is None or not compiled.stamp.reason:
            return
        shape = compiled.next_shape(store.rows)
        plan = compiled.plan.by_numbers
        if shape is not None and plan is not None:
            q = torch.empty(shape[0], dtype=shape[1], device=store.resident.pool.device)
            step = self.make(store, q, scale, softcap)  # of which only the shape counts
            self._compiled = compile_step(step, plan.read, self._means)
            self._num_plans += 1

    def drop(self) -> None:
        """Lets go of the plan: what it describes is no longer what the layer holds."""
        self._compiled = None

    def describe(self) -> dict[str, Any]:
        """JSON-ready: whether the last decode step was one call of the engine.

        code, reason: why it was not, empty where it was, None before the first step. plans: how
        many were made for the steps so far.
        """
        told = {"layer": self._layer_idx, "plans": self._num_plans}
        if self._compiled is None:
            return {**told, "one_call": False, "code": None, "reason": None}
        code, text = self._compiled.plan.reason or ("", "")
        return {**told, "one_call": not code, "code": code, "reason": text}


class StepPlan(Protocol):
    """Plan of the steps of one layer; out [B, Hq, T, D], lse [B, Hq, T]."""

    @property
    def reason(self) -> PlanReason | None:
        """Reason why this is no `EnginePlan`; None where it is."""
        ...

    @property
    def table(self) -> PageTable | None:
        """Page table that it reads in place; None where each step asks for the pages."""
        ...

    @property
    def by_numbers(self) -> DevicePlan | None:
        """This plan where its steps can be advanced before their queries are known; else None."""
        ...

    def takes(self, k: Tensor, v: Tensor) -> bool:
        """Whether `attend` stores a step's tokens k, v [B, Hkv, T, D] by itself."""
        ...

    def follow(self) -> bool:
        """Takes up how much there is now of what it describes; False: it has to be made anew."""
        ...

    def described(self) -> list[tuple[str, object]]:
        """The fields, with their values, that whoever makes the steps was told beforehand."""
        ...

    def attend(self, step: Step) -> PartialAttention:
        """A step's attention over what the plan reads."""
        ...


class CompiledStep:
    """A plan, which steps it serves, and whether it still holds.

    Args:
        step, read: those that it was made for; it serves steps of the same rows, with as many
            queries, that read as much. read: an attribute, too.
        means: see `compile_step`.
        stamp: marked by what the plan describes.
    """

    def __init__(self, step: Step, read: Read, means: CacheContext | None, stamp: Stamp) -> None:
        self.plan, self.stamp = _planned(step, read, means), stamp
        self._rows, self.read, self._is_ahead = step.layer.rows, read, step.ahead is not None
        self._shape, self._dtype, self._means = step.q.shape, step.q.dtype, means
        self._checks = os.environ.get(CHECK_PLANS) == "1"
        self._described = _description(self._rows) if self._checks else ()
        self._num_checks = 0  # since it was made, or has followed

    def device_plan(self, rows: Sequence[Row]) -> DevicePlan | None:
        """The plan of the next step of these rows where it can be advanced before its queries are
        known; else None.
        """
        holds = not self.stamp.reason and rows is self._rows
        return self.plan.by_numbers if holds else None

    def next_shape(self, rows: Sequence[Row]) -> tuple[torch.Size, torch.dtype] | None:
        """Shape and dtype of the queries of the next step of these rows, where a device plan made
        the last one; else None.
        """
        known = rows is self._rows and self.plan.by_numbers is not None
        return (self._shape, self._dtype) if known else None

    def serves(self, step: Step, read: Read) -> bool:
        """Whether this is how a step is made that reads so much."""
        if self.stamp.reason or step.layer.rows is not self._rows:
            return False
        same = step.q.shape == self._shape and step.q.dtype is self._dtype
        if not same or (step.ahead is not None) is not self._is_ahead:
            return False
        if read is not self.read and read != self.read:
            return False
        if self.stamp.has_grown:
            if not self.plan.follow():
                return False
            self.stamp.has_grown = False
            self._described = _description(self._rows) if self._checks else ()
            self._num_checks = 0
        table = self.plan.table
        if table is not None and table.listed.num_pages != len(table.pages):
            table.slots()  # lists them; where the list has to move, it marks the stamp
            if self.stamp.reason:
                return False
        if self._checks:
            self._check(step)
        return True

    def _check(self, step: Step) -> None:
        """Compares what was seen with what is there, and in some steps what was told with what a
        plan made anew would tell, which costs as much as the step.
        """
        seen, told = list(_description(self._rows)), list[tuple[str, object]]()
        if self._num_checks % _TOLD_EVERY == 0:
            told = self.plan.described()
        self._num_checks += 1
        if told:
            seen += _planned(step, self.read, self._means).described()
        for now, then in zip_longest(seen, [*self._described, *told]):
            if now != then:
                raise IntegrityError(
                    f"a step's plan must be told of what changes, got {now} for {then}; this is an "
                    "error of the runtime"
                )


def compile_step(step: Step, read: Read, means: CacheContext | None) -> CompiledStep:
    """Decides how steps like this one are made that read so much.

    Args:
        means: of the layer if all steps read the same and store what comes, so that a device may
            be told of them by numbers; else None.
    """
    rows = step.layer.rows
    indexes = [found for row in rows for found in _indexes(row)]
    for index, keys in indexes:  # before there is a stamp, which an index that takes over marks
        if index.builder.pending is not None:
            index.settle(keys)
    stamp = Stamp()
    for stamps in _described_by(rows):
        stamps.add(stamp)
    if any(index.builder.has_ended for index, _ in indexes):  # before there was a stamp to mark
        stamp.reason = "an index was built"
    return CompiledStep(step, read, means, stamp)


def _indexes(row: Row) -> list[tuple[LiveIndex, Tensor]]:
    """A row's indexes with their keys."""
    extents = (span.extent for span in row.chain.spans)
    return [(extent.index, extent.keys) for extent in extents if extent.index is not None]


def _described_by(rows: Sequence[Row]) -> list[Stamps]:
    found = []
    for row in rows:
        found += [row.table.pool.stamps, row.table.listed.stamps, row.chain.stamps]
        found += [span.extent.stamps for span in row.chain.spans]
        found += [index.stamps for index, _ in _indexes(row)]
    return found


def _description(rows: Sequence[Row]) -> list[tuple[object, ...]]:
    """All that plans are made from, to be compared."""
    found: list[tuple[object, ...]] = []
    for row in rows:
        pages, place = row.table.pool.pages, row.placement
        if pages.k.is_cpu:  # a device's pages are told anew in each step
            memory = [0 if t is None else t.data_ptr() for t in pages]
            found.append(("pages", row.number, *memory))
        found.append(("row", row.number, id(place), row.copied is None, row.later_index is None))
        for span in row.chain.spans:
            extent, index = span.extent, span.extent.index
            served = None if index is None else (id(index), index.revision)
            memory = [extent.k.data_ptr(), extent.v.data_ptr()]
            found.append(("extent", id(span), span.length, *memory, extent.length, served))
    return found


def _planned(step: Step, read: Read, means: CacheContext | None) -> StepPlan:
    """The fastest plan that can say the step."""
    found = _engine_plan(step, read)
    if isinstance(found, EnginePlan):
        return found
    if means is not None and _is_told_by_numbers(step, read):
        from hybrid_kv.runtime.device_plan import DevicePlan

        table = step.layer.rows[0].table
        table.listed.stay_in_place(table.pages)
        return DevicePlan(step, read, means.step_numbers(), found)
    from hybrid_kv.runtime.decode import ops_plan

    return ops_plan(step, read, found)


def _engine_plan(step: Step, read: Read) -> EnginePlan | PlanReason:
    if not step.at_home:
        return PlanReason("device", "the model computes on a device")
    if step.ahead is not None:
        return PlanReason("ahead", "it was searched ahead")
    if len(step.layer.rows) > 1:
        return PlanReason("several_rows", "several rows")
    if step.new > 1:
        return PlanReason("several_tokens", "several new tokens")
    row, searched, cold = step.layer.rows[0], None, None
    whole: list[tuple[Tensor, Tensor]] = []
    if row.chain.num_tokens and reads_all(read.cold, row.chain.num_tokens):
        whole = row.chain.entries()
    elif read.cold is not None and row.chain.num_tokens:
        searched = SearchedEntries.of(row, read.cold)
        if searched is None:
            return PlanReason("search", "its cold entries are not found by plain searches")
        cold = searched.entries()
    told: LayerPlan | None = None
    if _reads_pages_and_extents(row) and (searched is None or cold is not None):
        pages, slots = row.table.pool.pages, row.table.slots()
        resident = ResidentPages(pages.k, pages.v, slots, pages.key_min, pages.key_max)
        told = step.ops.plan_step(step.grouped[0], resident, cold, row.table.pool.writer, whole)
    if told is None:
        why = step.ops.why_op_by_op
        return PlanReason("backend", why) if why else PlanReason("python", _BY_PYTHON)
    return EnginePlan(told, row, read, searched, is_whole=bool(whole))


def _is_told_by_numbers(step: Step, read: Read) -> bool:
    """Whether all that a step reads is resident, and kernels read it where it lies."""
    if not step.q.is_cuda or step.new > 1 or len(step.layer.rows) > 1 or step.ahead is not None:
        return False
    row = step.layer.rows[0]
    if not _reads_pages_and_extents(row):
        return False
    if read.cold is not None and row.chain.num_tokens and row.later_index is None:
        return False  # the host searches
    return step.ops.reads_pages(step.q) and step.ops.backend != "flashinfer"


_BY_PYTHON = "its method or index is asked by Python"


def _reads_pages_and_extents(row: Row) -> bool:
    """Whether all that is attended lies in pages and extents, and is attended where it lies."""
    return row.placement is not None and row.placement.rest is not Demotion.ABSORB
