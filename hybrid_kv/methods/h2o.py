"""H2O, TOVA, A2SF, Scissorhands and Keyformer: keep entries by the attention of later queries.

`Following` is the base class of methods whose scores every step moves on. Keyformer sums a softmax
with noise that grows flatter as an answer grows.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hybrid_kv.config import Count, Tokens
from hybrid_kv.entries import Attended, Entries
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
            first = self.params.sink_tokens
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
        kept, end = attended.kept[row], attended.lengths[row]
        assert kept is not None  # absorb was asked when the prompt ended, whatever left
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


_RECENT_SHARE = 0.3
"""Of a budget, as the authors set it; their paper says .2 to .3."""
_LEAST = 1e-20
"""Of a sum of weights, so that what nobody looked at stays 0."""


@METHODS.register("keyformer", paper="Adnan et al. 2024, arXiv:2403.09054, section 3")
class Keyformer(RecentShare):
    """Keeps the highest sums of a noisy softmax and a recent window, and DROPS the rest.

    score[n] = sum over queries of exp((x[n] + z[n]) / t) / sum over m of exp((x[m] + z[m]) / t): x
    the logits over what is kept, z noise of the standard Gumbel distribution, drawn once for each
    token and KV head, t from first_temperature in the prompt to last_temperature after
    answer_tokens of the answer, in a straight line.

    Deviations: scores of the prompt are estimated from sampled_queries of its queries, a page
    competes at a time, and the prompt is cut at its end, as in h2o; weights of a group of query
    heads are summed, with one noise; the length of an answer is a parameter, for nobody knows it;
    tokens that come together have one temperature; what demote "offload" finds is not in the sum.
    """

    class Params(RecentShareParams):
        """window_tokens: a fourth of the usual budget (the paper: 20 to 30%);
        sampled_queries: of the prompt, which score; first_temperature, last_temperature: of the
        softmax, in the prompt and in the end; answer_tokens: after which the end is reached;
        seed: of the noise.
        """

        window_tokens: Tokens = 256
        sampled_queries: Count = 256
        first_temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
        last_temperature: float = Field(default=2.0, gt=0, allow_inf_nan=False)
        answer_tokens: Count = 512
        seed: int = Field(default=0, ge=0)

    @classmethod
    def recent_tokens(cls, budget: int) -> float:
        return _RECENT_SHARE * budget

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(self.params.sampled_queries)

    def prompt_scores(self, seen: Evidence, num_kv_heads: int, layer_idx: int) -> Tensor:
        at = torch.arange(seen.num_tokens)

        def noisy(weights: Tensor, asked: Tensor) -> Tensor:
            z = self.noise(layer_idx, num_kv_heads, at.to(weights.device))
            raised = self._raised(weights, z[:, None, None], self.params.first_temperature)
            return raised / raised.sum(-1, keepdim=True).clamp_min(_LEAST)

        return group_sums(seen.total_mass(each=noisy), num_kv_heads)

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        new = super().absorb(layer_idx, row, kept, left, seen)
        if seen is None:
            return new
        return new.with_state(prompt=torch.full((), seen.num_tokens, device=left.k.device))

    def masses(self, layer_idx: int, attended: Attended, row: int) -> tuple[Tensor, Tensor, Tensor]:
        kept = attended.kept[row]
        near, positions = attended.window_weights(row)
        temperature = self._temperature(attended.lengths[row], kept)
        near = self._raised(near, self.noise(layer_idx, len(near), positions)[:, None], temperature)
        far = None
        total = near.sum(-1, keepdim=True)
        if kept is not None:
            # A crop leaves heads with different numbers; those of fewer get weights of 0.
            at = pad_sequence(list(kept.split("positions")), batch_first=True)
            weights = [one.T for one in attended.weights(row)]
            far = pad_sequence(weights, batch_first=True).transpose(1, 2)
            far = self._raised(far, self.noise(layer_idx, len(at), at)[:, None], temperature)
            total = total + far.sum(-1, keepdim=True)
        total = total.clamp_min(_LEAST)
        masses = near.new_zeros(0 if kept is None else len(kept.positions))
        if kept is not None and far is not None:
            for into, head in zip(kept.split(masses), (far / total).sum(1), strict=True):
                into.copy_(head[: len(into)])
        return masses, *window_of(attended, row, ((near / total).sum(1), positions))

    def moved(self, old: Tensor, mass: Tensor, moment: Moment) -> Tensor:
        return old + mass

    def _temperature(self, end: int, kept: Entries | None) -> Tensor | float:
        """After a step up to position `end` - 1."""
        first, last = self.params.first_temperature, self.params.last_temperature
        if kept is None or "prompt" not in kept.state:
            return float(first)
        share: Tensor = ((end - kept.state["prompt"]) / self.params.answer_tokens).clamp(0, 1)
        return share * float(last - first) + float(first)

    def noise(self, layer_idx: int, num_kv_heads: int, positions: Tensor) -> Tensor:
        """[Hkv, N] standard Gumbel numbers of tokens at positions [N] or [Hkv, N].

        A hash of the position, so that forks, crops and checkpoints see the same.
        """
        salt = self.params.seed * 1_000_003 + layer_idx * 10_007
        heads = torch.arange(num_kv_heads, device=positions.device)[:, None]
        mixed = _mixed(_mixed(positions + salt) ^ _mixed(heads + 1))
        uniform = ((mixed >> 10).double() + 0.5) / 2**53
        noise: Tensor = -torch.log(-torch.log(uniform))
        return noise.to(torch.float32)

    def _raised(self, weights: Tensor, noise: Tensor, temperature: Tensor | float) -> Tensor:
        """exp((x + z) / t) of softmax weights exp(x) / Z, up to a factor of each query."""
        return (weights * noise.exp()) ** (1 / temperature)


def _mixed(x: Tensor) -> Tensor:
    """[...] int64, 0 and up: every bit of x changes half of them (the finaliser of SplitMix64)."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _shifted(x, shift)) * factor
    return (x ^ _shifted(x, 31)) & (2**63 - 1)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifted right, with zeros for the sign."""
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted
