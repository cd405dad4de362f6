"""Many requests to one model: answers, order, ends, errors and limits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import (
    BusyError,
    CapacityError,
    ConfigError,
    DeviceMemoryError,
    NonFiniteError,
    QueueFullError,
)
from hybrid_kv.ops.host_memory import FreeMemory
from hybrid_kv.serve import (
    Engine,
    Finished,
    Limits,
    Prefilled,
    Request,
    RequestHandle,
    RequestReport,
    Sampling,
    Token,
    Usage,
    running,
)
from hybrid_kv.serve.prefill_queue import KeptPrefixes
from hybrid_kv.serve.running import needed_bytes
from hybrid_kv.serve.scheduler import EngineCounters, Scheduler
from hybrid_kv.store import memory
from hybrid_kv.store.layer import TierBytes
from tests.contracts.architectures import build
from tests.models.folder import tokenizer
from tests.serve.asking import (
    NEW,
    UNJUDGED,
    admitted,
    alone,
    asked,
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


@pytest.fixture(params=[16, 37])
def llm(model: PreTrainedModel, request: pytest.FixtureRequest) -> Iterator[hkv.LLM]:
    config = tiered(request.param).opened()
    with hkv.load(model, tokenizer=tokenizer(), config=config) as loaded:
        yield loaded


@pytest.fixture
def one(model: PreTrainedModel) -> Iterator[hkv.LLM]:
    with hkv.load(model, tokenizer=tokenizer(), config=tiered(16).opened()) as loaded:
        yield loaded


# Answers ------------------------------------------------------------------------------------------


def test_together_requests_answer_as_alone(llm: hkv.LLM) -> None:
    page = llm.config.page_size
    methods = [
        None,
        hkv.HybridConfig(method="full", page_size=page),
        hkv.HybridConfig(method="quest", page_size=page).opened(),
        tiered(page, spare_tokens=2 * page).opened(),
    ]
    requests = [
        asked(length, config=methods[number % 4])
        for number, length in enumerate((300, 5, 90, 41, 170, 33, 64))
    ]
    want = [alone(llm, request) for request in requests]
    with Engine(llm, Limits(prefill_chunk_tokens=50, prefix_bytes=0)) as engine:
        tickets = [engine.submit(request) for request in requests]
        found = [read(ticket) for ticket in tickets]
        assert [tokens for tokens, _ in found] == want
        assert {end.reason for _, end in found} == {"length"}
        until(lambda: engine.stats().finished == {"length": 7})  # they are as of a moment ago
        stats = engine.stats()
    assert stats.joined_rows > stats.steps, "some steps had several rows"
    assert stats.alone == {}
    assert stats.completion_tokens == 7 * NEW
    assert stats.prompt_tokens == sum(len(request.ids) for request in requests)
    assert stats.finished == {"length": 7}


def test_prompts_are_computed_between_steps_of_others(one: hkv.LLM) -> None:
    limits = Limits(prefill_chunk_tokens=20, prefix_bytes=0)
    with slow(one, 0.002), Engine(one, limits) as engine:
        first = engine.submit(asked(30, max_new_tokens=160))
        until(lambda: any(isinstance(event, Token) for event in first.happened))
        second = engine.submit(asked(400))
        read(second)
        between = [e for e in first.happened if isinstance(e, Token)]
        assert len(between) >= 20, "one token for each piece of the other prompt"
        assert not first.is_finished
        pieces = [event.done for event in second.happened if isinstance(event, Prefilled)]
        assert max(b - a for a, b in zip([0, *pieces], pieces, strict=False)) <= 20
        assert pieces[-1] == 400
        read(first)
        until(lambda: is_idle(engine))
        stats = engine.stats()
    assert stats.stall_ms >= stats.last_stall_ms > 2


def test_a_model_that_cannot_be_joined_is_served_row_by_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "hybrid_kv.serve")
    model: Any = build("gemma2")
    with hkv.load(model, config=tiered(16).opened()) as llm:
        requests = [asked(40, max_new_tokens=20), asked(25, max_new_tokens=20)]
        want = [alone(llm, request) for request in requests]
        with slow(llm, 0.003), Engine(llm) as engine:
            tickets = [engine.submit(request) for request in requests]
            found = [read(ticket) for ticket in tickets]
            until(lambda: is_idle(engine))
            assert [tokens for tokens, _ in found] == want
            (reason,) = engine.stats().alone
        assert "transformers' own" in reason
        assert "joined step" not in caplog.text, "none is tried"
        assert all(end.report.alone == reason for _, end in found)


def test_bfloat16_rows_are_joined_and_answer_as_alone_but_for_ties() -> None:
    model: Any = small_model().to(torch.bfloat16)
    how = Sampling(temperature=0, logprobs=2)
    requests = [asked(length, sampling=how) for length in (60, 25, 130)]

    def tokens(tickets: list[RequestHandle]) -> list[list[Token]]:
        every = ([e for e in ticket.events() if isinstance(e, Token)] for ticket in tickets)
        return list(every)

    with hkv.load(model, config=tiered(16).opened()) as llm:
        with slow(llm), Engine(llm, Limits(prefix_bytes=0)) as engine:
            together = tokens([engine.submit(request) for request in requests])
            stats = engine.stats()
        with Engine(llm, Limits(prefix_bytes=0)) as engine:
            single = [tokens([engine.submit(request)])[0] for request in requests]
    assert stats.alone == {}
    for row, want in zip(together, single, strict=True):
        assert len(row) == len(want) == NEW
        for one, other in zip(row, want, strict=True):
            (_, best), (_, second) = other.top
            if best - second < 0.1:
                break  # a tie by the dtype's grain, after which the texts may differ
            assert one.id == other.id
            assert one.logprob == pytest.approx(other.logprob, abs=0.1)


def test_a_seed_draws_what_generate_draws(one: hkv.LLM) -> None:
    how: dict[str, Any] = {"temperature": 1.3, "top_p": 0.9, "top_k": 7}
    sampled = [Sampling(**how, seed=seed) for seed in (1, 2)]
    want = [
        one.generate(
            list(prompt(50)), max_new_tokens=NEW, do_sample=True, seed=sampling.seed, **how
        ).token_ids
        for sampling in sampled
    ]
    assert want[0] != want[1]
    with Engine(one) as engine:
        tickets = [engine.submit(asked(50, sampling=sampling)) for sampling in sampled]
        assert [read(ticket)[0] for ticket in tickets] == want


def test_answers_end_at_end_ids_and_stop_strings(one: hkv.LLM) -> None:
    with Engine(one) as engine:
        tokens, end = read(engine.submit(asked(50, max_new_tokens=20)))
        assert end.reason == "length"
        words = one.require_tokenizer().decode(tokens).split()
        place = next(n for n in range(3, 20) if tokens[n] not in tokens[:n])
        ended, end = read(engine.submit(asked(50, max_new_tokens=20, end_ids=(tokens[place],))))
        assert (ended, end.reason) == (tokens[: place + 1], "stop")
        stop = f"{words[place - 1]} {words[place]}"
        ticket = engine.submit(asked(50, max_new_tokens=20, stop=(stop,)))
        stopped, end = read(ticket)
        text = "".join(event.text for event in ticket.events() if isinstance(event, Token))
        assert (stopped, end.reason) == (tokens[: place + 1], "stop")
        assert text == " ".join(words).partition(stop)[0]
        begun = f"{words[place]} and more"
        ticket = engine.submit(asked(50, max_new_tokens=place + 1, stop=(begun,)))
        text = "".join(event.text for event in ticket.events() if isinstance(event, Token))
        assert text == " ".join(words[: place + 1]), "what only began a stop string is shown"


def test_logprobs_are_those_of_the_model(one: hkv.LLM) -> None:
    model: Any = one.model
    request = asked(30, sampling=Sampling(temperature=0, logprobs=3))
    with Engine(one) as engine:
        events = [event for event in engine.submit(request).events() if isinstance(event, Token)]
    ids = torch.tensor([[*request.ids, *(event.id for event in events)]])
    with torch.inference_mode():
        logprobs = model(ids).logits.log_softmax(-1)[0, 29:-1]
    for event, row in zip(events, logprobs, strict=True):
        values, best = row.topk(3)
        assert event.id == best[0]
        assert event.logprob == pytest.approx(float(values[0]), abs=1e-3)
        assert [token for token, _ in event.top] == best.tolist()
        assert [value for _, value in event.top] == pytest.approx(values.tolist(), abs=1e-3)


def test_a_report_says_what_an_answer_took_and_read(one: hkv.LLM) -> None:
    config = tiered(16, **{"cold.top_k": 8, "audit.min_recall": 0.0, **UNJUDGED})
    with Engine(one, Limits(prefix_bytes=0)) as engine:
        begin = monotonic()
        _, end = read(engine.submit(asked(300, max_new_tokens=40, config=config, audit_every=1)))
        took = monotonic() - begin
    report = end.report
    assert len(report.itl_ms) == 39
    assert report.ttft_s is not None
    assert report.ttft_s + sum(report.itl_ms) / 1e3 < took
    assert 0 <= report.queue_s <= report.ttft_s
    assert 8 < report.attended_per_token < 60
    assert report.prompt_share == pytest.approx(report.attended_per_token / 320, rel=0.1)
    assert report.recall is not None
    assert 0 < report.recall <= 1
    assert report.missed_mass is not None
    assert 0 < report.missed_mass < 1
    assert report.device_kv_bytes > 0
    assert report.host_kv_bytes > report.device_kv_bytes
    assert report.host_index_bytes > 0
    assert report.prefill_error is None
    audited = config.replace(audit_every=1)
    with scheduling(one) as rounds:
        ends = ended(rounds, *admitted(rounds, asked(100, config=audited, audit_every=0)))
        ends += ended(rounds, *admitted(rounds, asked(100, config=audited)))
    assert [end.report.recall is None for end in ends] == [True, False]


def test_a_report_says_what_of_the_prompt_was_read(one: hkv.LLM) -> None:
    sparse = tiered(16, prefill=0.3)
    limits = Limits(prefix_bytes=0, prefill_chunk_tokens=100)
    with Engine(one, limits) as engine:
        first = read(engine.submit(asked(400, max_new_tokens=3, config=sparse)))[1].report
        exact = read(engine.submit(asked(400, max_new_tokens=3, config=tiered(16))))[1].report
    assert (exact.prefill_density, exact.prefill_error) == (None, None)
    assert first.prefill_density is not None
    assert first.prefill_error is not None
    assert 0 < first.prefill_density < 1
    assert 0 < first.prefill_error < 1


# Ends ---------------------------------------------------------------------------------------------


def test_cancelling_in_prefill_and_in_decode_ends_that_request_only(one: hkv.LLM) -> None:
    limits = Limits(prefill_chunk_tokens=16, prefix_bytes=0)
    want = alone(one, asked(60, max_new_tokens=80))
    with slow(one, 0.003), Engine(one, limits) as engine:
        kept = engine.submit(asked(60, max_new_tokens=80))
        decoding = engine.submit(asked(20, max_new_tokens=500))
        prefilling = engine.submit(asked(900))
        waiting = engine.submit(asked(901))
        until(lambda: any(isinstance(event, Token) for event in decoding.happened))
        until(lambda: prefilling.happened)
        for ticket in (decoding, prefilling, waiting):
            ticket.cancel()
        ends = [read(ticket) for ticket in (decoding, prefilling, waiting)]
        assert [end.reason for _, end in ends] == ["cancelled"] * 3
        assert 0 < len(ends[0][0]) < 500
        assert ends[1][0] == ends[2][0] == []
        assert read(kept)[0] == want
        until(lambda: is_idle(engine))
        assert engine.stats().device_kv_bytes == 0


def test_time_limits_end_requests_wherever_they_are(one: hkv.LLM) -> None:
    limits = Limits(max_running=1, prefill_chunk_tokens=16, request_timeout_s=0.5)
    with slow(one), Engine(one, limits) as engine:
        begin = monotonic()
        tickets = [
            engine.submit(asked(20, max_new_tokens=900)),
            engine.submit(asked(20, max_new_tokens=900, timeout_s=0.2)),
        ]
        own = [ticket.deadline or 0.0 for ticket in tickets]
        assert own[1] < own[0] < own[1] + 0.4, "the shorter one counts"
        reasons = [read(ticket)[1].reason for ticket in tickets]
        assert reasons == ["timeout", "timeout"]
        assert monotonic() - begin > 0.4
        assert len(read(tickets[1])[0]) == 0, "it waited all the time"


def test_requests_that_end_while_they_wait_end_at_once(one: hkv.LLM) -> None:
    with scheduling(one, Limits(max_running=1)) as rounds:
        admitted(rounds, asked(20))
        tickets = [RequestHandle(asked(20)) for _ in range(3)]
        tickets[0].cancel()
        tickets[2].cancel()
        queue = deque(tickets)
        rounds.admit(queue)
        assert [ticket.is_finished for ticket in tickets] == [True, False, True]
        assert list(queue) == [tickets[1]]
        [end] = ended(rounds, tickets[0])
    assert end.usage == Usage(20)
    assert end.report.queue_s > 0


def test_a_retry_waits_for_a_slot_by_the_time_that_requests_took() -> None:
    def end(seconds: float) -> None:
        counters.end(Finished("length", Usage(3)), seconds)

    counters = EngineCounters()
    end(40.0)
    assert counters.retry_after_s(4) == 10
    end(90.0)
    assert counters.retry_after_s(4) == pytest.approx(12.5), "a new one is a fifth of the mean"
    assert counters.retry_after_s(100) == 1


def test_waits_are_counted_and_the_longest_is_told() -> None:
    counters = EngineCounters()
    for seconds in (0.04, 0.3, 0.06):
        counters.stall(seconds, bound=0.1)
    stats = counters.stats(0, [], 32, TierBytes(0, 0, 0))
    assert (stats.stalls, stats.late_stalls) == (3, 1)
    assert (stats.stall_ms, stats.last_stall_ms) == (300, 60)


def test_what_audits_found_is_told_as_a_mean() -> None:
    counters, usage = EngineCounters(), Usage(3)
    for number in (1, 3):
        report = RequestReport(recall=0.2 * number, missed_mass=0.1 * number, mass_error=-0.1)
        counters.end(Finished("length", usage, report=report), 1.0)
        counters.end(Finished("length", usage), 1.0)
    stats = counters.stats(0, [], 32, TierBytes(0, 0, 0))
    found = (stats.recall, stats.missed_mass, stats.mass_error)
    assert found == pytest.approx((0.4, 0.2, -0.1))


def test_a_full_queue_says_when_to_come_back(one: hkv.LLM) -> None:
    with slow(one), Engine(one, Limits(max_running=1, max_queue=1)) as engine:
        tickets = [engine.submit(asked(20, max_new_tokens=100)) for _ in range(2)]
        with pytest.raises(QueueFullError, match="at most 1 requests may wait while 1 run") as full:
            engine.submit(asked(20))
        assert full.value.retry_after_s >= 1
        tickets[0].cancel()
        read(tickets[0])
        read(engine.submit(asked(20)))


def test_an_error_ends_its_own_request_only(one: hkv.LLM) -> None:
    want = alone(one, asked(40))
    config = tiered(16, **{"audit.action": "raise", "cold.top_k": 1, "audit.min_recall": 0.0})
    strict = config.replace(**{"audit.max_missed_mass": 1e-6, "audit_every": 1})
    with Engine(one, Limits(prefix_bytes=0)) as engine:
        failing = engine.submit(asked(300, max_new_tokens=400, config=strict))
        others = [engine.submit(asked(40)) for _ in range(2)]
        _, end = read(failing)
        assert end.reason == "error"
        assert type(end.error).__name__ == "AuditError"
        assert [read(ticket)[0] for ticket in others] == [want, want]


def test_what_an_audit_finds_in_the_last_step_is_an_error_too(one: hkv.LLM) -> None:
    config = tiered(16, **{"audit.action": "raise", "cold.top_k": 1, "audit.max_missed_mass": 1e-6})
    request = asked(300, max_new_tokens=60, config=config, audit_every=1)
    with scheduling(one, Limits(prefix_bytes=0)) as rounds:
        [end] = ended(rounds, *admitted(rounds, request))
        last = replace(request, max_new_tokens=end.usage.completion_tokens)
        [again] = ended(rounds, *admitted(rounds, last))
    assert [end.reason, again.reason] == ["error", "error"]


def test_weights_that_give_nan_are_an_error_of_each_request(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    broken: Any = small_model()
    broken.model.norm.weight.data[0] = torch.nan
    with hkv.load(broken, config=tiered(16)) as llm, Engine(llm) as engine:
        requests = [asked(20), asked(40), asked(30, max_new_tokens=1)]
        ends = [read(engine.submit(request))[1] for request in requests]
    assert [type(end.error) for end in ends] == [NonFiniteError] * 3
    assert caplog.text.count("Traceback") == 3  # whoever serves has to know


def test_an_unexpected_error_is_named(one: hkv.LLM, caplog: pytest.LogCaptureFixture) -> None:
    def break_down(*_: Any) -> None:
        raise ZeroDivisionError("of a hook")

    with Engine(one) as engine:
        hook = one.model.register_forward_pre_hook(break_down)
        _, end = read(engine.submit(asked(20)))
        hook.remove()
        assert "ZeroDivisionError: of a hook" in str(end.error)
        assert "in break_down" in caplog.text
        assert read(engine.submit(asked(20)))[1].reason == "length"


def test_a_joined_step_that_fails_is_taken_row_by_row(one: hkv.LLM) -> None:
    requests = [asked(20), asked(30), asked(50)]
    want = [alone(one, request) for request in requests]

    def no_batches(_: Any, args: tuple[Any, ...]) -> None:
        if args[0].shape[0] > 1:
            raise MemoryError("a batch is too much")

    inner: Any = one.model
    hook = inner.model.layers[1].mlp.register_forward_pre_hook(no_batches)
    try:
        with Engine(one) as engine:
            tickets = [engine.submit(request) for request in requests]
            assert [read(ticket)[0] for ticket in tickets] == want
    finally:
        hook.remove()


@pytest.mark.parametrize("fails_whole", [False, True])
def test_a_row_that_fails_in_a_joined_step_ends_by_itself(
    one: hkv.LLM, monkeypatch: pytest.MonkeyPatch, fails_whole: bool
) -> None:
    """Also where the whole step failed before, and is made again row by row."""
    requests = [asked(20, max_new_tokens=60), asked(30, max_new_tokens=60)]
    want, inner, failures = alone(one, requests[1]), one.model, list[Exception]()

    def fail(*_: Any) -> None:
        raise NonFiniteError("as a test")

    def fail_once(*_: Any) -> None:
        if failures:
            raise failures.pop()

    hook = inner.register_forward_pre_hook(fail_once)
    with scheduling(one, Limits(reproducible=64)) as rounds:
        tickets = admitted(rounds, *requests)
        first, second = rounds.runs
        until(lambda: rounds.round() or (first.is_ready and second.is_ready))
        given = first.usage().completion_tokens
        monkeypatch.setattr(first.cache.kv.finite, "watch", fail)
        if fails_whole:
            failures.append(MemoryError("a batch is too much"))
        ends = ended(rounds, *tickets)
    hook.remove()
    assert not failures
    assert [end.reason for end in ends] == ["error", "length"]
    assert ends[0].usage.completion_tokens == given
    assert read(tickets[1])[0] == want


def test_a_request_that_cannot_begin_ends_with_its_error(
    one: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for ever, in no list, and so did `drain`."""
    begin, wrong = running.RunningRequest.__init__, asked(20, seed=1)

    def beginning(
        self: running.RunningRequest, llm: hkv.LLM, ticket: RequestHandle, *args: Any
    ) -> None:
        if ticket.request is wrong:
            raise MemoryError("no room")
        begin(self, llm, ticket, *args)

    monkeypatch.setattr(running.RunningRequest, "__init__", beginning)
    with scheduling(one) as rounds:
        ends = ended(rounds, *admitted(rounds, wrong, asked(20)))
    assert [end.reason for end in ends] == ["error", "length"]
    assert type(ends[0].error).__name__ == "CapacityError"


@pytest.mark.parametrize(
    "place",
    [
        (running.RunningRequest, "report"),
        (running.RunningRequest, "settle"),
        (KeptPrefixes, "keep"),
    ],
)
def test_an_error_as_a_request_ends_is_its_own(
    one: hkv.LLM, monkeypatch: pytest.MonkeyPatch, place: tuple[type, str]
) -> None:
    """It ended nothing: in no list any more, the request had no last event."""
    whole, calls = getattr(*place), iter(range(9))

    def failing(*args: Any) -> Any:
        if not next(calls):
            raise ZeroDivisionError("as a test")
        return whole(*args)

    monkeypatch.setattr(*place, failing)
    with scheduling(one) as rounds:
        tickets = admitted(rounds, asked(20), asked(30, max_new_tokens=30), asked(40))
        ends = ended(rounds, *tickets)
    assert sorted(end.reason for end in ends) == ["error", "length", "length"]
    [(failed, ticket)] = [both for both in zip(ends, tickets, strict=True) if both[0].error]
    assert "ZeroDivisionError: as a test" in str(failed.error)
    assert len(read(ticket)[0]) == ticket.request.max_new_tokens


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (asked(1020), "context must be at most 1024 tokens"),
        (Request((3, 99), 4), "token ids must be 0..11, got 3..99"),
        (asked(20, sampling=Sampling(logit_bias=((3, 1.0), (12, 1.0)))), "token ids 0..11, got 12"),
        (asked(600), "prompt must have at most 500 tokens on this server, got 600"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    one: hkv.LLM, request_: Request, said: str
) -> None:
    limits = Limits(max_prompt_tokens=500 if "500" in said else None)
    with Engine(one, limits) as engine, pytest.raises(ConfigError, match=said):
        engine.submit(request_)


def test_stop_strings_need_a_tokenizer(model: PreTrainedModel) -> None:
    needed = pytest.raises(ConfigError, match="stop strings need a tokenizer")
    with hkv.load(model) as llm, Engine(llm) as engine, needed:
        engine.submit(asked(20, stop=("a",)))


def test_what_fits_into_no_memory_is_refused_at_once(
    one: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(one) as engine:
        monkeypatch.setattr(memory, "free_memory", lambda: FreeMemory(100_000))
        full = asked(900, config=hkv.HybridConfig(method="full", page_size=16))
        assert needed_bytes(one, full).host < needed_bytes(one, asked(900)).host, "it has no index"
        with pytest.raises(CapacityError, match="context of 909 tokens needs"):
            engine.submit(asked(900))
        assert read(engine.submit(asked(20)))[1].reason == "length"


def test_requests_wait_for_memory_that_others_hold(
    one: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [asked(500) for _ in range(3)]
    room, most = int(2.5 * needed_bytes(one, requests[0]).host), 0
    with slow(one, 0.003), Engine(one, Limits(prefix_bytes=0)) as engine:
        runs = engine._rounds.runs

        def left() -> FreeMemory:
            return FreeMemory(room - sum(run.held_bytes for run in runs))

        monkeypatch.setattr(memory, "free_memory", left)
        tickets = [engine.submit(request) for request in requests]
        while not tickets[-1].is_finished:
            most = max(most, len(runs))
            sleep(0.001)
        assert {read(ticket)[1].reason for ticket in tickets} == {"length"}
    assert most == 2


@pytest.mark.parametrize("is_admitted", [False, True])
def test_memory_that_has_gone_since_a_request_was_taken_on_ends_it(
    one: hkv.LLM, monkeypatch: pytest.MonkeyPatch, is_admitted: bool
) -> None:
    """Nobody holds any for which it could wait."""
    ticket = RequestHandle(asked(100))
    half = FreeMemory(needed_bytes(one, ticket.request).host // 2)
    with scheduling(one, Limits(prefill_chunk_tokens=16)) as rounds:
        rounds.admit(deque([ticket] * is_admitted))
        monkeypatch.setattr(memory, "free_memory", lambda: half)
        rounds.admit(deque([ticket] * (not is_admitted)))
        rounds.round()
        assert [type(event) for event in ticket.happened] == [Finished], "nothing was computed"
        assert isinstance(read(ticket)[1].error, CapacityError)


def test_kept_prefixes_give_way_to_a_prompt_that_was_admitted_before(
    one: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scheduling(one) as rounds:
        ended(rounds, *admitted(rounds, asked(100), asked(100, seed=1)))
        tickets = admitted(rounds, asked(200))
        room = FreeMemory(4 * needed_bytes(one, asked(200)).host)
        monkeypatch.setattr(
            memory, "free_memory", lambda: FreeMemory(0) if rounds.stats(0).prefixes else room
        )
        assert [end.reason for end in ended(rounds, *tickets)] == ["length"]


def test_kept_prefixes_give_way_to_a_request_beside_others(
    one: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 4 * needed_bytes(one, asked(500)).host
    with slow(one, 0.01), Engine(one) as engine:
        rounds = engine._rounds
        first = engine.submit(asked(100, seed=1, max_new_tokens=400))
        read(engine.submit(asked(500, seed=2)))
        until(lambda: engine.stats().prefixes == 1)
        monkeypatch.setattr(
            memory, "free_memory", lambda: FreeMemory(0 if rounds._prefixes else room)
        )
        read(engine.submit(asked(500, seed=3)))
        assert not first.is_finished, "the other would have waited for its end"
        first.cancel()


def test_requests_wait_for_memory_of_a_device_that_prompts_hold(
    one: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card that is computed: it has room for two and a half prompts until they are computed."""
    each, most = 2 * 72 * 2 * 4, 0  # keys and values of a token: head_dim, layers, float32
    requests = [asked(500, max_new_tokens=2, seed=seed) for seed in range(4)]
    size = int(2.5 * each * 502 / 0.9)
    with slow(one, 0.003), Engine(one, Limits(prefix_bytes=0)) as engine:
        runs = engine._rounds.runs

        def free(device: torch.device) -> int:
            return size - sum(each * run.done for run in runs if not run.is_sealed)

        monkeypatch.setattr(running, "free_device_bytes", free)
        assert needed_bytes(one, requests[0]).device == 502 * each
        tickets = [engine.submit(request) for request in requests]
        while not tickets[-1].is_finished:
            most = max(most, sum(not run.is_sealed for run in runs))
            sleep(0.001)
        assert {read(ticket)[1].reason for ticket in tickets} == {"length"}
        monkeypatch.setattr(running, "free_device_bytes", lambda device: each * 300)
        until(lambda: is_idle(engine))
        with pytest.raises(DeviceMemoryError, match="502 tokens needs 578,304 bytes of GPU memory"):
            engine.submit(requests[0])
    assert most == 2


def test_a_device_is_promised_what_of_prompts_is_not_computed(
    one: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = 2 * 72 * 2 * 4
    size = int(each * 1100 / 0.9)
    with scheduling(one, Limits(prefill_chunk_tokens=250, prefix_bytes=0)) as rounds:
        runs = rounds.runs
        monkeypatch.setattr(
            running, "free_device_bytes", lambda device: size - sum(each * run.done for run in runs)
        )
        admitted(rounds, asked(500, max_new_tokens=2))
        until(lambda: rounds.round() or runs[0].done >= 250)
        admitted(rounds, asked(500, max_new_tokens=2), asked(500, max_new_tokens=2))
        assert len(runs) == 2, "one fits beside the rest of the first, and none beside both"


# The end of an engine -----------------------------------------------------------------------------


def test_the_model_is_the_engines_until_it_is_closed(one: hkv.LLM) -> None:
    with Engine(one), pytest.raises(BusyError):
        one.generate([3, 4, 5], max_new_tokens=2)
    assert len(one.generate([3, 4, 5], max_new_tokens=2).token_ids) == 2


def test_a_busy_model_gets_no_engine(one: hkv.LLM) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with one.runtime.generating():
            entered.set()
            leave.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert entered.wait(60)
    with pytest.raises(BusyError):
        Engine(one)
    leave.set()
    holder.join()


def test_draining_finishes_or_cancels_and_says_which(one: hkv.LLM) -> None:
    with slow(one, 0.02), Engine(one) as engine:
        short = engine.submit(asked(20, max_new_tokens=2))
        long = engine.submit(asked(30, max_new_tokens=900))
        drained = engine.drain(5.0)
        assert drained == (1, 1)
        assert [read(ticket)[1].reason for ticket in (short, long)] == ["length", "cancelled"]
        with pytest.raises(BusyError, match="takes no new requests"):
            engine.submit(asked(20))


def test_closing_during_work_cancels_everything(one: hkv.LLM) -> None:
    with slow(one, 0.01):
        engine = Engine(one, Limits(max_running=2, prefill_chunk_tokens=16))
        tickets = [engine.submit(asked(n, max_new_tokens=500)) for n in (20, 400, 30)]
        until(lambda: any(isinstance(event, Token) for event in tickets[0].happened))
        engine.close()
    assert [read(ticket)[1].reason for ticket in tickets] == ["cancelled"] * 3
    engine.close()


def test_a_bug_in_the_loop_leaves_nobody_waiting(
    one: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow(one, 0.01), Engine(one, Limits(max_running=2)) as engine:
        tickets = [engine.submit(asked(20, seed, max_new_tokens=500)) for seed in range(3)]
        until(lambda: tickets[0].happened and tickets[1].happened)

        def fail(self: Scheduler) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(Scheduler, "round", fail)
        until(lambda: all(ticket.is_finished for ticket in tickets))
        assert all("KeyError" in str(read(ticket)[1].error) for ticket in tickets)
        with pytest.raises(BusyError):
            engine.submit(asked(20))


def test_products_are_tried_before_the_first_request(
    llm: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream would wait for the first step of so many rows."""
    tried: list[int] = []
    monkeypatch.setattr(type(llm.runtime), "try_products", lambda self: tried.append(1))
    with Engine(llm):
        assert tried == [1]
