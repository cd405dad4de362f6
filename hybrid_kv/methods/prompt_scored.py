"""KeyDiff and ZipVL: keep the entries that a prompt's keys or attention mark, scored once."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch.nn import functional as F

from hybrid_kv.config import BudgetField, Count
from hybrid_kv.entries import Entries
from hybrid_kv.methods.evicting import Evicting, EvictingParams
from hybrid_kv.methods.scores import best
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, Needs


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
