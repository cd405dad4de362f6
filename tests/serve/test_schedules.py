"""What holds in every round, whoever asks when, ends early or fails."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.saved.registry import ContextRegistry
from hybrid_kv.serve import Limits, Prefilled, Request, RequestHandle, Token
from hybrid_kv.serve.scheduler import Scheduler
from tests.serve.asking import (
    GREEDY,
    NEW,
    alone,
    caches_made,
    prompt,
    read,
    scheduling,
    small_model,
    tiered,
)

FULL = hkv.HybridConfig(method="full", page_size=16)
WAYS: list[dict[str, Any]] = [
    {},
    {},
    {"audit_every": 2},
    {"config": FULL},
    {"config": tiered(16, method="streaming_llm")},
    {"exact": True},
]
DOCUMENT = prompt(300, seed=1)
PROMPTS = [
    DOCUMENT,
    (*DOCUMENT, *prompt(25, seed=2)),
    (*DOCUMENT[:180], *prompt(30, seed=3)),
    prompt(70, seed=4),
    prompt(9, seed=5),
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return small_model()


@pytest.fixture(scope="module")
def llm(model: PreTrainedModel) -> Iterator[hkv.LLM]:
    with hkv.load(model, config=tiered(16).opened()) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def right(llm: hkv.LLM) -> Any:
    """The whole answer to a request."""

    @cache
    def answer(ids: tuple[int, ...], config: hkv.HybridConfig | None) -> list[int]:
        return alone(llm, Request(ids, NEW, GREEDY, config=config))

    def of(request: Request) -> list[int]:
        config = FULL if request.exact else request.config
        return answer(request.ids, config)[: request.max_new_tokens]

    return of


class Clients:
    """Some that ask now and then, and leave now and then, as dice say."""

    def __init__(self, dice: random.Random, most: int) -> None:
        self._dice, self._left = dice, most
        self.tickets: list[RequestHandle] = []
        self.queue: deque[RequestHandle] = deque()
        self.ended: list[RequestHandle] = []

    def act(self) -> None:
        while self._left and self._dice.random() < 0.4:
            self._left -= 1
            way = self._dice.choice(WAYS)
            most = self._dice.choice((1, 3, NEW))
            request = Request(self._dice.choice(PROMPTS), most, GREEDY, **way)
            for _ in range(self._dice.choice((1, 1, 2))):
                self.tickets.append(RequestHandle(request))
                self.queue.append(self.tickets[-1])
        there = [ticket for ticket in self.tickets if not ticket.early_end]
        leaving = self._dice.random() < 0.15
        for ticket in self._dice.sample(there, min(len(there), 2 * leaving)):
            if self._dice.random() < 0.5:
                ticket.cancel()
            else:
                ticket.deadline = 0.0

    @property
    def are_done(self) -> bool:
        return not self._left and all(ticket.is_finished for ticket in self.tickets)

    def given(self) -> dict[RequestHandle, int]:
        """Tokens of the answers that have begun."""
        every = {ticket: tokens_of(ticket) for ticket in self.tickets if not ticket.is_finished}
        return {ticket: count for ticket, count in every.items() if count}


def tokens_of(ticket: RequestHandle) -> int:
    return sum(isinstance(event, Token) for event in ticket.happened)


def check_round(rounds: Scheduler, clients: Clients, before: dict[RequestHandle, int]) -> None:
    assert not [run for run in rounds.runs if run.ticket.early_end], "ends are not put off"
    for ticket, count in before.items():
        assert ticket.is_finished or tokens_of(ticket) > count, "every answer has gone on"
    stats, streams = rounds.stats(len(clients.queue)), len(clients.given())
    there = sum(not ticket.is_finished for ticket in clients.tickets)
    assert (stats.running, stats.prefilling) == (streams, there - len(clients.queue) - streams)
    assert stats.finished == Counter(read(ticket)[1].reason for ticket in clients.ended)


def check_pieces(ticket: RequestHandle, limits: Limits) -> None:
    """The prompt grows by pieces that are not too long, from what was there."""
    pieces = [event for event in ticket.happened if isinstance(event, Prefilled)]
    done, reused = [piece.done for piece in pieces], read(ticket)[1].usage.reused_tokens
    assert {piece.reused for piece in pieces} <= {reused}
    assert not reused or done[0] == reused
    steps = [new - old for old, new in zip([reused, *done], done, strict=False)]
    most = limits.reproducible or limits.prefill_chunk_tokens
    assert all(0 < step <= most for step in steps[bool(reused) :])
    assert tokens_of(ticket) == 0 or done[-1] == len(ticket.request.ids)


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule(
    llm: hkv.LLM, right: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    dice = random.Random(seed)
    limits = Limits(
        max_running=dice.choice((2, 5)),
        prefill_chunk_tokens=dice.choice((50, 2048)),
        max_stall_ms=dice.choice((10, 1000)),
        prefix_bytes=dice.choice((0, 1 << 18, 1 << 30)),
        reproducible=64 if seed == 0 else None,
    )
    contexts = None if seed % 2 == 0 else ContextRegistry(tmp_path)
    failures = 0

    def fail(_: Any, args: tuple[Any, ...]) -> None:
        nonlocal failures
        if not limits.reproducible and dice.random() < 0.03:
            failures += len(args[0]) == 1
            raise RuntimeError("as a test")

    made = caches_made(llm, monkeypatch)
    clients = Clients(dice, 3 if limits.reproducible else 7)
    with scheduling(llm, limits, contexts, clients.ended.append) as rounds:
        hook = llm.model.register_forward_pre_hook(fail)
        while not clients.are_done:
            clients.act()
            rounds.admit(clients.queue)
            assert len(rounds.runs) <= limits.max_running
            before = clients.given()
            rounds.round()
            check_round(rounds, clients, before)
            if not rounds.runs:
                rounds.save_some(lambda: None)
        hook.remove()
        stats = rounds.stats(0)
    assert all(cache.state.is_closed for cache in made)
    assert sorted(map(id, clients.ended)) == sorted(map(id, clients.tickets)), "each has one end"
    ends = [read(ticket) for ticket in clients.tickets]
    for ticket, (tokens, end) in zip(clients.tickets, ends, strict=True):
        want = right(ticket.request)
        assert tokens == (want if end.reason == "length" else want[: len(tokens)])
        assert end.reason in ("length", "error", ticket.early_end)
        assert (end.report.recall is not None) <= bool(ticket.request.audit_every)
        check_pieces(ticket, limits)
    assert stats.finished.get("error", 0) == failures
    usages = [end.usage for _, end in ends]
    assert stats.prompt_tokens == sum(usage.prompt_tokens for usage in usages)
    assert stats.completion_tokens == sum(usage.completion_tokens for usage in usages)
    assert stats.reused_tokens == sum(usage.reused_tokens for usage in usages)
    assert stats.prefix_hits == sum(usage.reused_tokens > 0 for usage in usages)
    held = stats.device_kv_bytes + stats.host_kv_bytes + stats.host_index_bytes
    assert held == stats.prefix_bytes <= limits.prefix_bytes
