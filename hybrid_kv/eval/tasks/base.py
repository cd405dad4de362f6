"""Base classes of tasks: contexts with questions, or a text to read on, drawn from a seed.

A task writes in plain English for real models, or in the language of the model `needle` where that
was trained for it. It knows no tokenizer: a `Room` counts tokens for it. Answers in words are
measured against known ones as the authors of the data sets do. What a task hides lies in text
that says nothing of it.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import cycle
from typing import Any, ClassVar, Final, Literal

import numpy as np
from pydantic import BaseModel

from hybrid_kv.config import Params, PluginConfig
from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.needle import Sample as NeedleSample
from hybrid_kv.registry import Registry

Measure = Callable[[str, tuple[str, ...]], float]
"""0 to 1, by the model's answer and the known answers."""


def f1(answer: str, known: tuple[str, ...]) -> float:
    """Overlap of words without articles and punctuation, with the nearest known answer."""
    return max((_overlap(_words(answer), _words(one)) for one in known), default=0.0)


def rouge_l(answer: str, known: tuple[str, ...]) -> float:
    """ROUGE-L: the longest common sequence of words, with the nearest known answer."""
    said = answer.lower().split()
    return max((_sequence(said, one.lower().split()) for one in known), default=0.0)


def numbers(answer: str, known: tuple[str, ...]) -> float:
    """Of the numbers in the answer, the share that is the known one."""
    found = re.findall(r"\d+", answer)
    right = {number for one in known for number in re.findall(r"\d+", one)}
    return sum(number in right for number in found) / len(found) if found else 0.0


def code(answer: str, known: tuple[str, ...]) -> float:
    """Likeness of the first line that is code."""
    lines = [line for line in answer.lstrip("\n").split("\n") if line.strip()]
    first = next((line for line in lines if not re.search("`|#|//", line)), "")
    return max((SequenceMatcher(None, first, one).ratio() for one in known), default=0.0)


def one_of(choices: Sequence[str]) -> Measure:
    """Whether the right one of some names is said; less where others are said as well."""

    def measure(answer: str, known: tuple[str, ...]) -> float:
        said = [name for name in choices if name in answer]
        # 'Number' is said in 'Number of something', which is no second choice.
        said = [name for name in said if name in known or not any(name in one for one in known)]
        return 1 / len(said) if any(name in known for name in said) else 0.0

    return measure


def letter(answer: str, known: tuple[str, ...]) -> float:
    """Whether the first capital letter that stands alone, or else the wording, is right."""
    found = re.search(r"\b[A-D]\b", answer)
    if found is not None:
        return float(found[0] in known)
    return float(any(len(one) > 1 and one.lower() in answer.lower() for one in known))


def first_line(measure: Measure) -> Measure:
    """Of an answer that may go on with the next example."""

    def first(answer: str, known: tuple[str, ...]) -> float:
        return measure(answer.lstrip("\n").split("\n")[0], known)

    return first


def _words(text: str) -> list[str]:
    plain = "".join(sign for sign in text.lower() if sign not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _overlap(said: Sequence[str], known: Sequence[str]) -> float:
    return _harmonic((Counter(said) & Counter(known)).total(), len(said), len(known))


def _sequence(said: Sequence[str], known: Sequence[str]) -> float:
    row = [0] * (len(known) + 1)
    for word in said:
        before, row = row, [0]
        for place, other in enumerate(known):
            row.append(before[place] + 1 if word == other else max(row[-1], before[place + 1]))
    return _harmonic(row[-1], len(said), len(known))


def _harmonic(common: int, said: int, known: int) -> float:
    return 2 * common / (said + known) if common else 0.0


Language = Literal["english", "needle"]


@dataclass(frozen=True, slots=True)
class TextQuestion:
    """A question about a text.

    lead: how the answer begins; the model is given it and goes on. answers: what a right answer
    contains, all of them, or any of them; case does not count. depth: where in the context the
    answer stands, 0 for its beginning and 1 for its end; None where it stands in many places.
    max_new_tokens: after so many the answer is over. measure: what scores an answer instead.
    """

    text: str
    lead: str
    answers: tuple[str, ...]
    any_of: bool = False
    depth: float | None = None
    max_new_tokens: int = 48
    measure: Measure | None = None

    def score(self, answer: str) -> float:
        """The share of the answers that the text contains, or whether it contains any."""
        if self.measure is not None:
            return self.measure(answer, self.answers)
        found = [known.lower() in answer.lower() for known in self.answers]
        return float(any(found)) if self.any_of else sum(found) / len(found)

    def is_settled(self, answer: str) -> bool:
        """Whether more of it would change no score: what was said stays said."""
        return self.measure is None and self.score(answer) == 1

    def at(self, depth: float) -> TextQuestion:
        """With this depth."""
        return replace(self, depth=depth)


@dataclass(frozen=True, slots=True)
class TextSample:
    """A context with what is said before it, and questions about it."""

    intro: str
    context: str
    questions: tuple[TextQuestion, ...]


@dataclass(frozen=True, slots=True)
class Room:
    """Size of what a task may write: about `tokens`, at most, as `count` counts those of a text."""

    tokens: int
    count: Callable[[str], int]

    def less(self, *texts: str) -> Room:
        """Room that is left beside these texts."""
        return Room(self.tokens - sum(map(self.count, texts)), self.count)


class Task:
    """One kind of question; one object makes all of its samples.

    reads: it asks nothing, but lets the model read on (see `hybrid_kv.eval.tasks.documents`).
    recorded: it asks what stands in a file of the user's (`hybrid_kv.eval.tasks.data_sets`).
    """

    Params: ClassVar[type[BaseModel]] = Params
    reads: ClassVar[bool] = False
    recorded: ClassVar[bool] = False

    def __init__(self, params: Any) -> None:
        self.params = params

    @property
    def num_contexts(self) -> int | None:
        """Number of different samples; None for as many as one likes.

        Raises:
            ConfigError: they stand in a file that cannot be used.
        """
        return None

    def english(self, room: Room, rng: np.random.Generator, depth: float) -> TextSample:
        """A context in plain English that fills the room.

        Args:
            depth: where in the context the one that is asked for should stand, in tasks of one;
                samples have depths at equal distances between 0 and 1.

        Raises:
            ConfigError: the room is too small, or the task is not written in English.
        """
        raise ConfigError(
            f"task '{self._name}' is written in the language of the model 'needle' only; choose "
            "another task, or evaluate needle"
        )

    def needle(self, context_tokens: int, seed: int) -> NeedleSample:
        """A context of exactly so many tokens in the needle language.

        Raises:
            ConfigError: it is too short, or the model was not trained for the task.
        """
        raise ConfigError(
            f"task '{self._name}' is written in English, which the model 'needle' does not speak; "
            "choose another task, or a model of natural language"
        )

    def speaks(self, language: Language) -> bool:
        """Whether the task is written in a language."""
        own = type(self)
        return (own.english if language == "english" else own.needle) is not (
            Task.english if language == "english" else Task.needle
        )

    @property
    def _name(self) -> str:
        return next((name for name in TASKS if TASKS[name].factory is type(self)), "?")


TASKS: Registry[Task] = Registry("task", provider=__package__)


class TaskConfig(PluginConfig):
    """A task's name with that task's parameters."""

    registry: ClassVar[Registry[Any]] = TASKS
    name_field: ClassVar[str] = "task"

    task: str

    def __init__(self, **data: Any) -> None:  # spelled out for type checkers: keys vary by task
        super().__init__(**data)


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
