"""Upper bounds of the scores in pages, by the engine."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.bindings import PageDigestsStruct
from hybrid_kv.ops.native.library import Pool, find_engine
from hybrid_kv.ops.native.rows import describe, pool_handle


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


def page_scores(q: Tensor, key_min: Tensor, key_max: Tensor, *, pool: Pool | None = None) -> Tensor:
    """See `reference_pages.page_scores`."""
    return PageDigests(key_min, key_max).scores(q.float(), pool=pool)
