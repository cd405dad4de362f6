"""Rows of marks on one horizontal axis: a limit beside what was measured, ratios with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybrid_kv.report.html.figures.frame import SMALL, Show, vertical_grid
from hybrid_kv.report.html.figures.scales import Scale
from hybrid_kv.report.html.scene import Dot, Line, Scene, Shape, Text, text_width


@dataclass(frozen=True, slots=True)
class RangePoint:
    """A mark of a row."""

    value: float
    shape: Shape
    colour: str
    tip: str
    hollow: bool = False


@dataclass(frozen=True, slots=True)
class RangeRow:
    """A named row; `span` is drawn as a bar from end to end under its points."""

    name: str
    points: tuple[RangePoint, ...]
    span: tuple[float, float] | None = None
    span_colour: str = "rule"
    note: str = ""


def ranges_figure(
    name: str,
    title: str,
    axis: str,
    rows: Sequence[RangeRow],
    width: float,
    *,
    scale: Callable[[float, float], Scale],
    show: Show,
    legend: Sequence[RangePoint] = (),
    reference: float | None = None,
) -> Scene:
    """`scale` makes the axis between two pixels; `reference` is a line across all rows."""
    scene = Scene(name, title, _describe(axis, rows), width, 0)
    top = _legend(scene, legend, width)
    above = width < 600
    left = 8.0 if above else max((text_width(row.name, bold=True) for row in rows), default=0) + 18
    notes = max((text_width(row.note) for row in rows), default=0)
    right = width - (notes + 14 if notes else 10)
    step = 38.0 if above else 28.0
    bottom = top + step * len(rows) + 4
    x_scale = scale(left + 8, right - 8)
    vertical_grid(scene, x_scale, top, bottom, show, most=6 if above else 8)
    if reference is not None:
        x = x_scale(reference)
        scene.add(Line(((x, top), (x, bottom)), "soft", 1.4))
    for index, row in enumerate(rows):
        y = top + index * step + (26 if above else 16)
        if above:
            scene.add(Text(0, y - 10, row.name, "ink", 12, bold=True))
        else:
            scene.add(Text(left - 12, y + 4, row.name, "ink", 12, "end", bold=True))
        if row.span is not None:
            ends = (x_scale(row.span[0]), y), (x_scale(row.span[1]), y)
            scene.add(Line(ends, row.span_colour, 3))
        for point in row.points:
            x = x_scale(point.value)
            scene.add(Dot(x, y, point.shape, point.colour, 10, point.hollow, point.tip))
        scene.add(Text(width, y + 4, row.note, "ink", 12, "end"))
    scene.add(Text(right, bottom + 34, axis, "soft", SMALL, "end"))
    scene.height = bottom + 42
    return scene


def _legend(scene: Scene, legend: Sequence[RangePoint], width: float) -> float:
    x, y = 6.0, 8.0
    for point in legend:
        wide = 12 + text_width(point.tip, SMALL) + 18
        if x > 6 and x + wide - 18 > width:
            x, y = 6.0, y + 18
        scene.add(Dot(x, y, point.shape, point.colour, 9, point.hollow))
        scene.add(Text(x + 11, y + 4, point.tip, "soft", SMALL))
        x += wide
    return y + 18 if legend else 4.0


def _describe(axis: str, rows: Sequence[RangeRow]) -> str:
    tips = ("; ".join(point.tip for point in row.points) for row in rows)
    return f"{axis}. " + ". ".join(tips) + "."
