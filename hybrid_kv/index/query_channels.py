"""`query_channels`: scores by the largest components of the query (SparQ)."""

from typing import Any

import torch
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._base import SCRATCH_BYTES, scan, scores_of, true_scores
from hybrid_kv.index._short import ShortIndex, ShortParams
from hybrid_kv.masses import logits_of
from hybrid_kv.plugins import INDEXES
from hybrid_kv.types import PartialAttention


@INDEXES.register("query_channels", paper="SparQ (Ribar et al. 2023, arXiv:2312.04985, section 3)")
class QueryChannelsIndex(ShortIndex):
    """Ranks keys by the num_channels largest components of the query alone (SparQ).

    An estimated logit is scale q[i] . k[i] / tau, i those components, tau^2 = |q[i]|_1 / |q|_1.
    What was not found is estimated as the mean value, with its share of the estimated softmax.
    Keys are held once, by token, so that all of their channels pass through memory.
    """

    ranks = True

    class Params(ShortParams):
        """num_channels: components of each query that score; shared: the query heads of a KV head
        choose together, components by the sum of |q|, keys by that of the softmax of estimated
        logits at a scale of 1 / sqrt(D).
        """

        num_channels: config.Count = 32
        shared: bool = False

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.joint = params.shared

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        self._summed, self._sums = 0, torch.zeros(len(self._keys), 1, self._keys.shape[-1])

    def _append(self, known: int) -> None:
        """Keys are read where they lie."""

    def _largest(self, queries: Tensor) -> Tensor:
        """Queries [Hkv, M, D] / tau, 0 in all but their largest components."""
        sizes = queries.abs()
        count = min(int(self.params.num_channels), queries.shape[-1])
        ranked = sizes.sum(1, keepdim=True).expand_as(sizes) if self.params.shared else sizes
        channels = ranked.topk(count).indices
        kept = torch.zeros_like(queries).scatter_(-1, channels, queries.gather(-1, channels))
        share = kept.abs().sum(-1, keepdim=True) / sizes.sum(-1, keepdim=True).clamp_min(1e-20)
        return kept / share.clamp_min(1e-20).sqrt()

    @property
    def _scanned_bytes(self) -> int:
        return self._key_bytes(self._keys.shape[0] * len(self))

    def _candidates(self, queries: Tensor, wanted: int) -> Tensor:
        largest = self._largest(queries)
        if not self.params.shared or queries.shape[1] == 1:
            return scan(largest, self._keys, wanted)[1]
        scale, ids = queries.shape[2] ** -0.5, []
        for head in range(len(largest)):  # [1, M, N] at a time
            logits = scale * scores_of(largest[head, None], self._keys[head, None])
            ids.append(logits.softmax(-1).sum(1).topk(wanted, sorted=False).indices)
        return torch.stack(ids).expand(-1, queries.shape[1], -1)

    def estimate(
        self,
        queries: Tensor,
        found: Tensor,
        values: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> PartialAttention:
        """The mean value, with the weight that leaves what was found its estimated share alpha.

        lse = lse(found) + log((1 - alpha) / alpha), merged: alpha found + (1 - alpha) mean.
        """
        queries, keys = queries.float(), self._keys[:, : values.shape[1]]
        step = max(1, SCRATCH_BYTES // (4 * len(keys) * keys.shape[1]))
        asked = (queries, self._largest(queries), found)
        lse = [
            self._lse_left(q, largest, keys, ids, scale, softcap)
            for q, largest, ids in zip(*(one.split(step, 1) for one in asked), strict=True)
        ]
        mean = self._mean(values)
        return PartialAttention(mean.expand(-1, queries.shape[1], -1), torch.cat(lse, 1))

    def estimate_bytes(self, queries: int, found: int) -> int:
        """See `Index.estimate_bytes`: all keys again, those that were found, the mean value."""
        return self._scanned_bytes + self._key_bytes(found) + self._sums.nbytes

    def _mean(self, values: Tensor) -> Tensor:
        """[Hkv, 1, D] of values [Hkv, n, D], each of which is added up once."""
        count = values.shape[1]
        if count < self._summed:  # a row that was cropped
            return values.mean(1, keepdim=True, dtype=torch.float32)
        self._sums += values[:, self._summed :].sum(1, keepdim=True, dtype=torch.float32)
        self._summed = count
        return self._sums / count

    def _lse_left(
        self,
        q: Tensor,
        largest: Tensor,
        keys: Tensor,
        ids: Tensor,
        scale: float,
        cap: float | None,
    ) -> Tensor:
        guessed = logits_of(largest, keys, scale=scale, softcap=cap)  # [Hkv, M, n]
        there = torch.zeros(guessed.shape, dtype=torch.int32)
        there.scatter_add_(-1, ids.clamp_min(0), (ids >= 0).int())
        inside = guessed.masked_fill(there == 0, -torch.inf).logsumexp(-1)
        left = guessed.masked_fill(there > 0, -torch.inf).logsumexp(-1)
        exact = scale * true_scores(q, keys, ids)
        exact = exact if cap is None else cap * torch.tanh(exact / cap)
        exact = exact.masked_fill(ids < 0, -torch.inf).logsumexp(-1)
        return torch.where(inside > -torch.inf, exact + left - inside, left)
