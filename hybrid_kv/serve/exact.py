"""The answer of a request whose tokens are full attention's; see `models.exact_steps`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import Tensor

from hybrid_kv.models.exact_steps import ExactSteps, ExactWork, most_drafts_on, past_recorded
from hybrid_kv.serve.output import Sampler
from hybrid_kv.serve.requests import Reason

if TYPE_CHECKING:
    from hybrid_kv.api.llm import LLM
    from hybrid_kv.serve.running import RunningRequest


class ExactAnswer:
    """Drafts and takes the tokens of a running request, several in one round.

    work: what it took so far.
    """

    def __init__(self, llm: LLM, run: RunningRequest, sampler: Sampler) -> None:
        self._run, self._sampler, self.work = run, sampler, ExactWork()
        most = most_drafts_on(llm.runtime.device)
        self._steps = ExactSteps(llm.model, run.cache, most, self.work)
        self._reason: Reason | None = None

    def advance(self) -> Reason | None:
        """Computes at least one token; says why the answer ends with the last, if it does."""
        run = self._run
        with past_recorded(run.cache):
            self._steps.advance(run.ids[-1], run.request.max_new_tokens - len(run.times), self)
        return self._reason

    def drafting(self) -> AbstractContextManager[None]:
        return self._sampler.drafting()

    def draft(self, logits: Tensor, before: list[int]) -> tuple[int, bool]:
        token = self._sampler.choose(logits).id
        return token, token in self._run.request.end_ids

    def take(self, logits: Tensor) -> tuple[int, bool]:
        self._reason = self._run.take(logits)
        return self._run.ids[-1], self._reason is not None
