"""Scissorhands: what was important stays so; what seldom was is dropped."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv.config import Tokens
from hybrid_kv.methods.following import Moment, RecentShare, RecentShareParams
from hybrid_kv.methods.scores import group_sums
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, Needs

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
