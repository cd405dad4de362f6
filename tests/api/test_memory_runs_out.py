"""Memory that runs out within a call: one clear sentence, and what was there before stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import CapacityError, DeviceMemoryError, HybridKVError, ShapeError
from hybrid_kv.methods.retrieval import Hybrid
from hybrid_kv.models import load
from hybrid_kv.store import LayerStore, extent, pool
from hybrid_kv.types import Demotion
from tests.contracts.architectures import build
from tests.kit import cache_of, every, held
from tests.models.folder import model, tokenizer
from tests.pairs import in_pairs

EXACT: dict[str, dict[str, Any]] = {
    "hybrid": {"sink_tokens": 4, "window_tokens": 8, "cold": {"top_k": "all"}},
    "full": {},
    "streaming_llm": {"sink_tokens": 4, "window_tokens": 8},
}
TURNS = [
    "sea sky sun ice oak elm bee fox owl sea ice oak elm",
    "oak bee",
    "sky sea owl fox ice sun",
]
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 9.00 GiB of "
FULL += "which 1.00 GiB is free."

Fail = Callable[[], None]


def opened(method: str, built: PreTrainedModel | None = None) -> hkv.LLM:
    config = hkv.HybridConfig(method=method, page_size=4, **EXACT[method])
    return hkv.load(built or model(), tokenizer=tokenizer(), config=config)


@contextmanager
def out_of_memory(built: PreTrainedModel, new_tokens: range, at: int) -> Iterator[None]:
    """The second layer's forward fails at its `at`-th call with so many new tokens."""
    calls = 0

    def fail(module: Any, args: Any) -> None:
        nonlocal calls
        calls += args[0].shape[1] in new_tokens
        if calls == at:
            calls += 1
            raise torch.OutOfMemoryError(FULL)

    hook = built.model.layers[1].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


STAGES = [("prefill", range(2, 999), 1), ("decode", range(1, 2), 3)]


@pytest.mark.parametrize(("stage", "new_tokens", "at"), STAGES)
@pytest.mark.parametrize("turn", [0, 2])
@pytest.mark.parametrize("method", EXACT)
def test_a_conversation_is_as_before_the_turn_that_failed(
    method: str, turn: int, stage: str, new_tokens: range, at: int
) -> None:
    with opened(method) as llm:
        whole = llm.conversation()
        want = [whole.send(text, max_new_tokens=9).token_ids for text in TURNS]
        talk = llm.conversation()
        for number, text in enumerate(TURNS):
            if number == turn:
                history = list(talk.history)
                with (
                    out_of_memory(llm.model, new_tokens, at),
                    pytest.raises(DeviceMemoryError, match=f"ran out at {stage}: 2.00 GiB"),
                ):
                    talk.send(text, max_new_tokens=9)
                assert talk.history == history
                cache_of(talk).check_integrity()
            assert talk.send(text, max_new_tokens=9).token_ids == want[number]
            cache_of(talk).check_integrity()


@pytest.mark.parametrize(("stage", "new_tokens", "at"), STAGES)
@pytest.mark.parametrize("method", EXACT)
def test_what_was_computed_before_a_failure_is_not_computed_again(
    method: str, stage: str, new_tokens: range, at: int
) -> None:
    """The whole cache was dropped: after a long context, minutes of prefill for the next turn."""
    with opened(method) as llm:
        talk = llm.conversation()
        talk.send(TURNS[0], max_new_tokens=9)
        cached = cache_of(talk).get_seq_length()
        with out_of_memory(llm.model, new_tokens, at), pytest.raises(DeviceMemoryError):
            talk.send(TURNS[2], max_new_tokens=9)
        assert cache_of(talk).get_seq_length() == cached


def test_what_a_turn_that_failed_has_dropped_is_there_again() -> None:
    with opened("streaming_llm") as llm:
        talk = llm.conversation()
        talk.send(TURNS[0], max_new_tokens=9)
        before = [row.resident for row in every(talk)]
        with out_of_memory(llm.model, range(1, 2), 9), pytest.raises(DeviceMemoryError):
            talk.send(TURNS[2], max_new_tokens=20)
        assert [row.resident for row in every(talk)] == before


def test_layers_that_drop_and_layers_that_offload_go_on_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of what was before a turn counted as a reader of the cold tier for ever."""
    plain = Hybrid.seal

    def seal(self: Any, layer_idx: int, evidence: Any) -> Any:
        place = plain(self, layer_idx, evidence)
        return replace(place, rest=Demotion.DROP) if layer_idx == 1 else place

    monkeypatch.setattr(Hybrid, "seal", seal)
    with opened("hybrid") as llm:
        talk = llm.conversation()
        for text in TURNS:
            talk.send(text, max_new_tokens=9)
            cache_of(talk).check_integrity()
        assert len(held(talk).cold) > 8
        assert held(talk, layer=1).dropped > 8


@pytest.mark.parametrize(("stage", "new_tokens", "at"), STAGES)
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_sliding_layers_go_back_too(name: str, stage: str, new_tokens: range, at: int) -> None:
    built = build(name)
    with opened("hybrid", built) as llm:
        whole, talk = llm.conversation(), llm.conversation()
        for number, text in enumerate(TURNS):
            if number == 1:
                before = cache_of(talk).get_seq_length()
                with out_of_memory(built, new_tokens, at), pytest.raises(DeviceMemoryError):
                    talk.send(text, max_new_tokens=9)
                assert cache_of(talk).get_seq_length() == before
            want = whole.send(text, max_new_tokens=9).token_ids
            assert talk.send(text, max_new_tokens=9).token_ids == want


def test_a_conversation_whose_rows_were_forked_is_computed_anew() -> None:
    with opened("full") as llm:
        whole, talk = llm.conversation(), llm.conversation()
        whole.send(TURNS[0], max_new_tokens=9)
        talk.send(TURNS[0], max_new_tokens=9)
        cache_of(talk).batch_repeat_interleave(3)
        with pytest.raises(ShapeError, match="batch must stay at 3 rows"):
            talk.send(TURNS[1], max_new_tokens=9)
        want = whole.send(TURNS[1], max_new_tokens=9).token_ids
        assert talk.send(TURNS[1], max_new_tokens=9).token_ids == want


@pytest.mark.parametrize(("stage", "new_tokens", "at"), STAGES)
@pytest.mark.parametrize("method", EXACT)
def test_a_context_is_as_before_the_question_that_failed(
    method: str, stage: str, new_tokens: range, at: int
) -> None:
    with opened(method) as llm:
        context = llm.context(" ".join(TURNS))
        want = context.ask("fox owl", max_new_tokens=9).token_ids
        with (
            out_of_memory(llm.model, new_tokens, at),
            pytest.raises(DeviceMemoryError, match=f"ran out at {stage}"),
        ):
            context.ask("fox owl", max_new_tokens=9)
        cache_of(context).check_integrity()
        assert context.ask("fox owl", max_new_tokens=9).token_ids == want


def test_a_context_that_does_not_fit_says_so_and_another_can_be_made() -> None:
    with opened("hybrid") as llm:
        with (
            out_of_memory(llm.model, range(2, 999), 1),
            pytest.raises(
                DeviceMemoryError, match=r"ran out at prefill.*lower prefill_chunk_tokens"
            ),
        ):
            llm.context(" ".join(TURNS))
        assert llm.context(" ".join(TURNS)).ask("fox", max_new_tokens=3).token_ids


def test_a_streamed_answer_and_one_with_beams_say_the_same() -> None:
    with opened("full") as llm:
        stream = llm.generate(TURNS[0], stream=True, max_new_tokens=9)
        with (
            out_of_memory(llm.model, range(1, 2), 3),
            pytest.raises(DeviceMemoryError, match="ran out at decode"),
        ):
            list(stream)
        with (
            out_of_memory(llm.model, range(1, 2), 3),
            pytest.raises(DeviceMemoryError, match="ran out at decode"),
        ):
            llm.generate(TURNS[0], num_beams=2, max_new_tokens=9)


@contextmanager
def no_growth(
    monkeypatch: pytest.MonkeyPatch, at: int, error: HybridKVError | Exception
) -> Iterator[list[int]]:
    """The `at`-th array that grows is refused, and those after it."""
    calls: list[int] = []
    plain = pool.enlarge

    def refuse(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) >= at:
            raise error
        return plain(*args, **options)

    with monkeypatch.context() as patch:
        for module in (pool, extent):
            patch.setattr(module, "enlarge", refuse)
        yield calls


LENGTHS = (2, 40, 40)
"""New tokens of each turn: the first answer ends with pools that are full."""


@cache
def answers(method: str) -> list[list[int]]:
    """What a conversation says in which nothing is refused."""
    with opened(method) as llm:
        whole = llm.conversation()
        return [
            whole.send(text, max_new_tokens=length).token_ids
            for text, length in zip(TURNS, LENGTHS, strict=True)
        ]


@pytest.mark.parametrize(
    ("at", "error", "method"),
    in_pairs(
        [1, 2, 3, 4],
        [CapacityError("host memory ran out: as a test"), torch.OutOfMemoryError(FULL)],
        ["hybrid", "full"],
    ),
)
def test_growth_that_is_refused_in_the_middle_of_an_answer_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, method: str, error: Exception, at: int
) -> None:
    """A pool whose keys had grown and whose values had not could never be used again."""
    plain = extent.ColdExtent.__init__  # reserves room for more tokens than the model may see
    monkeypatch.setattr(extent.ColdExtent, "__init__", lambda new, *of, **_: plain(new, *of[:2], 8))
    named = DeviceMemoryError if isinstance(error, torch.OutOfMemoryError) else CapacityError
    want = answers(method)
    with opened(method) as llm:
        talk = llm.conversation()
        assert talk.send(TURNS[0], max_new_tokens=LENGTHS[0]).token_ids == want[0]
        cached = cache_of(talk).get_seq_length()
        with no_growth(monkeypatch, at, error) as calls, pytest.raises(named):
            talk.send(TURNS[1], max_new_tokens=40)
        assert len(calls) >= at
        cache_of(talk).check_integrity()
        assert cache_of(talk).get_seq_length() == cached
        assert talk.send(TURNS[1], max_new_tokens=40).token_ids == want[1]
        assert talk.send(TURNS[2], max_new_tokens=40).token_ids == want[2]
        cache_of(talk).check_integrity()


@pytest.mark.parametrize("method", ["hybrid", "streaming_llm"])
def test_no_room_for_what_would_be_gone_back_to_is_said_too(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(_: LayerStore) -> None:
        raise torch.OutOfMemoryError(FULL)

    with opened(method) as llm:
        context, talk = llm.context(" ".join(TURNS)), llm.conversation()
        want = context.ask("fox", max_new_tokens=5).token_ids
        talk.send(TURNS[0], max_new_tokens=5)
        with monkeypatch.context() as patch:
            patch.setattr(LayerStore, "branch", fail)
            with pytest.raises(DeviceMemoryError, match="ran out at prefill"):
                context.ask("fox", max_new_tokens=5)
            if method == "streaming_llm":
                with pytest.raises(DeviceMemoryError, match="ran out at prefill"):
                    talk.send(TURNS[1], max_new_tokens=5)
            else:  # takes no copy
                talk.send(TURNS[1], max_new_tokens=5)
        assert context.ask("fox", max_new_tokens=5).token_ids == want
        assert len(talk.send(TURNS[2], max_new_tokens=5).token_ids) == 5


def test_a_model_that_does_not_fit_says_what_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(load, "_random", fail)
    with pytest.raises(DeviceMemoryError, match=r"at load: 2.00 GiB .*weights='int4'"):
        hkv.load("random:tiny")
