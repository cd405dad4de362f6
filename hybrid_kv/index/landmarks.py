"""`landmarks`: chunks by their mean key; those it says little of are always read (ShadowKV)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_kv import config
from hybrid_kv.index._base import scan
from hybrid_kv.index.pages import PagesIndex
from hybrid_kv.plugins import INDEXES


@INDEXES.register("landmarks", paper="ShadowKV (Sun et al. 2024, arXiv:2410.21465)")
class LandmarksIndex(PagesIndex):
    """Reads the chunks whose mean keys score best, and first of all the outliers (ShadowKV).

    A landmark is the mean key of a chunk. Outliers are the chunks of a KV head in which some key
    has the lowest cosine with it; they are chosen when the index is built, and are part of top_k.
    The query heads of a KV head choose together, by the largest of their softmax weights.
    """

    class Params(config.Params):
        """page_size: tokens of a chunk; outlier_chunks: that are always read, at most half of what
        a search reads; shared: the query heads of a KV head choose together (false: each alone).
        """

        page_size: config.Count = 8
        outlier_chunks: config.Tokens = 48
        shared: bool = True

    _rows = 1

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.joint = params.shared
        self._outliers = torch.zeros(0, 0, dtype=torch.int64)  # [Hkv, O], of the whole chunks

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        super()._rebuild(samples, nearest)
        size = self.params.page_size
        full = len(self) // size
        keys = self._keys[:, : full * size].unflatten(1, (full, size)).float()
        alike = F.cosine_similarity(keys, self._digests[:, :full, None].float(), dim=-1).amin(-1)
        order = alike.sort(dim=-1, stable=True).indices
        self._outliers = order[:, : self.params.outlier_chunks].contiguous()

    @property
    def memory_bytes(self) -> int:
        return super().memory_bytes + self._outliers.nbytes

    def _digest(self, first: int, pages: Tensor) -> Tensor:
        return pages.mean(2)

    def _describe(self) -> None:
        """Nothing for the engine: landmarks score as keys do."""

    def _best_pages(self, queries: Tensor, wanted: int) -> Tensor:
        landmarks = self._digests[:, : self._num_pages]
        always = self._outliers[:, : wanted // 2]
        if not self.params.shared and not always.shape[1]:
            return scan(queries, landmarks, wanted)[1]
        scores = torch.matmul(queries.float(), landmarks.float().transpose(1, 2))
        if self.params.shared:
            scores = (scores * queries.shape[2] ** -0.5).softmax(-1).amax(1, keepdim=True)
        scores.scatter_(2, always[:, None].expand(-1, scores.shape[1], -1), torch.inf)
        return scores.topk(wanted).indices.expand(*queries.shape[:2], -1)
