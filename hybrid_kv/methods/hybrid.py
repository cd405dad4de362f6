"""The default: Quest over spare resident pages, retrieval over the cold tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from hybrid_kv.config import BudgetField, IndexConfig, Tokens
from hybrid_kv.methods.budget import ResidentParams
from hybrid_kv.methods.retrieval import RetrievalAttention, SearchParams
from hybrid_kv.plugins import METHODS, Placement
from hybrid_kv.types import Budget, Evidence, Read


class _AutoCold(SearchParams):
    owner = "hybrid"
    in_python = frozenset({"look_ahead", "look_ahead_factor"})

    top_k: BudgetField = 128  # what is lost follows the number of keys (docs/results.md)
    index: IndexConfig = Field(default="auto", validate_default=True)
    estimate: Literal["none", "gaussian", "first_order", "index"] = "gaussian"


@METHODS.register("hybrid", paper="this project; arXiv:2409.10516 with arXiv:2406.10774")
class Hybrid(RetrievalAttention):
    """Retrieval attention that fills spare device memory with pages and reads the best of them.

    Sinks and window are attended exactly, pages on the device by Quest's bound, cold entries by
    whichever index is best for head, machine and length, and what no search finds as the tail of
    Gaussians of keys and values, up to 64 for each KV head; the parts are merged by log-sum-exp.

    Kept: sinks, window and spare pages on the device, everything else in host memory.
    Lost: nothing; what a step does not find it knows by means and covariance.
    Deviations: the combination is of this project.
    """

    class Params(ResidentParams):
        """spare_tokens: resident beyond sinks and window; page_budget: best pages of them read."""

        in_python = frozenset({"page_budget"})

        cold: _AutoCold = Field(default_factory=_AutoCold)
        spare_tokens: Tokens = 0
        page_budget: BudgetField = 32

        def without_effect(self) -> dict[str, str]:
            why = "without spare_tokens, whose pages it chooses"
            return {} if self.spare_tokens else {"page_budget": why}

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        params = super().full_budget(params)
        if not params.spare_tokens:
            return params
        return params.model_copy(update={"page_budget": "all"})

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        placement = super().seal(layer_idx, evidence)
        spare = self.params.spare_tokens
        return replace(placement, spare_tokens=spare, digests=spare > 0)

    @cached_property
    def _read(self) -> Read:
        pages: Budget = self.params.page_budget if self.params.spare_tokens else "all"
        return Read(pages, self.params.cold.budget)
