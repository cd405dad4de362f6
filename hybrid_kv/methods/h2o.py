"""H2O: heavy hitters, by the weights that all queries so far gave them, and a recent window."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from hybrid_kv.config import Count
from hybrid_kv.methods.following import Moment, RecentShare, RecentShareParams
from hybrid_kv.methods.scores import group_sums
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, Needs


class HeavyParams(RecentShareParams):
    """prompt_scores: by all queries of the prompt ("exact", which costs its scores once more), or
    estimated ("sampled"); sampled_queries: from so many of them.
    """

    prompt_scores: Literal["exact", "sampled"] = "exact"
    sampled_queries: Count = 256

    def without_effect(self) -> dict[str, str]:
        exact = self.prompt_scores == "exact"
        return {"sampled_queries": "with prompt_scores 'exact'"} if exact else {}


def heavy_needs(params: HeavyParams) -> Needs:
    """What `Evidence.total_mass` takes."""
    exact = params.prompt_scores == "exact"
    return Needs(column_sums=True) if exact else Needs(params.sampled_queries)


@METHODS.register("h2o", paper="Zhang et al. 2023, arXiv:2306.14048, section 4")
class H2O(RecentShare):
    """Keeps the entries with the highest summed weights and a recent window; DROPS the rest.

    score[n] = sum of the softmax weights that all queries since n, of prompt and answer, gave it in
    a KV head's group. Whatever leaves the window competes by it with what is kept.

    Deviations: what has left competes a page at a time, so that up to a page more is held; tokens
    of the prompt are evicted at its end; "sampled" prompt scores are an estimate, from some
    queries; with page_size 1 the answer is evicted token by token as in the paper.
    """

    Params = HeavyParams

    @property
    def needs(self) -> Needs:
        return super().needs | heavy_needs(self.params)

    def prompt_scores(self, seen: Evidence, num_kv_heads: int, layer_idx: int) -> Tensor:
        return group_sums(seen.total_mass(), num_kv_heads)

    def moved(self, old: Tensor, mass: Tensor, moment: Moment) -> Tensor:
        return old + mass
