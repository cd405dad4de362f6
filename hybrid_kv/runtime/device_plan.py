"""A decode step of a row on a device in two halves: advance the host's mirrors, then launch.

    advance (the host's mirrors) -> here -> one copy -> there -> kernels of all layers

Launching reads no host number that changes from step to step: kernels take places and counts from
`StepNumbers`, and page tables lie where they lay. So it may run as often as one likes, and what it
tells the device may be captured once and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybrid_kv.runtime.select import Selection, attend_told, tell_selection
from hybrid_kv.runtime.step import PlanReason, Step, pinned_pages
from hybrid_kv.store import LayerStore
from hybrid_kv.store.memory import allocate
from hybrid_kv.types import LayerShape, PartialAttention, Read, Work

PLACE, POSITION, PAGES, NEWEST, CHOSEN = range(5)
"""Of a layer: where its new token goes, that token's position, pages in the table, how many of them
are always read as the newest ones, how many are read in all."""


class StepNumbers:
    """By layer five numbers, int64; behind the last layer those of the whole step, of which only
    POSITION is used: that of the token in the model, padding included.

    here: [layers + 1, 5], the host's. reserved: layers whose new token has a place already, and is
    not stored yet. noted: layers whose numbers are those of a step that has not attended yet.

    Args:
        layers: whose steps they tell.
    """

    def __init__(self, layers: Sequence[LayerShape]) -> None:
        count = max((shape.layer_idx for shape in layers), default=-1) + 2
        self.here = np.zeros((count, 5), dtype=np.int64)
        self.reserved: set[int] = set()
        self.noted: set[int] = set()
        self._there: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """[layers + 1, 5] on a device, always the same memory; written by `send` alone."""
        if device not in self._there:
            self._there[device] = allocate(self.here.shape, torch.int64, device, 0)
        return self._there[device]

    def position_on(self, device: torch.device) -> Tensor:
        """[1, 1] int64 on a device: the position of the token that `Layers.advance` was told."""
        return self.on(device)[-1:, POSITION : POSITION + 1]

    def send(self, position: int | None = None) -> None:
        """Copies the numbers to all devices that read them; no thread waits.

        Args:
            position: of the token in the model; None where it stays what it was.
        """
        if position is not None:
            self.here[-1, POSITION] = position
        from hybrid_kv.ops.pinned import pinned_empty

        # Torch's pool of page-locked memory gives a block out again when its copy has been made.
        staged = pinned_empty(self.here.shape, torch.int64)
        staged.numpy()[:] = self.here
        for there in self._there.values():
            there.copy_(staged, non_blocking=True)

    def store(self, step: Step) -> None:
        """Stores a step's token in its place, if it has one already; whatever plan serves it."""
        row, index = step.layer.rows[0], step.layer.shape.layer_idx
        if step.unstored is None or index not in self.reserved:
            return
        listed = row.table.listed.there
        assert listed is not None
        (k, v), step.unstored = step.unstored, None
        mine = self.on(step.q.device)[index]
        step.ops.append_at(row.table.pool.pages, k[0, :, 0], v[0, :, 0], mine, listed)
        self.reserved.discard(index)

    def take_back(self, store: LayerStore | None) -> None:
        """Gives up the place of a token that was not stored in it."""
        if store is not None and store.shape.layer_idx in self.reserved:
            (row,) = store.rows
            self.reserved.discard(store.shape.layer_idx)
            row.length -= 1
            row.table.truncate(row.table.num_tokens - 1)

    def forget(self) -> None:
        """No step is under way any more."""
        self.reserved.clear()
        self.noted.clear()


class DevicePlan:
    """The steps of one token of a layer's only row, whose cold entries the device finds, if any.

    Args:
        reason: why this is no call of the engine.
    """

    def __init__(self, step: Step, read: Read, numbers: StepNumbers, reason: PlanReason) -> None:
        row, shape = step.layer.rows[0], step.layer.shape
        self.reason, self._numbers = reason, numbers
        self.table, self._row, self._index = row.table, row, shape.layer_idx
        self._pages, self._cold, self.read = read.pages, read.cold, read
        self._told: Selection | None = None
        self._mine = numbers.on(step.q.device)[shape.layer_idx]
        self._heads, self._kv_heads = shape.num_q_heads, shape.num_kv_heads
        self._row_bytes = step.row_bytes
        place, size = row.placement, row.page_size
        window = 1 if place is None else max(1, place.window_tokens)
        self._oldest = 0 if place is None else place.sink_tokens // size
        self._pinned = self._oldest + 1 + -(-(window - 1) // size)

    @property
    def by_numbers(self) -> DevicePlan:
        return self

    def takes(self, k: Tensor, v: Tensor) -> bool:
        """Whether a token can be stored: always, by numbers."""
        return True

    def follow(self) -> bool:
        """Takes up how many entries there are: each step reads that anew."""
        return True

    def described(self) -> list[tuple[str, object]]:
        """Nothing: numbers are noted by each step, and `hangs_on` says what launching reads."""
        return []

    # The host's half ------------------------------------------------------------------------------

    def advance(self, work: Work) -> None:
        """Moves the row's mirrors on by one token, and notes the numbers; `StepNumbers.send` tells
        the device.
        """
        row, here = self._row, self._numbers.here[self._index]
        here[PLACE], here[POSITION] = self.table.advance(row.length), row.length
        self._numbers.reserved.add(self._index)
        self._numbers.noted.add(self._index)
        row.length += 1
        self._note(work)

    def _note(self, work: Work) -> None:
        """Notes how much is read, and counts it."""
        row, table, heads = self._row, self.table, self._heads
        here, count, size = self._numbers.here[self._index], len(table.pages), row.page_size
        oldest, newest = pinned_pages(row, 1)
        chosen = count if self._pages == "all" else min(count, oldest + newest + self._pages)
        here[PAGES], here[NEWEST], here[CHOSEN] = count, newest, chosen
        if chosen < count:
            work.scored += heads * count
            work.select_bytes += self._kv_heads * count * self._row_bytes
        stored = table.num_tokens - (count - chosen) * size
        work.attended += heads * stored
        work.resident_bytes += self._kv_heads * stored * self._row_bytes
        work.visible += heads * row.length
        work.steps += heads
        if self._cold is not None:
            device = self._mine.device
            self._told = tell_selection(row, self._cold, work, queries=heads, device=device)

    def hangs_on(self) -> tuple[object, ...]:
        """State of the host that the launch of the last advanced step takes for granted."""
        pages, listed = self.table.pool.pages, self.table.listed.there
        lies = [0 if one is None else one.data_ptr() for one in (*pages, listed, self._mine)]
        sizes = pages.k.shape, None if listed is None else len(listed)
        return *lies, *sizes, self.read, self._told, self._oldest, self._pinned

    # The device's half ----------------------------------------------------------------------------

    def attend(self, step: Step) -> PartialAttention:
        """Result of `decode`; a token that has no place yet gets one."""
        numbers, index = self._numbers, self._index
        if step.unstored is not None:
            self.advance(step.work)
            numbers.send()
            numbers.store(step)
        elif index not in numbers.noted or (self._cold is not None and self._told is None):
            # it was stored by somebody else, or attends again
            numbers.here[index, POSITION] = self._row.length - 1
            self._note(step.work)
            numbers.send()
        numbers.noted.discard(index)
        return self._launch(step)

    def _launch(self, step: Step) -> PartialAttention:
        q, table, mine = step.grouped[0], self.table.listed.there, self._mine
        assert table is not None
        pages, begin = self.table.pool.pages, step.phases.now()
        if self._pages == "all":
            lists, count = table.expand(self._kv_heads, 1, -1), mine[PAGES : PAGES + 1]
        else:
            most = self._pinned + self._pages
            lists = step.ops.choose_listed(q, pages, table, mine, oldest=self._oldest, most=most)
            count = mine[CHOSEN : CHOSEN + 1]
            step.phases.book("select", begin)
            begin = step.phases.now()
        parts = [
            step.ops.attend_pages(
                *(q, pages, lists, mine[POSITION : POSITION + 1]),
                scale=step.scale,
                softcap=step.softcap,
                tail_fill=self.table.tail_fill,
                count=count,
            )
        ]
        step.phases.book("resident_attention", begin)
        if self._told is not None and self._told.places:
            assert self._cold is not None
            begin = step.phases.now()
            parts.append(attend_told(step, self._row, self._cold, self._told))
            step.phases.book("select", begin)
        begin = step.phases.now()
        out, lse = parts[0] if len(parts) == 1 else step.ops.merge(parts, step.q.dtype)
        step.phases.book("merge", begin)
        shape = step.q.shape
        return PartialAttention(out.to(step.q.dtype).reshape(shape), lse.reshape(shape[:3]))
