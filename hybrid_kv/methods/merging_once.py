"""What methods share that merge a prompt when it ends, by the weights that all its queries gave."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from hybrid_kv.entries import Entries
from hybrid_kv.methods.evicting import Evicting
from hybrid_kv.methods.h2o import HeavyParams, heavy_needs
from hybrid_kv.methods.scores import group_sums
from hybrid_kv.types import Evidence, Needs


class MergingOnce(Evicting):
    """Merges what leaves the window as the prompt ends, up to a budget; keeps all of the answer."""

    Params = HeavyParams

    @property
    def needs(self) -> Needs:
        return super().needs | heavy_needs(self.params)

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        if seen is None:
            return (kept or Entries.empty(left)).extended(left)
        first, count = self.params.sink_tokens, left.lengths[0]
        room = self.room(count)
        if room == count:
            return left.copied()
        scores = group_sums(seen.total_mass(), left.num_heads)
        return self.merged_into(left, scores[:, first : first + count], room)

    @abstractmethod
    def merged_into(self, left: Entries, scores: Tensor, room: int) -> Entries:
        """`room` entries of each head of `left`, the others merged into them where nothing else has
        them; scores [Hkv, N]: the weights that each got.
        """
