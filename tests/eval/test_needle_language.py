"""The needle language: readable text, exact lengths, answers that follow from the context."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.needle import (
    TASKS,
    Question,
    Sample,
    filler,
    is_correct,
    make_sample,
    successors,
)
from hybrid_kv.eval.needle.facts import BOS, STOP, TOKENS, VOCAB_SIZE
from scripts.needle.tokenizer import build_tokenizer, save_tokenizer

ALL_TASKS = sorted(TASKS)
HEX = "[0-9a-f]{2}"
NUMBERS = ["one", "two", "three", "four"]
SUCCESSOR_CHECKSUM = 76010308
FILLER_SEED_7 = [1, 506, 503, 458, 330, 504, 484, 411, 357, 4, 367, 486]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def draw(task: str, tokens: int = 1501, records: int = 24, seed: int = 5) -> Sample:
    questions = {"passkey": 1, "most_frequent": 3}.get(task, 6)
    return make_sample(task, tokens, num_records=records, num_questions=questions, seed=seed)


@pytest.mark.parametrize("task", ALL_TASKS)
def test_text_becomes_the_same_ids_again(task: str, tokenizer: PreTrainedTokenizerFast) -> None:
    sample = draw(task)
    for question in sample.questions:
        ids = [*sample.context.tolist(), *question.ids, *question.answer]
        assert tokenizer.encode(tokenizer.decode(ids)) == ids


def test_every_token_survives_the_round_trip(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = list(range(VOCAB_SIZE))
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert len(set(TOKENS)) == VOCAB_SIZE == 512


def test_a_record_reads_like_one(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "The old harbour. key 3f a0: 11 5c 9e 07. let 3f a0 = 17 22. ? key pass code: 00"
    assert tokenizer.decode(tokenizer.encode(text)) == text.lower()
    assert tokenizer.decode(tokenizer.encode("KEY 3F A0 11")) == "key 3f a0: 11"


def test_saved_tokenizer_loads_by_itself(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    save_tokenizer(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = draw("key_value").context.tolist()
    assert loaded.decode(ids) == tokenizer.decode(ids)
    assert loaded.encode(loaded.decode(ids)) == ids
    assert loaded.bos_token_id == BOS


@pytest.mark.parametrize("task", ALL_TASKS)
@pytest.mark.parametrize("tokens", [17, 37, 128, 1001, 4096])
def test_context_has_exactly_the_length_asked_for(task: str, tokens: int) -> None:
    context = make_sample(task, tokens, num_records=2, seed=tokens).context
    assert context.shape == (tokens,)
    assert context.dtype == np.int64
    assert context[0] == BOS
    assert np.count_nonzero(context == BOS) == 1


@pytest.mark.parametrize("task", ALL_TASKS)
def test_same_seed_gives_the_same_sample(task: str) -> None:
    first, again, other = draw(task, seed=1), draw(task, seed=1), draw(task, seed=2)
    assert np.array_equal(first.context, again.context)
    assert first.questions == again.questions
    assert not np.array_equal(first.context, other.context)


def test_language_does_not_change() -> None:
    # The shipped weights have learned this table and this text: a change needs new weights.
    assert int((successors() * np.arange(1, 961).reshape(240, 4)).sum()) == SUCCESSOR_CHECKSUM
    assert filler(12, seed=7).tolist() == FILLER_SEED_7


@pytest.mark.parametrize("task", ALL_TASKS)
def test_long_contexts_are_drawn_fast(task: str) -> None:
    started = time.thread_time()
    context = make_sample(task, 131_072, num_records=256, seed=1).context
    assert len(context) == 131_072
    assert time.thread_time() - started < 1.0  # of this thread: others may be at work beside it


def expected_answers(task: str, question: str, context: str) -> set[str]:
    """All right answers, found in the text with regular expressions: independent of the code."""
    records = dict(re.findall(f"key ({HEX} {HEX}|pass code): ([^.?]+)\\.", context))
    if task in ("key_value", "passkey"):
        return {records[question.removeprefix("? key ")] + "."}
    if task == "multi_query":
        asked = re.findall(f"(one|two|three|four) ({HEX} {HEX})", question)
        assert [word for word, _ in asked] == NUMBERS[: len(asked)]
        return {" ".join(f"{word} {key}: {records[key]}" for word, key in asked) + "."}
    name = question[-5:]
    if task == "multi_value":
        values = re.findall(f"tag (one|two|three|four) {name}: ({HEX} {HEX})\\.", context)
        assert [word for word, _ in values] == NUMBERS[: len(values)]
        assert question == f"? {values[-1][0]} tag {name}"
        return {" ".join(f"{word} {name}: {value}" for word, value in values) + "."}
    if task == "variable_tracking":
        steps = dict(re.findall(f"let ({HEX} {HEX}) = ([^.?]+)\\.", context))
        path = []
        while name in steps:
            name = steps[name]
            path.append(name)
        return {" ".join(path) + "."}
    votes = Counter(re.findall(f"vote {name}: ([a-z]+)\\.", context)).most_common(2)
    assert len(votes) == 1 or votes[0][1] > votes[1][1], "the most frequent word is not unique"
    return {f"{votes[0][0]}."}


@pytest.mark.parametrize("task", ALL_TASKS)
@pytest.mark.parametrize("seed", range(6))
def test_answer_follows_from_the_context(
    task: str, seed: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    sample = draw(task, seed=seed)
    context = tokenizer.decode(sample.context)
    for question in sample.questions:
        text = tokenizer.decode(question.ids)
        assert tokenizer.decode(question.answer) in expected_answers(task, text, context)


@pytest.mark.parametrize("task", ALL_TASKS)
def test_evidence_is_all_that_an_answer_needs(
    task: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    sample = draw(task, seed=9)
    ids = sample.context.tolist()
    for question, places in zip(sample.questions, sample.evidence, strict=True):
        records = [ids[at : ids.index(STOP, at) + 1] for at in places]
        assert list(places) == sorted(places)
        text = tokenizer.decode(question.ids)
        alone = tokenizer.decode([BOS, *(token for record in records for token in record)])
        assert tokenizer.decode(question.answer) in expected_answers(task, text, alone)


@pytest.mark.parametrize("task", ALL_TASKS)
def test_question_does_not_hold_its_answer(task: str, tokenizer: PreTrainedTokenizerFast) -> None:
    for seed in range(5):
        for question in draw(task, seed=seed).questions:
            values = question.answer
            if task in ("multi_value", "multi_query"):
                # These answers repeat the keys that were asked; the values are what counts.
                text = tokenizer.decode(question.answer)
                values = tuple(tokenizer.encode(" ".join(re.findall(": ([^.a-z?]*)", text))))
            windows = [question.ids[i : i + 2] for i in range(len(question.ids) - 1)]
            pairs = [values[i : i + 2] for i in range(0, len(values) - 1, 2)]
            assert not set(pairs) & set(windows), (task, seed)


def test_no_question_is_asked_twice() -> None:
    sample = make_sample("key_value", 600, num_records=40, num_questions=40, seed=3)
    assert len({question.ids for question in sample.questions}) == 40


def test_half_of_the_samples_have_keys_that_share_bytes() -> None:
    def first_bytes(seed: int) -> int:
        sample = make_sample("key_value", 600, num_records=40, num_questions=40, seed=seed)
        return len({question.ids[2] for question in sample.questions})

    hard = [first_bytes(seed) <= 10 for seed in range(40)]
    assert 8 < sum(hard) < 32, f"{sum(hard)} of 40 samples are hard"


def test_answers_are_judged_up_to_the_closing_stop() -> None:
    question = Question(ids=(5, 6, 20, 21), answer=(30, 31, 32, 33, 4))
    assert is_correct(question, [30, 31, 32, 33, 4])
    assert is_correct(question, (30, 31, 32, 33, 4, 99, 98))
    assert not is_correct(question, [30, 31, 32, 33])
    assert not is_correct(question, [30, 31, 33, 32, 4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"task": "key_valu", "context_tokens": 100},
            "unknown needle task 'key_valu'; did you mean 'key_value'? known: key_value, "
            "most_frequent, multi_query, multi_value, passkey, variable_tracking",
        ),
        (
            {"task": "key_value", "context_tokens": 100, "num_records": 64},
            "context_tokens must be at least 513 for 64 records of task 'key_value', got 100; "
            "lengthen the context or lower num_records",
        ),
        (
            {"task": "multi_value", "context_tokens": 100, "num_records": 1},
            "num_records must be 2..65536 for task 'multi_value', got 1; "
            "choose a number in that range",
        ),
        (
            {"task": "passkey", "context_tokens": 999, "num_questions": 2},
            "num_questions must be 1..1 for 64 records of task 'passkey', got 2; "
            "ask fewer questions or raise num_records",
        ),
    ],
)
def test_a_wrong_request_says_what_to_do(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_sample(seed=0, **arguments)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_filler_is_plain_text_of_the_length_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    for tokens in (1, 2, 101, 5000):
        assert len(filler(tokens, seed=3)) == tokens
    text = str(tokenizer.decode(filler(5000, seed=3)))
    assert not re.search(r"\b(key|tag|let|vote)\b|\?", text)
    with pytest.raises(ConfigError, match=r"num_tokens must be at least 1 .*, got 0; ask for"):
        filler(0, seed=3)
