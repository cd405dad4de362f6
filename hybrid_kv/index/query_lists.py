"""`query_lists`: the prompt's last queries, each with a list of its best keys."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from hybrid_kv import config
from hybrid_kv.index._base import SCRATCH_BYTES, KeyIndex, rank, scan, true_scores
from hybrid_kv.plugins import INDEXES
from hybrid_kv.types import Needs, SearchResult


@INDEXES.register("query_lists", paper="CTkvr (Lu et al. 2025, arXiv:2512.15550)")
class QueryListsIndex(KeyIndex):
    """Scores the keys on the lists of the queries that are most like the one asked (CTkvr).

    Centroids are the last queries of the prompt, of all query heads of a KV head; on the list of
    each are the keys that it scores highest. A query takes the lists of the centroids with the
    highest cosine. Later keys get on the lists they belong to. Without queries, spread keys serve.
    """

    ranks = True

    class Params(config.Params):
        """num_centroids: queries of a KV head; list_tokens: keys of a list; num_probes: lists that
        a query takes, more where they hold fewer keys than it asks for.
        """

        num_centroids: config.Count = 256
        list_tokens: config.Count = 1024
        num_probes: config.Count = 4

    @classmethod
    def needs(cls, params: Any) -> Needs:
        return Needs(last_queries=params.num_centroids)

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        lists = params.num_centroids * 8 * min(num_keys, params.list_tokens)
        return int((lists + 4 * head_dim * params.num_centroids) / max(1, num_keys)) + 1

    @property
    def memory_bytes(self) -> int:
        return self._centroids.nbytes + self._lists.nbytes + self._scores.nbytes

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        heads, count, _ = self._keys.shape
        wanted = int(self.params.num_centroids)
        if samples is not None and samples.numel():
            last = -(-wanted // samples.shape[1])
            asked = samples[:, :, -last:].transpose(1, 2).flatten(1, 2)[:, -wanted:]
        else:
            spread = torch.linspace(0, count - 1, min(wanted, count)).round().long()
            asked = self._keys[:, spread]
        self._centroids = asked.float()
        self._lists = torch.empty(heads, asked.shape[1], 0, dtype=torch.int32)
        self._scores = torch.empty(heads, asked.shape[1], 0)
        if count:
            self._append(0)

    def _append(self, known: int) -> None:
        if not self._centroids.shape[1]:  # it was built without keys and queries
            return self._rebuild(None, None)
        room = min(len(self), int(self.params.list_tokens))
        new = self._keys[:, known:]
        scores, ids = scan(self._centroids, new, min(room, new.shape[1]))
        scores = torch.cat([self._scores, scores], -1)
        self._scores, places = scores.topk(room)
        both = torch.cat([self._lists, (ids + known).int()], -1)
        self._lists = both.gather(-1, places)

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        length = self._lists.shape[-1]
        probes = max(int(self.params.num_probes), -(-count // length))
        probes = min(probes, self._centroids.shape[1])
        step = max(1, SCRATCH_BYTES // (16 * len(queries) * probes * length))
        parts = [self._find_few(q, probes, count, most) for q in queries.split(step, 1)]
        looked = len(queries) * queries.shape[1] * self._centroids.shape[1]
        scored, listed = sum(scored for _, _, scored in parts), self._lists.itemsize * length
        lists = len(queries) * queries.shape[1] * probes * listed
        return SearchResult(
            torch.cat([ids for ids, _, _ in parts], 1),
            torch.cat([scores for _, scores, _ in parts], 1),
            looked + scored,
            read_bytes=self._centroids.nbytes + lists + self._key_bytes(scored),
        )

    def _find_few(
        self, queries: Tensor, probes: int, count: int, most: int
    ) -> tuple[Tensor, Tensor, int]:
        heads, asked, _ = queries.shape
        like = torch.matmul(queries, normalize(self._centroids, dim=-1).transpose(1, 2))
        chosen = like.topk(probes).indices.flatten(1)[..., None]
        lists = self._lists.gather(1, chosen.expand(-1, -1, self._lists.shape[-1]))
        ids = lists.view(heads, asked, -1).long().sort(-1).values
        ids = ids.masked_fill(ids == pad(ids[..., :-1], (1, 0), value=-1), -1)  # each once
        ids = pad(ids, (0, max(0, count - ids.shape[-1])), value=-1)
        scored = int((ids >= 0).sum())
        scores, ids = rank(true_scores(queries, self._keys, ids), ids, min(most, ids.shape[-1]))
        return ids, scores, scored
