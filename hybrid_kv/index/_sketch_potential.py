"""How much a key may come to matter: how far it rises above the best keys of some sampled query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hybrid_kv.index._sketch_space import QuerySpace

DIMS = 48
_QUERIES = 1024
_RANK = 1000
"""The key of this rank of a query has potential 0 for it."""
_SAMPLE_KEYS = 4096
"""Keys that say what that score is."""
_BLOCK_KEYS = 1024


@dataclass(frozen=True, slots=True)
class Potential:
    """A key's is max over queries q of (q . k - t_q) / sd_q in the first dims of their space.

    t_q is the score of the key of rank 1000, sd_q the spread of the scores.

    of_keys [d, D], weights [d, Q] int8, scale [Q], thresholds [Q]; float32 but for the weights.
    """

    of_keys: Tensor
    weights: Tensor
    scale: Tensor
    thresholds: Tensor

    @classmethod
    def learn(cls, space: QuerySpace, keys: Tensor, queries: Tensor) -> Self:
        """From keys [N, D] and queries [Q, D]."""
        queries = queries[:: max(1, len(queries) // _QUERIES)][:_QUERIES]
        dims = min(DIMS, keys.shape[1])
        wanted = space.queries(queries, dims).T
        largest = wanted.abs().amax(0).clamp_min(1e-30)
        weights = (wanted * (127 / largest)).round().to(torch.int8)
        of_keys = space.of_keys[:dims].float()
        rows = keys[:: max(1, len(keys) // _SAMPLE_KEYS)].float() @ of_keys.T
        scores = (weights * (largest / 127)).T @ rows.T
        spread = scores.std(1, correction=0).clamp_min(1e-30)
        rank = max(1, min(len(rows), round(_RANK * len(rows) / len(keys))))
        cut = scores.topk(rank, 1).values[:, -1]
        return cls(of_keys, weights, largest / 127 / spread, cut / spread)

    def of(self, keys: Tensor) -> Tensor:
        """[n] float32, for keys [n, D]."""
        weights = self.weights * self.scale
        found = [
            torch.addmm(-self.thresholds, block.float() @ self.of_keys.T, weights).amax(1)
            for block in keys.split(_BLOCK_KEYS)
        ]
        return torch.cat(found) if found else torch.empty(0)

    @property
    def nbytes(self) -> int:
        return sum(
            part.nbytes for part in (self.of_keys, self.weights, self.scale, self.thresholds)
        )
