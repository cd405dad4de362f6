"""Resident entries of a row that belong elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_kv.store.row import Row


@dataclass(frozen=True, slots=True)
class Overflow:
    """Entries on their way out: k, v [Hkv, n, D] (views), positions [n] (host).

    pages: of the table, from .. to, that hold them and nothing else; none where they leave to the
    token.

    Nothing changes yet: the caller copies what shall live on, then lets the row forget the rest.
    """

    k: Tensor
    v: Tensor
    positions: Tensor
    pages: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, row: Row) -> Overflow | None:
        """The pages between sinks and window that the placement does not keep; None for none."""
        start, stop = row.outside()
        if start >= stop:
            return None
        table, size = row.table, row.table.pool.page_size
        count, behind = (stop - start) * size, table.num_tokens - start * size
        first = row.length - behind
        return cls(
            *table.read(start, stop, count), torch.arange(first, first + count), (start, stop)
        )

    @classmethod
    def of_prompt(cls, row: Row) -> Overflow:
        """Tokens of a prompt that a method absorbs, of which there may be none.

        `LayerKV.compact` takes them out.
        """
        start, stop = row.outside_of_prompt()
        k, v = row.table.view()
        return cls(k[:, start:stop], v[:, start:stop], torch.arange(start, stop))
