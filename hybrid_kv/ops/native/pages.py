"""Pages as the engine reads and writes them: upper bounds of their scores, and new tokens."""

from __future__ import annotations

import ctypes
from ctypes import byref

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.bindings import PageDigestsStruct, PagesStruct
from hybrid_kv.ops.native.library import Pool, find_engine
from hybrid_kv.ops.native.rows import DTYPES, describe, pool_handle
from hybrid_kv.types import PagedKV


class PageDigests:
    """Least and greatest keys of pages, described once; describe again when pages were added.

    Args:
        key_min, key_max: [H, P, D] of one dtype, rows contiguous; kept by reference.

    Raises:
        ShapeError, ConfigError: they cannot be read or do not fit together.
        BackendUnavailable: there is no engine.
    """

    def __init__(
        self, key_min: Tensor, key_max: Tensor, *, engine: ctypes.CDLL | None = None
    ) -> None:
        self._engine = find_engine(engine)
        described = zip(describe("key_min", key_min), describe("key_max", key_max), strict=False)
        if key_min.shape != key_max.shape or key_min.dtype != key_max.dtype:
            raise ShapeError(
                f"key_max must be {list(key_min.shape)} {key_min.dtype} as key_min, got "
                f"{list(key_max.shape)} {key_max.dtype}"
            )
        self.key_min, self.key_max = key_min, key_max
        self._structs = (PageDigestsStruct * len(key_min))(
            *(PageDigestsStruct(*pair) for pair in described)
        )

    def scores(self, queries: Tensor, *, pool: Pool | None = None) -> Tensor:
        """Upper bounds [H, M, P] of the scores in every page, for queries [H, M, D] float32.

        Raises:
            ShapeError, ConfigError: queries do not fit.
        """
        queries = self._check(queries)
        scores = torch.empty(*queries.shape[:2], self.key_min.shape[1])
        status = self._engine.hkv_page_scores(
            pool_handle(pool),
            len(queries),
            self._structs,
            *(queries.data_ptr(), queries.shape[1], scores.data_ptr()),
        )
        library.check(self._engine, status)
        return scores

    def search(
        self, queries: Tensor, count: int, *, pool: Pool | None = None
    ) -> tuple[Tensor, Tensor]:
        """The pages with the highest bounds, best first; of equal ones the lower page comes first.

        Args:
            queries: [H, M, D] float32.
            count: pages per query, at least 1.
            pool: threads that share the heads; None for the calling one.

        Returns:
            bounds [H, M, count] float32 and pages [H, M, count] int64, padded with -inf and -1.

        Raises:
            ShapeError, ConfigError: an argument does not fit.
        """
        queries = self._check(queries)
        if count < 1:
            raise ConfigError(f"count must be at least 1, got {count}; ask for at least one page")
        size = (*queries.shape[:2], count)
        bounds, pages = torch.empty(size), torch.empty(size, dtype=torch.int64)
        status = self._engine.hkv_page_search(
            pool_handle(pool),
            len(queries),
            self._structs,
            *(queries.data_ptr(), queries.shape[1], count, pages.data_ptr(), bounds.data_ptr()),
        )
        library.check(self._engine, status)
        return bounds, pages

    def _check(self, queries: Tensor) -> Tensor:
        heads, _, dim = self.key_min.shape
        if queries.dim() != 3 or (queries.shape[0], queries.shape[2]) != (heads, dim):
            raise ShapeError(
                f"queries must be [{heads}, M, {dim}] as the pages, got shape {list(queries.shape)}"
            )
        if queries.dtype != torch.float32 or queries.device.type != "cpu":
            raise ConfigError(
                f"queries must be float32 on the host, got {queries.dtype} on {queries.device}"
            )
        return queries.contiguous()


# A new token of a layer ---------------------------------------------------------------------------


class PageWriter:
    """Appends tokens to pages, one by one.

    struct: of the engine, for who stores a token in a larger call.

    Args:
        pages: on the host, each tensor contiguous, k and v of a dtype of DTYPES; kept by reference.
        engine: another library than the one in use.

    Raises:
        BackendUnavailable: there is no engine.
    """

    def __init__(self, pages: PagedKV, *, engine: ctypes.CDLL | None = None) -> None:
        self._engine = find_engine(engine)
        self.pages = pages
        heads, slots, size, dim = pages.k.shape
        self._size, self._dtype = size, pages.k.dtype
        value_dim = pages.v.shape[3]
        self._sizes = (
            ((heads, 1, dim), (heads, 1, value_dim)),
            (*((1, heads, 1, dim), (1, heads, 1, value_dim)),),
        )
        lows, highs = (
            None if digests is None else digests.data_ptr()
            for digests in (pages.key_min, pages.key_max)
        )
        self.struct = PagesStruct(
            *(pages.k.data_ptr(), pages.v.data_ptr(), pages.positions.data_ptr(), lows, highs),
            *(slots, size, heads, dim, pages.v.shape[3], DTYPES[pages.k.dtype]),
        )

    def takes(self, k: Tensor, v: Tensor) -> bool:
        """Whether k, v [Hkv, 1, D], or [1, Hkv, 1, D], can be stored from where they lie."""
        dtype = self._dtype
        if (k.shape, v.shape) not in self._sizes or k.dtype != dtype:
            return False
        near = k.is_cpu and v.is_cpu and v.dtype == dtype
        return near and k.stride(-1) == 1 == v.stride(-1)

    def append(self, k: Tensor, v: Tensor, place: int, position: int) -> None:
        """Stores a token k, v [Hkv, 1, D] that it `takes`, and its page's digest anew.

        Args:
            place: slot * S + offset; the page is filled up to there.
        """
        slot, offset = divmod(place, self._size)
        status = self._engine.hkv_append(
            byref(self.struct),
            *(k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
            *(slot, offset, position),
        )
        if status:
            library.check(self._engine, status)
