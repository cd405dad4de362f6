"""`hnsw`: a layered neighbour graph of the keys (Faiss HNSWFlat).

Source: Malkov and Yashunin 2018.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hybrid_kv import config
from hybrid_kv.index._faiss import FaissIndex, import_faiss
from hybrid_kv.plugins import INDEXES


@INDEXES.register("hnsw", paper="HNSW (Malkov and Yashunin 2018)")
class HnswIndex(FaissIndex):
    """Walks a layered neighbour graph built from the keys alone (Faiss HNSW)."""

    ranks = True

    class Params(config.Params):
        """max_degree: links per key, twice that on the lowest layer; ef_construction, ef_search:
        candidates kept while linking and while searching (never below top_k); centre: subtract the
        mean key first, which changes no ranking.
        """

        max_degree: int = Field(default=32, ge=2)
        ef_construction: config.Count = 200
        ef_search: config.Count = 256
        centre: bool = True

    @property
    def _centred(self) -> bool:
        return bool(self.params.centre)

    def _build_head(self, rows: Any) -> Any:
        faiss = import_faiss()
        index = faiss.IndexHNSWFlat(
            rows.shape[1], self.params.max_degree, faiss.METRIC_INNER_PRODUCT
        )
        index.hnsw.efConstruction = self.params.ef_construction
        index.add(rows)
        return index

    def _search_setup(self, count: int) -> tuple[Any, Any]:
        faiss = import_faiss()
        parameters = faiss.SearchParametersHNSW(efSearch=self._num_ranked(count))
        return faiss.cvar.hnsw_stats, parameters

    def _num_ranked(self, count: int) -> int:
        return int(max(count, self.params.ef_search))

    def _head_bytes(self, index: Any) -> int:
        links = index.hnsw
        words = index.ntotal * index.d + links.neighbors.size() + links.levels.size()
        return int(4 * words + 8 * links.offsets.size())

    @property
    def _bytes_per_score(self) -> int:
        return super()._bytes_per_score + 4  # a link led to it

    def _uncounted(self, index: Any) -> int:
        return 1  # the query against the entry point
