"""Moments of the beginnings of sequences, for the estimate of the entries that are not read.

Moments are kept with the block that a beginning ends with. A full block is read by sequences with
one and the same beginning alone, as vLLM shares blocks by the hash of all tokens up to them, and it
is written again only when it has become another's: so neither needs a word from the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.ops.native.paged_sketch import SearchRange
from hybrid_kv.ops.tail import SAMPLES, AttendedSums, Tail, UnreadPart, capped

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
        self._joined: tuple[list[Tail], Tail] | None = None

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

    def joined(self, tails: Sequence[Tail]) -> Tail:
        """The moments of several sequences as those of so many more KV heads.

        Steps ask for the same ones again and again, so that the last are kept.
        """
        if len(tails) == 1:
            return tails[0]
        if self._joined is None or list(map(id, self._joined[0])) != list(map(id, tails)):
            parts = [
                torch.cat(part)
                for part in zip(*(one.tensors().values() for one in tails), strict=True)
            ]
            self._joined = list(tails), Tail(0, *parts)
        return self._joined[1]

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


def unread(
    tail: Tail,
    queries: Tensor,
    scores: Tensor,
    searched: Sequence[SearchRange],
    scale: float,
    softcap: float | None,
) -> tuple[UnreadPart, Tensor]:
    """Attention over what a search did not find, by the moments of each sequence.

    Args:
        tail: the moments of all S sequences, as `PrefixMoments.joined` gives them.
        queries: [S, Hkv, G, D]. scores: [S, Hkv, G, K] float32 of what was found, -inf for none.

    Returns:
        The unread part, [S * Hkv, G] and so on, and the logarithm [S * Hkv, G, K] by which the
        weight of each found value is changed for the mean value of the unread to be right.
    """
    heads = queries.shape[1]
    scores = scores.flatten(0, 1)
    there = scores > -torch.inf
    sums = AttendedSums(there.sum(-1), scores.masked_fill(~there, 0.0).sum(-1))
    logits = capped(scale * scores, softcap)
    limit = logits.masked_fill(~there, torch.inf).amin(-1)
    counts = torch.tensor([one.num_tokens for one in searched]).repeat_interleave(heads)[:, None]
    part = tail.attend(queries.flatten(0, 1), counts, sums, limit, scale=scale, softcap=softcap)
    taken = (part.discount[..., None] - logits).exp().masked_fill(~there, 0.0)
    return part, torch.log1p(-taken.clamp(max=1.0))
