"""What the engine's thread does again and again.

A round admits what fits, ends what shall end early, computes one piece of the oldest prompt, as
large as the streams of others can bear, and then one token of every answer, all in one pass through
the weights.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.api.llm import LLM
from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import CapacityError, HybridKVError
from hybrid_kv.models.joined import JoinedCache, why_alone
from hybrid_kv.runtime import check_host_memory, memory_errors, spare_host_memory
from hybrid_kv.serve.active import ActiveRequest
from hybrid_kv.serve.pace import PrefillPace
from hybrid_kv.serve.requests import (
    EngineStats,
    Finished,
    Limits,
    Reason,
    Request,
    RequestReport,
    Ticket,
    Usage,
)
from hybrid_kv.serve.tally import EngineTally
from hybrid_kv.store import tier_bytes

_log = logging.getLogger(__name__)

_UNDISTURBED_S = 2.0
"""What a piece of a prompt may take where nobody waits for a token; a cancellation waits for it."""


class Rounds:
    """The requests that were admitted, and what is done for them; for one thread.

    runs: in the order of their submission.

    Args:
        on_end: called with the ticket of each request that has ended.
    """

    def __init__(self, llm: LLM, limits: Limits, on_end: Callable[[Ticket], None]) -> None:
        self._llm, self._limits, self._on_end = llm, limits, on_end
        self._alone = why_alone(llm.model)
        self.runs: list[ActiveRequest] = []
        self.tally, self._pace = EngineTally(), PrefillPace()
        self._step_s = 0.0  # of the latest decode step
        self._held_up = False  # a prompt was computed since

    def round(self) -> None:
        """One round, for what has been admitted."""
        self._end_early()
        self._prefill()
        self._decode()

    # Admission -----------------------------------------------------------------------------------

    def admit(self, queue: deque[Ticket]) -> None:
        """Takes from the queue what there is a place and memory for, in its order."""
        for ticket in [ticket for ticket in queue if _early_end(ticket)]:
            queue.remove(ticket)
            self._finish(ticket, _early_end(ticket) or "cancelled")
        while queue and len(self.runs) < self._limits.max_running:
            ticket = queue[0]
            needed = needed_bytes(self._llm, ticket.request)
            if self.runs and needed > self._spare_bytes():
                return
            queue.popleft()
            self.runs.append(ActiveRequest(self._llm, ticket, needed))

    def _spare_bytes(self) -> int:
        """Of the host's free memory, what is not promised to requests that run."""
        return spare_host_memory(sum(run.needed_bytes - run.held_bytes for run in self.runs))

    def _end_early(self) -> None:
        for run in list(self.runs):
            if (reason := _early_end(run.ticket)) is not None:
                self._end(run, reason)

    # Prompts -------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """One piece of the oldest prompt, or of what follows it: its way to where it is read."""
        run = next((run for run in self.runs if not run.is_ready), None)
        if run is None:
            return
        begin, budget = monotonic(), self._time_for_a_piece()
        self._held_up = True
        try:
            with memory_errors(lambda: run.stage):
                if not run.has_begun:
                    self._begin(run)
                if not run.is_prefilled:
                    self._compute(run, budget)
                first = None
                if run.is_prefilled:
                    first = run.seal(budget - (monotonic() - begin))
        except Exception as error:
            self._end(run, "error", error)
        else:
            if first is not None:
                self._take(run, first)

    def _time_for_a_piece(self) -> float:
        if not any(run.is_ready for run in self.runs):
            return _UNDISTURBED_S
        return max(0.0, self._limits.max_stall_ms / 1e3 - self._step_s)

    def _begin(self, run: ActiveRequest) -> None:
        total = len(run.request.ids) + run.request.max_new_tokens
        check_host_memory(run.needed_bytes, total)
        run.begin(self._llm.runtime.cache(config_of(self._llm, run.request)), 0)

    def _compute(self, run: ActiveRequest, budget: float) -> None:
        left = len(run.request.ids) - run.done
        most = min(left, self._limits.prefill_chunk_tokens)
        count = self._pace.tokens(run.done, budget, most)
        begin = monotonic()
        run.compute(count)
        self._pace.note(run.done - count, count, monotonic() - begin)

    @property
    def chunk_tokens(self) -> int:
        """Of a new prompt's first piece, now."""
        most = self._limits.prefill_chunk_tokens
        return self._pace.tokens(0, self._time_for_a_piece(), most)

    # Answers -------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One token of every answer."""
        ready = [run for run in self.runs if run.is_ready]
        if not ready:
            return
        before, begin = [run.times[-1] for run in ready], monotonic()
        if self._alone or len(ready) == 1:
            for run in ready:
                self._step_alone(run)
        else:
            self._step_joined(ready)
        self._step_s = monotonic() - begin
        self.tally.step(len(ready))
        if self._held_up:
            self.tally.stall(monotonic() - min(before))
            self._held_up = False

    def _step_alone(self, run: ActiveRequest) -> None:
        try:
            with memory_errors(lambda: "decode"):
                logits = run.step()
        except Exception as error:
            self._end(run, "error", error)
        else:
            self._take(run, logits)

    def _step_joined(self, runs: list[ActiveRequest]) -> None:
        cache = JoinedCache([run.cache for run in runs])
        try:
            logits = self._forward(cache, [run.ids[-1] for run in runs])
        except Exception as error:  # of nobody's own cache: the rows are where they were
            _log.info("joined step of %d rows failed, taken one by one: %s", len(runs), error)
            for run in runs:
                self._step_alone(run)
            return
        for run, row, failed in zip(runs, logits, cache.errors, strict=True):
            if failed is None:
                self._take(run, row)
            else:
                self._end(run, "error", failed)

    def _forward(self, cache: JoinedCache, tokens: list[int]) -> Tensor:
        """Logits [B, V] after one more token of each row."""
        model, device = self._llm.model, self._llm.runtime.device
        call: Any = model
        output = call(
            torch.tensor(tokens, device=device)[:, None],
            position_ids=torch.tensor(cache.positions, device=device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _take(self, run: ActiveRequest, logits: Tensor) -> None:
        """The next token of an answer, with which it may end."""
        try:
            reason = run.take(logits)
        except Exception as error:
            self._end(run, "error", error)
        else:
            if reason is not None:
                self._end(run, reason)

    # Ends ----------------------------------------------------------------------------------------

    def _end(self, run: ActiveRequest, reason: Reason, error: Exception | None = None) -> None:
        """Hands out the last event of a request and lets go of what it holds."""
        self.runs.remove(run)
        if error is None and run.has_begun:
            try:
                run.settle()
            except Exception as late:
                reason, error = "error", late
        report, usage = run.report(self._alone), run.usage()
        run.close()
        self._finish(run.ticket, reason, usage, report, error)

    def _finish(
        self,
        ticket: Ticket,
        reason: Reason,
        usage: Usage | None = None,
        report: RequestReport | None = None,
        error: Exception | None = None,
    ) -> None:
        seconds = monotonic() - ticket.submitted
        usage = usage or Usage(len(ticket.request.ids))
        report = report or RequestReport(queue_s=seconds)
        event = Finished(reason, usage, None if error is None else as_ours(error), report)
        self.tally.end(event, seconds)
        ticket.put(event)
        self._on_end(ticket)

    def end_all(self, queued: Sequence[Ticket], error: Exception) -> None:
        """Ends every request with an error that none of them made."""
        for run in list(self.runs):
            self._end(run, "error", error)
        for ticket in queued:
            self._finish(ticket, "error", error=error)

    def stats(self, queued: int) -> EngineStats:
        """How things stand."""
        caches = [run.cache for run in self.runs if run.has_begun]
        held = tier_bytes(store for cache in caches for store in cache.kv.stores.values())
        return self.tally.stats(queued, self.runs, self.chunk_tokens, held)


def _early_end(ticket: Ticket) -> Reason | None:
    """Why a request shall end before its answer does."""
    if ticket.is_cancelled:
        return "cancelled"
    late = ticket.deadline is not None and monotonic() >= ticket.deadline
    return "timeout" if late else None


def config_of(llm: LLM, request: Request) -> HybridConfig:
    """Method, budgets and audit of a request."""
    config = request.config or llm.config
    if request.audit_every is None or request.audit_every == config.audit_every:
        return config
    return config.replace(audit_every=request.audit_every)


def needed_bytes(llm: LLM, request: Request) -> int:
    """Of host memory, for keys, values and indexes of the prompt and the longest answer."""
    total = len(request.ids) + request.max_new_tokens
    return total * llm.runtime.bytes_per_token((request.config or llm.config).build(), total)


def as_ours(error: Exception) -> HybridKVError:
    """An error for whoever asked; what nobody expected is logged and named."""
    if isinstance(error, HybridKVError):
        return error
    if isinstance(error, MemoryError):
        return CapacityError(f"memory ran out: {error}; shorten the prompt, or ask again later")
    _log.error("a request failed", exc_info=error)
    named = HybridKVError(f"the request failed: {type(error).__name__}: {error}; see the log")
    named.__cause__ = error
    return named
