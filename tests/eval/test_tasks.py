"""Tasks: texts of the right length that hold the answers, the same for the same seed."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.tasks import RULER, TASKS, Room, TaskConfig, TextQuestion, TextSample

ENGLISH = [
    name
    for name in TASKS
    if name not in ("most_frequent", "perplexity") and not TASKS[name].factory.recorded
]
NEEDLE = (
    "key_value",
    "passkey",
    "multi_value",
    "multi_query",
    "variable_tracking",
    "most_frequent",
)
COUNTED = ("common_words", "frequent_words")


def count(text: str) -> int:
    """Words and single other signs, as a tokenizer would have about as many."""
    return len(re.findall(r"\w{1,6}|[^\w\s]", text))


def draw(name: str, tokens: int = 1501, seed: int = 5, depth: float = 0.5) -> TextSample:
    task = TaskConfig(task=name).build()
    sample: TextSample = task.english(Room(tokens, count), np.random.default_rng(seed), depth)
    return sample


def test_ruler_has_thirteen_tasks() -> None:
    assert len(set(RULER)) == 13
    assert set(RULER) <= set(TASKS)


@pytest.mark.parametrize("name", ENGLISH)
@pytest.mark.parametrize("tokens", [701, 1501])
def test_a_context_fills_its_room_and_no_more(name: str, tokens: int) -> None:
    sample = draw(name, tokens)
    size = count(sample.intro) + count(sample.context)
    size += max(count(question.text) for question in sample.questions)
    assert 0.85 * tokens <= size <= tokens


def test_a_text_of_more_tokens_than_its_sentences_have_fits_as_well() -> None:
    room = Room(300, lambda text: len(text) // 9)  # rounds down: a whole has more than its parts
    sample = TaskConfig(task="single_2").build().english(room, np.random.default_rng(1), 0.5)
    texts = (sample.intro, sample.context, sample.questions[0].text)
    assert 250 <= sum(map(room.count, texts)) <= 300


@pytest.mark.parametrize("name", ENGLISH)
def test_every_answer_stands_in_the_context(name: str) -> None:
    sample = draw(name)
    assert sample.questions
    for question in sample.questions:
        assert question.score(sample.context) == 1
        assert question.score("nothing of the kind") == 0
        if question.depth is not None:
            place = int(question.depth * len(sample.context))
            behind = sample.context[max(0, place - 2) : place + 320]
            assert question.answers[0] in behind


@pytest.mark.parametrize("name", ENGLISH)
def test_a_seed_makes_a_sample(name: str) -> None:
    assert draw(name) == draw(name)
    assert draw(name) != draw(name, seed=6)


@pytest.mark.parametrize("name", COUNTED)
def test_the_words_that_are_asked_for_are_the_most(name: str) -> None:
    sample = draw(name)
    words = re.findall("[a-z]+", sample.context)
    seen = {word: words.count(word) for word in words}
    asked = sample.questions[0].answers
    assert min(seen[word] for word in asked) > max(
        number for word, number in seen.items() if word not in asked
    )


@pytest.mark.parametrize("depth", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", ["single_1", "single_2", "single_3", "passkey"])
def test_a_single_needle_stands_where_it_shall(name: str, depth: float) -> None:
    (question,) = draw(name, depth=depth).questions
    assert question.depth == pytest.approx(depth, abs=0.05)


@pytest.mark.parametrize("name", ["multi_key_1", "multi_key_2", "multi_key_3", "qa_1", "qa_2"])
def test_questions_on_one_context_ask_for_places_all_over_it(name: str) -> None:
    depths = [question.depth or 0.0 for question in draw(name).questions]
    assert len(set(depths)) == len(depths) == 4
    assert max(depths) - min(depths) > 0.3


@pytest.mark.parametrize("name", NEEDLE)
def test_the_needle_language_is_written_where_it_was_trained(name: str) -> None:
    task = TaskConfig(task=name, records=24).build()
    sample = task.needle(701, 3)
    assert (len(sample.context), sample.task) == (701, name)
    assert 1 <= len(sample.questions) <= 4
    assert task.speaks("needle")


@pytest.mark.parametrize(("name", "language"), [("most_frequent", "English"), ("qa_1", "needle")])
def test_a_task_refuses_a_language_that_it_is_not_written_in(name: str, language: str) -> None:
    task = TaskConfig(task=name).build()
    assert not task.speaks("needle" if language == "needle" else "english")
    with pytest.raises(ConfigError, match=f"task '{name}' is written in"):
        _ = (
            task.needle(701, 0)
            if language == "needle"
            else task.english(Room(701, count), np.random.default_rng(0), 0.5)
        )


@pytest.mark.parametrize("name", [n for n in ENGLISH if n not in ("multi_key_2", "multi_key_3")])
def test_a_room_that_is_too_small_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"lengthen|must (have|hold)|needs more room"):
        draw(name, 12)


def test_records_that_do_not_fit_are_refused_by_the_name_of_the_task() -> None:
    with pytest.raises(ConfigError, match="task 'key_value' with records=64: context_tokens must"):
        TaskConfig(task="key_value").build().needle(101, 0)


def test_a_score_is_a_share_or_any() -> None:
    some = TextQuestion("", "", ("12", "34"))
    assert [some.score(text) for text in ("12 34", "it is 34.", "")] == [1, 0.5, 0]
    assert TextQuestion("", "", ("Calder", "x"), any_of=True).score("in calder") == 1


def test_settings_of_a_task_are_checked() -> None:
    with pytest.raises(ConfigError, match="passkey setting 'digit'; did you mean 'digits'"):
        TaskConfig(task="passkey", digit=4)
    with pytest.raises(ConfigError, match="unknown task 'multi_kee_1'; did you mean 'multi_key_1'"):
        TaskConfig(task="multi_kee_1")
