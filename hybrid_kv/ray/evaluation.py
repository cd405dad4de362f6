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
from types import TracebackType
from typing import Any

from hybrid_kv.api import load
from hybrid_kv.config import HybridConfig
from hybrid_kv.contest.arguments import EvalArguments
from hybrid_kv.contest.evaluation import CellSource, Evaluation
from hybrid_kv.contest.folder import Key, key_of
from hybrid_kv.plugin import load_plugin
from hybrid_kv.ray.cluster import (
    ClusterError,
    NodeFacts,
    NodeLostError,
    NodeWorker,
    agreed,
    connected,
    name_waiting,
)
from hybrid_kv.report import Environment, probe_environment
from hybrid_kv.report.evaluation import Cell, EvalRow
from hybrid_kv.report.run import environment_on
from hybrid_kv.saved.identity import model_identity

_MOST_ENDED = 2
"""Workers that one cell may end: it would take a cluster down node by node."""


@dataclass(slots=True)
class _Job:
    """A context in work: who measures it, what comes, and the keys that have not come yet."""

    worker: NodeWorker
    stream: Any
    lacking: list[Key]


class ClusterEvaluation(CellSource):
    """An evaluation on all nodes of a cluster; a context manager.

    A node computes a context once for all cells of it. Cells that a lost node owed are measured on
    another one.

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
        given = (asked.model_dump(mode="json"), os.getcwd(), list(plugins))
        try:
            nodes = self._open.enter_context(connected(address))
            on_gpu = asked.device != "cpu"
            self._workers = [NodeWorker(node, EvalWorker, given, on_gpu=on_gpu) for node in nodes]
            own = probe_environment().versions
            facts = agreed(self._answers("facts"), own)
        except BaseException:
            self.close()
            raise
        self.machine = {name: value for name, value in facts.items() if name not in own}

    def load(self) -> None:
        """Loads the model on all nodes.

        Raises:
            ConfigError: the model is another one on a node, or cannot be evaluated.
            ModelNotFoundError: a node does not have it.
        """
        loaded: dict[NodeWorker, LoadedEvaluation] = self._answers("load")
        agreed({worker: {"weights": one.weights} for worker, one in loaded.items()}, {})
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
            while waiting and idle:
                worker, context = idle.popleft(), waiting.popleft()
                jobs.append(_Job(worker, worker.stream("measure", context), context))
            if not jobs:
                raise ClusterError(
                    "no node of the cluster is left; the results so far are kept: start nodes, and "
                    "run the same command again"
                )
            streams, _ = ray.wait([job.stream for job in jobs], num_returns=1)
            job = next(job for job in jobs if job.stream is streams[0])
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
        references = {worker: worker.call(method) for worker in self._workers}
        if method == "facts":  # for which a node is needed, and little time
            name_waiting(references, self._tell)
        answers = {}
        for worker, reference in references.items():
            try:
                answers[worker] = worker.result(reference)
            except NodeLostError as error:
                self._workers.remove(worker)
                self._tell(f"{error}; the others go on")
        if not answers:
            raise ClusterError("no node of the cluster is left; start nodes, and run again")
        return answers

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
        arguments: of the evaluation.
        folder: that relative paths begin at, where the node has it.
        plugins: modules that register methods, indexes or tasks.
    """

    def __init__(self, arguments: Mapping[str, Any], folder: str, plugins: Sequence[str]) -> None:
        self._arguments, self._plugins = arguments, plugins
        with suppress(OSError):  # a path that is not here is named when it is read
            os.chdir(folder)

    def facts(self) -> NodeFacts:
        """Versions of packages, and what the folder of results has in common."""
        return {**probe_environment().versions, **self._asked.on_machine()}

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
