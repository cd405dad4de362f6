"""RULER's own files, as its scripts write them: DIR/TASK/validation.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.tasks.base import TASKS, TextQuestion
from hybrid_kv.eval.tasks.recorded import AskedRow, JsonRow, Recorded

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
