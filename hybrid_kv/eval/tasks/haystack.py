"""Text around what a task hides: sentences that say nothing of it, and where the needles stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np

from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.tasks.base import Room
from hybrid_kv.eval.tasks.words import ADJECTIVES, NOUNS, TOWNS

_NOISE = (
    "The rain falls on the roof.",
    "The road goes around the hill.",
    "A cart comes and another one leaves.",
    "Nothing else happens here today.",
)
_OPENINGS = (
    "In the morning",
    "After a while",
    "Near the old mill",
    "On most days",
    "Before the market opens",
    "As people in {town} say",
    "Long after the war",
    "Without much noise",
    "During the summer",
    "When the wind turns",
)
_CORES = (
    "the {a} {n} stands beside a {b} {m}",
    "somebody carries a {a} {n} through the {m}",
    "a {n} is worth more than a {b} {m}",
    "the children look for the {a} {n}",
    "the {n} of the town is {a} and rather {b}",
    "nobody remembers who built the {a} {m}",
    "the road to {town} passes a {a} {n}",
    "they talk about the {m} and its {a} {n}",
    "a visitor from {town} paints the {a} {n}",
    "the {m} belongs to a {a} family",
)
_ENDINGS = (
    "",
    ", which surprises nobody",
    ", and the evening is quiet again",
    ", although the {m} is far away",
    " until the lamps are lit",
    ", as it always was",
)


def noise() -> Iterator[str]:
    """The same few sentences again and again."""
    return cycle(_NOISE)


def essay(rng: np.random.Generator) -> Iterator[str]:
    """Sentences in plain English without end; none of them holds a number."""
    while True:
        a, b = rng.choice(len(ADJECTIVES), 2, replace=False)
        n, m = rng.choice(len(NOUNS), 2, replace=False)
        frame = ", ".join(
            (_OPENINGS[rng.integers(len(_OPENINGS))], _CORES[rng.integers(len(_CORES))])
        )
        frame += _ENDINGS[rng.integers(len(_ENDINGS))] + "."
        yield frame.format(
            a=ADJECTIVES[a],
            b=ADJECTIVES[b],
            n=NOUNS[n],
            m=NOUNS[m],
            town=TOWNS[rng.integers(len(TOWNS))],
        )


def hide(
    room: Room, around: Iterator[str], needles: Sequence[str], depths: Sequence[float]
) -> tuple[str, list[float]]:
    """A text that fills the room, with needles near their depths; where they begin, 0 to 1.

    Raises:
        ConfigError: the needles alone do not fit.
    """
    left = room.less(*(f" {needle}" for needle in needles)).tokens
    if left < 0:
        raise ConfigError(
            f"a context must have at least {room.tokens - left} tokens for {len(needles)} hidden "
            f"sentences, got {room.tokens}; lengthen it or hide fewer"
        )
    sentences: list[str] = []
    for sentence in around:
        left -= room.count(f" {sentence}")
        if left < 0:
            break
        sentences.append(sentence)
    while True:
        text, starts = _insert(sentences, needles, depths)
        if room.count(text) <= room.tokens or not sentences:
            return text, starts
        sentences.pop()


def spread(rng: np.random.Generator, count: int) -> list[float]:
    """Depths of `count` needles all over a text, in random order."""
    depths = (np.arange(count) + rng.random(count)) / count
    return [float(depth) for depth in rng.permutation(depths)]


def _insert(
    sentences: Sequence[str], needles: Sequence[str], depths: Sequence[float]
) -> tuple[str, list[float]]:
    gaps = [min(len(sentences), round(depth * len(sentences))) for depth in depths]
    order = sorted(range(len(needles)), key=lambda number: depths[number])
    parts: list[str] = []
    starts, size, taken = [0] * len(needles), 0, 0
    for number in order:
        parts += sentences[taken : gaps[number]]
        size += sum(len(sentence) + 1 for sentence in sentences[taken : gaps[number]])
        taken, starts[number] = gaps[number], size
        parts.append(needles[number])
        size += len(needles[number]) + 1
    text = " ".join([*parts, *sentences[taken:]])
    return text, [start / max(1, len(text)) for start in starts]
