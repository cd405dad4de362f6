"""A server before two replicas: answers of one engine, where prefixes lie, and none lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any

import httpx
import pytest

from hybrid_kv.api import LLM, load
from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError, OtherContextError
from hybrid_kv.ray.replica import ReplicaSpec, claim
from hybrid_kv.serve import Engine, Limits, Request, RequestHandle, Sampling, Token
from tests.serve.asking import until
from tests.serve.running import Running, serving
from tests.serve.test_structure import byte_llm

pytestmark = pytest.mark.slow

LIMITS = Limits(max_running=4, max_queue=60)
"""Answers of several requests at a time add up in another order: float32 keeps them apart."""


def spec(model: Path, contexts: Path | None = None, **settings: Any) -> ReplicaSpec:
    config = HybridConfig.from_settings({"index_build": "wait", **settings})
    folder = None if contexts is None else str(contexts)
    return ReplicaSpec(str(model), config, {"dtype": "float32"}, LIMITS, folder, "/", ())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose tokens are bytes, which schemas need."""
    folder = tmp_path_factory.mktemp("bytes")
    with byte_llm() as llm:
        llm.model.save_pretrained(folder)
        llm.require_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contexts") / "shared"


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def replicas(cluster: Any, model: Path, contexts: Path, told: list[str]) -> Iterator[Any]:
    from hybrid_kv.ray.replicas import ReplicaEngine

    with ReplicaEngine(cluster.address, spec(model, contexts), told.append) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(replicas: Any) -> Iterator[Running]:
    with serving(replicas.model, replicas) as running:
        yield running


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[LLM]:
    with load(model, dtype="float32", config={"index_build": "wait"}) as llm:
        yield llm


def prompt(seed: int, tokens: int = 120) -> tuple[int, ...]:
    return tuple(5 + (seed * 31 + place * place) % 200 for place in range(tokens))


def answers(engine: Any, requests: list[Request]) -> list[list[int]]:
    handles = [engine.submit(request) for request in requests]
    return [[event.id for event in one.events() if isinstance(event, Token)] for one in handles]


def requests(count: int, tokens: int = 8) -> list[Request]:
    """Greedy and drawn by a seed, several to each prompt."""
    samplings = [Sampling(temperature=0), Sampling(seed=7), Sampling(temperature=0.5, seed=1)]
    return [
        Request(prompt(number // 4), tokens, samplings[number % len(samplings)])
        for number in range(count)
    ]


def test_a_node_that_leaves_while_replicas_start_is_left_out(
    cluster: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves between its first answer and loading. Here, as `replicas` stays connected."""
    from hybrid_kv.ray import cluster as clusters
    from hybrid_kv.ray import replicas as module

    lost, told, nodes = cluster.add_node(num_cpus=1), list[str](), clusters.alive_nodes
    agreed = module.agreed

    def leave(*given: Any) -> Any:
        if lost in cluster.worker_nodes:
            cluster.remove_node(lost, allow_graceful=False)
        return agreed(*given)

    monkeypatch.setattr(module, "agreed", leave)
    two = {lost.node_id, cluster.head_node.node_id}
    monkeypatch.setattr(clusters, "alive_nodes", lambda: [n for n in nodes() if n.id in two])
    with module.ReplicaEngine(cluster.address, spec(model), told.append) as engine:
        assert len(answers(engine, requests(1))[0]) == 8
        until(lambda: any("has left" in one for one in told))  # its worker may outlive it a while


def test_answers_are_those_of_one_engine(replicas: Any, alone: LLM) -> None:
    asked = requests(12)
    with Engine(alone, LIMITS) as engine:
        assert answers(replicas, asked) == answers(engine, asked)


def test_a_prompt_is_continued_where_it_was_computed(server: Running) -> None:
    hits = []
    for seed in (101, 102, 103, 104):
        for _ in range(3):
            body = {"model": "tiny", "prompt": list(prompt(seed)), "max_tokens": 2}
            answer: Any = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            hits.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert hits == [False, True, True] * 4


def test_schemas_reach_the_replicas(server: Running) -> None:
    body = {
        "model": "tiny",
        "prompt": "Where?",
        "max_tokens": 30,
        "structured_outputs": {"choice": ["the river", "the hill"]},
    }
    answer: Any = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"] in ("the river", "the hill")


def test_what_a_replica_refuses_is_an_error_of_the_answer(server: Running) -> None:
    body = {
        "model": "tiny",
        "prompt": list(prompt(1)),
        "hybrid_kv": {"method": "streaming_llm", "exact": True},
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("node ")


def test_answers_go_on_when_their_replica_is_killed(
    cluster: Any, replicas: Any, alone: LLM, told: list[str]
) -> None:
    """All are under way then: each has a token, and none has all."""
    spare = cluster.add_node(num_cpus=1)
    told.clear()
    wait_for(lambda: any("answers requests" in one for one in told))
    samplings = [Sampling(temperature=0), Sampling(temperature=0.5, seed=1)]
    asked = [Request(prompt(500 + n, 60 + n), 400, samplings[n % 2]) for n in range(12)]
    handles = [replicas.submit(request) for request in asked]
    wait_for(lambda: all(map(has_begun, handles)))
    assert not any(one.is_finished for one in handles)
    cluster.remove_node(spare, allow_graceful=False)
    found = [list(one.events()) for one in handles]
    assert [events[-1].error for events in found] == [None] * len(asked)
    assert any("has left; its requests go to another" in one for one in told)
    with Engine(alone, LIMITS) as engine:
        expected = answers(engine, asked)
    assert [[e.id for e in events if isinstance(e, Token)] for events in found] == expected


def has_begun(handle: RequestHandle) -> bool:
    return any(isinstance(event, Token) for event in handle.happened)


def wait_for(condition: Any) -> None:
    for _ in range(600):
        if condition():
            return
        sleep(0.2)
    raise AssertionError("it did not happen")


def test_contexts_of_the_folder_serve_both_replicas(replicas: Any, contexts: Path) -> None:
    assert json.loads((contexts / "replicas.json").read_text())["dtype"] == "float32"
    asked = Request(prompt(300, 600), 2, Sampling(temperature=0))
    answers(replicas, [asked])
    wait_for(lambda: list(contexts.glob("*/*/manifest.json")))


def test_a_folder_of_others_is_refused(
    cluster: Any, model: Path, contexts: Path, replicas: Any, tmp_path: Path
) -> None:
    own = json.loads((contexts / "replicas.json").read_text())
    claim(contexts, own)
    with pytest.raises(OtherContextError, match=r"for replicas with weights \w+, got 0000"):
        claim(contexts, own | {"weights": "0000"})
    with pytest.raises(OtherContextError, match="with method hybrid, got quest; choose another"):
        claim(contexts, own | {"method": "quest"})
    with pytest.raises(ConfigError, match="must be one that every node can write, got: "):
        claim(tmp_path / "none" / "folder", own)
