"""What one decode step of one layer works with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from hybrid_kv.runtime.means import Means
from hybrid_kv.runtime.retrieve import Retrieved
from hybrid_kv.store import LayerKV
from hybrid_kv.types import PartialAttention, TokenBudget

Found: TypeAlias = dict[int, tuple[TokenBudget, Retrieved]]
"""By row what a step has retrieved, and under which budget."""


class Step:
    """One step of one layer: its means, its queries, and where it counts what it did.

    grouped: the queries [B, Hkv, M, D], M = G * T with row g * T + t. new: T. at_home: whether the
        host searches where the queries lie, so that nothing travels.

    Args:
        q: [B, Hq, T, D].
        found: takes what was retrieved, by row, where somebody looks at it.
    """

    __slots__ = (
        *("ops", "executor", "phases", "work", "layer", "q", "grouped", "new"),
        *("scale", "softcap", "found", "at_home"),
    )

    def __init__(
        self,
        means: Means,
        layer: LayerKV,
        q: Tensor,
        *,
        scale: float,
        softcap: float | None,
        found: Found | None = None,
    ) -> None:
        self.ops, self.executor = means.ops, means.executor
        self.phases, self.work = means.phases, means.work
        self.layer, self.q, self.found = layer, q, found
        self.scale, self.softcap = scale, softcap
        batch, heads, self.new, dim = q.shape
        kv_heads = layer.shape.num_kv_heads
        self.grouped = q.reshape(batch, kv_heads, heads // kv_heads * self.new, dim)
        self.at_home = q.is_cpu and means.executor.at_once

    def query_positions(self, row: int) -> Tensor:
        """[T]; every new token of a decode step is a real one."""
        end = self.layer.rows[row].length
        return torch.arange(end - self.new, end, device=self.q.device)


def stacked(rows: Sequence[PartialAttention]) -> PartialAttention:
    """The rows' parts as one part of a batch."""
    if len(rows) == 1:
        return PartialAttention(rows[0].out[None], rows[0].lse[None])
    return PartialAttention(
        torch.stack([part.out for part in rows]), torch.stack([part.lse for part in rows])
    )
