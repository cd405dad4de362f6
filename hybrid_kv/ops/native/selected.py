"""The engine for methods that choose pages or keep entries: bounds of pages, attention by head."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref, c_int64

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.attend import checked_bias, folded
from hybrid_kv.ops.native.bindings import (
    PageDigestsStruct,
    RaggedStruct,
)
from hybrid_kv.ops.native.library import Pool, find_engine
from hybrid_kv.ops.native.rows import DTYPES, describe, described, pool_handle
from hybrid_kv.types import PartialAttention


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


def attend_ragged(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    pool: Pool | None = None,
    engine: ctypes.CDLL | None = None,
) -> PartialAttention:
    """Every query over the rows of its KV head, of which each has its own number; for few queries.

    Args:
        queries: [H, M, D] of a dtype of DTYPES.
        keys: [N, D], values: [N, Dv], of one dtype, rows contiguous.
        starts, lengths: [H]; head h has the rows starts[h] : starts[h] + lengths[h].
        bias: [N] float32, added to the logits.

    Returns:
        out [H, M, Dv] float32, lse [H, M] float32.

    Raises:
        ShapeError, ConfigError: an argument does not fit.
        BackendUnavailable: there is no engine.
    """
    engine = find_engine(engine)
    heads, num_queries = len(starts), queries.shape[1]
    if queries.dim() != 3 or (len(queries), queries.shape[2]) != (heads, keys.shape[1]):
        raise ShapeError(
            f"queries must be [{heads}, M, {keys.shape[1]}] as starts and the keys, got shape "
            f"{list(queries.shape)}"
        )
    if queries.dtype not in DTYPES:
        raise ConfigError(f"queries must be float32, float16 or bfloat16, got {queries.dtype}")
    if len(lengths) != heads:
        raise ShapeError(f"lengths must be [{heads}] as starts, got [{len(lengths)}]")
    kv = described(keys[None], values[None])
    if bias is not None:
        bias = checked_bias(bias, keys.shape[:1]).contiguous()
    extents = (c_int64 * heads)(*starts), (c_int64 * heads)(*lengths)
    rows = RaggedStruct(
        *folded(kv),
        *map(addressof, extents),
        None if bias is None else bias.data_ptr(),
    )
    queries = queries.contiguous()
    out = torch.empty((heads, num_queries, values.shape[1]))
    lse = torch.empty((heads, num_queries))
    status = engine.hkv_attend_ragged(
        *(None if pool is None else pool.handle, heads, byref(rows)),
        *(queries.data_ptr(), DTYPES[queries.dtype], num_queries, scale, softcap or 0.0),
        *(out.data_ptr(), lse.data_ptr()),
    )
    if status:
        library.check(engine, status)
    return PartialAttention(out, lse)
