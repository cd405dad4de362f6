"""Scans of `flat` outside torch: the engine's kernels and their portable twin."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from hybrid_kv.index._base import rank
from hybrid_kv.ops.native import flat as native_flat
from hybrid_kv.ops.native import rows as native_rows
from hybrid_kv.ops.native.library import engine
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.ops.native.workers import default_pool, here, pool_here
from hybrid_kv.types import SearchReads, SearchResult

_SPARE_CANDIDATES = 32
_REFRESH = 4
"""Statistics are taken anew when rows have grown so many times over."""


class KeyScan(Protocol):
    """Scores every key; see `KeyIndex` for when the methods are called."""

    @property
    def memory_bytes(self) -> int: ...
    def rebuild(self, keys: Tensor) -> None: ...
    def append(self, keys: Tensor) -> None: ...
    def find(self, queries: Tensor, count: int, most: int) -> SearchResult: ...
    def plan(self, count: int, most: int) -> EngineSearch | None: ...


def make_scan(precision: str, rerank: float) -> KeyScan | None:
    """The scan of a precision other than "exact"; None where only torch can serve it."""
    if precision == "stored":
        return None if engine() is None else _StoredScan()
    return int8_scan(rerank)


def int8_scan(rerank: float) -> KeyScan:
    """Reads keys at 8 bits and ranks the best by the stored ones."""
    return _PortableInt8Scan(rerank) if engine() is None else _Int8Scan(rerank)


def planned(scan: KeyScan | None, count: int, most: int) -> list[EngineSearch] | None:
    """The search of a scan as a part of a step that is one call; None where there is none."""
    plan = None if scan is None else scan.plan(count, most)
    return None if plan is None else [plan]


def num_candidates(rerank: float, count: int, rows: int) -> int:
    """Number of keys that are scored again; a few results need more than a share of them to be
    safe.
    """
    return min(rows, max(math.ceil(rerank * count), count + _SPARE_CANDIDATES))


def scan_reads(keys: Tensor, code_bytes: int, ranked: int) -> SearchReads:
    """Of a scan of codes that ranks so many keys [Hkv, N, D] of each query exactly."""
    heads, rows, dim = keys.shape
    row = dim * keys.itemsize
    most = heads * rows * row
    return SearchReads(code_bytes, heads * ranked * row, most, heads * (rows + ranked))


def _readable(keys: Tensor) -> Tensor:
    return keys if native_rows.is_readable(keys) else keys.contiguous()


class _StoredScan:
    """The engine over the keys where they lie."""

    memory_bytes = 0

    def rebuild(self, keys: Tensor) -> None:
        self._scan = native_flat.FlatScan(_readable(keys))

    def append(self, keys: Tensor) -> None:
        self._scan.follow(_readable(keys))

    def find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        found = self._scan.search(queries, most, pool=pool_here())
        return found._replace(read_bytes=self._reads.of(queries.shape[1], found.scored))

    def plan(self, count: int, most: int) -> EngineSearch | None:
        return self._scan.plan(most, reads=self._reads)

    @property
    def _reads(self) -> SearchReads:
        heads, rows, dim = self._scan.keys.shape
        every = heads * rows
        return SearchReads(every * dim * self._scan.keys.itemsize, scores=every)


class _Int8Scan:
    """The engine over quantised keys; the best are scored again where they lie."""

    def __init__(self, rerank: float) -> None:
        self._rerank = rerank

    def rebuild(self, keys: Tensor) -> None:
        keys = _readable(keys)
        self._quantised = native_rows.QuantisedKeys(keys.shape[0], keys.shape[2])
        self._quantised.build(keys, pool_here())
        self._scan = native_flat.FlatScan(keys, self._quantised)
        self._built = keys.shape[1]

    def append(self, keys: Tensor) -> None:
        if keys.shape[1] > _REFRESH * self._built:
            return self.rebuild(keys)
        keys = keys if native_rows.is_readable(keys) else keys.contiguous()
        self._quantised.append(keys, pool_here())
        self._scan.follow(keys)

    def find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        ranked = num_candidates(self._rerank, count, self._scan.keys.shape[1])
        pool = None if here.is_alone else default_pool()
        found = self._scan.search(queries, min(most, ranked), rerank=ranked, pool=pool)
        reads = scan_reads(self._scan.keys, self.memory_bytes, ranked)
        return found._replace(read_bytes=reads.of(queries.shape[1], found.scored))

    def plan(self, count: int, most: int) -> EngineSearch | None:
        ranked = num_candidates(self._rerank, count, self._scan.keys.shape[1])
        reads = scan_reads(self._scan.keys, self._quantised.memory_bytes, ranked)
        return self._scan.plan(min(most, ranked), rerank=ranked, reads=reads)

    @property
    def memory_bytes(self) -> int:
        return self._quantised.memory_bytes


class _PortableInt8Scan:
    """The same in numba and torch."""

    def __init__(self, rerank: float) -> None:
        self._rerank = rerank

    def rebuild(self, keys: Tensor) -> None:
        from hybrid_kv.ops.portable.rows import QuantisedKeys

        self._keys = keys
        self._quantised = QuantisedKeys(keys.shape[0], keys.shape[2])
        self._quantised.build(keys)
        self._built = keys.shape[1]

    def append(self, keys: Tensor) -> None:
        if keys.shape[1] > _REFRESH * self._built:
            return self.rebuild(keys)
        self._keys = keys
        self._quantised.append(keys)

    def find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        heads, num_queries, _ = queries.shape
        rows = self._keys.shape[1]
        candidates = num_candidates(self._rerank, count, rows)
        ids, _ = self._quantised.search(queries, candidates)
        of_head = torch.arange(heads)[:, None, None]
        found = self._keys[of_head, ids].float()
        found_scores = (found @ queries[..., None]).squeeze(-1)
        scores, ids = rank(found_scores, ids, min(most, candidates))
        reads = scan_reads(self._keys, self._quantised.memory_bytes, candidates)
        scored = heads * num_queries * (rows + candidates)
        return SearchResult(ids, scores, scored, read_bytes=reads.of(num_queries, scored))

    def plan(self, count: int, most: int) -> EngineSearch | None:
        return None

    @property
    def memory_bytes(self) -> int:
        return self._quantised.memory_bytes
