"""Inverted lists and HNSW graphs by FAISS, one index a KV head."""

from __future__ import annotations

import math
from abc import abstractmethod
from threading import Lock
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._base import KeyIndex
from hybrid_kv.plugins import INDEXES
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


_POINTS_PER_LIST = 39
"""Fewer training rows per cell than this make k-means fit noise; Faiss warns below it."""

_MIN_PROBES = 8

_SEED = 1234


@INDEXES.register("ivf", paper="Faiss (Douze et al. 2024)")
class IvfIndex(FaissIndex):
    """Scans the k-means cells whose centroids score highest (Faiss IVFFlat).

    Cells are Euclidean and queries choose among them by inner product, so that the keys' common
    offset plays no part; Faiss's own choice for inner products, spherical cells, depends on it.
    """

    class Params(config.Params):
        """nlist: cells per KV head, at most N / 39; nprobe: cells scanned.

        "auto" is 4 sqrt(N) cells, an eighth of which (at least 8) are scanned.
        """

        nlist: config.Count | Literal["auto"] = "auto"
        nprobe: config.Count | Literal["auto"] = "auto"

    def _build_head(self, rows: Any) -> Any:
        faiss = import_faiss()
        count, dim = rows.shape
        nlist = self._nlist(count)
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, nlist, faiss.METRIC_INNER_PRODUCT)
        cells = faiss.IndexFlatL2(dim)
        index.clustering_index, index.cp.spherical = cells, False
        index.cp.seed = _SEED
        index.cp.min_points_per_centroid = 1  # one cell over a few rows is meant
        index.train(rows)
        index.clustering_index = None
        self._add_rows(index, rows, reserve=True)
        return index

    def _add_rows(self, index: Any, rows: Any, *, reserve: bool = False) -> None:
        faiss = import_faiss()
        cells = faiss.IndexFlatL2(index.d)  # `index.add` would choose cells by inner product
        cells.add(index.quantizer.reconstruct_n(0, index.nlist))
        _, nearest = cells.search(rows, 1)
        if reserve:  # lists that grow row by row hold a third more than their rows
            for cell, count in enumerate(np.bincount(nearest[:, 0], minlength=index.nlist)):
                index.invlists.resize(cell, int(count))
                index.invlists.resize(cell, 0)
        index.add_core(len(rows), faiss.swig_ptr(rows), None, faiss.swig_ptr(nearest))

    def _nlist(self, rows: int) -> int:
        auto = self.params.nlist == "auto"
        wanted = round(4 * math.sqrt(rows)) if auto else self.params.nlist
        return max(1, min(wanted, rows // _POINTS_PER_LIST))

    def _search_setup(self, count: int) -> tuple[Any, Any]:
        faiss = import_faiss()
        nlist = self._heads[0].nlist
        nprobe = self.params.nprobe
        if nprobe == "auto":
            nprobe = max(_MIN_PROBES, -(-nlist // 8))
        parameters = faiss.SearchParametersIVF(nprobe=min(nprobe, nlist))
        return faiss.cvar.indexIVF_stats, parameters

    def _head_bytes(self, index: Any) -> int:
        return int(index.ntotal * (index.code_size + 8) + 4 * index.nlist * index.d)

    def _uncounted(self, index: Any) -> int:
        return int(index.nlist)  # the query against every cell's centroid


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
