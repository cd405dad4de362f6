"""The engine's sketches: codes of keys, and searches that scan them and rank the best exactly."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int64

import torch
from torch import Tensor

from hybrid_kv.ops import sketch_codes
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.bindings import (
    SEARCH_SKETCH,
    SketchHeadStruct,
    SketchMapStruct,
    SketchTierStruct,
)
from hybrid_kv.ops.native.library import Pool, find_engine
from hybrid_kv.ops.native.rows import describe, pool_handle
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.ops.sketch_codes import (
    SearchSizes,
    SketchMap,
    check_followed,
    check_heads,
    check_search,
    search_sizes,
)
from hybrid_kv.types import SearchResult


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
        """As `hybrid_kv.ops.portable.sketch.SketchSearcher.search`, bit for bit.

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
