"""The numbers of a decode step that change from step to step, as kernels on devices read them.

    advance (the host's mirrors) -> here -> one copy -> there -> kernels of all layers

Kernels that read them from memory need not be told again when they change: what launches them can
be captured once and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybrid_kv.runtime.step import Step
from hybrid_kv.store import LayerStore
from hybrid_kv.store.memory import allocate
from hybrid_kv.types import LayerShape

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

    def send(self) -> None:
        """Copies the numbers to all devices that read them; no thread waits."""
        from hybrid_kv.ops.pinned import pinned_empty

        # Torch's pool of page-locked memory gives a block out again when its copy has been made.
        staged = pinned_empty(self.here.shape, torch.int64)
        staged.numpy()[:] = self.here
        for there in self._there.values():
            there.copy_(staged, non_blocking=True)


def store_reserved(step: Step, numbers: StepNumbers) -> None:
    """Stores a step's token in the place that it has, whatever plan serves it."""
    row, index = step.layer.rows[0], step.layer.shape.layer_idx
    assert step.unstored is not None
    assert row.table.listed.there is not None
    (k, v), step.unstored = step.unstored, None
    mine = numbers.on(step.q.device)[index]
    step.ops.append_at(row.table.pool.pages, k[0, :, 0], v[0, :, 0], mine, row.table.listed.there)
    numbers.reserved.discard(index)


def take_back_reserved(store: LayerStore | None, numbers: StepNumbers) -> None:
    """Gives up the place of a token that was not stored in it."""
    if store is not None and store.shape.layer_idx in numbers.reserved:
        (row,) = store.rows
        numbers.reserved.discard(store.shape.layer_idx)
        row.length -= 1
        row.table.truncate(row.table.num_tokens - 1)
