"""`ivf`: k-means cells of the keys, of which a query scans the most promising (Faiss IVFFlat).

Source: Faiss, Douze et al. 2024, section 5 (inverted files).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from hybrid_kv import config
from hybrid_kv.index._faiss import FaissIndex, import_faiss
from hybrid_kv.plugins import INDEXES

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
