"""`generate` and `chat` with a model that has a chat template, and with one that has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_kv.api.tokens import ChatTemplate
from tests.api.chat_tokenizer import FORGETFUL, STRICT, chat_tokenizer
from tests.cli.support import call, refused, report_of, run_of
from tests.contracts.architectures import build

SHORT = ("--max-new-tokens", 3, "--json", "-")
TEMPLATE = ChatTemplate(chat_tokenizer())


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("talker"))


def save(folder: Path, template: str | None = None) -> Path:
    build("llama").save_pretrained(folder)
    tokenizer = chat_tokenizer() if template is None else chat_tokenizer(template)
    tokenizer.save_pretrained(folder)
    return folder


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("source", ["argument", "stdin"])
def test_text_is_a_message_of_the_user(talker: Path, source: str) -> None:
    prompt = ("one",) if source == "argument" else ("--prompt-file", "-")
    report = run_of(call("generate", talker, *prompt, *SHORT, stdin="one"))
    assert report.context_tokens == len(TEMPLATE.encode([user("one")]))
    assert report.chat_template == TEMPLATE.name


def test_raw_text_is_the_prompt(talker: Path) -> None:
    report = run_of(call("generate", talker, "one", "--raw", *SHORT))
    assert report.context_tokens == len(chat_tokenizer()("one")["input_ids"])
    assert report.chat_template == "none"


def test_a_system_message_comes_first(talker: Path) -> None:
    messages = [{"role": "system", "content": "so."}, user("one")]
    report = run_of(call("generate", talker, "one", "--system", "so.", *SHORT))
    assert report.context_tokens == len(TEMPLATE.encode(messages))
    chat = report_of(call("chat", talker, "--system", "so.", *SHORT, stdin="one\n"))
    assert chat.command == "chat"
    assert chat.turns[0].token_ids == report.token_ids


def test_a_chat_renders_all_turns(talker: Path) -> None:
    report = report_of(call("chat", talker, *SHORT, stdin="one\ntwo\n"))
    assert report.command == "chat"
    first, second = report.turns
    answer = {"role": "assistant", "content": first.text}
    assert second.context_tokens == len(TEMPLATE.encode([user("one"), answer, user("two")]))
    assert {first.chat_template, second.chat_template} == {TEMPLATE.name}


def test_raw_turns_follow_each_other(talker: Path) -> None:
    report = report_of(call("chat", talker, "--raw", *SHORT, stdin="one\ntwo\n"))
    assert report.command == "chat"
    words = [len(chat_tokenizer()(text)["input_ids"]) for text in ("one", "two")]
    assert report.turns[1].context_tokens == sum(words) + 3
    assert report.turns[1].chat_template == "none"


def test_random_tokens_pass_the_template_by(talker: Path) -> None:
    report = run_of(call("generate", talker, "--prompt-tokens", 9, *SHORT))
    assert (report.context_tokens, report.chat_template) == (9, "none")


def halves(text: str) -> tuple[slice, slice]:
    return slice(len(text) // 2), slice(len(text) // 2, None)


def test_reset_keeps_the_system_message(talker: Path) -> None:
    result = call("chat", talker, "--system", "so.", *SHORT[:2], stdin="one\n/reset\none\n")
    assert result.exit_code == 0, result.output
    first, second = (result.stdout[half] for half in halves(result.stdout))
    assert first == second != "\n"


def test_models_without_a_template_are_untouched(model: Path) -> None:
    words = ("generate", model, "the river", *SHORT)
    given, raw = run_of(call(*words)), run_of(call(*words, "--raw"))
    assert given.token_ids == raw.token_ids
    assert given.chat_template == "none"
    why = "messages need a chat template, and the model's tokenizer has none"
    assert why in refused("generate", model, "the river", "--system", "be brief")
    assert why in refused("chat", model, "--system", "be brief", stdin="the river\n")


def test_a_system_message_that_the_template_refuses_is_one_sentence(tmp_path: Path) -> None:
    words = ("generate", save(tmp_path, STRICT), "one", "--system", "so.")
    assert "refuses messages of system, user: System role not supported" in refused(*words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("one", "--system", "so.", "--raw"), "--system needs the chat template, which --raw"),
        (("one", "--system", " "), "--system is empty"),
        (("--prompt-tokens", "9", "--system", "so."), "--system needs text"),
    ],
)
def test_a_system_message_without_a_place_is_refused_before_loading(
    words: tuple[str, ...], why: str
) -> None:
    assert why in refused("generate", "./nowhere", *words)


def test_a_template_that_rewrites_turns_is_served(tmp_path: Path) -> None:
    report = report_of(call("chat", save(tmp_path, FORGETFUL), *SHORT, stdin="one\ntwo\n"))
    assert report.command == "chat"
    assert len(report.turns) == 2
