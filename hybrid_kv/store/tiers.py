"""Bytes that layers hold in each tier; what several of them share counts once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hybrid_kv.store.extent import ColdExtent
from hybrid_kv.store.layer import LayerStore
from hybrid_kv.store.pool import PagePool
from hybrid_kv.store.table import PageTable
from hybrid_kv.types import bytes_per_token


class TierBytes(NamedTuple):
    """K and V in the resident tier, those of the cold tier with their positions, and indexes."""

    device_kv: int = 0
    host_kv: int = 0
    host_index: int = 0


def tier_bytes(layers: Iterable[LayerStore]) -> TierBytes:
    """Of layers of one cache, or of several that were forked from each other.

    Tokens are counted as they come and go. Only pages of a pool in which some were shared are
    looked at, for those that several rows list.
    """
    device, extents = 0, dict[int, ColdExtent]()
    shared = dict[PagePool, list[PageTable]]()
    for layer in layers:
        each = bytes_per_token(layer.shape, layer.cold.dtype)
        for row in layer.rows:
            if row.table.pool.has_shared:
                shared.setdefault(row.table.pool, []).append(row.table)
            else:
                device += each * row.table.num_tokens
            device += 0 if row.kept is None else row.kept.nbytes
        extents |= {id(span.extent): span.extent for span in layer.cold.spans()}
    for pool, tables in shared.items():
        device += bytes_per_token(pool.shape, pool.dtype) * _tokens_of(tables, pool.page_size)
    own = extents.values()
    host = sum(e.keys.nbytes + e.values.nbytes + 4 * e.length for e in own)
    return TierBytes(device, host, sum(e.index.memory_bytes for e in own if e.index is not None))


def _tokens_of(tables: Iterable[PageTable], page_size: int) -> int:
    """Tokens of all pages that are listed, each once; the last page of a table may not be full."""
    pages, tails = set[int](), dict[int, int]()
    for table in tables:
        pages.update(table.pages)
        if table.pages:
            tails[table.pages[-1]] = table.tail_fill
    return len(pages) * page_size - sum(page_size - fill for fill in tails.values())
