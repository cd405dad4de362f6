"""What layers hold in each tier; what several of them share counts once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hybrid_kv.store.extent import ColdExtent
from hybrid_kv.store.layer import LayerKV
from hybrid_kv.types import bytes_per_token


class TierBytes(NamedTuple):
    """K and V in the resident tier, those of the cold tier with their positions, and indexes."""

    device_kv: int = 0
    host_kv: int = 0
    host_index: int = 0


def tier_bytes(layers: Iterable[LayerKV]) -> TierBytes:
    """Of layers of one cache, or of several that were forked from each other."""
    device, pages, extents = 0, set[tuple[int, int]](), dict[int, ColdExtent]()
    for layer in layers:
        each = bytes_per_token(layer.shape, layer.cold.dtype)
        for row in layer.rows:
            pool, table = id(row.table.pool), row.table
            new = [page for page in table.pages if (pool, page) not in pages]
            pages.update((pool, page) for page in new)
            room = row.page_size - table.tail_fill if new and new[-1] == table.pages[-1] else 0
            device += each * (len(new) * row.page_size - room)
            device += 0 if row.kept is None else row.kept.nbytes
        extents |= {id(span.extent): span.extent for span in layer.cold.spans()}
    own = extents.values()
    host = sum(e.keys.nbytes + e.values.nbytes + 4 * e.length for e in own)
    return TierBytes(device, host, sum(e.index.memory_bytes for e in own if e.index is not None))
