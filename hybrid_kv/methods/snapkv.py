"""Methods that score a prompt's entries once, at its end, and keep the best.

SnapKV and its kin score by the last queries, by layer or head; KeyDiff by keys; ZipVL by attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from hybrid_kv.config import BudgetField, Count, Tokens
from hybrid_kv.config import Params as BaseParams
from hybrid_kv.entries import Entries
from hybrid_kv.errors import ConfigError
from hybrid_kv.methods.evicting import (
    Evicting,
    EvictingParams,
    Odd,
    Pooling,
    best,
    critical,
    group_sums,
    head_budgets,
    layer_budgets,
    pooled,
    shared_out,
    value_norms,
)
from hybrid_kv.methods.whole_heads import given_scores
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, ModelInfo, Needs


class SnapParams(EvictingParams):
    """observed_tokens: the prompt's last queries, which score; pool_tokens, pooling: each entry
    counts as the "max" or "mean" of so many neighbours, an odd number; value_weighting: CriticalKV,
    which fills a part of a budget by these scores, the rest by scores times the L1 norm of the
    "values", or of what they add to the output when "projected"; sure_ratio: that part, by the
    scores alone.
    """

    observed_tokens: Count = 32
    pooling: Pooling = "max"
    pool_tokens: Odd = 7
    value_weighting: Literal["none", "values", "projected"] = "none"
    sure_ratio: float = Field(default=0.5, ge=0, le=1)

    def without_effect(self) -> dict[str, str]:
        idle = {"pooling": "with pool_tokens 1"} if self.pool_tokens == 1 else {}
        if self.value_weighting == "none":
            idle["sure_ratio"] = "with value_weighting 'none'"
        return idle


@METHODS.register("snapkv", paper="Li et al. 2024, arXiv:2404.14469, section 4")
class SnapKV(Evicting):
    """Keeps what the prompt's last queries attend most, by KV head, and DROPS the rest of it.

    score[n] = max over pool_tokens neighbours of the mean weight that entry n got from the last
    observed_tokens queries, before the window; the best of a head stay, and everything later.

    Kept: of the prompt the best of each KV head; sinks, window and all of the answer.
    Lost: with demote "drop" the prompt's others; with "offload" nothing.
    Deviations: with grouped queries a group is averaged before pooling, as by Ada-KV's authors, so
    that a KV head has one set; sink_tokens is of this project, 0 by default.
    """

    Params = SnapParams

    @property
    def needs(self) -> Needs:
        params = self.params
        mine = Needs(last_queries=params.observed_tokens)
        return super().needs | mine | Needs(outputs=params.value_weighting == "projected")

    def open(self, info: ModelInfo) -> None:
        self._info = info
        for one in info.layers if self.params.value_weighting == "projected" else ():
            if info.output_of(one.layer_idx) is None:
                raise ConfigError(
                    "value_weighting 'projected' must know the output projection of layer "
                    f"{one.layer_idx} as a plain matrix, got none or a packed one; choose "
                    "'values', whose own norm counts"
                )

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        if seen is None:
            return (kept or Entries.empty(left)).extended(left)
        count = left.lengths[0]
        budget = self.budget(layer_idx, count)
        if budget >= count:
            return left.copied()
        params, first = self.params, self.params.sink_tokens
        mass = seen.mass(params.observed_tokens)
        queries = min(params.observed_tokens, seen.num_tokens) * len(mass) // left.num_heads
        means = group_sums(mass, left.num_heads)[:, : first + count] / queries
        scores = pooled(means, params.pool_tokens, params.pooling)[:, first:]
        budgets = self.shares(layer_idx, scores, budget)
        if params.value_weighting != "none":
            projected = params.value_weighting == "projected"
            output = self._info.output_of(layer_idx) if projected else None
            norms = value_norms(left, output)
            scores = critical(scores, norms, budgets, params.sure_ratio)
        ranked = best(scores, max(budgets))
        if len(set(budgets)) == 1:
            return left.select(ranked)
        return left.select([head[:own] for head, own in zip(ranked, budgets, strict=True)])

    def budget(self, layer_idx: int, count: int) -> int:
        """Of `count` entries those that a head of this layer keeps, on average."""
        return self.room(count)

    def shares(self, layer_idx: int, scores: Tensor, budget: int) -> Sequence[int]:
        """By KV head the entries that stay, of scores [Hkv, N] and `budget` < N on average."""
        return [budget] * len(scores)


class PyramidParams(SnapParams):
    """window_tokens, observed_tokens: the authors' last 8, which score and stay, in pages;
    beta: the last layer keeps one beta-th of an even share; the steeper the higher.
    """

    window_tokens: Tokens = 16
    observed_tokens: Count = 8
    beta: Count = 20


@METHODS.register("pyramidkv", paper="Cai et al. 2024, arXiv:2406.02069, section 4")
class PyramidKV(SnapKV):
    """SnapKV with budgets on a straight line over the layers, most in the first; DROPS the rest.

    Beside sinks and window the last layer keeps 1/beta of the mean, the first what makes the mean
    come out; where a prompt has not so much, the line is flatter.

    Deviations: the layers' budgets add up exactly, where the authors round the step between two
    layers down. Layers that are not ours to evict (with a sliding window of their own) do not
    count; the window is of whole pages.
    """

    Params = PyramidParams

    def open(self, info: ModelInfo) -> None:
        super().open(info)
        self._layers = [shape.layer_idx for shape in info.layers]

    def budget(self, layer_idx: int, count: int) -> int:
        even = self.room(count)
        if even == count:
            return count
        budgets = layer_budgets(even, len(self._layers), count, self.params.beta)
        return budgets[self._layers.index(layer_idx)]

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        """As `Evicting.at_budget`, with a window of the queries that score."""
        window = max(page_size, params.observed_tokens // page_size * page_size)
        given = params.model_copy(update={"window_tokens": window})
        return super().at_budget(given, tokens, context_tokens=context_tokens, page_size=page_size)


class Safeguarded(BaseParams):
    """safeguard: of an even share so much is certain for every head."""

    safeguard: float = Field(default=0.5, ge=0, le=1)


class Shared:
    """Mixed into SnapKV or what derives from it: heads get what the best scores of all ask for."""

    params: Any

    def shares(self, layer_idx: int, scores: Tensor, budget: int) -> Sequence[int]:
        """By KV head the entries that stay, Hkv * budget of scores [Hkv, N] together."""
        return head_budgets(scores, budget, self.params.safeguard)


@METHODS.register("ada_snapkv", paper="Feng et al. 2024, arXiv:2407.11550, sections 3.3 and 3.4")
class AdaSnapKV(Shared, SnapKV):
    """SnapKV where a layer's heads share their budgets by the scores; DROPS the rest.

    The best Hkv * B scores of all heads together say how many each head would keep, B_h; it keeps
    the best safeguard * B + (1 - safeguard) * B_h of its own. Held flat and ragged, never padded.

    Deviations: what heads keep adds up to Hkv * B; the authors' code rounds each by itself.
    """

    class Params(Safeguarded, SnapParams):
        """As snapkv, with safeguard."""


@METHODS.register("ada_pyramid", paper="Feng et al. 2024, arXiv:2407.11550, section 3.4")
class AdaPyramid(Shared, PyramidKV):
    """PyramidKV where a layer's heads share its budget by the scores; DROPS the rest.

    The pyramid says what a layer keeps, as in pyramidkv; its heads share that, as in ada_snapkv.

    Deviations: those of pyramidkv and ada_snapkv.
    """

    class Params(Safeguarded, PyramidParams):
        """As pyramidkv, with safeguard; window_tokens, observed_tokens: as of ada_snapkv."""

        window_tokens: Tokens = 32
        observed_tokens: Count = 32


class HeadKVParams(SnapParams):
    """heads: how much each matters, by layer and KV head, a JSON file of that, or "prompt";
    beta: one beta-th of an even share goes into the pool that they share by it.
    """

    heads: str | tuple[tuple[float, ...], ...] = "prompt"
    beta: float = Field(default=1.2, ge=1, allow_inf_nan=False)


@METHODS.register("headkv", paper="Fu et al. 2024, arXiv:2410.19258")
class HeadKV(SnapKV):
    """SnapKV with a budget for each head, by scores of the model's heads; DROPS the rest.

    Of an even share b every head keeps b - b / beta; the pool of b / beta from all heads of all
    layers is shared in the proportion of their scores.

    Deviations: the paper's scores come from retrieval and reasoning probes of query heads; here
    they are given for KV heads (hybrid-kv heads makes such a file), or, by "prompt", a head's is
    the sum of its SnapKV scores, and heads of a layer share their pool. A head keeps no more than
    there is; 1.2 is one of the values of beta that the authors try (1.005 to 10), who round b /
    beta down.
    """

    Params = HeadKVParams

    def open(self, info: ModelInfo) -> None:
        super().open(info)
        self._scores: dict[int, Tensor] | None = None
        if self.params.heads != "prompt":
            layers = [one.layer_idx for one in info.layers]
            given = given_scores(self.params.heads, info)
            self._scores = dict(zip(layers, given, strict=True))

    def shares(self, layer_idx: int, scores: Tensor, budget: int) -> Sequence[int]:
        known = self._scores or {layer_idx: scores.sum(1).cpu()}
        every = torch.cat(list(known.values())).double()
        pool = budget / self.params.beta
        parts = every / every.sum() if every.any() else torch.full_like(every, 1 / len(every))
        exact = (budget - pool + len(every) * pool * parts).tolist()
        budgets = torch.tensor(shared_out(len(every) * budget, exact))
        own = dict(zip(known, budgets.split([len(one) for one in known.values()]), strict=True))
        kept: list[int] = own[layer_idx].tolist()
        return kept


@METHODS.register("zipvl", paper="He et al. 2024, arXiv:2410.08584")
class ZipVL(Evicting):
    """Keeps as many tokens of a layer as hold most of its attention, and DROPS the rest.

    Tokens by the weights that the last observed_tokens queries of the prompt gave them in all heads
    together, best first, until sinks, window and these have mass_ratio of all: so each layer says
    how many it needs, the same tokens in all its heads.

    Kept: of the prompt the best tokens of each layer; sinks, window and all of the answer.
    Lost: with demote "drop" the prompt's others; with "offload" nothing.
    Deviations: the paper's probes are random queries as well as recent ones; it holds the others in
    2 bits and these in 4, and computes the prompt from them; here others are dropped or offloaded
    and the prompt is exact.
    """

    class Params(EvictingParams):
        """mass_ratio: of a layer's attention so much is kept (1: everything); observed_tokens: the
        last queries of the prompt; budget_tokens: the most a layer may keep ("all": no limit).
        """

        mass_ratio: float = Field(default=0.975, gt=0, le=1)
        observed_tokens: Count = 64
        budget_tokens: BudgetField = "all"

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(last_queries=self.params.observed_tokens)

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        if seen is None:
            return (kept or Entries.empty(left)).extended(left)
        first, count, room = self.params.sink_tokens, left.lengths[0], self.room(left.lengths[0])
        if not count or (self.params.mass_ratio == 1 and room == count):
            return left.copied()
        mass = seen.mass(self.params.observed_tokens).sum(0).double()
        scores = mass[first : first + count]
        missing = self.params.mass_ratio * mass.sum() - (mass.sum() - scores.sum())
        behind = scores.sort(descending=True).values.cumsum(0) - missing
        needed = int((behind < 0).sum()) + 1 if missing > 0 else 0
        some = best(scores, min(needed, room) if self.params.mass_ratio < 1 else room)
        return left.select(some.expand(left.num_heads, -1))

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        full = super().full_budget(params)
        return full.model_copy(update={"mass_ratio": 1.0}) if params.demote == "drop" else full


@METHODS.register("keydiff", paper="Park et al. 2025, arXiv:2504.15364, section 3")
class KeyDiff(Evicting):
    """Keeps the keys that are least like the mean of all, by KV head, and DROPS the rest.

    score[n] = -cos(k[n], mean over the prompt of k / |k|): no query is asked, no weight computed.
    The best of a head stay, and everything later.

    Kept: of the prompt the best of each KV head; sinks, window and all of the answer.
    Lost: with demote "drop" the prompt's others; with "offload" nothing.
    Deviations: the authors evict while they read, block by block; here the prompt is computed
    exactly and chosen from once. sink_tokens is of this project, 0 by default.
    """

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(last_queries=1)  # with which the prompt's keys are shown

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        if seen is None or seen.keys is None:
            return (kept or Entries.empty(left)).extended(left)
        if (room := self.room(left.lengths[0])) >= left.lengths[0]:
            return left.copied()
        anchor = F.normalize(seen.keys.float(), dim=-1).mean(1, keepdim=True)
        keys = torch.stack(left.split("k")).float()
        return left.select(best(-F.cosine_similarity(keys, anchor, dim=-1), room))
