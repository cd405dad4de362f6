"""Data sets that the user has as JSON lines: LongBench, InfiniteBench, RULER's files and others.

Nothing is downloaded.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hybrid_kv.config import Count
from hybrid_kv.config import Params as BaseParams
from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.tasks.base import (
    TASKS,
    Measure,
    Room,
    Task,
    TextQuestion,
    TextSample,
    code,
    f1,
    first_line,
    letter,
    numbers,
    one_of,
    rouge_l,
)

JsonRow = dict[str, Any]
_MOST_NAMED = 20


class AskedRow(NamedTuple):
    """A row of a data set: what is said before a context, the context, and a question about it."""

    intro: str
    context: str
    question: TextQuestion


class Recorded(Task):
    """Rows of a file; those with the same context are questions on one context.

    Samples are taken evenly from the file's contexts. One that is too long loses its middle, as the
    authors of these sets have it, where `cuts`; else it is refused.
    """

    recorded: ClassVar[bool] = True
    cuts: ClassVar[bool] = True
    fields: ClassVar[tuple[str, ...]]

    class Params(BaseParams):
        """path: a file of JSON lines, or a folder with FILE.jsonl; file: which one of a folder;
        questions: asked about one context, at most.
        """

        path: str = ""
        file: str = ""
        questions: Count = 4

    @abstractmethod
    def asked(self, row: JsonRow, path: Path) -> AskedRow:
        """Question and answers that a row of a file asks for.

        Raises:
            ConfigError: the file is of a kind that is not asked here.
        """

    @property
    def num_contexts(self) -> int:
        return len(self.samples())

    def samples(self) -> list[TextSample]:
        """All contexts of the file, in its order.

        Raises:
            ConfigError: there is no such file, or a line of it is not what the data set has.
        """
        path = self._file()
        found: dict[tuple[str, str], list[TextQuestion]] = {}
        for row in _rows(path, path.stat().st_mtime_ns, self.fields):
            asked = self.asked(row, path)
            found.setdefault((asked.intro, asked.context), []).append(asked.question)
        if not found:
            raise ConfigError(
                f"file '{path}' must hold a line of JSON at least, got none; choose another"
            )
        limit = self.params.questions
        return [TextSample(*texts, tuple(asked[:limit])) for texts, asked in found.items()]

    def english(self, room: Room, rng: np.random.Generator, depth: float) -> TextSample:
        samples = self.samples()
        sample = samples[int(depth * len(samples))]
        longest = max((f"{q.text}{q.lead}" for q in sample.questions), key=len)
        room = room.less(sample.intro, longest)
        size = room.count(sample.context)
        if size > room.tokens and (room.tokens < 1 or not self.cuts):
            raise ConfigError(
                f"a context must hold a row of '{self._file()}' of {size} tokens beside its "
                f"question, got room for {max(0, room.tokens)}; lengthen --context"
            )
        context = sample.context if size <= room.tokens else _cut(sample.context, room)
        questions = tuple(_placed(question, context) for question in sample.questions)
        return TextSample(sample.intro, context, questions)

    def _file(self) -> Path:
        path, name = Path(self.params.path), self.params.file
        if not self.params.path:
            raise ConfigError(
                f"task '{self._name}' must be given a file of JSON lines, got none; name it, "
                f"{self._name}:path=FILE"
            )
        if path.is_dir() and name:
            path = path / f"{name}.jsonl"
        if not path.is_file():
            folder = path if path.is_dir() else path.parent
            there = ", ".join(sorted(one.stem for one in folder.glob("*.jsonl"))[:_MOST_NAMED])
            way = f"name one of {there} by file=NAME" if there else "check the path"
            raise ConfigError(
                f"task '{self._name}' must be given a file of JSON lines, got '{path}'; {way}"
            )
        return path


@lru_cache(maxsize=4)
def _rows(path: Path, changed: int, fields: tuple[str, ...]) -> tuple[JsonRow, ...]:
    """The objects of a file that has not changed since, each with these fields."""
    return tuple(_parsed(path, fields))


def _parsed(path: Path, fields: tuple[str, ...]) -> Iterator[JsonRow]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"file '{path}' cannot be read: {reason}; check the path") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        missing = fields if not isinstance(row, dict) else [f for f in fields if f not in row]
        if row is None or missing:
            raise ConfigError(
                f"line {number} of '{path}' must be a JSON object with {', '.join(fields)}, got "
                f"{line[:40]!r}; check that the file is of this data set"
            )
        yield row


def _cut(text: str, room: Room) -> str:
    """Beginning and end of a text, as much of both as there is room for."""
    low, high = 0, len(text) // 2
    while low < high:
        middle = (low + high + 1) // 2
        fits = room.count(_ends(text, middle)) <= room.tokens
        low, high = (middle, high) if fits else (low, middle - 1)
    return _ends(text, low)


def _ends(text: str, size: int) -> str:
    return f"{text[:size]}{text[len(text) - size :]}"


def _placed(question: TextQuestion, context: str) -> TextQuestion:
    """With its depth, where the answer stands in one place of the context."""
    if len(question.answers) != 1 or context.count(question.answers[0]) != 1:
        return question
    return question.at(context.index(question.answers[0]) / len(context))


class _DataSet(NamedTuple):
    """Question and metric of a data set; None: by the names of all its classes.

    ask: the question, with {} for the row's own.
    """

    intro: str
    ask: str
    measure: Measure | None
    max_new_tokens: int


def _read(tokens: int, what: str = "text") -> _DataSet:
    return _DataSet(
        f"Answer the question by the following {what}, in as few words as you can.",
        "Question: {}\nAnswer in as few words as you can.",
        f1,
        tokens,
    )


def _sum_up(what: str, ask: str = "Write a summary of one page of it all.") -> _DataSet:
    return _DataSet(f"Read the following {what}.", ask, rouge_l, 512)


_CODE = _DataSet("Complete the following code.", "{}\nWrite the next line of code.", code, 64)

KINDS = {
    "narrativeqa": _read(128, "story"),
    "qasper": _read(128, "article"),
    "multifieldqa_en": _read(64),
    "hotpotqa": _read(32, "passages"),
    "2wikimqa": _read(32, "passages"),
    "musique": _read(32, "passages"),
    "gov_report": _sum_up("report of a government"),
    "qmsum": _sum_up("meeting", "Question about the meeting: {}"),
    "multi_news": _sum_up("news"),
    "trec": _DataSet("Name the type of the question, as in these examples.", "{}", None, 64),
    "triviaqa": _DataSet(
        "Answer the question by the passage, as in these examples.", "{}", first_line(f1), 32
    ),
    "samsum": _DataSet(
        "Sum up the dialogue, as in these examples.", "{}", first_line(rouge_l), 128
    ),
    "passage_count": _DataSet(
        "Some of the following paragraphs may be repeated.",
        "How many different paragraphs are there? Say the number alone.",
        numbers,
        32,
    ),
    "passage_retrieval_en": _DataSet(
        "Remember the following paragraphs.",
        "This is the abstract of one of them: {}\nSay the number of that paragraph alone.",
        numbers,
        32,
    ),
    "lcc": _CODE,
    "repobench-p": _CODE,
}


@TASKS.register("longbench", paper="Bai et al. 2023 (LongBench), arXiv:2308.14508")
class LongBench(Recorded):
    """Rows of a file of LongBench in English, asked in words of our own.

    Measured as its authors do: overlap of words, ROUGE-L, classes, numbers, likeness of code. They
    ask in other words, so that scores are to be compared here, not with those of papers.
    """

    fields: ClassVar[tuple[str, ...]] = ("input", "context", "answers", "dataset")

    def asked(self, row: JsonRow, path: Path) -> AskedRow:
        name = str(row["dataset"]).removesuffix("_e")
        kind = KINDS.get(name)
        if kind is None:
            raise ConfigError(
                f"a row of '{path}' must be of one of {', '.join(KINDS)}, got {name}; choose "
                "another file"
            )
        classes = first_line(one_of([*map(str, row.get("all_classes") or ())]))
        question = TextQuestion(
            kind.ask.format(str(row["input"]).strip()).strip(),
            "",
            tuple(map(str, row["answers"])),
            any_of=True,
            max_new_tokens=kind.max_new_tokens,
            measure=kind.measure or classes,
        )
        return AskedRow(kind.intro, str(row["context"]), question)


_MOST = 128
"""Tokens of an answer, as RULER allows for its longest."""


@TASKS.register("ruler_files", paper="Hsieh et al. 2024 (RULER), arXiv:2404.06654")
class RulerFiles(Recorded):
    """Rows that RULER's scripts wrote, without a model's template (base).

    The last line of a row's input is its question, all before it the context. A score is the share
    of the known answers that are said; for files below a folder whose name begins with qa, any.
    """

    cuts: ClassVar[bool] = False
    fields: ClassVar[tuple[str, ...]] = ("input", "outputs")

    def asked(self, row: JsonRow, path: Path) -> AskedRow:
        context, line, question = str(row["input"]).strip().rpartition("\n")
        if not line:
            raise ConfigError(
                f"a row of '{path}' must have its question in the last line of input, got one "
                "line; check that the file is of this data set"
            )
        question_of = TextQuestion(
            question,
            str(row.get("answer_prefix", "")).strip(),
            tuple(map(str, row["outputs"])),
            any_of=path.parent.name.startswith("qa"),
            max_new_tokens=_MOST,
        )
        intro, _, text = context.partition("\n")
        return AskedRow(intro, text.strip("\n"), question_of)


_LETTERS = "ABCD"


class _BenchFile(NamedTuple):
    """Instruction, metric and longest answer of one of the tasks."""

    intro: str
    measure: Measure | None
    max_new_tokens: int


_FIND = "The following text hides something. Remember it, you will be asked."

_BOOK = "Read the following book, you will be asked about it."

_FILES = {
    "passkey": _BenchFile(_FIND, None, 6),
    "number_string": _BenchFile(_FIND, None, 12),
    "kv_retrieval": _BenchFile("Remember the values of the following JSON object.", None, 50),
    "longbook_qa_eng": _BenchFile(_BOOK, f1, 40),
    "longbook_sum_eng": _BenchFile(_BOOK, rouge_l, 1200),
    "longbook_choice_eng": _BenchFile(_BOOK, letter, 40),
    "longdialogue_qa_eng": _BenchFile("One name in the following dialogue is hidden.", None, 40),
    "math_find": _BenchFile("Read the following list of numbers.", None, 3),
    "code_debug": _BenchFile(
        "Read the following code, one function of it has an error.", letter, 5
    ),
    "code_run": _BenchFile("Read the following functions.", None, 5),
}


@TASKS.register("infinite_bench", paper="Zhang et al. 2024 (InfiniteBench), arXiv:2402.13718")
class InfiniteBench(Recorded):
    """Rows of a file of InfiniteBench; its name says which task they are.

    Measured as its authors do: what is hidden must be said, questions about books by the overlap of
    words, choices by their letter, summaries by ROUGE-L.
    """

    fields: ClassVar[tuple[str, ...]] = ("context", "input", "answer")

    def asked(self, row: JsonRow, path: Path) -> AskedRow:
        kind = _FILES.get(path.stem)
        if kind is None:
            raise ConfigError(
                f"file '{path}' must be one of {', '.join(_FILES)}, named so, got {path.stem}; "
                "choose another"
            )
        known, options = _listed(row["answer"]), [*map(str, row.get("options") or ())]
        text = str(row["input"]).strip()
        if kind.measure is letter:
            known += tuple(_LETTERS[options.index(one)] for one in known if one in options)
            choices = zip(_LETTERS, options, strict=False)
            text = "\n".join([text, *(f"{name}. {option}" for name, option in choices)])
        question = TextQuestion(
            text,
            "The answer is" if kind.measure is not rouge_l else "",
            known,
            any_of=True,
            max_new_tokens=kind.max_new_tokens,
            measure=kind.measure,
        )
        return AskedRow(kind.intro, str(row["context"]), question)


def _listed(answer: object) -> tuple[str, ...]:
    return tuple(map(str, answer)) if isinstance(answer, list) else (str(answer),)
