"""`pca`: scores in the first principal components of the keys."""

from typing import Any

import torch
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._short import ProjectedIndex, ShortParams, room_bytes, share_of
from hybrid_kv.plugins import INDEXES


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
