"""Hash tables of keys by random hyperplanes (LSH), searched or sampled."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._base import KeyIndex
from hybrid_kv.plugins import INDEXES
from hybrid_kv.types import SearchResult

_LEAST_TAIL, _TAIL_SHARE = 1024, 4
"""Further keys, so many or a fourth as many, are compared one by one until tables are made anew."""

_USUAL_DIM = 96  # cosines of random directions have a standard deviation of 1 / sqrt(dim)

_HASHED_TOGETHER = 256  # rows, whose projections are held meanwhile

_jit = numba.njit(cache=True, nogil=True)


@_jit
def tabulate(codes: Any, num_buckets: int) -> tuple[Any, Any]:
    """The rows of codes [N, L] int16 by bucket: order [L, N] int32, first [L, num_buckets + 1].

    Bucket b of table l holds order[l, first[l, b] : first[l, b + 1]], in the order of the rows.
    """
    rows, tables = codes.shape
    order = np.empty((tables, rows), np.int32)
    first = np.zeros((tables, num_buckets + 1), np.int32)
    for table in range(tables):
        for row in range(rows):
            first[table, codes[row, table] + 1] += 1
        for bucket in range(num_buckets):
            first[table, bucket + 1] += first[table, bucket]
        place = first[table].copy()
        for row in range(rows):
            bucket = codes[row, table]
            order[table, place[bucket]] = row
            place[bucket] += 1
    return order, first


@_jit
def _collide(order: Any, first: Any, tail: Any, codes: Any, hits: Any, found: Any) -> int:
    """Writes the rows that share a bucket with codes [L] at least twice; how many they are.

    order, first: see `tabulate`; tail: [n, L] codes of the rows behind those; hits: [N] zeros.
    """
    count, rows = 0, order.shape[1]
    for table in range(len(codes)):
        for place in range(first[table, codes[table]], first[table, codes[table] + 1]):
            row = order[table, place]
            hits[row] += 1
            if hits[row] == 2:
                found[count] = row
                count += 1
    for row in range(len(tail)):
        equal = 0
        for table in range(len(codes)):
            equal += tail[row, table] == codes[table]
        if equal >= 2:
            found[count] = rows + row
            count += 1
    return count


@lru_cache(maxsize=4)
def _planes(dim: int, count: int, seed: int) -> Tensor:
    return torch.randn(dim, count, generator=torch.Generator().manual_seed(seed))


def probability(alike: Tensor | float, num_bits: int, num_tables: Tensor | int) -> Tensor:
    """Probability that a key collides in two tables, where one projection gives the query's sign by
    `alike`.
    """
    same, others = torch.as_tensor(alike, dtype=torch.float64) ** num_bits, num_tables - 1
    # 1 - (1 - same)^L - L same (1 - same)^(L - 1), without cancellation
    return -torch.expm1(others * torch.log1p(-same) + torch.log1p(others * same))


def tables_that_find(share: float, most_bits: int, most_tables: int) -> tuple[int, int]:
    """Bits and tables, as many as may be, that sample this share of keys of random directions."""
    tables = torch.arange(2, most_tables + 1)
    quantiles = torch.special.ndtri((torch.arange(64) + 0.5) / 64)
    alike = 1 - (quantiles / _USUAL_DIM**0.5).acos() / torch.pi
    for bits in range(most_bits, 0, -1):
        found = probability(alike[:, None], bits, tables).mean(0)
        if found[-1] >= share or bits == 1:
            break
    return bits, int(tables[(found - share).abs().argmin()])


class HashTables:
    """`num_tables` tables of every KV head, each by the signs of `num_bits` random projections.

    Keys are shifted by their mean when the tables are made, queries are not.

    Args:
        keys: [Hkv, N, D], N >= 0.
        seed: of the projections, which are the same for all heads.
    """

    def __init__(self, keys: Tensor, num_bits: int, num_tables: int, seed: int) -> None:
        self._bits, self._num_tables, self._seed = num_bits, num_tables, seed
        self._make(keys)

    def _make(self, keys: Tensor) -> None:
        self.mean = keys.mean(1, keepdim=True, dtype=torch.float32).nan_to_num()  # [Hkv, 1, D]
        self._tabulated = keys.shape[1]
        codes = self._hash(keys, self.mean)
        tail = np.empty((0, self._num_tables), np.int16)  # no view of the codes: it would hold them
        self._tables = [(*tabulate(head, 2**self._bits), tail) for head in codes]

    def append(self, keys: Tensor) -> None:
        """Keys [Hkv, N, D], of which the last are new."""
        if keys.shape[1] - self._tabulated > max(_LEAST_TAIL, self._tabulated // _TAIL_SHARE):
            return self._make(keys)
        tails = self._hash(keys[:, self._tabulated :], self.mean)
        self._tables = [(*old[:2], new) for old, new in zip(self._tables, tails, strict=True)]

    @property
    def memory_bytes(self) -> int:
        return sum(array.nbytes for arrays in self._tables for array in arrays)

    def collisions(self, queries: Tensor) -> list[list[Tensor]]:
        """By head and query of [Hkv, M, D] the ids [n] that collide in two tables, unordered."""
        found = zip(self._tables, self._hash(queries, 0.0), strict=True)
        return [[_sample(*tables, one) for one in codes] for tables, codes in found]

    def read_bytes(self, queries: Tensor) -> int:
        """Bytes that `collisions` of queries [Hkv, M, D] reads: projections, buckets, codes."""
        read = 4 * len(queries) * queries.shape[-1] * self._num_tables * self._bits
        every = range(self._num_tables)
        for (order, first, tail), codes in zip(self._tables, self._hash(queries, 0.0), strict=True):
            for code in codes:
                buckets = int((first[every, code + 1] - first[every, code]).sum())
                read += (buckets + 2 * self._num_tables) * order.itemsize + tail.nbytes
        return read

    def log_probability(self, cosine: Tensor) -> Tensor:
        """Of a collision in two tables, where query and shifted key enclose such an angle."""
        alike = 1 - cosine.double().clamp(-1, 1).acos() / torch.pi
        return probability(alike, self._bits, self._num_tables).log()

    def _hash(self, rows: Tensor, mean: Tensor | float) -> NDArray[np.int16]:
        """Codes [Hkv, n, L] of rows [Hkv, n, D]."""
        planes = _planes(rows.shape[-1], self._num_tables * self._bits, self._seed)
        ones = 2 ** torch.arange(self._bits)
        codes = []
        for part in rows.split(_HASHED_TOGETHER, 1):
            signs = (part.float() - mean) @ planes > 0
            codes.append((signs.unflatten(-1, (-1, self._bits)) * ones).sum(-1).to(torch.int16))
        return torch.cat(codes, 1).numpy()


def _sample(
    order: NDArray[Any], first: NDArray[Any], tail: NDArray[Any], codes: NDArray[Any]
) -> Tensor:
    hits = np.zeros(order.shape[1], np.uint16)
    found = np.empty(order.shape[1] + len(tail), np.int64)
    return torch.from_numpy(found[: _collide(order, first, tail, codes, hits, found)].copy())


@INDEXES.register("lsh", paper="MagicPIG (Chen et al. 2024, section 4)")
class LshIndex(KeyIndex):
    """Samples the keys that share a bucket with the query in two of L hash tables (MagicPIG).

    K signs of random projections of q and k - mean(k) are a bucket. A key at an angle (1 - p) pi is
    found with probability u = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L-1), and weighs 1 / u: no bias.
    """

    class Params(config.Params):
        """num_bits: projections of a table, K; num_tables: tables, L; seed: of the projections."""

        num_bits: int = Field(default=10, ge=1, le=14)
        num_tables: int = Field(default=150, ge=2, le=1000)
        seed: int = 0

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        places = num_keys + 2**params.num_bits + 1
        return int(-(-4 * params.num_tables * places // max(1, num_keys)))

    @property
    def memory_bytes(self) -> int:
        return self._tables.memory_bytes

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        self._tables = HashTables(self._keys, **self.params.model_dump())

    def _append(self, known: int) -> None:
        self._tables.append(self._keys)

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        sampled = self._tables.collisions(queries)
        width = min(most, max(count, *(len(ids) for head in sampled for ids in head)))
        ids = queries.new_full((*queries.shape[:2], width), -1, dtype=torch.int64)
        scores, bias = torch.full(ids.shape, -torch.inf), torch.zeros(ids.shape)
        for head, of_head in enumerate(sampled):
            for m, some in enumerate(of_head):
                q, keys = queries[head, m], self._keys[head, some].float()
                best, order = (keys @ q).sort(descending=True, stable=True)
                shifted, n = keys[order[:width]] - self._tables.mean[head], min(len(some), width)
                cosine = (shifted @ q) / (shifted.norm(dim=-1) * q.norm()).clamp_min(1e-20)
                ids[head, m, :n], scores[head, m, :n] = some[order[:n]], best[:n]
                bias[head, m, :n] = -self._tables.log_probability(cosine)
        scored = sum(len(some) for head in sampled for some in head)
        read = self._tables.read_bytes(queries) + self._key_bytes(scored)
        return SearchResult(ids, scores, scored, bias=bias, read_bytes=read)
