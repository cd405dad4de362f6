"""`skewed_channels`: scores in the heaviest columns of queries and keys turned by an SVD."""

import torch
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._short import SampledIndex, SampledParams, share_of
from hybrid_kv.plugins import INDEXES


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
