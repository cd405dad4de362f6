"""Requests whose every token shall be full attention's, alone, beside others and after others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError
from hybrid_kv.serve import Engine, Limits, Request, Sampling
from tests.serve.asking import alone, asked, prompt, read, slow, small_model, tiered

NEW = 40
FULL = hkv.HybridConfig(method="full")
DRAWN = Sampling(temperature=1.3, seed=7)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return small_model()


@pytest.fixture
def llm(model: PreTrainedModel) -> Iterator[hkv.LLM]:
    """Steps see 4 of some hundred cold entries and no estimate, so that drafts are often wrong."""
    config = tiered(8, method="flat", top_k=4)
    with hkv.LLM(model, None, config) as llm:
        yield llm


def exact(length: int, seed: int = 0, **changes: Any) -> Request:
    return replace(asked(length, seed, max_new_tokens=NEW), exact=True, **changes)


def full(request: Request) -> Request:
    return replace(request, exact=False, config=FULL)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), DRAWN])
def test_tokens_are_those_of_full_attention(llm: hkv.LLM, sampling: Sampling) -> None:
    drafted = accepted = others = 0
    with Engine(llm) as engine:
        for seed in range(3):
            request = exact(301 + seed, seed, sampling=sampling)
            tokens, end = read(engine.submit(request))
            right, _ = read(engine.submit(full(request)))
            assert tokens == right, seed
            others += read(engine.submit(replace(request, exact=False)))[0] != right
            assert end.report.exact is not None
            drafted += end.report.exact.drafted
            accepted += end.report.exact.accepted
    assert drafted > accepted > 0  # else this proves nothing
    assert others


def test_requests_beside_each_other(llm: hkv.LLM) -> None:
    requests = [exact(200, 1), asked(230, 2, max_new_tokens=NEW), exact(211, 3), exact(200, 1)]
    with Engine(llm) as engine:
        tickets = [engine.submit(request) for request in requests]
        found = [read(ticket) for ticket in tickets]
    for request, (tokens, end) in zip(requests, found, strict=True):
        assert (end.report.exact is not None) == request.exact
        if request.exact:
            assert tokens == alone(llm, full(request))


def test_what_another_answer_left_unread_is_computed_again(llm: hkv.LLM) -> None:
    first = asked(200, 1, max_new_tokens=NEW)
    with Engine(llm) as engine:
        answer, _ = read(engine.submit(first))
        longer = (*first.ids, *answer, *prompt(20, 5))
        again = Request(longer, NEW, sampling=first.sampling, exact=True)
        tokens, end = read(engine.submit(again))
    assert tokens == alone(llm, full(again))
    assert end.usage.reused_tokens == 200  # of the answer nothing


def test_a_prompt_that_another_one_continues_inexactly_is_not_shared(llm: hkv.LLM) -> None:
    """It had the first token of the other, and none of what was to be computed again."""
    first = asked(200, 1, max_new_tokens=NEW)
    with Engine(llm) as engine:
        answer, _ = read(engine.submit(first))
        longer = Request((*first.ids, *answer, *prompt(20, 5)), NEW, sampling=first.sampling)
        exactly = replace(longer, exact=True)
        with slow(llm, 0.002):
            tickets = [engine.submit(request) for request in (longer, exactly)]
            _, (tokens, end) = [read(ticket) for ticket in tickets]
    assert tokens == alone(llm, full(exactly))
    assert end.usage.reused_tokens == 200  # of the answer nothing


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
def test_an_answer_ends_in_the_middle_of_a_draft(llm: hkv.LLM, most: int) -> None:
    request = replace(exact(150, 4), max_new_tokens=most)
    whole = alone(llm, full(exact(150, 4)))
    with Engine(llm) as engine:
        assert read(engine.submit(request))[0] == whole[:most]
        stopped = replace(exact(150, 4), end_ids=(whole[most],))
        tokens, end = read(engine.submit(stopped))
    assert tokens == whole[: whole.index(whole[most]) + 1]
    assert end.reason == "stop"


def test_reproducible_answers_are_the_same(llm: hkv.LLM) -> None:
    request = exact(180, 6)
    with Engine(llm, Limits(reproducible=64)) as engine:
        many = [engine.submit(one) for one in (request, asked(90, 1), asked(70, 2))]
        together = next(read(ticket)[0] for ticket in many)
        assert read(engine.submit(request))[0] == together == alone(llm, full(request))


def test_a_method_that_loses_entries_is_refused_when_it_is_asked_for(llm: hkv.LLM) -> None:
    config = hkv.HybridConfig(method="streaming_llm")
    with Engine(llm) as engine, pytest.raises(ConfigError, match="'streaming_llm', which drops"):
        engine.submit(replace(exact(50), config=config))


def test_failures_end_one_request_and_leave_the_others(
    llm: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, calls = exact(150, 2), []

    def failing(*_: Any) -> Any:
        calls.append(1)
        raise RuntimeError("a pass failed")

    with Engine(llm) as engine:
        with monkeypatch.context() as patch:
            patch.setattr("hybrid_kv.models.exact_steps.ExactSteps.dense", failing)
            _, end = read(engine.submit(request))
        assert calls
        assert end.reason == "error"
        assert "a pass failed" in str(end.error)
        assert read(engine.submit(request))[0] == alone(llm, full(request))
