"""`pq`: scores from a few bytes of a key, the nearest centroids of its parts."""

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._base import SCRATCH_BYTES
from hybrid_kv.index.projections import ShortIndex, ShortParams, room_bytes
from hybrid_kv.ops.kmeans import kmeans, nearest_of
from hybrid_kv.plugins import INDEXES

_LEAST_ROOM, _AGED = 256, 4


@INDEXES.register("pq", paper="PQCache (Zhang et al. 2024, arXiv:2407.12820)")
class PqIndex(ShortIndex):
    """Ranks keys by product quantisation: each part of a key stands for its centroid (PQCache).

    Estimated score: sum over the parts of q_part . centroid, looked up in a table of the query.
    Centroids are k-means of the keys, by KV head and part; later keys take the nearest, until there
    are four times as many.
    """

    class Params(ShortParams):
        """num_parts: that a key is cut into; num_bits: of the number of a centroid; iterations: of
        k-means, at most; training_keys: evenly spread, that it runs on.
        """

        in_python = frozenset({"iterations", "training_keys"})

        num_parts: config.Count = 2
        num_bits: int = Field(default=6, ge=1, le=8)
        iterations: config.Count = 10
        training_keys: config.Count = 65536

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._codes = torch.empty(0, 0, 0, dtype=torch.uint8)  # [Hkv, parts, capacity]

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        return room_bytes(min(params.num_parts, head_dim), num_keys)

    @property
    def memory_bytes(self) -> int:
        return self._codes.nbytes + (self._centroids.nbytes if len(self) else 0)

    def _parts(self, rows: Tensor) -> Tensor:
        """[Hkv * parts, N, d] of rows [Hkv, N, D], zeros behind the last channels."""
        parts = min(int(self.params.num_parts), rows.shape[-1])
        wide = -(-rows.shape[-1] // parts)
        filled = torch.nn.functional.pad(rows.float(), (0, wide * parts - rows.shape[-1]))
        cut: Tensor = filled.unflatten(-1, (parts, wide)).transpose(1, 2).flatten(0, 1)
        return cut

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        self._learned = len(self)
        self._codes = self._codes[:, :, :0]
        if len(self):
            stride = math.ceil(len(self) / self.params.training_keys)
            some = self._parts(self._keys[:, ::stride])
            self._centroids = kmeans(some, 2**self.params.num_bits, self.params.iterations)[0]
            self._append(0)

    def _append(self, known: int) -> None:
        if not self._learned or (known and len(self) >= _AGED * self._learned):
            return self._rebuild(None, None)
        heads, count = len(self._keys), len(self)
        codes = nearest_of(self._parts(self._keys[:, known:]), self._centroids)
        codes = codes.unflatten(0, (heads, -1)).to(torch.uint8)
        if count > self._codes.shape[2]:
            room = count + max(_LEAST_ROOM, count // 8)
            grown = codes.new_empty(*codes.shape[:2], room)
            if known:
                grown[..., :known] = self._codes[..., :known]
            self._codes = grown
        self._codes[..., known:count] = codes

    @property
    def _scanned_bytes(self) -> int:
        return self._codes[..., : len(self)].nbytes + self._centroids.nbytes

    def _candidates(self, queries: Tensor, wanted: int) -> Tensor:
        step = max(1, SCRATCH_BYTES // (4 * len(queries) * len(self)))
        parts = [
            self._estimates(q).topk(wanted, sorted=False).indices for q in queries.split(step, 1)
        ]
        return torch.cat(parts, 1)

    def _estimates(self, queries: Tensor) -> Tensor:
        """[Hkv, M, N] float32 scores of what the keys stand for."""
        tables = torch.matmul(self._parts(queries), self._centroids.transpose(1, 2))
        tables = tables.unflatten(0, (len(queries), -1))  # [Hkv, parts, M, C]
        codes = self._codes[..., : len(self)]
        scores = torch.zeros(*queries.shape[:2], len(self))
        for head, (table, code) in enumerate(zip(tables, codes, strict=True)):
            for part, ids in zip(table, code, strict=True):
                scores[head] += part.index_select(1, ids.int())
        return scores
