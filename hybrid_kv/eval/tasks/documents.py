"""Documents: questions that take one step or two, and the perplexity of files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from hybrid_kv.config import Count
from hybrid_kv.config import Params as BaseParams
from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.tasks.base import (
    FIRST_NAMES,
    LAST_NAMES,
    MAKERS,
    TASKS,
    TOWNS,
    TRADES,
    Language,
    Room,
    Task,
    TextQuestion,
    TextSample,
)

_INTRO = "Answer the question by the following documents."

_RULER = "Hsieh et al. 2024 (RULER), arXiv:2404.06654"


class _Document(NamedTuple):
    """A document with a question about it and the answer."""

    text: str
    question: str
    lead: str
    answer: str


class _Questions(Task, ABC):
    """Documents that fill the context; some of them are asked about."""

    class Params(BaseParams):
        """questions: asked about one context, at most."""

        questions: Count = 4

    def english(self, room: Room, rng: np.random.Generator, depth: float) -> TextSample:
        facts = self._facts(rng)
        longest = max((fact.question for fact in facts), key=len)
        room = room.less(_INTRO, longest)
        taken: list[_Document] = []
        left = room.tokens
        for fact in facts:
            left -= sum(room.count(f"\n\nDocument 100: {part}") for part in fact.text.split("|"))
            if left < 0:
                break
            taken.append(fact)
        if not taken:
            raise ConfigError(
                f"a context must hold a document at least, got room for {room.tokens} tokens; "
                "lengthen it"
            )
        texts, starts = self._ordered(taken, rng)
        asked = rng.permutation(len(taken))[: self.params.questions].tolist()
        return TextSample(
            _INTRO,
            texts,
            tuple(
                TextQuestion(
                    taken[number].question,
                    taken[number].lead,
                    (taken[number].answer,),
                    any_of=True,
                    depth=starts[number],
                    max_new_tokens=12,
                )
                for number in asked
            ),
        )

    @abstractmethod
    def _facts(self, rng: np.random.Generator) -> list[_Document]:
        """Documents to fill a context with, each with its question."""

    def _ordered(
        self, taken: Sequence[_Document], rng: np.random.Generator
    ) -> tuple[str, list[float]]:
        return _join([fact.text for fact in taken])


def _join(texts: Sequence[str]) -> tuple[str, list[float]]:
    """The documents under numbers, and where each begins, 0 to 1."""
    parts, starts, size = [], [], 0
    for number, text in enumerate(texts, 1):
        part = f"Document {number}: {text}"
        starts.append(size)
        parts.append(part)
        size += len(part) + 2
    return "\n\n".join(parts), [start / max(1, size) for start in starts]


def _people(rng: np.random.Generator) -> list[str]:
    pairs = rng.permutation(len(FIRST_NAMES) * len(LAST_NAMES)).tolist()
    size = len(LAST_NAMES)
    return [f"{FIRST_NAMES[pair // size]} {LAST_NAMES[pair % size]}" for pair in pairs]


@TASKS.register("qa_1", paper=_RULER)
class SingleHopQA(_Questions):
    """Questions that one document answers."""

    def _facts(self, rng: np.random.Generator) -> list[_Document]:
        facts = []
        for person in _people(rng):
            born, lives = rng.choice(TOWNS, 2, replace=False)
            year, trade = int(rng.integers(1900, 2000)), rng.choice(TRADES)
            text = (
                f"{person} was born in {born} in {year}. {person} lives in {lives} today and works "
                f"as a {trade}."
            )
            lead = f"{person} was born in"
            facts.append(_Document(text, f"In which town was {person} born?", lead, str(born)))
        return facts


@TASKS.register("qa_2", paper=_RULER)
class MultiHopQA(_Questions):
    """Questions that take two documents: where the firm is that somebody works for."""

    def _facts(self, rng: np.random.Generator) -> list[_Document]:
        firms = [f"{a} {b}" for a in MAKERS for b in ("Works", "Foundry", "Press", "Mills")]
        facts = []
        for person, firm in zip(_people(rng), rng.permutation(firms).tolist(), strict=False):
            town, trade = rng.choice(TOWNS), rng.choice(TRADES)
            text = (
                f"{person} is a {trade} and is employed by {firm}.|{firm} is a company that has "
                f"its seat in {town}."
            )
            question = f"In which town does the company have its seat that employs {person}?"
            lead = f"The company that employs {person} has its seat in"
            facts.append(_Document(text, question, lead, str(town)))
        return facts

    def _ordered(
        self, taken: Sequence[_Document], rng: np.random.Generator
    ) -> tuple[str, list[float]]:
        halves = [half for fact in taken for half in fact.text.split("|")]
        order = rng.permutation(len(halves)).tolist()
        text, starts = _join([halves[number] for number in order])
        place = {number: starts[where] for where, number in enumerate(order)}
        return text, [place[2 * number + 1] for number in range(len(taken))]


@TASKS.register("perplexity", paper="Tang et al. 2024, arXiv:2406.10774, section 4.2")
class Perplexity(Task):
    """Nats, KL divergence and top-1 agreement while reading on in a text."""

    reads: ClassVar[bool] = True

    class Params(BaseParams):
        """then: tokens that are read after the context; step: so many at once."""

        then: Count = 256
        step: Count = 16

    def speaks(self, language: Language) -> bool:
        return True
