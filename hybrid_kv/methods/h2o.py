"""H2O, TOVA, A2SF and Scissorhands: keep entries by the attention that later queries gave them."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv.attended import Attended
from hybrid_kv.config import Count, Tokens
from hybrid_kv.methods.evicting import EvictingParams
from hybrid_kv.methods.following import Following, Moment, RecentShare, RecentShareParams
from hybrid_kv.methods.scores import group_sums, newest_of
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, Needs


class HeavyParams(RecentShareParams):
    """prompt_scores: by all queries of the prompt ("exact", which costs its scores once more), or
    estimated ("sampled"); sampled_queries: from so many of them.
    """

    prompt_scores: Literal["exact", "sampled"] = "exact"
    sampled_queries: Count = 256

    def without_effect(self) -> dict[str, str]:
        exact = self.prompt_scores == "exact"
        return {"sampled_queries": "with prompt_scores 'exact'"} if exact else {}


def heavy_needs(params: HeavyParams) -> Needs:
    """Needs of `Evidence.total_mass`."""
    exact = params.prompt_scores == "exact"
    return Needs(column_sums=True) if exact else Needs(params.sampled_queries)


@METHODS.register("h2o", paper="Zhang et al. 2023, arXiv:2306.14048, section 4")
class H2O(RecentShare):
    """Keeps the entries with the highest summed weights and a recent window; DROPS the rest.

    score[n] = sum of the softmax weights that all queries since n, of prompt and answer, gave it in
    a KV head's group. Whatever leaves the window competes by it with what is kept.

    Deviations: what has left competes a page at a time, so that up to a page more is held; tokens
    of the prompt are evicted at its end; "sampled" prompt scores are an estimate, from some
    queries; with page_size 1 the answer is evicted token by token as in the paper.
    """

    Params = HeavyParams

    @property
    def needs(self) -> Needs:
        return super().needs | heavy_needs(self.params)

    def prompt_scores(self, seen: Evidence, num_kv_heads: int, layer_idx: int) -> Tensor:
        return group_sums(seen.total_mass(), num_kv_heads)

    def moved(self, old: Tensor, mass: Tensor, moment: Moment) -> Tensor:
        return old + mass


@METHODS.register("tova", paper="Oren et al. 2024, arXiv:2401.06104")
class TOVA(Following):
    """Keeps what the newest query attends most, the same tokens in all heads; DROPS the rest.

    score[n] = sum over the heads of the softmax weights that the newest query alone gave entry n.

    Deviations: a page leaves at a time, judged by the query before it, so that up to a page more is
    held and the newest tokens stay till then; the prompt is cut at its end; with page_size 1 this
    is the paper's own loop.
    """

    class Params(EvictingParams):
        """window_tokens: kept whatever they score; the paper has none."""

        window_tokens: Tokens = 0

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(last_queries=1)

    def prompt_scores(self, seen: Evidence, num_kv_heads: int, layer_idx: int) -> Tensor:
        return group_sums(seen.mass(1), num_kv_heads)

    def watched(self, attended: Attended) -> Attended:
        return newest_of(attended)

    def moved(self, old: Tensor, mass: Tensor, moment: Moment) -> Tensor:
        return mass

    def ranked(self, scores: Tensor) -> Tensor:
        return scores.sum(0).expand(len(scores), -1)


_FORGOTTEN = 1e-7
"""A factor at which a query counts no more, in float32."""


@METHODS.register("a2sf", paper="Jo and Shin 2024, arXiv:2407.20485")
class A2SF(RecentShare):
    """Keeps what recent queries attended most, older ones counting less, and DROPS the rest.

    score[n] = sum over queries q of forgetting ** (now - q) times the softmax weight that q gave
    entry n in a KV head's group.

    Deviations: those of h2o; tokens that come together are of one age; queries of the prompt whose
    factor is below 1e-7 are not looked at; the default of forgetting is of this project, for the
    authors search a factor.
    """

    class Params(RecentShareParams):
        """forgetting: factor of an older query's weights, by token."""

        forgetting: float = Field(default=0.5, ge=0, le=0.99)

    @property
    def needs(self) -> Needs:
        factor = self.params.forgetting
        remembered = math.ceil(math.log(_FORGOTTEN) / math.log(factor)) if factor else 1
        return super().needs | Needs(last_queries=remembered)

    def prompt_scores(self, seen: Evidence, num_kv_heads: int, layer_idx: int) -> Tensor:
        factor, last = float(self.params.forgetting), seen.num_tokens - 1

        def faded(weights: Tensor, asked: Tensor) -> Tensor:
            return weights * torch.pow(factor, (last - asked).float())[:, None]

        return group_sums(seen.mass(each=faded), num_kv_heads)

    def moved(self, old: Tensor, mass: Tensor, moment: Moment) -> Tensor:
        factor = float(self.params.forgetting)
        return old * factor**moment.new + mass


_RECENT_TOKENS = 10
"""The paper's window, whatever the budget."""


@METHODS.register("scissorhands", paper="Liu et al. 2023, arXiv:2305.17118")
class Scissorhands(RecentShare):
    """Keeps what was seldom unimportant in the recent past, and DROPS the rest.

    An entry counts a step in which its weight was below the mean, 1 / t of t tokens; those with the
    lowest counts over the last history_tokens queries stay.

    Deviations: the recent window is of whole pages, where the paper keeps the last 10 tokens;
    counts are kept in halves, so the past is between a half and all of history_tokens; weights of a
    group of query heads are averaged; a page competes at a time, where the paper halves a full
    cache at once; tokens that come together count as their mean.
    """

    class Params(RecentShareParams):
        """window_tokens: the paper's 10, in pages; history_tokens: queries whose weights are
        counted.
        """

        window_tokens: Tokens = 16
        history_tokens: int = Field(default=400, ge=2)

    parts = (2,)

    @classmethod
    def recent_tokens(cls, budget: int) -> float:
        return _RECENT_TOKENS

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(last_queries=self.params.history_tokens)

    def prompt_scores(self, seen: Evidence, num_kv_heads: int, layer_idx: int) -> Tensor:
        half, end = self.params.history_tokens // 2, seen.num_tokens

        def counts(part: int) -> Tensor:
            """[Hkv, N] counts of the half of the past that is the present one, or the last."""

            def unimportant(weights: Tensor, asked: Tensor) -> Tensor:
                keys = torch.arange(end, device=weights.device)
                inside = (asked + 1).div(half, rounding_mode="floor") == end // half - part
                counted = weights.mean(1, keepdim=True) < 1 / (asked[:, None] + 1)
                counted &= inside[:, None] & (keys <= asked[:, None])
                return counted.expand_as(weights)

            by_head = seen.mass(each=unimportant)  # alike in a group, and whole numbers
            return group_sums(by_head, num_kv_heads) * num_kv_heads / len(by_head)

        return torch.stack([counts(0), counts(1)], -1)

    def moved(self, old: Tensor, mass: Tensor, moment: Moment) -> Tensor:
        half, new = self.params.history_tokens // 2, moment.new
        mean = mass / (moment.group * new)
        counts = torch.where(mean < 1 / moment.end, float(new), 0.0)
        if moment.end // half != (moment.end - new) // half:
            old = torch.stack([torch.zeros_like(counts), old[..., 0]], -1)
        return torch.stack([old[..., 0] + counts, old[..., 1]], -1)

    def ranked(self, scores: Tensor) -> Tensor:
        return -scores.sum(-1)
