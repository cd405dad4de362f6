"""Keys in 8 bits without the engine, and the oracle that its codes are held against bit for bit.

See `native/include/hybrid_kv_rows.h` for the recipe. Every step is one rounded operation in the
engine's order: float64 sums in the order of the keys, everything else float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from hybrid_kv.errors import ShapeError

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
