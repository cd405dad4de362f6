"""One decode step of one layer: what it works with, its numbers in the memory of a device, and why
it is not made in the fastest way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hybrid_kv.ops import Ops
from hybrid_kv.store import LayerStore, Retrieved, Row
from hybrid_kv.store.memory import allocate
from hybrid_kv.transfer import Executor
from hybrid_kv.types import LayerShape, PartialAttention, SearchResult, TokenBudget, Work
from hybrid_kv.watch.phases import Phases

if TYPE_CHECKING:
    from hybrid_kv.runtime.look_ahead_state import LookAheadResults

ColdBudget: TypeAlias = TokenBudget | Literal["all"]
Found: TypeAlias = dict[int, tuple[TokenBudget, Retrieved]]
"""By row what a step has retrieved, and under which budget."""


@dataclass(slots=True)
class Step:
    """One step of one layer: its means, its queries, and where it counts what it did.

    q: [B, Hq, T, D]. new: T. at_home: whether the host searches where the queries lie, so that
    nothing travels. found: takes what was retrieved, where somebody looks at it. ahead: what was
    searched before q was known. asked: what the search of the first extent of the only row finds,
    where it was asked together with other caches. unstored: k, v [B, Hkv, T, D] of the new tokens
    until the layer stores them.
    """

    ops: Ops
    executor: Executor
    phases: Phases
    work: Work
    layer: LayerStore
    q: Tensor
    new: int
    scale: float
    softcap: float | None
    at_home: bool
    found: Found | None = None
    ahead: LookAheadResults | None = None
    asked: SearchResult | None = None
    unstored: tuple[Tensor, Tensor] | None = None
    _grouped: Tensor | None = None

    @property
    def grouped(self) -> Tensor:
        """The queries as [B, Hkv, M, D], M = G * T with row g * T + t."""
        if self._grouped is None:
            q = self.q
            self._grouped = q.reshape(len(q), self.layer.shape.num_kv_heads, -1, q.shape[3])
        return self._grouped

    @property
    def row_bytes(self) -> int:
        """Bytes of the key and the value of an entry of one KV head."""
        return 2 * self.layer.shape.head_dim * self.layer.resident.pool.dtype.itemsize

    def query_positions(self, row: int) -> Tensor:
        """[T]; every new token of a decode step is a real one."""
        end = self.layer.rows[row].length
        return torch.arange(end - self.new, end, device=self.q.device)


def name_of_new(layer_idx: int) -> str:
    """Name of the new keys and values of a layer, for an error."""
    return f"keys and values of layer {layer_idx}"


def stacked(rows: Sequence[PartialAttention]) -> PartialAttention:
    """The rows' parts as one part of a batch."""
    if len(rows) == 1:
        return PartialAttention(rows[0].out[None], rows[0].lse[None])
    return PartialAttention(
        torch.stack([part.out for part in rows]), torch.stack([part.lse for part in rows])
    )


# What is read, and counted ------------------------------------------------------------------------


def pinned_pages(row: Row, new: int) -> tuple[int, int]:
    """Counts of pages that a step of `new` tokens reads at the table's start and end."""
    place, pages, size = row.placement, len(row.table.pages), row.page_size
    sinks = place.sink_tokens // size if place is not None else 0
    window = place.window_tokens if place is not None else 0
    # The window of the first new token, and the later ones: all see themselves and each other.
    recent = max(1, window) + new - 1
    tail = 1 + -(-max(0, recent - row.table.tail_fill) // size)
    return min(sinks, pages), min(tail, pages)


def reads_all(budget: ColdBudget | None, stored: int) -> bool:
    """Whether a budget is for all stored entries, so that nothing has to be chosen."""
    return budget is not None and (budget == "all" or budget.top_k >= stored)


def count_cold(work: Work, entries: int, most: int) -> None:
    """Books cold entries attended by all query heads of a row together, and by one at most."""
    work.attended += entries
    work.retrieved += entries
    work.most_retrieved = max(work.most_retrieved, most)


# Numbers that change from step to step, as kernels on devices read them ---------------------------
#
#     advance (the host's mirrors) -> here -> one copy -> there -> kernels of all layers
#
# Kernels that read them from memory need not be told again when they change: what launches them can
# be captured once and replayed.

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


# Why a step is not made in the fastest way --------------------------------------------------------


class PlanReason(NamedTuple):
    """Why a step is no single call. code: one of a fixed set; text: in words."""

    code: str
    text: str


@dataclass(slots=True)
class GraphUse:
    """Record of the last forward as one graph.

    reason: why it was not a replay; None where it was. captures, replays: so far.
    """

    reason: PlanReason | None = None
    captures: int = 0
    replays: int = 0

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        code, text = self.reason or ("", "")
        counts = {"captures": self.captures, "replays": self.replays}
        return {"code": code, "reason": text, **counts}
