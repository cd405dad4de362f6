"""H2O, TOVA, A2SF and Scissorhands: keep entries by the attention that later queries gave them.

`Following` is the base class of methods whose scores every step moves on.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv.attended import Attended
from hybrid_kv.config import Count, Tokens
from hybrid_kv.entries import Entries
from hybrid_kv.methods.evicting import (
    Evicting,
    EvictingParams,
    along,
    best,
    group_sums,
    newest_of,
    of_window,
    scored,
    window_of,
)
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, Needs


class Moment(NamedTuple):
    """A step that moves scores: `new` tokens up to position `end` - 1, `group` heads a KV head."""

    new: int
    end: int
    group: int


class Following(Evicting):
    """Method that keeps the best of what is kept and what leaves the window, by scores that every
    step moves on.

    The score of an entry lies in the column `score` of what is kept, and the scores of the window
    in the state: so forks, beams, branches and checkpoints carry both.

    parts: the shape of the score of one entry, where that is not one number.

    Kept: sinks, window and what has the best scores, budget_tokens of a head, however long the
    answer.
    Lost: with demote "drop" what falls behind, in prompt and answer; with "offload" nothing.
    """

    parts: ClassVar[tuple[int, ...]] = ()

    @abstractmethod
    def prompt_scores(self, seen: Evidence, num_kv_heads: int, layer_idx: int) -> Tensor:
        """[Hkv, N, *parts] float32 scores of all tokens of a prompt."""

    @abstractmethod
    def moved(self, old: Tensor, mass: Tensor, moment: Moment) -> Tensor:
        """Scores [..., *parts] after a step that gave these masses [...]."""

    def ranked(self, scores: Tensor) -> Tensor:
        """[Hkv, N], what decides, of scores [Hkv, N, *parts]."""
        return scores

    def watched(self, attended: Attended) -> Attended:
        """Attention of a step by which the scores move."""
        return attended

    def masses(self, layer_idx: int, attended: Attended, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Masses that move scores: of kept entries, flat; of the last W positions; those [W]."""
        return attended.mass(row), *window_of(attended, row)

    def settled(self, new: Entries, both: Entries, chosen: Tensor) -> Entries:
        """Kept entries of all that competed, when these have been chosen: [Hkv, K] places."""
        return new

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        state: Mapping[str, Tensor] = {} if kept is None else kept.state
        if seen is not None:
            all_scores = self.prompt_scores(seen, left.num_heads, layer_idx)
            count, leaving = all_scores.shape[1], left.lengths[0]
            first = min(self.params.sink_tokens, count - leaving)
            state = _state(all_scores[:, first + leaving :].clone(), count)
            scores = all_scores[:, first : first + leaving]
        else:
            positions = left.split("positions")[0]
            scores = of_window(state, positions, left.num_heads, self.parts)
        left = scored(left, scores)
        both = left if kept is None else self._evened(kept).extended(left)
        ranked = self.ranked(torch.stack(both.split("score")))
        chosen = best(ranked, self.room(ranked.shape[1]))
        return self.settled(both.select(chosen).with_state(**state), both, chosen)

    def _evened(self, kept: Entries) -> Entries:
        """As many entries of every head: where a row was cropped, heads had kept others of it."""
        if len(set(kept.lengths)) < 2:
            return kept
        fewest, own = min(kept.lengths), kept.split("score")
        chosen = [best(self.ranked(head[None]), fewest)[0].sort().values for head in own]
        return kept.select(torch.stack(chosen))

    def after(self, layer_idx: int, attended: Attended) -> Sequence[Entries]:
        watched = self.watched(attended)
        return [self._after(layer_idx, watched, row) for row in range(len(watched.kept))]

    def _after(self, layer_idx: int, attended: Attended, row: int) -> Entries:
        kept, end = attended.kept[row] or _nothing(attended, row, self.parts), attended.lengths[row]
        far, near, positions = self.masses(layer_idx, attended, row)
        moment = Moment(attended.q.shape[2], end, attended.q.shape[1] // kept.num_heads)
        old = of_window(kept.state, positions, len(near), self.parts)
        old *= along(positions < end - moment.new, old)  # what was cropped and written anew
        score = self.moved(kept.columns["score"], far, moment)
        window = self.moved(old, near, moment)
        return kept.with_columns(score=score).with_state(**_state(window, end))


class RecentShareParams(EvictingParams):
    """window_tokens: the papers' recent half of a budget."""

    window_tokens: Tokens = 512


class RecentShare(Following):
    """A recent window beside the best: a share of a budget is the window, half unless said."""

    Params = RecentShareParams

    @classmethod
    def recent_tokens(cls, budget: int) -> float:
        """The paper's window within a budget of so many tokens."""
        return budget / 2

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        window = max(page_size, int(cls.recent_tokens(tokens)) // page_size * page_size)
        given = params.model_copy(update={"window_tokens": window})
        return super().at_budget(given, tokens, context_tokens=context_tokens, page_size=page_size)


def _state(window: Tensor, end: int) -> dict[str, Tensor]:
    return {"window": window, "end": torch.full((), end, device=window.device)}


def _nothing(attended: Attended, row: int, parts: tuple[int, ...]) -> Entries:
    """No entries of a row from which nothing has left yet; a place for the scores of its window."""
    keys, positions = attended.window(row)
    none = keys[:, :0]
    score = torch.zeros(len(keys), 0, *parts, device=keys.device)
    return Entries.of(none, none, positions[:0], score=score)


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
