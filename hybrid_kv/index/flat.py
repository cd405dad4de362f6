"""`flat`: every key is scored; the oracle of all kinds and hard to beat for short contexts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._base import KeyIndex, rank, scan
from hybrid_kv.index._flat_scans import KeyScan, make_scan, planned
from hybrid_kv.index._trial import HeadReport
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.plugins import INDEXES
from hybrid_kv.types import SearchResult


@INDEXES.register("flat")
class FlatIndex(KeyIndex):
    """Scores every key, once for all queries of a KV head.

    Scores are float32 products of the stored keys, at every precision. Where keys tie at the last
    place, which of them is returned is not specified, but the same input gives the same answer.
    """

    ranks = True

    class Params(config.Params):
        """precision: how keys are read; rerank: with int8, candidates per returned key that are
        scored again with the stored keys.

        "exact" multiplies the stored keys with torch and "stored" with the native engine, several
        times faster, without memory of its own. "int8" reads 8-bit copies, a quarter to a half of
        the bytes, and finds all but a few in a thousand of the best.
        """

        precision: Literal["exact", "stored", "int8"] = "exact"
        rerank: Annotated[float, Field(ge=1)] = 1.5

        def without_effect(self) -> dict[str, str]:
            ranks_once = self.precision != "int8"
            why = f"with precision '{self.precision}', which scores every key exactly"
            return {"rerank": why} if ranks_once else {}

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.exact = params.precision != "int8"
        self._scan: KeyScan | None = None

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        if self.params.precision == "exact":
            return
        self._scan = make_scan(self.params.precision, self.params.rerank)
        if self._scan is not None:
            self._scan.rebuild(self._keys)

    def _append(self, known: int) -> None:
        if self._scan is not None:
            self._scan.append(self._keys)

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        if self._scan is not None:
            return self._scan.find(queries, count, most)
        scores, ids = rank(*scan(queries, self._keys, most), most)  # all keys are ranked
        heads, num_queries, _ = queries.shape
        scored = heads * num_queries * len(self)
        return SearchResult(ids, scores, scored, read_bytes=self._key_bytes(heads * len(self)))

    def _plan(self, count: int, most: int) -> list[EngineSearch] | None:
        return planned(self._scan, count, most)

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        return head_dim + 8 if params.precision == "int8" else 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of the 8-bit copies."""
        return 0 if self._scan is None else self._scan.memory_bytes


# What serves while a graph or a sketch is built ---------------------------------------------------


class StandIn(FlatIndex):
    """Scans all keys in 8 bits, as heads without either are served, and says why."""

    def __init__(self) -> None:
        super().__init__(FlatIndex.Params(precision="int8"))

    def describe(self) -> list[dict[str, Any]]:
        return [
            HeadReport("flat", "scanned while the index is built").to_dict() for _ in self._keys
        ]
