"""The engine's front door: many threads ask, one serves."""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future
from time import monotonic
from typing import NamedTuple

import torch

from hybrid_kv.api.llm import LLM
from hybrid_kv.api.tokens import token_ids
from hybrid_kv.errors import BusyError, ConfigError, QueueFullError
from hybrid_kv.models.joined import why_alone
from hybrid_kv.saved.registry import ContextRegistry
from hybrid_kv.serve.output import check_verified
from hybrid_kv.serve.prefill_queue import config_of
from hybrid_kv.serve.requests import EngineStats, Limits, Request, RequestHandle
from hybrid_kv.serve.running import RequestMemory, check, needed_bytes
from hybrid_kv.serve.scheduler import Scheduler

_log = logging.getLogger(__name__)

_PUBLISH_S = 0.25
"""Age that the figures may have while requests run."""


class ShutdownResult(NamedTuple):
    """Requests that an ending engine still had, by how they ended."""

    finished: int
    cancelled: int


class Engine:
    """Serves requests to a model until it is closed; a context manager.

    One thread owns the model meanwhile: `llm.generate` raises BusyError. Everything here may be
    called from any thread.

    alone: why decode steps of this model are not joined; empty where they are.

    Args:
        contexts: saved ones, with which prompts may begin; new ones are left there when nobody
            waits.

    Raises:
        BusyError: the model generates in another thread.
        ConfigError: answers shall be reproducible, and contexts be continued.
    """

    def __init__(
        self,
        llm: LLM,
        limits: Limits | None = None,
        contexts: ContextRegistry | None = None,
    ) -> None:
        self._llm, self.limits = llm, limits or Limits()
        if self.limits.reproducible is not None and contexts is not None:
            raise ConfigError(
                "reproducible must go without saved contexts, got both: a prompt that continues "
                "one adds up in another order; leave one of them out"
            )
        self.alone = why_alone(llm.model)
        self._changed = threading.Condition()
        self._queue: deque[RequestHandle] = deque()
        self._open: set[RequestHandle] = set()  # queued or admitted, and not ended
        self._is_ending = self._is_closed = False
        self._rounds = Scheduler(llm, self.limits, contexts, self._ended)
        self._stats = EngineStats()
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="hybrid-kv-engine", daemon=True
        )
        self._thread.start()
        started.result()

    # For any thread ------------------------------------------------------------------------------

    def submit(self, request: Request) -> RequestHandle:
        """Queues a request; its events come through the ticket.

        Raises:
            ConfigError: it can never be served as it is.
            CapacityError: it does not fit into this machine's memory.
            QueueFullError: too many wait already.
            BusyError: the engine is ending.
        """
        self._check(request)
        ticket = RequestHandle(request, self._wake)
        given = (request.timeout_s, self.limits.request_timeout_s)
        seconds = min((limit for limit in given if limit is not None), default=None)
        ticket.deadline = None if seconds is None else monotonic() + seconds
        running, waiting = self.limits.max_running, self.limits.max_queue
        with self._changed:
            if self._is_ending:
                raise BusyError("the engine is ending and takes no new requests; ask another one")
            if len(self._open) >= running + waiting:
                raise QueueFullError(
                    f"at most {waiting} requests may wait while {running} run, got one more; try "
                    "again later",
                    self._rounds.tally.retry_after_s(running),
                )
            self._open.add(ticket)
            self._queue.append(ticket)
            self._changed.notify_all()
        return ticket

    def _check(self, request: Request) -> None:
        prompt, limit = len(request.ids), self.limits.max_prompt_tokens
        if limit is not None and prompt > limit:
            raise ConfigError(
                f"prompt must have at most {limit} tokens on this server, got {prompt}; shorten it"
            )
        token_ids(request.ids, self._llm.model)
        vocabulary = self._llm.model.config.get_text_config(decoder=True).vocab_size
        for token, _ in request.sampling.logit_bias:
            if token >= vocabulary:
                raise ConfigError(
                    f"logit_bias must have token ids 0..{vocabulary - 1}, got {token}; take the "
                    "model's own tokenizer"
                )
        total = prompt + request.max_new_tokens
        self._llm.runtime.check_context(total)
        if request.stop and self._llm.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer, and the model has none")
        if request.is_drafted or request.errors:
            cache = self._llm.runtime.cache(config_of(self._llm, request))
            try:
                check_verified(self._llm.model, cache, request)
            finally:
                cache.close()
        # What others hold now is free before this one would have to be refused.
        now = self._stats
        host = now.host_kv_bytes + now.host_index_bytes
        needed = needed_bytes(self._llm, request)
        on_host = not needed.device  # what computes on the host has its device tier there
        held = RequestMemory(host + on_host * now.device_kv_bytes, now.device_kv_bytes)
        check(self._llm, needed, held, total)

    def stats(self) -> EngineStats:
        """State of the engine, as it was a moment ago."""
        return self._stats

    def drain(self, seconds: float) -> ShutdownResult:
        """Takes no more requests, lets those there are finish for so long, then cancels the others.

        What is cancelled ends after the piece of work in progress.
        """
        with self._changed:
            self._is_ending, before = True, len(self._open)
            self._changed.wait_for(lambda: not self._open, max(0.0, seconds))
            left = list(self._open)
        for ticket in left:
            ticket.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._open)
        return ShutdownResult(before - len(left), len(left))

    def close(self) -> None:
        """Cancels what there is and gives the model back, after the piece of work in progress."""
        self.drain(0)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # The engine's thread -------------------------------------------------------------------------

    def _run(self, started: Future[None]) -> None:
        try:
            with self._llm.runtime.generating(), torch.inference_mode():
                self._llm.runtime.try_products()  # nobody waits yet
                started.set_result(None)
                try:
                    self._serve()
                except Exception as error:  # a bug of ours: nobody shall wait for ever
                    _log.exception("the engine failed")
                    self._fail(error)
                finally:
                    self._rounds.close()
        except Exception as error:
            if started.done():
                _log.exception("the engine failed as it ended")
            else:
                started.set_exception(error)

    def _serve(self) -> None:
        published = 0.0
        while True:
            if self._is_idle():
                self._publish()
                self._rounds.save_some(self._wake)
            with self._changed:
                self._changed.wait_for(
                    lambda: not self._is_idle() or self._is_closed or self._rounds.has_saved
                )
                if self._is_closed:
                    return
                self._rounds.admit(self._queue)
            if self._is_idle():
                continue
            self._rounds.round()
            if monotonic() - published >= _PUBLISH_S:
                self._publish()
                published = monotonic()

    def _is_idle(self) -> bool:
        return not self._queue and not self._rounds.runs

    def _publish(self) -> None:
        self._stats = self._rounds.stats(len(self._queue))

    def _ended(self, ticket: RequestHandle) -> None:
        with self._changed:
            self._open.discard(ticket)
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._is_ending = True
            queued, self._queue = list(self._queue), deque()
        self._rounds.end_all(queued, error)
