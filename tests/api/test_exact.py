"""Exact answers of conversations and contexts, and as text that comes in pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import hybrid_kv as hkv
from tests.contracts.architectures import build
from tests.kit import cache_of
from tests.models.exact_calls import ids, small
from tests.models.folder import model, tokenizer

TEXT = " ".join(["sea sky sun ice oak elm bee fox owl sea", "oak fox bee sky"] * 4)
TURNS = [TEXT, "oak", "sky sea owl fox ice sun"]
NEW = 10
METHODS = ["hybrid", "quest"]


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return model()


def loaded(plain: PreTrainedModel, config: Any) -> hkv.LLM:
    return hkv.load(plain, tokenizer=tokenizer(), config=config)


@pytest.fixture(scope="module")
def want(plain: PreTrainedModel) -> list[hkv.Generation]:
    """A conversation of full attention."""
    with loaded(plain, "full") as llm:
        talk = llm.conversation(raw=True)
        return [talk.send(text, max_new_tokens=NEW) for text in TURNS]


# Text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, 5])
def test_pieces_are_the_text_and_times_are_of_each_token(
    plain: PreTrainedModel, want: list[hkv.Generation], exact: bool | int
) -> None:
    with loaded(plain, small()) as llm:
        stream = llm.generate(TEXT, exact=exact, max_new_tokens=NEW, stream=True)
        pieces = list(stream)
    assert "".join(pieces) == stream.result.text == want[0].text
    assert len(pieces) == len(stream.result.token_times_s) == NEW
    assert stream.result.token_times_s == sorted(stream.result.token_times_s)
    assert stream.result.exact is not None
    assert stream.result.exact.drafted > stream.result.exact.accepted > 0


def test_a_stop_string_ends_the_answer_inside_of_a_draft(
    plain: PreTrainedModel, want: list[hkv.Generation]
) -> None:
    stop = " ".join(want[0].text.split()[5:7])
    with loaded(plain, "full") as llm:
        expected = llm.generate(TEXT, max_new_tokens=NEW, stop=stop)
    with loaded(plain, small()) as llm:
        found = llm.generate(TEXT, exact=6, max_new_tokens=NEW, stop=stop)
        stream = llm.generate(TEXT, exact=6, max_new_tokens=NEW, stop=stop, stream=True)
        assert "".join(stream) == expected.text
    assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
    assert stream.result.token_ids == expected.token_ids
    assert 1 < len(found.token_ids) < NEW


def test_a_stream_that_is_closed_leaves_a_whole_cache(
    plain: PreTrainedModel, want: list[hkv.Generation]
) -> None:
    with loaded(plain, small()) as llm:
        talk = llm.conversation(raw=True)
        stream = talk.send(TEXT, exact=6, max_new_tokens=60, stream=True)
        next(stream)
        stream.close()
        cache, came = cache_of(talk), stream.result.token_ids
        cache.check_integrity()
        assert cache.exact_tokens == cache.get_seq_length() == len(TEXT.split()) + len(came) - 1
        assert came[:NEW] == want[0].token_ids[: len(came)]


# Conversations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_conversation_is_that_of_full_attention(
    plain: PreTrainedModel, want: list[hkv.Generation], method: str
) -> None:
    works = []
    with loaded(plain, small(method)) as llm:
        talk = llm.conversation(raw=True)
        for text, whole in zip(TURNS, want, strict=True):
            found = talk.send(text, exact=True, max_new_tokens=NEW)
            assert found.token_ids == whole.token_ids
            assert found.exact is not None
            works.append(found.exact)
            cache_of(talk).check_integrity()
    assert sum(one.drafted for one in works) > sum(one.accepted for one in works) > 0


@pytest.mark.parametrize("method", METHODS)
def test_an_approximate_turn_is_computed_again_by_an_exact_one(
    plain: PreTrainedModel, method: str
) -> None:
    with loaded(plain, small(method)) as llm:
        talk = llm.conversation(raw=True)
        first = talk.send(TURNS[0], max_new_tokens=NEW)
        prompt = first.prompt_tokens
        assert cache_of(talk).exact_tokens == prompt
        found = talk.send(TURNS[1], exact=True, max_new_tokens=NEW)
        last = talk.send(TURNS[2], exact=True, max_new_tokens=NEW)
        assert cache_of(talk).exact_tokens == cache_of(talk).get_seq_length()
        begun = (
            llm.encode(TURNS[0])[0].tolist() + first.token_ids + llm.encode(TURNS[1])[0].tolist()
        )
    with loaded(plain, "full") as llm:
        assert first.token_ids != llm.generate(TEXT, max_new_tokens=NEW).token_ids
        assert found.token_ids == llm.generate(begun, max_new_tokens=NEW).token_ids
        begun += found.token_ids + llm.encode(TURNS[2])[0].tolist()
        assert last.token_ids == llm.generate(begun, max_new_tokens=NEW).token_ids


class _Fails(StoppingCriteria):
    """Ends the third token of an answer by an error."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act, self._calls = act, 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        self._calls += 1
        if self._calls == 3:
            self._act()
        return torch.full((1,), False)


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("before", [True, False], ids=["exact", "approximate"])
def test_a_turn_that_fails_is_forgotten(plain: PreTrainedModel, before: bool) -> None:
    """Also where it had forgotten tokens that an approximate turn had left."""
    fails = StoppingCriteriaList([_Fails(_interrupt)])
    with loaded(plain, small()) as llm:
        found = []
        for interrupted in (False, True):
            talk = llm.conversation(raw=True)
            talk.send(TURNS[0], exact=before, max_new_tokens=NEW)
            if interrupted:
                with pytest.raises(KeyboardInterrupt):
                    talk.send("elm elm", exact=True, stopping_criteria=fails)
                cache_of(talk).check_integrity()
            found.append(talk.send(TURNS[1], exact=True, max_new_tokens=NEW).token_ids)
    assert found[0] == found[1]


def test_a_turn_that_is_interrupted_before_its_prompt_is_there_again(plain: Any) -> None:
    """Regression: the cache was said to be back where it was, without what had been forgotten."""
    with loaded(plain, small()) as llm:
        found = []
        for interrupted in (False, True):
            talk = llm.conversation(raw=True)
            talk.send(TURNS[0], max_new_tokens=NEW)
            if interrupted:
                hook = plain.model.layers[1].register_forward_pre_hook(lambda *_: _interrupt())
                with pytest.raises(KeyboardInterrupt):
                    talk.send("elm elm", exact=True)
                hook.remove()
                cache_of(talk).check_integrity()
            found.append(talk.send(TURNS[1], exact=True, max_new_tokens=NEW).token_ids)
    assert found[0] == found[1]


def test_a_turn_that_is_cancelled_while_its_prompt_is_computed_again(
    plain: PreTrainedModel,
) -> None:
    """The event is seen in all of what is computed."""
    cancel = threading.Event()
    with loaded(plain, small()) as llm:
        talk = llm.conversation(raw=True)
        talk.send(TURNS[0], max_new_tokens=NEW)
        seen: list[int] = []

        def watch(done: int, total: int) -> None:
            seen.append(total)
            cancel.set()

        found = talk.send("elm", exact=True, cancel=cancel, on_prefill=watch)
        assert found.token_ids == []
        assert seen == [2 * (NEW + 1)]  # two layers: the answer and the word
        assert len(talk.history) == 2
        again = talk.send(TURNS[1], exact=True, max_new_tokens=NEW)
        cache_of(talk).check_integrity()
    assert len(again.token_ids) == NEW


# Contexts -----------------------------------------------------------------------------------------

QUESTIONS = [ids(1, 5), ids(2, 40), ids(3, 2)]


def asked(context: hkv.Context, keep: bool, **options: Any) -> list[list[int]]:
    return [
        context.ask(one, keep=keep, max_new_tokens=NEW, **options).token_ids for one in QUESTIONS
    ]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_questions_to_a_context_are_answered_exactly(architecture: str, keep: bool) -> None:
    plain = build(architecture)
    with hkv.load(plain, config="full") as llm, llm.context(ids()) as context:
        want = asked(context, keep)
    with hkv.load(plain, config=small()) as llm, llm.context(ids()) as context:
        fork = context.fork()
        assert asked(fork, keep, exact=True) == want
        assert cache_of(fork).exact_tokens == fork.ids.shape[1]
        cache_of(fork).check_integrity()
        assert asked(context, keep) != want


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_an_exact_question_leaves_no_trace(architecture: str) -> None:
    """Regression: where windows slide it began anew, and the context had lost what it held."""
    with hkv.load(build(architecture), config=small()) as llm:
        answers, tokens = [], []
        for exact in (False, True):
            context = llm.context(ids())
            context.ask(QUESTIONS[0], keep=True, max_new_tokens=NEW)
            if exact:
                context.ask(QUESTIONS[1], exact=True, max_new_tokens=NEW)
                cache_of(context).check_integrity()
            tokens.append(cache_of(context).exact_tokens)
            answers.append(context.ask(QUESTIONS[2], max_new_tokens=NEW).token_ids)
    assert answers[0] == answers[1]
    assert tokens == [ids().shape[1]] * 2


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_context_with_an_approximate_answer_is_read_again(architecture: str, keep: bool) -> None:
    plain = build(architecture)
    with hkv.load(plain, config=small()) as llm, llm.context(ids()) as context:
        first = context.ask(QUESTIONS[0], keep=True, max_new_tokens=NEW).token_ids
        found = context.ask(QUESTIONS[1], keep=keep, exact=True, max_new_tokens=NEW).token_ids
        cache_of(context).check_integrity()
        last = context.ask(QUESTIONS[2], exact=True, max_new_tokens=NEW).token_ids
    with hkv.load(plain, config="full") as llm, llm.context(ids()) as context:
        assert first != context.ask(QUESTIONS[0], max_new_tokens=NEW).token_ids
        context.append(torch.cat([QUESTIONS[0], torch.tensor([first])], 1))
        assert found == context.ask(QUESTIONS[1], keep=keep, max_new_tokens=NEW).token_ids
        assert last == context.ask(QUESTIONS[2], max_new_tokens=NEW).token_ids


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("before", [False, True], ids=["approximate", "exact"])
def test_a_question_that_fails_leaves_the_context_as_it_was(
    architecture: str, keep: bool, before: bool
) -> None:
    """Regression: one that had begun to read it again left a part of it, or closed it."""
    fails = StoppingCriteriaList([_Fails(_interrupt)])
    with hkv.load(build(architecture), config=small()) as llm, llm.context(ids()) as context:
        context.ask(QUESTIONS[0], keep=True, exact=before, max_new_tokens=NEW)
        whole = context.ask(QUESTIONS[2], exact=True, max_new_tokens=NEW).token_ids
        length, exact = context.ids.shape[1], cache_of(context).exact_tokens
        with pytest.raises(KeyboardInterrupt):
            context.ask(QUESTIONS[1], exact=True, keep=keep, stopping_criteria=fails)
        cache_of(context).check_integrity()
        assert context.ids.shape[1] == cache_of(context).get_seq_length() == length
        assert cache_of(context).exact_tokens == exact
        assert context.ask(QUESTIONS[2], exact=True, max_new_tokens=NEW).token_ids == whole


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_context_that_is_interrupted_while_it_is_read_again(
    architecture: str, keep: bool
) -> None:
    """Regression: what it had forgotten did not come back, and it was closed."""
    model: Any = build(architecture)
    with hkv.load(model, config=small()) as llm, llm.context(ids()) as context:
        context.ask(QUESTIONS[0], keep=True, max_new_tokens=NEW)
        length, exact = context.ids.shape[1], cache_of(context).exact_tokens
        whole = context.ask(QUESTIONS[2], max_new_tokens=NEW).token_ids
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: _interrupt())
        with pytest.raises(KeyboardInterrupt):
            context.ask(QUESTIONS[1], exact=True, keep=keep)
        hook.remove()
        cache_of(context).check_integrity()
        assert cache_of(context).get_seq_length() == length
        assert cache_of(context).exact_tokens == exact
        assert context.ask(QUESTIONS[2], max_new_tokens=NEW).token_ids == whole


def test_a_cut_context_is_exact_up_to_where_it_was_cut() -> None:
    with hkv.load(build("llama"), config=small()) as llm, llm.context(ids()) as context:
        context.ask(QUESTIONS[0], keep=True, max_new_tokens=NEW)
        fork = context.fork()
        fork.truncate(ids().shape[1])
        assert cache_of(fork).exact_tokens == fork.ids.shape[1]
        assert cache_of(context).exact_tokens == ids().shape[1] < context.ids.shape[1]
        want = llm.context(ids()).ask(QUESTIONS[1], exact=True, max_new_tokens=NEW)
        found = fork.ask(QUESTIONS[1], exact=True, max_new_tokens=NEW)
        assert found.token_ids == want.token_ids
