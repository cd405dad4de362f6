"""`label_channels`: scores by a few channels, the same for all queries of a head."""

from typing import Any

import torch
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._short import ProjectedIndex, ShortParams, columns_of, room_bytes, share_of
from hybrid_kv.plugins import INDEXES
from hybrid_kv.types import Needs


@INDEXES.register("label_channels", paper="Double Sparsity (Yang et al. 2024, arXiv:2408.07092)")
class LabelChannelsIndex(ProjectedIndex):
    """Ranks keys by the channels where |q| |k| is largest, kept beside the keys (Double Sparsity).

    Channels of a KV head: those of the largest mean |q_c| mean |k_c|, over sampled queries of the
    prompt (without any, of the largest mean |k_c|) and its keys.
    """

    class Params(ShortParams):
        """channel_ratio: of the channels; sampled_queries: of the prompt, per head, that choose."""

        channel_ratio: config.Ratio = 1 / 16
        sampled_queries: config.Tokens = 256

    @classmethod
    def needs(cls, params: Any) -> Needs:
        return Needs(params.sampled_queries)

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        return room_bytes(4 * share_of(params.channel_ratio, head_dim), num_keys)

    def _ask(self, samples: Tensor | None) -> None:
        asks = samples is not None and samples.numel()
        self._sizes = samples.float().abs().mean((1, 2)) if asks else torch.ones(1, 1)  # type: ignore[union-attr]

    def _learn(self, keys: Tensor) -> Tensor:
        dim = keys.shape[-1]
        scores = self._sizes * keys.abs().mean(1, dtype=torch.float32)
        return columns_of(scores.topk(share_of(self.params.channel_ratio, dim)).indices, dim)
