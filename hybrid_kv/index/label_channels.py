"""`label_channels`: scores by a few channels, the same for all queries of a head."""

import torch
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._short import SampledIndex, SampledParams, columns_of, share_of
from hybrid_kv.plugins import INDEXES


@INDEXES.register("label_channels", paper="Double Sparsity (Yang et al. 2024, arXiv:2408.07092)")
class LabelChannelsIndex(SampledIndex):
    """Ranks keys by the channels where |q| |k| is largest, kept beside the keys (Double Sparsity).

    Channels of a KV head: those of the largest mean |q_c| mean |k_c|, over sampled queries of the
    prompt (without any, of the largest mean |k_c|) and its keys.
    """

    class Params(SampledParams):
        """channel_ratio: of the channels; sampled_queries: of the prompt, per head, that choose."""

        channel_ratio: config.Ratio = 1 / 16

    ratio = "channel_ratio"

    def _ask(self, samples: Tensor | None) -> None:
        asks = samples is not None and samples.numel()
        self._sizes = samples.float().abs().mean((1, 2)) if asks else torch.ones(1, 1)  # type: ignore[union-attr]

    def _learn(self, keys: Tensor) -> Tensor:
        dim = keys.shape[-1]
        scores = self._sizes * keys.abs().mean(1, dtype=torch.float32)
        return columns_of(scores.topk(share_of(self.params.channel_ratio, dim)).indices, dim)
