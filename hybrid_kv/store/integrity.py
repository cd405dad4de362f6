"""Checks that each entry has exactly one owner, whatever was done with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hybrid_kv.entries import Entries
from hybrid_kv.errors import IntegrityError
from hybrid_kv.store.cold_tier import ColdStore
from hybrid_kv.store.pool import ARENA_BITS, PagePool, PageTable
from hybrid_kv.store.row import Row
from hybrid_kv.types import HIDDEN


def check_row(row: Row) -> None:
    """Raises IntegrityError unless every token that a row stored has exactly one owner."""
    number, near, far = row.number, row.table.positions(), row.chain.positions()
    owned = set(near) | set(far)
    if len(owned) != len(near) + len(far):
        twice = sorted(set(near) & set(far)) or "a position within one tier"
        raise IntegrityError(f"row {number}: owned twice: {twice}")
    if len(owned) + row.dropped != row.length:
        raise IntegrityError(
            f"row {number}: {len(owned)} owned and {row.dropped} dropped tokens do not make up "
            f"the {row.length} stored"
        )
    if owned and max(owned) >= row.length:
        raise IntegrityError(f"row {number}: position {max(owned)} lies beyond its end")
    if row.kept is not None:
        _check_kept(row, row.kept, set(range(row.length)) - set(near), far)


def _check_kept(row: Row, kept: Entries, absent: set[int], far: Sequence[int]) -> None:
    """Checks that kept entries are of tokens that left the window, each once in a head, and that
    the cold tier knows which of its entries they are.
    """
    for head, at in enumerate(kept.split("positions")):
        own = at.tolist()
        left_out = [] if row.copied is None else row.copied[head].nonzero()[:, 0].tolist()
        if len(set(own)) != len(own) or not set(own) <= absent:
            wrong = sorted({p for p in own if own.count(p) > 1 or p not in absent})
            raise IntegrityError(
                f"row {row.number}: KV head {head} keeps {wrong[:5]} twice, or beside the "
                "resident tier"
            )
        if far and not row.shadows and {far[n] for n in left_out} != set(own):
            raise IntegrityError(
                f"row {row.number}: KV head {head} keeps other entries than the cold tier "
                "leaves out"
            )


def check_cold(cold: ColdStore) -> None:
    """Raises IntegrityError unless spans, their extents and indexes agree."""
    for span in cold.spans():
        if span not in span.extent.readers:
            raise IntegrityError("a row reads an extent that does not know of it")
        if not 0 < span.length <= span.extent.length:
            raise IntegrityError(f"a row sees {span.length} of {span.extent.length} cold entries")
    for number, chain in enumerate(cold.chains):
        if chain.num_tokens != sum(span.length for span in chain.spans):
            raise IntegrityError(
                f"row {number} counts {chain.num_tokens} cold entries, its extents "
                f"{[span.length for span in chain.spans]}"
            )
    for extent in cold.extents():
        if extent.index is None:
            continue
        if (indexed := len(extent.index.serving)) != extent.length:
            raise IntegrityError(f"index holds {indexed} of {extent.length} cold keys")


def check_resident(pool: PagePool, tables: Sequence[PageTable], *, has_forked: bool) -> None:
    """Raises IntegrityError unless counts, fills, order claims and digests are true."""
    counted = np.zeros_like(pool.refs).reshape(-1)
    for table in (table for one in pool.stores for table in one.tables):
        np.add.at(counted, pool.slots(table.pages), 1)
    if (counted != pool.refs.reshape(-1)).any():
        raise IntegrityError("page reference counts differ from the page tables")
    for arena in range(len(tables)):
        used = int((pool.refs[arena] > 0).sum())
        if used + len(pool.free[arena]) != pool.high[arena]:
            raise IntegrityError(
                f"arena {arena}: {used} used and {len(pool.free[arena])} free pages do not "
                f"make up the {pool.high[arena]} ever taken"
            )
    foreign = any(p >> ARENA_BITS != row for row, t in enumerate(tables) for p in t.pages)
    if foreign and not has_forked:
        raise IntegrityError("a row reads another row's arena, yet no fork was recorded")
    for table in tables:
        check_table(table)


def check_table(table: PageTable) -> None:
    """Raises IntegrityError unless a table's counts, its claim of order and digests are true."""
    row, pool, positions = table.arena, table.pool, table.positions()
    counted = len(table.pages) * pool.page_size - (pool.page_size - table.tail_fill)
    if not len(positions) == table.num_tokens == counted:
        raise IntegrityError(
            f"row {row}: {len(positions)} filled slots, {table.num_tokens} tokens counted, "
            f"{counted} by its pages"
        )
    slots = pool.slots(table.pages)
    if table.in_order:
        places = range(row * pool.capacity, row * pool.capacity + len(slots))
        if positions != list(range(len(positions))) or slots.tolist() != list(places):
            raise IntegrityError(f"row {row} claims to be in order and is not")
    if pool.key_min is None or not table.pages:
        return
    low, high = table.bounds()
    where = torch.from_numpy(slots).to(pool.device)
    keys = pool.k[:, where]
    inside = (keys >= low[:, :, None]) & (keys <= high[:, :, None])
    filled = (pool.positions[where] != HIDDEN)[None, :, :, None]
    if not (inside | ~filled).all():
        raise IntegrityError(f"row {row}: a page digest does not bound its keys")
