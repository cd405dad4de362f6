"""Contexts of earlier requests, which later ones that begin alike continue instead of computing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid_kv.api.tokens import common_length
from hybrid_kv.config import HybridConfig
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.saved.registry import keeps_all
from hybrid_kv.store import Row
from hybrid_kv.store.layer import TierBytes, tier_bytes

_LEAST_TOKENS = 32
"""Fewer are computed sooner than a cache is forked."""
_MOST_HIDDEN = 256
"""Cold entries that may be cut off: every search would find them first, and look beyond."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A cache of one row and the tokens that it holds.

    key: what must be alike in whoever continues it.
    """

    ids: npt.NDArray[np.int64]
    cache: TieredCache
    key: dict[str, Any]

    @classmethod
    def of(cls, cache: TieredCache, ids: Sequence[int]) -> Prefix:
        """Prefix of the tokens that a cache holds of these, which may be more."""
        held = np.asarray(ids[: cache.get_seq_length()], dtype=np.int64)
        return cls(held, cache, prefix_key(cache.kv.config))

    def shared(self, ids: npt.NDArray[np.int64]) -> int:
        """With how many tokens both begin, if what lies beyond can be cut off cheaply; else 0."""
        count = common_length(ids, self.ids)
        cut = len(self.ids) - count
        is_cheap = cut == 0 or (self.cache.can_crop and self._hidden(cut) <= _MOST_HIDDEN)
        return count if is_cheap else 0

    def _hidden(self, cut: int) -> int:
        """Indexed cold entries that go when so many tokens are cut off."""
        rows = (row for store in self.cache.kv.stores.values() for row in store.rows)
        return max((_hidden_of(row, cut) for row in rows), default=0)


def _hidden_of(row: Row, cut: int) -> int:
    sinks = 0 if row.placement is None else row.placement.sink_tokens
    near = row.table.num_tokens - sinks
    is_indexed = any(span.extent.index is not None for span in row.chain.spans)
    return max(0, cut - near) if is_indexed else 0


def prefix_key(config: HybridConfig) -> dict[str, Any]:
    """Part of a configuration that decides what a cache holds; audits do not."""
    return {**config.flat(), "audit_every": 0, "audit": None}


class KeptPrefixes:
    """Kept prefixes, least recently used first, within a limit of bytes.

    One that loses entries as its prompt ends is not kept: what it would be for a shorter prompt is
    not in it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._kept: list[Prefix] = []
        self._saved: list[Prefix] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def caches(self) -> list[TieredCache]:
        return [prefix.cache for prefix in self._kept]

    def best(
        self, ids: Sequence[int], config: HybridConfig, running: Iterable[Prefix] = ()
    ) -> tuple[TieredCache, int] | None:
        """A fork of what shares most with ids, and how many tokens it holds; None for nothing.

        The last token is left to compute: its logits are wanted.

        Args:
            running: others that may be continued, but are not kept here.
        """
        key, wanted = prefix_key(config), np.asarray(ids[:-1], dtype=np.int64)
        alike = [prefix for prefix in (*self._kept, *running) if prefix.key == key]
        shared = [prefix.shared(wanted) for prefix in alike]
        most = max(shared, default=0)
        if most < _LEAST_TOKENS:
            return None
        prefix = alike[shared.index(most)]
        if prefix in self._kept:
            self._kept.remove(prefix)
            self._kept.append(prefix)
        cache = prefix.cache.fork()
        cache.crop(most - len(prefix.ids))
        return cache, most

    def keep(self, cache: TieredCache, ids: Sequence[int]) -> bool:
        """Takes a cache that its request needs no more; False where it is not kept."""
        if not self._limit or not keeps_all(cache):
            return False
        cache.kv.look_every(0)
        new = Prefix.of(cache, ids)
        for old in [old for old in self._kept if old.key == new.key]:
            if len(old.ids) <= len(new.ids) and new.shared(old.ids) == len(old.ids):
                self._drop(old)  # the new one serves whoever it served
        self._kept.append(new)
        while self._kept and sum(self.held()) > self._limit:
            self.drop_oldest()
        return new in self._kept

    def held(self) -> TierBytes:
        """Bytes that all of them hold, shared memory once."""
        return tier_bytes(s for cache in self.caches for s in cache.kv.stores.values())

    def unsaved(self) -> Prefix | None:
        """One that was not asked for here yet, the newest first."""
        self._saved = [prefix for prefix in self._saved if prefix in self._kept]
        found = next((one for one in reversed(self._kept) if one not in self._saved), None)
        self._saved += [] if found is None else [found]
        return found

    def drop_oldest(self) -> None:
        """Gives back what was used least recently."""
        self._drop(self._kept[0])

    def _drop(self, prefix: Prefix) -> None:
        self._kept.remove(prefix)
        prefix.cache.close()

    def close(self) -> None:
        """Gives everything back."""
        for prefix in list(self._kept):
            self._drop(prefix)
