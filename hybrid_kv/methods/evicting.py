"""What evicting methods share: their parameters, and what becomes of what they do not keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import model_validator
from torch import Tensor

from hybrid_kv.config import BudgetField, Tokens
from hybrid_kv.errors import ConfigError
from hybrid_kv.methods.retrieval import ColdParams, RetrievalAttention, RetrievalParams
from hybrid_kv.plugins import Placement
from hybrid_kv.types import Demotion, Evidence, LayerShape, Needs, Read


class EvictingParams(RetrievalParams):
    """budget_tokens: what a head keeps on the device, sinks and window included, on average over
    heads and layers ("all": everything); sink_tokens, window_tokens: kept whatever they score,
    multiples of page_size; demote: what is not kept is lost ("drop"), or goes to the cold tier,
    where the index finds it ("offload"); cold: how it is found, with demote "offload" alone.
    """

    sink_tokens: Tokens = 0
    window_tokens: Tokens = 32
    budget_tokens: BudgetField = 1024
    demote: Literal["drop", "offload"] = "drop"

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        always = self.sink_tokens + self.window_tokens
        if self.budget_tokens != "all" and self.budget_tokens <= always:
            raise ValueError(
                f"budget_tokens must be more than the {always} of sink_tokens and window_tokens "
                f"together, got {self.budget_tokens}; raise it or lower them"
            )
        if self.demote == "drop" and self.cold != ColdParams():
            raise ValueError(
                "cold must be left out with demote 'drop', which keeps no cold tier, got settings "
                "for it; choose demote 'offload'"
            )
        return self


class Evicting(RetrievalAttention):
    """Keeps the entries it chooses on the device, and drops or offloads all others."""

    Params = EvictingParams

    @property
    def _offloads(self) -> bool:
        return bool(self.params.demote == "offload")

    @property
    def needs(self) -> Needs:
        return super().needs if self._offloads else Needs()

    def index_bytes_per_token(self, shape: LayerShape, num_tokens: int) -> int:
        return super().index_bytes_per_token(shape, num_tokens) if self._offloads else 0

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        params = self.params
        if self._offloads:
            place = super().seal(layer_idx, evidence)
            return replace(place, rest=Demotion.ABSORB, offload=True)
        return Placement(params.sink_tokens, params.window_tokens, rest=Demotion.ABSORB)

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return super().read(layer_idx, q) if self._offloads else Read()

    def room(self, left: int) -> int:
        """Of `left` entries those that a head may keep beside sinks and window, on average."""
        params = self.params
        if params.budget_tokens == "all":
            return left
        room: int = params.budget_tokens - params.sink_tokens - params.window_tokens
        return min(left, room)

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        return params.model_copy(update={"budget_tokens": "all"})

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        """Sinks and window stay as they are; with demote "offload" the rest is halved: what is kept
        and what is found. What is recent reaches half a page beyond the window on average.
        """
        always = params.sink_tokens + params.window_tokens
        rest = tokens - always - page_size // 2
        found = rest // 2 if params.demote == "offload" else 0
        if rest - found < 1 or (params.demote == "offload" and found < 1):
            raise ConfigError(
                f"a budget must be more than {tokens - rest} tokens for sinks, window and some to "
                f"keep, with pages of {page_size}, got {tokens}; raise it or lower window_tokens"
            )
        update: dict[str, Any] = {"budget_tokens": always + rest - found}
        if found:
            cold = params.cold.model_copy(update={"top_k": found, "max_tokens": None})
            update["cold"] = cold
        return params.model_copy(update=update)
