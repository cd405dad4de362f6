"""Who waits for whom: streams for prompts, prompts for each other, and nobody for a disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.runtime.layer import Layers
from hybrid_kv.saved.registry import ContextRegistry
from hybrid_kv.serve import Engine, Limits, Prefilled, Request, RequestHandle, Sampling, Token
from hybrid_kv.serve.prefill_queue import PrefillQueue
from hybrid_kv.serve.running import RunningRequest
from hybrid_kv.transfer import ThreadExecutor
from tests.serve.asking import (
    NEW,
    admitted,
    alone,
    asked,
    caches_made,
    ended,
    is_idle,
    prompt,
    read,
    scheduling,
    slow,
    small_model,
    tiered,
    until,
)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return small_model()


@pytest.fixture
def llm(model: PreTrainedModel) -> Iterator[hkv.LLM]:
    with hkv.load(model, config=tiered(16).opened()) as loaded:
        yield loaded


def tokens_of(ticket: RequestHandle) -> int:
    return sum(isinstance(event, Token) for event in ticket.happened)


class Gate:
    """Work that waits until it may go on."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.entered.set()
        assert self.open.wait(60)


def held_take(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A registry whose disk is slow."""
    gate, take = Gate(), ContextRegistry.take

    def taking(self: ContextRegistry, *args: Any) -> int:
        gate.wait()
        return take(self, *args)

    monkeypatch.setattr(ContextRegistry, "take", taking)
    return gate


def test_streams_go_on_while_a_context_is_opened(
    llm: hkv.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = asked(600)
    want = alone(llm, late)
    with Engine(llm, contexts=ContextRegistry(tmp_path)) as engine:
        read(engine.submit(late))
        until(lambda: ContextRegistry(tmp_path).counters.added == 1)
    with slow(llm, 0.002), Engine(llm, contexts=ContextRegistry(tmp_path)) as engine:
        stream = engine.submit(asked(20, max_new_tokens=900))
        until(lambda: tokens_of(stream))
        gate = held_take(monkeypatch)
        opening = engine.submit(late)
        assert gate.entered.wait(60)
        before, begin = tokens_of(stream), monotonic()
        until(lambda: tokens_of(stream) > before + 20)
        assert monotonic() - begin < 0.9, "no step looks whether the context is there"
        assert not opening.happened
        gate.open.set()
        tokens, end = read(opening)
        stream.cancel()
    assert tokens == want
    assert end.usage.reused_tokens > 500


def test_a_request_that_is_cancelled_while_its_context_is_opened_ends_at_once(
    llm: hkv.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, made = held_take(monkeypatch), caches_made(llm, monkeypatch)
    with Engine(llm, Limits(prefix_bytes=0), ContextRegistry(tmp_path)) as engine:
        opening = engine.submit(asked(600))
        assert gate.entered.wait(60)
        opening.cancel()
        assert read(opening)[1].reason == "cancelled"
        assert not gate.open.is_set()
        assert not made[0].state.is_closed, "the other thread fills it"
        gate.open.set()
        until(lambda: made[0].state.is_closed)
        until(lambda: not engine.stats().prefilling)


def test_requests_are_answered_while_a_context_is_written(
    llm: hkv.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, add = Gate(), ContextRegistry.add

    def adding(self: ContextRegistry, *args: Any) -> bool:
        gate.wait()
        return add(self, *args)

    monkeypatch.setattr(ContextRegistry, "add", adding)
    longer = Request((*prompt(600), *prompt(25, seed=3)), 5, asked(1).sampling)
    with Engine(llm, contexts=ContextRegistry(tmp_path)) as engine:
        read(engine.submit(asked(600)))
        assert gate.entered.wait(60)
        tokens, end = read(engine.submit(longer))
        assert tokens == alone_closed(llm, longer, engine)
        assert end.usage.reused_tokens >= 600
        gate.open.set()
        until(lambda: ContextRegistry(tmp_path).counters.added >= 1)


def alone_closed(llm: hkv.LLM, request: Request, engine: Engine) -> list[int]:
    """What a cache of its own gives, beside an engine that is idle."""
    until(lambda: is_idle(engine))
    return alone(llm, request)


def test_streams_go_on_while_layers_of_a_prompt_move(
    llm: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, seal, late = Gate(), Layers.seal_if_open, asked(300)
    want = alone(llm, late)

    moving: list[Layers] = []
    touched: list[Layers] = []
    settle = Layers.settle

    def sealing(self: Layers, layer_idx: int, **options: Any) -> None:
        if threading.current_thread().name.startswith("hybrid-kv-build"):
            moving.append(self)
            gate.wait()
        seal(self, layer_idx, **options)

    def settling(self: Layers) -> None:
        if not gate.open.is_set():
            touched.append(self)
        settle(self)

    monkeypatch.setattr(Layers, "seal_if_open", sealing)
    monkeypatch.setattr(Layers, "settle", settling)
    monkeypatch.setattr("hybrid_kv.serve.engine._PUBLISH_S", 0.0)
    with slow(llm, 0.002), Engine(llm) as engine:
        stream = engine.submit(asked(20, max_new_tokens=900))
        until(lambda: tokens_of(stream))
        ending = engine.submit(late)
        assert gate.entered.wait(60)
        touched.clear()
        before = tokens_of(stream)
        until(lambda: tokens_of(stream) > before + 20)
        assert not tokens_of(ending)
        assert touched
        assert moving[0] not in touched, "figures are of what nobody works on"
        gate.open.set()
        assert read(ending)[0] == want
        stream.cancel()


def test_an_error_aside_ends_its_own_request_only(
    llm: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sealing(self: Layers, layer_idx: int, **options: Any) -> None:
        if threading.current_thread().name.startswith("hybrid-kv-build"):
            raise MemoryError("no room")

    with slow(llm, 0.002), Engine(llm) as engine:
        stream = engine.submit(asked(20, max_new_tokens=60))
        until(lambda: tokens_of(stream))
        monkeypatch.setattr(Layers, "seal_if_open", sealing)
        _, end = read(engine.submit(asked(300)))
        assert type(end.error).__name__ == "CapacityError"
        assert read(stream)[1].reason == "length"


def test_an_error_aside_comes_before_the_first_token(
    llm: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is there as soon as the layers are put aside: the token came before it."""
    background = ThreadExecutor.background

    def at_once(self: ThreadExecutor, work: Callable[[], None]) -> Future[None]:
        wait([done := background(self, work)])
        return done

    def sealing(self: Layers, layer_idx: int, **options: Any) -> None:
        if threading.current_thread().name.startswith("hybrid-kv-build") and layer_idx:
            raise MemoryError("no room")

    with scheduling(llm) as rounds:
        [stream] = admitted(rounds, asked(20, max_new_tokens=60))
        until(lambda: rounds.round() or tokens_of(stream))
        monkeypatch.setattr(ThreadExecutor, "background", at_once)
        monkeypatch.setattr(Layers, "seal_if_open", sealing)
        [ticket] = admitted(rounds, asked(300, max_new_tokens=1))
        [end] = ended(rounds, ticket)
    assert type(end.error).__name__ == "CapacityError"
    assert not tokens_of(ticket)


def test_an_error_of_one_of_two_equal_prompts_ends_its_own_request_only(
    llm: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the engine: the other one's layers had moved aside, and it was taken up again."""
    wrong, take = Sampling(temperature=0, logprobs=1), RunningRequest.take

    def taking(self: RunningRequest, *args: Any) -> object:
        if self.request.sampling == wrong:
            raise ValueError("no choice")
        return take(self, *args)

    monkeypatch.setattr(RunningRequest, "take", taking)
    with slow(llm, 0.002), Engine(llm) as engine:
        stream = engine.submit(asked(20, max_new_tokens=200))
        until(lambda: tokens_of(stream))
        tickets = [engine.submit(asked(300, **how)) for how in ({}, {"sampling": wrong})]
        reasons = [read(ticket)[1].reason for ticket in tickets]
        assert reasons == ["length", "error"]
        assert not stream.is_finished
        stream.cancel()


def test_a_prompt_that_was_opened_shares_nothing_with_its_equal(
    llm: hkv.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began twice where both came back at once: with the other's cache, and with its own."""
    gates, find = [Gate(), Gate()], ContextRegistry.find
    waiting = iter(gates)

    def finding(self: ContextRegistry, *args: Any) -> tuple[Path | None, int]:
        next(waiting).wait()
        return find(self, *args)

    monkeypatch.setattr(ContextRegistry, "find", finding)
    document, longer = prompt(400), prompt(700)
    first = Request((*document, *prompt(5)), 300, asked(1).sampling)
    same = Request((*document, *longer[400:]), NEW, first.sampling)
    want = alone(llm, same)
    with scheduling(llm, contexts=ContextRegistry(tmp_path)) as rounds:
        tickets = admitted(rounds, first, same, same)
        tickets[1].submitted -= 1  # goes before the other
        _, one, other = rounds.runs
        while not (one.work and other.work):
            rounds.round()
        gates[0].open.set()
        wait([one.work])
        while not (one.is_prefilled and one.work):  # its layers move
            rounds.round()
        gates[1].open.set()
        wait([one.work, other.work])
        ended(rounds, *tickets[1:])
    assert [read(ticket)[0] for ticket in tickets[1:]] == [want, want]


def test_a_context_that_is_there_between_two_looks_is_taken_up(
    llm: hkv.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request began once more, and the context was lost."""
    gate, made, first = held_take(monkeypatch), caches_made(llm, monkeypatch), PrefillQueue.next

    def looking(self: PrefillQueue) -> RunningRequest | None:
        if works := [run.work for run in rounds.runs if run.work]:
            gate.open.set()
            wait(works)
        return first(self)

    monkeypatch.setattr(PrefillQueue, "next", looking)
    with scheduling(llm, contexts=ContextRegistry(tmp_path)) as rounds:
        [end] = ended(rounds, *admitted(rounds, asked(300)))
    assert end.reason == "length"
    assert len(made) == 1


def test_short_prompts_pass_long_ones_and_none_waits_for_ever(llm: hkv.LLM) -> None:
    limits = Limits(max_running=3, prefill_chunk_tokens=16, prefix_bytes=0)
    with slow(llm, 0.005), Engine(llm, limits) as engine:
        long = engine.submit(asked(960))
        until(lambda: long.happened)
        ends = [read(engine.submit(asked(40, seed=seed, max_new_tokens=2))) for seed in range(3)]
        assert {end.reason for _, end in ends} == {"length"}
        assert not tokens_of(long)
        number = 3
        while not tokens_of(long) and number < 200:  # there is always a shorter one
            read(engine.submit(asked(100, seed=number, max_new_tokens=2)))
            number += 1
    assert number < 200


def test_a_prompt_waits_for_the_one_that_computes_what_it_begins_with(llm: hkv.LLM) -> None:
    document = prompt(600)
    requests = [Request((*document, *prompt(20, seed=n)), 4, asked(1).sampling) for n in (1, 2, 3)]
    want = [alone(llm, request) for request in requests]
    with slow(llm, 0.003), Engine(llm, Limits(prefill_chunk_tokens=32)) as engine:
        tickets = [engine.submit(request) for request in requests]
        found = [read(ticket) for ticket in tickets]
    assert [tokens for tokens, _ in found] == want
    assert [end.usage.reused_tokens >= 600 for _, end in found] == [False, True, True]


@pytest.mark.parametrize(
    ("shared", "own", "changes", "limits", "waits"),
    [
        (650, 60, {}, {}, True),
        (200, 60, {}, {}, False),  # too much would be cut off
        (200, 500, {}, {}, False),  # most of it is its own
        (650, 60, {"config": hkv.HybridConfig(method="full", page_size=16)}, {}, False),
        (650, 60, {}, {"reproducible": 64}, False),
    ],
)
def test_a_prompt_waits_for_a_longer_one_that_computes_most_of_it_and_little_else(
    llm: hkv.LLM,
    shared: int,
    own: int,
    changes: dict[str, Any],
    limits: dict[str, Any],
    waits: bool,
) -> None:
    """And passes all others: it waited for long ones of which it could take nothing."""
    long = asked(900)
    short = replace(long, ids=(*long.ids[:shared], *prompt(own, seed=5)), **changes)
    with scheduling(llm, Limits(prefill_chunk_tokens=64, **limits)) as rounds:
        tickets = admitted(rounds, long, short)
        [end] = ended(rounds, tickets[1])
        assert bool(tokens_of(tickets[0])) == waits
        assert (end.usage.reused_tokens >= shared) == waits


def test_a_prompt_that_is_cancelled_while_its_layers_move_ends_between_two(
    llm: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, seal = list[int](), Layers.seal_if_open

    def sealing(self: Layers, layer_idx: int, **options: Any) -> None:
        sleep(0.6)  # longer than a piece may take
        seal(self, layer_idx, **options)
        moved.append(layer_idx)

    with scheduling(llm) as rounds:
        [ticket] = admitted(rounds, asked(100))
        monkeypatch.setattr(Layers, "seal_if_open", sealing)
        until(lambda: rounds.round() or moved)
        ticket.cancel()
        [end] = ended(rounds, ticket)
    assert (end.reason, moved) == ("cancelled", [0])


def test_a_prompt_whose_leader_is_cancelled_computes_for_itself(llm: hkv.LLM) -> None:
    with slow(llm, 0.005), Engine(llm, Limits(prefill_chunk_tokens=32)) as engine:
        first, second = (engine.submit(asked(600)) for _ in range(2))
        until(lambda: first.happened)
        first.cancel()
        tokens, end = read(second)
    assert tokens == alone(llm, asked(600))
    assert end.usage.reused_tokens == 0


@contextmanager
def costs(llm: hkv.LLM, each: float) -> Iterator[dict[str, float]]:
    """Seconds that a step takes beside its work, to be changed; a token of a prompt takes each."""
    of = {"step": 0.0}

    def take(_: Any, args: tuple[Any, ...]) -> None:
        tokens = args[0].shape[1]
        sleep(of["step"] if tokens == 1 else each * tokens)

    hook = llm.model.register_forward_pre_hook(take)
    try:
        yield of
    finally:
        hook.remove()


def test_pieces_fit_beside_steps_into_what_streams_may_wait(llm: hkv.LLM) -> None:
    limits = Limits(max_stall_ms=400, prefix_bytes=0)
    with costs(llm, 5e-4) as of, scheduling(llm, limits) as rounds:
        [ticket] = admitted(rounds, asked(300, max_new_tokens=100))
        until(lambda: rounds.round() or tokens_of(ticket) > 2)
        calm = rounds.chunk_tokens
        of["step"] = 0.2
        rounds.round()
        assert 0.2 * calm < rounds.chunk_tokens < 0.7 * calm, "a step takes half of it"
        of["step"] = 0.5
        rounds.round()
        busy = rounds.chunk_tokens
        assert 32 < busy < 0.4 * calm, "a quarter is left for prompts"
        of["step"] = 0.0
        for _ in range(7):
            rounds.round()
        assert rounds.chunk_tokens == pytest.approx(busy, abs=64), "a long step may come again"
        rounds.round()
        assert rounds.chunk_tokens > 0.8 * calm
        sleep(0.2)
        assert rounds.chunk_tokens < 0.7 * calm, "they have waited half of it"


def test_waits_beyond_the_bound_are_counted(llm: hkv.LLM) -> None:
    with slow(llm, 0.05), Engine(llm, Limits(max_stall_ms=20, prefix_bytes=0)) as engine:
        stream = engine.submit(asked(20, max_new_tokens=900))
        until(lambda: tokens_of(stream))
        other = engine.submit(asked(300, max_new_tokens=1))
        read(other)
        until(lambda: engine.stats().late_stalls)
        assert engine.stats().stall_bound_ms == 20
        pieces = [event.done for event in other.happened if isinstance(event, Prefilled)]
        stream.cancel()
    assert len(pieces) > 3


def test_a_prompt_for_which_no_stream_waits_is_no_wait(llm: hkv.LLM) -> None:
    with Engine(llm, Limits(prefill_chunk_tokens=100, prefix_bytes=0)) as engine:
        for seed in range(3):
            read(engine.submit(asked(300, seed)))
        until(lambda: engine.stats().steps == 3 * (NEW - 1))
        assert engine.stats().stalls == 0
