"""H2O: heavy hitters, by the weights that all queries so far gave them, and a recent window."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from hybrid_kv.config import Count, Tokens
from hybrid_kv.methods.evicting import EvictingParams
from hybrid_kv.methods.following import Following
from hybrid_kv.methods.scores import group_sums
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, Needs


@METHODS.register("h2o", paper="Zhang et al. 2023, arXiv:2306.14048")
class H2O(Following):
    """Keeps the entries with the highest summed weights and a recent window; DROPS the rest.

    score[n] = sum of the softmax weights that all queries since n, of prompt and answer, gave it
    in a KV head's group. Whatever leaves the window competes by it with what is kept. Deviations:
    what has left competes a page at a time, so that up to a page more is held; tokens of the
    prompt are evicted at its end; "sampled" prompt scores are an estimate, from some queries.
    """

    class Params(EvictingParams):
        """window_tokens: the paper's recent half; prompt_scores: by all queries of the prompt
        ("exact", which costs its scores once more), or estimated ("sampled"); sampled_queries: from
        so many of them.
        """

        window_tokens: Tokens = 512
        prompt_scores: Literal["exact", "sampled"] = "exact"
        sampled_queries: Count = 256

    @property
    def needs(self) -> Needs:
        exact = self.params.prompt_scores == "exact"
        mine = Needs(column_sums=True) if exact else Needs(self.params.sampled_queries)
        return super().needs | mine

    def prompt_scores(self, seen: Evidence, num_kv_heads: int) -> Tensor:
        return group_sums(seen.total_mass(), num_kv_heads)

    def moved(self, old: Tensor, mass: Tensor) -> Tensor:
        return old + mass

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        """Half of it is the window, as in the paper."""
        half = max(page_size, tokens // 2 // page_size * page_size)
        given = params.model_copy(update={"window_tokens": half})
        return super().at_budget(given, tokens, context_tokens=context_tokens, page_size=page_size)
