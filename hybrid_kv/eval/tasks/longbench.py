"""LongBench's files, as they are published: FOLDER/DATASET.jsonl, the English ones."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, NamedTuple

from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.tasks.base import TASKS, TextQuestion
from hybrid_kv.eval.tasks.measures import (
    Measure,
    code,
    f1,
    first_line,
    numbers,
    one_of,
    rouge_l,
)
from hybrid_kv.eval.tasks.recorded import AskedRow, JsonRow, Recorded


class _DataSet(NamedTuple):
    """How a data set is asked and measured; None: by the names of all its classes.

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
