"""What the Faiss kinds share: one Faiss index per KV head, centred float32 rows, counted work.

Faiss is imported when an index is built, not with the package.
"""

from __future__ import annotations

from abc import abstractmethod
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.index._base import KeyIndex
from hybrid_kv.types import SearchResult

_RETRAIN_GROWTH = 4
"""Rows over rows at the last build from which `add` builds anew: cells and mean have aged."""

_stats_lock = Lock()
"""Faiss counts work in process-wide objects, so that counted searches must not overlap."""


def import_faiss() -> Any:
    """The faiss module."""
    import faiss

    return faiss


class FaissIndex(KeyIndex):
    """One Faiss index per KV head over f32 copies of the keys.

    Each head's mean key m is subtracted first: q . (k - m) ranks keys as q . k does, and edges then
    follow what tells keys apart rather than their common offset. Returned scores have q . m added
    back.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._heads: list[Any] = []
        self._means = torch.empty(0, 0)  # [Hkv, D] float32
        self._built_rows = 0

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        return 4 * head_dim + 16 + 8 * int(getattr(params, "max_degree", 0))

    @property
    def memory_bytes(self) -> int:
        return sum(self._head_bytes(head) for head in self._heads) + 4 * self._means.numel()

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        heads, rows, dim = self._keys.shape
        self._heads, self._built_rows = [], rows
        self._means = torch.zeros(heads, dim)
        if rows == 0:
            return
        for head in range(heads):
            if self._centred:
                self._means[head] = self._keys[head].mean(0, dtype=torch.float32)
            self._heads.append(self._build_head(self._rows(head, 0)))

    def _append(self, known: int) -> None:
        if len(self) >= _RETRAIN_GROWTH * self._built_rows:
            self._rebuild(None, None)
            return
        for head, index in enumerate(self._heads):
            self._add_rows(index, self._rows(head, known))

    def _rows(self, head: int, first: int) -> Any:
        """Rows [N', D] of a head from `first` on, a centred float32 array for Faiss."""
        rows = self._keys[head, first:].to(torch.float32, copy=True)
        return rows.sub_(self._means[head]).contiguous().numpy()

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        setup = self._search_setup(count)
        returned = min(most, max(count, self._num_ranked(count)))
        found = [
            self._search_head(index, queries[head].contiguous().numpy(), returned, setup)
            for head, index in enumerate(self._heads)
        ]
        ids = torch.stack([torch.from_numpy(ids) for _, ids, _ in found])
        scores = torch.stack([torch.from_numpy(scores) for scores, _, _ in found])
        scores += torch.matmul(queries, self._means[:, :, None])
        scores.masked_fill_(ids < 0, -torch.inf)
        scored = sum(scored for _, _, scored in found)
        read = scored * self._bytes_per_score
        return SearchResult(ids, scores, scored, read_bytes=read + self._means.nbytes)

    @property
    def _bytes_per_score(self) -> int:
        """Of a row: Faiss reads it for each query by itself, in float32."""
        return 4 * self._keys.shape[2]

    def _search_head(
        self, index: Any, queries: Any, count: int, setup: tuple[Any, Any]
    ) -> tuple[Any, Any, int]:
        stats, parameters = setup
        with _stats_lock:
            stats.reset()
            scores, ids = index.search(queries, count, params=parameters)
            return scores, ids, int(stats.ndis) + self._uncounted(index) * len(queries)

    @property
    def _centred(self) -> bool:
        """Whether the mean key is subtracted."""
        return True

    def _add_rows(self, index: Any, rows: Any) -> None:
        """Appends rows [N', D] to one head's Faiss index."""
        index.add(rows)

    @abstractmethod
    def _build_head(self, rows: Any) -> Any:
        """A trained Faiss index that holds rows [N, D], N >= 1."""

    @abstractmethod
    def _search_setup(self, count: int) -> tuple[Any, Any]:
        """Faiss's counters of work for this kind, and the parameters of a search for `count`."""

    def _num_ranked(self, count: int) -> int:
        """Keys that a search for `count` holds in order when it ends: all, where cells are read."""
        return len(self)

    @abstractmethod
    def _head_bytes(self, index: Any) -> int:
        """Bytes held by one head's Faiss index."""

    def _uncounted(self, index: Any) -> int:
        """Dot products per query that the counters do not see."""
        return 0
