"""An evaluation whose contexts are spread over the nodes of a Ray cluster.

    keys ─► contexts, the longest first ─► a free node ─► one prefill ─► its cells, one by one
                      ▲                                                     │
                      └───────── cells that a lost node still owed ◄────────┘

Of a folder's keys nothing is measured twice: cells come one by one, and are kept as they come.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from types import TracebackType
from typing import Any

import torch

from hybrid_kv.api import load
from hybrid_kv.config import HybridConfig
from hybrid_kv.contest.arguments import EvalArguments
from hybrid_kv.contest.evaluation import CellSource, Evaluation
from hybrid_kv.contest.folder import Key, key_of
from hybrid_kv.errors import HybridKVError
from hybrid_kv.ops.native.library import default_pool, engine
from hybrid_kv.plugin import load_plugin
from hybrid_kv.ray.cluster import (
    ClusterError,
    ClusterNode,
    NodeFacts,
    NodeLostError,
    NodeWorker,
    agree_with,
    agreed,
    alive_nodes,
    answers,
    connected,
    name_waiting,
    trial_ends,
)
from hybrid_kv.report import Environment, probe_environment
from hybrid_kv.report.evaluation import Cell, EvalRow
from hybrid_kv.report.run import environment_on
from hybrid_kv.saved.identity import model_identity

_LOOK_S = 2.0
"""From one look at nodes to the next."""
_MOST_ENDED = 2
"""Workers that one cell may end: it would take a cluster down node by node."""
_THREADS = "threads"
"""Name of a fact: sums of floats, and all times, depend on how many compute."""


@dataclass(slots=True)
class _Job:
    """A context in work: who measures it, what comes, and the keys that have not come yet."""

    worker: NodeWorker
    stream: Any
    lacking: list[Key]


class ClusterEvaluation(CellSource):
    """An evaluation on all nodes of a cluster; a context manager.

    A node computes a context once for all cells of it. Cells that a lost node owed are measured on
    another one, and nodes that come late take their part.

    machine: facts of `EvalArguments.on_machine`, which all nodes have in common.

    Args:
        address: see `connected`.
        plugins: modules that each node imports.
        tell: called with a sentence on what happens to a node.

    Raises:
        ConfigError: the cluster cannot be reached, or a node differs from this machine or the
            first node in what results depend on.
    """

    def __init__(
        self,
        address: str,
        asked: EvalArguments,
        plugins: Sequence[str] = (),
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._tell, self._open = tell, ExitStack()
        self._ended: Counter[Key] = Counter()
        self._on_gpu, self._looked = asked.device != "cpu", 0.0
        self._known: set[str] = set()
        self._joining: dict[NodeWorker, Any] = {}
        try:
            nodes = self._open.enter_context(connected(address))
            kept = asked.model_dump(mode="json"), os.getcwd(), list(plugins)
            self._given = trial_ends(), *kept
            self._workers = [self._worker(node) for node in nodes]
            own = probe_environment().versions
            self._facts = agreed(self._answers("facts"), own)
        except BaseException:
            self.close()
            raise
        apart = {*own, _THREADS}  # what a folder of results need not have in common
        self.machine = {name: value for name, value in self._facts.items() if name not in apart}

    def load(self) -> None:
        """Loads the model on all nodes.

        Raises:
            ConfigError: the model is another one on a node, or cannot be evaluated.
            ModelNotFoundError: a node does not have it.
        """
        loaded: dict[NodeWorker, LoadedEvaluation] = self._answers("load")
        weights: dict[NodeWorker, NodeFacts] = {
            worker: {"weights": one.weights} for worker, one in loaded.items()
        }
        self._facts = agreed(weights, self._facts)
        self._loaded = next(iter(loaded.values()))

    @property
    def num_nodes(self) -> int:
        """Nodes that are there."""
        return len(self._workers)

    @property
    def environment(self) -> Environment:
        """Environment of the first node."""
        return self._loaded.environment

    def wanted(self) -> list[Key]:
        return self._loaded.wanted

    def refused(self) -> list[EvalRow]:
        return self._loaded.refused

    def measure(self, keys: Collection[Key]) -> Iterator[Cell]:
        """Cells of these keys, as nodes measure them.

        Raises:
            ClusterError: no node is left, or a cell has ended two workers.
            HybridKVError: as `Evaluation.measure`.
        """
        import ray

        waiting, idle, jobs = _by_context(keys), deque(self._workers), list[_Job]()
        while waiting or jobs:
            if waiting:
                idle += self._joined()
            while waiting and idle:
                worker, context = idle.popleft(), waiting.popleft()
                jobs.append(_Job(worker, worker.stream("measure", context), context))
            awaited = [*(job.stream for job in jobs), *self._joining.values()]
            if not awaited:
                raise ClusterError(
                    "no node of the cluster is left; the results so far are kept: start nodes, and "
                    "run the same command again"
                )
            ready, _ = ray.wait(awaited, num_returns=1, timeout=_LOOK_S)
            job = next((job for job in jobs if job.stream in ready), None)
            if job is None:
                continue
            try:
                cell: Cell = job.worker.result(next(job.stream))
            except StopIteration:
                jobs.remove(job)
                idle.append(job.worker)
            except NodeLostError as error:
                jobs.remove(job)
                self._workers.remove(job.worker)
                if job.lacking:
                    self._count(job.lacking[0], error)
                    waiting.appendleft(job.lacking)
                self._tell(f"{error}; {len(job.lacking)} cells that it owed go to another")
            else:
                job.lacking.remove(key_of(cell))
                yield cell

    def _count(self, key: Key, error: NodeLostError) -> None:
        """Raises ClusterError where a cell has ended too many workers."""
        self._ended[key] += 1
        if self._ended[key] < _MOST_ENDED:
            return
        task, context, sample, _, method, budget = key
        name = method if budget is None else f"{method} at {budget}"
        raise ClusterError(
            f"{name} on {task} at {context} tokens, context {sample + 1}, ended {_MOST_ENDED} "
            "workers, perhaps for want of memory; the other results are kept: run again without "
            "it, or on larger nodes"
        ) from error

    def _answers(self, method: str) -> dict[NodeWorker, Any]:
        """Answer of every node that is still there; nodes that leave meanwhile are left out."""
        asked = {worker: worker.call(method) for worker in self._workers}
        if method == "facts":  # for which a node is needed, and little time
            name_waiting(asked, self._tell)
        found = answers(asked, self._tell)
        self._workers = list(found)
        return found

    def _worker(self, node: ClusterNode) -> NodeWorker:
        self._known.add(node.id)
        return NodeWorker(node, EvalWorker, self._given, on_gpu=self._on_gpu)

    def _joined(self) -> list[NodeWorker]:
        """Nodes that came late and have loaded the model; asks those to that have come now."""
        if monotonic() - self._looked > _LOOK_S:
            self._looked = monotonic()
            workers = [self._worker(node) for node in alive_nodes() if node.id not in self._known]
            self._joining |= {worker: worker.call("join") for worker in workers}
        found = [one for one, joined in self._joining.items() if one.is_ready(joined)]
        for worker in found.copy():
            try:
                facts: NodeFacts = worker.result(self._joining.pop(worker))
                agreed({worker: facts}, self._facts, "the other nodes have")
            except HybridKVError as error:
                found.remove(worker)
                worker.end()
                self._tell(f"{error}; it measures nothing")
            else:
                self._workers.append(worker)
                self._tell(f"node {worker.node.name} measures too")
        return found

    def close(self) -> None:
        """Ends the workers and leaves the cluster."""
        self._open.close()

    def __enter__(self) -> ClusterEvaluation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _by_context(keys: Collection[Key]) -> deque[list[Key]]:
    """Keys of each context together, the longest contexts first: a short one ends a run better."""
    contexts: dict[tuple[str, int, int], list[Key]] = {}
    for key in keys:
        contexts.setdefault(key[:3], []).append(key)
    return deque(sorted(contexts.values(), key=lambda context: -context[0][1]))


# The cells that one node measures -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadedEvaluation:
    """An evaluation as a node has it; weights: their hash."""

    wanted: list[Key]
    refused: list[EvalRow]
    environment: Environment
    weights: str


class EvalWorker:
    """An actor of Ray: loads the model once, and measures the cells that it is given.

    Args:
        ends: of `trial_ends`.
        arguments: of the evaluation.
        folder: that relative paths begin at, where the node has it.
        plugins: modules that register methods, indexes or tasks.
    """

    def __init__(
        self, ends: Any, arguments: Mapping[str, Any], folder: str, plugins: Sequence[str]
    ) -> None:
        agree_with(ends)
        self._arguments, self._plugins = arguments, plugins
        with suppress(OSError):  # a path that is not here is named when it is read
            os.chdir(folder)

    def facts(self) -> NodeFacts:
        """Versions of packages, threads, and what the folder of results has in common."""
        own = 0 if engine() is None else default_pool().threads
        threads = f"{torch.get_num_threads()} of torch and {own} of the engine"
        return {**probe_environment().versions, _THREADS: threads, **self._asked.on_machine()}

    def join(self) -> NodeFacts:
        """Loads the model; facts that a node has in common with those before it."""
        return {**self.facts(), "weights": self.load().weights}

    def load(self) -> LoadedEvaluation:
        """Loads the model."""
        asked = self._asked
        llm = load(
            asked.model,
            config=HybridConfig(method="full"),
            device=asked.device,
            dtype=asked.dtype,
            weights=asked.weights,
            dequantize=asked.dequantize,
            exact_products=asked.exact_products,
        )
        self._evaluation = own = Evaluation(llm, asked)
        return LoadedEvaluation(
            own.wanted(),
            list(own.refused()),
            environment_on(llm.model.device),
            model_identity(llm.model).weights,
        )

    def measure(self, keys: Sequence[Key]) -> Iterator[Cell]:
        """Cells of these keys, each as soon as it is measured."""
        yield from self._evaluation.measure(keys)

    @cached_property
    def _asked(self) -> EvalArguments:
        """Checked here and not as the actor is made: a node of another version is told so first."""
        for module in self._plugins:
            load_plugin(module)
        return EvalArguments.of(self._arguments)
