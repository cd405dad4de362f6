"""Twin of the engine in numba and torch: for machines without it, and its oracle, bit for bit.

Keys in 8 bits: see `native/include/hybrid_kv_rows.h` for the recipe. Every step is one rounded
operation in the engine's order: float64 sums in the order of the keys, everything else float32.

Sketches: see `hybrid_kv.ops.sketch_codes`. Every product and every sum is rounded by itself, in the
engine's order: projections add channel by channel, exact scores in 16 lanes that are then halved
three times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_kv.errors import NonFiniteError, ShapeError
from hybrid_kv.ops import sketch_codes
from hybrid_kv.ops.sketch_codes import (
    SketchMap,
    SketchPlan,
    check_followed,
    check_heads,
    check_search,
)
from hybrid_kv.types import SearchResult

LEVELS = 256
_ZERO_CODE = 128
_LARGEST = np.float32(127)
_TINY = np.finfo(np.float32).tiny
_HEADROOM = 2.0
_SPAN = 2.0**-20
_NO_KEYS = (2.0**-16, 2.0**4)
_CHUNK = 16384

_jit = numba.njit(cache=True, nogil=True)


@_jit
def _add_values(values: Any, sums: Any) -> None:
    for row in range(values.shape[0]):
        for d in range(values.shape[1]):
            sums[d] += np.float64(values[row, d])


@_jit
def _add_deviations(values: Any, mean: Any, sums: Any) -> None:
    for row in range(values.shape[0]):
        for d in range(values.shape[1]):
            sums[d] += abs(np.float64(values[row, d]) - np.float64(mean[d]))


@_jit
def _needs(values: Any, mean: Any, inverse: Any, out: Any) -> None:
    """The smallest level that each row fits."""
    for row in range(values.shape[0]):
        largest = np.float32(0)
        for d in range(values.shape[1]):
            shifted = values[row, d] - mean[d]
            largest = max(largest, abs(shifted * inverse[d]))
        out[row] = largest / _LARGEST


@_jit
def _round_code(value: Any) -> Any:
    if not value > -_LARGEST:
        return -127
    return np.int32(np.rint(min(value, _LARGEST)))


@_jit
def _quantise(
    values: Any, mean: Any, inverse: Any, levels: Any, needs: Any, codes: Any, scales: Any
) -> None:
    for row in range(values.shape[0]):
        level = min(np.searchsorted(levels, needs[row]), levels.shape[0] - 1)
        shrink = np.float32(1) / levels[level]
        scales[row] = level
        for d in range(values.shape[1]):
            shifted = values[row, d] - mean[d]
            codes[row, d] = _round_code((shifted * inverse[d]) * shrink) + _ZERO_CODE


@_jit
def _scores(codes: Any, scales: Any, levels: Any, query: Any, total: Any, out: Any) -> None:
    for row in range(codes.shape[0]):
        product = np.int32(0)
        for d in range(codes.shape[1]):
            product += np.int32(codes[row, d]) * np.int32(query[d])
        out[row] = np.float32(product - _ZERO_CODE * total) * levels[scales[row]]


class QuantisedQuery(NamedTuple):
    """codes: [D] int8; score = (product - 128 sum) * level * scale + offset."""

    codes: Tensor
    scale: float
    sum: int
    offset: float


class QuantisedKeys:
    """Keys of all KV heads in 8 bits; the portable twin of `hybrid_kv.ops.native.rows`.

    mean, channel: [H, D] float32; levels: [H, 256] float32.
    rows: [H, capacity, D] uint8; scale_codes: [H, capacity] uint8.
    """

    def __init__(self, heads: int, dim: int) -> None:
        self.heads, self.dim = heads, dim
        self.mean, self.channel = torch.zeros(heads, dim), torch.ones(heads, dim)
        self.levels = torch.ones(heads, LEVELS)
        self.rows = torch.empty(heads, 0, dim, dtype=torch.uint8)
        self.scale_codes = torch.empty(heads, 0, dtype=torch.uint8)
        self.count = 0

    def build(self, keys: Tensor) -> None:
        """Quantises keys [H, N, D] with statistics of their own, in place of those held."""
        self._check(keys)
        self.count = 0
        for head, rows in enumerate(keys):
            self._take_statistics(head, rows)
        self.append(keys)

    def append(self, keys: Tensor) -> None:
        """Quantises the rows of keys [H, N, D] beyond those held, clamping what does not fit.

        Raises:
            ShapeError: keys do not fit or are fewer than those held.
        """
        self._check(keys)
        if keys.shape[1] < self.count:
            raise ShapeError(
                f"keys must hold the {self.count} known rows first, got {keys.shape[1]} rows"
            )
        self._reserve(keys.shape[1])
        for head in range(self.heads):
            for start in range(self.count, keys.shape[1], _CHUNK):
                part = slice(start, min(start + _CHUNK, keys.shape[1]))
                values, needs = self._needs(head, keys[head, part])
                _quantise(
                    values,
                    self.mean[head].numpy(),
                    self._inverse(head),
                    self.levels[head].numpy(),
                    needs,
                    self.rows[head, part].numpy(),
                    self.scale_codes[head, part].numpy(),
                )
        self.count = keys.shape[1]

    def quantise_query(self, head: int, query: Tensor) -> QuantisedQuery:
        """One query [D] float32 for the keys of a head."""
        scaled = query * self.channel[head]
        largest = scaled.abs().amax().numpy()
        scale = largest / _LARGEST
        inverse = np.float32(1) / scale if scale >= _TINY else np.float32(0)
        codes = torch.from_numpy(np.rint(scaled.numpy() * inverse).clip(-127, 127).astype(np.int8))
        offset = float((query.double() * self.mean[head].double()).sum())
        return QuantisedQuery(codes, float(scale), int(codes.sum()), offset)

    def search(self, queries: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """The `top_k` best keys by the codes, unordered.

        Args:
            queries: [H, M, D] float32; 1 <= top_k <= N.

        Returns:
            ids [H, M, top_k] int64 and approximate scores [H, M, top_k] float32.
        """
        size = (*queries.shape[:2], top_k)
        ids, scores = torch.empty(size, dtype=torch.int64), torch.empty(size)
        for head, row in np.ndindex(*queries.shape[:2]):
            query = self.quantise_query(head, queries[head, row])
            best = self.scores(head, query).topk(top_k, sorted=False)
            scores[head, row] = best.values * query.scale + query.offset
            ids[head, row] = best.indices
        return ids, scores

    def scores(self, head: int, query: QuantisedQuery) -> Tensor:
        """[N] float32 scores without the query's scale and offset."""
        out = torch.empty(self.count)
        _scores(
            self.rows[head, : self.count].numpy(),
            self.scale_codes[head, : self.count].numpy(),
            self.levels[head].numpy(),
            query.codes.numpy(),
            np.int32(query.sum),
            out.numpy(),
        )
        return out

    @property
    def memory_bytes(self) -> int:
        """Bytes in use, without reserved room."""
        return self.heads * (self.count * (self.dim + 1) + 4 * (2 * self.dim + LEVELS))

    def _check(self, keys: Tensor) -> None:
        if keys.dim() != 3 or (keys.shape[0], keys.shape[2]) != (self.heads, self.dim):
            raise ShapeError(
                f"keys must be [{self.heads}, N, {self.dim}], got shape {list(keys.shape)}"
            )

    def _reserve(self, count: int) -> None:
        capacity = self.rows.shape[1]
        if count <= capacity:
            return
        capacity = max(count, 2 * capacity if self.count else 0)
        rows = torch.empty(self.heads, capacity, self.dim, dtype=torch.uint8)
        scale_codes = torch.empty(self.heads, capacity, dtype=torch.uint8)
        rows[:, : self.count] = self.rows[:, : self.count]
        scale_codes[:, : self.count] = self.scale_codes[:, : self.count]
        self.rows, self.scale_codes = rows, scale_codes

    def _inverse(self, head: int) -> Any:
        return np.float32(1) / self.channel[head].numpy()

    def _needs(self, head: int, rows: Tensor) -> tuple[Any, Any]:
        """Values [n, D] and needed levels [n], float32."""
        values = rows.float().numpy()
        needs = np.empty(len(values), np.float32)
        _needs(values, self.mean[head].numpy(), self._inverse(head), needs)
        return values, needs

    def _take_statistics(self, head: int, rows: Tensor) -> None:
        count = max(1, len(rows))
        sums = np.zeros(self.dim)
        for part in rows.split(_CHUNK):
            _add_values(part.float().numpy(), sums)
        self.mean[head] = torch.from_numpy((sums / count).astype(np.float32))
        sums[:] = 0
        for part in rows.split(_CHUNK):
            _add_deviations(part.float().numpy(), self.mean[head].numpy(), sums)
        channel = (sums / count).astype(np.float32)
        channel[~(channel >= _TINY)] = 1
        self.channel[head] = torch.from_numpy(channel)
        needs = [self._needs(head, part)[1] for part in rows.split(_CHUNK)] if len(rows) else []
        used = np.concatenate([*needs, np.zeros(1, np.float32)])
        used = used[used >= _TINY]
        low, high = (used.min(), used.max()) if used.size else _NO_KEYS
        self.levels[head] = torch.from_numpy(_levels(float(low), float(high)))


def _levels(low: float, high: float) -> Any:
    first, last = max(low, high * _SPAN), high * _HEADROOM
    step = math.log2(last / first) / (LEVELS - 1)
    return np.array([first * math.exp2(i * step) for i in range(LEVELS)], np.float32)


_LANES = 16
_ENCODED = 4096
_GROUP = 64
"""Queries of a head that share the rows they read."""
_Floats = NDArray[np.float32]
_Ints = NDArray[np.int64]


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
        for first in range(0, len(rows), _ENCODED):
            some = rows[first : first + _ENCODED].long()
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
            codes = _query_codes(tier.map, query)
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
    result = _query_codes(sketch_map, query.numpy())
    return torch.from_numpy(result.codes), 2.0 * float(result.half_scale)


def _query_codes(sketch_map: SketchMap, query: _Floats) -> _QueryCodes:
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
