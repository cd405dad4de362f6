"""With `Limits.reproducible` an answer has the same bits whoever else asks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError
from hybrid_kv.models.joined import JoinedCache
from hybrid_kv.saved.registry import ContextRegistry
from hybrid_kv.serve import Engine, Limits, Prefilled, Request, RequestHandle, Sampling, Token
from hybrid_kv.serve.scheduler import Scheduler
from tests.serve.asking import (
    admitted,
    asked,
    prompt,
    scheduling,
    slow,
    small_model,
    tiered,
    until,
)

FLAT = {"kind": "flat", "precision": "stored"}
ALL_LOGPROBS = Sampling(temperature=0, logprobs=9)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32])
def llm(request: pytest.FixtureRequest) -> Iterator[hkv.LLM]:
    with hkv.load(small_model().to(request.param), config=tiered(16).opened()) as loaded:
        yield loaded


def requests() -> list[Request]:
    """Of several methods; some begin alike, two are the same."""
    methods = [
        None,
        hkv.HybridConfig(method="full", page_size=16),
        tiered(16, cold={"top_k": 9, "index": FLAT}),
    ]
    own = [
        asked(length, config=methods[number % 3], sampling=ALL_LOGPROBS)
        for number, length in enumerate((300, 5, 90, 41, 170, 33, 64, 128, 257, 16))
    ]
    longer = replace(own[0], ids=own[0].ids + prompt(60, seed=1))
    return [*own, longer, own[0], own[4]]


def told(ticket: RequestHandle) -> list[tuple[int, float, Any]]:
    """Every token with its log probabilities, to the last bit."""
    return [(e.id, e.logprob, e.top) for e in ticket.events() if isinstance(e, Token)]


def both_ways(llm: hkv.LLM, limits: Limits) -> tuple[list[Any], list[Any]]:
    """One request at a time, then all at once."""
    with slow(llm, 0.001), Engine(llm, limits) as engine:
        alone = [told(engine.submit(request)) for request in requests()]
        tickets = [engine.submit(request) for request in requests()]
        return alone, [told(ticket) for ticket in tickets]


def test_answers_have_the_same_bits_whoever_else_asks(llm: hkv.LLM) -> None:
    alone, beside = both_ways(llm, Limits(reproducible=37, max_stall_ms=10))
    assert beside == alone


def test_without_it_last_bits_hang_on_others(llm: hkv.LLM) -> None:
    """Or the test before this one would show nothing."""
    alone, beside = both_ways(llm, Limits(max_stall_ms=10, prefix_bytes=0))
    assert beside != alone


def test_every_piece_but_the_last_has_its_size_and_no_prefix_is_continued(llm: hkv.LLM) -> None:
    with Engine(llm, Limits(reproducible=37)) as engine:
        for _ in range(2):
            ticket = engine.submit(asked(100))
            done = [e.done for e in ticket.events() if isinstance(e, Prefilled)]
            assert done == [37, 74, 100]
        assert engine.stats().prefix_hits == engine.stats().prefixes == 0


def test_more_rows_than_one_pass_serves_take_two(llm: hkv.LLM) -> None:
    one = asked(40, sampling=ALL_LOGPROBS)
    others = [asked(20 + number, max_new_tokens=12) for number in range(11)]
    with slow(llm, 0.001), Engine(llm, Limits(reproducible=64)) as engine:
        want = told(engine.submit(one))
        tickets = [engine.submit(request) for request in (*others, one)]
        assert told(tickets[-1]) == want


def test_every_answer_goes_on_in_every_round(llm: hkv.LLM) -> None:
    """Also beyond the rows of one pass."""
    with scheduling(llm, Limits(reproducible=64)) as rounds:
        tickets = admitted(rounds, *[asked(5, seed, max_new_tokens=40) for seed in range(10)])
        until(lambda: rounds.round() or all(run.is_ready for run in rounds.runs))
        before = [len(run.times) for run in rounds.runs]
        rounds.round()
        assert [len(run.times) for run in rounds.runs] == [count + 1 for count in before]
        assert len(before) == len(tickets)


def test_a_step_that_fails_as_a_whole_is_made_again_row_by_row(
    llm: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, failed = Scheduler._forward, []

    def fail(self: Scheduler, cache: JoinedCache, tokens: list[int]) -> torch.Tensor:
        if len(tokens) > 1:
            failed.append(len(tokens))
            raise RuntimeError("of nobody's own cache")
        return forward(self, cache, tokens)

    monkeypatch.setattr(Scheduler, "_forward", fail)
    alone, beside = both_ways(llm, Limits(reproducible=37, max_stall_ms=10))
    assert failed
    assert beside == alone


def test_saved_contexts_are_refused_with_it(llm: hkv.LLM, tmp_path: Path) -> None:
    registry = ContextRegistry(tmp_path)
    with pytest.raises(ConfigError, match=r"^reproducible must go without saved contexts"):
        Engine(llm, Limits(reproducible=64), registry)
