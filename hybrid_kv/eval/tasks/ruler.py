"""RULER's synthetic tasks: retrieval, aggregation and tracking of variables; and key-value pairs.

Retrieval asks for single sentences, aggregation for the words that a whole text holds most of,
tracking for the variables that were assigned one value through others.

RULER: Hsieh et al. 2024, arXiv:2404.06654, section 3; what is asked follows its table of
configurations, in words and over texts of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from hybrid_kv.config import Count
from hybrid_kv.config import Params as BaseParams
from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.needle import Sample as NeedleSample
from hybrid_kv.eval.needle import make_sample
from hybrid_kv.eval.tasks.base import (
    ADJECTIVES,
    NOUNS,
    TASKS,
    Room,
    Task,
    TextQuestion,
    TextSample,
    draw_codes,
    draw_names,
    draw_numbers,
    essay,
    hide,
    noise,
    spread,
)

_RULER = "Hsieh et al. 2024 (RULER), arXiv:2404.06654"


@TASKS.register("common_words", paper=_RULER)
class CommonWords(Task):
    """The words that a long list holds most often."""

    class Params(BaseParams):
        """common: words that are asked for; often, seldom: times that they and all others occur."""

        common: Count = 10
        often: Count = 30
        seldom: Count = 3

    def english(self, room: Room, rng: np.random.Generator, depth: float) -> TextSample:
        count = self.params.common
        intro = "The following is a numbered list of words. Some of them occur often."
        question = f"Which {count} words occur most often in the list?"
        words = rng.permutation([*NOUNS, *ADJECTIVES]).tolist()
        room = room.less(intro, question)
        often, seldom = self.params.often, self.params.seldom
        while True:
            size = self._fitting(room, words, count, often, seldom)
            if size is not None or often <= seldom + 1:
                break
            often = max(seldom + 1, often // 2)  # a short list: seldomer, but still the most
        if size is None:
            raise ConfigError(
                f"task 'common_words' needs more room than {room.tokens} tokens for {count} words; "
                "lengthen the context or lower common"
            )
        listed = [*words[:count] * often, *words[count : count + size] * seldom]
        text = _numbered(rng.permutation(listed).tolist())
        asked = TextQuestion(
            question,
            f"The {count} words that occur most often are",
            tuple(words[:count]),
            max_new_tokens=6 * count,
        )
        return TextSample(intro, text, (asked,))

    @staticmethod
    def _fitting(room: Room, words: list[str], count: int, often: int, seldom: int) -> int | None:
        """Number of other words that fit beside the common ones; None where there is no place for
        any.
        """

        def fits(size: int) -> bool:
            listed = words[:count] * often + words[count : count + size] * seldom
            return room.count(_numbered(listed)) <= room.tokens

        low, high = 0, len(words) - count
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low or None


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


@TASKS.register("frequent_words", paper=_RULER)
class FrequentWords(Task):
    """The three made-up words that a coded text holds most often."""

    class Params(BaseParams):
        """alpha: the k-th most frequent word occurs as k to the power of -alpha."""

        alpha: float = Field(default=2.0, gt=1, le=5)

    def english(self, room: Room, rng: np.random.Generator, depth: float) -> TextSample:
        intro = "The following text is written in a secret code of made-up words."
        question = "Which three words occur most often in the coded text?"
        room = room.less(intro, question)
        words = _made_up(rng, 64)
        shares = np.arange(1, len(words) + 1) ** -self.params.alpha
        per_word = room.count(" " + " ".join(words)) / len(words)
        total = int(room.tokens / per_word)
        while total >= 32:
            counts = np.floor(shares / shares.sum() * total).astype(int)
            text = " ".join(rng.permutation(np.repeat(words, counts)).tolist())
            if room.count(text) <= room.tokens:
                break
            total = int(0.95 * total)
        else:
            raise ConfigError(
                f"task 'frequent_words' needs more room than {room.tokens} tokens; lengthen the "
                "context"
            )
        asked = TextQuestion(
            question,
            "The three words that occur most often are",
            tuple(words[:3]),
            max_new_tokens=36,
        )
        return TextSample(intro, text, (asked,))


def _made_up(rng: np.random.Generator, count: int) -> list[str]:
    """Distinct words of three syllables that mean nothing."""
    starts, vowels = list("bdfgklmnprstvz"), list("aeiou")
    words: dict[str, None] = {}
    while len(words) < count:
        letters = (part for _ in range(3) for part in (rng.choice(starts), rng.choice(vowels)))
        words.setdefault("".join(letters))
    return list(words)


@TASKS.register("most_frequent", paper="this project")
class MostFrequent(Task):
    """The word that a named list holds most; in the needle language."""

    class Params(BaseParams):
        """records: votes in a context; questions: asked about it."""

        records: Count = 64
        questions: Count = 4

    def needle(self, context_tokens: int, seed: int) -> NeedleSample:
        return needle_sample("most_frequent", context_tokens, self.params, seed)


@TASKS.register("variable_tracking", paper="Hsieh et al. 2024 (RULER), arXiv:2404.06654")
class VariableTracking(Task):
    """Task that asks which names stand for a number, by a chain of assignments."""

    class Params(BaseParams):
        """hops: assignments after the first one; records: in a context of the needle language;
        questions: asked about one of these.
        """

        hops: Count = 4
        records: Count = 64
        questions: Count = 4

    def needle(self, context_tokens: int, seed: int) -> NeedleSample:
        return needle_sample("variable_tracking", context_tokens, self.params, seed)

    def english(self, room: Room, rng: np.random.Generator, depth: float) -> TextSample:
        count = self.params.hops + 1
        letters = np.array(list("ABCDEFGHJKLMNPQRSTUVWXYZ"))
        names: list[str] = []
        while len(names) < count:
            name = "".join(rng.choice(letters, 3, replace=False))
            names += [] if name in names else [name]
        (value,) = draw_numbers(rng, 1)
        sentences = [f"Let {names[0]} be {value}."]
        sentences += [f"Let {new} be {old}." for old, new in pairwise(names)]
        intro = "The following text sets variables. Follow them, you will be asked."
        question = f"Which {count} variables have the value {value}?"
        room = room.less(intro, question)
        depths = sorted(rng.random(count).tolist())
        text, _ = hide(room, noise(), sentences, depths)
        asked = TextQuestion(
            question,
            f"The variables with the value {value} are",
            tuple(names),
            max_new_tokens=8 * count,
        )
        return TextSample(intro, text, (asked,))


Kind = Literal["name", "number", "code"]
_DRAW: dict[Kind, Callable[[np.random.Generator, int], list[str]]] = {
    "name": draw_names,
    "number": draw_numbers,
    "code": draw_codes,
}
_TOKENS: dict[Kind, int] = {"name": 4, "number": 10, "code": 48}
"""Of an answer, generously."""
_SLACK = "a word or two"
"""Which a question may be longer than it was thought to be."""
_INTRO = "Some special {what} are hidden in the following text. Remember them, you will be asked."


class Hidden(Task):
    """Sentences 'The special number of KEY is VALUE.' in a haystack.

    keys, values: what they are. around: the haystack, "needles" for one of nothing but such
    sentences. num_keys: hidden keys; num_values: of each. asked: keys that one question names.
    """

    keys: ClassVar[Kind] = "name"
    values: ClassVar[Kind] = "number"
    around: ClassVar[Literal["noise", "essay", "needles"]] = "essay"
    num_keys: ClassVar[int] = 1
    num_values: ClassVar[int] = 1
    asked: ClassVar[int] = 1

    class Params(BaseParams):
        """questions: asked about one context, at most."""

        questions: Count = 4

    def english(self, room: Room, rng: np.random.Generator, depth: float) -> TextSample:
        noun = "codes" if self.values == "code" else "numbers"
        intro = _INTRO.format(what=noun)
        longest = max(_DRAW[self.keys](rng, 16), key=room.count)
        room = room.less(intro, self._question([longest] * self.asked)[0], _SLACK)
        count = self._count(room, rng)
        keys = _DRAW[self.keys](rng, count)
        values = _DRAW[self.values](rng, count * self.num_values)
        own = {key: values[i :: len(keys)][: self.num_values] for i, key in enumerate(keys)}
        pairs = [(key, value) for key in keys for value in own[key]]
        if self.around == "needles":
            pairs = self._fitting(room, pairs)
            keys = [key for key, _ in pairs]
        single = len(pairs) == 1
        depths = [depth] if single else spread(rng, len(pairs))
        sentences = [self._sentence(key, value) for key, value in pairs]
        text, starts = hide(room, self._haystack(rng), sentences, depths)
        where: dict[str, float] = {}
        for (key, _), start in zip(pairs, starts, strict=True):
            where.setdefault(key, start)
        questions = []
        for first in range(0, min(len(keys), self.asked * self.params.questions), self.asked):
            names = keys[first : first + self.asked]
            if len(names) == self.asked:
                questions.append(self._asks(names, own, where))
        return TextSample(intro, text, tuple(questions))

    def _count(self, room: Room, rng: np.random.Generator) -> int:
        """Number of keys that are hidden."""
        if self.around != "needles":
            return self.num_keys
        samples = zip(_DRAW[self.keys](rng, 8), _DRAW[self.values](rng, 8), strict=True)
        sizes = [room.count(" " + self._sentence(key, value)) for key, value in samples]
        return max(self.num_keys, room.tokens // min(sizes))

    def _fitting(self, room: Room, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """The first pairs, as many as there is room for."""
        sizes = [room.count(" " + self._sentence(key, value)) for key, value in pairs]
        taken = [
            pair for pair, used in zip(pairs, accumulate(sizes), strict=True) if used <= room.tokens
        ]
        return taken or pairs[:1]

    def _haystack(self, rng: np.random.Generator) -> Iterator[str]:
        if self.around == "needles":
            return iter(())
        return noise() if self.around == "noise" else essay(rng)

    def _noun(self) -> str:
        return "code" if self.values == "code" else "number"

    def _sentence(self, key: str, value: str) -> str:
        return f"The special {self._noun()} of {key} is {value}."

    def _question(self, keys: list[str]) -> tuple[str, str]:
        """The question, and how its answer begins."""
        noun = self._noun()
        if self.num_values > 1:
            return (
                f"What are all the special {noun}s of {keys[0]}? There are {self.num_values}.",
                f"The special {noun}s of {keys[0]} are",
            )
        if len(keys) > 1:
            names = f"{', '.join(keys[:-1])} and {keys[-1]}"
            return (
                f"What are the special {noun}s of {names}?",
                f"The special {noun} of {keys[0]} is",
            )
        return f"What is the special {noun} of {keys[0]}?", f"The special {noun} of {keys[0]} is"

    def _asks(
        self, keys: list[str], own: dict[str, list[str]], where: dict[str, float]
    ) -> TextQuestion:
        text, lead = self._question(keys)
        answers = tuple(value for key in keys for value in own[key])
        one = len(answers) == 1
        budget = _TOKENS[self.values] * len(answers) + (6 if one else 12 * len(answers))
        return TextQuestion(
            text, lead, answers, depth=where[keys[0]] if one else None, max_new_tokens=budget
        )


@TASKS.register("single_1", paper=_RULER)
class Single1(Hidden):
    """One number in a text of the same few sentences (RULER's first needle task)."""

    around = "noise"


@TASKS.register("single_2", paper=_RULER)
class Single2(Hidden):
    """One number in an essay (RULER's second)."""


@TASKS.register("single_3", paper=_RULER)
class Single3(Hidden):
    """One long code in an essay (RULER's third)."""

    values = "code"


@TASKS.register("multi_key_1", paper=_RULER)
class MultiKey1(Hidden):
    """Four numbers in an essay, one of them asked for at a time."""

    num_keys = 4


@TASKS.register("multi_key_2", paper=_RULER)
class MultiKey2(Hidden):
    """A text of nothing but numbers, one of them asked for at a time."""

    around = "needles"


@TASKS.register("multi_key_3", paper=_RULER)
class MultiKey3(Hidden):
    """A text of nothing but long codes of long codes, one of them asked for at a time."""

    around = "needles"
    keys, values = "code", "code"


class _InTwoLanguages(Hidden):
    """A task that the model `needle` was trained for as well."""

    name: ClassVar[str]

    class Params(Hidden.Params):
        """records: hidden in a context of the needle language."""

        records: Count = 64

    def needle(self, context_tokens: int, seed: int) -> NeedleSample:
        return needle_sample(self.name, context_tokens, self.params, seed)


@TASKS.register("multi_value", paper=_RULER)
class MultiValue(_InTwoLanguages):
    """Several values of one key, all asked for at once."""

    name = "multi_value"
    num_values = 4


@TASKS.register("multi_query", paper=_RULER)
class MultiQuery(_InTwoLanguages):
    """Several keys asked for in one question."""

    name = "multi_query"
    num_keys = asked = 4


@TASKS.register("key_value", paper="Zhang et al. 2024 (InfiniteBench), arXiv:2402.13718")
class KeyValue(_InTwoLanguages):
    """Many pairs of key and value, one of them asked for at a time."""

    name = "key_value"

    class Params(_InTwoLanguages.Params):
        """pairs: hidden in an English context."""

        pairs: Count = 16

    def _count(self, room: Room, rng: np.random.Generator) -> int:
        return int(self.params.pairs)


@TASKS.register("passkey", paper="Mohtashami and Jaggi 2023, arXiv:2305.16300")
class Passkey(_InTwoLanguages):
    """One pass key in a text of the same few sentences."""

    name = "passkey"
    around = "noise"

    class Params(_InTwoLanguages.Params):
        """digits: of the pass key in English."""

        questions: Count = 1
        digits: int = Field(default=5, ge=1, le=12)

    def _sentence(self, key: str, value: str) -> str:
        return f"The pass key is {value}. Remember it: {value} is the pass key."

    def _question(self, keys: list[str]) -> tuple[str, str]:
        return "Which number is the pass key?", "The pass key is the number"

    def english(self, room: Room, rng: np.random.Generator, depth: float) -> TextSample:
        intro = "A pass key is hidden in the following text. Remember it, you will be asked."
        (value,) = draw_numbers(rng, 1, self.params.digits)
        text, lead = self._question([])
        room = room.less(intro, text)
        context, (start,) = hide(room, noise(), [self._sentence("", value)], [depth])
        question = TextQuestion(text, lead, (value,), depth=start, max_new_tokens=16)
        return TextSample(intro, context, (question,))


def needle_sample(name: str, context_tokens: int, params: Any, seed: int) -> NeedleSample:
    """A context in the needle language with as many questions as there can be, up to those asked.

    Raises:
        ConfigError: the records do not fit into the context.
    """
    records = params.records
    possible = {"key_value": records, "passkey": 1, "most_frequent": max(1, records // 8)}
    count = min(params.questions, possible.get(name, max(1, records // 4)))
    try:
        return make_sample(
            name, context_tokens, num_records=records, num_questions=count, seed=seed
        )
    except ConfigError as error:
        raise ConfigError(f"task '{name}' with records={records}: {error}") from None
