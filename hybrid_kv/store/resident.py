"""The resident tier of one layer: the page tables of all batch rows over one pool.

Attention does not care about order, so views come in slot order and visibility is decided by
positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from hybrid_kv.ops import Ops
from hybrid_kv.store.pool import PagePool, ResidentView
from hybrid_kv.store.table import PageTable
from hybrid_kv.types import HIDDEN, LayerShape


class ResidentStore:
    """Pages on the device, a table for each row; forking copies tables, not pages."""

    def __init__(
        self,
        shape: LayerShape,
        page_size: int,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        capacity_tokens: int = 0,
        ops: Ops | None = None,
    ) -> None:
        pages = -(-capacity_tokens // page_size)
        self.pool = PagePool(shape, page_size, num_rows, dtype, device, pages, ops)
        self.pool.stores.add(self)
        self.tables = [PageTable(self.pool, row) for row in range(num_rows)]
        self._forked = False  # some row reads pages of another row's arena

    def fork(self, sources: Sequence[int]) -> None:
        """Row r continues from what row sources[r] holds; pages are shared, not copied."""
        if list(sources) == list(range(len(self.tables))):
            return
        before = self.tables
        self.tables = [PageTable(self.pool, row) for row in range(len(sources))]
        for table, source in zip(self.tables, sources, strict=True):
            table.share(before[source])
        for table in before:
            table.truncate(0)
        self._forked, self.pool.view = True, None

    def shared(self) -> ResidentStore:
        """A store of the same pages, in the same memory; who writes to a page copies it first.

        As long as both are there the rows of either lie among those of the other, so that `view` of
        both is a copy.
        """
        new = copy(self)
        new.pool.stores.add(new)
        new.tables = [PageTable(self.pool, row) for row in range(len(self.tables))]
        for table, source in zip(new.tables, self.tables, strict=True):
            table.share(source)
            source.in_order = False
        for table in (*new.tables, *self.tables):
            table.returns_pages()
        self.pool.view = None
        return new

    def select(self, sources: Sequence[int], room_tokens: int = 0) -> ResidentStore:
        """A new store whose row r is a copy of row sources[r]; any number of rows.

        Args:
            room_tokens: how many there is room for in a row, at least.
        """
        most = max((self.tables[source].num_tokens for source in sources), default=0)
        new = self.empty(len(sources), max(most, room_tokens))
        for table, source in zip(new.tables, sources, strict=True):
            table.take(self.tables[source])
        if self.pool.key_min is not None:
            new.pool.enable_digests()
        return new

    def empty(self, num_rows: int, capacity_tokens: int) -> ResidentStore:
        """A store without tokens for entries like these."""
        pool = self.pool
        return ResidentStore(
            pool.shape,
            pool.page_size,
            num_rows,
            pool.dtype,
            pool.device,
            capacity_tokens=capacity_tokens,
            ops=pool.ops,
        )

    # Views --------------------------------------------------------------------------------------

    @property
    def in_order(self) -> bool:
        """Slot n of every row holds its position n, and all rows are equally long."""
        first = self.tables[0].num_tokens
        return all(table.in_order and table.num_tokens == first for table in self.tables)

    def view(self) -> ResidentView:
        """Every resident entry; zero-copy unless rows share pages after a fork."""
        if self._forked or len(self.pool.stores) > 1:
            return self._gathered_view()
        if self.in_order:
            return ResidentView(*self._slots(self.tables[0].num_tokens), None)
        pool = self.pool
        if pool.view is None:  # it stays the same for many steps
            count = max(pool.high) * pool.page_size
            positions = pool.positions.view(len(self.tables), -1)[:, :count]
            pool.view = ResidentView(*self._slots(count), positions)
        return pool.view

    def _slots(self, count: int) -> tuple[Tensor, Tensor]:
        """k, v [B, Hkv, count, D]: the first slots of every arena, views."""
        pool = self.pool
        size = (pool.shape.num_kv_heads, len(self.tables), -1, pool.shape.head_dim)
        k, v = (memory.view(size).transpose(0, 1)[:, :, :count] for memory in (pool.k, pool.v))
        return k, v

    def _gathered_view(self) -> ResidentView:
        pool, most = self.pool, max(map(len, self.tables))
        slots = np.zeros((len(self.tables), most), dtype=np.int64)
        for row, table in enumerate(self.tables):
            slots[row, : len(table)] = pool.slots(table.pages)
        where = torch.from_numpy(slots).to(pool.device)
        lengths = torch.tensor(list(map(len, self.tables)), device=pool.device)
        padding = torch.arange(most, device=pool.device)[None] >= lengths[:, None]
        positions = pool.positions[where].masked_fill(padding[..., None], HIDDEN)
        k, v = (t[:, where].transpose(0, 1).flatten(2, 3) for t in (pool.k, pool.v))
        return ResidentView(k, v, positions.flatten(1))

    # Integrity ----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises IntegrityError unless counts, fills, order claims and digests are true."""
        from hybrid_kv.store.integrity import check_resident

        check_resident(self.pool, self.tables, has_forked=self._forked)
