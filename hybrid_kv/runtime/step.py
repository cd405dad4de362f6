"""What one decode step of one layer works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_kv.attention import group_queries
from hybrid_kv.ops import Ops
from hybrid_kv.runtime.retrieve import Retrieved
from hybrid_kv.store import LayerKV
from hybrid_kv.transfer import Executor
from hybrid_kv.types import PartialAttention, TokenBudget, Work
from hybrid_kv.watch.phases import Phases


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one layer: its means, its queries, and where it counts what it did."""

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

    def query_positions(self, row: int) -> Tensor:
        """[T]; every new token of a decode step is a real one."""
        end = self.layer.lengths[row]
        return torch.arange(end - self.q.shape[2], end, device=self.q.device)


def stacked(rows: Sequence[PartialAttention]) -> PartialAttention:
    """The rows' parts as one part of a batch."""
    if len(rows) == 1:
        return PartialAttention(rows[0].out[None], rows[0].lse[None])
    return PartialAttention(
        torch.stack([part.out for part in rows]), torch.stack([part.lse for part in rows])
    )
