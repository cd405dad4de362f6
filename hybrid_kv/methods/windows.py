"""Methods without a cold tier: everything, sinks and window (StreamingLLM, LM-Infinite), Quest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from hybrid_kv.config import BudgetField, Tokens
from hybrid_kv.config import Params as BaseParams
from hybrid_kv.entries import Entries
from hybrid_kv.errors import ConfigError
from hybrid_kv.methods.evicting import Demoting, DemotingParams
from hybrid_kv.methods.retrieval import NO_END, split_budget
from hybrid_kv.plugins import METHODS, Method, Placement
from hybrid_kv.rotary import UNKNOWN, Rotary
from hybrid_kv.types import Demotion, Evidence, LayerShape, ModelInfo, Needs, Read, Tiers


@METHODS.register("streaming_llm", paper="Xiao et al. 2023, arXiv:2309.17453, section 3.2")
class StreamingLLM(Method):
    """Keeps sinks and a recent window and DROPS all other entries.

    A query attends the first sink_tokens and the newest window_tokens, and nothing else.

    Kept: sinks and window.
    Lost: everything between them.
    Deviations: the window leaves by pages; keys keep the rotary positions they were written with,
    where the paper re-numbers them inside the cache, which matters beyond the trained context only.
    """

    class Params(BaseParams):
        """sink_tokens, window_tokens: kept from start and end; multiples of page_size."""

        sink_tokens: Tokens = 16
        window_tokens: Tokens = 1024

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        return params.model_copy(update={"window_tokens": NO_END})

    def tiers(self, shape: LayerShape, num_tokens: int) -> Tiers:
        return Tiers()

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        return Placement(
            sink_tokens=self.params.sink_tokens,
            window_tokens=self.params.window_tokens,
            rest=Demotion.DROP,
        )

    reads_alike = True

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return Read()

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        sinks, window, rest = split_budget(tokens, page_size, least=0)
        window += round(rest / page_size) * page_size
        return params.model_copy(update={"sink_tokens": sinks, "window_tokens": window})


_EVERYTHING = Read()


@METHODS.register("full", paper="Vaswani et al. 2017, arXiv:1706.03762, section 3.2")
class Full(Method):
    """Everything stays resident and every entry is attended: exact.

    out = softmax(q K^T * scale) V over all entries that a query may see.

    Kept: everything, on the device.
    Lost: nothing.
    Deviations: none.
    """

    class Params(BaseParams):
        """No parameters."""

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        return Placement()

    reads_alike = True

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return _EVERYTHING

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        return params


@dataclass(frozen=True, eq=False, kw_only=True)
class NearEntries(Entries):
    """First tokens, whose keys stand at most `limit` positions before whoever asks."""

    rotary: Rotary = UNKNOWN
    limit: int = NO_END

    def seen_from(self, position: int) -> Self:
        by = (position - self.limit - self.positions).clamp(min=0)
        return replace(self, columns={**self.columns, "k": self.rotary.turn(self.k, by)})


@METHODS.register("lm_infinite", paper="Han et al. 2023, arXiv:2308.16137")
class LMInfinite(Demoting):
    """Keeps first tokens and a recent window, no farther than the window is long; DROPS the rest.

    A query at t attends the first tokens s as if t - s were min(t - s, window_tokens), by turning
    their keys; the window as it is.

    Kept: first tokens and window.
    Lost: with demote "drop" everything between; with "offload" nothing.
    Deviations: the prompt is read exactly; the window leaves by pages, so up to a page more is seen
    at its true distance; tokens that come together are limited as the first of them; with demote
    "offload" what is found keeps its true distance; a model whose RoPE cannot be asked for is
    refused.
    """

    class Params(DemotingParams):
        """sink_tokens: the first tokens; window_tokens: the recent ones, and the largest distance;
        limit_distance: off for keys that keep their positions, as in streaming_llm.
        """

        sink_tokens: Tokens = 16
        window_tokens: Tokens = 1024
        limit_distance: bool = True

    whole = ("window_tokens", NO_END)

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(rotary=self.params.limit_distance)

    def open(self, info: ModelInfo) -> None:
        self._rotary = {one.layer_idx: info.rotary_of(one.layer_idx) for one in info.layers}
        for layer_idx, rotary in self._rotary.items() if self.params.limit_distance else ():
            if not rotary.frequencies and not rotary.still:
                raise ConfigError(
                    f"limit_distance must know how layer {layer_idx} turns keys by position, got "
                    f"none: {rotary.reason}; set limit_distance to false"
                )

    def kept_tokens(self, num_tokens: int) -> int:
        return 0

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        return replace(super().seal(layer_idx, evidence), sink_tokens=0)

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        missing = self.params.sink_tokens - (0 if kept is None else kept.lengths[0])
        first = torch.arange(min(missing, left.lengths[0]), device=left.k.device)
        new = left.select(first.expand(left.num_heads, -1))
        if kept is not None:
            return kept.extended(new)
        rotary = self._rotary[layer_idx] if self.params.limit_distance else UNKNOWN
        turned = NearEntries(columns=new.columns, starts=new.starts, lengths=new.lengths)
        return replace(turned, rotary=rotary, limit=self.params.window_tokens).copied()

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        return super().full_budget(params).model_copy(update={"limit_distance": False})

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        if params.demote == "offload":
            given, kept = cls.split(params, tokens, page_size)
            more = round(kept / page_size) * page_size
            return given.model_copy(update={"window_tokens": given.window_tokens + more})
        sinks, window, rest = split_budget(tokens, page_size, least=0)
        window += round(rest / page_size) * page_size
        return params.model_copy(update={"sink_tokens": sinks, "window_tokens": window})


@METHODS.register("quest", paper="Tang et al. 2024, arXiv:2406.10774, section 3")
class Quest(Method):
    """Keeps everything resident and reads the pages with the highest upper bound on the score.

    bound[page] = sum over channels i of max(q[i] min[page, i], q[i] max[page, i]), the most that
    any key of the page can score; the page_budget pages of the highest bounds are read. As in the
    paper the first two layers are dense and the newest page is always read.

    Kept: everything on the device, and the smallest and largest number of each page's channels.
    Lost: nothing; a step does not see the pages that it does not read.
    Deviations: pages are chosen per KV head, by the largest bound in its group of query heads (the
    paper's models have one query head per KV head); sinks and window are on top of page_budget.
    """

    class Params(BaseParams):
        """page_budget: pages read beside sinks and window; dense_layers: layers read whole;
        sink_tokens, window_tokens: read by every step, multiples of page_size.
        """

        page_budget: BudgetField = 128
        dense_layers: Tokens = 2
        sink_tokens: Tokens = 0
        window_tokens: Tokens = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._dense, self._chosen = Read(), Read(params.page_budget)

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        return params.model_copy(update={"page_budget": "all"})

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        return Placement(
            sink_tokens=self.params.sink_tokens,
            window_tokens=self.params.window_tokens,
            digests=layer_idx >= self.params.dense_layers,
        )

    reads_alike = True

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return self._dense if layer_idx < self.params.dense_layers else self._chosen

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        """No layer is dense: two of them would take a multiple of a small budget."""
        sinks, window, rest = split_budget(tokens, page_size, least=page_size)
        split = {
            "sink_tokens": sinks,
            "window_tokens": window,
            "page_budget": round(rest / page_size),
        }
        return params.model_copy(update={**split, "dense_layers": 0})
