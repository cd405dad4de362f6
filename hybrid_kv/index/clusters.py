"""`clusters` and `query_lists`: keys in groups or on lists, of which a search reads the best."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from hybrid_kv import config
from hybrid_kv.index._base import SCRATCH_BYTES, KeyIndex, rank, scan, true_scores
from hybrid_kv.masses import logits_of
from hybrid_kv.ops.tail import kmeans, means_of
from hybrid_kv.plugins import INDEXES
from hybrid_kv.types import Needs, PartialAttention, SearchResult


class _Groups(NamedTuple):
    """Clusters of the first N keys, in segments. centroids: [Hkv, C, D] float32, means of their
    keys; group: [Hkv, N] which one a key is in; order: [Hkv, N] keys by cluster; first: [Hkv, C]
    where in it a cluster begins; sizes: [Hkv, C].
    """

    centroids: Tensor
    group: Tensor
    order: Tensor
    first: Tensor
    sizes: Tensor


@INDEXES.register("clusters", paper="RetroInfer (Chen et al. 2025, arXiv:2505.02922, section 4.2)")
class ClustersIndex(KeyIndex):
    """Reads the clusters with the best centroids, and estimates the others (RetroInfer).

    Spherical k-means of shifted keys (k - mean(k)) within segments; a query reads clusters by
    q . centroid until they hold top_k keys. An unread cluster weighs s exp(q . centroid), s its
    size, with the mean of its values. Later keys are scored one and all until they are a segment.
    """

    class Params(config.Params):
        """cluster_tokens: keys of a cluster, on average; segment_tokens: that are clustered
        together; update_tokens: later keys that become a segment; iterations: of k-means.
        """

        in_python = frozenset({"segment_tokens", "update_tokens", "iterations"})

        cluster_tokens: config.Count = 16
        segment_tokens: config.Count = 8192
        update_tokens: config.Count = 1024
        iterations: config.Count = 10

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        segments = 1 + num_keys // min(params.segment_tokens, params.update_tokens)
        clusters = num_keys / params.cluster_tokens + segments
        return 8 + 4 + int(clusters * (8 * head_dim + 8) / max(1, num_keys))

    @property
    def memory_bytes(self) -> int:
        tensors = (*self._groups, self._value_sums)
        return sum(tensor.nbytes for tensor in tensors)

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        heads, _, dim = self._keys.shape
        none = torch.zeros(heads, 0, dtype=torch.int32)
        self._groups = _Groups(torch.zeros(heads, 0, dim), none, none, none, none)
        self._value_sums = torch.zeros(heads, 0, dim)
        self._mean = self._keys.mean(1, keepdim=True, dtype=torch.float32).nan_to_num()
        for start in range(0, len(self), self.params.segment_tokens):
            self._cluster(start, min(len(self), start + self.params.segment_tokens))

    def _append(self, known: int) -> None:
        if len(self) - self._clustered >= self.params.update_tokens:
            self._cluster(self._clustered, len(self))

    @property
    def _clustered(self) -> int:
        return self._groups.group.shape[1]

    def _cluster(self, start: int, stop: int) -> None:
        """Makes these keys, which follow those of the segments before, a segment."""
        keys, old = self._keys[:, start:stop].float(), self._groups
        count = -(-(stop - start) // self.params.cluster_tokens)
        turned = normalize(keys - self._mean, dim=-1)
        _, group = kmeans(turned, count, self.params.iterations, spherical=True)
        sizes = torch.zeros(len(keys), count).scatter_add_(1, group, torch.ones(group.shape))
        order = group.argsort(dim=-1, stable=True) + start
        parts = (
            means_of(keys, group, sizes),
            (group + old.sizes.shape[1]).int(),
            order.int(),
            (sizes.cumsum(1) - sizes + start).int(),
            sizes.int(),
        )
        joined = (torch.cat(both, 1) for both in zip(old, parts, strict=True))
        self._groups = _Groups(*joined)

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        width = count + int(self._groups.sizes.max() if self._clustered else 0)
        tail = len(self) - self._clustered
        step = max(1, SCRATCH_BYTES // (8 * len(queries) * (width + tail) * 8))
        found = [self._find_few(q, count, most) for q in queries.split(step, 1)]
        columns = max(ids.shape[-1] for ids, _, _ in found)
        ids = torch.cat(
            [pad(ids, (0, columns - ids.shape[-1]), value=-1) for ids, _, _ in found], 1
        )
        scores = [pad(s, (0, columns - s.shape[-1]), value=-torch.inf) for _, s, _ in found]
        scored = sum(scored for _, _, scored in found)
        clusters = len(queries) * queries.shape[1] * self._groups.sizes.shape[1]
        read = self._groups.centroids.nbytes + self._key_bytes(scored - clusters)
        return SearchResult(ids, torch.cat(scores, 1), scored, read_bytes=read)

    def _find_few(self, queries: Tensor, count: int, most: int) -> tuple[Tensor, Tensor, int]:
        later = torch.arange(self._clustered, len(self)).expand(*queries.shape[:2], -1)
        ids = torch.cat([self._members(queries, count), later], -1)
        if ids.shape[-1] < count:
            ids = pad(ids, (0, count - ids.shape[-1]), value=-1)
        scored = (
            int((ids >= 0).sum()) + len(queries) * queries.shape[1] * self._groups.sizes.shape[1]
        )
        scores = true_scores(queries, self._keys, ids)
        scores, ids = rank(scores, ids, min(most, ids.shape[-1]))
        return ids, scores, scored

    def _members(self, queries: Tensor, count: int) -> Tensor:
        """[Hkv, M, W] the keys of the best clusters that together hold `count`, -1 behind them."""
        centroids, _, order, first, sizes = self._groups
        heads, queries_each, _ = queries.shape
        clusters = min(sizes.shape[1], count + int((sizes == 0).sum(1).max()))
        if clusters == 0:
            return torch.empty(heads, queries_each, 0, dtype=torch.int64)
        best = torch.matmul(queries, centroids.transpose(1, 2)).topk(clusters).indices
        flat = best.flatten(1)
        taken = sizes.gather(1, flat).view(best.shape).long()
        ends = taken.cumsum(-1)
        taken = torch.where(ends - taken < count, taken, 0)
        ends, total = taken.cumsum(-1), taken.sum(-1, keepdim=True)
        place = torch.arange(int(total.max())).expand(heads, queries_each, -1).contiguous()
        slot = torch.searchsorted(ends, place, right=True).clamp_max(clusters - 1)
        begin = first.gather(1, flat).view(best.shape).gather(-1, slot)
        within = place - (ends - taken).gather(-1, slot)
        where = (begin + within).clamp(0, self._clustered - 1).flatten(1)
        return order.gather(1, where).view(place.shape).long().masked_fill(place >= total, -1)

    def estimate(
        self,
        queries: Tensor,
        found: Tensor,
        values: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> PartialAttention:
        """Every cluster as one entry, its centroid with log(keys that were not found) as bias; keys
        that are in no cluster yet are one more.
        """
        centroids, sizes, sums, group = self._summary(values)
        heads, queries_each = found.shape[:2]
        left = sizes[:, None].repeat(1, queries_each, 1)
        for head in range(heads):  # what was found is taken from its clusters
            into = group[head].long()[found[head].clamp_min(0)]
            left[head].scatter_add_(1, into, -(found[head] >= 0).float())
        logits = logits_of(queries, centroids, scale=scale, softcap=softcap) + left.log()
        lse = logits.logsumexp(-1)
        weights = (logits - lse.nan_to_num(neginf=0.0)[..., None]).exp()
        return PartialAttention(weights @ (sums / sizes.clamp_min(1)[..., None]), lse)

    def estimate_bytes(self, queries: int, found: int) -> int:
        """See `Index.estimate_bytes`: centroids, sums of values and sizes."""
        centroids, sizes = self._groups.centroids, self._groups.sizes
        return 2 * centroids.nbytes + sizes.nbytes

    def _summary(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Centroids and sums of values [Hkv, C, D], sizes [Hkv, C] and groups [Hkv, n], of the
        clusters as far as they hold the first n keys, and of those that are in none yet.
        """
        centroids, group, _, _, sizes = self._groups
        count, clustered = values.shape[1], self._clustered
        if count < clustered:  # a row that was cropped
            group = group[:, :count]
            held = torch.zeros(sizes.shape).scatter_add_(1, group.long(), torch.ones(group.shape))
            return centroids, held, means_of(values, group.long(), held) * held[..., None], group
        known = self._value_sums.shape[1]
        if known < sizes.shape[1]:  # clusters that are new
            start = int(sizes[0, :known].sum())
            new, fresh = sizes[:, known:].float(), group[:, start:].long() - known
            sums = means_of(values[:, start:clustered], fresh, new) * new[..., None]
            self._value_sums = torch.cat([self._value_sums, sums], 1)
        if count == clustered:
            return centroids, sizes.float(), self._value_sums, group
        later, last = values[:, clustered:], sizes.shape[1]
        key = self._keys[:, clustered:count].mean(1, keepdim=True, dtype=torch.float32)
        one = torch.full((len(sizes), 1), count - clustered)
        return (
            torch.cat([centroids, key], 1),
            torch.cat([sizes, one], 1).float(),
            torch.cat([self._value_sums, later.sum(1, keepdim=True, dtype=torch.float32)], 1),
            torch.cat([group, torch.full((len(sizes), later.shape[1]), last)], 1),
        )


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
