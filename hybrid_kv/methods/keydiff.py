"""KeyDiff: keys that are least like all others."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from hybrid_kv.entries import Entries
from hybrid_kv.methods.evicting import Evicting
from hybrid_kv.methods.scores import best
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, Needs


@METHODS.register("keydiff", paper="Park et al. 2025, arXiv:2504.15364, section 3")
class KeyDiff(Evicting):
    """Keeps the keys that are least like the mean of all, by KV head, and DROPS the rest.

    score[n] = -cos(k[n], mean over the prompt of k / |k|): no query is asked, no weight computed.
    The best of a head stay, and everything later.

    Kept: of the prompt the best of each KV head; sinks, window and all of the answer.
    Lost: with demote "drop" the prompt's others; with "offload" nothing.
    Deviations: the authors evict while they read, block by block; here the prompt is computed
    exactly and chosen from once. sink_tokens is of this project, 0 by default.
    """

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(last_queries=1)  # with which the prompt's keys are shown

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        if seen is None or seen.keys is None:
            return (kept or Entries.empty(left)).extended(left)
        if (room := self.room(left.lengths[0])) >= left.lengths[0]:
            return left.copied()
        anchor = F.normalize(seen.keys.float(), dim=-1).mean(1, keepdim=True)
        keys = torch.stack(left.split("k")).float()
        return left.select(best(-F.cosine_similarity(keys, anchor, dim=-1), room))
