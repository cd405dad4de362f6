"""An engine without a model: it counts, as fast or slowly as a test wants."""

from __future__ import annotations

import threading
from collections import Counter
from time import sleep

from transformers import PreTrainedTokenizerBase

from hybrid_kv.errors import QueueFullError
from hybrid_kv.serve import (
    EngineStats,
    Finished,
    Limits,
    Prefilled,
    Request,
    RequestHandle,
    RequestReport,
    Token,
    Usage,
)
from hybrid_kv.watch.token_errors import TokenError


class FakeEngine:
    """Answers each request in a thread of its own: the prompt's tokens again, from the first.

    Args:
        pace_s: of a token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, limits: Limits | None = None, pace_s: float = 0.0
    ) -> None:
        self.limits, self.tokenizer = limits or Limits(), tokenizer
        self._lock = threading.Lock()
        self.running = 0
        self.forget()
        self.pace_s = pace_s

    def forget(self) -> None:
        """Is as new."""
        self.pace_s = 0.0
        self.holds = False  # every token back
        self.seen: list[Request] = []
        self.ended: Counter[str] = Counter()
        self.fails: Exception | None = None
        self.times_out_at: int | None = None  # tokens
        self.places = [(1, 0.5), (3, 0.25)]
        self.errors = [TokenError.of(0.0, 0.0, 0.0)]
        self._tickets: list[RequestHandle] = []

    def submit(self, request: Request) -> RequestHandle:
        with self._lock:
            if self.running >= self.limits.max_running + self.limits.max_queue:
                raise QueueFullError("the queue is full; ask again later", 1.5)
            if self.fails is not None:
                raise self.fails
            self.running += 1
            self.seen.append(request)
        ticket = RequestHandle(request)
        self._tickets.append(ticket)
        threading.Thread(target=self._answer, args=(ticket,), daemon=True).start()
        return ticket

    def _answer(self, ticket: RequestHandle) -> None:
        request, made = ticket.request, 0
        total = len(request.ids)
        ticket.put(Prefilled(total // 2, total))
        ticket.put(Prefilled(total, total))
        reason = "length"
        for number in range(request.max_new_tokens):
            sleep(self.pace_s)
            while self.holds and not ticket.is_cancelled:
                sleep(0.01)
            if ticket.is_cancelled:
                reason = "cancelled"
                break
            if number == self.times_out_at:
                reason = "timeout"
                break
            idx = request.ids[number % total]
            if idx in request.end_ids:
                reason = "stop"
                break
            known = request.sampling.logprobs is not None
            top = tuple((idx + k, -1.0 - k) for k in range(request.sampling.logprobs or 0))
            text = self.tokenizer.decode([idx])
            error = self.errors[number % len(self.errors)] if request.errors else None
            ticket.put(Token(idx, text, -1.0 if known else None, top, error))
            made += 1
        with self._lock:
            self.running -= 1
            self.ended[reason] += 1
        report = RequestReport(
            ttft_s=0.01,
            itl_ms=[2.0] * max(0, made - 1),
            attended_per_token=12.5,
            recall=0.99 if request.audit_every else None,
            places=self.places if request.places else [],
        )
        ticket.put(Finished(reason, Usage(total, made, min(2, total)), report=report))  # type: ignore[arg-type]

    def stats(self) -> EngineStats:
        return EngineStats(running=self.running, finished=dict(self.ended), recall=0.99)

    def drain(self, seconds: float) -> None:
        left = seconds
        while self.running and left > 0:
            sleep(0.02)
            left -= 0.02
        for ticket in self._tickets:
            ticket.cancel()
        while self.running:
            sleep(0.01)
