"""What a cache holds, as values: where entries lie, and what finds those that have left the window.

    held(kv).cold                                  # positions in the cold tier: layer 0, row 0
    held(context, layer=2, row=1).extents[0].index.describe()
    {one.length for one in every(kv)}              # all rows of all layers
    kept_alive(kv)                                 # what must be freed with the cache

The only place where tests walk from a cache to its pages and extents (`tests/walks.py`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.entries import Entries
from hybrid_kv.ops.tail import Tail
from hybrid_kv.store import ExtentView, LayerStore, RetrievedPart, Row
from hybrid_kv.store.layer import TierBytes, tier_bytes
from hybrid_kv.store.live_index import LiveIndex


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of cold entries with its index, as one row sees it; equal where it is the same memory.

    length: entries that the row sees. stored: those in it, of this row and of others behind it.
    """

    _span: ExtentView

    @property
    def length(self) -> int:
        return self._span.length

    @property
    def stored(self) -> int:
        return self._span.extent.length

    @property
    def k(self) -> Tensor:
        """[Hkv, length, D], a view."""
        return self._span.extent.k[:, : self.length]

    @property
    def v(self) -> Tensor:
        """[Hkv, length, D], a view."""
        return self._span.extent.v[:, : self.length]

    @property
    def stored_k(self) -> Tensor:
        """[Hkv, stored, D], a view."""
        return self._span.extent.keys

    @property
    def index(self) -> LiveIndex:
        """What finds them; fails where nothing does."""
        assert self._span.extent.index is not None
        return self._span.extent.index

    @property
    def has_index(self) -> bool:
        return self._span.extent.index is not None

    @property
    def near(self) -> Tensor | None:
        """What the latest search of the row found, [Hkv, M, K], where the next one begins."""
        return self._span.near

    @property
    def moments(self) -> Tail | None:
        """The entries in sum, as of when somebody asked last."""
        self._span.settle()
        return self._span.known

    def found(self, ids: Tensor) -> RetrievedPart:
        """A search that has found its entries ids [Hkv, M, K]."""
        return RetrievedPart(self._span.extent, ids)

    def move(self) -> None:
        """Puts its keys elsewhere in memory, of which nobody is told."""
        self._span.extent.k = self._span.extent.k.clone()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Extent) and self._span.extent is other._span.extent

    def __hash__(self) -> int:
        return id(self._span.extent)


@dataclass(frozen=True, slots=True)
class Held:
    """What a row of a layer holds, as of whenever it is asked."""

    _layer: LayerStore
    _row: Row

    @property
    def length(self) -> int:
        """Tokens stored, wherever they are by now."""
        return self._row.length

    @property
    def resident(self) -> list[int]:
        """Positions in the resident tier, oldest first."""
        return self._row.table.positions()

    @property
    def cold(self) -> list[int]:
        """Positions in the cold tier, oldest first."""
        return self._row.chain.positions()

    @property
    def gone(self) -> int:
        """Tokens that have left the resident tier, wherever to."""
        return self._row.gone_tokens

    @property
    def dropped(self) -> int:
        """Tokens in neither tier."""
        return self._row.dropped

    @property
    def lost(self) -> int:
        """Entries of all heads that nobody attends any more."""
        return self._row.lost_entries

    @property
    def drops(self) -> bool:
        """Whether the method of its layer gives up what leaves the window, whole or in part."""
        return self._layer.placement is not None and self._layer.placement.drops

    @property
    def kept(self) -> Entries | None:
        """What the method keeps of those that have left."""
        return self._row.kept

    @property
    def k(self) -> Tensor:
        """Resident keys [Hkv, R, D]."""
        return self._row.table.view()[0]

    @property
    def v(self) -> Tensor:
        """Resident values [Hkv, R, D]."""
        return self._row.table.view()[1]

    @property
    def bounds(self) -> tuple[Tensor, Tensor] | None:
        """Smallest and largest keys [Hkv, pages, D] of its resident pages, where these are kept."""
        table = self._row.table
        return None if table.pool.key_min is None else table.bounds()

    @property
    def reserved_bytes(self) -> int:
        """Of the resident tier of its layer, room for what comes included."""
        return self._layer.resident.pool.memory_bytes

    @property
    def pages_in_use(self) -> int:
        """Pages where its layer is resident that a row holds, be it of a cache that shares them."""
        return int((self._layer.resident.pool.refs > 0).sum())

    @property
    def devices(self) -> set[torch.device]:
        """Where the memory of its pages lies."""
        return {part.device for part in self._layer.resident.pool.pages if part is not None}

    @property
    def extents(self) -> list[Extent]:
        """Of the cold tier, oldest first."""
        return [Extent(span) for span in self._row.chain.spans]

    def entries(self) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, N, D] of both tiers, on the host and in the order of positions."""
        order = torch.tensor(self.resident + self.cold).argsort()
        tiers = [(self.k.cpu(), self.v.cpu()), *((one.k, one.v) for one in self.extents)]
        k, v = (torch.cat(parts, 1)[:, order] for parts in zip(*tiers, strict=True))
        return k, v

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each token of its layer has one owner, as it is now."""
        self._layer.check_integrity()


def held(owner: Any, layer: int = 0, row: int = 0, *, settled: bool = True) -> Held:
    """What a row holds in a cache, or in whatever has one (a context, a conversation).

    Args:
        settled: after all that is leaving has arrived; else as it is.
    """
    store = _stores(owner, settled=settled)[layer]
    return Held(store, store.rows[row])


def every(owner: Any) -> list[Held]:
    """What each row of each layer holds, layer by layer."""
    return [Held(store, row) for store in _stores(owner).values() for row in store.rows]


def extents(owner: Any) -> list[Extent]:
    """The extents of each row of each layer, layer by layer."""
    return [extent for one in every(owner) for extent in one.extents]


def tiers(owner: Any) -> TierBytes:
    """Bytes by tier, as `Generation` has them."""
    return tier_bytes(_stores(owner).values())


def wait_for_builds(owner: Any) -> None:
    """Returns when no index is being built any more, and all that were have taken over."""
    building, end = [one for one in extents(owner) if one.has_index], monotonic() + 60
    while building := [one for one in building if one.index.builder.pending is not None]:
        assert monotonic() < end, "an index is not built within a minute"
        sleep(0.001)
        for extent in building:
            extent.index.settle(extent.stored_k)


def kept_alive(owner: Any) -> dict[str, weakref.ref[Any]]:
    """Memory of pages and extents by name: gone when the cache is."""
    found: dict[str, weakref.ref[Any]] = {}
    for idx, store in _stores(owner).items():
        found[f"layer {idx}"] = weakref.ref(store)
        found[f"pages {idx}"] = weakref.ref(store.resident.pool)
        for number, span in enumerate(store.cold.spans()):
            found[f"extent {idx}.{number}"] = weakref.ref(span.extent)
            found[f"keys {idx}.{number}"] = weakref.ref(span.extent.k)
    return found


def cache_of(owner: Any) -> Any:
    """The `TieredCache` of a context or a conversation."""
    return owner._cache


def _stores(owner: Any, *, settled: bool = True) -> dict[int, LayerStore]:
    if isinstance(owner, LayerStore):
        return {0: owner}
    cache = getattr(owner, "_cache", owner)
    kv = getattr(cache, "kv", cache)
    if settled:
        return kv.stores
    return {idx: one.store for idx, one in kv.layers.items() if one.store is not None}


def sized(kind: str, **given: Any) -> dict[str, Any]:
    """An index of a kind: for `auto` these are sizes, but for its settings."""
    if kind != "auto":
        return {"kind": kind, **given}
    recall = {name: given.pop(name) for name in ("target_recall",) if name in given}
    return {"kind": kind, **recall, "sizes": given}
