"""One decode step of one layer, in the order in which it happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_kv.attention import (
    attend,
    attend_causal,
    attend_retrieved,
    empty_partial,
    group_queries,
    merge_partials,
)
from hybrid_kv.errors import ConfigError
from hybrid_kv.ops import Ops
from hybrid_kv.runtime.retrieve import Retrieved, retrieve
from hybrid_kv.runtime.stats import Phases
from hybrid_kv.store import LayerKV
from hybrid_kv.transfer import Executor, Parcel
from hybrid_kv.types import Budget, EntrySet, PartialAttention, Tier, TokenBudget, Work


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of one layer works with."""

    ops: Ops
    executor: Executor
    phases: Phases
    work: Work
    layer: LayerKV
    q: Tensor  # [B, Hq, T, D]
    scale: float
    softcap: float | None
    found: dict[int, tuple[TokenBudget, Retrieved]] | None = None  # by row, where one looks at it

    @property
    def grouped(self) -> Tensor:
        return group_queries(self.q, self.layer.shape.num_kv_heads)

    @property
    def query_positions(self) -> Tensor:
        """[B, T]; every new token of a decode step is a real one."""
        new = self.q.shape[2]
        ends = torch.tensor(self.layer.lengths, device=self.q.device)[:, None]
        return ends - new + torch.arange(new, device=self.q.device)


def decode(step: Step, sets: Sequence[EntrySet]) -> PartialAttention:
    """Attention of the new tokens over the entries that the method named.

    Returns:
        out [B, Hq, T, D], lse [B, Hq, T].

    Raises:
        ConfigError: a budget is of the other tier's kind, or below 1.
    """
    cold = [_token_budget(entries) for entries in sets if entries.tier is Tier.COLD]
    near = [_page_budget(entries) for entries in sets if entries.tier is Tier.RESIDENT]
    # The queries leave first: they travel while the device is told to select and attend, and the
    # host searches while the device does.
    queries = send_queries(step) if cold else None
    parts = [attend_resident(step, budget) for budget in near]
    if queries is not None:
        parts += [attend_cold(step, queries, budget) for budget in cold]
    with step.phases.measure("merge"):
        parts = parts or [empty_partial(step.grouped)]
        out, lse = merge_partials(parts, dtype=step.q.dtype, ops=step.ops)
    _count_visible(step)
    shape = step.q.shape
    return PartialAttention(out.reshape(shape), lse.reshape(shape[:3]))


def _token_budget(entries: EntrySet) -> TokenBudget | None:
    """None for all of the tier."""
    if isinstance(entries.budget, TokenBudget):
        return entries.budget
    return None if entries.budget == "all" else TokenBudget(entries.budget)


def _page_budget(entries: EntrySet) -> Budget:
    if isinstance(entries.budget, TokenBudget):
        raise ConfigError(
            f"the budget of resident entries must be a number of pages or 'all', got "
            f"{entries.budget}; give a TokenBudget to cold entries only"
        )
    return entries.budget


def attend_resident(step: Step, page_budget: Budget) -> PartialAttention:
    """Sinks, window and the chosen other resident pages; [B, Hkv, M, D] and [B, Hkv, M]."""
    layer = step.layer
    if page_budget == "all" or all(
        _free_pages(step, row) <= page_budget for row in range(layer.num_rows)
    ):
        if step.ops.reads_pages(step.q):
            return _stacked([_attend_all_pages(step, row) for row in range(layer.num_rows)])
        return _attend_all_resident(step)
    return _stacked([_attend_pages(step, row, page_budget) for row in range(layer.num_rows)])


def _stacked(rows: Sequence[PartialAttention]) -> PartialAttention:
    if len(rows) == 1:
        return PartialAttention(rows[0].out[None], rows[0].lse[None])
    return PartialAttention(
        torch.stack([part.out for part in rows]), torch.stack([part.lse for part in rows])
    )


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
        bias = None
        if view.positions is not None:
            bias = _hide_later(view.positions[:, None], step.query_positions[:, :, None])
            bias = bias.repeat(1, layer.shape.group_size, 1)[:, None]
        return attend(
            step.ops, grouped, view.k, view.v, scale=step.scale, softcap=step.softcap, bias=bias
        )


def _hide_later(positions: Tensor, query_positions: Tensor) -> Tensor:
    hidden = positions > query_positions
    bias = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return bias.masked_fill_(hidden, -torch.inf)


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


def _attend_all_pages(step: Step, row: int) -> PartialAttention:
    heads, new = step.layer.shape.num_kv_heads, step.q.shape[2]
    slots = step.layer.resident.slots(row)
    return _attend_slots(step, row, slots.expand(heads, new, -1))


def _attend_pages(step: Step, row: int, page_budget: int) -> PartialAttention:
    with step.phases.measure("select"):
        pages = _choose_pages(step, row, page_budget)
    return _attend_slots(step, row, step.layer.resident.slots(row)[pages])


def _attend_slots(step: Step, row: int, slots: Tensor) -> PartialAttention:
    """Attention over pages [Hkv, T, C] of the pool, the newest page last in each list."""
    resident, new = step.layer.resident, step.q.shape[2]
    with step.phases.measure("resident_attention"):
        part = step.ops.attend_pages(
            step.grouped[row],
            resident.pool.pages,
            slots,
            step.query_positions[row],
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


def send_queries(step: Step) -> Parcel | None:
    """The grouped queries on their way to the host; None where no row has cold entries."""
    if not any(step.layer.cold.rows):
        return None
    with step.phases.measure("transfer"):
        return step.executor.send(step.grouped)


def attend_cold(step: Step, queries: Parcel, budget: TokenBudget | None) -> PartialAttention:
    """Retrieved cold entries (None: all of them), attended on the host.

    Returns:
        out [B, Hkv, M, D], lse [B, Hkv, M] on the query's device.
    """
    with step.phases.measure("wait"):
        q = queries.open()
    rows = [_attend_cold_row(step, row, q[row], budget) for row in range(step.layer.num_rows)]
    with step.phases.measure("transfer"):
        return step.executor.deliver(_stacked(rows), step.q.device)


def _attend_cold_row(
    step: Step, row: int, q: Tensor, budget: TokenBudget | None
) -> PartialAttention:
    cold = step.layer.cold
    stored, new = cold.num_tokens(row), step.q.shape[2]
    if stored == 0:
        return empty_partial(q)
    if budget is None or budget.top_k >= stored:
        every = stored * new * step.layer.shape.num_q_heads
        step.work.add(Work(attended=every, retrieved=every, most_retrieved=stored))
        return _attend_all_cold(step, row, q)
    scale, softcap = step.scale, step.softcap
    with step.phases.measure("search"):
        found = retrieve(cold, row, q, budget, scale=scale, softcap=softcap)
    if step.found is not None:
        step.found[row] = (budget, found)
    attended, most = int(found.counts.sum()), int(found.counts.max())
    step.work.add(
        Work(attended=attended, retrieved=attended, scored=found.scored, most_retrieved=most)
    )
    with step.phases.measure("cold_attention"):
        return merge_partials(
            [
                attend_retrieved(
                    step.ops, q, extent.keys, extent.values, ids, scale=scale, softcap=softcap
                )
                for extent, ids in found.parts
            ]
        )


def _attend_all_cold(step: Step, row: int, q: Tensor) -> PartialAttention:
    with step.phases.measure("cold_attention"):
        parts = []
        for span in step.layer.cold.rows[row]:
            entries = (tensor[None] for tensor in span.extent.first(span.length))
            part = attend(step.ops, q[None], *entries, scale=step.scale, softcap=step.softcap)
            parts.append(PartialAttention(part.out[0], part.lse[0]))
        return merge_partials(parts)


def _count(step: Step, entries: int) -> None:
    """Books resident entries attended by each query head of one row."""
    step.work.attended += entries * step.layer.shape.num_q_heads


def _count_visible(step: Step) -> None:
    new, heads = step.q.shape[2], step.layer.shape.num_q_heads
    for length in step.layer.lengths:
        step.work.visible += heads * (length * new - new * (new - 1) // 2)
    step.work.steps += heads * new * step.layer.num_rows
