"""A figure as a list of plain marks, which an SVG or a PNG can be made of.

Coordinates are pixels at natural size, y downwards. Colours are names of `palette`, so that a page
can give them two values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Anchor = Literal["start", "middle", "end"]
Shape = Literal["circle", "square", "diamond", "up", "down", "cross"]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """Straight from point to point."""

    points: tuple[Point, ...]
    colour: str
    width: float = 1.0
    dash: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle; `tip` is shown under the pointer."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Dot:
    """A marker around (x, y); `size` is its diameter."""

    x: float
    y: float
    shape: Shape
    colour: str
    size: float = 9.0
    hollow: bool = False
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text on its baseline; `size` in pixels."""

    x: float
    y: float
    text: str
    colour: str = "ink"
    size: float = 12.0
    anchor: Anchor = "start"
    bold: bool = False


Mark = Line | Box | Dot | Text


@dataclass(slots=True)
class Scene:
    """A figure: a name for its file, a title, and what it shows for those who cannot see it."""

    name: str
    title: str
    description: str
    width: float
    height: float
    marks: list[Mark] = field(default_factory=list)

    def add(self, *marks: Mark) -> None:
        """Draws marks above those that are there."""
        self.marks.extend(marks)


def marker_points(dot: Dot) -> tuple[Point, ...]:
    """The corners of a marker that is no circle; a cross is two lines between its corners."""
    r = dot.size / 2
    corners: dict[str, tuple[Point, ...]] = {
        "square": ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),
        "diamond": ((0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)),
        "up": ((0, -1.1), (1.1, 0.9), (-1.1, 0.9)),
        "down": ((0, 1.1), (1.1, -0.9), (-1.1, -0.9)),
        "cross": ((-0.9, -0.9), (0.9, 0.9), (0.9, -0.9), (-0.9, 0.9)),
    }
    return tuple((dot.x + r * x, dot.y + r * y) for x, y in corners[dot.shape])


_EMS = {
    0.3: "iljI.,:;|!'",
    0.42: "ftrJ()[] -/",
    0.85: "mwW",
    0.95: "M%@",
}
_EM = {letter: ems for ems, letters in _EMS.items() for letter in letters}


def text_width(text: str, size: float = 12.0, *, bold: bool = False) -> float:
    """Roughly how many pixels a text takes; on the long side, for the widest of the usual fonts."""
    ems = sum(_EM.get(letter, 0.7 if letter.isupper() else 0.62) for letter in text)
    return size * ems * (1.12 if bold else 1.0)
