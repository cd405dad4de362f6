"""ShadowKV's key cache: keys before RoPE by their singular vectors, values whole."""

from __future__ import annotations

from torch import Tensor

from hybrid_kv.config import Ratio
from hybrid_kv.methods.low_rank import LowRank, LowRankParams, joint_directions
from hybrid_kv.plugins import METHODS


@METHODS.register("shadowkv_keys", paper="Sun et al. 2024, arXiv:2410.21465, section 4.1")
class ShadowKVKeys(LowRank):
    """Keeps keys that left the window by coefficients along singular vectors, values whole; ROUNDS.

    K = (K B^T) B, B the first right singular vectors of the prompt's keys before RoPE, all heads
    behind each other (the paper: 160 of 1024). ShadowKV's other half, values in host memory found
    by landmarks, is not here (see shadowkv): everything is attended on the device.

    Deviations: that other half; chunks that no landmark stands for well (the paper's outliers) are
    rounded as all others, where the authors keep their keys whole; the first sink_tokens stay whole
    whether they are such chunks or not.
    """

    class Params(LowRankParams):
        """rank_ratio: coefficients of a token's keys, as a share of its channels in all heads."""

        rank_ratio: Ratio = 160 / 1024

    def ranks(self, channels: int) -> tuple[int, int]:
        return round(self.params.rank_ratio * channels), channels

    def basis(self, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        return joint_directions(rows, rank)
