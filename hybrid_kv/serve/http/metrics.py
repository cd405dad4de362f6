"""Records of requests: the metrics of /metrics in Prometheus' text form, and a log line each.

The log says nothing of what was asked or answered, but how much of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from time import perf_counter
from types import TracebackType

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from hybrid_kv.serve.requests import EngineStats, Finished, Usage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SHARES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.9, 0.95, 0.98, 0.99, 0.999, 1)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Histograms over the answers that were read to their end, and the engine's own figures."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._registry = own = CollectorRegistry()
        own.register(_EngineFigures(stats))
        self._ttft = Histogram(
            "hybrid_kv_ttft_seconds", "Time to the first token", buckets=_SECONDS, registry=own
        )
        self._itl = Histogram(
            "hybrid_kv_itl_seconds", "Time between tokens", buckets=_SECONDS, registry=own
        )
        self._queued = Histogram(
            "hybrid_kv_queue_seconds", "Time in the queue", buckets=_SECONDS, registry=own
        )
        self._recall = Histogram(
            "hybrid_kv_audit_recall", "Recall of audited requests", buckets=_SHARES, registry=own
        )
        self._missed = Histogram(
            "hybrid_kv_audit_missed_mass",
            "Softmax mass that no exact attention of audited requests read",
            buckets=_SHARES,
            registry=own,
        )
        self._lost = Histogram(
            "hybrid_kv_prefill_error",
            "Relative error of attention in block-sparse prefill",
            buckets=_SHARES,
            registry=own,
        )
        self._answers = Counter(
            "hybrid_kv_http_responses", "Responses by status", ["status"], registry=own
        )

    def ended(self, end: Finished) -> None:
        """Takes in an answer."""
        report = end.report
        if report.ttft_s is not None:
            self._ttft.observe(report.ttft_s)
        self._queued.observe(report.queue_s)
        for each in report.itl_ms:
            self._itl.observe(each / 1e3)
        if report.recall is not None:
            self._recall.observe(report.recall)
        if report.missed_mass is not None:
            self._missed.observe(report.missed_mass)
        if report.prefill_error is not None:
            self._lost.observe(report.prefill_error)

    def responded(self, status: int) -> None:
        """Takes in a response of any kind."""
        self._answers.labels(status=str(status)).inc()

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)


class _EngineFigures(Collector):
    """The engine's figures as they are when somebody looks."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield from ()  # registering asks the engine nothing

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._stats()
        requests = GaugeMetricFamily(
            "hybrid_kv_requests", "Requests of the engine now", labels=["state"]
        )
        for state in ("queued", "prefilling", "running"):
            requests.add_metric([state], getattr(stats, state))
        yield requests
        ended = CounterMetricFamily(
            "hybrid_kv_requests_ended", "Requests that ended", labels=["reason"]
        )
        for reason, number in stats.finished.items():
            ended.add_metric([reason], number)
        yield ended
        tokens = CounterMetricFamily("hybrid_kv_tokens", "Tokens of requests", labels=["kind"])
        for kind in ("prompt", "reused", "completion"):
            tokens.add_metric([kind], getattr(stats, f"{kind}_tokens"))
        yield tokens
        memory = GaugeMetricFamily("hybrid_kv_memory_bytes", "Memory by tier", labels=["tier"])
        for tier in ("device_kv", "host_kv", "host_index"):
            memory.add_metric([tier], getattr(stats, f"{tier}_bytes"))
        yield memory
        for name, text, number in (
            ("prefix_hits", "Requests that continued from a kept prefix", stats.prefix_hits),
            ("decode_steps", "Decode steps", stats.steps),
            ("decode_rows", "Requests that decode steps served, summed", stats.joined_rows),
            ("stalls", "Waits of a stream for a prompt", stats.stalls),
            ("late_stalls", "Such waits beyond the bound", stats.late_stalls),
        ):
            yield CounterMetricFamily(f"hybrid_kv_{name}", text, value=number)
        for name, text, value in (
            ("prefixes", "Prefixes that are kept", stats.prefixes),
            ("prefix_bytes", "Bytes of prefixes that are kept", stats.prefix_bytes),
            ("stall_seconds", "Longest wait of a stream for a prompt", stats.stall_ms / 1e3),
            ("last_stall_seconds", "Latest such wait", stats.last_stall_ms / 1e3),
            ("stall_bound_seconds", "Bound of such waits", stats.stall_bound_ms / 1e3),
        ):
            yield GaugeMetricFamily(f"hybrid_kv_{name}", text, value=value)
        for name, text, mean in (
            ("recall_mean", "Mean recall over the audits", stats.recall),
            ("missed_mass_mean", "Mean missed mass over the audits", stats.missed_mass),
            ("mass_error_mean", "Mean signed error of the mass over the audits", stats.mass_error),
        ):
            if mean is not None:
                yield GaugeMetricFamily(f"hybrid_kv_{name}", text, value=mean)


# Log ---------------------------------------------------------------------------------------------

log = logging.getLogger("hybrid_kv.serve.requests")
"""Its records have `facts`: method, path, status, prompt_tokens, completion_tokens, seconds."""

_current: ContextVar[RequestLine | None] = ContextVar("line of the request", default=None)


class RequestLine:
    """Logs a request of HTTP at its end; a context manager around all that is done for it.

    status: of the response; 0 while there is none.
    """

    def __init__(self, method: str, path: str) -> None:
        self._method, self._path, self._begin = method, path, perf_counter()
        self._prompt = self._completion = self.status = 0

    def add(self, usage: Usage) -> None:
        """Tokens of one of its answers."""
        self._prompt += usage.prompt_tokens
        self._completion += usage.completion_tokens

    def __enter__(self) -> RequestLine:
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        _current.reset(self._token)
        facts = {
            "method": self._method,
            "path": self._path,
            "status": self.status,
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "seconds": round(perf_counter() - self._begin, 3),
        }
        path = json.dumps(self._path)[1:-1]  # a client chooses it: no line of its own
        log.info(
            "%s %s %d, %d + %d tokens, %.3f s",
            *(self._method, path, self.status, self._prompt, self._completion, facts["seconds"]),
            extra={"facts": facts},
        )


def answered(usage: Usage) -> None:
    """An answer of the request that is in work here has come to its end."""
    if (line := _current.get()) is not None:
        line.add(usage)
