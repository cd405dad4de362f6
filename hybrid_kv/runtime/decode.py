"""One decode step of one layer, in the order in which it happens."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.attention import attend, attend_causal, merge_partials
from hybrid_kv.runtime.cold import ColdBudget, ask_cold, attend_cold
from hybrid_kv.runtime.step import Step, stacked
from hybrid_kv.transfer import Parcel
from hybrid_kv.types import Budget, PartialAttention, Read, TokenBudget


def decode(step: Step, read: Read) -> PartialAttention:
    """Attention of the new tokens over what the method named.

    Returns:
        out [B, Hq, T, D], lse [B, Hq, T].
    """
    # The queries leave first: they travel while the device is told to select and attend, and the
    # host searches while the device does.
    asked = None if read.cold is None else ask_cold(step, read.cold)
    chosen = choose_resident(step, read.pages)
    hot = send_hot(step, chosen)
    parts = [attend_resident(step, chosen)]
    if asked is not None and read.cold is not None:
        beside = _send_lse(step, parts[0], read.cold)
        parts.append(attend_cold(step, asked, read.cold, hot, beside))
    with step.phases.measure("merge"):
        out, lse = merge_partials(parts, dtype=step.q.dtype, ops=step.ops)
    _count_visible(step)
    shape = step.q.shape
    return PartialAttention(out.reshape(shape), lse.reshape(shape[:3]))


def _send_lse(step: Step, part: PartialAttention, cold: ColdBudget) -> Parcel | None:
    """How much the resident entries weigh, on its way to the host where a budget asks for it."""
    return step.executor.send(part.lse) if isinstance(cold, TokenBudget) and cold.weighs else None


def choose_resident(step: Step, page_budget: Budget) -> list[Tensor] | None:
    """By row the table indices [Hkv, T, C] of the pages to attend, the newest page last: sinks,
    window and the best others. None: all pages of all rows.
    """
    rows = range(step.layer.num_rows)
    if page_budget == "all" or all(_free_pages(step, row) <= page_budget for row in rows):
        return None
    with step.phases.measure("select"):
        return [_choose_pages(step, row, page_budget) for row in rows]


def send_hot(step: Step, chosen: list[Tensor] | None) -> list[Parcel | None]:
    """By row, on its way to the host: which hot pages [Hkv, T, H] bool are among the chosen ones.

    None: all of them, if the row has any.
    """
    layer = step.layer
    parcels: list[Parcel | None] = [None] * layer.num_rows
    for row, pages in enumerate(chosen or ()):
        if hot := layer.hot_range(row):
            size = (*pages.shape[:2], len(layer.resident.tables[row]))
            taken = torch.zeros(size, dtype=torch.bool, device=pages.device)
            taken.scatter_(-1, pages, value=True)
            parcels[row] = step.executor.send(taken[..., hot.start : hot.stop])
    return parcels


def attend_resident(step: Step, chosen: list[Tensor] | None) -> PartialAttention:
    """The chosen resident pages; [B, Hkv, M, D] and [B, Hkv, M]."""
    resident, rows = step.layer.resident, range(step.layer.num_rows)
    if chosen is not None:
        slots = [resident.slots(row)[pages] for row, pages in enumerate(chosen)]
    elif step.ops.reads_pages(step.q):
        every = (step.layer.shape.num_kv_heads, step.q.shape[2], -1)
        slots = [resident.slots(row).expand(every) for row in rows]
    else:
        return _attend_all_resident(step)
    return stacked([_attend_slots(step, row, slots[row]) for row in rows])


def _attend_all_resident(step: Step) -> PartialAttention:
    layer, grouped, new = step.layer, step.grouped, step.q.shape[2]
    with step.phases.measure("resident_attention"):
        view = layer.resident.view()
        for row in range(layer.num_rows):
            _count(step, layer.resident.num_tokens(row) * new - new * (new - 1) // 2)
        if view.positions is None and new > 1:
            causal = attend_causal(
                step.ops, step.q, view.k, view.v, scale=step.scale, softcap=step.softcap
            )
            return PartialAttention(
                causal.out.reshape(grouped.shape), causal.lse.reshape(grouped.shape[:3])
            )
        if view.positions is None:
            return attend(step.ops, grouped, view.k, view.v, scale=step.scale, softcap=step.softcap)
        newest = [length - 1 for length in layer.lengths]
        return step.ops.attend_visible(
            *(grouped, view.k, view.v, view.positions, newest),
            new=new,
            scale=step.scale,
            softcap=step.softcap,
        )


def _pinned_pages(step: Step, row: int) -> tuple[int, int]:
    """How many pages at the table's start (sinks) and end (window) are read by every step."""
    layer, place = step.layer, step.layer.placement
    pages, fill = len(layer.resident.tables[row]), layer.resident.tail_fill[row]
    sinks = place.sink_tokens // layer.page_size if place is not None else 0
    window = place.window_tokens if place is not None else 0
    # The window of the first new token, and the later ones: all see themselves and each other.
    recent = max(1, window) + step.q.shape[2] - 1
    tail = 1 + -(-max(0, recent - fill) // layer.page_size)
    return min(sinks, pages), min(tail, pages)


def _free_pages(step: Step, row: int) -> int:
    """Resident pages of a row that a step reads only when they are chosen."""
    return max(0, len(step.layer.resident.tables[row]) - sum(_pinned_pages(step, row)))


def _attend_slots(step: Step, row: int, slots: Tensor) -> PartialAttention:
    """Attention over pages [Hkv, T, C] of the pool, the newest page last in each list."""
    resident, new = step.layer.resident, step.q.shape[2]
    with step.phases.measure("resident_attention"):
        part = step.ops.attend_pages(
            step.grouped[row],
            resident.pool.pages,
            slots,
            step.query_positions(row),
            scale=step.scale,
            softcap=step.softcap,
            tail_fill=resident.tail_fill[row],
        )
    size = resident.page_size
    filled = slots.shape[-1] * size - (size - resident.tail_fill[row])
    _count(step, filled * new - new * (new - 1) // 2)
    return part


def _choose_pages(step: Step, row: int, page_budget: int) -> Tensor:
    """Table indices [Hkv, T, C]: pinned pages and the best others by upper bound (Quest)."""
    q, new = step.grouped[row], step.q.shape[2]
    head, tail = _pinned_pages(step, row)
    key_min, key_max = step.layer.resident.page_bounds(row)
    heads, num_pages, _ = key_min.shape
    step.work.scored += heads * q.shape[1] * num_pages
    count = min(head + tail + page_budget, num_pages)
    return step.ops.choose_pages(
        q, key_min, key_max, new=new, oldest=head, newest=tail, count=count
    )


def _count(step: Step, entries: int) -> None:
    """Books resident entries attended by each query head of one row."""
    step.work.attended += entries * step.layer.shape.num_q_heads


def _count_visible(step: Step) -> None:
    new, heads = step.q.shape[2], step.layer.shape.num_q_heads
    for length in step.layer.lengths:
        step.work.visible += heads * (length * new - new * (new - 1) // 2)
    step.work.steps += heads * new * step.layer.num_rows
