"""Methods that read whole windows or choose as their neighbours do: everything, sinks and window
(StreamingLLM, LM-Infinite), the best pages (Quest), the choice of an earlier layer (TidalDecode).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor

from hybrid_kv.config import NO_END, BudgetField, LayerList, Tokens
from hybrid_kv.config import Params as BaseParams
from hybrid_kv.entries import Entries
from hybrid_kv.errors import ConfigError, IntegrityError
from hybrid_kv.index._base import KeyIndex, rank
from hybrid_kv.index.flat import FlatIndex
from hybrid_kv.methods.evicting import Demoting, DemotingParams
from hybrid_kv.methods.retrieval import ResidentParams, split_budget
from hybrid_kv.plugins import METHODS, Method, Placement
from hybrid_kv.rotary import UNKNOWN, Rotary
from hybrid_kv.types import (
    Demotion,
    Evidence,
    LayerShape,
    ModelInfo,
    Needs,
    Read,
    SearchResult,
    Tiers,
    TokenBudget,
)


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


# A few layers choose, the layers behind them read the same entries --------------------------------


class Choices:
    """Results of a step's searches in a layer, in their order: the same in every layer."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._next = 0

    def begin(self, *, anew: bool) -> None:
        """A step of a layer, which chooses (anew) or reads what was chosen, from the first on."""
        self._next = 0
        if anew:
            self._found.clear()

    def note(self, ids: Tensor) -> None:
        """Ids [Hkv, M, K] that a search has found."""
        self._found.append(ids)

    def take(self) -> Tensor:
        """The ids of the search that corresponds to this one."""
        if self._next == len(self._found):
            raise IntegrityError(
                f"search {self._next + 1} of a step must follow one of the layer that chooses, "
                f"which made {len(self._found)}; the layers do not hold the same tokens"
            )
        self._next += 1
        return self._found[self._next - 1]


class SelectingIndex(FlatIndex):
    """Scores every key and notes the best."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(FlatIndex.Params(precision="stored"))
        self._choices = choices

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        found = super()._find(queries, count, most)
        self._choices.note(found.ids[..., :count])
        return found


class ReusingIndex(KeyIndex):
    """Finds what another layer has chosen, by the true scores of its own keys."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(FlatIndex.Params())
        self._choices = choices

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        """Keys are looked up where they lie."""

    def _append(self, known: int) -> None:
        """As `_rebuild`."""

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        ids = self._choices.take()
        heads, found = torch.arange(len(ids))[:, None, None], ids >= 0
        keys = self._keys[heads, ids.clamp_min(0)].float()
        scores = torch.matmul(keys, queries[..., None])[..., 0].masked_fill(~found, -torch.inf)
        scores, ids = rank(scores, ids, min(most, ids.shape[-1]))
        scored = int(found.sum())
        return SearchResult(ids, scores, scored, read_bytes=self._key_bytes(scored))


@METHODS.register("tidal_decode", paper="Yang et al. 2024, arXiv:2410.05076")
class TidalDecode(Method):
    """Selection layers choose cold entries by exact scores, later layers read the same ones.

    By query head, the top_k highest q . k; selection layers and those before attend everything.
    Check it on your model: of the best 100 keys of a head of SmolLM2-135M (8K tokens) all heads of
    the layer before together had chosen half, at 24K 42%, so that reuse finds little there.

    Kept: sinks and window on the device, everything else in host memory.
    Lost: nothing; layers behind a selection layer do not see what it did not choose.
    Deviations: entries lie in the cold tier, where the paper keeps them on the device. Under a
    budget (hybrid-kv eval) it is another method: the first layer chooses as well, and layers that
    choose read only what they chose, where the paper's attend everything, which no small budget
    allows.
    """

    class Params(ResidentParams):
        """top_k: cold entries that a head reads; selection_layers: that choose them;
        selection_reads: these read "all", or what they "selected".
        """

        top_k: BudgetField = 256
        selection_layers: LayerList = (2, 13)
        selection_reads: Literal["all", "selected"] = "all"

    def open(self, info: ModelInfo) -> None:
        tiered, self._choices = [one.layer_idx for one in info.layers], Choices()
        later = [[idx for idx in tiered if idx >= one] for one in self.params.selection_layers]
        self._selecting = {idx[0] for idx in later if idx}

    def tiers(self, shape: LayerShape, num_tokens: int) -> Tiers:
        return Tiers(host_tokens=num_tokens)

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        kind = SelectingIndex if layer_idx in self._selecting else ReusingIndex
        make, params = partial(kind, self._choices), self.params
        return Placement(
            *(params.sink_tokens, params.window_tokens),
            rest=Demotion.OFFLOAD,
            index=make,
            in_step=True,
        )

    def read(self, layer_idx: int, q: Tensor) -> Read:
        top_k, selects = self.params.top_k, layer_idx in self._selecting
        if top_k == "all" or layer_idx < min(self._selecting, default=layer_idx + 1):
            return Read(cold="all")
        self._choices.begin(anew=selects)
        every = selects and self.params.selection_reads == "all"
        return Read(cold=TokenBudget(top_k, 2**40 if every else None))

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        return params.model_copy(update={"top_k": "all"})

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        sinks, window, top_k = split_budget(tokens, page_size)
        sizes = {"sink_tokens": sinks, "window_tokens": window, "top_k": top_k}
        layers = (0, *filter(None, params.selection_layers))
        return cls.Params(selection_layers=layers, selection_reads="selected", **sizes)
