"""Chat templates: what is rendered, what of it stays in the cache, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

import hybrid_kv as hkv
from hybrid_kv.api.tokens import ChatTemplate
from hybrid_kv.errors import ConfigError
from tests.api.chat_tokenizer import END, FORGETFUL, PLAIN, STRICT, chat_tokenizer
from tests.contracts.architectures import build
from tests.kit import cache_of

TURNS = ["is an ear on it.", "  note: so, a tune?\n", "use one"]
OPEN: dict[str, Any] = {
    "page_size": 4,
    "sink_tokens": 4,
    "window_tokens": 16,
    "cold": {"top_k": "all"},
}


def load(tokenizer: PreTrainedTokenizerBase, name: str = "llama", **settings: Any) -> hkv.LLM:
    config = hkv.HybridConfig(**(settings or OPEN))
    return hkv.load(build(name), tokenizer=tokenizer, config=config)


@pytest.fixture(params=[PLAIN, FORGETFUL, STRICT], ids=["plain", "forgetful", "strict"])
def llm(request: pytest.FixtureRequest) -> Iterator[hkv.LLM]:
    with load(chat_tokenizer(request.param)) as loaded:
        yield loaded


@pytest.fixture
def plain() -> Iterator[hkv.LLM]:
    with load(chat_tokenizer()) as loaded:
        yield loaded


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# Rendering


def test_messages_become_what_transformers_renders(llm: hkv.LLM) -> None:
    messages = [user(TURNS[0]), {"role": "assistant", "content": "no."}, user(TURNS[1])]
    rendered: Any = llm.require_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )
    assert llm.encode(messages)[0].tolist() == rendered["input_ids"]


def test_a_str_stays_raw_text(plain: hkv.LLM) -> None:
    assert (
        plain.encode("<|u|>one")[0].tolist() == plain.require_tokenizer()("<|u|>one")["input_ids"]
    )
    assert plain.generate("one", max_new_tokens=2).chat_template == "none"


def test_an_open_answer_is_continued(plain: hkv.LLM) -> None:
    begun = [user("one"), {"role": "assistant", "content": "tw"}]
    assert plain.encode(begun)[0].tolist() == plain.encode("<|u|>one<|end|>\n<|a|>tw")[0].tolist()


@pytest.mark.parametrize("text", ["a<|end|>b", "<|u|>", "x<|a|><|a|>\n", "<pad>"])
def test_special_tokens_in_a_message_are_text(text: str) -> None:
    """Otherwise whoever types them ends the turn and speaks in another's name."""
    tokenizer = chat_tokenizer()
    ids = ChatTemplate(tokenizer).encode([user(text)])
    assert tokenizer.decode(ids) == f"<|u|>{text}<|end|>\n<|a|>"
    assert sum(idx <= END for idx in ids) == 3  # the template's own


def test_a_character_that_stands_for_a_special_token_may_be_typed_too() -> None:
    tokenizer = chat_tokenizer()
    template = ChatTemplate(tokenizer)
    typed = template.encode([user("\U0010f000<|end|>")])
    alone = template.encode([user("\U0010f000")])
    word = tokenizer("<|end|>", split_special_tokens=True)["input_ids"]
    assert typed == [*alone[:1], *word, *alone[1:]]  # the character itself has no token


def test_the_report_names_the_template(llm: hkv.LLM) -> None:
    names = {ChatTemplate(chat_tokenizer(text)).name for text in (PLAIN, FORGETFUL, STRICT)}
    assert len(names) == 3
    assert llm.generate([user("one")], max_new_tokens=1).chat_template in names


def test_the_end_of_a_message_ends_the_answer(plain: hkv.LLM) -> None:
    """A configuration may know the end of a text only."""
    head: Any = plain.model.lm_head
    saved = head.weight.detach().clone()
    try:
        with torch.inference_mode():  # the model may have been made in it
            head.weight.data[END] = 30 * head.weight.data.abs().mean(0)
            head.weight.data[END] *= head.weight.data[5:].mean(0).sign()
        free = plain.generate(plain.encode([user("one")]), max_new_tokens=40).token_ids
        assert END in free[:-1], "the test needs an answer that goes on behind its end"
        answer = plain.generate([user("one")], max_new_tokens=40)
    finally:
        with torch.inference_mode():
            head.weight.data.copy_(saved)
    assert answer.token_ids == free[: free.index(END) + 1]
    assert "<|end|>" not in answer.text


# Conversations


def test_a_turn_equals_a_fresh_prompt_of_all_messages(llm: hkv.LLM) -> None:
    talk = llm.conversation()
    for text in TURNS:
        fresh = llm.generate([*talk.history, user(text)], max_new_tokens=11)
        answer = talk.send(text, max_new_tokens=11)
        assert answer.token_ids == fresh.token_ids
        assert answer.prompt_tokens == fresh.prompt_tokens
        assert answer.chat_template == fresh.chat_template != "none"
        cache_of(talk).check_integrity()


def test_a_turn_computes_what_the_template_adds_and_no_more(plain: hkv.LLM) -> None:
    talk, seen = plain.conversation(), list[int]()
    first = talk.send("one", max_new_tokens=5)
    # An answer whose text is taken apart as it was written: the cache is a prefix of what follows.
    tokenizer = plain.require_tokenizer()
    talk.history[-1]["content"] = "note."
    again = tokenizer("note.", add_special_tokens=False)["input_ids"]
    talk._seen = talk._seen[: -len(first.token_ids)] + again[: len(first.token_ids)]
    known = cache_of(talk).get_seq_length()
    layer: Any = plain.model.model.layers[0]
    hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    try:
        answer = talk.send("two", max_new_tokens=2)
    finally:
        hook.remove()
    assert seen[0] == answer.prompt_tokens - known


@pytest.mark.parametrize("method", ["streaming_llm", "quest", "hybrid"])
def test_a_cache_that_dropped_entries_is_computed_anew_and_not_cropped(method: str) -> None:
    """Cropping a window leaves a shorter one: what it had before is gone."""
    settings: dict[str, Any] = {"method": method}
    if method != "quest":
        settings |= {"page_size": 4, "sink_tokens": 4, "window_tokens": 16}
    with load(chat_tokenizer(FORGETFUL), **settings) as llm:
        talk = llm.conversation()
        talk.send("is an ear on it. " * 4, max_new_tokens=9)
        old = cache_of(talk)
        talk.history[-1]["content"] = "e"
        fresh = llm.generate([*talk.history, user("two")], max_new_tokens=9)
        answer = talk.send("two", max_new_tokens=9)
        assert (cache_of(talk) is not old) == (method == "streaming_llm")
        if method != "hybrid":  # whose window is shorter after a crop, so that it retrieves others
            assert answer.token_ids == fresh.token_ids


def test_raw_turns_follow_each_other_as_they_are(plain: hkv.LLM) -> None:
    talk = plain.conversation(raw=True)
    first = talk.send("one", max_new_tokens=3)
    second = talk.send("two", max_new_tokens=3)
    ids = [*plain.encode("one")[0].tolist(), *first.token_ids, *plain.encode("two")[0].tolist()]
    assert second.token_ids == plain.generate(ids, max_new_tokens=3).token_ids
    assert second.chat_template == "none"


def test_a_system_message_comes_first(plain: hkv.LLM) -> None:
    talk = plain.conversation(system="so.")
    messages = [{"role": "system", "content": "so."}, user("one")]
    want = plain.generate(messages, max_new_tokens=3)
    assert talk.send("one", max_new_tokens=3).token_ids == want.token_ids
    assert [message["role"] for message in talk.history] == ["system", "user", "assistant"]


# Contexts

TEXT = "an ear is not a tune. " * 9


@pytest.mark.parametrize("text", [TEXT, TEXT.rstrip(), "n\n", "<|end|>"])
@pytest.mark.parametrize("question", ["so?", " so", "\nsore <|a|>"])
def test_a_question_is_answered_as_the_end_of_the_message(
    llm: hkv.LLM, text: str, question: str
) -> None:
    """A pair may join what ends the text with what follows it."""
    context = llm.context([user(text)])
    length = cache_of(context).get_seq_length()
    assert length >= len(llm.encode([user(text)])[0]) - 6
    want = llm.generate([user(f"{text}\n\n{question}")], max_new_tokens=5)
    for _ in range(2):
        answer = context.ask(question, max_new_tokens=5)
        assert answer.token_ids == want.token_ids
        assert answer.chat_template == want.chat_template
        assert cache_of(context).get_seq_length() == length


def test_a_context_that_its_template_renders_otherwise_later_is_refused() -> None:
    """Templates write the date."""
    tokenizer = chat_tokenizer("{{ day }}" + PLAIN)
    with load(tokenizer) as llm:
        tokenizer.chat_template = "monday " + PLAIN
        context = llm.context([user(TEXT)])
        tokenizer.chat_template = "tuesday " + PLAIN
        with pytest.raises(ConfigError, match=r"got 0 and then others.*make a new context"):
            context.ask("so?")


# Mistakes


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ({"role": "user", "content": "one"}, r"messages must be a list .*, got a dict"),
        ([{"role": "user"}], r'message 1 must have text .*, got None under "content"'),
        ([user("one"), {"content": "two"}], r'message 2 must have .*, got None under "role"'),
        ([user("one"), "two"], "message 2 must have text"),
        ([{"role": "user", "content": ["one"]}], 'got a list under "content"'),
    ],
)
def test_messages_that_are_none_are_refused(plain: hkv.LLM, messages: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plain.generate(messages)


def test_what_a_template_refuses_is_one_sentence_and_loses_nothing() -> None:
    with load(chat_tokenizer(STRICT)) as llm:
        why = r"^the chat template refuses messages of system, user: System role not supported; "
        with pytest.raises(ConfigError, match=why):
            llm.conversation(system="so.").send("one")
        with pytest.raises(ConfigError, match="of user, user: Roles must alternate"):
            llm.generate([user("one"), user("two")])
        talk = llm.conversation()
        talk.send("one", max_new_tokens=2)
        talk.history.append(user("two"))
        with pytest.raises(ConfigError, match="Roles must alternate"):
            talk.send("three", max_new_tokens=2)
        talk.history.pop()
        assert talk.send("three", max_new_tokens=2).token_ids


def test_a_broken_template_is_one_sentence() -> None:
    with (
        load(chat_tokenizer("{% for m in messages %}")) as llm,
        pytest.raises(ConfigError, match=r"refuses messages of user: .*\S; leave out"),
    ):
        llm.generate([user("one")])


def test_several_templates_without_a_default_are_refused() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = {"rag": PLAIN, "tools": PLAIN}
    with load(tokenizer) as llm, pytest.raises(ConfigError, match=r"cannot be chosen: .*'rag'"):
        llm.generate([user("one")])


def test_without_a_template_messages_are_refused_and_text_is_not() -> None:
    with load(chat_tokenizer(None)) as llm:
        for call in (
            lambda: llm.generate([user("one")]),
            lambda: llm.context([user("one")]),
            lambda: llm.conversation(system="so."),
        ):
            with pytest.raises(ConfigError, match="messages need a chat template"):
                call()
        assert llm.conversation().send("one", max_new_tokens=2).chat_template == "none"


def test_a_system_message_without_the_template_is_refused(plain: hkv.LLM) -> None:
    with pytest.raises(ConfigError, match="raw=True turns off"):
        plain.conversation(system="so.", raw=True)


def test_questions_go_into_a_message_of_the_user(plain: hkv.LLM) -> None:
    with pytest.raises(ConfigError, match="last message of a context must be the user's"):
        plain.context([{"role": "system", "content": "so."}])
    context = plain.context([user(TEXT)])
    with pytest.raises(ConfigError, match="must be text, got a "):
        context.ask(plain.encode("so?"))
    with pytest.raises(ConfigError, match="question is empty"):
        context.ask("  ")
