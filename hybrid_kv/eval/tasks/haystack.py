"""Text around what a task hides: words, sentences that say nothing of it, places of needles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Final

import numpy as np

from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.tasks.base import Room

_ADJECTIVES = """amber ancient autumn bitter bold brave bright broken calm careful clever cold
crimson curious distant eager early empty endless faded famous fancy fierce frozen
gentle golden grand green happy hidden hollow honest humble icy idle jolly keen
kind lazy light little lonely loud lucky mellow merry mighty modest narrow noble
odd patient plain polite proud quick quiet rapid rare restless rough round royal
rusty scarlet secret shallow sharp shiny silent silver simple slow small smooth
soft solid spare stormy strange sturdy sudden sunny sweet swift tall tender thin
tidy tiny tired vast velvet violet warm weary white wild windy winter wise wooden
young"""
_NOUNS = """anchor apple arrow badger barrel basket beacon bear bell bird blanket boat bottle
branch brick bridge broom bucket butter button cabin camel candle canyon carpet
castle cellar chair chapel cherry clock cloud coin comet copper corner cottage
cradle crown dancer desert dragon drum eagle engine falcon feather fence fiddle
field finger forest fountain fox garden gate ginger glacier glove goose hammer
harbor harvest hawk hedge helmet hill honey horse island ivory jacket jewel kettle
key kitchen kite ladder lake lamp lantern leaf lemon letter lion lizard maple
marble market meadow melon mill mirror monkey moon mountain needle nest oak ocean
olive orchard otter owl paddle palace panther parrot path pebble pepper piano
pigeon pillow pine planet plum pocket pond potato prairie puzzle rabbit raven
ribbon river robin rocket rope rose saddle sailor salmon shadow shell shield
shovel signal sparrow spider spoon spring squirrel stone stove summit sunset table
teacher temple thunder ticket tiger tower train tulip tunnel turtle valley village
violin wagon walnut water weaver whale wheel window wizard wolf yarn zebra"""
_FIRST_NAMES = """Ada Albin Berta Bruno Carla Cyrus Dalia Edgar Elena Felix Flora Gustav Hanna Hugo
Ines Ivan Julia Karl Lena Louis Mara Marek Nadia Nils Olga Oscar Paula Pedro Quinn
Rosa Ruben Sara Simon Tessa Tobias Ursula Victor Wanda Yusuf Zora"""
_LAST_NAMES = """Abbot Barlow Castell Draven Ellery Falk Garnet Hollis Iversen Jarvis Kestrel
Lorimer Marlow Norling Ostrow Pellam Quill Radley Sorrel Tamsin Underhill Vance
Wexford Yarrow Zeller"""
_TOWNS = """Alderby Brackwell Calder Dunmore Eastvale Fernley Glenhart Harrowgate Inverley
Kirkwood Larkfield Millbrook Northam Oakhurst Pinewood Quarley Ravensby
Stonebridge Thornbury Upwell Vellmar Westerly Yarmoor Ashdown Birchley"""
_TRADES = """baker carpenter dentist editor farmer gardener engineer judge locksmith musician
nurse painter pilot plumber potter sailor surgeon tailor teacher translator"""
_MAKERS = """Arbor Borealis Cobalt Delphin Ember Fathom Granite Halcyon Indigo Juniper Keystone
Lumen Meridian Nimbus Orchid Paragon Quartz Rivet Solstice Tundra Umber Vertex
Willow Zephyr"""

ADJECTIVES: Final = tuple(_ADJECTIVES.split())
NOUNS: Final = tuple(_NOUNS.split())
FIRST_NAMES: Final = tuple(_FIRST_NAMES.split())
LAST_NAMES: Final = tuple(_LAST_NAMES.split())
TOWNS: Final = tuple(_TOWNS.split())
TRADES: Final = tuple(_TRADES.split())
MAKERS: Final = tuple(_MAKERS.split())


def draw_names(rng: np.random.Generator, count: int) -> list[str]:
    """`count` distinct names of two words, such as 'quiet otter'."""
    pairs = rng.choice(len(ADJECTIVES) * len(NOUNS), count, replace=False).tolist()
    return [f"{ADJECTIVES[pair // len(NOUNS)]} {NOUNS[pair % len(NOUNS)]}" for pair in pairs]


def draw_numbers(rng: np.random.Generator, count: int, digits: int = 5) -> list[str]:
    """`count` distinct numbers of so many digits."""
    low = 10 ** (digits - 1)
    return [str(low + n) for n in rng.choice(9 * low, count, replace=False).tolist()]


def draw_codes(rng: np.random.Generator, count: int) -> list[str]:
    """`count` distinct codes in the form of a UUID."""
    parts = (8, 4, 4, 4, 12)
    letters = np.array(list("0123456789abcdef"))

    def code() -> str:
        return "-".join("".join(rng.choice(letters, size)) for size in parts)

    found: dict[str, None] = {}
    while len(found) < count:
        found.setdefault(code())
    return list(found)


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
