"""InfiniteBench's files, as they are published: FOLDER/TASK.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, NamedTuple

from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.tasks.base import TASKS, TextQuestion
from hybrid_kv.eval.tasks.measures import Measure, f1, letter, rouge_l
from hybrid_kv.eval.tasks.recorded import AskedRow, JsonRow, Recorded

_LETTERS = "ABCD"


class _BenchFile(NamedTuple):
    """What one of the tasks says first, how it is measured, and how long answers may be."""

    intro: str
    measure: Measure | None
    max_new_tokens: int


_FIND = "The following text hides something. Remember it, you will be asked."
_BOOK = "Read the following book, you will be asked about it."
KINDS = {
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
        kind = KINDS.get(path.stem)
        if kind is None:
            raise ConfigError(
                f"file '{path}' must be one of {', '.join(KINDS)}, named so, got {path.stem}; "
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
