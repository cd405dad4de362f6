"""Data sets in local files: asked as their authors measure them, refused where they are foreign."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.tasks import Room, RulerFiles, Task, TaskConfig, TextSample
from hybrid_kv.eval.tasks.base import code, f1, letter, numbers, one_of, rouge_l


def count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def draw(task: Task, tokens: int = 301, depth: float = 0.1) -> TextSample:
    return task.english(Room(tokens, count), np.random.default_rng(0), depth)


def task_of(name: str, path: Path, **settings: Any) -> Task:
    task: Task = TaskConfig(task=name, path=str(path), **settings).build()
    assert task.num_contexts
    return task


def long_row(**changes: Any) -> dict[str, Any]:
    row = {
        "input": "Who crossed the river?",
        "context": "The miller crossed the river. " + "It rained. " * 40 + "Then all slept.",
        "answers": ["the miller", "a miller"],
        "length": 90,
        "dataset": "hotpotqa",
        "language": "en",
        "all_classes": None,
        "_id": "0",
    }
    return {**row, **changes}


def ruler_row(**changes: Any) -> dict[str, Any]:
    text = (
        "Some special magic numbers are hidden.\nThe grass is green. The number for otter is 4711"
    )
    row = {
        "index": 0,
        "input": f"{text}. The sky is blue.\nWhat is the special magic number for otter?",
        "outputs": ["4711"],
        "length": 60,
        "answer_prefix": " The special magic number for otter is",
    }
    return {**row, **changes}


def test_longbench_rows_of_one_context_are_questions_on_it(tmp_path: Path) -> None:
    rows = (long_row(), long_row(context="Another text."), long_row(input="Who slept?"))
    task = task_of("longbench", write(tmp_path / "hotpotqa.jsonl", *rows))
    assert task.num_contexts == 2
    first, second = draw(task, depth=0.25), draw(task, depth=0.75)
    assert [q.text.split("\n")[0] for q in first.questions] == [
        "Question: Who crossed the river?",
        "Question: Who slept?",
    ]
    assert (second.context, len(second.questions)) == ("Another text.", 1)
    one = task_of("longbench", tmp_path / "hotpotqa.jsonl", questions=1)
    assert len(draw(one).questions) == 1


def test_a_longbench_answer_is_measured_by_the_overlap_of_words(tmp_path: Path) -> None:
    path = write(tmp_path / "hotpotqa.jsonl", long_row())
    (question,) = draw(task_of("longbench", path)).questions
    assert question.score("The Miller.") == 1
    assert question.score("It was the miller") == pytest.approx(0.5)
    assert not question.is_settled("The Miller.")  # more words would lower it
    assert question.max_new_tokens == 32


def test_classes_of_longbench_are_those_of_the_row(tmp_path: Path) -> None:
    classes = ["Number", "Number of something", "Date"]
    row = long_row(dataset="trec", answers=["Number of something"], all_classes=classes)
    task = task_of("longbench", write(tmp_path / "d" / "trec.jsonl", row).parent, file="trec")
    (question,) = draw(task).questions
    assert question.score("Number of something\nQuestion: Date") == 1
    assert question.score("Number of something or Date") == 0.5
    assert question.score("Date") == 0


def test_a_long_context_loses_its_middle(tmp_path: Path) -> None:
    path = write(tmp_path / "hotpotqa.jsonl", long_row())
    sample = draw(task_of("longbench", path), 101)
    assert sample.context.startswith("The miller crossed")
    assert sample.context.endswith("Then all slept.")
    size = count(sample.intro) + count(sample.context) + count(sample.questions[0].text)
    assert 85 <= size <= 101


def test_rulers_last_line_is_the_question(tmp_path: Path) -> None:
    path = write(tmp_path / "niah_single_1" / "validation.jsonl", ruler_row())
    sample = draw(task_of("ruler_files", path))
    (question,) = sample.questions
    assert sample.intro == "Some special magic numbers are hidden."
    assert sample.context.endswith("The sky is blue.")
    assert question.text == "What is the special magic number for otter?"
    assert question.lead == "The special magic number for otter is"
    assert question.depth == pytest.approx(48 / 70, abs=0.15)
    assert question.is_settled("it is 4711")


def test_a_score_of_ruler_is_a_share_or_any_for_questions(tmp_path: Path) -> None:
    row = ruler_row(outputs=["4711", "12"])
    for folder, score in (("niah_multivalue", 0.5), ("qa_1", 1)):
        path = write(tmp_path / folder / "validation.jsonl", row)
        (question,) = draw(task_of("ruler_files", path)).questions
        assert question.score("4711") == score


def test_rulers_contexts_are_not_cut(tmp_path: Path) -> None:
    task = task_of("ruler_files", write(tmp_path / "validation.jsonl", ruler_row()))
    assert isinstance(task, RulerFiles)
    with pytest.raises(ConfigError, match=r"must hold a row of '.*' of 17 tokens beside .* --con"):
        draw(task, 31)


def test_infinite_bench_is_measured_by_the_name_of_its_file(tmp_path: Path) -> None:
    row = {"id": 0, "context": "The key is 71432.", "input": "Which key?", "answer": ["71432"]}
    (question,) = draw(task_of("infinite_bench", write(tmp_path / "passkey.jsonl", row))).questions
    assert (question.score("71432."), question.depth) == (1, pytest.approx(11 / 17))
    named = {"answer": ["Ada"], "options": ["Bruno", "Ada", "Carla", "Dalia"]}
    path = write(tmp_path / "longbook_choice_eng.jsonl", {**row, **named})
    (question,) = draw(task_of("infinite_bench", path)).questions
    assert question.text == "Which key?\nA. Bruno\nB. Ada\nC. Carla\nD. Dalia"
    assert [question.score(text) for text in ("B", "A. Bruno", "it is Ada")] == [1, 0, 1]


def test_measures_are_those_of_the_papers() -> None:
    assert f1("The cat, a dog", ("cat dog bird",)) == pytest.approx(2 * 2 / 5)
    assert f1("", ("cat",)) == 0
    assert rouge_l("a b c d", ("a c e", "x")) == pytest.approx(2 * 2 / 7)
    assert numbers("Paragraph 3, not 4", ("Paragraph 3",)) == 0.5
    assert numbers("none", ("3",)) == 0
    assert code("\n# first\nreturn x + 1", ("return x + 1",)) == 1
    assert letter("(C)", ("C",)) == 1
    assert one_of(["Date", "City"])("a City", ("City",)) == 1


REFUSED: list[tuple[str, str, tuple[Any, ...], str]] = [
    ("longbench", "a.jsonl", ("{no json",), "line 1 of '.*a.jsonl' must be a JSON object with in"),
    ("longbench", "a.jsonl", ({"input": ""},), "line 1 of .* with input, context, answers, datas"),
    ("longbench", "a.jsonl", (), "must hold a line of JSON at least, got none"),
    ("longbench", "a.jsonl", (long_row(dataset="vcsum"),), "of one of narrativeqa.*, got vcsum"),
    ("infinite_bench", "x.jsonl", (), "must hold a line"),
    (
        "infinite_bench",
        "math_calc.jsonl",
        ({"context": "", "input": "", "answer": ""},),
        "one of passkey.*got math_calc",
    ),
    ("ruler_files", "v.jsonl", (ruler_row(input="one"),), "in the last line of input, got one lin"),
]


@pytest.mark.parametrize(("name", "file", "rows", "text"), REFUSED)
def test_what_is_not_of_the_data_set_is_refused(
    tmp_path: Path, name: str, file: str, rows: tuple[Any, ...], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        task_of(name, write(tmp_path / file, *rows))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "trec.jsonl", long_row())
    for path, text in (
        (tmp_path, "must be given a file of JSON lines, got '.*'; name one of trec by file=NAME"),
        (tmp_path / "lcc.jsonl", "lcc.jsonl'; name one of trec"),
        (tmp_path / "no" / "such.jsonl", "such.jsonl'; check the path"),
    ):
        with pytest.raises(ConfigError, match=text):
            task_of("longbench", path)
    with pytest.raises(ConfigError, match="got none; name it, longbench:path=FILE"):
        _ = TaskConfig(task="longbench").build().num_contexts


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", long_row())
    assert task_of("longbench", path).num_contexts == 1
    write(path, long_row(), long_row(context="Another."))
    os.utime(path, ns=(1, 1))
    assert task_of("longbench", path).num_contexts == 2
