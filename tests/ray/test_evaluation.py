"""Evaluations on two nodes of one machine: the cells are those of one process, whoever leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv.contest.arguments import EvalArguments
from hybrid_kv.contest.folder import ResultsFolder
from hybrid_kv.errors import ConfigError
from hybrid_kv.ray import cluster as clusters
from hybrid_kv.ray import evaluation as evaluations
from hybrid_kv.ray.cluster import NodeWorker, connected, trial_ends
from hybrid_kv.ray.evaluation import ClusterEvaluation, EvalWorker
from hybrid_kv.ray.replica import Replica
from hybrid_kv.report.evaluation import Cell
from tests.cli.support import call, refused

pytestmark = pytest.mark.slow

FEW = (
    *("--tasks", "key_value:records=9:questions=2,perplexity:then=9:step=4"),
    *("--context", "301,391", "--methods", "hybrid,quest", "--budget", "25%"),
    *("--samples", "1", "--dtype", "float32", "--set", "page_size=8", "--quiet"),
)


def cells(folder: Path) -> dict[tuple[Any, ...], Any]:
    """All but times."""
    found = {}
    for path in (folder / "cells").iterdir():
        for cell in json.loads(path.read_text())["cells"]:
            del cell["seconds"]
            cell["counters"].pop("ms_per_token", None)
            key = (cell["task"], cell["context_tokens"], cell["method"], cell.get("budget"))
            found[key] = cell
    return found


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "results"
    result = call("eval", model, *FEW, "-o", folder)
    assert result.exit_code == 0, result.output
    return folder


def test_two_nodes_give_the_cells_of_one_process(
    cluster: Any, model: Path, alone: Path, tmp_path: Path
) -> None:
    words = ("eval", model, *FEW, "-o", tmp_path / "results", "--json", "-")
    result = call(*words, "--ray", cluster.address)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["command"] == "eval"
    assert cells(tmp_path / "results") == cells(alone)
    assert len(cells(alone)) == 2 * 2 * 3
    assert call(*words).stdout == result.stdout, "one folder for both, and nothing measured again"


def test_cells_of_a_killed_node_are_measured_on_another(
    cluster: Any, model: Path, alone: Path, tmp_path: Path
) -> None:
    asked, told, alive = arguments(model), list[str](), [cluster.add_node(num_cpus=1)]

    def kill(cell: Cell, done: int, total: int, left_s: float) -> None:
        if alive:
            cluster.remove_node(alive.pop(), allow_graceful=False)

    with ClusterEvaluation(cluster.address, asked, tell=told.append) as contest:
        assert contest.num_nodes == 3
        contest.load()
        with ResultsFolder(tmp_path / "results", asked.identity()) as folder:
            contest.run(folder, kill)
        assert contest.num_nodes == 2
    assert cells(tmp_path / "results") == cells(alone)
    told = [one for one in told if "waiting for" not in one]
    assert len(told) == 1
    assert re.search(
        r"node \S+ \(\w{8}\) has left; [1-3] cells that it owed go to another", told[0]
    )


def test_a_node_that_comes_late_takes_cells(
    cluster: Any, model: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are measured there, as the only node of the beginning leaves at once."""
    asked, told, first = arguments(model), list[str](), cluster.add_node(num_cpus=1)
    nodes = clusters.alive_nodes
    with monkeypatch.context() as patch:
        patch.setattr(
            clusters, "alive_nodes", lambda: [n for n in nodes() if n.id == first.node_id]
        )
        contest = ClusterEvaluation(cluster.address, asked, tell=told.append)
    with contest:
        assert contest.num_nodes == 1
        contest.load()
        cluster.remove_node(first, allow_graceful=False)
        with ResultsFolder(tmp_path / "results", asked.identity()) as folder:
            contest.run(folder)
        assert contest.num_nodes >= 1
    assert cells(tmp_path / "results") == cells(alone)
    assert any(re.fullmatch(r"node \S+ \(\w{8}\) measures too", one) for one in told)


def test_trials_end_alike_on_all_nodes(cluster: Any) -> None:
    """Else one node would compute with a kernel that another one has found slower."""

    class Evaluator(EvalWorker):
        def tried(self, end: float) -> float:
            from hybrid_kv.ops.native.library import trials  # of the worker, not a copy of ours

            found: float = trials.agree(("tiles", torch.float32), end)
            return found

    class Server(Replica):
        tried = Evaluator.tried

    with connected(cluster.address) as nodes:
        for kind, given in ((Evaluator, ({}, ".", ())), (Server, ())):
            shared = trial_ends()
            workers = [NodeWorker(node, kind, (shared, *given), on_gpu=False) for node in nodes]
            assert workers[0].result(workers[0].call("tried", 0.25)) == 0.25
            assert workers[1].result(workers[1].call("tried", 4.0)) == 0.25
            for worker in workers:
                worker.end()


def arguments(model: Path, **changes: Any) -> EvalArguments:
    given = {
        "model": str(model),
        "tasks": ("key_value:records=9:questions=2", "perplexity:then=9:step=4"),
        "contexts": (301, 391),
        "methods": ("hybrid", "quest"),
        "budgets": ("25%",),
        "samples": 1,
        "dtype": "float32",
        "settings": {"page_size": 8},
    }
    return EvalArguments.of(given | changes)


DEADLY = """
import os
from hybrid_kv.plugin import METHODS, Method, Params, Read

@METHODS.register("deadly")
class Deadly(Method):
    '''Ends the process, as one does that runs out of memory.'''

    class Params(Params):
        '''None.'''

    @classmethod
    def at_budget(cls, params, tokens, *, context_tokens, page_size):
        return params

    def seal(self, layer_idx, evidence):
        os._exit(1)

    def read(self, layer_idx, q):
        return Read()
"""


@pytest.mark.usefixtures("own_plugins")
@pytest.mark.parametrize(
    ("contexts", "said"),
    [
        ("301", "deadly on passkey:records=5 at 301 tokens, context 1, ended 2 workers"),
        ("301,391", "no node of the cluster is left; the results so far are kept"),
    ],
)
def test_a_method_that_ends_workers_is_no_end_of_what_was_measured(
    cluster: Any, model: Path, tmp_path: Path, contexts: str, said: str
) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(DEADLY)
    words = ("--tasks", "passkey:records=5", "--context", contexts, "--samples", "1", "--quiet")
    methods = ("--plugin", plugin, "--methods", "deadly", "--ray", cluster.address)
    error = refused("eval", model, *words, *methods, "-o", tmp_path / "results", code=1)
    assert said in error
    assert {key[2] for key in cells(tmp_path / "results")} == {"full"}


def test_a_model_that_a_node_does_not_have_is_named_with_the_node(
    cluster: Any, tmp_path: Path
) -> None:
    words = ("eval", tmp_path / "none", *FEW, "-o", tmp_path / "results")
    error = refused(*words, "--ray", cluster.address)
    assert error.startswith("error: node ")
    assert "none' does not exist; check the path" in error
    assert not (tmp_path / "results").exists()


def test_a_node_with_another_version_is_refused(
    cluster: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers import for seconds first, so that both nodes are waited for."""
    monkeypatch.setattr(clusters, "PATIENCE_S", 0.01)
    told: list[str] = []
    here = evaluations.probe_environment()
    newer = here.model_copy(update={"versions": here.versions | {"hybrid-kv": "9.9"}})
    monkeypatch.setattr(evaluations, "probe_environment", lambda: newer)
    with pytest.raises(
        ConfigError, match=r"node \S+ \(\w{8}\) must have hybrid-kv 9.9, as this machine has, got "
    ):
        ClusterEvaluation(cluster.address, arguments(model), tell=told.append)
    waits = re.compile(r"waiting for node \S+ \(\w{8}\); others may use its processors")
    assert any(map(waits.fullmatch, told))


def test_a_node_with_another_number_of_threads_is_refused(cluster: Any, model: Path) -> None:
    other = cluster.add_node(num_cpus=1, env_vars={"HYBRID_KV_THREADS": "7"})
    with pytest.raises(
        ConfigError, match=r"must have threads 1 of torch and \d of the engine, as node "
    ) as told:
        ClusterEvaluation(cluster.address, arguments(model))
    cluster.remove_node(other, allow_graceful=False)
    assert "1 of torch and 7 of the engine" in str(told.value)
    assert str(told.value).endswith("what comes out would depend on the node: make them alike")


def test_a_node_without_the_package_is_refused(cluster: Any, tmp_path: Path) -> None:
    source = tmp_path / "only_here.py"
    source.write_text("class Worker:\n    def facts(self):\n        return {}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        kind = __import__("only_here").Worker
    with connected(cluster.address) as nodes:
        worker = NodeWorker(nodes[0], kind, (), on_gpu=False)
        with pytest.raises(ConfigError, match=r"got one without only_here; pip install 'hybrid-kv"):
            worker.result(worker.call("facts"))
