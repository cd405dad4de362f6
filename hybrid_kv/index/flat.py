"""`flat`: every key is scored, by torch, by the engine's kernels or by their portable twin.

The oracle of all kinds, and hard to beat for short contexts.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._base import KeyIndex, rank, scan
from hybrid_kv.index._trial import HeadReport
from hybrid_kv.ops.native import rows as native_rows
from hybrid_kv.ops.native import scans
from hybrid_kv.ops.native.library import default_pool, engine, here, pool_here
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.plugins import INDEXES
from hybrid_kv.types import SearchReads, SearchResult


@INDEXES.register("flat")
class FlatIndex(KeyIndex):
    """Scores every key, once for all queries of a KV head.

    Scores are float32 products of the stored keys, at every precision. Where keys tie at the last
    place, which of them is returned is not specified, but the same input gives the same answer.
    """

    ranks = True

    class Params(config.Params):
        """precision: how keys are read; rerank: with int8, candidates per returned key that are
        scored again with the stored keys.

        "exact" multiplies the stored keys with torch and "stored" with the native engine, several
        times faster, without memory of its own. "int8" reads 8-bit copies, a quarter to a half of
        the bytes, and finds all but a few in a thousand of the best.
        """

        precision: Literal["exact", "stored", "int8"] = "exact"
        rerank: Annotated[float, Field(ge=1)] = 1.5

        def without_effect(self) -> dict[str, str]:
            ranks_once = self.precision != "int8"
            why = f"with precision '{self.precision}', which scores every key exactly"
            return {"rerank": why} if ranks_once else {}

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.exact = params.precision != "int8"
        self._scan: KeyScan | None = None

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        if self.params.precision == "exact":
            return
        self._scan = make_scan(self.params.precision, self.params.rerank)
        if self._scan is not None:
            self._scan.rebuild(self._keys)

    def _append(self, known: int) -> None:
        if self._scan is not None:
            self._scan.append(self._keys)

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        if self._scan is not None:
            return self._scan.find(queries, count, most)
        scores, ids = rank(*scan(queries, self._keys, most), most)  # all keys are ranked
        heads, num_queries, _ = queries.shape
        scored = heads * num_queries * len(self)
        return SearchResult(ids, scores, scored, read_bytes=self._key_bytes(heads * len(self)))

    def _plan(self, count: int, most: int) -> list[EngineSearch] | None:
        return planned(self._scan, count, most)

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        return native_rows.scanned_bytes(head_dim) if params.precision == "int8" else 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of the 8-bit copies."""
        return 0 if self._scan is None else self._scan.memory_bytes


# What serves while a graph or a sketch is built ---------------------------------------------------


class StandIn(FlatIndex):
    """Scans all keys in 8 bits, as heads without either are served, and says why."""

    def __init__(self) -> None:
        super().__init__(FlatIndex.Params(precision="int8"))

    def describe(self) -> list[dict[str, Any]]:
        return [
            HeadReport("flat", "scanned while the index is built").to_dict() for _ in self._keys
        ]


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
        self._scan = scans.FlatScan(_readable(keys))

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
        self._scan = scans.FlatScan(keys, self._quantised)
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
        from hybrid_kv.ops.portable import QuantisedKeys

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
