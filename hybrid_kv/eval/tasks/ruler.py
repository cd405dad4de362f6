"""RULER's synthetic tasks of aggregation and of tracking variables.

Aggregation asks for the words that a whole text holds most of, tracking for the variables that were
assigned one value through others.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from pydantic import Field

from hybrid_kv.config import Count
from hybrid_kv.config import Params as BaseParams
from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.needle import Sample as NeedleSample
from hybrid_kv.eval.tasks.base import (
    ADJECTIVES,
    NOUNS,
    TASKS,
    Room,
    Task,
    TextQuestion,
    TextSample,
    draw_numbers,
    hide,
    noise,
)
from hybrid_kv.eval.tasks.needles import needle_sample

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
