"""A context's life: forked, and closed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError
from tests.kit import cache_of
from tests.models.folder import model, tokenizer

SMALL: dict[str, Any] = {"page_size": 4, "sink_tokens": 4, "window_tokens": 8}
TEXT = "sea sky sun ice oak elm bee fox owl sea oak sky sea owl fox ice sun"


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return model()


@pytest.fixture
def llm(plain: PreTrainedModel) -> Any:
    config = hkv.HybridConfig.from_settings({**SMALL, "cold.top_k": "all"})
    with hkv.load(plain, tokenizer=tokenizer(), config=config) as loaded:
        yield loaded


def test_a_fork_answers_when_its_source_is_closed(llm: hkv.LLM) -> None:
    with llm.context(TEXT) as context:
        expected = context.ask("fox owl", max_new_tokens=30).token_ids
        fork = context.fork()
        assert fork.ask("fox owl", max_new_tokens=30).token_ids == expected
        assert context.ask("fox owl", max_new_tokens=30).token_ids == expected
    assert fork.ask("fox owl", max_new_tokens=30).token_ids == expected
    with pytest.raises(ConfigError, match="context must be open, got one that was closed"):
        context.ask("fox owl")
    with pytest.raises(ConfigError, match="context must be open"):
        context.fork()
    cache_of(fork).check_integrity()


QUESTIONS = ["fox owl", "ice", "sea sky", "owl", "bee bee elm"]


def test_questions_in_turn_equal_a_conversation_of_full_attention(plain: PreTrainedModel) -> None:
    with hkv.load(plain, tokenizer=tokenizer(), config="full") as whole:
        talk = whole.conversation(raw=True)
        first = talk.send(f"{TEXT} {QUESTIONS[0]}", max_new_tokens=20).token_ids
        expected = [first]
        expected += [talk.send(text, max_new_tokens=20).token_ids for text in QUESTIONS[1:]]
    config = hkv.HybridConfig.from_settings({**SMALL, "cold.top_k": "all"})
    with hkv.load(plain, tokenizer=tokenizer(), config=config) as llm:
        context = llm.context(TEXT)
        found = [context.ask(text, keep=True, max_new_tokens=20).token_ids for text in QUESTIONS]
        assert found == expected


TEMPLATE = (
    "{% for m in messages %}{{ 'bee ' if m.role == 'user' else 'elm ' }}{{ m.content }} "
    "{% endfor %}{% if add_generation_prompt %}elm{% endif %}"
)


@pytest.mark.parametrize("rewrites", [False, True])
def test_a_chat_grows_by_questions_text_and_messages(
    plain: PreTrainedModel, rewrites: bool
) -> None:
    """The second template leaves answers out of later turns, as those of reasoning models do."""
    words = tokenizer()
    words.chat_template = TEMPLATE
    if rewrites:
        words.chat_template = TEMPLATE.replace(
            "{{ m.content }}", "{{ m.content if m.role == 'user' else 'owl' }}"
        )
    config = hkv.HybridConfig.from_settings({**SMALL, "cold.top_k": "all"})
    with hkv.load(plain, tokenizer=words, config=config) as llm:
        messages: list[dict[str, str]] = [{"role": "user", "content": TEXT}]
        context = llm.context(messages)

        def ask(question: str, keep: bool) -> None:
            asked = [dict(message) for message in messages]
            if asked[-1]["role"] == "user":
                asked[-1]["content"] += f"\n\n{question}"
            else:
                asked.append({"role": "user", "content": question})
            answer = context.ask(question, keep=keep, max_new_tokens=9)
            assert answer.token_ids == llm.generate(asked, max_new_tokens=9).token_ids
            if keep:
                messages[:] = [*asked, {"role": "assistant", "content": answer.text}]
            cache_of(context).check_integrity()

        ask("fox owl", keep=False)
        ask("fox owl", keep=True)
        ask("ice", keep=False)
        context.append("sky sea")
        messages.append({"role": "user", "content": "sky sea"})
        ask("oak", keep=False)
        context.append(" owl")
        messages[-1]["content"] += " owl"
        ask("sun", keep=True)
        more = [{"role": "user", "content": "bee"}, {"role": "assistant", "content": "fox"}]
        context.append(more)
        messages += more
        ask("elm ice", keep=True)
        with pytest.raises(ConfigError, match="cannot be cut between two tokens"):
            context.truncate(5)
        with pytest.raises(ConfigError, match="grows by text or messages, got"):
            context.append([3, 4])


@pytest.mark.parametrize("method", ["hybrid", "full", "streaming_llm", "snapkv"])
@pytest.mark.parametrize("verb", ["append", "keep"])
def test_a_call_that_fails_leaves_the_context_as_it_was(
    plain: PreTrainedModel, method: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {} if method in ("full", "snapkv") else {"sink_tokens": 4, "window_tokens": 8}
    config = hkv.HybridConfig(method=method, page_size=4, **settings)
    with hkv.load(plain, tokenizer=tokenizer(), config=config) as llm:
        context = llm.context(TEXT)
        expected = context.ask("fox owl", max_new_tokens=20).token_ids
        ids = context.ids.tolist()
        calls: list[int] = []
        plain_attend = cache_of(context).kv.attend

        def attend(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) % 2 == 0:  # layers hold different numbers of tokens
                raise MemoryError("in the middle")
            return plain_attend(*args, **kwargs)

        grow = {
            "append": lambda: context.append("sea sky sun ice oak"),
            "keep": lambda: context.ask("sea", keep=True, max_new_tokens=30),
        }
        with monkeypatch.context() as patch:
            patch.setattr(cache_of(context).kv, "attend", attend)
            with pytest.raises(hkv.errors.CapacityError):
                grow[verb]()
        cache_of(context).check_integrity()
        assert context.ids.tolist() == ids
        assert context.ask("fox owl", max_new_tokens=20).token_ids == expected
        untouched = llm.context(TEXT)
        untouched.append("sea sky")
        context.append("sea sky")
        again = context.ask("fox owl", max_new_tokens=20).token_ids
        assert again == untouched.ask("fox owl", max_new_tokens=20).token_ids


def test_a_cancelled_append_changes_nothing(llm: hkv.LLM) -> None:
    context, cancel = llm.context(TEXT), threading.Event()
    expected = context.ask("fox owl", max_new_tokens=20).token_ids
    seen: list[tuple[int, int]] = []

    def report(done: int, total: int) -> None:
        seen.append((done, total))
        cancel.set()

    assert context.append("sea sky sun", on_prefill=report, cancel=cancel) == 0
    assert seen == [(3, 6)]
    cache_of(context).check_integrity()
    assert context.ask("fox owl", max_new_tokens=20).token_ids == expected


def test_a_question_given_up_before_its_answer_is_not_kept(llm: hkv.LLM) -> None:
    context, cancel = llm.context(TEXT), threading.Event()
    cancel.set()
    assert context.ask("fox", keep=True, cancel=cancel).token_ids == []
    assert context.ids.shape[1] == cache_of(context).get_seq_length() == 17


def test_a_kept_answer_can_be_streamed_and_cut_short(llm: hkv.LLM) -> None:
    context, other = llm.context(TEXT), llm.context(TEXT)
    stream = context.ask("fox owl", keep=True, stream=True, max_new_tokens=9)
    whole = other.ask("fox owl", keep=True, max_new_tokens=9)
    assert "".join(stream) == whole.text
    assert context.ids.tolist() == other.ids.tolist()
    stream = context.ask("ice", keep=True, stream=True, max_new_tokens=100)
    next(stream)
    stream.close()
    kept = [*other.ids[0].tolist(), *llm.encode("ice")[0].tolist(), *stream.result.token_ids]
    assert context.ids[0].tolist() == kept
    assert cache_of(context).get_seq_length() == len(kept)


@pytest.mark.parametrize("method", ["full", "hybrid"])
def test_beams_leave_one_row_behind(plain: PreTrainedModel, method: str) -> None:
    """Regression: the rows of a beam search stayed in a context whose method drops nothing."""
    with hkv.load(plain, tokenizer=tokenizer(), config=method) as llm:
        context = llm.context(TEXT)
        found = context.ask("fox", num_beams=3, max_new_tokens=6).token_ids
        ids = [*llm.encode(TEXT)[0].tolist(), *llm.encode("fox")[0].tolist()]
        assert found == llm.generate(ids, num_beams=3, max_new_tokens=6).token_ids
        assert context.ask("fox", keep=True, num_beams=3, max_new_tokens=6).token_ids == found
        assert context.ids[0].tolist() == [*ids, *found]
        after = context.ask("owl", max_new_tokens=6).token_ids
        owl = llm.encode("owl")[0].tolist()
        assert after == llm.generate([*ids, *found, *owl], max_new_tokens=6).token_ids


def test_what_cannot_be_appended_is_refused(llm: hkv.LLM) -> None:
    context = llm.context(TEXT)
    with pytest.raises(ConfigError, match="text is empty; pass at least one token"):
        context.append("")
    with pytest.raises(ConfigError, match="grows by text or token ids, got messages"):
        context.append([{"role": "user", "content": "sea"}])
    with pytest.raises(ConfigError, match="at most 256 tokens for this model, got 317"):
        context.append([3] * 300)
    with pytest.raises(ConfigError, match="tokens must be at least 1, got 0"):
        context.truncate(0)
    assert context.ids.shape[1] == cache_of(context).get_seq_length() == 17


def test_busy_models_refuse_and_change_nothing(llm: hkv.LLM) -> None:
    context, other = llm.context(TEXT), llm.context(TEXT)
    stream = other.ask("fox", stream=True, max_new_tokens=200, min_new_tokens=200)
    next(stream)
    for call in (
        lambda: context.append("sea"),
        lambda: context.truncate(3),
        lambda: context.ask("sea", keep=True),
        context.fork,
    ):
        with pytest.raises(hkv.errors.BusyError):
            call()
    stream.close()
    assert context.ids.shape[1] == cache_of(context).get_seq_length() == 17
