"""The default: Quest over spare and hot resident pages, retrieval over the cold tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hybrid_kv.config import BudgetField, IndexConfig, Tokens
from hybrid_kv.methods.retrieval import ColdParams, RetrievalAttention, RetrievalParams
from hybrid_kv.plugins import METHODS, Placement
from hybrid_kv.types import Evidence, Read


class _AutoCold(ColdParams):
    index: IndexConfig = Field(default="auto", validate_default=True)
    estimate: Literal["none", "gaussian", "first_order", "index"] = "gaussian"


@METHODS.register("hybrid", paper="this project; arXiv:2409.10516 with arXiv:2406.10774")
class Hybrid(RetrievalAttention):
    """Retrieval attention that fills spare device memory with pages and reads the best of them.

    Sinks and window are attended exactly, pages on the device by Quest's bound, cold entries by
    whichever index is best for head, machine and length, and what no search finds as the tail of
    one Gaussian of keys and values for each KV head; the parts are merged by log-sum-exp.

    Kept: sinks, window and spare pages on the device, everything else in host memory.
    Lost: nothing; what a step does not find it knows by mean and covariance.
    Deviations: the combination is of this project.
    """

    class Params(RetrievalParams):
        """spare_tokens: resident beyond sinks and window; hot_tokens: device room for copies of the
        cold pages that are found most; page_budget: pages of those two read per step.
        """

        cold: _AutoCold = _AutoCold()
        spare_tokens: Tokens = 0
        hot_tokens: Tokens = 0
        page_budget: BudgetField = 32

        def without_effect(self) -> dict[str, str]:
            why = "without spare_tokens or hot_tokens, whose pages it chooses"
            return {} if self.spare_tokens or self.hot_tokens else {"page_budget": why}

        @model_validator(mode="after")
        def _hot_pages_are_found_by_the_host(self) -> Self:
            if self.cold.select == "device" and self.hot_tokens:
                raise ValueError(
                    "hot_tokens are pages that searches of the host find, got "
                    f"{self.hot_tokens} beside cold.select 'device'; give spare_tokens instead"
                )
            return self

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        params = super().full_budget(params)
        some = params.spare_tokens or params.hot_tokens
        return params.model_copy(update={"page_budget": "all"}) if some else params

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        placement = super().seal(layer_idx, evidence)
        spare, hot = self.params.spare_tokens, self.params.hot_tokens
        select = "host" if hot else placement.select
        tokens = {"spare_tokens": spare, "hot_tokens": hot}
        return replace(placement, **tokens, digests=spare + hot > 0, select=select)

    @cached_property
    def _read(self) -> Read:
        some = self.params.spare_tokens + self.params.hot_tokens > 0
        return Read(self.params.page_budget if some else "all", self.params.cold.budget)
