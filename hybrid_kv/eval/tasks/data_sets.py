"""Published data sets in files: LongBench, InfiniteBench and what RULER generated."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, NamedTuple

from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.tasks.base import (
    TASKS,
    Measure,
    TextQuestion,
    code,
    f1,
    first_line,
    letter,
    numbers,
    one_of,
    rouge_l,
)
from hybrid_kv.eval.tasks.recorded import AskedRow, JsonRow, Recorded


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
