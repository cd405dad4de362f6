"""Tokens of an answer: drawn from logits as a request asks, exactly if asked, and made text.

Stop strings may span several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybrid_kv.api.tokens import decode_text
from hybrid_kv.models.exact_steps import (
    ExactSteps,
    ExactWork,
    PromptLookup,
    check_exact,
    most_drafts_on,
    past_recorded,
)
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.serve.requests import Reason, Request

if TYPE_CHECKING:
    from hybrid_kv.api.token_errors import TokenErrorLimit
    from hybrid_kv.watch.token_errors import TokenError

_LONGEST, _KEPT = 96, 32
"""Tokens that are decoded together, and what is left of them as the context of the next ones."""

_INCOMPLETE = "\ufffd"
"""Replacement character, to which an incomplete character decodes."""


class AnswerText:
    """Takes tokens and gives text that can be shown: nothing that may begin a stop string.

    is_stopped: whether a stop string has come; it and what follows is never given.

    Args:
        tokenizer: None for a model without text.
        stops: strings that end the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._read = 0  # characters of their text that were taken up
        self._held = ""
        self.is_stopped = False

    def add(self, token_id: int, *, last: bool = False) -> str:
        """The text that can be shown after one more token; all that is left with the last one."""
        if self._tokenizer is None or self.is_stopped:
            return ""
        self._ids.append(token_id)
        self._held += self._new_text(self._tokenizer, last)
        ends = [end for stop in self._stops if (end := self._held.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            return self._held[: min(ends)]
        shown = len(self._held) - (0 if last else self._may_begin_a_stop())
        text, self._held = self._held[:shown], self._held[shown:]
        return text

    def _new_text(self, tokenizer: PreTrainedTokenizerBase, last: bool) -> str:
        text = decode_text(tokenizer, self._ids)
        if text.endswith(_INCOMPLETE) and not last:
            return ""
        new, self._read = text[self._read :], len(text)
        if len(self._ids) > _LONGEST:
            kept = decode_text(tokenizer, self._ids[-_KEPT:])
            if text.endswith(kept):  # else a character or a space would come out twice
                self._ids, self._read = self._ids[-_KEPT:], len(kept)
        return new

    def _may_begin_a_stop(self) -> int:
        """Characters at the end of the held text that are the beginning of a stop string."""
        held = self._held
        lengths = (
            count
            for stop in self._stops
            for count in range(min(len(stop) - 1, len(held)), 0, -1)
            if held.endswith(stop[:count])
        )
        return max(lengths, default=0)


class Choice(NamedTuple):
    """A token, with log probabilities where they were asked for; see `Token`."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Draws the tokens of one request, from random numbers of its own.

    Temperature, cuts and the penalty on repetition are transformers' and come in its order, so that
    a seed gives what `generate(do_sample=True, seed=...)` gives.

    Args:
        device: where the logits are.
    """

    def __init__(self, request: Request, device: torch.device) -> None:
        self._request, self._sampling = request, request.sampling
        sampling = request.sampling
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._grammar = None if request.grammar is None else request.grammar.copy()
        self._bias = torch.tensor([bias for _, bias in sampling.logit_bias], device=device)
        self._biased = torch.tensor([token for token, _ in sampling.logit_bias], device=device)
        self._repeated = (
            None
            if sampling.repetition_penalty == 1
            else RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))
        )
        self._warp = LogitsProcessorList()
        if sampling.temperature not in (0, 1):
            self._warp.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            self._warp.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._warp.append(TopPLogitsWarper(float(sampling.top_p)))
        if sampling.min_p:
            self._warp.append(MinPLogitsWarper(float(sampling.min_p)))

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """A block behind which the random numbers are those from before it."""
        state = self._generator.get_state()
        try:
            yield
        finally:
            self._generator.set_state(state)

    def choose(self, logits: Tensor, ids: Sequence[int]) -> Choice:
        """The next token after prompt and answer `ids`, out of logits [V]."""
        raw = logits.float()
        row = self._judged(raw, ids)
        if self._sampling.temperature == 0:
            token = int(row.argmax())
        else:
            warped = self._warp(None, row[None])  # type: ignore[arg-type]  # none looks at the ids
            probabilities = warped.softmax(-1)
            token = int(torch.multinomial(probabilities, 1, generator=self._generator))
        if (count := self._sampling.logprobs) is None:
            return Choice(token)
        logprobs = raw.log_softmax(-1)
        values, indices = logprobs.topk(min(count, raw.shape[0]))
        top = tuple(zip(indices.tolist(), values.tolist(), strict=True))
        return Choice(token, float(logprobs[token]), top)

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether an answer ends with the last of these tokens."""
        if ids[-1] in self._request.end_ids:
            return True
        return self._grammar is not None and self._grammar.is_complete(self._answer(ids))

    def _answer(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[len(self._request.ids) :]

    def _judged(self, row: Tensor, ids: Sequence[int]) -> Tensor:
        """Logits with biases and penalties, and without what may not follow."""
        sampling, answer = self._sampling, self._answer(ids)
        if len(self._bias):
            row = row.index_add(0, self._biased, self._bias)
        if self._repeated is not None:
            row = self._repeated(torch.tensor([ids], device=row.device), row[None])[0]
        if answer and (sampling.frequency_penalty or sampling.presence_penalty):
            said, times = torch.tensor(answer, device=row.device).unique(return_counts=True)
            penalty = sampling.frequency_penalty * times + sampling.presence_penalty
            row = row.index_add(0, said, -penalty.to(row))
        if len(answer) < sampling.min_tokens and self._request.end_ids:
            ends = torch.tensor(self._request.end_ids, device=row.device)
            row = row.index_fill(0, ends, -torch.inf)
        if self._grammar is not None:
            row = row.masked_fill(~self._grammar.allowed(answer).to(row.device), -torch.inf)
        return row


class ExactAnswer:
    """Drafts and takes the tokens of a running request, several in one round.

    work: what it took so far.

    Args:
        ids: prompt and answer, to which `take` adds.
        take: chooses the next token from logits [V] and hands it out with its error, which is None
            without a limit; says why the answer ends with it, if it does.

    Raises:
        ConfigError: a limit to errors is asked for that the method or the model cannot keep.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TieredCache,
        request: Request,
        ids: list[int],
        sampler: Sampler,
        take: Callable[[Tensor, TokenError | None], Reason | None],
    ) -> None:
        self._cache, self._request, self._ids = cache, request, ids
        self._sampler, self._take, self.work = sampler, take, ExactWork()
        self._limit = error_limit(model, cache, request)
        self._taken = 0  # of this round
        most = most_drafts_on(model.device)
        self._steps = ExactSteps(model, cache, most, self.work, self._limit)
        self._lookup = PromptLookup(ids)
        self._reason: Reason | None = None

    def advance(self) -> Reason | None:
        """Computes at least one token; says why the answer ends with the last, if it does."""
        request = self._request
        for token in self._ids[self._lookup.num_tokens :]:
            self._lookup.add(token)
        room = len(request.ids) + request.max_new_tokens - len(self._ids)
        self._taken = 0
        with past_recorded(self._cache):
            self._steps.advance(self._ids[-1], room, self)
        return self._reason

    def drafting(self) -> AbstractContextManager[None]:
        return self._sampler.drafting()

    def draft(self, logits: Tensor, before: list[int]) -> tuple[int, bool]:
        drafted = [*self._ids, *before]
        token = self._sampler.choose(logits, drafted).id
        return token, self._sampler.ends([*drafted, token])

    def guess(self, before: list[int], count: int) -> list[int]:
        return self._lookup.guess(before, count)

    def take(self, logits: Tensor) -> tuple[int, bool]:
        error = None if self._limit is None else self._limit.coming[self._taken]
        self._taken += 1
        self._reason = self._take(logits, error)
        return self._ids[-1], self._reason is not None


# Errors of tokens --------------------------------------------------------------------------------


def error_limit(
    model: PreTrainedModel, cache: TieredCache, request: Request
) -> TokenErrorLimit | None:
    """The limit that a request asks for; None for none.

    Raises:
        ConfigError: the method cannot tell its errors, or the model rounds more than that.
    """
    if request.max_error is None:
        return None
    from hybrid_kv.api.token_errors import TokenErrorLimit

    return TokenErrorLimit(model, cache.kv, request.max_error)


def check_verified(model: PreTrainedModel, cache: TieredCache, request: Request) -> None:
    """Raises ConfigError where a cache cannot verify the tokens of a request, or tell their errors,
    as it asks for.
    """
    if request.is_drafted:
        name = "exact" if request.exact else "max_error"
        check_exact(cache, name, name)
    error_limit(model, cache, request)
    if request.errors:
        from hybrid_kv.api.token_errors import check_tells_errors

        check_tells_errors(cache.kv, "errors")


def first_error(logits: Tensor) -> TokenError:
    """Error of a token that is chosen from logits [V] of a step that has read everything."""
    from hybrid_kv.watch.token_errors import TokenError, spreads_of

    return TokenError.of(0.0, *spreads_of(logits).tolist())


class StepErrors:
    """Errors of the tokens that a method's own steps give, one by one; see `TokenError`.

    Args:
        cache: of one row; whoever makes its steps makes them for watchers too.
    """

    def __init__(self, cache: TieredCache) -> None:
        from hybrid_kv.watch.token_errors import HalfWatcher

        self._kv, self._halves = cache.kv, HalfWatcher()
        self._is_watching = False

    def forget(self) -> None:
        """Forgets a step that may have stopped in its middle."""
        self._halves.take()

    def next(self, logits: Tensor) -> TokenError:
        """Error of the token that is chosen from logits [V]: of the last step, at first that of the
        prompt, which reads everything.

        Raises:
            ConfigError: the method cannot tell, which only the prompt has shown.
        """
        from hybrid_kv.api.token_errors import check_tells_errors
        from hybrid_kv.watch.token_errors import TokenError, spreads_of

        if not self._is_watching:
            check_tells_errors(self._kv, "errors")
            self._kv.watchers.append(self._halves)
            self._is_watching = True
        (half,) = self._halves.take() or (0.0,)
        return TokenError.of(half, *spreads_of(logits).tolist())
