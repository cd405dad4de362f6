"""What methods share that keep entries up to a budget."""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from hybrid_kv.config import BudgetField, Tokens
from hybrid_kv.errors import ConfigError
from hybrid_kv.methods.demoting import Demoting, DemotingParams


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
