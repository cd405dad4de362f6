"""Templates of the kinds that rank keys by something short, and the best of these exactly."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._base import KeyIndex, rank, scan, true_scores
from hybrid_kv.types import Needs, SearchResult

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
    """So many of `dim` channels, at least one."""
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
