"""Retrieval from the cold tier, by an index; `hybrid`, the default, adds spare resident pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator
from torch import Tensor

from hybrid_kv.config import BudgetField, Count, IndexConfig, Params, Tokens
from hybrid_kv.errors import ConfigError
from hybrid_kv.plugins import METHODS, Index, Method, Placement, Select
from hybrid_kv.types import (
    Budget,
    Demotion,
    Evidence,
    Foresight,
    LayerShape,
    Needs,
    Read,
    Tiers,
    TokenBudget,
)

_WINDOW_SHARE = 4
"""Of a budget a fourth is the recent window."""


class ResidentParams(Params):
    """sink_tokens, window_tokens: on the device, at start and end (multiples of page_size)."""

    sink_tokens: Tokens = 128
    window_tokens: Tokens = 512


class Split(NamedTuple):
    """Parts of a budget, in tokens; sinks and window are multiples of the page size."""

    sink_tokens: int
    window_tokens: int
    rest: int


def split_budget(tokens: int, page_size: int, *, least: int = 1) -> Split:
    """A page of sinks, a window of a fourth of the budget, at least a page, and the rest.

    What is recent reaches half a page beyond the window on average, because it leaves page by page.
    Where a budget is too small for that, the window is given up, and then the sinks.

    Args:
        least: the rest must be so many.

    Raises:
        ConfigError: it is not.
    """
    newest = page_size // 2
    window = max(page_size, tokens // _WINDOW_SHARE // page_size * page_size)
    for split in ((page_size, window), (page_size, 0), (0, 0)):
        if (rest := tokens - sum(split) - newest) >= least:
            return Split(*split, rest)
    raise ConfigError(
        f"a budget must be at least {newest + least} tokens for the newest and {least} to choose, "
        f"with pages of {page_size}, got {tokens}; raise it or lower page_size"
    )


class SearchParams(Params):
    """top_k: cold entries attended per query head and step; index: how they are found; look_ahead:
    a layer's search begins while the layer before it computes, by a predicted query, "always",
    "never", or where a search then has time of its own (a model on a GPU) and a trial loses little
    ("auto"); look_ahead_factor: it finds up to so many times the entries, which the true query
    ranks; select: cold entries are found by the "host", or by the "device", which holds codes of
    all cold keys and attends what it finds ("auto": the device on a GPU where they fit, with an
    index of kind sketch or auto); estimate: what was not found is left out ("none"), or attended as
    an estimate: keys and values of a KV head as one "gaussian", below the lowest logit that was
    found, for an index that ranks (flat, sketch, graph, auto, hnsw, query_lists or query_channels);
    by their mean and to "first_order", for any index; or as the "index" knows them (of kind
    clusters or query_channels).
    """

    top_k: BudgetField = 100
    index: IndexConfig = Field(default="graph", validate_default=True)
    look_ahead: Literal["auto", "always", "never"] = "auto"
    look_ahead_factor: Count = 4
    select: Select = "auto"
    estimate: Literal["none", "gaussian", "first_order", "index"] = "none"

    @model_validator(mode="after")
    def _device_can_select(self) -> Self:
        if self.select == "device" and (reason := self.why_host) is not None:
            raise ValueError(f"select 'device' {reason}; or leave select out")
        return self

    @property
    def why_host(self) -> str | None:
        """Reason why the device cannot find cold entries with these settings; None if it can."""
        if self.index.kind not in ("sketch", "auto"):
            return (
                f"takes an index of kind sketch or auto, got {self.index.kind}; choose one of these"
            )
        if self.budget != "all" and (self.budget.weighs or self.budget.most > self.budget.top_k):
            return (
                "attends top_k entries of each query head, got max_tokens, min_share or shared, "
                "which the host decides; leave these out"
            )
        return None

    def without_effect(self) -> dict[str, str]:
        idle: dict[str, str] = {}
        if self.look_ahead == "never":
            idle["look_ahead_factor"] = "with look_ahead 'never'"
        if self.select == "device":
            names = ("look_ahead", "look_ahead_factor")
            idle |= dict.fromkeys(names, "with select 'device', which searches and attends itself")
        return idle

    @model_validator(mode="after")
    def _estimate_fits_the_index(self) -> Self:
        if self.estimate == "index" and self.index.plugin.factory.estimate is Index.estimate:
            raise ValueError(
                "estimate 'index' takes an index of kind 'clusters' or 'query_channels', got kind "
                f"{self.index.kind}; choose one of these, or 'first_order'"
            )
        if self.estimate == "gaussian" and not self.index.ranks:
            if "estimate" not in self.model_fields_set:  # a default, of a method whose index ranks
                self.__dict__["estimate"] = "first_order"
                return self
            raise ValueError(
                f"estimate 'gaussian' takes an index that ranks, got kind {self.index.kind}, which "
                "takes some whole or misses many; choose 'first_order', which takes any, or 'none'"
            )
        return self

    @property
    def budget(self) -> TokenBudget | Literal["all"]:
        """Budget of a query head in the host tier."""
        if self.top_k == "all":
            return "all"
        return TokenBudget(self.top_k, estimate=None if self.estimate == "none" else self.estimate)

    @property
    def foresight(self) -> Foresight | None:
        """Look-ahead of layers: when, and how many times wider than the budget; None for never."""
        if self.look_ahead == "never":
            return None
        return Foresight(self.look_ahead, self.look_ahead_factor)


class ColdParams(SearchParams):
    """shared: top_k on average, for the heads of a layer share their budgets by the weight of what
    they found; max_tokens: by one head at most, of what the search ranked (null: top_k, or four
    times as many where heads share); min_share: only entries with at least this share of the
    softmax, which may widen the search up to max_tokens (null: no limit).
    """

    max_tokens: Count | None = None
    min_share: float | None = Field(default=None, ge=0, lt=1, allow_inf_nan=False)
    shared: bool = False

    @model_validator(mode="after")
    def _budget_is_possible(self) -> Self:
        for name in ("max_tokens", "min_share"):
            if self.top_k == "all" and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} limits a search, and top_k 'all' attends everything without one, got "
                    f"{getattr(self, name)}; give top_k a number or leave {name} out"
                )
        _ = self.budget
        return self

    @property
    def budget(self) -> TokenBudget | Literal["all"]:
        """See `SearchParams`."""
        if (plain := super().budget) == "all":
            return "all"
        return replace(
            plain, max_tokens=self.max_tokens, min_share=self.min_share, shared=self.shared
        )


class RetrievalParams(ResidentParams):
    """cold: everything but sinks and window."""

    cold: ColdParams = Field(default_factory=ColdParams)


@METHODS.register("retrieval_attention", paper="Liu et al. 2024, arXiv:2409.10516, section 3")
class RetrievalAttention(Method):
    """Keeps sinks and window resident, offloads the rest and attends its top-k per query head.

    Cold keys are linked by the prompt's own queries, each with its best keys (the attention-aware
    graph); a search walks along the links, and what it finds is attended with its true score.

    Kept: sinks and window on the device, everything else in host memory.
    Lost: nothing; a step does not see what its search does not find.
    Deviations: heads that the graph does not suit, and contexts that are too short for it, are
    scanned in 8 bits; sizes of sinks and window are parameters (the paper: 128 and 512).
    """

    Params = RetrievalParams

    @property
    def needs(self) -> Needs:
        return self._learns

    @property
    def _learns(self) -> Needs:
        return self.params.cold.index.needs  # type: ignore[no-any-return]

    @property
    def foresight(self) -> Foresight | None:
        return self.params.cold.foresight  # type: ignore[no-any-return]

    def index_bytes_per_token(self, shape: LayerShape, num_tokens: int) -> int:
        index = self.params.cold.index
        per_key = index.plugin.factory.bytes_per_key(index.params, num_tokens, shape.head_dim)
        return shape.num_kv_heads * int(per_key)

    def tiers(self, shape: LayerShape, num_tokens: int) -> Tiers:
        return Tiers(host_tokens=num_tokens)

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        return Placement(
            sink_tokens=self.params.sink_tokens,
            window_tokens=self.params.window_tokens,
            rest=Demotion.OFFLOAD,
            index=self.params.cold.index.build,
            learns=self._learns,
            select="host" if self.params.cold.why_host else self.params.cold.select,
            moments=self.params.cold.estimate in ("gaussian", "first_order"),
        )

    @cached_property
    def _read(self) -> Read:
        return Read(cold=self.params.cold.budget)

    reads_alike = True

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return self._read

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        fields = type(params.cold).model_fields
        limits = {
            name: fields[name].default for name in ("max_tokens", "min_share") if name in fields
        }
        cold = params.cold.model_copy(update={"top_k": "all", **limits})
        return params.model_copy(update={"cold": cold})

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        sinks, window, top_k = split_budget(tokens, page_size)
        limits = {"max_tokens": None} if "max_tokens" in type(params.cold).model_fields else {}
        cold = params.cold.model_copy(update={"top_k": top_k, **limits})
        split = {"sink_tokens": sinks, "window_tokens": window, "cold": cold}
        return params.model_copy(update=split)


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
