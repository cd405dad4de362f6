"""MatryoshkaKV: keys and values by principal components, more of them in heads that need more."""

from __future__ import annotations

from torch import Tensor

from hybrid_kv.methods.low_rank import LowRank, LowRankParams, principal_directions
from hybrid_kv.plugins import METHODS


@METHODS.register("matryoshka_kv", paper="Lin et al. 2024, arXiv:2410.14731")
class MatryoshkaKV(LowRank):
    """Keeps what left the window by principal components of each head; ROUNDS.

    k = mean + (k - mean) U U^T, U orthogonal by head, its first components; of all heads of a layer
    those with the largest variances stay, so that heads have ranks of their own. What the others
    hold is lost. The first sink_tokens stay whole.

    Deviations: the paper trains U and searches ranks on a calibration set; this is its untrained
    start, PCA of the prompt's keys before RoPE and values.
    """

    class Params(LowRankParams):
        """rank_ratio: coefficients of a token, as a share of its channels in all heads."""

    def basis(self, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        return principal_directions(rows, rank)
