"""CSKV: keys and values by the singular vectors of all heads together, the window whole."""

from __future__ import annotations

from torch import Tensor

from hybrid_kv.config import Ratio
from hybrid_kv.methods.low_rank import LowRank, LowRankParams, joint_directions
from hybrid_kv.plugins import METHODS


@METHODS.register("cskv", paper="Wang et al. 2024, arXiv:2409.10593")
class CSKV(LowRank):
    """Keeps what left the window by a fifth as many coefficients as channels; ROUNDS.

    K = (K B^T) B, B the first right singular vectors of a layer's keys before RoPE, all heads
    behind each other, and so with values. What lies outside of them is lost. The first sink_tokens
    stay whole.

    Deviations: the paper trains the two matrices for reconstruction; here they are the SVD of the
    prompt's keys and values, not of the weights.
    """

    class Params(LowRankParams):
        """rank_ratio: coefficients of a token, as a share of its channels in all heads."""

        rank_ratio: Ratio = 0.2

    def basis(self, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        return joint_directions(rows, rank)
