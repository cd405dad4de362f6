"""A quantity by context length, one line per method, named at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.figures.frame import SMALL, Show, horizontal_grid, spread
from hybrid_kv.report.html.figures.scales import Scale, fitted
from hybrid_kv.report.html.palette import SeriesLook
from hybrid_kv.report.html.scene import Dot, Line, Scene, Text, text_width


@dataclass(frozen=True, slots=True)
class LinePoint:
    """A value at a context; low and high are whiskers; hollow: the measurement was cut short."""

    context: int
    value: float
    tip: str
    low: float | None = None
    high: float | None = None
    hollow: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """A method's samples in the order of their contexts."""

    name: str
    look: SeriesLook
    samples: tuple[LinePoint, ...]


def lines_figure(
    name: str, title: str, axis: str, series: Sequence[Series], width: float, show: Show
) -> Scene:
    """Contexts on a logarithmic axis; values too, where they span a wide range."""
    scene = Scene(name, title, _describe(axis, series, show), width, 0)
    values = [value for one in series for s in one.samples for value in (s.value, s.low, s.high)]
    names = max((text_width(one.name, bold=True) for one in series), default=0) + 20
    beside = names < 0.3 * width
    legend = 0.0 if beside else _legend(scene, series, width)
    top = legend + 28.0
    bottom = top + (310.0 if width > 600 else 260.0)
    left, right = 54.0, width - (names if beside else 14)
    y_scale = fitted([value for value in values if value is not None], bottom, top)
    contexts = sorted({sample.context for one in series for sample in one.samples})
    low, high = contexts[0], contexts[-1]
    inset = 14 if high > low else (right - left) / 2
    x_scale = Scale(low, high if high > low else low + 1, left + inset, right - inset, log=True)
    kind = ", log scale" if y_scale.log else ""
    scene.add(Text(0, legend + 14, f"{axis}{kind}", "soft", SMALL))
    horizontal_grid(scene, y_scale, left, right, numbers.tick)
    _context_axis(scene, x_scale, contexts, bottom, left, right)
    for one in series:
        _draw(scene, one, x_scale, y_scale)
    if beside:
        _name(scene, series, x_scale, y_scale, right, top, bottom)
    scene.height = bottom + 42
    return scene


def _legend(scene: Scene, series: Sequence[Series], width: float) -> float:
    """Lines and their names, for figures without room beside them; returns where it ends."""
    x, y = 0.0, 12.0
    for one in series:
        wide = 34 + text_width(one.name, bold=True)
        if x and x + wide > width:
            x, y = 0.0, y + 19
        scene.add(
            Line(((x, y - 4), (x + 28, y - 4)), one.look.colour, 2, one.look.dash),
            Dot(x + 14, y - 4, one.look.shape, one.look.colour, 8),
            Text(x + 34, y, one.name, one.look.colour, 12, bold=True),
        )
        x += wide + 16
    return y + 10


def _context_axis(
    scene: Scene, scale: Scale, contexts: list[int], bottom: float, left: float, right: float
) -> None:
    free = 1e9  # from the right: the longest context is always named
    for context in reversed(contexts):
        x, text = scale(context), numbers.tokens(context)
        half = text_width(text, SMALL) / 2
        scene.add(Line(((x, bottom), (x, bottom + 5)), "rule"))
        if x + half < free:
            scene.add(Text(x, bottom + 19, text, "soft", SMALL, "middle"))
            free = x - half - 5
    scene.add(Line(((left, bottom), (right, bottom)), "rule"))
    scene.add(Text((left + right) / 2, bottom + 37, "context, tokens", "soft", SMALL, "middle"))


def _draw(scene: Scene, series: Series, x_scale: Scale, y_scale: Scale) -> None:
    look = series.look
    points = tuple((x_scale(s.context), y_scale(s.value)) for s in series.samples)
    if len(points) > 1:
        scene.add(Line(points, look.colour, 2, look.dash))
    for sample, (x, y) in zip(series.samples, points, strict=True):
        if sample.low is not None and sample.high is not None:
            ends = ((x, y_scale(sample.low)), (x, y_scale(sample.high)))
            scene.add(Line(ends, look.colour, 1.2))
        scene.add(Dot(x, y, look.shape, look.colour, 8, sample.hollow, sample.tip))


def _name(
    scene: Scene,
    series: Sequence[Series],
    x_scale: Scale,
    y_scale: Scale,
    right: float,
    top: float,
    bottom: float,
) -> None:
    """Names in a column behind the last context; of lines that end before it, above their end."""
    ends: dict[float, list[Series]] = {}
    for one in series:
        if one.samples:
            ends.setdefault(x_scale(one.samples[-1].context), []).append(one)
    for x, drawn in ends.items():
        heights = [y_scale(one.samples[-1].value) for one in drawn]
        for one, y, place in zip(drawn, heights, spread(heights, 16, top + 4, bottom), strict=True):
            colour = one.look.colour
            if x < max(ends):
                scene.add(Text(x, place - 9, one.name, colour, 12, "middle", bold=True))
                continue
            leader = ((x + 8, y), (right + 4, place), (right + 12, place))
            scene.add(
                Line(leader, colour, 0.8),
                Text(right + 16, place + 4, one.name, colour, 12, bold=True),
            )


def _describe(axis: str, series: Sequence[Series], show: Show) -> str:
    parts = []
    for one in series:
        values = ", ".join(f"{numbers.tokens(s.context)}: {show(s.value)}" for s in one.samples)
        parts.append(f"{one.name}: {values}")
    return f"{axis} by context. " + "; ".join(parts) + "."
