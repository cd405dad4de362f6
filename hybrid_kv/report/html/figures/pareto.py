"""Scores against bytes: one marker per method and budget, and the line that nobody is beyond."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.figures.frame import SMALL, horizontal_grid, vertical_grid
from hybrid_kv.report.html.figures.points import Rectangle, place
from hybrid_kv.report.html.figures.scales import Scale, fitted
from hybrid_kv.report.html.palette import SeriesLook
from hybrid_kv.report.html.scene import Dot, Line, Scene, Text, text_width

_MIB = 2**20
_MOST_NAMED = 12
"""With more methods than these only those that no other beats are named."""


@dataclass(frozen=True, slots=True)
class ParetoMark:
    """A method under a budget: bytes, above 0, and a score in [0, 1]."""

    method: str
    budget: str | None
    look: SeriesLook
    bytes: float
    score: float

    @property
    def tip(self) -> str:
        name = self.method if self.budget is None else f"{self.method} at {self.budget}"
        return f"{name}: {self.score:.3f}, {numbers.size(self.bytes)}"


def pareto_figure(
    name: str, title: str, axis: str, marks: Sequence[ParetoMark], width: float
) -> Scene:
    """Up and left is better; markers of a method are joined, the best of all by a thin line.

    Of many methods only those on that line have a name and a colour; a marker's tip names its own.
    """
    height = 380.0
    scene = Scene(name, title, _describe(axis, marks), width, height)
    left, right, top, bottom = 46.0, width - 12.0, 28.0, height - 42.0
    x_scale = fitted([mark.bytes / _MIB for mark in marks], left + 6, right - 6, log=True)
    y_scale = Scale(0.0, 1.03, bottom, top)
    horizontal_grid(scene, y_scale, left, right, numbers.tick)
    vertical_grid(scene, x_scale, top, bottom, numbers.tick, most=6)
    scene.add(
        Text(0, 14, "score", "soft", SMALL),
        Text(right, bottom + 36, f"{axis}, MiB, log scale", "soft", SMALL, "end"),
        Line(((left, bottom), (right, bottom)), "rule"),
    )
    at = {mark: (x_scale(mark.bytes / _MIB), y_scale(mark.score)) for mark in marks}
    best, methods = frontier(marks), dict.fromkeys(mark.method for mark in marks)
    if len(best) > 1:
        scene.add(Line(tuple(at[mark] for mark in best), "soft", 1.0, (2, 3)))
    named = {mark.method for mark in best} if len(methods) > _MOST_NAMED else set(methods)
    taken: list[Rectangle] = [(x - 6, y - 6, x + 6, y + 6) for x, y in at.values()]
    for method in sorted(methods, key=lambda method: method in named):  # those on top
        own = sorted((m for m in marks if m.method == method), key=lambda mark: mark.bytes)
        colour = own[0].look.colour if method in named else "rule"
        if len(own) > 1:
            scene.add(Line(tuple(at[mark] for mark in own), colour, 1.2))
        for mark in own:
            x, y = at[mark]
            scene.add(Dot(x, y, mark.look.shape, colour, 9, tip=mark.tip))
        if method not in named:
            continue
        x, y = at[max(own, key=lambda mark: mark.score)]
        room = (left, top - 8, right, bottom)
        box = place(text_width(method, SMALL, bold=True), x, y, taken, room)
        taken.append(box)
        scene.add(Text(box[0], box[3] - 4, method, colour, SMALL, bold=True))
    return scene


def frontier(marks: Sequence[ParetoMark]) -> list[ParetoMark]:
    """Those that no other beats in both, from the fewest bytes on."""
    found: list[ParetoMark] = []
    for mark in sorted(marks, key=lambda mark: (mark.bytes, -mark.score)):
        if not found or mark.score > found[-1].score:
            found.append(mark)
    return found


def _describe(axis: str, marks: Sequence[ParetoMark]) -> str:
    return f"Score against {axis}. " + "; ".join(mark.tip for mark in marks) + "."
