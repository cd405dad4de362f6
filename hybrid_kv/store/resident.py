"""The resident tier of one layer: page tables over a pool, one per batch row.

A row's pages are in logical order: sinks, hot pages (copies of cold ones, in any order), spare
pages, window. Attention does not care about order, so views come in slot order and visibility is
decided by positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.errors import IntegrityError
from hybrid_kv.ops import Ops
from hybrid_kv.store.pool import PagePool, arena_of
from hybrid_kv.types import HIDDEN, LayerShape


@dataclass(frozen=True, slots=True)
class ResidentView:
    """All resident entries of all rows.

    k, v: [B, Hkv, N, D], views of the pool wherever every row's pages lie in its own arena.
    positions: [B, N] int64, later than any query where a slot is empty; None when slot n of every
        row holds position n, so that no mask is needed.
    """

    k: Tensor
    v: Tensor
    positions: Tensor | None


class ResidentStore:
    """Pages on the device; appending is amortised O(1), forking copies tables, not pages."""

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
        self.page_size, self.num_rows = page_size, num_rows
        pages = -(-capacity_tokens // page_size)
        self.pool = PagePool(shape, page_size, num_rows, dtype, device, pages, ops)
        self.tables: list[list[int]] = [[] for _ in range(num_rows)]
        self.tail_fill = [page_size] * num_rows  # tokens in the last page; page_size when none
        self._in_order = True  # slot n of every row holds its position n
        self._forked = False  # some row reads pages of another row's arena
        self._last_slots: dict[int, tuple[int, list[int], Tensor]] = {}  # with capacity and table
        self._last_view: tuple[Tensor, int, ResidentView] | None = None  # pool.k, slots per row

    def num_tokens(self, row: int) -> int:
        return len(self.tables[row]) * self.page_size - (self.page_size - self.tail_fill[row])

    # Writing ------------------------------------------------------------------------------------

    def append(self, row: int, k: Tensor, v: Tensor, first_position: int) -> None:
        """Adds k, v [Hkv, n, D] at consecutive positions from `first_position` on.

        Where memory runs out, nothing was added.
        """
        count, before = k.shape[1], self.num_tokens(row)
        if count == 0:
            return
        places = self._reserve(row, count)
        try:
            self.pool.write(places, k, v, first_position)
        except BaseException:
            self.truncate(row, before)
            raise
        self._in_order &= first_position == before

    def _reserve(self, row: int, count: int) -> npt.NDArray[np.int64] | range:
        """Token places for `count` new tokens: what the last page has left, then new pages."""
        table, size = self.tables[row], self.page_size
        room = size - self.tail_fill[row]
        if room:
            self._own_tail(row)
        if count <= room:  # nearly every decode step
            first = self.pool.slot(table[-1]) * size + self.tail_fill[row]
            self.tail_fill[row] += count
            return range(first, first + count)
        first = len(table) - 1 if room else len(table)
        table.extend(self.pool.allocate(row, -(-max(0, count - room) // size)))
        places = self.pool.slots(table[first:])[:, None] * size + np.arange(size)
        self.tail_fill[row] = (self.tail_fill[row] + count - 1) % size + 1
        return places.reshape(-1)[size - room if room else 0 :][:count]

    def _own_tail(self, row: int) -> None:
        """Copy-on-write: before a row changes its last page, nobody else may read it."""
        table = self.tables[row]
        if self.pool.is_shared(table[-1]):
            table[-1] = self.pool.private_copy(table[-1], row)

    def remove_pages(self, row: int, start: int, stop: int) -> None:
        """Forgets the pages start..stop of a row's table."""
        if start < stop:
            self.pool.release(self.tables[row][start:stop])
            del self.tables[row][start:stop]
            self._in_order = False

    def truncate(self, row: int, num_tokens: int) -> None:
        """Forgets the newest tokens of a row until `num_tokens` are left."""
        size, table = self.page_size, self.tables[row]
        keep = -(-num_tokens // size)
        self.pool.release(table[keep:])
        del table[keep:]
        fill = num_tokens - (keep - 1) * size if keep else size
        if fill < self.tail_fill[row] or fill < size:
            self._own_tail(row)
            self.pool.hide(table[-1], fill)
        self.tail_fill[row] = fill

    def fork(self, sources: Sequence[int]) -> None:
        """Row r continues from what row sources[r] holds; pages are shared, not copied."""
        if list(sources) == list(range(self.num_rows)):
            return
        tables = [list(self.tables[source]) for source in sources]
        for table in tables:
            self.pool.share(table)
        for table in self.tables:
            self.pool.release(table)
        self.tables = tables
        self.tail_fill = [self.tail_fill[source] for source in sources]
        self._forked, self._in_order = True, False

    def select(self, sources: Sequence[int], room_tokens: int = 0) -> ResidentStore:
        """A new store whose row r is a copy of row sources[r]; any number of rows.

        Args:
            room_tokens: more that each row can take without growing.
        """
        pool = self.pool
        most = room_tokens + max((self.num_tokens(source) for source in sources), default=0)
        new = ResidentStore(
            pool.shape,
            self.page_size,
            len(sources),
            pool.dtype,
            pool.device,
            capacity_tokens=most,
            ops=pool.ops,
        )
        for row, source in enumerate(sources):
            new.load(row, self, source, range(len(self.tables[source])))
        if pool.key_min is not None:
            new.pool.enable_digests()
        return new

    def load(self, row: int, other: ResidentStore, source: int, pages: Sequence[int]) -> None:
        """Copies pages (indices into the other row's table) behind what `row` holds; the last
        of them is the row's new tail.
        """
        if not len(pages):
            return
        ids = [other.tables[source][page] for page in pages]
        fresh = self.pool.allocate(row, len(ids))
        old, new = other.pool.slots(ids), self.pool.slots(fresh)
        from_, to = (self._upload(x) for x in (old, new))
        self.pool.k[:, to], self.pool.v[:, to] = other.pool.k[:, from_], other.pool.v[:, from_]
        self.pool.positions[to] = other.pool.positions[from_]
        self.tables[row].extend(fresh)
        whole = pages[-1] != len(other.tables[source]) - 1
        self.tail_fill[row] = self.page_size if whole else other.tail_fill[source]
        expected = range(self.num_tokens(row))
        self._in_order &= self.positions_of(row) == list(expected)

    def put_page(self, row: int, index: int, page: int, *, instead: bool) -> None:
        """Enters a page of the pool into a row's table, before or instead of the one at `index`."""
        table = self.tables[row]
        if instead:
            self.pool.release(table[index : index + 1])
        table[index : index + instead] = [page]
        self._in_order = False

    def _upload(self, slots: npt.NDArray[np.int64]) -> Tensor:
        return self.pool.ops.uploads(slots, self.pool.device)

    # Reading ------------------------------------------------------------------------------------

    @property
    def in_order(self) -> bool:
        """Slot n of every row holds its position n, and all rows are equally long."""
        lengths = {self.num_tokens(row) for row in range(self.num_rows)}
        return self._in_order and not self._forked and len(lengths) == 1

    def view(self) -> ResidentView:
        """Every resident entry; zero-copy unless rows share pages after a fork."""
        if self._forked:
            return self._gathered_view()
        if self.in_order:
            return ResidentView(*self._slots(self.num_tokens(0)), None)
        pool, count = self.pool, max(self.pool.high) * self.page_size
        last = self._last_view
        if last is None or last[0] is not pool.k or last[1] != count:  # the same for many steps
            positions = pool.positions.view(self.num_rows, -1)[:, :count]
            view = ResidentView(*self._slots(count), positions)
            self._last_view = last = pool.k, count, view
        return last[2]

    def _slots(self, count: int) -> tuple[Tensor, Tensor]:
        """k, v [B, Hkv, count, D]: the first slots of every arena, views."""
        pool = self.pool
        size = (pool.shape.num_kv_heads, self.num_rows, -1, pool.shape.head_dim)
        k, v = (memory.view(size).transpose(0, 1)[:, :, :count] for memory in (pool.k, pool.v))
        return k, v

    def _gathered_view(self) -> ResidentView:
        pool, most = self.pool, max(len(table) for table in self.tables)
        slots = np.zeros((self.num_rows, most), dtype=np.int64)
        for row, table in enumerate(self.tables):
            slots[row, : len(table)] = pool.slots(table)
        where = torch.from_numpy(slots).to(pool.device)
        lengths = torch.tensor([len(table) for table in self.tables], device=pool.device)
        padding = torch.arange(most, device=pool.device)[None] >= lengths[:, None]
        positions = pool.positions[where].masked_fill(padding[..., None], HIDDEN)
        k, v = (t[:, where].transpose(0, 1).flatten(2, 3) for t in (pool.k, pool.v))
        return ResidentView(k, v, positions.flatten(1))

    def row_view(self, row: int, without: range = range(0)) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, N, D] of one row in table order; a copy unless its pages lie in order.

        Args:
            without: full pages that are left out, by their place in the table.
        """
        table = self.tables[row][: without.start] + self.tables[row][without.stop :]
        count = self.num_tokens(row) - len(without) * self.page_size
        return self._read(table, count)

    def read_pages(self, row: int, start: int, stop: int, limit: int) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, n, D] of the pages start..stop of a row, at most `limit` tokens."""
        return self._read(self.tables[row][start:stop], limit)

    def _read(self, pages: list[int], limit: int) -> tuple[Tensor, Tensor]:
        slots = self.pool.slots(pages)
        together = len(slots) and (np.diff(slots) == 1).all()
        where = slice(slots[0], slots[-1] + 1) if together else self._upload(slots)
        k, v = (t[:, where].flatten(1, 2)[:, :limit] for t in (self.pool.k, self.pool.v))
        return k, v

    def slots(self, row: int) -> Tensor:
        """[P] int64 on the pool's device: where the pages of a row lie, in table order; read only.

        Kept until the table changes, which most steps do not do: a GPU need not be sent it again.
        """
        table, last = self.tables[row], self._last_slots.get(row)
        if last is None or last[0] != self.pool.capacity or last[1] != table:
            where = self._upload(self.pool.slots(table))
            self._last_slots[row] = last = self.pool.capacity, list(table), where
        return last[2]

    def page_bounds(self, row: int) -> tuple[Tensor, Tensor]:
        """key_min, key_max [Hkv, P, D] of a row's pages in table order."""
        pool = self.pool
        if pool.key_min is None or pool.key_max is None:
            raise IntegrityError("page digests were not enabled; the placement must ask for them")
        slots = pool.slots(self.tables[row])
        together = (np.diff(slots) == 1).all()
        where = slice(slots[0], slots[-1] + 1) if together else self.slots(row)
        return pool.key_min[:, where], pool.key_max[:, where]

    def positions_of(self, row: int) -> list[int]:
        """Positions of a row's tokens in table order."""
        flat = self.pool.positions[self.slots(row)].flatten()
        found: list[int] = flat[flat != HIDDEN].tolist()
        return found

    # Integrity ----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises IntegrityError unless counts, fills, order claims and digests are true."""
        pool = self.pool
        counted = np.zeros_like(pool.refs).reshape(-1)
        for table in self.tables:
            np.add.at(counted, pool.slots(table), 1)
        if (counted != pool.refs.reshape(-1)).any():
            raise IntegrityError("page reference counts differ from the page tables")
        for arena in range(self.num_rows):
            used = int((pool.refs[arena] > 0).sum())
            if used + len(pool.free[arena]) != pool.high[arena]:
                raise IntegrityError(
                    f"arena {arena}: {used} used and {len(pool.free[arena])} free pages do not "
                    f"make up the {pool.high[arena]} ever taken"
                )
        foreign = any(arena_of(p) != row for row, table in enumerate(self.tables) for p in table)
        if foreign and not self._forked:
            raise IntegrityError("a row reads another row's arena, yet no fork was recorded")
        for row in range(self.num_rows):
            self._check_row(row)

    def _check_row(self, row: int) -> None:
        positions = self.positions_of(row)
        if len(positions) != self.num_tokens(row):
            raise IntegrityError(
                f"row {row}: {len(positions)} filled slots, {self.num_tokens(row)} tokens counted"
            )
        table = self.pool.slots(self.tables[row])
        if self._in_order:
            places = range(row * self.pool.capacity, row * self.pool.capacity + len(table))
            if positions != list(range(len(positions))) or table.tolist() != list(places):
                raise IntegrityError(f"row {row} claims to be in order and is not")
        if self.pool.key_min is None or not self.tables[row]:
            return
        low, high = self.page_bounds(row)
        slots = torch.from_numpy(table).to(self.pool.device)
        keys = self.pool.k[:, slots]
        inside = (keys >= low[:, :, None]) & (keys <= high[:, :, None])
        filled = (self.pool.positions[slots] != HIDDEN)[None, :, :, None]
        if not (inside | ~filled).all():
            raise IntegrityError(f"row {row}: a page digest does not bound its keys")
