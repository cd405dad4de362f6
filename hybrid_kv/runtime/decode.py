"""One decode step of one layer, in the order in which it happens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from hybrid_kv.entries import Entries
from hybrid_kv.ops import Ops
from hybrid_kv.runtime.cold import ColdOps, ColdPart, ColdPlan, ask_cold, attend_cold
from hybrid_kv.runtime.step import (
    ColdBudget,
    PlanReason,
    Step,
    attend,
    attend_causal,
    empty_partial,
    pinned_pages,
    stacked,
)
from hybrid_kv.store import Row
from hybrid_kv.transfer import Transfer
from hybrid_kv.types import Budget, Demotion, PartialAttention, Read, TokenBudget


class OpsPlan:
    """A step op by op, as `decode` defines it.

    Args:
        cold: by row its cold entries; empty where none are read.
    """

    table = by_numbers = None

    def __init__(self, read: Read, reason: PlanReason, cold: Sequence[ColdPart]) -> None:
        self.reason, self._read, self._cold = reason, read, cold

    def takes(self, k: Tensor, v: Tensor) -> bool:
        return False

    def follow(self) -> bool:
        return all(part.follow() for part in self._cold)

    def described(self) -> list[tuple[str, object]]:
        return [field for part in self._cold for field in part.described()]

    def attend(self, step: Step) -> PartialAttention:
        return decode(step, self._read, self._cold)


def ops_plan(step: Step, read: Read, reason: PlanReason) -> OpsPlan:
    """The plan of steps like this one op by op, each row's cold part by one call if it can be."""
    if read.cold is None:
        return OpsPlan(read, reason, [])
    return OpsPlan(read, reason, [_cold_part(step, read.cold, row) for row in step.layer.rows])


def _cold_part(step: Step, budget: ColdBudget, row: Row) -> ColdPart:
    plan, ops = ColdPlan.of(step, budget, row), ColdOps(row, budget)
    if step.ahead is None:
        return plan or ops
    from hybrid_kv.runtime.look_ahead import ForeseenPart

    return ForeseenPart(row, budget, ops, plan)


def decode(step: Step, read: Read, cold_parts: Sequence[ColdPart]) -> PartialAttention:
    """Attention of the new tokens over what the method named.

    Args:
        cold_parts: by row its cold entries; empty where none are read.

    Returns:
        out [B, Hq, T, D], lse [B, Hq, T].
    """
    # The queries leave first: they travel while the device is told to select and attend, and the
    # host searches while the device does.
    cold = read.cold
    by_device = all(row.later_index is not None for row in step.layer.rows)
    asked = None if cold is None or by_device else ask_cold(step)
    chosen = None if read.pages == "all" else choose_resident(step, read.pages)
    parts = [attend_resident(step, chosen)]
    place = step.layer.placement
    if place is not None and place.rest is Demotion.ABSORB:
        parts += attend_kept(step)
    if cold is not None and by_device:
        from hybrid_kv.runtime.select import attend_selected

        parts.append(attend_selected(step, cold))
    elif cold is not None and asked is not None:
        weighs = isinstance(cold, TokenBudget) and cold.weighs
        beside = _send_lse(step, parts) if weighs else None
        parts.append(attend_cold(step, asked, beside, cold_parts))
    begin = step.phases.now()
    out, lse = parts[0] if len(parts) == 1 else step.ops.merge(parts, step.q.dtype)
    step.phases.book("merge", begin)
    work, heads, new = step.work, step.layer.shape.num_q_heads, step.new
    for row in step.layer.rows:
        work.visible += heads * (row.length * new - new * (new - 1) // 2)
        work.steps += heads * new
    shape = step.q.shape
    return PartialAttention(out.to(step.q.dtype).reshape(shape), lse.reshape(shape[:3]))


def _send_lse(step: Step, parts: Sequence[PartialAttention]) -> Transfer:
    """Sends the joint log-sum-exp [B, Hkv, M] of all that the device attends to the host."""
    joint = reduce(torch.logaddexp, (part.lse for part in parts))
    step.work.transfer_bytes += 0 if step.at_home else joint.nbytes
    return step.executor.send(joint)


# Resident pages ---------------------------------------------------------------------------------


def choose_resident(step: Step, page_budget: Budget) -> list[Tensor] | None:
    """By row the table indices [Hkv, T, C] of the pages to attend, the newest page last: sinks,
    window and the best others. None: all pages of all rows.
    """
    rows = step.layer.rows
    if page_budget == "all" or all(_free_pages(step, row) <= page_budget for row in rows):
        return None
    begin = step.phases.now()
    chosen = [_choose_pages(step, row, page_budget) for row in rows]
    step.phases.book("select", begin)
    return chosen


def _choose_pages(step: Step, row: Row, page_budget: int) -> Tensor:
    """Table indices [Hkv, T, C]: pinned pages and the best others by upper bound (Quest)."""
    q = step.grouped[row.number]
    head, tail = pinned_pages(row, step.new)
    key_min, key_max = row.table.bounds()
    heads, num_pages, _ = key_min.shape
    step.work.scored += heads * q.shape[1] * num_pages
    step.work.select_bytes += heads * num_pages * step.row_bytes
    count = min(head + tail + page_budget, num_pages)
    return step.ops.choose_pages(
        q, key_min, key_max, new=step.new, oldest=head, newest=tail, count=count
    )


def _free_pages(step: Step, row: Row) -> int:
    """Resident pages of a row that a step reads only when they are chosen."""
    return max(0, len(row.table.pages) - sum(pinned_pages(row, step.new)))


def attend_resident(step: Step, chosen: list[Tensor] | None) -> PartialAttention:
    """The chosen resident pages, or all of them; [B, Hkv, M, D] and [B, Hkv, M]."""
    rows = step.layer.rows
    if chosen is not None:
        lists = [row.table.slots()[pages] for row, pages in zip(rows, chosen, strict=True)]
    elif step.ops.reads_pages(step.q):
        every = (step.layer.shape.num_kv_heads, step.new, -1)
        lists = [row.table.slots().expand(every) for row in rows]
    else:
        return _attend_all_resident(step)
    reads = 1 if chosen is None else step.new  # what is chosen differs from token to token
    return stacked([_attend_slots(step, *each, reads) for each in zip(rows, lists, strict=True)])


def _attend_all_resident(step: Step) -> PartialAttention:
    rows, new = step.layer.rows, step.new
    begin = step.phases.now()
    resident = step.layer.resident
    view = resident.pool.view or resident.view()
    if view.positions is not None:
        part = step.ops.attend_visible(
            *(step.grouped, view.k, view.v, view.positions, [row.length - 1 for row in rows]),
            new=new,
            scale=step.scale,
            softcap=step.softcap,
        )
    elif new == 1:
        part = step.ops.attend(step.grouped, view.k, view.v, scale=step.scale, softcap=step.softcap)
    else:
        causal = attend_causal(
            step.ops, step.q, view.k, view.v, scale=step.scale, softcap=step.softcap
        )
        shape = step.grouped.shape
        part = PartialAttention(causal.out.reshape(shape), causal.lse.reshape(shape[:3]))
    step.phases.book("resident_attention", begin)
    for row in rows:
        _count(step, row.table.num_tokens)
        heads = step.layer.shape.num_kv_heads
        step.work.resident_bytes += heads * row.table.num_tokens * step.row_bytes
    return part


def _attend_slots(step: Step, row: Row, slots: Tensor, reads: int) -> PartialAttention:
    """Attention over pages [Hkv, T, C] of the pool, the newest page last in each list.

    Args:
        reads: lists of a KV head that differ.
    """
    table = row.table
    begin = step.phases.now()
    part = step.ops.attend_pages(
        step.grouped[row.number],
        table.pool.pages,
        slots,
        step.query_positions(row.number),
        scale=step.scale,
        softcap=step.softcap,
        tail_fill=table.tail_fill,
    )
    step.phases.book("resident_attention", begin)
    size = row.page_size
    stored = slots.shape[-1] * size - (size - table.tail_fill)
    _count(step, stored)
    step.work.resident_bytes += slots.shape[0] * reads * stored * step.row_bytes
    return part


def _count(step: Step, stored: int) -> None:
    """Books resident entries of one row, attended by each query head; new tokens see the past."""
    seen = stored * step.new - step.new * (step.new - 1) // 2
    step.work.attended += seen * step.layer.shape.num_q_heads


# Entries that a method keeps on the device, as one more part --------------------------------------


def attend_kept(step: Step) -> list[PartialAttention]:
    """The part of what the method keeps of the rows, [B, Hkv, M, D]; none where it keeps nothing.

    All of it is older than the new tokens, so that nothing is hidden from them.
    """
    rows = step.layer.rows
    if not any(row.kept is not None and any(row.kept.lengths) for row in rows):
        return []
    begin = step.phases.now()
    parts = []
    for row in rows:
        q = step.grouped[row.number]
        if row.kept is None:
            parts.append(empty_partial(q))
        else:
            kept = row.kept.seen_from(row.length - step.new)
            parts.append(attend_entries(step.ops, q, kept, step.scale, step.softcap))
            step.work.attended += sum(row.kept.lengths) * q.shape[1]
            step.work.resident_bytes += row.kept.read_bytes
    step.phases.book("resident_attention", begin)
    return [stacked(parts)]


def attend_entries(
    ops: Ops, q: Tensor, kept: Entries, scale: float, softcap: float | None
) -> PartialAttention:
    """Grouped queries q [Hkv, M, D] over the entries of their KV heads; lse [Hkv, M]."""
    k, v = kept.read()
    bias = kept.bias
    dense_k, dense_v = kept.dense(k), kept.dense(v)
    if dense_k is None or dense_v is None:
        return attend_ragged(
            *(ops, q, k, v, kept.starts, kept.lengths), scale=scale, softcap=softcap, bias=bias
        )
    dense_bias = None if bias is None else kept.dense(bias)
    part = attend(
        *(ops, q[None], dense_k[None], dense_v[None]),
        scale=scale,
        softcap=softcap,
        bias=None if dense_bias is None else dense_bias[None, :, None],
    )
    return PartialAttention(part.out[0], part.lse[0])


def attend_ragged(
    ops: Ops,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> PartialAttention:
    """Every grouped query over as many rows as its KV head has.

    Args:
        q: [Hkv, M, D].
        k, v: [N, D], the rows of all heads.
        starts, lengths: by head its first row, and how many it has.
        bias: [N] float32, added to the logits.

    Returns:
        out [Hkv, M, D], lse [Hkv, M].
    """
    if q.shape[1] == 0 or not any(lengths):
        return empty_partial(q)
    return ops.attend_ragged(q, k, v, starts, lengths, scale=scale, softcap=softcap, bias=bias)
