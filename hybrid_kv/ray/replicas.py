"""Replicas of a model, one on each node of a Ray cluster: started, watched and chosen among."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import HybridKVError
from hybrid_kv.ray.cluster import (
    ClusterNode,
    NodeFacts,
    NodeLostError,
    NodeWorker,
    agreed,
    alive_nodes,
    connected,
    name_waiting,
)
from hybrid_kv.ray.replica import LoadedReplica, Replica, ReplicaSpec
from hybrid_kv.ray.routing import Router
from hybrid_kv.report import probe_environment
from hybrid_kv.serve import EngineStats

_log = logging.getLogger(__name__)

_LOOK_S = 2.0
"""From one look at nodes and figures to the next."""
_MOST_ENDED = 2
"""Replicas of a node that may end while they load."""
_MORE_THREADS = 4
"""Of a replica, beside those of its requests: for figures and cancelling."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model whose weights only its replicas have; see `ServedModel`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: HybridConfig

    @classmethod
    def of(cls, loaded: LoadedReplica) -> RemoteModel:
        """The model without its weights."""
        with torch.device("meta"):
            model = loaded.kind(loaded.config)
        model.generation_config = loaded.generation
        return cls(model, loaded.tokenizer, loaded.settings)

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.tokenizer


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
        workers = [self._worker(node) for node in nodes]
        asked = {worker: worker.call("facts") for worker in workers}
        name_waiting(asked, self._tell)
        versions = {worker: worker.result(reference) for worker, reference in asked.items()}
        agreed(versions, probe_environment().versions)
        loading = {worker: worker.call("load", self._spec) for worker in workers}
        loaded: dict[NodeWorker, LoadedReplica] = {
            worker: worker.result(reference) for worker, reference in loading.items()
        }
        facts = agreed({worker: one.facts for worker, one in loaded.items()}, {})
        for worker in workers:
            self._router.add(worker)
        return facts, RemoteModel.of(next(iter(loaded.values())))

    def _worker(self, node: ClusterNode) -> NodeWorker:
        on_gpu = self._spec.options.get("device") != "cpu"
        return NodeWorker(node, Replica, on_gpu=on_gpu, threads=self._most_open + _MORE_THREADS)

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
