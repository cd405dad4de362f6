"""Methods whose heads keep different entries: DuoAttention, RazorAttention and FastGen.

In the first two some heads keep all entries, the others sinks and window; the heads are chosen by
given scores or masks, or by a prompt. In FastGen each head keeps by the cheapest of a few policies
that recovers its attention.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv.config import BudgetField, Count, Tokens
from hybrid_kv.entries import Entries
from hybrid_kv.errors import ConfigError
from hybrid_kv.methods.evicting import (
    Demoting,
    DemotingParams,
    Evicting,
    EvictingParams,
    best,
    group_sums,
    shared_out,
)
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, ModelInfo, Needs

Given: TypeAlias = str | Sequence[Sequence[float]]


class HeadChoice:
    """Heads that keep everything: a share of all, by the highest scores.

    Args:
        given: scores, or masks of 0 and 1, for each tiered layer in order; the path of a JSON file
            with those, alone or under "heads"; or "prompt" to observe them.
        ratio: of all heads; None for what masks say, or `usual` by scores.

    Raises:
        ConfigError: there is no such file, or these are no scores of this model's heads.
    """

    def __init__(
        self, given: Given, ratio: float | None, info: ModelInfo, usual: float = 0.5
    ) -> None:
        self._layers = [shape.layer_idx for shape in info.layers]
        self._ratio = usual if ratio is None else ratio
        self._masks: list[Tensor] | None = None
        if given != "prompt":
            scores = given_scores(given, info)
            flat = torch.cat(scores)
            are_masks = ratio is None and bool(((flat == 0) | (flat == 1)).all())
            chosen = flat == 1 if are_masks else best_heads(flat, round(self._ratio * len(flat)))
            self._masks = list(chosen.split([len(layer) for layer in scores]))

    def judge(
        self, layer_idx: int, left: Entries, seen: Evidence | None, first: int
    ) -> dict[str, Tensor]:
        """On the host: `retrieves` [Hkv] bool, with `scores` [Hkv] where they were observed.

        Args:
            left: what first leaves the window, from position `first` on; where nobody saw it leave,
                all heads retrieve.
        """
        layer, heads = self._layers.index(layer_idx), left.num_heads
        if self._masks is not None:
            return {"retrieves": self._masks[layer]}
        if seen is None or not left.lengths[0]:
            return {"retrieves": torch.ones(heads, dtype=torch.bool)}
        scores = observed(seen, heads, first, first + left.lengths[0]).cpu()
        each = heads * self._ratio  # rounded so that all layers together have the ratio
        count = round(each * (layer + 1)) - round(each * layer)
        return {"retrieves": best_heads(scores, count), "scores": scores}


def given_scores(given: Given, info: ModelInfo) -> list[Tensor]:
    """[Hkv] by tiered layer, of a list or of the path of a JSON file.

    Raises:
        ConfigError: there is no such file, or these are no scores of this model's heads.
    """
    rows, name = _read(given) if isinstance(given, str) else (given, "heads")
    return _checked(rows, [shape.num_kv_heads for shape in info.layers], name)


def best_heads(scores: Tensor, count: int) -> Tensor:
    """[N] bool: the `count` highest of scores [N], of equals the first."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return torch.zeros(len(scores), dtype=torch.bool).index_fill_(0, order[:count], 1)


def observed(seen: Evidence, num_kv_heads: int, first: int, stop: int) -> Tensor:
    """[Hkv]: of their attention, what the prompt's last queries gave to tokens first..stop - 1.

    Of a group of query heads the one that gave most counts.
    """
    mass = seen.mass()
    share = mass[:, first:stop].sum(1) / mass.sum(1)
    return torch.amax(share.view(num_kv_heads, -1), 1)


def _read(path: str) -> tuple[object, str]:
    name = f"heads '{path}'"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{name} must be a JSON file of scores by layer, got none: {reason}; make one with "
            "hybrid-kv heads MODEL --text FILE, or say 'prompt'"
        ) from None
    return (data["heads"] if isinstance(data, Mapping) and "heads" in data else data), name


def _checked(rows: object, counts: Sequence[int], name: str) -> list[Tensor]:
    """Scores [Hkv] by layer; raises ConfigError unless there are as many as the model has heads."""
    if not isinstance(rows, list | tuple) or len(rows) != len(counts):
        got = f"{len(rows)}" if isinstance(rows, list | tuple) else type(rows).__name__
        raise ConfigError(
            f"{name} must have a list for each of the model's {len(counts)} layers, got {got}; "
            "make them with hybrid-kv heads MODEL --text FILE"
        )
    for layer, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if not isinstance(row, list | tuple) or len(row) != count:
            got = f"{len(row)}" if isinstance(row, list | tuple) else repr(row)
            raise ConfigError(
                f"{name} must have {count} numbers in list {layer}, one for each KV head, got {got}"
            )
        if not all(isinstance(score, int | float) and 0 <= score <= 1 for score in row):
            raise ConfigError(
                f"{name} must hold numbers between 0 and 1, got {list(row)} in list {layer}; masks "
                "are 0 and 1"
            )
    return [torch.tensor([float(score) for score in row]) for row in rows]


class DuoParams(DemotingParams):
    """heads: scores or masks by layer and KV head, a JSON file of them, or "prompt";
    observed_tokens: its queries that score then; retrieval_ratio: heads kept whole (null: half).
    """

    sink_tokens: Tokens = 64
    window_tokens: Tokens = 256
    heads: str | tuple[tuple[float, ...], ...] = "prompt"
    observed_tokens: Count = 64
    retrieval_ratio: Annotated[float, Field(ge=0, le=1)] | None = None

    def without_effect(self) -> dict[str, str]:
        given = self.heads != "prompt"
        return {"observed_tokens": "with heads that are given"} if given else {}


@METHODS.register("duo_attention", paper="Xiao et al. 2024, arXiv:2410.10819, section 2")
class DuoAttention(Demoting):
    """Keeps everything of retrieval heads, of all others sinks and window; DROPS their rest.

    score[h] = share of its attention that head h gives to what lies between sinks and window, in
    the last observed_tokens queries; the best retrieval_ratio of heads retrieve. Given scores
    compete over all layers, those of a prompt within a layer.

    Kept: everything of the retrieval heads; of the others sinks and window.
    Lost: with demote "drop" what streaming heads had between these; with "offload" nothing.
    Deviations: the paper trains a gate for each head on synthetic passkeys; here attention is
    looked at, at the end of a calibration text (hybrid-kv heads) or of the prompt; a prompt that
    fits in the window keeps all heads whole; sinks and window are those of all heads.
    """

    Params = DuoParams
    whole = ("retrieval_ratio", 1.0)
    usual_ratio = 0.5

    @property
    def needs(self) -> Needs:
        asked = self.params.observed_tokens if self.params.heads == "prompt" else 0
        return super().needs | Needs(last_queries=asked)

    def kept_tokens(self, num_tokens: int) -> int:
        params = self.params
        if params.retrieval_ratio is None and params.heads != "prompt":
            return num_tokens  # masks say how many heads, once they are read
        ratio = self.usual_ratio if params.retrieval_ratio is None else params.retrieval_ratio
        return math.ceil(ratio * num_tokens)

    def open(self, info: ModelInfo) -> None:
        ratio = self.params.retrieval_ratio
        self._heads = HeadChoice(self.params.heads, ratio, info, self.usual_ratio)

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        first, count = self.params.sink_tokens, left.lengths[0]
        state = kept.state if kept else self._heads.judge(layer_idx, left, seen, first)
        new = left.select([torch.full((count,), keeps) for keeps in state["retrieves"].tolist()])
        return kept.extended(new) if kept else new.with_state(**state)

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        params, kept = cls.split(params, tokens, page_size)
        stored = max(1, context_tokens - params.sink_tokens - params.window_tokens)
        return params.model_copy(update={"retrieval_ratio": min(1.0, kept / stored)})


@METHODS.register("razor_attention", paper="Tang et al. 2024, arXiv:2407.15891")
class RazorAttention(DuoAttention):
    """Keeps everything of retrieval heads; of the others sinks and window, and DROPS their rest.

    In the place of the n entries that a head dropped stands their mean key and mean value, whose
    logit counts n times (bias log n).

    Kept: everything of the retrieval heads; of the others sinks, window and one mean.
    Lost: with demote "drop" what streaming heads had between these, but for its mean; with
    "offload" nothing.
    Deviations: heads are told apart as by duo_attention, not by echo and induction scores of a
    repeated random text (hybrid-kv heads measures induction on a text of yours); all heads have one
    window of a fixed size, where the paper gives each head one of its own; with demote "offload"
    nothing is dropped and no mean stands for it.
    """

    class Params(DuoParams):
        """As duo_attention; retrieval_ratio: heads kept whole (null: .15)."""

    usual_ratio = 0.15

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        new = super().absorb(layer_idx, row, kept, left, seen)
        drops = [not keeps for keeps in new.state["retrieves"].tolist()]
        if self._offloads or not left.lengths[0] or not any(drops):
            return new
        stood = [int(dropped and n > 0) for dropped, n in zip(drops, new.lengths, strict=True)]
        before = new.state if any(stood) else {}
        sums = dropped_sums(left, before)
        count = sums["dropped_count"]
        at = before.get("dropped_at", left.split("positions")[0][:1].clone())
        k, v = (
            (sums[name] / count).to(left.k.dtype)[:, None] for name in ("dropped_k", "dropped_v")
        )
        means = Entries.of(k, v, at, bias=count.log().expand(len(drops), 1))
        means = means.select([torch.full((1,), dropped) for dropped in drops])
        new, end = new.extended(means).without_first(stood), left.split("positions")[0][-1] + 1
        return new.with_state(**sums, dropped_at=at, merged_end=end)


def dropped_sums(left: Entries, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of all that left the window: `dropped_k`, `dropped_v` [Hkv, D] and their `dropped_count`.

    In float32: what is added page by page to a mean in 16 bits would be lost.
    """
    sums = {
        f"dropped_{name}": torch.stack([rows.float().sum(0) for rows in left.split(name)])
        for name in ("k", "v")
    }
    sums["dropped_count"] = torch.full((), float(left.lengths[0]), device=left.k.device)
    return {name: value + before[name] if before else value for name, value in sums.items()}


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
