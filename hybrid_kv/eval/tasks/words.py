"""Words that English tasks are made of."""

from __future__ import annotations

from typing import Final

import numpy as np

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
