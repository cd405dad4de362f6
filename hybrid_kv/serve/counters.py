"""Counters of an engine, from which its metrics are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from hybrid_kv.serve.requests import EngineStats, Finished
from hybrid_kv.serve.running import RunningRequest
from hybrid_kv.store.tiers import TierBytes

_SHARE = 0.2
"""Of a new request's time in the mean of all."""


class EngineCounters:
    """Counters that only grow, and a few means."""

    def __init__(self) -> None:
        self._finished: Counter[str] = Counter()
        self._alone: Counter[str] = Counter()
        self._prompt = self._reused = self._completion = self._hits = 0
        self._steps = self._rows = 0
        self._stall_ms = self._last_stall_ms = 0.0
        self._stalls = self._late_stalls = 0
        self._recalls, self._missed = list[float](), list[float]()
        self._mass_errors = list[float]()
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
        if report.recall is not None:
            self._recalls.append(report.recall)
        if report.missed_mass is not None:
            self._missed.append(report.missed_mass)
        if report.mass_error is not None:
            self._mass_errors.append(report.mass_error)
        old = seconds if self._served_s is None else self._served_s
        self._served_s = (1 - _SHARE) * old + _SHARE * seconds

    def step(self, rows: int) -> None:
        """A decode step of so many requests."""
        self._steps += 1
        self._rows += rows

    def stall(self, seconds: float, bound: float) -> None:
        """So long a stream waited while a prompt was computed, which should be within a bound."""
        self._stalls += 1
        self._late_stalls += seconds > bound
        self._last_stall_ms = 1e3 * seconds
        self._stall_ms = max(self._stall_ms, self._last_stall_ms)

    def retry_after_s(self, slots: int) -> float:
        """When one of so many slots is likely to be free."""
        return max(1.0, (self._served_s or 0.0) / slots)

    def stats(
        self, queued: int, runs: Sequence[RunningRequest], chunk_tokens: int, held: TierBytes
    ) -> EngineStats:
        """Everything at once."""
        return EngineStats(
            queued=queued,
            prefilling=sum(not run.is_prefilled for run in runs),
            running=sum(run.is_prefilled for run in runs),
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
            recall=fmean(self._recalls) if self._recalls else None,
            missed_mass=fmean(self._missed) if self._missed else None,
            mass_error=fmean(self._mass_errors) if self._mass_errors else None,
            device_kv_bytes=held.device_kv,
            host_kv_bytes=held.host_kv,
            host_index_bytes=held.host_index,
        )
