"""ThinK: keys of what left the window without the channels that the queries use least."""

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv.config import Count, Tokens
from hybrid_kv.entries import Entries
from hybrid_kv.methods.codec import Codec, CodecParams, Kept, Seen
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Needs


class ThinEntries(Entries):
    """k: [capacity, C], the channels [Hkv, C] int64 in the state; the others read as 0."""

    def read(self) -> tuple[Tensor, Tensor]:
        k = torch.zeros_like(self.v)
        for head, channels in enumerate(self.state["channels"]):
            self.split(k)[head][:, channels] = self.split("k")[head]
        return k, self.v


@METHODS.register("think", paper="Xu et al. 2024, arXiv:2407.21018")
class ThinK(Codec):
    """Keeps all values, and of the keys that left the window the best channels; DROPS the others.

    By KV head the channels of the highest |Q[:, i]| |K[:, i]| stay: Q the last observed_tokens
    queries of the prompt, of the whole group of query heads, K its keys. Logits lose what the
    others add.

    Kept: every entry; of the keys that left the window some channels.
    Lost: what the other channels add to the logits.
    Deviations: the choice serves for what leaves the window later, too; what is gone reads as 0,
    queries are not thinned; without SnapKV, which the paper puts before it (see chain).
    """

    class Params(CodecParams):
        """channel_ratio: channels that stay; observed_tokens: last queries that choose them."""

        channel_ratio: float = Field(default=0.6, gt=0, le=1)
        observed_tokens: Count = 32
        window_tokens: Tokens = 32

    lossless = ("channel_ratio", 1.0)

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.params.observed_tokens)

    def code(self, k: Tensor, v: Tensor, at: Tensor, kept: Kept, seen: Seen) -> Entries:
        state = kept.state if kept else {"channels": self._choose(k, seen)}
        thin = k.gather(-1, state["channels"][:, None].expand(-1, k.shape[1], -1))
        return ThinEntries.of(thin, v, at, state=state)

    def _choose(self, k: Tensor, seen: Seen) -> Tensor:
        """[Hkv, C] channels that stay, in order."""
        if seen is None or seen.last_queries is None or seen.keys is None:
            return torch.arange(k.shape[-1], device=k.device).expand(len(k), -1)
        q = seen.last_queries.unflatten(0, (len(k), -1)).flatten(1, 2).float()
        scores = q.square().sum(1) * seen.keys.float().square().sum(1)
        count = max(1, int(self.params.channel_ratio * k.shape[-1]))
        return torch.sort(torch.topk(scores, count).indices).values
