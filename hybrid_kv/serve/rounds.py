"""What the engine's thread does again and again.

A round admits what fits, ends what shall end early, computes one piece of the oldest prompt, as
large as the streams of others can bear, and then one token of every answer, all in one pass through
the weights.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.api.llm import LLM
from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import CapacityError, HybridKVError
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.joined import JoinedCache, why_alone
from hybrid_kv.runtime import check_host_memory, memory_errors, spare_host_memory
from hybrid_kv.saved.registry import ContextRegistry, keeps_all
from hybrid_kv.serve.active import ActiveRequest
from hybrid_kv.serve.pace import PrefillPace
from hybrid_kv.serve.prefixes import KeptPrefixes, Prefix
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
        contexts: saved ones, with which prompts may begin, and where new ones are left.
        on_end: called with the ticket of each request that has ended.
    """

    def __init__(
        self,
        llm: LLM,
        limits: Limits,
        contexts: ContextRegistry | None,
        on_end: Callable[[Ticket], None],
    ) -> None:
        self._llm, self._limits, self._on_end = llm, limits, on_end
        self._contexts, self._prefixes = contexts, KeptPrefixes(limits.prefix_bytes)
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
            while self._prefixes and needed > self._spare_bytes():
                self._prefixes.drop_oldest()
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
            return
        if first is not None:
            twins = self._begin_twins(run)
            for one in (run, *twins):
                self._take(one, first)

    def _time_for_a_piece(self) -> float:
        if not any(run.is_ready for run in self.runs):
            return _UNDISTURBED_S
        return max(0.0, self._limits.max_stall_ms / 1e3 - self._step_s)

    def _begin(self, run: ActiveRequest) -> None:
        total = len(run.request.ids) + run.request.max_new_tokens
        config, ids = config_of(self._llm, run.request), run.request.ids
        going_on = (Prefix.of(one.cache, one.ids) for one in self._continuable())
        found = self._prefixes.best(ids, config, going_on)
        if found is None:
            while self._prefixes and run.needed_bytes > self._spare_bytes():
                self._prefixes.drop_oldest()
            check_host_memory(run.needed_bytes, total)
            found = self._opened(ids, config)
        cache, reused = found
        if cache.kv.config.audit_every != config.audit_every:
            cache.kv.look_every(config.audit_every)
        run.begin(cache, reused)

    def _continuable(self) -> Iterator[ActiveRequest]:
        """Requests that decode and have lost nothing of their prompts."""
        return (run for run in self.runs if run.is_ready and keeps_all(run.cache))

    def _opened(self, ids: Sequence[int], config: HybridConfig) -> tuple[TieredCache, int]:
        """A new cache with what a saved context has of ids, but for the last one."""
        cache, device = self._llm.runtime.cache(config), self._llm.runtime.device
        if self._contexts is None or len(ids) < 2:
            return cache, 0
        return cache, self._contexts.take(cache, torch.tensor([ids[:-1]]), self._llm, device)

    def _begin_twins(self, run: ActiveRequest) -> list[ActiveRequest]:
        """Requests for the same, which have not begun: they go on from where this one stands."""
        config, twins = config_of(self._llm, run.request), []
        for twin in [one for one in self.runs if not one.has_begun]:
            asked = twin.request
            if asked.ids == run.request.ids and config_of(self._llm, asked) == config:
                try:
                    with memory_errors(lambda: "prefill"):
                        twin.begin(run.cache.fork(), len(asked.ids))
                        twin.seal(math.inf)
                except Exception as error:
                    self._end(twin, "error", error)
                else:
                    twins.append(twin)
        return twins

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
        if error is not None or not run.is_ready or not self._prefixes.keep(run.cache, run.ids):
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
        caches = [run.cache for run in self.runs if run.has_begun] + self._prefixes.caches
        held = tier_bytes(store for cache in caches for store in cache.kv.stores.values())
        stats = self.tally.stats(queued, self.runs, self.chunk_tokens, held)
        kept = sum(self._prefixes.held())
        return replace(stats, prefixes=len(self._prefixes), prefix_bytes=kept)

    def save_some(self) -> bool:
        """Leaves one context of an ended request in the registry; False where there is none.

        For when nobody waits: it takes as long as the disk does.
        """
        if self._contexts is None or (prefix := self._prefixes.unsaved()) is None:
            return False
        ids = torch.from_numpy(prefix.ids)[None]
        self._contexts.add(prefix.cache, ids, self._llm)
        return True

    def close(self) -> None:
        """Gives back what is kept for later requests."""
        self._prefixes.close()


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
