"""Questions of data sets that the user has as JSON lines; nothing is downloaded."""

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
from hybrid_kv.eval.tasks.base import Room, Task, TextQuestion, TextSample

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
