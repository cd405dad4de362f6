"""Methods that follow the weights of every step and hold a fixed number of entries."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hybrid_kv.attended import Attended
from hybrid_kv.config import Tokens
from hybrid_kv.entries import Entries
from hybrid_kv.methods.evicting import Evicting, EvictingParams
from hybrid_kv.methods.scores import along, best, of_window, scored, window_of
from hybrid_kv.types import Evidence


class Moment(NamedTuple):
    """A step that moves scores: `new` tokens up to position `end` - 1, `group` heads a KV head."""

    new: int
    end: int
    group: int


class Following(Evicting):
    """Whatever leaves the window competes with what is kept, by scores that every step moves on.

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
