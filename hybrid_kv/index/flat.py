"""`flat`: every key is scored; the oracle of all kinds and hard to beat for short contexts."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._base import KeyIndex
from hybrid_kv.index._scan import rank, scan
from hybrid_kv.plugins import INDEXES
from hybrid_kv.types import SearchResult


@INDEXES.register("flat")
class FlatIndex(KeyIndex):
    """Scores every key: exact, no build, no memory of its own.

    One pass over a KV head's keys serves all its queries. Scores are float32 products of the stored
    keys. Where keys tie at the last place, which of them is returned is not specified, but the same
    input gives the same answer.
    """

    class Params(config.Params):
        """No parameters."""

    exact: ClassVar[bool] = True

    def _rebuild(self, samples: Tensor | None) -> None:
        pass

    def _append(self, known: int) -> None:
        pass

    def _find(self, queries: Tensor, count: int) -> SearchResult:
        scores, ids = rank(*scan(queries, self._keys, count), count)
        heads, num_queries, _ = queries.shape
        return SearchResult(ids, scores, heads * num_queries * len(self))
