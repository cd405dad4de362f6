"""The engine's scans: of all keys of a layer, or of their codes, whose best are ranked exactly."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int64

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops import sketch_codes
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.bindings import (
    SEARCH_FLAT,
    SEARCH_SKETCH,
    FlatHeadStruct,
    SketchHeadStruct,
    SketchMapStruct,
    SketchTierStruct,
)
from hybrid_kv.ops.native.library import Pool, find_engine
from hybrid_kv.ops.native.rows import (
    QuantisedKeys,
    describe,
    pool_handle,
)
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.ops.sketch_codes import (
    SearchSizes,
    SketchMap,
    check_followed,
    check_heads,
    check_search,
    search_sizes,
)
from hybrid_kv.types import SearchReads, SearchResult

_UNCOUNTED = SearchReads()
ID_TYPES = {torch.int32: 0, torch.int64: 1}


class FlatScan:
    """Description of what a scan reads, made once, so that a search builds nothing.

    Args:
        keys: [H, N, D] float32, float16 or bfloat16, rows contiguous; kept by reference.
        quantised: of the same keys; its blocks are scored and `keys` only re-ranks. Where it has
            grown the scan `follow`s.

    Raises:
        ShapeError, ConfigError: keys cannot be read or are not those quantised.
        BackendUnavailable: there is no engine.
    """

    def __init__(
        self,
        keys: Tensor,
        quantised: QuantisedKeys | None = None,
        *,
        engine: ctypes.CDLL | None = None,
    ) -> None:
        self._engine = find_engine(engine)
        self.quantised = quantised
        self._structs = (FlatHeadStruct * len(keys))()
        if quantised is not None:
            for struct, one in zip(self._structs, quantised.structs, strict=False):
                struct.quantised = ctypes.pointer(one)
        self.follow(keys)

    def follow(self, keys: Tensor) -> None:
        """Takes the same keys with more rows, which may lie elsewhere. Not while somebody searches.

        Raises:
            ShapeError, ConfigError: as the constructor; nothing has changed.
        """
        described, quantised = describe("keys", keys), self.quantised
        known = None if quantised is None else (quantised.heads, quantised.count, quantised.dim)
        if known not in (None, keys.shape) or len(keys) != len(self._structs):
            raise ShapeError(
                f"quantised keys must be those of keys {list(keys.shape)}, got {known}"
            )
        for struct, rows in zip(self._structs, described, strict=True):
            struct.keys = rows
        self.keys = keys

    def search(
        self,
        queries: Tensor,
        top_k: int,
        *,
        rerank: int = 0,
        pool: Pool | None = None,
        id_dtype: torch.dtype = torch.int64,
    ) -> SearchResult:
        """The best keys of each query by dot product; of equal scores the lower id comes first.

        Args:
            queries: [H, M, D] float32.
            rerank: with quantised keys, how many candidates are scored again exactly, at least
                top_k; 0 returns the scores of the codes.
            pool: threads that share the heads; None for the calling one.
            id_dtype: int64 or int32.

        Returns:
            ids and scores [H, M, top_k], padded with -1 and -inf where there are fewer keys.

        Raises:
            ShapeError, ConfigError: an argument does not fit.
        """
        heads, _, dim = self.keys.shape
        if queries.dim() != 3 or (queries.shape[0], queries.shape[2]) != (heads, dim):
            raise ShapeError(
                f"queries must be [{heads}, M, {dim}] as the keys, got shape {list(queries.shape)}"
            )
        if queries.dtype != torch.float32 or queries.device.type != "cpu":
            raise ConfigError(
                f"queries must be float32 on the host, got {queries.dtype} on {queries.device}"
            )
        if top_k < 1:
            raise ConfigError(f"top_k must be at least 1, got {top_k}; ask for at least one key")
        if id_dtype not in ID_TYPES:
            raise ConfigError(f"id_dtype must be int32 or int64, got {id_dtype}")
        queries = queries.contiguous()
        size = (heads, queries.shape[1], top_k)
        ids, scores = torch.empty(size, dtype=id_dtype), torch.empty(size)
        scored = c_int64()
        status = self._engine.hkv_flat_search(
            None if pool is None else pool.handle,
            heads,
            self._structs,
            queries.data_ptr(),
            queries.shape[1],
            top_k,
            rerank,
            ID_TYPES[id_dtype],
            *(ids.data_ptr(), scores.data_ptr(), byref(scored)),
        )
        if status:
            library.check(self._engine, status)
        return SearchResult(ids, scores, scored.value)

    def plan(self, top_k: int, *, rerank: int = 0, reads: SearchReads = _UNCOUNTED) -> EngineSearch:
        """The same search as a part of a step that is one call; see `search`.

        Args:
            reads: bytes that it reads.
        """
        heads = range(self.keys.shape[0])
        return EngineSearch(
            SEARCH_FLAT, heads, self._structs, (self,), top_k, num_ranked=rerank, reads=reads
        )


def stream(array: Tensor, engine: ctypes.CDLL | None = None) -> int:
    """Reads a contiguous array as fast as one core can; what a scan is measured against."""
    engine = find_engine(engine)
    return int(engine.hkv_stream(array.data_ptr(), array.numel() * array.itemsize))


def map_struct(sketch_map: SketchMap) -> SketchMapStruct:
    """The structure of a map, which must outlive it."""
    key_columns, query_columns, start = sketch_map.columns
    lines = (sketch_map.plan.lines_of(bits) for bits in (8, 4, 2))
    arrays = (array.data_ptr() for array in (key_columns, query_columns, start))
    return SketchMapStruct(*arrays, sketch_map.head_dim, *lines)


class SketchTier(sketch_codes.SketchTier):
    """See `hybrid_kv.ops.sketch_codes.SketchTier`.

    Args:
        engine: another library than the one in use.

    Raises:
        BackendUnavailable: there is no engine.
    """

    def __init__(
        self, sketch_map: SketchMap, *, with_ids: bool, engine: ctypes.CDLL | None = None
    ) -> None:
        super().__init__(sketch_map, with_ids=with_ids)
        self._engine = find_engine(engine)
        self.map_struct = map_struct(sketch_map)

    def append(self, keys: Tensor, rows: Tensor | None = None, pool: Pool | None = None) -> None:
        """As `SketchTier.append`; pool: threads that share the rows, None for the calling one."""
        self._pool = pool
        super().append(keys, rows)

    def _encode(self, keys: Tensor, rows: Tensor) -> None:
        status = self._engine.hkv_sketch_encode(
            pool_handle(self._pool),
            byref(self.map_struct),
            describe("keys", keys[None]),
            *(rows.data_ptr(), len(rows), self.count, self._codes.data_ptr()),
        )
        library.check(self._engine, status)


class SketchSearcher:
    """Keys of some heads of a layer with their tiers, described once; see `search`.

    Args:
        keys: of each head [N, D] float32, float16 or bfloat16, rows contiguous; kept by reference.
        tiers: of each head; no two of them hold the same row. To be made anew after one has grown.
            Where keys alone have grown it may `follow` them.
        engine: another library than the one in use.

    Raises:
        ShapeError, ConfigError: keys cannot be read or do not fit the tiers.
        BackendUnavailable: there is no engine.
    """

    def __init__(
        self,
        keys: Sequence[Tensor],
        tiers: Sequence[Sequence[SketchTier]],
        *,
        engine: ctypes.CDLL | None = None,
    ) -> None:
        self._engine = find_engine(engine)
        self.keys, self.tiers = list(keys), [list(own) for own in tiers]
        self._sketched = check_heads(keys, tiers)
        arrays, tables = [], []
        for own in tiers:
            table = (SketchTierStruct * len(own))()
            for place, tier in enumerate(own):
                codes, ids = tier.codes, tier.ids
                address = None if ids is None else ids.data_ptr()
                one = ctypes.pointer(tier.map_struct)
                table[place] = SketchTierStruct(one, codes.data_ptr(), address, tier.count)
                arrays.append((codes, ids))
            tables.append(table)
        self._kept = (arrays, tables)
        self._structs = (SketchHeadStruct * len(keys))(
            *(
                SketchHeadStruct(describe("keys", rows[None])[0], table, len(table), 0, 0)
                for rows, table in zip(keys, tables, strict=True)
            )
        )

    def follow(self, keys: Sequence[Tensor]) -> None:
        """Takes the same heads' keys with more rows, of which no tier holds any; they may lie
        elsewhere. Not while somebody searches.

        Raises:
            ShapeError: they are of another shape or dtype, or fewer.
        """
        check_followed(keys, self.keys)
        for head, rows in zip(self._structs, keys, strict=True):
            head.keys.data, head.keys.count = rows.data_ptr(), rows.shape[0]
            head.keys.stride = rows.stride(0)
        self.keys = list(keys)

    def search(
        self,
        queries: Tensor,
        top_k: int,
        *,
        num_rerank: Sequence[int],
        most: int | None = None,
        num_exact: int = 0,
        pool: Pool | None = None,
    ) -> SearchResult:
        """As `hybrid_kv.ops.portable.SketchSearcher.search`, bit for bit.

        Args:
            pool: threads that share the heads, and parts of them; None for the calling one.
        """
        sizes = check_search(
            queries,
            self.keys,
            self._sketched,
            top_k=top_k,
            most=most,
            num_rerank=num_rerank,
            num_exact=num_exact,
        )
        heads = self._heads(sizes)
        queries = queries.contiguous()
        shape = (*queries.shape[:2], sizes.width)
        ids, scores = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
        scored, rows_read = c_int64(), c_int64()
        status = self._engine.hkv_sketch_search(
            pool_handle(pool),
            *(len(heads), heads, queries.data_ptr(), queries.shape[1], sizes.width),
            *(ids.data_ptr(), scores.data_ptr(), byref(scored), byref(rows_read)),
        )
        library.check(self._engine, status)
        return SearchResult(ids, scores, scored.value, rows_read.value)

    def plan(
        self, top_k: int, *, num_rerank: Sequence[int], most: int, num_exact: int
    ) -> EngineSearch:
        """The same search as a part of a step that is one call; see `search`."""
        sizes = search_sizes(
            self.keys,
            self._sketched,
            top_k=top_k,
            most=most,
            num_rerank=num_rerank,
            num_exact=num_exact,
        )
        return EngineSearch(
            SEARCH_SKETCH, range(len(self.keys)), self._heads(sizes), (self,), sizes.width
        )

    def _heads(self, sizes: SearchSizes) -> ctypes.Array[SketchHeadStruct]:
        """Descriptors of their own, as other threads search as well."""
        heads = (SketchHeadStruct * len(self.keys)).from_buffer_copy(self._structs)
        for head, wanted, first in zip(heads, sizes.candidates, sizes.first_exact, strict=True):
            head.num_rerank, head.first_exact = wanted, first
        return heads
