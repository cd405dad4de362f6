"""Base classes of methods that keep entries up to a budget, and drop or offload the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator
from torch import Tensor

from hybrid_kv.config import BudgetField, Tokens
from hybrid_kv.errors import ConfigError
from hybrid_kv.methods.budget import split_budget
from hybrid_kv.methods.retrieval import ColdParams, RetrievalAttention, RetrievalParams
from hybrid_kv.plugins import Placement
from hybrid_kv.types import Demotion, Evidence, Foresight, LayerShape, Needs, Read, Tiers


class DemotingParams(RetrievalParams):
    """sink_tokens, window_tokens: kept in any case, multiples of page_size; demote: what is not
    kept is lost ("drop"), or goes to the cold tier, where the index finds it ("offload"); cold: how
    it is found, with demote "offload" alone.
    """

    demote: Literal["drop", "offload"] = "drop"

    @model_validator(mode="after")
    def _cold_is_used(self) -> Self:
        if self.demote == "drop" and self.cold != ColdParams():
            raise ValueError(
                "cold must be left out with demote 'drop', which keeps no cold tier, got settings "
                "for it; choose demote 'offload'"
            )
        if self.cold.select == "device":
            raise ValueError(
                "cold.select 'device' serves methods whose cold tier nobody has copies of, got one "
                "that keeps entries of its choice; leave it out"
            )
        return self


class Demoting(RetrievalAttention):
    """Keeps the entries it chooses on the device, and drops or offloads all others.

    whole: the parameter, and its value, with which everything is kept.

    Kept: sinks, window and entries of its choice on the device; the others in host memory, with
    demote "offload".
    Lost: with demote "drop" all others; with "offload" nothing, for the index finds some of them in
    every step.
    """

    Params = DemotingParams
    whole: ClassVar[tuple[str, object]]

    @property
    def _offloads(self) -> bool:
        return bool(self.params.demote == "offload")

    @property
    def needs(self) -> Needs:
        return super().needs if self._offloads else Needs()

    @property
    def foresight(self) -> Foresight | None:
        return super().foresight if self._offloads else None

    def index_bytes_per_token(self, shape: LayerShape, num_tokens: int) -> int:
        return super().index_bytes_per_token(shape, num_tokens) if self._offloads else 0

    def kept_tokens(self, num_tokens: int) -> int:
        """Of so many that leave sinks and window, those that a head keeps at most, on average."""
        return num_tokens

    def tiers(self, shape: LayerShape, num_tokens: int) -> Tiers:
        return Tiers(self.kept_tokens(num_tokens), num_tokens if self._offloads else 0)

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        if self._offloads:
            place = super().seal(layer_idx, evidence)
            return replace(place, rest=Demotion.ABSORB, offload=True, select="host")
        sizes = self.params.sink_tokens, self.params.window_tokens
        return Placement(*sizes, rest=Demotion.ABSORB)

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return super().read(layer_idx, q) if self._offloads else Read()

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        if params.demote == "offload":
            return super().full_budget(params)
        return params.model_copy(update=dict([cls.whole]))

    @classmethod
    def split(cls, params: Any, tokens: int, page_size: int) -> tuple[Any, int]:
        """For `at_budget`: parameters with sinks and window, and what to keep beside them.

        With demote "offload" half of that is found in the cold tier instead.
        """
        sinks, window, rest = split_budget(tokens, page_size, least=2)
        update: dict[str, Any] = {"sink_tokens": sinks, "window_tokens": window}
        if params.demote == "drop":
            return params.model_copy(update=update), rest
        cold = params.cold.model_copy(update={"top_k": rest // 2, "max_tokens": None})
        return params.model_copy(update={**update, "cold": cold}), rest - rest // 2


class EvictingParams(DemotingParams):
    """budget_tokens: what a head keeps on the device, sinks and window included, on average over
    heads and layers ("all": everything); sink_tokens, window_tokens: kept whatever they score,
    multiples of page_size.
    """

    sink_tokens: Tokens = 0
    window_tokens: Tokens = 32
    budget_tokens: BudgetField = 1024

    @model_validator(mode="after")
    def _budget_is_more(self) -> Self:
        always = self.sink_tokens + self.window_tokens
        if self.budget_tokens != "all" and self.budget_tokens <= always:
            raise ValueError(
                f"budget_tokens must be more than the {always} of sink_tokens and window_tokens "
                f"together, got {self.budget_tokens}; raise it or lower them"
            )
        return self


class Evicting(Demoting):
    """Keeps entries of its choice up to a budget, and drops or offloads all others."""

    Params = EvictingParams
    whole = ("budget_tokens", "all")

    def room(self, left: int) -> int:
        """Of `left` entries those that a head may keep beside sinks and window, on average."""
        params = self.params
        if params.budget_tokens == "all":
            return left
        room: int = params.budget_tokens - params.sink_tokens - params.window_tokens
        return min(left, room)

    def kept_tokens(self, num_tokens: int) -> int:
        return self.room(num_tokens)

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        """Sinks and window stay as they are, or are given up page by page where a budget is too
        small for them; with demote "offload" the rest is halved: what is kept and what is found.
        What is recent reaches half a page beyond the window on average.
        """
        newest, least = page_size // 2, 2 if params.demote == "offload" else 1
        sinks, window = params.sink_tokens, params.window_tokens
        while tokens - sinks - window - newest < least and sinks + window:
            window, sinks = max(0, window - page_size), sinks if window else 0
        rest = tokens - sinks - window - newest
        if rest < least:
            raise ConfigError(
                f"a budget must be at least {newest + least} tokens for the newest and {least} to "
                f"keep, with pages of {page_size}, got {tokens}; raise it or lower page_size"
            )
        found = rest // 2 if params.demote == "offload" else 0
        update: dict[str, Any] = {"sink_tokens": sinks, "window_tokens": window}
        update["budget_tokens"] = sinks + window + rest - found
        if found:
            cold = params.cold.model_copy(update={"top_k": found, "max_tokens": None})
            update["cold"] = cold
        return params.model_copy(update=update)
