"""SnapKV: the prompt entries that the queries at its end attend most, and all of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor

from hybrid_kv.config import Count
from hybrid_kv.entries import Entries
from hybrid_kv.errors import ConfigError
from hybrid_kv.methods.evicting import Evicting, EvictingParams
from hybrid_kv.methods.scores import (
    Odd,
    Pooling,
    best,
    critical,
    group_sums,
    pooled,
    value_norms,
)
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, ModelInfo, Needs


class SnapParams(EvictingParams):
    """observed_tokens: the prompt's last queries, which score; pool_tokens, pooling: each entry
    counts as the "max" or "mean" of so many neighbours, an odd number; value_weighting: CriticalKV,
    which fills a part of a budget by these scores, the rest by scores times the L1 norm of the
    "values", or of what they add to the output when "projected"; sure_ratio: that part, by the
    scores alone.
    """

    observed_tokens: Count = 32
    pooling: Pooling = "max"
    pool_tokens: Odd = 7
    value_weighting: Literal["none", "values", "projected"] = "none"
    sure_ratio: float = Field(default=0.5, ge=0, le=1)

    def without_effect(self) -> dict[str, str]:
        idle = {"pooling": "with pool_tokens 1"} if self.pool_tokens == 1 else {}
        if self.value_weighting == "none":
            idle["sure_ratio"] = "with value_weighting 'none'"
        return idle


@METHODS.register("snapkv", paper="Li et al. 2024, arXiv:2404.14469, section 4")
class SnapKV(Evicting):
    """Keeps what the prompt's last queries attend most, by KV head, and DROPS the rest of it.

    score[n] = max over pool_tokens neighbours of the mean weight that entry n got from the last
    observed_tokens queries, before the window; the best of a head stay, and everything later.

    Kept: of the prompt the best of each KV head; sinks, window and all of the answer.
    Lost: with demote "drop" the prompt's others; with "offload" nothing.
    Deviations: with grouped queries a group is averaged before pooling, as by Ada-KV's authors, so
    that a KV head has one set; sink_tokens is of this project, 0 by default.
    """

    Params = SnapParams

    @property
    def needs(self) -> Needs:
        params = self.params
        mine = Needs(last_queries=params.observed_tokens)
        return super().needs | mine | Needs(outputs=params.value_weighting == "projected")

    def open(self, info: ModelInfo) -> None:
        self._info = info
        for one in info.layers if self.params.value_weighting == "projected" else ():
            if info.output_of(one.layer_idx) is None:
                raise ConfigError(
                    "value_weighting 'projected' must know the output projection of layer "
                    f"{one.layer_idx} as a plain matrix, got none or a packed one; choose "
                    "'values', whose own norm counts"
                )

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
        mass = seen.mass(params.observed_tokens)
        queries = min(params.observed_tokens, seen.num_tokens) * len(mass) // left.num_heads
        means = group_sums(mass, left.num_heads)[:, : first + count] / queries
        scores = pooled(means, params.pool_tokens, params.pooling)[:, first:]
        budgets = self.shares(layer_idx, scores, budget)
        if params.value_weighting != "none":
            projected = params.value_weighting == "projected"
            output = self._info.output_of(layer_idx) if projected else None
            norms = value_norms(left, output)
            scores = critical(scores, norms, budgets, params.sure_ratio)
        ranked = best(scores, max(budgets))
        if len(set(budgets)) == 1:
            return left.select(ranked)
        return left.select([head[:own] for head, own in zip(ranked, budgets, strict=True)])

    def budget(self, layer_idx: int, count: int) -> int:
        """Of `count` entries those that a head of this layer keeps, on average."""
        return self.room(count)

    def shares(self, layer_idx: int, scores: Tensor, budget: int) -> Sequence[int]:
        """By KV head the entries that stay, of scores [Hkv, N] and `budget` < N on average."""
        return [budget] * len(scores)
