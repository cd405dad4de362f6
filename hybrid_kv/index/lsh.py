"""`lsh`: hash tables sample keys, those more probably that point where the query does."""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._base import KeyIndex
from hybrid_kv.index.hash_tables import HashTables
from hybrid_kv.plugins import INDEXES
from hybrid_kv.types import SearchResult


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
