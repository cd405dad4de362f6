"""Replicas of a model, one on each node of a Ray cluster, and the engine in front of them.

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
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from itertools import count
from statistics import fmean
from time import monotonic
from typing import Any

from hybrid_kv.errors import BusyError, HybridKVError
from hybrid_kv.ray.cluster import (
    ClusterNode,
    NodeFacts,
    NodeLostError,
    NodeWorker,
    agreed,
    alive_nodes,
    answers,
    connected,
    name_waiting,
    trial_ends,
)
from hybrid_kv.ray.replica import LoadedReplica, RemoteModel, Replica, ReplicaSpec, Router
from hybrid_kv.report import probe_environment
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

_LOOK_S = 2.0
"""From one look at nodes and figures to the next."""
_MOST_ENDED = 2
"""Replicas of a node that may end while they load."""
_MORE_THREADS = 4
"""Of a replica, beside those of its requests: for figures and cancelling."""


class Replicas:
    """Replicas on all nodes of a cluster; they may be asked for by many threads.

    A node that joins gets a replica, and so does one whose replica has ended. model: that all of
    them serve. stats: figures of those that are there, as they were a moment ago.

    Args:
        address: see `connected`.
        tell: called with a sentence on what happens to a replica.

    Raises:
        ConfigError: the cluster cannot be reached, or a node has another version, model or
            tokenizer than the others.
        OtherContextError: the folder of contexts is for other replicas.
    """

    def __init__(self, address: str, spec: ReplicaSpec, tell: Callable[[str], None]) -> None:
        self._spec, self._tell = spec, tell
        self._most_open = spec.limits.max_running + spec.limits.max_queue
        self._lock = threading.Lock()
        self._router: Router[NodeWorker] = Router(spec.limits.max_running, self._most_open)
        self._loading: dict[NodeWorker, Any] = {}
        self._refused: set[str] = set()  # ids of nodes
        self._ended: Counter[str] = Counter()
        self.stats, self._closed = EngineStats(), threading.Event()
        self._resources = ExitStack()
        try:
            nodes = self._resources.enter_context(connected(address))
            self._trials = trial_ends()
            self._facts, self.model = self._start(nodes)
        except BaseException:
            self._resources.close()
            raise
        self._watching = threading.Thread(target=self._watch, name="hybrid-kv-replicas")
        self._watching.start()

    def take(self, ids: Sequence[int]) -> NodeWorker:
        """The replica for a prompt, as `Router.take`; `release` must follow."""
        with self._lock:
            return self._router.take(ids)

    def release(self, replica: NodeWorker) -> None:
        """A request that was given to a replica has ended."""
        with self._lock:
            self._router.release(replica)

    def lose(self, replica: NodeWorker, error: NodeLostError) -> None:
        """Ends a replica that does not answer; whoever sees it first says so."""
        with self._lock:
            is_news = replica in self._router
            self._router.remove(replica)
        if is_news:
            self._tell(f"{error}; its requests go to another")
            replica.end()

    def close(self) -> None:
        """Ends the replicas and leaves the cluster."""
        self._closed.set()
        self._watching.join()
        self._resources.close()

    def _start(self, nodes: Sequence[ClusterNode]) -> tuple[NodeFacts, RemoteModel]:
        """Loads all replicas; a node that leaves meanwhile is looked for again by `_watch`."""
        workers = [self._worker(node) for node in nodes]
        asked = {worker: worker.call("facts") for worker in workers}
        name_waiting(asked, self._tell)
        versions = answers(asked, self._tell)
        agreed(versions, probe_environment().versions)
        asked = {worker: worker.call("load", self._spec) for worker in versions}
        loaded: dict[NodeWorker, LoadedReplica] = answers(asked, self._tell)
        for worker in loaded:
            self._router.add(worker)
        facts = agreed({worker: one.facts for worker, one in loaded.items()}, {})
        return facts, RemoteModel.of(next(iter(loaded.values())))

    def _worker(self, node: ClusterNode) -> NodeWorker:
        on_gpu = self._spec.options.get("device") != "cpu"
        threads = self._most_open + _MORE_THREADS
        return NodeWorker(node, Replica, (self._trials,), on_gpu=on_gpu, threads=threads)

    def _watch(self) -> None:
        """Takes in new replicas and figures, until the engine is closed."""
        while not self._closed.wait(_LOOK_S):
            try:
                self._begin()
                self._take_in()
                self._look()
            except Exception:
                _log.exception("looking at the cluster failed")

    def _begin(self) -> None:
        """Starts a replica on each node that has none."""
        with self._lock:
            there = {worker.node.id for worker in (*self._router, *self._loading)}
        for node in alive_nodes():
            if node.id not in there | self._refused:
                worker = self._worker(node)
                self._loading[worker] = worker.call("load", self._spec)

    def _take_in(self) -> None:
        """Gives requests to replicas that have loaded, unless they are not like the others."""
        for worker, reference in list(self._loading.items()):
            if not worker.is_ready(reference):
                continue
            del self._loading[worker]
            try:
                loaded: LoadedReplica = worker.result(reference)
                agreed({worker: loaded.facts}, self._facts, "the other nodes have")
            except HybridKVError as error:
                self._ended[worker.node.id] += 1
                is_lost = isinstance(error, NodeLostError)  # perhaps a while before Ray knows
                if not is_lost or self._ended[worker.node.id] == _MOST_ENDED:
                    self._refused.add(worker.node.id)
                    self._tell(f"{error}; it gets no requests")
                worker.end()
            else:
                with self._lock:
                    self._router.add(worker)
                self._tell(f"node {worker.node.name} answers requests")

    def _look(self) -> None:
        with self._lock:
            asked = {worker: worker.call("stats") for worker in self._router}
        found: list[EngineStats] = []
        for worker, reference in asked.items():
            try:
                found.append(worker.result(reference))
            except NodeLostError as error:
                self.lose(worker, error)
        self.stats = summed(found)


_LARGEST = {"stall_ms", "last_stall_ms", "stall_bound_ms", "chunk_tokens"}
_MEANS = {"recall", "missed_mass", "mass_error"}


def summed(stats: Sequence[EngineStats]) -> EngineStats:
    """Figures of several engines together: sums, but the largest of waits and means of audits."""
    both: dict[str, Any] = {}
    for name in (one.name for one in fields(EngineStats)):
        values = [value for one in stats if (value := getattr(one, name)) is not None]
        if name in _MEANS:
            both[name] = fmean(values) if values else None
        elif name in _LARGEST:
            both[name] = max(values, default=0)
        elif values and isinstance(values[0], dict):
            both[name] = dict(sum(map(Counter, values), Counter()))
        elif values:
            both[name] = sum(values)
    return EngineStats(**both)


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
