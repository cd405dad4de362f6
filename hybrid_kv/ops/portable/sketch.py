"""Sketches of keys without the engine, and the oracle that the engine is held against bit for bit.

See `hybrid_kv.ops.sketch_codes` for the recipe. Every product and every sum is rounded by itself,
in the engine's order: projections add channel by channel, exact scores in 16 lanes that are then
halved three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_kv.errors import NonFiniteError
from hybrid_kv.ops import sketch_codes
from hybrid_kv.ops.sketch_codes import (
    SketchMap,
    SketchPlan,
    check_followed,
    check_heads,
    check_search,
)
from hybrid_kv.types import SearchResult

_LANES = 16
_CHUNK = 4096
_GROUP = 64
"""Queries of a head that share the rows they read."""
_LARGEST = np.float32(127)
_TINY = np.finfo(np.float32).tiny
_Floats = NDArray[np.float32]
_Ints = NDArray[np.int64]

_jit = numba.njit(cache=True, nogil=True)


@_jit
def _project(rows: Any, columns: Any, start: Any, out: Any) -> None:
    for row in range(rows.shape[0]):
        out[row] = start
        for channel in range(columns.shape[0]):
            value = rows[row, channel]
            for j in range(columns.shape[1]):
                out[row, j] += columns[channel, j] * value


@_jit
def _pack(values: Any, groups: Any, first: Any, blocks: Any) -> Any:
    """Rounds and writes codes from place `first` on; returns the first row that is not finite."""
    for row in range(values.shape[0]):
        for j in range(values.shape[1]):
            if not np.isfinite(values[row, j]):
                return row
    for row in range(values.shape[0]):
        block, slot = (first + row) // 16, 4 * ((first + row) % 16)
        j, line = 0, 0
        for num_dims, bits in groups:
            largest = np.float32((1 << bits) - 1)
            for _ in range(num_dims * bits // 32):
                for byte in range(4):
                    blocks[block, line, slot + byte] = 0
                for part in range(8 // bits):
                    for byte in range(4):
                        value = min(max(values[row, j], np.float32(0)), largest)
                        code = np.uint8(np.int32(np.rint(value)) << (bits * part))
                        blocks[block, line, slot + byte] |= code
                        j += 1
                line += 1
    return -1


@_jit
def _products(blocks: Any, groups: Any, count: Any, query: Any, out: Any) -> None:
    for key in range(count):
        block, slot = key // 16, 4 * (key % 16)
        total, j, line = np.int64(0), 0, 0
        for num_dims, bits in groups:
            for _ in range(num_dims * bits // 32):
                for part in range(8 // bits):
                    for byte in range(4):
                        code = blocks[block, line, slot + byte] >> (bits * part)
                        total += np.int64(code & ((1 << bits) - 1)) * np.int64(query[j])
                        j += 1
                line += 1
        out[key] = total


@_jit
def _exact(rows: Any, query: Any, out: Any) -> None:
    for row in range(rows.shape[0]):
        lanes = np.zeros(16, np.float32)
        for channel in range(rows.shape[1]):
            lanes[channel % 16] += rows[row, channel] * query[channel]
        half = 8
        while half > 0:
            for lane in range(half):
                lanes[lane] += lanes[lane + half]
            half //= 2
        out[row] = lanes[0]


class SketchTier(sketch_codes.SketchTier):
    """See `hybrid_kv.ops.sketch_codes.SketchTier`; codes are the engine's bit for bit."""

    def _encode(self, keys: Tensor, rows: Tensor) -> None:
        columns, _, start = self.map.columns
        dims, groups = self.map.plan.num_dims, _groups(self.map.plan)
        blocks = self._codes.numpy()
        for first in range(0, len(rows), _CHUNK):
            some = rows[first : first + _CHUNK].long()
            values = _projected(keys[some], columns, start, dims)
            bad = _pack(values, groups, self.count + first, blocks)
            if bad >= 0:
                raise NonFiniteError(
                    f"row {int(some[bad])} of the keys holds NaN or infinity; check the model's "
                    "weights and dtype"
                )


class _QueryCodes(NamedTuple):
    """One query for one tier: score = half_scale * (2 sum(u * codes) - twice_zero)."""

    codes: NDArray[np.int8]
    half_scale: np.float32
    twice_zero: int


class SketchSearcher:
    """Keys of some heads of a layer with their tiers; see `search`.

    Args:
        keys: of each head [N, D] float32, float16 or bfloat16; kept by reference.
        tiers: of each head; no two of them hold the same row. To be made anew after one has grown.

    Raises:
        ShapeError: keys and tiers do not fit together.
    """

    def __init__(self, keys: Sequence[Tensor], tiers: Sequence[Sequence[SketchTier]]) -> None:
        self._sketched = check_heads(keys, tiers)
        self.keys, self.tiers = list(keys), [list(own) for own in tiers]
        self._counts = [[tier.count for tier in own] for own in tiers]

    def follow(self, keys: Sequence[Tensor]) -> None:
        """Takes the same heads' keys with more rows, of which no tier holds any; they may lie
        elsewhere.

        Raises:
            ShapeError: they are of another shape or dtype, or fewer.
        """
        check_followed(keys, self.keys)
        self.keys = list(keys)

    def search(
        self,
        queries: Tensor,
        top_k: int,
        *,
        num_rerank: Sequence[int],
        most: int | None = None,
        num_exact: int = 0,
    ) -> SearchResult:
        """The best keys of each query among those that its codes put first.

        Args:
            queries: [H, M, D] float32, finite.
            num_rerank: for each head, how many keys of its tiers are ranked exactly, at least
                top_k: the best by their codes; of equal ones those of earlier tiers, lower rows.
            most: how many of those that were ranked may be returned; None for top_k.
            num_exact: the newest so many rows are in no tier and are ranked exactly, all of them.

        Returns:
            ids and exact scores [H, M, K], K at most `most`: best first, of equal scores the lower
            id, padded with -1 and -inf. rows_read counts rows whose stored keys were read.

        Raises:
            ShapeError, ConfigError: an argument does not fit.
            NonFiniteError: a query holds NaN or infinity, or its projection does.
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
        shape = (*queries.shape[:2], sizes.width)
        ids = torch.full(shape, -1, dtype=torch.int64)
        scores = torch.full(shape, -torch.inf)
        scored = rows_read = 0
        for head, rows in enumerate(self.keys):
            tail = np.arange(sizes.first_exact[head], len(rows))
            read: list[_Ints] = []
            for place, query in enumerate(queries[head].numpy()):
                found, num_coded = self._candidates(head, query, sizes.candidates[head])
                read.append(found)
                ranked = np.concatenate([found, tail])
                scored += num_coded + len(ranked)
                _rank(rows, query, ranked, ids[head, place], scores[head, place])
            for first in range(0, len(read), _GROUP):
                distinct = np.unique(np.concatenate(read[first : first + _GROUP]))
                rows_read += len(distinct) + len(tail)
        return SearchResult(ids, scores, scored, rows_read)

    def _candidates(self, head: int, query: _Floats, wanted: int) -> tuple[_Ints, int]:
        """The best `wanted` rows by codes, and how many were scored."""
        scores, ids = [np.empty(0, np.float32)], [np.empty(0, np.int64)]
        for tier, count in zip(self.tiers[head], self._counts[head], strict=True):
            codes = _quantise(tier.map, query)
            products = np.empty(count, np.int64)
            groups = _groups(tier.map.plan)
            _products(tier.codes.numpy(), groups, count, codes.codes, products)
            doubled = (2 * products - codes.twice_zero).astype(np.float32)
            scores.append(doubled * codes.half_scale)
            own = tier.ids
            ids.append(np.arange(count) if own is None else own[:count].long().numpy())
        all_scores, all_ids = np.concatenate(scores), np.concatenate(ids)
        best = np.argsort(-all_scores, kind="stable")[:wanted]
        return all_ids[best], len(all_ids)


def _rank(keys: Tensor, query: _Floats, rows: _Ints, ids: Tensor, scores: Tensor) -> None:
    """Writes the best of some rows by their exact scores; NaN is none."""
    exact = np.empty(len(rows), np.float32)
    _exact(keys[torch.from_numpy(rows)].float().numpy(), query, exact)
    usable = exact > -np.inf
    rows, exact = rows[usable], exact[usable]
    order = np.lexsort((rows, -exact))[: len(ids)]
    ids[: len(order)] = torch.from_numpy(rows[order])
    scores[: len(order)] = torch.from_numpy(exact[order])


def quantise_query(sketch_map: SketchMap, query: Tensor) -> tuple[Tensor, float]:
    """One query [D] float32 as a search of a tier sees it: codes [d] int8, and their scale.

    Raises:
        NonFiniteError: its projection is not finite.
    """
    result = _quantise(sketch_map, query.numpy())
    return torch.from_numpy(result.codes), 2.0 * float(result.half_scale)


def _quantise(sketch_map: SketchMap, query: _Floats) -> _QueryCodes:
    _, columns, _ = sketch_map.columns
    dims = sketch_map.plan.num_dims
    zero = torch.zeros(columns.shape[1])
    x = _projected(torch.from_numpy(query)[None], columns, zero, dims)[0]
    if not np.isfinite(x).all():
        raise NonFiniteError("queries must be finite, and so must query_map times them")
    scale = np.abs(x).max() / _LARGEST
    inverse = np.float32(1) / scale if scale >= _TINY else np.float32(0)
    codes = np.rint((x * inverse).clip(-_LARGEST, _LARGEST)).astype(np.int8)
    largest = sketch_map.plan.tops.numpy().astype(np.int64)
    return _QueryCodes(codes, scale * np.float32(0.5), int((codes * largest).sum()))


def _projected(rows: Tensor, columns: Tensor, start: Tensor, dims: int) -> _Floats:
    """[n, dims] of rows [n, D]."""
    out = np.empty((len(rows), columns.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        _project(rows.float().contiguous().numpy(), columns.numpy(), start.numpy(), out)
    return np.ascontiguousarray(out[:, :dims])


def _groups(plan: SketchPlan) -> _Ints:
    return np.array(plan.groups, np.int64)
