"""Kinds that rank by few numbers a key: components, some of its channels, or nearest centroids."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._base import SCRATCH_BYTES, KeyIndex, rank, scan, scores_of, true_scores
from hybrid_kv.masses import logits_of
from hybrid_kv.ops.tail import kmeans, nearest_of
from hybrid_kv.plugins import INDEXES
from hybrid_kv.types import Needs, PartialAttention, SearchResult

_LEAST_ROOM, _ROOM_SHARE = 256, 8

_AGED = 4
"""Times as many keys, and what was learned from the first ones is learned again."""


class ShortParams(config.Params):
    """rerank: candidates per returned key, by their short forms; 1 is the paper's."""

    rerank: Annotated[float, Field(ge=1)] = 1.0


class ShortIndex(KeyIndex):
    """Takes the candidates that an estimate of the scores ranks highest, by their true scores."""

    @abstractmethod
    def _candidates(self, queries: Tensor, wanted: int) -> Tensor:
        """[Hkv, M, wanted] ids of the keys with the highest estimates, in any order."""

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        wanted = min(len(self), math.ceil(self.params.rerank * count))
        ids = self._candidates(queries, wanted)
        scores, ids = rank(true_scores(queries, self._keys, ids), ids, min(most, wanted))
        asked = len(ids) * queries.shape[1]
        read = self._scanned_bytes + self._key_bytes(asked * wanted)
        return SearchResult(ids, scores, asked * (len(self) + wanted), read_bytes=read)

    @property
    @abstractmethod
    def _scanned_bytes(self) -> int:
        """Bytes that `_candidates` reads, once for all queries of a KV head."""


class ProjectedIndex(ShortIndex):
    """Estimates scores in a few directions, which are learned when the index is built.

    Later keys are projected by the same directions until there are four times as many keys.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._short = torch.empty(0, 0, 0)  # [Hkv, capacity, R] in the dtype of the keys

    @abstractmethod
    def _ask(self, samples: Tensor | None) -> None:
        """Remembers what is needed of the samples [Hkv, G, M, D], in little memory."""

    @abstractmethod
    def _learn(self, keys: Tensor) -> Tensor:
        """Orthonormal directions [Hkv, D, R] float32 for keys [Hkv, N, D], N >= 1."""

    @property
    def memory_bytes(self) -> int:
        return self._short.nbytes

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        self._ask(samples)
        self._begin()

    def _begin(self) -> None:
        self._learned = len(self)
        self._short = self._keys.new_empty(len(self._keys), 0, 0)
        if len(self):
            self._directions = self._learn(self._keys)
            self._write(0)

    def _append(self, known: int) -> None:
        if len(self) >= _AGED * self._learned:
            self._begin()
        else:
            self._write(known)

    def _write(self, known: int) -> None:
        heads, count, _ = self._keys.shape
        if count > self._short.shape[1]:
            capacity = count + max(_LEAST_ROOM, count // _ROOM_SHARE)
            grown = self._keys.new_empty(heads, capacity, self._directions.shape[-1])
            if known:
                grown[:, :known] = self._short[:, :known]
            self._short = grown
        for head, (keys, directions) in enumerate(zip(self._keys, self._directions, strict=True)):
            self._short[head, known:count] = (keys[known:].float() @ directions).to(keys.dtype)

    @property
    def _scanned_bytes(self) -> int:
        return self._short[:, : len(self)].nbytes + self._directions.nbytes

    def _candidates(self, queries: Tensor, wanted: int) -> Tensor:
        return scan(queries @ self._directions, self._short[:, : len(self)], wanted)[1]


def room_bytes(row_bytes: float, num_keys: int) -> int:
    """For a key, where rows of so many bytes have room to grow."""
    held = num_keys + max(_LEAST_ROOM, num_keys // _ROOM_SHARE)
    return math.ceil(row_bytes * held / max(1, num_keys))


def columns_of(chosen: Tensor, dim: int) -> Tensor:
    """Directions [Hkv, D, R] that pick the channels [Hkv, R]."""
    return torch.nn.functional.one_hot(chosen, dim).transpose(1, 2).float()


def share_of(ratio: float, dim: int) -> int:
    """Number of channels, this ratio of `dim`, at least one."""
    return max(1, round(ratio * dim))


class SampledParams(ShortParams):
    """sampled_queries: of the prompt, per head, from which directions are chosen."""

    sampled_queries: config.Tokens = 256


class SampledIndex(ProjectedIndex):
    """Directions that sampled queries of the prompt choose, a share of all channels.

    ratio: the parameter that says which share.
    """

    ratio: ClassVar[str]

    @classmethod
    def needs(cls, params: Any) -> Needs:
        return Needs(params.sampled_queries)

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        return room_bytes(4 * share_of(getattr(params, cls.ratio), head_dim), num_keys)


@INDEXES.register("pca", paper="Loki (Singhania et al. 2024, arXiv:2406.02542)")
class PcaIndex(ProjectedIndex):
    """Ranks keys by their first principal components, kept beside them (Loki).

    Estimated score: (q P) . (k P), the columns of P the eigenvectors of the covariance of the keys
    with the largest eigenvalues, by KV head.
    """

    class Params(ShortParams):
        """component_ratio: components of a key, as a share of its channels."""

        component_ratio: config.Ratio = 0.25

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        return room_bytes(4 * share_of(params.component_ratio, head_dim), num_keys)

    def _ask(self, samples: Tensor | None) -> None:
        """Keys alone decide."""

    def _learn(self, keys: Tensor) -> Tensor:
        rows = keys.float() - keys.mean(1, keepdim=True, dtype=torch.float32)
        vectors: Tensor = torch.linalg.eigh(
            rows.transpose(1, 2) @ rows
        ).eigenvectors  # values ascend
        return vectors[..., -share_of(self.params.component_ratio, keys.shape[-1]) :].contiguous()


@INDEXES.register("label_channels", paper="Double Sparsity (Yang et al. 2024, arXiv:2408.07092)")
class LabelChannelsIndex(SampledIndex):
    """Ranks keys by the channels where |q| |k| is largest, kept beside the keys (Double Sparsity).

    Channels of a KV head: those of the largest mean |q_c| mean |k_c|, over sampled queries of the
    prompt (without any, of the largest mean |k_c|) and its keys.
    """

    class Params(SampledParams):
        """channel_ratio: of the channels; sampled_queries: of the prompt, per head, that choose."""

        channel_ratio: config.Ratio = 1 / 16

    ratio = "channel_ratio"

    def _ask(self, samples: Tensor | None) -> None:
        asks = samples is not None and samples.numel()
        self._sizes = samples.float().abs().mean((1, 2)) if asks else torch.ones(1, 1)  # type: ignore[union-attr]

    def _learn(self, keys: Tensor) -> Tensor:
        dim = keys.shape[-1]
        scores = self._sizes * keys.abs().mean(1, dtype=torch.float32)
        return columns_of(scores.topk(share_of(self.params.channel_ratio, dim)).indices, dim)


@INDEXES.register("skewed_channels", paper="InfiniGen (Lee et al. 2024, arXiv:2406.19707)")
class SkewedChannelsIndex(SampledIndex):
    """Ranks keys by the heaviest columns after a rotation by the SVD of queries (InfiniGen).

    Q = U S V^T, Q sampled queries of the prompt of all query heads of a KV head (without any, its
    keys); of the columns of Q V and K V those stay that have the largest sums |Q V| + |K V|.
    """

    class Params(SampledParams):
        """column_ratio: of the columns; sampled_queries: of the prompt, per head, that turn."""

        column_ratio: config.Ratio = 0.3

    ratio = "column_ratio"

    def _ask(self, samples: Tensor | None) -> None:
        self._turn: Tensor | None = None
        if samples is not None and samples.numel():
            asked = samples.float().flatten(1, 2)
            self._turn = _right_vectors(asked)
            self._sizes = (asked @ self._turn).abs().mean(1)

    def _learn(self, keys: Tensor) -> Tensor:
        rows, dim = keys.float(), keys.shape[-1]
        turn = _right_vectors(rows) if self._turn is None else self._turn
        sizes = (rows @ turn).abs().mean(1)
        if self._turn is not None:
            sizes = sizes + self._sizes
        chosen = sizes.topk(share_of(self.params.column_ratio, dim)).indices
        return turn.gather(-1, chosen[:, None].expand(-1, dim, -1))


def _right_vectors(rows: Tensor) -> Tensor:
    """[Hkv, D, D] right singular vectors of rows [Hkv, N, D]."""
    vectors: Tensor = torch.linalg.eigh(rows.transpose(1, 2) @ rows).eigenvectors
    return vectors


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
