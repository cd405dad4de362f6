"""SnapKV: the prompt entries that the queries at its end attend most, and all of the answer."""

from __future__ import annotations

from torch import Tensor

from hybrid_kv.config import Count
from hybrid_kv.entries import Chosen, Entries
from hybrid_kv.methods.evicting import Evicting, EvictingParams
from hybrid_kv.methods.scores import Odd, Pooling, best, group_sums, pooled
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, Needs


class SnapParams(EvictingParams):
    """observed_tokens: the prompt's last queries, which score; pool_tokens, pooling: each entry
    counts as the "max" or "mean" of so many neighbours.
    """

    observed_tokens: Count = 32
    pooling: Pooling = "max"
    pool_tokens: Odd = 7


@METHODS.register("snapkv", paper="Li et al. 2024, arXiv:2404.14469")
class SnapKV(Evicting):
    """Keeps what the prompt's last queries attend most, by KV head, and DROPS the rest of it.

    score[n] = max over pool_tokens neighbours of the mean weight that entry n got from the last
    observed_tokens queries, before the window; the best of a head stay, and everything later. With
    grouped queries a group is averaged before pooling, as by Ada-KV's authors; sinks are ours.
    """

    Params = SnapParams

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(last_queries=self.params.observed_tokens)

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        if seen is None:
            return (kept or Entries.empty(left)).extended(left)
        count = left.lengths[0]
        budget = self.budget(layer_idx, count)
        if budget >= count:
            return left.copied()
        params, first = self.params, self.params.sink_tokens
        mass = group_sums(seen.mass(params.observed_tokens), left.num_heads)
        scores = pooled(mass[:, : first + count], params.pool_tokens, params.pooling)
        return left.select(self.choose(scores[:, first:], budget))

    def budget(self, layer_idx: int, count: int) -> int:
        """Of `count` entries those that a head of this layer keeps, on average."""
        return self.room(count)

    def choose(self, scores: Tensor, budget: int) -> Chosen:
        """By KV head the entries that stay, of scores [Hkv, N] and `budget` < N for each."""
        return best(scores, budget)
