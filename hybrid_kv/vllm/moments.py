"""Moments of the beginnings of sequences, for the estimate of the entries that are not read.

Moments are kept with the block that a beginning ends with. A full block is read by sequences with
one and the same beginning alone, as vLLM shares blocks by the hash of all tokens up to them, and it
is written again only when it has become another's: so neither needs a word from the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.ops.native.paged_sketch import SearchRange
from hybrid_kv.ops.tail import SAMPLES, Tail

MOST = 32
"""Beginnings of one layer whose moments are kept: those used last."""

RowsOf: TypeAlias = Callable[[Tensor], Tensor]
"""Rows of the keys [n, Hkv] of a sequence's tokens [n] int64."""


class PrefixMoments:
    """Moments of one layer, by the block where a beginning ends.

    Args:
        blocks: [N, Hkv, 2, block, D].
    """

    def __init__(self, blocks: Tensor) -> None:
        self._blocks = blocks
        self._has = np.zeros(len(blocks), bool)
        self._kept: dict[int, Tail] = {}  # the one used last at the end

    def __len__(self) -> int:
        return len(self._kept)

    def overwrite(self, slots: npt.NDArray[np.int64]) -> None:
        """Take note that keys in these slots are others than before."""
        blocks = np.unique(slots // self._blocks.shape[3])
        for block in blocks[self._has[blocks]]:
            self._drop(int(block))

    def of(self, searched: SearchRange, rows_of: RowsOf) -> Tail | None:
        """Moments for the searched part of a sequence, of most of its entries at least; None where
        it has no full block.
        """
        tokens = self._blocks.shape[3]
        table = searched.table[: (searched.first + searched.num_tokens) // tokens]
        if not len(table) or len(table) * tokens <= searched.first:
            return None
        known = np.flatnonzero(self._has[table])
        if len(known):
            block = int(table[known[-1]])
            kept = self._kept.pop(block)
            self._kept[block] = kept
            if not kept.is_outgrown(len(table) * tokens - searched.first):
                return kept
        new = self._learn(searched.first, len(table) * tokens, rows_of)
        if len(known):
            self._drop(block)
        elif len(self._kept) >= MOST:
            self._drop(next(iter(self._kept)))
        self._kept[int(table[-1])] = new
        self._has[table[-1]] = True
        return new

    def _learn(self, first: int, end: int, rows_of: RowsOf) -> Tail:
        some = torch.linspace(first, end - 1, min(SAMPLES, end - first), dtype=torch.float64).long()
        rows, dim = rows_of(some), self._blocks.shape[-1]
        memory = self._blocks.view(-1, dim)
        keys = memory.index_select(0, rows.T.flatten()).unflatten(0, (-1, len(some)))
        below = rows.T.flatten() + self._blocks.shape[3]
        values = memory.index_select(0, below).unflatten(0, (-1, len(some)))
        return replace(Tail.of(keys, values), count=end - first)

    def _drop(self, block: int) -> None:
        del self._kept[block]
        self._has[block] = False
