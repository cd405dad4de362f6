"""An engine in front of replicas, one on each node of a Ray cluster.

    request ─► router ─► replica that knows its prefix, or has least to do ─► events ─► handle
                 ▲                                                             │
                 └── its replica is lost: the same request to another one ◄────┘

An answer that had begun is generated again, and what was sent of it is left out: each request has a
seed. Where another replica says something else meanwhile, the answer ends with an error.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from time import monotonic

from hybrid_kv.errors import BusyError, HybridKVError
from hybrid_kv.ray.cluster import NodeLostError, NodeWorker
from hybrid_kv.ray.replica import ReplicaSpec
from hybrid_kv.ray.replicas import Replicas
from hybrid_kv.serve import (
    EngineStats,
    Finished,
    Happening,
    Prefilled,
    Request,
    RequestHandle,
    ShutdownResult,
    Token,
    Usage,
)

_log = logging.getLogger(__name__)

_MOST_LOST = 2
"""Replicas that one request may lose: it may be what ends them."""


@dataclass(slots=True, eq=False)
class _RoutedRequest:
    """A request in work.

    sent: tokens that its reader has. lost: replicas that ended meanwhile. replica: that answers
    now.
    """

    number: int
    request: Request
    replica: NodeWorker
    sent: list[int] = field(default_factory=list)
    lost: int = 0


class ReplicaEngine:
    """Serves requests by replicas until it is closed; a context manager.

    limits: of each replica. model: that all of them serve, without its weights.

    Args:
        address: see `connected`.
        tell: called with a sentence on what happens to a replica.

    Raises:
        ConfigError, OtherContextError: as `Replicas`.
    """

    def __init__(
        self, address: str, spec: ReplicaSpec, tell: Callable[[str], None] = lambda sentence: None
    ) -> None:
        self.limits, self._numbers = spec.limits, count()
        self._changed = threading.Condition()
        self._open: dict[RequestHandle, _RoutedRequest] = {}
        self._is_ending = False
        self._replicas = Replicas(address, spec, tell)
        self.model = self._replicas.model

    def submit(self, request: Request) -> RequestHandle:
        """Gives a request to a replica; its events come through the handle.

        What a replica refuses comes as the end of the answer.

        Raises:
            QueueFullError: too many wait already.
            BusyError: the engine is ending, or no replica is there.
        """
        sampling = request.sampling
        if sampling.temperature > 0 and sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        with self._changed:
            if self._is_ending:
                raise BusyError("the engine is ending and takes no new requests; ask another one")
            replica = self._replicas.take(request.ids)
            answer = _RoutedRequest(
                next(self._numbers), replace(request, sampling=sampling), replica
            )
            handle = RequestHandle(request, lambda: self._cancel(answer))
            self._open[handle] = answer
        given = (request.timeout_s, self.limits.request_timeout_s)
        seconds = min((limit for limit in given if limit is not None), default=None)
        handle.deadline = None if seconds is None else monotonic() + seconds
        threading.Thread(target=self._follow, args=(handle, answer), daemon=True).start()
        return handle

    def stats(self) -> EngineStats:
        """Figures of all replicas together."""
        return self._replicas.stats

    def drain(self, seconds: float) -> ShutdownResult:
        """Takes no more requests; those there are get so long, then they are cancelled."""
        with self._changed:
            self._is_ending, before = True, len(self._open)
            self._changed.wait_for(lambda: not self._open, max(0.0, seconds))
            left = list(self._open)
        for handle in left:
            handle.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._open)
        return ShutdownResult(before - len(left), len(left))

    def close(self) -> None:
        """Cancels what there is, ends the replicas and leaves the cluster."""
        self.drain(0)
        self._replicas.close()

    def __enter__(self) -> ReplicaEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # One request, in a thread of its own ---------------------------------------------------------

    def _follow(self, handle: RequestHandle, answer: _RoutedRequest) -> None:
        """Hands on the events of a request, whichever replica they come from."""
        try:
            end = self._answered(handle, answer)
        except Exception as error:
            usage = Usage(len(answer.request.ids), len(answer.sent))
            if not isinstance(error, HybridKVError):
                _log.exception("a request failed")
                error = HybridKVError("an unexpected error ended the request; the log has it")
            end = Finished("error", usage, error)
        handle.put(end)
        with self._changed:
            del self._open[handle]
            self._changed.notify_all()

    def _answered(self, handle: RequestHandle, answer: _RoutedRequest) -> Finished:
        while True:
            try:
                return self._events(handle, answer)
            except NodeLostError as error:
                self._replicas.lose(answer.replica, error)
                answer.lost += 1
                if answer.lost == _MOST_LOST:
                    raise BusyError(
                        f"{_MOST_LOST} replicas ended while they answered; ask again later, or "
                        "for less"
                    ) from error
            finally:
                self._replicas.release(answer.replica)
            if (reason := handle.early_end) is not None:
                return Finished(reason, Usage(len(answer.request.ids), len(answer.sent)))
            answer.replica = self._replicas.take(answer.request.ids)

    def _events(self, handle: RequestHandle, answer: _RoutedRequest) -> Finished:
        """Hands on what a replica says, but for what the reader has; returns the end.

        Raises:
            NodeLostError: the replica has ended.
            BusyError: it says something else than the one before.
            HybridKVError: it refuses the request.
        """
        request, replica, place = answer.request, answer.replica, 0
        grammar = None if request.grammar is None else request.grammar.text
        left = None if handle.deadline is None else max(0.0, handle.deadline - monotonic())
        plain = replace(request, grammar=None, timeout_s=left)
        for reference in replica.stream("answer", answer.number, plain, grammar):
            event: Happening = replica.result(reference)
            if handle.is_cancelled:  # perhaps before the replica knew the request
                self._cancel(answer)
            if isinstance(event, Finished):
                return event
            if isinstance(event, Prefilled) and not answer.sent:
                handle.put(event)
            elif isinstance(event, Token):
                place += 1
                if place > len(answer.sent):
                    answer.sent.append(event.id)
                    handle.put(event)
                elif event.id != answer.sent[place - 1]:
                    self._cancel(answer)
                    raise BusyError(
                        f"the replica of this answer was lost after {len(answer.sent)} tokens, and "
                        f"another one goes on otherwise from token {place}; ask again"
                    )
        raise NodeLostError(f"node {replica.node.name} has left")

    def _cancel(self, answer: _RoutedRequest) -> None:
        answer.replica.call("cancel", answer.number)
