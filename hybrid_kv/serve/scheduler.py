"""Scheduler of the engine: admits requests, computes a chunk of one prompt, then one decode step.

The decode step of all running requests is one pass through the weights. Counters of all of it are
what the metrics are made from.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.api.llm import LLM
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.joined import JoinedCache, why_alone
from hybrid_kv.ops.native.linear import MAX_TOKENS
from hybrid_kv.runtime import memory_errors
from hybrid_kv.saved.registry import ContextRegistry
from hybrid_kv.serve.prefill_queue import KeptPrefixes, PrefillQueue
from hybrid_kv.serve.requests import (
    EngineStats,
    Finished,
    Limits,
    Reason,
    RequestHandle,
    RequestReport,
    Usage,
)
from hybrid_kv.serve.running import (
    RequestMemory,
    RunningRequest,
    as_ours,
    check,
    fits,
    needed_bytes,
)
from hybrid_kv.store.layer import TierBytes, tier_bytes

_log = logging.getLogger(__name__)

_UNDISTURBED_S = 0.5
"""Seconds of a chunk where nobody waits for a token; a cancellation waits for it."""
_LEAST_SHARE = 0.25
"""Of the time that streams may wait, for pieces of prompts where steps take nearly all of it."""
_LATEST = 8
"""Decode steps of which the longest is expected again."""
_ROWS = MAX_TOKENS
"""Of every decode step, where answers shall not depend on how many there are: as many as one pass
of the engine over 16-bit weights serves."""
_LOOK_S = 0.05
"""After which a cancellation is noticed where all is done aside."""


class Scheduler:
    """Admitted requests, and the steps that serve them; for one thread.

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
        on_end: Callable[[RequestHandle], None],
    ) -> None:
        self._llm, self._limits, self._on_end = llm, limits, on_end
        self._contexts = contexts
        self._prefixes = KeptPrefixes(0 if limits.reproducible else limits.prefix_bytes)
        self._alone = why_alone(llm.model)
        self.runs: list[RunningRequest] = []
        self._prompts = PrefillQueue(
            llm, limits, contexts, self._prefixes, self.runs, self._make_room
        )
        self._saving: tuple[Future[None], TieredCache] | None = None
        self.tally = EngineCounters()
        self._steps_s: deque[float] = deque(maxlen=_LATEST)  # of decode steps

    def round(self) -> None:
        """One round, for what has been admitted."""
        self._end_saving()
        self._end_early()
        self._decode(held_up=self._prefill())

    # Admission -----------------------------------------------------------------------------------

    def admit(self, queue: deque[RequestHandle]) -> None:
        """Takes from the queue what there is a place and memory for, in its order."""
        for ticket in [ticket for ticket in queue if ticket.early_end]:
            queue.remove(ticket)
            self._finish(ticket, ticket.early_end or "cancelled")
        while queue and len(self.runs) < self._limits.max_running:
            ticket = queue[0]
            needed = needed_bytes(self._llm, ticket.request)
            self._drop_prefixes(needed)
            if self.runs and not self._fits(needed):
                return
            queue.popleft()
            try:
                leader = self._prompts.leader(ticket.request)
                self.runs.append(RunningRequest(self._llm, ticket, needed, leader))
            except Exception as error:  # as where a device has no memory left
                self._finish(ticket, "error", error=error)

    def _fits(self, needed: RequestMemory) -> bool:
        return fits(self._llm, needed, [run.coming for run in self.runs])

    def _drop_prefixes(self, needed: RequestMemory) -> None:
        while self._prefixes and not self._fits(needed):
            self._prefixes.drop_oldest()

    def _make_room(self, run: RunningRequest) -> None:
        """Raises CapacityError where there is none for what the request will hold."""
        self._drop_prefixes(run.needed)
        total = len(run.request.ids) + run.request.max_new_tokens
        check(self._llm, run.needed, RequestMemory(0, 0), total)

    def _end_early(self) -> None:
        for run in list(self.runs):
            if (reason := run.ticket.early_end) is not None:
                self._end(run, reason)

    # Prompts -------------------------------------------------------------------------------------

    def _prefill(self) -> bool:
        """One piece of a prompt, and what has been done aside for others.

        Returns:
            Whether streams had to wait for it.
        """
        for back in [run for run in self.runs if run.work]:  # an answer may end others
            self._attempt(back, back.come_back)
        if (run := self._prompts.next()) is None:
            self._wait_for_others()
            return False
        seconds, alone, chosen = self._time_for_a_piece(), not self._streams, run
        self._attempt(run, lambda: self._prompts.advance(chosen, seconds, alone=alone))
        return not alone

    def _attempt(self, run: RunningRequest, work: Callable[[], object]) -> None:
        """Does what brings a prompt on; its answer begins when that was the last of it."""
        try:
            work()
        except Exception as error:
            self._end(run, "error", error)
        else:
            # Not what has been done aside by now: it comes back first, with its errors.
            if run.is_sealed and not run.is_ready and run.work is None:
                self._answer(run)

    def _answer(self, run: RunningRequest) -> None:
        """The first token of a request, and of those that ask for the same."""
        first, ready = run.first_logits(), [run]
        for twin in self._prompts.twins(run):
            try:
                with memory_errors(lambda: "prefill"):
                    twin.begin(run.cache.fork(), len(twin.request.ids))
                    twin.seal()
            except Exception as error:
                self._end(twin, "error", error)
            else:
                ready.append(twin)
        for one in ready:
            self._take(one, first)

    def _wait_for_others(self) -> None:
        """Waits where all there is to do is done aside."""
        if not self._streams and (works := [run.work for run in self.runs if run.work]):
            wait(works, _LOOK_S, FIRST_COMPLETED)

    @property
    def _streams(self) -> list[RunningRequest]:
        """Requests that wait for the next token."""
        return [run for run in self.runs if run.is_ready]

    def _time_for_a_piece(self) -> float:
        """Seconds, so that with it and the step no stream waits longer than it may; steps that take
        nearly all of it themselves leave a share, for else prompts would starve.
        """
        if not (streams := self._streams):
            return _UNDISTURBED_S
        most = self._limits.max_stall_ms / 1e3
        waited = monotonic() - min(run.times[-1] for run in streams)
        return max(_LEAST_SHARE * most, most - waited - max(self._steps_s, default=0.0))

    @property
    def chunk_tokens(self) -> int:
        """Of a new prompt's first piece, now."""
        most = self._limits.prefill_chunk_tokens
        seconds, alone = self._time_for_a_piece(), not self._streams
        return self._prompts.chunk_tokens(0, seconds, most, alone=alone)

    # Answers -------------------------------------------------------------------------------------

    def _decode(self, *, held_up: bool) -> None:
        """One token of every answer.

        Args:
            held_up: they had to wait for a prompt.
        """
        ready = self._streams
        if not ready:
            return
        before, begin = [run.times[-1] for run in ready], monotonic()
        for run in (run for run in ready if run.request.is_drafted):
            self._step_exact(run)
        plain = [run for run in ready if not run.request.is_drafted]
        if self._limits.reproducible and not self._alone:
            for first in range(0, len(plain), _ROWS):
                self._step_joined(plain[first : first + _ROWS])
        elif len(plain) < 2 or self._alone:
            for run in plain:
                self._step_alone(run)
        else:
            self._step_joined(plain)
        self._steps_s.append(monotonic() - begin)
        self.tally.step(len(ready))
        if held_up:
            self.tally.stall(monotonic() - min(before), self._limits.max_stall_ms / 1e3)

    def _step_alone(self, run: RunningRequest) -> None:
        try:
            with memory_errors(lambda: "decode"):
                logits = self._lone_logits(run)
        except Exception as error:
            self._end(run, "error", error)
        else:
            self._take(run, logits)

    def _step_exact(self, run: RunningRequest) -> None:
        """Some tokens of an answer that full attention verifies."""
        try:
            with memory_errors(lambda: "decode"):
                reason = run.advance_exactly()
        except Exception as error:
            self._end(run, "error", error)
        else:
            if reason is not None:
                self._end(run, reason)

    def _lone_logits(self, run: RunningRequest) -> Tensor:
        """[V] after one more token."""
        if self._alone or not self._limits.reproducible:
            return run.step()
        cache = self._joined([run])
        logits, (failed,) = self._forward(cache, run.ids[-1:]), cache.errors
        if failed is not None:
            raise failed
        return logits[0]

    def _joined(self, runs: list[RunningRequest]) -> JoinedCache:
        return JoinedCache(
            [run.cache for run in runs], _ROWS if self._limits.reproducible else None
        )

    def _step_joined(self, runs: list[RunningRequest]) -> None:
        cache = self._joined(runs)
        try:
            logits = self._forward(cache, [run.ids[-1] for run in runs])
        except Exception as error:  # of nobody's own cache: the rows are where they were
            _log.info("joined step of %d rows failed, taken one by one: %s", len(runs), error)
            for run in runs:
                run.forget_step()
                self._step_alone(run)
            return
        for run, row, failed in zip(runs, logits[: len(runs)], cache.errors, strict=True):
            if failed is None:
                self._take(run, row)
            else:
                self._end(run, "error", failed)

    def _forward(self, cache: JoinedCache, tokens: list[int]) -> Tensor:
        """Logits [B, V] after one more token of each row; those without a cache get token 0."""
        model, device = self._llm.model, self._llm.runtime.device
        tokens = tokens + [0] * (cache.num_rows - len(tokens))
        call: Any = model
        output = call(
            torch.tensor(tokens, device=device)[:, None],
            position_ids=torch.tensor(cache.positions, device=device),
            **passing(cache),
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _take(self, run: RunningRequest, logits: Tensor) -> None:
        """The next token of an answer, with which it may end."""
        try:
            reason = run.take(logits)
        except Exception as error:
            self._end(run, "error", error)
        else:
            if reason is not None:
                self._end(run, reason)

    # Ends ----------------------------------------------------------------------------------------

    def _end(self, run: RunningRequest, reason: Reason, error: Exception | None = None) -> None:
        """Hands out the last event of a request and lets go of what it holds."""
        self.runs.remove(run)
        report, is_kept = None, False
        try:
            if error is None and run.has_begun and not run.is_aside:
                run.settle()
        except Exception as late:
            reason, error = "error", late
        try:
            report = run.report(self._alone)
            is_kept = error is None and run.is_ready and self._prefixes.keep(run.cache, run.ids)
        except Exception as late:
            reason, error = "error", error or late
        if run.work is not None:
            run.abandon()
        elif not is_kept:
            run.close()
        self._finish(run.ticket, reason, run.usage(), report, error)

    def _finish(
        self,
        ticket: RequestHandle,
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

    def end_all(self, queued: Sequence[RequestHandle], error: Exception) -> None:
        """Ends every request with an error that none of them made."""
        for run in list(self.runs):
            self._end(run, "error", error)
        for ticket in queued:
            self._finish(ticket, "error", error=error)

    def stats(self, queued: int) -> EngineStats:
        """State of the scheduler; memory without that of prompts that another thread works on."""
        here = (run for run in self.runs if run.has_begun and not run.is_aside)
        caches = [run.cache for run in here] + self._prefixes.caches
        held = tier_bytes(store for cache in caches for store in cache.kv.stores.values())
        stats = self.tally.stats(queued, self.runs, self.chunk_tokens, held)
        kept = sum(self._prefixes.held())
        stats = replace(stats, prefixes=len(self._prefixes), prefix_bytes=kept)
        return replace(stats, stall_bound_ms=self._limits.max_stall_ms)

    def save_some(self, done: Callable[[], None]) -> None:
        """Begins to leave a context of an ended request in the registry, for when nobody waits.

        Args:
            done: called in another thread when it is time for the next one.
        """
        self._end_saving()
        if self._contexts is None or self._saving is not None:
            return
        if (prefix := self._prefixes.unsaved()) is not None:
            try:
                self._saving = self._prompts.save(prefix)
            except Exception:  # as where the copy does not fit
                _log.exception("a context could not be saved")
                return
            self._saving[0].add_done_callback(lambda _: done())

    def _end_saving(self) -> None:
        """Lets go of a context that has been saved; an error of that is no request's."""
        if not self.has_saved or self._saving is None:
            return
        (work, cache), self._saving = self._saving, None
        cache.close()
        if (error := work.exception()) is not None:
            _log.error("a context could not be saved", exc_info=error)

    @property
    def has_saved(self) -> bool:
        """Whether a context has been saved, and its copy is still there."""
        return self._saving is not None and self._saving[0].done()

    def close(self) -> None:
        """Gives back what is kept for later requests, after what is done aside."""
        self._prompts.close()
        if self._saving is not None:
            self._saving[1].close()
        self._prefixes.close()


# Counters ----------------------------------------------------------------------------------------

_SHARE = 0.2
"""Of a new request's time in the mean of all."""


class _Mean:
    """Mean of numbers as they come; None of none."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def add(self, number: float | None) -> None:
        """Takes a number; None is none."""
        if number is not None:
            self._count += 1
            before = self.value or 0.0
            self.value = before + (number - before) / self._count


class EngineCounters:
    """Counters that only grow, and a few means."""

    def __init__(self) -> None:
        self._finished: Counter[str] = Counter()
        self._alone: Counter[str] = Counter()
        self._prompt = self._reused = self._completion = self._hits = 0
        self._steps = self._rows = 0
        self._stall_ms = self._last_stall_ms = 0.0
        self._stalls = self._late_stalls = 0
        self._recall, self._missed, self._mass_error = _Mean(), _Mean(), _Mean()
        self._served_s: float | None = None

    def end(self, event: Finished, seconds: float) -> None:
        """A request has ended, so long after it was submitted."""
        usage, report = event.usage, event.report
        self._finished[event.reason] += 1
        self._prompt += usage.prompt_tokens
        self._reused += usage.reused_tokens
        self._completion += usage.completion_tokens
        self._hits += usage.reused_tokens > 0
        if report.alone:
            self._alone[report.alone] += 1
        self._recall.add(report.recall)
        self._missed.add(report.missed_mass)
        self._mass_error.add(report.mass_error)
        old = seconds if self._served_s is None else self._served_s
        self._served_s = (1 - _SHARE) * old + _SHARE * seconds

    def step(self, rows: int) -> None:
        """A decode step of so many requests."""
        self._steps += 1
        self._rows += rows

    def stall(self, seconds: float, bound: float) -> None:
        """Counts a stream's wait for the prompt of another, which should be within a bound."""
        self._stalls += 1
        self._late_stalls += seconds > bound
        self._last_stall_ms = 1e3 * seconds
        self._stall_ms = max(self._stall_ms, self._last_stall_ms)

    def retry_after_s(self, slots: int) -> float:
        """Seconds until one of so many slots is likely to be free."""
        return max(1.0, (self._served_s or 0.0) / slots)

    def stats(
        self, queued: int, runs: Sequence[RunningRequest], chunk_tokens: int, held: TierBytes
    ) -> EngineStats:
        """Everything at once."""
        return EngineStats(
            queued=queued,
            prefilling=sum(not run.is_ready for run in runs),
            running=sum(run.is_ready for run in runs),
            finished=dict(self._finished),
            prompt_tokens=self._prompt,
            reused_tokens=self._reused,
            completion_tokens=self._completion,
            prefix_hits=self._hits,
            stall_ms=self._stall_ms,
            last_stall_ms=self._last_stall_ms,
            stalls=self._stalls,
            late_stalls=self._late_stalls,
            chunk_tokens=chunk_tokens,
            steps=self._steps,
            joined_rows=self._rows,
            alone=dict(self._alone),
            recall=self._recall.value,
            missed_mass=self._missed.value,
            mass_error=self._mass_error.value,
            device_kv_bytes=held.device_kv,
            host_kv_bytes=held.host_kv,
            host_index_bytes=held.host_index,
        )
