"""Methods that follow the weights of every step and hold a fixed number of entries."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybrid_kv.attended import Attended
from hybrid_kv.entries import Entries
from hybrid_kv.methods.evicting import Evicting
from hybrid_kv.methods.scores import best, of_window, scored, window_of
from hybrid_kv.types import Evidence


class Following(Evicting):
    """Whatever leaves the window competes with what is kept, by scores that every step moves on.

    The score of an entry lies in the column `score` of what is kept, and the scores of the window
    in the state: so forks, beams, branches and checkpoints carry both.
    """

    @abstractmethod
    def prompt_scores(self, seen: Evidence, num_kv_heads: int) -> Tensor:
        """[Hkv, N] float32 scores of all tokens of a prompt."""

    @abstractmethod
    def moved(self, old: Tensor, mass: Tensor) -> Tensor:
        """Scores after a step that gave these masses, of the same shape."""

    def ranked(self, scores: Tensor) -> Tensor:
        """What decides, of scores [Hkv, N]."""
        return scores

    def watched(self, attended: Attended) -> Attended:
        """What of a step moves the scores."""
        return attended

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        if seen is not None:
            all_scores = self.prompt_scores(seen, left.num_heads)
            count, leaving = all_scores.shape[1], left.lengths[0]
            first = min(self.params.sink_tokens, count - leaving)
            state: Mapping[str, Tensor] = _state(all_scores[:, first + leaving :].clone(), count)
            scores = all_scores[:, first : first + leaving]
        else:
            state = {} if kept is None else kept.state
            scores = of_window(state, left.split("positions")[0], left.num_heads)
        left = scored(left, scores)
        both = left if kept is None else kept.extended(left)
        ranked = self.ranked(torch.stack(both.split("score")))
        return both.select(best(ranked, self.room(ranked.shape[1]))).with_state(**state)

    def after(self, layer_idx: int, attended: Attended) -> Sequence[Entries]:
        watched = self.watched(attended)
        return [self._after(watched, row) for row in range(len(watched.kept))]

    def _after(self, attended: Attended, row: int) -> Entries:
        kept, end = attended.kept[row] or _nothing(attended, row), attended.lengths[row]
        mass, positions = window_of(attended, row)
        old = of_window(kept.state, positions, len(mass))
        old *= positions < end - attended.q.shape[2]  # what was cropped and written anew
        score = self.moved(kept.columns["score"], attended.mass(row))
        return kept.with_columns(score=score).with_state(**_state(self.moved(old, mass), end))


def _state(window: Tensor, end: int) -> dict[str, Tensor]:
    return {"window": window, "end": torch.full((), end, device=window.device)}


def _nothing(attended: Attended, row: int) -> Entries:
    """No entries of a row from which nothing has left yet; a place for the scores of its window."""
    keys, positions = attended.window(row)
    none = keys[:, :0]
    return Entries.of(none, none, positions[:0], score=none[..., 0].float())
