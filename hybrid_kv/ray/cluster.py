"""A Ray cluster: the connection to it, its nodes, and one worker on each of them."""

from __future__ import annotations

import logging
import os
import pickle
import re
import socket
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TextIO

from hybrid_kv.errors import ConfigError, HybridKVError

_log = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""For a head node to take a connection; Ray itself would try for a minute."""


NodeFacts = dict[str, str | None]
"""Facts that all nodes must have in common, by name."""


class ClusterError(HybridKVError, RuntimeError):
    """A cluster has no node left that can do the work; what was done before is kept."""


class NodeLostError(ClusterError):
    """A node, or the worker on it, has ended."""


PATIENCE_S = 60.0
"""For a worker to begin, with its imports, before it is said that it has not."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node that is alive; name: its address with the first digits of its id."""

    id: str
    name: str
    cpus: float
    gpus: float


@contextmanager
def connected(address: str) -> Iterator[list[ClusterNode]]:
    """A connection to a cluster, and its nodes that have a processor to compute with.

    Ray writes news of the cluster to stdout, which belongs to reports: it is logged instead.

    Args:
        address: HOST:PORT of the head node, or "auto" for the cluster of this machine.

    Raises:
        ConfigError: Ray is not installed, nobody answers, or no node has a processor.
    """
    _check(address)
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else a page of advice
    with redirect_stdout(_WithoutRay(sys.stdout)):
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                configure_logging=False,
                logging_level="ERROR",
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"--ray must be a cluster that this machine is a node of, got '{address}': "
                f"{_first_line(error)}"
            ) from error
        try:
            if not (nodes := alive_nodes()):
                raise ConfigError(
                    f"the cluster at '{address}' must have a node with a processor, got none; "
                    "start one with `ray start --address ...`"
                )
            yield nodes
        finally:
            ray.shutdown()


def alive_nodes() -> list[ClusterNode]:
    """Nodes of the cluster that have a processor to compute with."""
    import ray

    nodes = [_node(facts) for facts in ray.nodes() if facts["Alive"]]
    return [node for node in nodes if node.cpus >= 1]


def name_waiting(asked: Mapping[NodeWorker, Any], tell: Callable[[str], None]) -> None:
    """Waits for the first answers of workers, for a while; then names those that have not begun.

    Args:
        asked: references to their answers.
    """
    import ray

    references = list(asked.values())
    _, missing = ray.wait(references, num_returns=len(references), timeout=PATIENCE_S)
    for worker, reference in asked.items():
        if reference in missing:
            tell(f"waiting for node {worker.node.name}; others may use its processors")


def answers(asked: Mapping[NodeWorker, Any], tell: Callable[[str], None]) -> dict[NodeWorker, Any]:
    """Answers of workers; those whose node leaves meanwhile are left out.

    Args:
        asked: references to them.

    Raises:
        ClusterError: none is left.
        HybridKVError: as `NodeWorker.result`.
    """
    found = {}
    for worker, reference in asked.items():
        try:
            found[worker] = worker.result(reference)
        except NodeLostError as error:
            tell(f"{error}; the others go on")
    if not found:
        raise ClusterError("no node of the cluster is left; start nodes, and run again")
    return found


def agreed(
    found: Mapping[NodeWorker, NodeFacts], known: NodeFacts, by: str = "this machine has"
) -> NodeFacts:
    """Facts that all nodes have alike.

    Args:
        known: as they must be; of others the first node decides.
        by: who has them.

    Raises:
        ConfigError: a node differs.
    """
    facts, whose = dict(known), dict.fromkeys(known, by)
    for worker, its in found.items():
        for name, value in its.items():
            if name not in facts:
                facts[name], whose[name] = value, f"node {worker.node.name} has"
            elif value != facts[name]:
                raise ConfigError(
                    f"node {worker.node.name} must have {name} {facts[name]}, as {whose[name]}, "
                    f"got {value}; what comes out would depend on the node: make them alike"
                )
    return facts


class TrialEnds:
    """An actor of Ray: how trials end on all nodes, as on the first that has made each."""

    def __init__(self) -> None:
        self._ends: dict[str, bytes] = {}

    def agree(self, tried: str, end: bytes) -> bytes:
        """The end that counts of a trial, by its first end."""
        return self._ends.setdefault(tried, end)


def trial_ends() -> Any:
    """The handle of a new `TrialEnds` on this machine, which a run cannot outlive."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    place = NodeAffinitySchedulingStrategy(here, soft=False)
    return ray.remote(TrialEnds).options(num_cpus=0, scheduling_strategy=place).remote()


def agree_with(ends: Any) -> None:
    """Trials of this process end as those of a cluster: the same kernels compute on all nodes."""
    import ray

    from hybrid_kv.ops.native.library import trials

    def agree(tried: Hashable, end: Any) -> Any:
        return pickle.loads(ray.get(ends.agree.remote(repr(tried), pickle.dumps(end))))

    trials.agree = agree


class _WithoutRay:
    """A text file; lines of Ray's threads are logged in its place, for --debug to show."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        if not threading.current_thread().name.startswith("ray_"):
            return self._file.write(text)
        if text.strip():
            _log.debug("%s", text.rstrip())
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _check(address: str) -> None:
    """Raises ConfigError unless Ray is installed and somebody listens at the address."""
    if find_spec("ray") is None:
        raise ConfigError(
            "--ray needs Ray, got an environment without; pip install 'hybrid-kv[ray]'"
        )
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not re.fullmatch(r"[\w.-]+|\[[\da-fA-F:]+\]", host) or not colon or not port.isdecimal():
        raise ConfigError(
            "--ray must be HOST:PORT of a head node, as `ray start --head` prints it, or auto, got "
            f"'{address}'"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--ray must be a cluster that answers, got '{address}' "
            f"({getattr(error, 'strerror', None) or error}); start one with `ray start --head`"
        ) from None


def _node(facts: dict[str, Any]) -> ClusterNode:
    name = f"{facts['NodeManagerAddress']} ({facts['NodeID'][:8]})"
    resources = facts["Resources"]
    return ClusterNode(facts["NodeID"], name, resources.get("CPU", 0.0), resources.get("GPU", 0.0))


class NodeWorker:
    """An actor on one node, which ends with it or with this process.

    It takes all processors of the node, so that nobody else's work is in its times.

    Args:
        kind: class of the actor.
        given: arguments of the class.
        on_gpu: whether it takes a GPU where the node has one.
        threads: calls that it answers at the same time.
    """

    def __init__(
        self,
        node: ClusterNode,
        kind: type,
        given: Sequence[Any] = (),
        *,
        on_gpu: bool,
        threads: int = 1,
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.node = node
        options = ray.remote(kind).options(
            num_cpus=node.cpus,
            num_gpus=min(1, node.gpus) if on_gpu else 0,
            max_restarts=0,
            max_concurrency=threads,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        self._actor = options.remote(*given)

    def call(self, method: str, *given: Any) -> Any:
        """A reference to what a method will return."""
        return getattr(self._actor, method).remote(*given)

    def stream(self, method: str, *given: Any) -> Any:
        """References to what a method yields, as it does."""
        return getattr(self._actor, method).options(num_returns="streaming").remote(*given)

    def result(self, reference: Any) -> Any:
        """The value behind a reference.

        Raises:
            NodeLostError: the worker or its node has ended.
            HybridKVError: the worker raised it; the message begins with the node.
        """
        import ray
        from ray.exceptions import (
            ActorUnschedulableError,
            RayActorError,
            RayTaskError,
            WorkerCrashedError,
        )

        try:
            return ray.get(reference)
        except RayTaskError as error:
            raise self._told(error.cause) from error
        except (ActorUnschedulableError, RayActorError, WorkerCrashedError) as error:
            if missing := re.search(r"No module named '([\w.]+)'", str(error)):
                raise ConfigError(
                    f"node {self.node.name} must have the package of this machine, got one without "
                    f"{missing[1]}; pip install 'hybrid-kv[ray]' there"
                ) from error
            raise NodeLostError(f"node {self.node.name} has left") from error

    def is_ready(self, reference: Any) -> bool:
        """Whether `result` has not to wait."""
        import ray

        return bool(ray.wait([reference], timeout=0)[0])

    def end(self) -> None:
        """Ends the worker at once; harmless when it has ended."""
        import ray

        ray.kill(self._actor)

    def _told(self, cause: BaseException) -> HybridKVError:
        if isinstance(cause, HybridKVError):
            return type(cause)(f"node {self.node.name}: {cause}")
        return ClusterError(f"node {self.node.name}: {type(cause).__name__}: {cause}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".:")
