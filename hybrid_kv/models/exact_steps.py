"""Exact decoding: the method drafts tokens, and one dense pass over both tiers verifies them.

    newest token -> drafts by the method -> crop them -> one dense pass over newest token and drafts
    -> logits by position -> tokens, as long as they are the drafts, and one more -> crop the others

Every token that comes out is chosen from logits of full attention over entries of full attention.
With a limit to errors (`max_error`) drafts before the first whose estimated error is larger come
out as they are, and the pass begins at that one.

In float32 greedy tokens are those of `full`. In 16 bits a pass of several tokens rounds otherwise
than steps of one: the token is the pass's own, and `ExactWork.ties` counts where that can matter.

Drafts may also be looked up in the text so far.

Source: Leviathan et al. 2023 (speculative decoding); drafts by a sparse cache: TriForce (Sun et al.
2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_kv.errors import ConfigError
from hybrid_kv.models.cache_state import passing, stuck_layers
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.packed_linear import PackedModule
from hybrid_kv.plugins import Method
from hybrid_kv.runtime.cache_context import stores_as_is

_MATCHED = 4
"""Tokens that must have stood before a guess as they stand now."""


class PromptLookup:
    """Tokens of a sequence, prompt and answer, in which its end is looked up.

    num_tokens: so many.

    Args:
        ids: tokens so far.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids, self.num_tokens = np.array(ids, dtype=np.int64), len(ids)

    def add(self, token: int) -> None:
        """Takes the next token."""
        if self.num_tokens == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(self.num_tokens + 64, np.int64)])
        self._ids[self.num_tokens] = token
        self.num_tokens += 1

    def guess(self, more: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens that followed the last tokens where these stood before, the latest
        time; [] where they did not.

        Args:
            more: tokens behind those that were added.
        """
        ids = np.concatenate([self._ids[: self.num_tokens], np.array(more, dtype=np.int64)])
        if len(ids) <= _MATCHED or count < 1:
            return []
        ends = np.flatnonzero(ids[_MATCHED - 1 : -1] == ids[-1]) + _MATCHED - 1
        for back in range(1, _MATCHED):
            ends = ends[ids[ends - back] == ids[-1 - back]]
        if not len(ends):
            return []
        first = int(ends[-1]) + 1
        return list(map(int, ids[first : first + count]))


_GUESSED = 4
"""Tokens that are looked up in the text and checked by one step of the method, which then reads the
weights once for all of them."""

MOST_DRAFTS_CPU, MOST_DRAFTS_GPU = 7, 48
"""Drafts of one verification. On a CPU a dense pass costs more with each token in it, and takes one
more than these: as many as the engine multiplies by 16-bit weights at the speed of memory. On a GPU
it waits for the bus, whatever their number."""


@dataclass(slots=True)
class ExactWork:
    """Counters of exact decoding.

    passes: dense passes behind the prompt. drafted: tokens that the method drafted for them;
    accepted: of these, those that came out. steps: of the method. unverified: tokens of steps that
    read every entry, so that no pass was needed. trusted: tokens that no pass has verified, as
    their estimated error was within the limit. ties: tokens of models that round to 16 bits whose
    two best logits differ by no more than that, where full attention in single steps may choose the
    other.
    """

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    unverified: int = 0
    trusted: int = 0
    ties: int = 0


class AnswerTokens(Protocol):
    """Chooses the tokens of an answer."""

    def drafting(self) -> AbstractContextManager[None]:
        """A block of `draft`, behind which random numbers are those from before."""
        ...

    def draft(self, logits: Tensor, before: list[int]) -> tuple[int, bool]:
        """A token out of logits [V], after those drafted before it, that does not come out yet;
        whether it ends the answer.
        """
        ...

    def guess(self, before: list[int], count: int) -> list[int]:
        """At most so many tokens that may follow those drafted; one step checks all of them."""
        ...

    def take(self, logits: Tensor) -> tuple[int, bool]:
        """The next token, out of full attention's logits [V]; whether the answer ends with it."""
        ...


class ErrorLimit(Protocol):
    """Decides which drafts may come out without verification."""

    def drafting(self) -> AbstractContextManager[None]:
        """A block of steps whose errors are looked at."""
        ...

    def allows(self, logits: Tensor) -> list[bool]:
        """Whether the first tokens of the last step, drafted from logits [n, V], may come out."""
        ...

    def chosen_from(self, trusted: int, logits: Tensor) -> None:
        """The next tokens, or the first of them, are chosen from logits [n, V]: the first `trusted`
        from the drafts' own, the others from full attention's.
        """
        ...

    def came_out(self, count: int) -> None:
        """Note that the first `count` of the tokens of `chosen_from` were chosen."""
        ...


class ExactSteps:
    """Drafts of a cache's method and the dense passes that verify them, one after the other.

    Args:
        model: attached; its head gives the logits.
        cache: of one row; it holds all tokens but the newest.
        most_drafts: of one verification.
        work: counts.
        limit: of errors, below which drafts come out unverified; None verifies all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TieredCache,
        most_drafts: int,
        work: ExactWork,
        limit: ErrorLimit | None = None,
    ) -> None:
        self._limit = limit
        self._model, self._cache, self._work = model, cache, work
        self._most_drafts = self._num_drafts = most_drafts
        self._takes_rows = "logits_to_keep" in signature(model.forward).parameters
        self._rounding = _rounding_of(model)
        self._most_guessed = _most_guessed(cache, model.device)

    def dense(self, tokens: Tensor, rows: int) -> Tensor:
        """Logits as of `_forward`, by attention to every entry of both tiers."""
        kv = self._cache.kv
        kv.more_prompt = True
        try:
            return self._forward(tokens, rows)
        finally:
            kv.more_prompt = False

    def advance(self, newest: int, room: int, answer: AnswerTokens) -> bool:
        """One draft and its verification, which give at least one token; whether the answer ends.

        Whatever is raised, the cache then holds what was taken, but for the newest token.

        Args:
            newest: the token that the cache lacks.
            room: tokens that may come at most.
        """
        begin, taken, accepted = self._cache.get_seq_length(), 0, 0
        with self._cache.kv.layers.speculating():
            try:
                drafts, trusted, logits = self._verified(newest, room, answer)
                if self._limit is not None:
                    self._limit.chosen_from(trusted, logits)
                for place, row in enumerate(logits):
                    token, has_ended = answer.take(row)
                    taken = place + 1
                    self._work.ties += place >= trusted and self._is_tie(row)
                    is_right = place < len(drafts) and token == drafts[place]
                    accepted += is_right
                    if has_ended or not is_right:
                        break
            finally:
                if not self._cache.state.is_unfinished:
                    self._keep(begin + taken)
        if self._limit is not None:
            self._limit.came_out(taken)
        if len(logits) > len(drafts):
            self._work.trusted += min(trusted, taken)
            self._count(len(drafts) - trusted, accepted - min(trusted, accepted))
        elif trusted == 0:
            self._work.unverified += taken
            self._num_drafts = 1
        else:
            self._work.trusted += taken
            self._num_drafts = min(self._most_drafts, 2 * self._num_drafts)
        return has_ended

    def _verified(
        self, newest: int, room: int, answer: AnswerTokens
    ) -> tuple[list[int], int, Tensor]:
        """Drafts, how many of the first are trusted, and logits [n, V] of their places: for those
        the method's own, then full attention's, of the place behind them too if that took a pass.
        """
        begin, drafts, rows = self._cache.get_seq_length(), list[int](), list[Tensor]()
        wanted, ends = min(self._num_drafts, max(1, room - 1)), False
        near = list[bool]()
        limit = self._limit
        with answer.drafting(), nullcontext() if limit is None else limit.drafting():
            while len(drafts) < wanted and not ends:
                last = drafts[-1] if drafts else newest
                guessed = answer.guess(drafts, min(self._most_guessed, wanted - len(drafts) - 1))
                logits = self._forward(self._ids([last, *guessed]), 1 + len(guessed))
                for place, row in enumerate(logits):
                    token, ends = answer.draft(row, drafts)
                    drafts.append(token)
                    rows.append(row)
                    if ends or place == len(guessed) or token != guessed[place]:
                        break
                self._work.steps += 1
                if limit is not None:
                    near += limit.allows(torch.stack(rows[len(near) :]))
                if guessed:  # some of it wrongly; a crop of nothing makes windows small
                    self._keep(begin + len(drafts))
        if self._cache.exact_tokens == self._cache.get_seq_length():
            return drafts, 0, torch.stack(rows)  # each step has read every entry
        trusted = [*near, False].index(False)
        if trusted == len(drafts):
            return drafts, trusted, torch.stack(rows)
        drafts = drafts[: room - 1]  # the pass gives one token more
        self._keep(begin + trusted)
        unverified = [newest, *drafts][trusted:]
        verified = self.dense(self._ids(unverified), len(unverified))
        return drafts, trusted, torch.cat([torch.stack(rows)[:trusted], verified])

    def _count(self, drafted: int, accepted: int) -> None:
        """Counts a pass, and chooses how many tokens to draft next: twice as many where all were
        right, half where not even half of them were.
        """
        work = self._work
        work.passes, work.drafted = work.passes + 1, work.drafted + drafted
        work.accepted += accepted
        if accepted == drafted:
            self._num_drafts = min(self._most_drafts, 2 * self._num_drafts)
        elif 2 * accepted < drafted:
            self._num_drafts = max(1, self._num_drafts // 2)

    def _forward(self, tokens: Tensor, rows: int) -> Tensor:
        """Logits [rows, V] float32 of the last of tokens [1, n], which the cache takes."""
        keep = {"logits_to_keep": rows} if self._takes_rows else {}
        model: Callable[..., Any] = self._model
        logits: Tensor = model(tokens, **passing(self._cache), use_cache=True, **keep).logits
        return logits[0, -rows:].to(dtype=torch.float32, device=tokens.device, copy=True)

    def _ids(self, tokens: list[int]) -> Tensor:
        return torch.tensor([tokens], device=self._model.device)

    def _keep(self, count: int) -> None:
        """The cache forgets all but its first `count` tokens; windows become as small as before."""
        self._cache.crop(min(0, count - self._cache.get_seq_length()))

    def _is_tie(self, logits: Tensor) -> bool:
        """Whether the two best logits differ by no more than one rounding of the model's dtype."""
        if not self._rounding:
            return False
        best, second = logits.topk(2).values.tolist()
        return bool(best - second <= self._rounding * max(abs(best), abs(second)))


def _most_guessed(cache: TieredCache, device: torch.device) -> int:
    """Tokens that a step of the method may check at once, beside the first one.

    None on a GPU, whose steps are made for one token, and none where sliding windows forget, as
    they are cropped, what the next crop needs. More than the setting would be attended densely.
    """
    if device.type != "cpu" or any(hasattr(layer, "record_past") for layer in cache.layers):
        return 0
    return min(_GUESSED, cache.kv.config.dense_extend_tokens - 1)


def _rounding_of(model: PreTrainedModel) -> float:
    """Relative rounding of a model's products: of 16 bits, also where weights are packed and
    activations become 8-bit codes; 0 for float32.
    """
    if any(isinstance(part, PackedModule) and not part.exact for part in model.modules()):
        return torch.finfo(torch.bfloat16).eps
    return torch.finfo(model.dtype).eps if model.dtype.itemsize < 4 else 0.0


def most_drafts_on(device: torch.device) -> int:
    """Drafts of one verification at most, by default, for a model on a device."""
    return MOST_DRAFTS_CPU if device.type == "cpu" else MOST_DRAFTS_GPU


def check_exact(cache: TieredCache, asked: str = "exact=True", leave: str = "exact") -> None:
    """Raises ConfigError where tokens of a cache cannot be full attention's.

    Args:
        asked: what the user wrote; leave: the argument to leave out.
    """
    kv, name = cache.kv, cache.kv.config.method
    method = kv.means.method
    if any(_loses(method.of_layer(idx), idx) for idx in kv.layers):
        raise ConfigError(
            f"{asked} must have a method that keeps every entry as it is, got '{name}', which "
            f"drops or rounds some; take method='hybrid', or leave {leave} out"
        )
    if kv.means.prefill_error is not None:
        raise ConfigError(
            f"{asked} must have prefill='exact', got sparse prefill, which leaves some of the "
            f"prompt unread; load the model with prefill='exact', or leave {leave} out"
        )
    if (stuck := next(stuck_layers(cache.layers), None)) is not None:
        raise ConfigError(
            f"{asked} must have a model from whose cache tokens can be taken back, got linear "
            f"attention in layer {stuck}; leave {leave} out"
        )


def _loses(method: Method, layer_idx: int) -> bool:
    return not stores_as_is(method) or method.seal(layer_idx, ()).drops


def drop_inexact(cache: TieredCache, num_tokens: int) -> None:
    """Forgets tokens of earlier steps that left entries unread, to compute them again with the last
    of `num_tokens` at least.
    """
    held = cache.get_seq_length()
    exact = min(cache.exact_tokens, num_tokens - 1)
    if 0 < exact < held and cache.can_crop:
        cache.crop(exact - held)
    elif exact < held:
        with cache.in_use():
            cache.start_over()


@contextmanager
def past_recorded(cache: TieredCache) -> Iterator[None]:
    """A block in which sliding windows keep what comes back when newer tokens are cropped."""
    windows = [layer for layer in cache.layers if hasattr(layer, "record_past")]
    before = [layer.record_past for layer in windows]
    recorded: Any = cache
    recorded.activate_past_recording()
    try:
        yield
    finally:
        for layer, was in zip(windows, before, strict=True):
            layer.record_past = was
