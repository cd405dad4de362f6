"""Requests that begin like others continue from them, and answer as if they had computed it all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.saved.registry import ContextRegistry
from hybrid_kv.serve import Engine, Limits, Request, RequestHandle, Sampling, Token
from hybrid_kv.serve.prefill_queue import KeptPrefixes
from hybrid_kv.serve.scheduler import Scheduler
from tests.models.folder import tokenizer
from tests.serve.asking import (
    GREEDY,
    NEW,
    UNJUDGED,
    admitted,
    alone,
    asked,
    caches_made,
    ended,
    prompt,
    read,
    scheduling,
    slow,
    small_model,
    tiered,
    until,
)

METHODS: dict[str, dict[str, Any]] = {
    "hybrid": {"sink_tokens": 16, "window_tokens": 32},
    "full": {},
    "quest": {},
    "snapkv": {"budget_tokens": 64, "observed_tokens": 16},
    "streaming_llm": {"sink_tokens": 16, "window_tokens": 32},
}
LOSSY = {"snapkv", "streaming_llm"}


def config(method: str) -> hkv.HybridConfig:
    own = hkv.HybridConfig(method=method, page_size=16, index_build="wait", **METHODS[method])
    return own if method in LOSSY else own.opened()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return small_model()


@pytest.fixture
def llm(model: PreTrainedModel) -> Iterator[hkv.LLM]:
    with hkv.load(model, tokenizer=tokenizer(), config=tiered(16).opened()) as loaded:
        yield loaded


def answering(ticket: RequestHandle) -> bool:
    return any(isinstance(event, Token) for event in ticket.happened)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_prompt_several_times_is_computed_once(llm: hkv.LLM, method: str) -> None:
    request = asked(200, config=config(method))
    want = alone(llm, request)
    with slow(llm), Engine(llm) as engine:
        tickets = [engine.submit(request) for _ in range(3)]
        found = [read(ticket) for ticket in tickets]
    assert [tokens for tokens, _ in found] == [want] * 3
    assert [end.usage.reused_tokens for _, end in found] == [0, 200, 200]


def test_different_seeds_give_different_answers_to_one_prompt(llm: hkv.LLM) -> None:
    with Engine(llm) as engine:
        asked_for = [
            asked(200, sampling=Sampling(temperature=2.0, seed=seed), max_new_tokens=30)
            for seed in (1, 2, 1)
        ]
        tickets = [engine.submit(request) for request in asked_for]
        one, other, again = (read(ticket)[0] for ticket in tickets)
    assert one == again != other


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_that_goes_on_from_an_ended_one(llm: hkv.LLM, method: str) -> None:
    first = asked(200, config=config(method))
    with Engine(llm) as engine:
        answer = read(engine.submit(first))[0]
        ids = (*first.ids, *answer, *prompt(30, seed=9))
        later = Request(ids, NEW, first.sampling, config=first.config)
        tokens, end = read(engine.submit(later))
        until(lambda: engine.stats().finished.get("length") == 2)
        stats = engine.stats()
    # What was lost of the first prompt was chosen by its own end: it is computed anew.
    kept = 0 if method in LOSSY else 200 + NEW - 1
    assert end.usage.reused_tokens == kept
    assert tokens == alone(llm, later)
    assert stats.prefix_hits == (kept > 0)
    assert stats.reused_tokens == kept
    assert stats.prefixes == (0 if method in LOSSY else 1), "the longer one replaces the shorter"


@pytest.mark.parametrize("method", ["hybrid", "full", "quest"])
def test_prompts_share_what_they_begin_with_while_the_first_one_runs(
    llm: hkv.LLM, method: str
) -> None:
    own = config(method)
    document = prompt(170)
    requests = [
        Request((*document, *prompt(20 + n, seed=n)), 40, asked(1).sampling, config=own)
        for n in (1, 2, 3)
    ]
    want = [alone(llm, request) for request in requests]
    with slow(llm, 0.005), Engine(llm) as engine:
        tickets = [engine.submit(requests[0])]
        until(lambda: answering(tickets[0]))
        tickets += [engine.submit(request) for request in requests[1:]]
        found = [read(ticket) for ticket in tickets]
    assert [tokens for tokens, _ in found] == want
    assert [end.usage.reused_tokens >= 170 for _, end in found] == [False, True, True]


def test_other_settings_share_nothing_but_audits_do(llm: hkv.LLM) -> None:
    with Engine(llm) as engine:
        read(engine.submit(asked(200)))
        other = read(engine.submit(asked(200, config=config("full"))))[1]
        audited = read(engine.submit(asked(200, audit_every=1)))[1]
    assert other.usage.reused_tokens == 0
    assert audited.usage.reused_tokens == 199
    assert audited.report.missed_mass == pytest.approx(0, abs=1e-4)


def test_audits_of_what_goes_on_are_judged_by_its_own_settings(llm: hkv.LLM) -> None:
    """They were by those of whoever had computed the prompt."""
    strict = tiered(16, **{"audit.action": "raise", "cold.top_k": 1, "audit.max_missed_mass": 1e-6})
    calm = strict.replace(**{"audit.action": "warn", **UNJUDGED, "audit.min_recall": 0.0})
    for one, other, reason in ((calm, strict, "error"), (strict, calm, "length")):
        with scheduling(llm) as rounds:
            ended(rounds, *admitted(rounds, asked(300, config=one)))
            audited = asked(300, config=other, audit_every=1, max_new_tokens=40)
            [end] = ended(rounds, *admitted(rounds, audited))
        assert (end.usage.reused_tokens, end.reason) == (299, reason)


def test_prompts_with_other_settings_or_other_tokens_share_nothing_at_once(llm: hkv.LLM) -> None:
    dropping = tiered(4, method="streaming_llm")
    requests = [asked(200), asked(200, config=dropping), asked(200, 1), asked(200)]
    with scheduling(llm) as rounds:
        tickets = admitted(rounds, *requests)
        ends = ended(rounds, *tickets)
    assert [end.usage.reused_tokens for end in ends[:3]] == [0, 0, 0]
    assert ends[3].usage.reused_tokens > 190


def test_a_running_request_that_has_dropped_entries_is_not_gone_on_with(llm: hkv.LLM) -> None:
    dropping = tiered(4, method="streaming_llm")
    first = asked(200, config=dropping, max_new_tokens=50)
    with scheduling(llm) as rounds:
        admitted(rounds, first)
        until(lambda: rounds.round() or rounds.runs[0].is_ready)
        again = Request((*rounds.runs[0].ids, 5, 6), NEW, sampling=first.sampling, config=dropping)
        [ticket] = admitted(rounds, again)
        while not ticket.is_finished:
            rounds.round()
    answer, end = read(ticket)
    assert end.usage.reused_tokens == 0
    assert answer == alone(llm, again)


def test_what_failed_is_not_gone_on_with(llm: hkv.LLM) -> None:
    def fail(_: Any, args: tuple[Any, ...]) -> None:
        if args[0].shape[1] == 1:
            raise RuntimeError("a step failed")

    with Engine(llm) as engine:
        hook = llm.model.register_forward_pre_hook(fail)
        assert read(engine.submit(asked(200)))[1].reason == "error"
        hook.remove()
        assert read(engine.submit(asked(200)))[1].usage.reused_tokens == 0


def test_a_copy_that_fails_ends_its_own_request_only(
    llm: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: TieredCache) -> TieredCache:
        raise MemoryError("as a test")

    monkeypatch.setattr(TieredCache, "fork", fail)
    with scheduling(llm) as rounds:
        one, other = ended(rounds, *admitted(rounds, asked(200), asked(200)))
    assert (one.reason, type(other.error).__name__) == ("length", "CapacityError")


def test_every_cache_is_closed_at_its_end(
    llm: hkv.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when somebody collects it: builds of indexes go on until then."""
    made = caches_made(llm, monkeypatch)
    with scheduling(llm, Limits(prefix_bytes=1 << 19), ContextRegistry(tmp_path)) as rounds:
        for seed in range(3):
            ended(rounds, *admitted(rounds, asked(300, seed), asked(300, seed)))
            rounds.save_some(lambda: None)
            until(lambda: rounds.has_saved)
            rounds.save_some(lambda: None)
        lost = [cache for cache in made if not cache.state.is_closed]
        assert len(lost) <= 2, "one is kept, and one is being saved"
        admitted(rounds, asked(20))
        rounds.round()  # and is ended by the end of all
    assert len(made) > 6
    assert all(cache.state.is_closed for cache in made)


def test_a_cache_that_was_filled_for_a_request_that_has_ended_is_closed(
    llm: hkv.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = caches_made(llm, monkeypatch)
    with scheduling(llm, contexts=ContextRegistry(tmp_path)) as rounds:
        [ticket] = admitted(rounds, asked(300))
        rounds.round()
        wait([work for run in rounds.runs if (work := run.work)])
        ticket.cancel()
        rounds.round()
        assert ticket.is_finished
        assert [cache.state.is_closed for cache in made] == [True]


def test_caches_of_an_engine_that_failed_are_closed(
    llm: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Scheduler) -> None:
        raise KeyError("a bug")

    made = caches_made(llm, monkeypatch)
    with Engine(llm) as engine:
        read(engine.submit(asked(200)))
        monkeypatch.setattr(Scheduler, "round", fail)
        assert "a bug" in str(read(engine.submit(asked(200)))[1].error)
    assert made
    assert all(cache.state.is_closed for cache in made)


def test_a_context_that_is_saved_is_let_go_while_requests_run(
    llm: hkv.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go, add = threading.Event(), ContextRegistry.add

    def adding(self: ContextRegistry, *args: Any) -> bool:
        assert may_go.wait(60)
        return add(self, *args)

    monkeypatch.setattr(ContextRegistry, "add", adding)
    with scheduling(llm, contexts=ContextRegistry(tmp_path)) as rounds:
        ended(rounds, *admitted(rounds, asked(300), asked(300, seed=1)))
        copies = caches_made(llm, monkeypatch)
        for _ in range(2):
            rounds.save_some(lambda: None)
        may_go.set()
        [copy] = copies  # one at a time
        until(lambda: rounds.has_saved)
        admitted(rounds, asked(20))
        rounds.round()
        assert copy.state.is_closed


@pytest.mark.parametrize("place", [(ContextRegistry, "add"), (TieredCache, "fork")])
def test_a_context_that_cannot_be_saved_is_no_error_of_the_engine(
    llm: hkv.LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: tuple[type, str],
) -> None:
    """It ended, and took no more requests."""

    def fail(*_: Any) -> None:
        raise MemoryError("as a test")

    monkeypatch.setattr(*place, fail)
    with Engine(llm, contexts=ContextRegistry(tmp_path)) as engine:
        read(engine.submit(asked(300)))
        until(lambda: "a context could not be saved" in caplog.text)
        assert read(engine.submit(asked(30)))[1].reason == "length"
    assert "as a test" in caplog.text


def test_kept_contexts_stay_within_their_bytes(llm: hkv.LLM) -> None:
    with Engine(llm, Limits(prefix_bytes=0)) as engine:
        read(engine.submit(asked(200)))
        assert read(engine.submit(asked(200)))[1].usage.reused_tokens == 0
    with Engine(llm) as engine:
        read(engine.submit(asked(200)))
        until(lambda: engine.stats().prefixes == 1)
        each = engine.stats().prefix_bytes
    limits = Limits(prefix_bytes=int(2.5 * each))
    with Engine(llm, limits) as engine:
        for seed in (1, 2, 1, 3):  # the second is the least recently used one
            read(engine.submit(asked(200, seed=seed)))
        until(lambda: engine.stats().finished.get("length") == 4)
        assert engine.stats().prefixes == 2
        assert engine.stats().prefix_bytes <= limits.prefix_bytes
        reused = [read(engine.submit(asked(200, seed=s)))[1].usage.reused_tokens for s in (1, 2)]
    assert reused == [199, 0]


def kept_of(llm: hkv.LLM, *seeds: int, tokens: int = 200) -> KeptPrefixes:
    """Caches of prompts, in this order."""
    kept = KeptPrefixes(1 << 40)
    for seed in seeds:
        ids, cache = prompt(tokens, seed=seed), llm.runtime.cache()
        with torch.no_grad():
            llm.model(torch.tensor([ids]), **passing(cache))
        assert kept.keep(cache, ids)
    return kept


def test_what_was_used_least_recently_goes_first(llm: hkv.LLM) -> None:
    kept = kept_of(llm, 1, 2)
    found = kept.best((*prompt(200, seed=1)[:150], *prompt(20, seed=9)), llm.config)
    assert found is not None
    assert found[1] == 150
    found[0].close()
    kept.drop_oldest()
    ids = prompt(200, seed=1)
    for most in (31, 32):
        other = (*ids[:most], (ids[most] - 2) % 9 + 3, *ids[most + 1 :])
        found = kept.best(other, llm.config)
        assert (found is not None) == (most == 32), "fewer tokens are computed sooner than copied"
    assert found is not None
    found[0].close()
    assert kept.best(prompt(200, seed=2), llm.config) is None
    again = kept.best(prompt(200, seed=1), llm.config)
    assert again is not None
    again[0].close()
    kept.close()


def test_a_cache_most_of_whose_index_would_be_hidden_is_not_gone_on_with(llm: hkv.LLM) -> None:
    """Every search would find what was cut off first."""
    kept = kept_of(llm, 1, tokens=700)
    ids = prompt(700, seed=1)
    assert kept.best((*ids[:200], *prompt(20, seed=9)), llm.config) is None
    found = kept.best((*ids[:600], *prompt(20, seed=9)), llm.config)
    assert found is not None
    assert found[1] == 600
    found[0].close()
    kept.close()


def test_a_saved_context_serves_the_next_engine(llm: hkv.LLM, tmp_path: Path) -> None:
    request = asked(600)
    longer = Request((*request.ids, *prompt(25, seed=3)), NEW, request.sampling)
    want = alone(llm, longer)
    with Engine(llm, contexts=ContextRegistry(tmp_path)) as engine:
        read(engine.submit(request))
        until(lambda: ContextRegistry(tmp_path).counters.added == 1)
    with Engine(llm, contexts=ContextRegistry(tmp_path)) as engine:
        tokens, end = read(engine.submit(longer))
    assert tokens == want
    assert end.usage.reused_tokens >= 500


def test_a_saved_context_that_has_more_goes_before_one_in_memory(
    llm: hkv.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, made = asked(800), caches_made(llm, monkeypatch)
    short = Request((*request.ids[:100], *prompt(20, seed=7)), 2, request.sampling)
    longer = Request((*request.ids, *prompt(25, seed=3)), NEW, request.sampling)
    with Engine(llm, contexts=ContextRegistry(tmp_path)) as engine:
        read(engine.submit(request))
        until(lambda: ContextRegistry(tmp_path).counters.added == 1)
    with Engine(llm, contexts=ContextRegistry(tmp_path)) as engine:
        read(engine.submit(short))
        tokens, end = read(engine.submit(longer))
        again = read(engine.submit(Request(longer.ids, 1, request.sampling)))[1]
    assert all(cache.state.is_closed for cache in made)
    assert tokens == alone(llm, longer)
    assert end.usage.reused_tokens >= 750
    assert again.usage.reused_tokens == 824, "what memory has more of is not opened"


def test_contexts_are_saved_once_and_the_newest_first(llm: hkv.LLM, tmp_path: Path) -> None:
    def saved() -> list[bool]:
        registry = ContextRegistry(tmp_path)
        every = (registry.find(torch.tensor([one.ids]), llm, llm.config) for one in requests)
        return [shared > 0 for _, shared in every]

    requests = [asked(300, seed) for seed in range(2)]
    with scheduling(llm, contexts=ContextRegistry(tmp_path)) as rounds:
        for request in requests:
            ended(rounds, *admitted(rounds, request))
        for want in ([False, True], [True, True]):
            rounds.save_some(lambda: None)
            until(lambda: rounds.has_saved)
            assert saved() == want
        rounds.save_some(lambda: None)
        other = Request((*requests[1].ids[:290], *prompt(300, seed=7)), 1, GREEDY)
        [end] = ended(rounds, *admitted(rounds, other))
        assert end.usage.reused_tokens >= 290
    counters = ContextRegistry(tmp_path).counters
    assert (counters.added, counters.hits) == (2, 0), "memory has as much of the last one"


def test_a_context_that_is_being_saved_as_the_engine_ends_is_whole(
    llm: hkv.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, were_closed, entered = ContextRegistry.add, list[bool](), threading.Event()

    def adding(self: ContextRegistry, cache: TieredCache, *args: Any) -> bool:
        entered.set()
        sleep(0.2)
        were_closed.append(cache.state.is_closed)
        return add(self, cache, *args)

    monkeypatch.setattr(ContextRegistry, "add", adding)
    with Engine(llm, contexts=ContextRegistry(tmp_path)) as engine:
        read(engine.submit(asked(300)))
        assert entered.wait(60)
    assert were_closed == [False]
    assert ContextRegistry(tmp_path).counters.added == 1


@pytest.mark.parametrize("held", [False, True])
def test_a_context_that_cannot_be_opened_is_its_requests_error_and_leaves_no_cache(
    llm: hkv.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """Also where memory holds less of the prompt."""

    def fail(*_: Any) -> int:
        raise MemoryError("as a test")

    request = asked(400)
    with scheduling(llm, contexts=ContextRegistry(tmp_path)) as rounds:
        if held:
            ended(rounds, *admitted(rounds, replace(request, ids=request.ids[:100])))
        monkeypatch.setattr(ContextRegistry, "find", lambda *_: (tmp_path, 300))
        monkeypatch.setattr(ContextRegistry, "take", fail)
        made = caches_made(llm, monkeypatch)
        [end] = ended(rounds, *admitted(rounds, request))
        assert type(end.error).__name__ == "CapacityError"
        assert [cache.state.is_closed for cache in made] == [True] * (1 + held)


def test_what_is_kept_is_audited_by_no_thread(llm: hkv.LLM) -> None:
    before = threading.active_count()
    with scheduling(llm) as rounds:
        [end] = ended(rounds, *admitted(rounds, asked(100, audit_every=1)))
        assert end.report.missed_mass is not None
        until(lambda: threading.active_count() == before)
        assert rounds.stats(0).prefixes == 1


def test_places_are_where_exact_attention_looks(llm: hkv.LLM) -> None:
    with Engine(llm) as engine:
        full = read(engine.submit(asked(200, places=True, config=config("full"))))[1]
        long = asked(60, places=True, config=config("full"), max_new_tokens=40)
        late = read(engine.submit(long))[1]
        cold = read(engine.submit(asked(200, places=True)))[1]
        none = read(engine.submit(asked(200)))[1]
        few = tiered(16, **{"cold.top_k": 4})
        found = read(engine.submit(asked(200, places=True, config=few)))[1]
    assert none.report.places == []
    everywhere = dict(full.report.places)
    assert {position for position, _ in late.report.places} == set(range(60)), "of the prompt all"
    assert sum(everywhere.values()) <= 1
    places = cold.report.places
    assert len(places) == 64
    assert places == sorted(places, key=lambda place: -place[1])
    assert all(16 <= position < 200 for position, _ in places), "sinks are no places"
    alike = [position for position in dict(places) if position in everywhere]
    assert len(alike) > 32
    for position in alike:
        assert dict(places)[position] == pytest.approx(everywhere[position], rel=1e-3)
    assert {position for position, _ in found.report.places[:5]} <= {p for p, _ in places}
