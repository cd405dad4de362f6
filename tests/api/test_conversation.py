from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError
from hybrid_kv.models.cache_state import passing
from tests.contracts.architectures import PAD, VOCAB, build
from tests.kit import cache_of
from tests.models.folder import CONTEXT, model, tokenizer

ALL: dict[str, Any] = {
    "page_size": 4,
    "sink_tokens": 4,
    "window_tokens": 8,
    "cold": {"top_k": "all"},
}
LOSSY: dict[str, dict[str, Any]] = {
    "streaming_llm": {"sink_tokens": 4, "window_tokens": 8},
    "hybrid": {"sink_tokens": 4, "window_tokens": 8, "cold": {"top_k": 3}},
    "quest": {"page_budget": 2, "dense_layers": 0},
    "full": {},
}


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return model()


@pytest.fixture
def llm(plain: PreTrainedModel) -> Any:
    with hkv.load(plain, tokenizer=tokenizer(), config=hkv.HybridConfig(**ALL)) as loaded:
        yield loaded


TURNS = ["sea sky sun ice oak elm bee fox owl sea", "oak", "sky sea owl fox ice sun"]


def test_a_conversation_equals_one_call_on_all_its_tokens(llm: hkv.LLM) -> None:
    talk, ids = llm.conversation(), list[int]()
    for text in TURNS:
        answer = talk.send(text, max_new_tokens=5)
        ids += llm.encode(text)[0].tolist()
        assert answer.token_ids == llm.generate(ids, max_new_tokens=5).token_ids
        assert answer.prompt_tokens == len(ids)
        ids += answer.token_ids
    assert [message["role"] for message in talk.history] == ["user", "assistant"] * 3


@pytest.mark.parametrize("beams", [(2, 2, 1), (1, 3, 2)])
def test_beams_and_single_answers_take_turns(llm: hkv.LLM, beams: tuple[int, ...]) -> None:
    """Rows of other beams were answered from, or refused by their number."""
    talk, ids = llm.conversation(), list[int]()
    for text, count in zip(TURNS, beams, strict=True):
        answer = talk.send(text, max_new_tokens=5, num_beams=count)
        ids += llm.encode(text)[0].tolist()
        whole = llm.generate(ids, max_new_tokens=5, num_beams=count)
        assert answer.token_ids == whole.token_ids
        ids += answer.token_ids
    cache_of(talk).check_integrity()
    assert [message["role"] for message in talk.history] == ["user", "assistant"] * 3


def test_a_later_turn_computes_its_own_tokens_only(llm: hkv.LLM, plain: PreTrainedModel) -> None:
    talk, seen = llm.conversation(), list[int]()
    hook = plain.model.layers[0].register_forward_pre_hook(
        lambda _, args: seen.append(args[0].shape[1])
    )
    try:
        talk.send(TURNS[0], max_new_tokens=3)
        seen.clear()
        talk.send(TURNS[1], max_new_tokens=3)
    finally:
        hook.remove()
    assert seen == [2, 1, 1]  # the last answer's last token and the word; then one by one


def test_an_answer_is_charged_for_itself_alone(llm: hkv.LLM) -> None:
    """The first answer's counters were those of the whole conversation, and went on counting."""
    talk = llm.conversation()
    first = talk.send(TURNS[0], max_new_tokens=5)
    attended = first.work.attended
    second = talk.send(TURNS[1], max_new_tokens=5)
    assert first.work.attended == attended
    # five queries of two layers and six heads each: the word, then four answers
    assert second.work.steps == (2 + 4) * 2 * 6


def test_the_largest_step_of_an_answer_is_its_own(plain: PreTrainedModel) -> None:
    """A conversation's counters remember the largest step of all answers."""
    wide = {"top_k": 2, "max_tokens": 9, "index": "flat"}
    settings = {"sink_tokens": 4, "window_tokens": 8, "page_size": 4, "method": "flat"}
    with hkv.load(
        plain, tokenizer=tokenizer(), config=hkv.HybridConfig(**settings, cold=wide)
    ) as llm:
        talk = llm.conversation()
        first = talk.send(TURNS[0], max_new_tokens=5)
        cache_of(talk).kv.work.most_retrieved = 1000
        second = talk.send(TURNS[1], max_new_tokens=5)
        assert 0 < second.work.most_retrieved < 10
        assert cache_of(talk).work.most_retrieved == 1000
        assert cache_of(talk).work.steps == first.work.steps + second.work.steps


TEMPLATE = (
    "{% for m in messages %}{{ 'bee ' if m.role == 'user' else 'elm ' }}{{ m.content }} "
    "{% endfor %}{% if add_generation_prompt %}elm{% endif %}"
)


def test_a_chat_template_is_rendered_anew_and_the_common_part_kept(plain: PreTrainedModel) -> None:
    words = tokenizer()
    words.chat_template = TEMPLATE
    with hkv.load(plain, tokenizer=words, config=hkv.HybridConfig(**ALL)) as llm:
        talk = llm.conversation()
        for text in TURNS:
            messages = [*talk.history, {"role": "user", "content": text}]
            rendered = words.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )
            answer = talk.send(text, max_new_tokens=5)
            alone = llm.generate(rendered["input_ids"], max_new_tokens=5)
            assert answer.token_ids == alone.token_ids


@pytest.mark.parametrize("name", ["own", "gemma3"])
def test_a_template_that_rewrites_answers_is_computed_anew_from_there(
    plain: PreTrainedModel, name: str
) -> None:
    """As templates of reasoning models do, which leave thoughts out of later turns."""
    words = tokenizer()
    words.chat_template = TEMPLATE.replace(
        "{{ m.content }}", "{{ m.content if m.role == 'user' else 'owl' }}"
    )
    built = plain if name == "own" else build(name)
    with hkv.load(built, tokenizer=words, config=hkv.HybridConfig(**ALL)) as llm:
        talk = llm.conversation()
        for text in TURNS:
            messages = [*talk.history, {"role": "user", "content": text}]
            rendered = words.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )
            answer = talk.send(text, max_new_tokens=5)
            alone = llm.generate(rendered["input_ids"], max_new_tokens=5)
            assert answer.token_ids == alone.token_ids


def test_an_empty_message_is_refused(llm: hkv.LLM) -> None:
    with pytest.raises(ConfigError, match="message is empty; type at least one word"):
        llm.conversation().send("  \n")


def test_a_conversation_that_outgrows_the_model_says_so_and_goes_on(llm: hkv.LLM) -> None:
    talk = llm.conversation()
    talk.send(TURNS[0], max_new_tokens=2)
    with pytest.raises(ConfigError, match=f"context must be at most {CONTEXT} tokens"):
        talk.send("sea", max_new_tokens=CONTEXT)
    assert len(talk.history) == 2
    fresh = llm.conversation()
    fresh.send(TURNS[0], max_new_tokens=2)
    assert talk.send("oak", max_new_tokens=4).text == fresh.send("oak", max_new_tokens=4).text


# Contexts


@pytest.mark.parametrize("method", LOSSY)
def test_asking_leaves_no_trace(plain: PreTrainedModel, method: str) -> None:
    """What left the window during an answer stayed cold, or lost, for the next question."""
    config = hkv.HybridConfig(method=method, page_size=4, **LOSSY[method])
    with hkv.load(plain, tokenizer=tokenizer(), config=config) as llm:
        context = llm.context(" ".join(TURNS))
        length = cache_of(context).get_seq_length()
        first = context.ask("fox owl", max_new_tokens=30)
        other = context.ask("ice", max_new_tokens=30)
        again = context.ask("fox owl", max_new_tokens=30)
        assert again.token_ids == first.token_ids
        assert again.work == first.work
        assert cache_of(context).get_seq_length() == length == 17
        cache_of(context).check_integrity()
        untouched = llm.context(" ".join(TURNS))
        assert untouched.ask("ice", max_new_tokens=30).token_ids == other.token_ids


def test_a_context_equals_one_call(llm: hkv.LLM) -> None:
    context = llm.context(" ".join(TURNS))
    text = " ".join([*TURNS, "fox owl"])
    assert context.ask("fox owl", max_new_tokens=20).token_ids == (
        llm.generate(text, max_new_tokens=20).token_ids
    )


def test_a_question_that_failed_leaves_no_trace(
    llm: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = llm.context(" ".join(TURNS))
    first = context.ask("fox owl", max_new_tokens=20)
    calls: list[int] = []
    plain = cache_of(context).kv.attend

    def attend(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 25:
            raise MemoryError("in the middle of an answer")
        return plain(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(cache_of(context).kv, "attend", attend)
        with pytest.raises(MemoryError):
            context.ask("fox owl", max_new_tokens=20)
    cache_of(context).check_integrity()
    assert context.ask("fox owl", max_new_tokens=20).token_ids == first.token_ids


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "mistral"])
def test_sliding_layers_are_rolled_back_too(name: str) -> None:
    """Beyond their window transformers' own layers refuse to be cropped."""
    ids = torch.randint(PAD + 1, VOCAB, (40,)).tolist()
    question = torch.tensor([[5, 9, 7]])
    with hkv.load(build(name), config=hkv.HybridConfig(**ALL)) as llm:
        context = llm.context(ids)
        want = llm.generate([*ids, 5, 9, 7], max_new_tokens=9).token_ids
        for _ in range(3):
            assert context.ask(question, max_new_tokens=9).token_ids == want


def test_an_answer_about_a_context_can_be_streamed(llm: hkv.LLM) -> None:
    """Regression: `stream=True` went to transformers, which did not know it."""
    context = llm.context("sea sky sun ice oak elm bee fox")
    whole = context.ask("fox owl", max_new_tokens=9)
    stream = context.ask("fox owl", max_new_tokens=9, stream=True)
    assert "".join(stream) == whole.text
    assert stream.result.token_ids == whole.token_ids
    stream = context.ask("fox owl", max_new_tokens=50, stream=True)
    next(stream)
    stream.close()
    assert context.ask("fox owl", max_new_tokens=9).token_ids == whole.token_ids, "it left a trace"


def test_an_empty_question_is_refused(llm: hkv.LLM) -> None:
    with pytest.raises(ConfigError, match="question is empty; pass at least one token"):
        llm.context("sea").ask("")


def test_a_context_that_is_too_long_is_refused_before_it_is_computed(llm: hkv.LLM) -> None:
    with pytest.raises(ConfigError, match=f"at most {CONTEXT} tokens for this model, got 257"):
        llm.context([3] * 257)


@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_a_cache_that_was_reset_is_new_in_its_sliding_layers_too(name: str) -> None:
    built = build(name)
    ids = torch.randint(PAD + 1, VOCAB, (1, 37))
    with hkv.attach(built, hkv.HybridConfig(**ALL)) as runtime, torch.no_grad():
        cache = runtime.cache()
        want = built(ids, **passing(cache)).logits
        built(ids[:, :3], **passing(cache))
        cache.reset()
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(built(ids, **passing(cache)).logits, want)
