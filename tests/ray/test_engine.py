"""An answer survives its replica: who reads it sees every token once. No Ray is needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import BusyError, ConfigError
from hybrid_kv.ray import replicas as engines
from hybrid_kv.ray.cluster import NodeLostError
from hybrid_kv.ray.replica import ReplicaSpec
from hybrid_kv.ray.replicas import ReplicaEngine
from hybrid_kv.serve import Finished, Limits, Prefilled, Request, Sampling, Token, Usage

LOST = NodeLostError("node b (1234) has left")
END = Finished("length", Usage(3, 4))
TOKENS = [Token(idx, f"{idx} ") for idx in (7, 8, 9, 7)]
WHOLE = [Prefilled(3, 3), *TOKENS, END]
GREEDY = Sampling(temperature=0)
SPEC = ReplicaSpec("tiny", HybridConfig(), {}, Limits(), None, "/", ())


class FakeReplica:
    """Says what it is given; an error ends it."""

    node = SimpleNamespace(name="b (1234)")

    def __init__(self, says: Sequence[Any]) -> None:
        self.says, self.asked, self.cancelled = says, list[Request](), list[int]()

    def stream(self, method: str, number: int, request: Request, grammar: Any) -> Iterator[Any]:
        self.asked.append(request)
        yield from self.says

    def result(self, reference: Any) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference

    def call(self, method: str, number: int) -> None:
        assert method == "cancel"
        self.cancelled.append(number)


class FakeReplicas:
    """Gives one after the other."""

    model, stats = None, None

    def __init__(self, *given: Sequence[Any]) -> None:
        self.all = [FakeReplica(says) for says in given]
        self.left, self.lost, self.open = list(self.all), list[FakeReplica](), 0

    def take(self, ids: Sequence[int]) -> FakeReplica:
        if not self.left:
            raise BusyError("no replica is there")
        self.open += 1
        return self.left.pop(0)

    def release(self, replica: FakeReplica) -> None:
        self.open -= 1

    def lose(self, replica: FakeReplica, error: Exception) -> None:
        self.lost.append(replica)

    def close(self) -> None: ...


def answered(
    monkeypatch: pytest.MonkeyPatch, *given: Sequence[Any], sampling: Sampling = GREEDY
) -> tuple[list[Any], FakeReplicas]:
    """All events of one request to replicas that say this."""
    replicas = FakeReplicas(*given)
    monkeypatch.setattr(engines, "Replicas", lambda *rest: replicas)
    with ReplicaEngine("auto", SPEC) as engine:
        events = list(engine.submit(Request((1, 2, 3), 4, sampling)).events())
        engine.drain(10)
    assert replicas.open == 0, "every replica that was taken is given back"
    return events, replicas


@pytest.mark.parametrize("said", range(6))
def test_a_lost_answer_comes_from_another_replica_once(
    monkeypatch: pytest.MonkeyPatch, said: int
) -> None:
    events, replicas = answered(monkeypatch, [*WHOLE[:said], LOST], WHOLE)
    assert [event for event in events if not isinstance(event, Prefilled)] == [*TOKENS, END]
    assert replicas.lost == replicas.all[:1]


def test_both_replicas_draw_with_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, replicas = answered(monkeypatch, [LOST], WHOLE, sampling=Sampling(temperature=1))
    first, second = (replica.asked[0].sampling.seed for replica in replicas.all)
    assert first == second is not None
    _, replicas = answered(monkeypatch, WHOLE, sampling=Sampling(seed=5))
    assert replicas.all[0].asked[0].sampling.seed == 5


def test_a_replica_that_says_something_else_ends_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = [Prefilled(3, 3), TOKENS[0], TOKENS[0], TOKENS[0]]
    events, replicas = answered(monkeypatch, [*WHOLE[:4], LOST], other)
    assert events[:-1] == WHOLE[:4]
    assert events[-1].reason == "error"
    assert "was lost after 3 tokens, and another one goes on otherwise from token 2" in str(
        events[-1].error
    )
    assert replicas.all[1].cancelled == [0]


def test_a_request_that_ends_replicas_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    events, replicas = answered(monkeypatch, [LOST], [LOST], WHOLE)
    assert "2 replicas ended while they answered" in str(events[-1].error)
    assert len(replicas.left) == 1


def test_without_another_replica_the_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    events, _ = answered(monkeypatch, [*WHOLE[:2], LOST])
    assert (events[-1].reason, events[-1].usage) == ("error", Usage(3, 1))
    assert str(events[-1].error) == "no replica is there"


def test_a_refusal_is_the_end_and_loses_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = ConfigError("node b (1234): not so")
    events, replicas = answered(monkeypatch, [refusal])
    assert (events[-1].error, replicas.lost) == (refusal, [])


def test_a_request_is_cancelled_where_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = FakeReplicas()
    monkeypatch.setattr(engines, "Replicas", lambda *rest: replicas)

    class Slow(FakeReplica):
        def stream(self, *given: Any) -> Iterator[Any]:
            yield TOKENS[0]
            while not self.cancelled:
                yield Prefilled(1, 3)
            yield Finished("cancelled", Usage(3, 1))

    slow = Slow(())
    replicas.left = [slow]
    with ReplicaEngine("auto", SPEC) as engine:
        handle = engine.submit(Request((1, 2, 3), 4))
        assert engine.drain(0.1).cancelled == 1
        assert list(handle.events())[-1].reason == "cancelled"
        with pytest.raises(BusyError, match="takes no new requests"):
            engine.submit(Request((1, 2, 3), 4))


def test_a_cancel_that_the_replica_did_not_know_yet_is_said_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas = FakeReplicas()
    monkeypatch.setattr(engines, "Replicas", lambda *rest: replicas)

    class Late(FakeReplica):
        knows = threading.Event()

        def stream(self, *given: Any) -> Iterator[Any]:
            assert self.knows.wait(30)
            for _ in range(100):
                yield Prefilled(1, 3)
                if self.cancelled:
                    yield Finished("cancelled", Usage(3))
            yield END

        def call(self, method: str, number: int) -> None:
            if self.knows.is_set():
                super().call(method, number)

    late = Late(())
    replicas.left = [late]
    with ReplicaEngine("auto", SPEC) as engine:
        handle = engine.submit(Request((1, 2, 3), 4))
        handle.cancel()
        late.knows.set()
        assert list(handle.events())[-1].reason == "cancelled"
