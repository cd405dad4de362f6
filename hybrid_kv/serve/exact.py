"""The answer of a request whose tokens are full attention's; see `models.exact_steps`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor
from transformers import PreTrainedModel

from hybrid_kv.models.exact_steps import ExactSteps, ExactWork, most_drafts_on, past_recorded
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.prompt_lookup import PromptLookup
from hybrid_kv.serve.output import Sampler
from hybrid_kv.serve.requests import Reason, Request


class ExactAnswer:
    """Drafts and takes the tokens of a running request, several in one round.

    work: what it took so far.

    Args:
        ids: prompt and answer, to which `take` adds.
        take: chooses the next token from logits [V] and hands it out; says why the answer ends with
            it, if it does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TieredCache,
        request: Request,
        ids: list[int],
        sampler: Sampler,
        take: Callable[[Tensor], Reason | None],
    ) -> None:
        self._cache, self._request, self._ids = cache, request, ids
        self._sampler, self._take, self.work = sampler, take, ExactWork()
        self._steps = ExactSteps(model, cache, most_drafts_on(model.device), self.work)
        self._lookup = PromptLookup(ids)
        self._reason: Reason | None = None

    def advance(self) -> Reason | None:
        """Computes at least one token; says why the answer ends with the last, if it does."""
        request = self._request
        for token in self._ids[self._lookup.num_tokens :]:
            self._lookup.add(token)
        room = len(request.ids) + request.max_new_tokens - len(self._ids)
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
        self._reason = self._take(logits)
        return self._ids[-1], self._reason is not None
