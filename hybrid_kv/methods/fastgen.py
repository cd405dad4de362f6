"""FastGen: each head keeps by the cheapest of a few policies that recovers its attention."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv.config import BudgetField, Count, Tokens
from hybrid_kv.entries import Entries
from hybrid_kv.methods.evicting import Evicting, EvictingParams, best, group_sums, shared_out
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, Needs

SPECIAL, FREQUENT, LOCAL, BOTH, FULL = range(5)
"""Policies, each beside sinks and window: nothing, what was attended most, what is recent, both of
these, everything."""


@METHODS.register("fastgen", paper="Ge et al. 2023, arXiv:2310.01801, section 3")
class FastGen(Evicting):
    """Keeps in each head what the cheapest sufficient policy says, by its profile; DROPS the rest.

    Policies: special (sinks and window alone), special + frequent (the frequent_ratio of tokens
    attended most), special + local (the local_ratio of tokens before the window), all three, and
    full. When the prompt ends a head takes the one with the fewest entries that holds `recovery` of
    the attention its last observed_tokens queries gave.

    Kept: by KV head what its policy says; of the answer, in full heads everything, in local ones as
    many of the newest, in the others the window.
    Lost: with demote "drop" all others; with "offload" nothing.
    Deviations: a method sees no token ids, so that special tokens are the sinks, and punctuation
    has no policy; profiled are the last queries, not all, and all query heads of a group must
    recover; frequent tokens are those of the prompt, in the answer as well; the window is that of
    all heads; where policies need more than budget_tokens, each head keeps its best in proportion.
    """

    class Params(EvictingParams):
        """recovery: share of its attention that a head must keep (1: all heads keep everything);
        frequent_ratio, local_ratio: of the prompt's tokens; observed_tokens: last queries of the
        prompt that are profiled; budget_tokens: the most that heads keep on average ("all": no
        limit).
        """

        recovery: float = Field(default=0.95, gt=0, le=1)
        frequent_ratio: float = Field(default=0.3, gt=0, le=1)
        local_ratio: float = Field(default=0.3, gt=0, le=1)
        observed_tokens: Count = 64
        sink_tokens: Tokens = 16
        window_tokens: Tokens = 32
        budget_tokens: BudgetField = "all"

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(last_queries=self.params.observed_tokens)

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        if seen is None:
            return _moved_on((kept or _whole(left)).extended(left))
        count, room = left.lengths[0], self.room(left.lengths[0])
        if not count or (self.params.recovery == 1 and room == count):
            return _whole(left)
        first = self.params.sink_tokens
        mass = seen.mass(self.params.observed_tokens)
        by_kv_head = group_sums(mass, left.num_heads)[:, first : first + count]
        sets = self._sets(by_kv_head, seen.num_tokens)
        share = mass[:, first : first + count] / mass.sum(1, keepdim=True)
        grouped = share.unflatten(0, (left.num_heads, -1))
        outside = 1 - grouped.sum(-1)  # sinks and window
        held = (grouped[None] * sets[:, :, None]).sum(-1) + outside  # [policies, Hkv, G]
        enough = held.amin(-1) >= self.params.recovery
        enough[FULL] = True
        sizes = sets.sum(-1).masked_fill(~enough, count + 1)
        policy = sizes.argmin(0)
        chosen = sets[policy, torch.arange(left.num_heads, device=policy.device)]
        lengths = chosen.sum(1).tolist()
        if sum(lengths) > room * left.num_heads:
            total = room * left.num_heads
            lengths = shared_out(total, [n * total / sum(lengths) for n in lengths])
        ranked = by_kv_head.masked_fill(~chosen, -1.0)
        new = left.select([best(head, n) for head, n in zip(ranked, lengths, strict=True)])
        frequent = (policy == FREQUENT) | (policy == BOTH)
        often = sets[FREQUENT] & frequent[:, None]
        return _profiled(new, often, left.split("positions")[0][:1], policy)

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        full = super().full_budget(params)
        return full.model_copy(update={"recovery": 1.0}) if params.demote == "drop" else full

    def _sets(self, mass: Tensor, num_tokens: int) -> Tensor:
        """[policies, Hkv, N] bool: what each policy keeps of entries with masses [Hkv, N]."""
        heads, count = mass.shape
        sets = torch.zeros(5, heads, count, dtype=torch.bool, device=mass.device)
        frequent = best(mass, self._size(self.params.frequent_ratio, num_tokens))
        sets[FREQUENT].scatter_(1, frequent, value=True)
        sets[LOCAL, :, max(0, count - self._size(self.params.local_ratio, num_tokens)) :] = True
        sets[BOTH] = sets[FREQUENT] | sets[LOCAL]
        sets[FULL] = True
        return sets

    def _size(self, ratio: float, num_tokens: int) -> int:
        return max(1, round(ratio * num_tokens))


def _whole(left: Entries) -> Entries:
    """All of it, of heads that keep everything later, too."""
    full = torch.full((left.num_heads,), FULL)
    none = torch.zeros(left.num_heads, 0, dtype=torch.bool)
    return _profiled(left.copied(), none, full[:0], full)


def _profiled(new: Entries, frequent: Tensor, first: Tensor, policy: Tensor) -> Entries:
    """With a column `frequent`, of tokens [Hkv, N] from position `first` [1] on.

    In the state `others` [Hkv], on the host: how many of the rest a head keeps, -1 for all.
    """
    column = torch.zeros(len(new.positions), dtype=torch.uint8, device=new.k.device)
    others = []
    heads = zip(new.split(column), new.split("positions"), frequent, policy.tolist(), strict=True)
    for into, at, often, chosen in heads:
        if len(often):  # somebody looked
            into.copy_(often[at - first])
        local = chosen in (LOCAL, BOTH)
        others.append(-1 if chosen == FULL else int((into == 0).sum()) if local else 0)
    return new.with_columns(frequent=column).with_state(others=torch.tensor(others))


def _moved_on(both: Entries) -> Entries:
    """Less the oldest of what is not frequent, but for heads that keep everything."""
    counts, stays = both.state["others"].tolist(), []
    if all(others < 0 for others in counts):
        return both
    for often, others in zip(both.split("frequent"), counts, strict=True):
        behind = (often == 0).flip(0).cumsum(0).flip(0)  # how many from here on are not frequent
        stays.append((often == 1) | (behind <= others) if others >= 0 else often >= 0)
    return both.select(stays)
