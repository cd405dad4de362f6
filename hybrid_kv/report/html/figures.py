"""The kinds of figures: each function says what a picture shows and how it is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.canvas import (
    SMALL,
    Canvas,
    Marker,
    Named,
    Picture,
    legend_height,
    line,
    text_width,
)
from hybrid_kv.report.html.page_entries import SeriesLook

LOG_RATIO = 8.0
"""An axis is logarithmic where the largest value is more than this many times the smallest."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The range of an axis, and the values that are named on it."""

    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]


def fitted(values: Iterable[float], *, log: bool | None = None, most: int = 6) -> Scale:
    """A scale on which all values lie with some air; linear ones begin at zero."""
    known = [value for value in values if value > 0] or [1.0]
    least, largest = min(known), max(known)
    if log or (log is None and largest / least > LOG_RATIO):
        low, high = least / 1.2, largest * 1.2
        return Scale(low, high, True, _decades(low, high, most))
    return linear(0.0, largest * 1.06, most)


def linear(low: float, high: float, most: int = 6) -> Scale:
    """A linear scale with round ticks."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(d * power for d in (1, 2, 2.5, 5, 10, 20) if d * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = (round(n * step, 12) if step > 1e-9 else n * step for n in range(first, last + 1))
    return Scale(low, high, False, tuple(ticks))


def _decades(low: float, high: float, most: int) -> tuple[float, ...]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            break
    return tuple(ticks[:: -(-len(ticks) // most) or 1])


def tick(value: float) -> str:
    """A value of an axis: as numbers have it, with an exponent where that would be long."""
    return numbers.tick(value) if value == 0 or 1e-4 <= abs(value) < 1e7 else f"{value:.3g}"


def _scaled(
    axes: Any, which: Literal["x", "y"], scale: Scale, show: Callable[[float], str]
) -> None:
    if scale.log:
        getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}lim")(scale.low, scale.high)
    getattr(axes, f"set_{which}ticks")(scale.ticks, [show(value) for value in scale.ticks])
    axes.minorticks_off()


def _sparse(places: Sequence[float], texts: Sequence[str], pixels: float) -> list[str]:
    """The texts of ticks, empty where one would touch the next; the last always stands."""
    shown, free = [""] * len(texts), math.inf
    for i in reversed(range(len(texts))):
        half, at = text_width(texts[i]) / 2, places[i] * pixels
        if at + half < free:
            shown[i], free = texts[i], at - half - 4
    return shown


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
    name: str,
    title: str,
    axis: str,
    series: Sequence[Series],
    width: float,
    show: Callable[[float], str],
) -> Picture:
    """A quantity by context: contexts on a logarithmic axis; values too, over a wide range."""
    entries = [
        Named(one.name, one.look.colour, one.look.shape, dash=one.look.dash) for one in series
    ]
    values = [v for one in series for s in one.samples for v in (s.value, s.low, s.high)]
    y_scale = fitted([value for value in values if value is not None])
    contexts = sorted({sample.context for one in series for sample in one.samples})
    top = legend_height(entries, width) + 26
    height = top + 250 + 44

    def draw(canvas: Canvas) -> None:
        left = max(text_width(tick(value)) for value in y_scale.ticks or (1,)) + 12
        axes = canvas.axes(left, top, 16, 44)
        _scaled(axes, "y", y_scale, tick)
        low, high = contexts[0] / 1.12, contexts[-1] * 1.12
        span = math.log(high / low)
        places = [math.log(context / low) / span for context in contexts]
        texts = [numbers.tokens(context) for context in contexts]
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.set_xticks(contexts, _sparse(places, texts, width - left - 16))
        axes.minorticks_off()
        axes.grid(False, axis="x")
        for one in series:
            look, points = one.look, [(s.context, s.value) for s in one.samples]
            if len(points) > 1:
                line(canvas, axes, points, (look.colour, 1.8, look.dash))
            for s in one.samples:
                if s.low is not None and s.high is not None:
                    ends = [(s.context, s.low), (s.context, s.high)]
                    line(canvas, axes, ends, (look.colour, 1.2, ()))
                marker = Marker(look.shape, look.colour, s.hollow)
                canvas.mark(axes, (s.context, s.value), marker, s.tip)
        kind = ", log scale" if y_scale.log else ""
        canvas.text(0, height - top + 12, f"{axis}{kind}")
        canvas.text(width - 16, 4, "context, tokens", ha="right")
        canvas.legend(entries)

    told = (
        f"{one.name}: "
        + ", ".join(f"{numbers.tokens(s.context)}: {show(s.value)}" for s in one.samples)
        for one in series
    )
    return Picture(name, title, f"{axis} by context. {'; '.join(told)}.", width, height, draw)


@dataclass(frozen=True, slots=True)
class BarPart:
    """A share of a bar."""

    name: str
    colour: str
    value: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of a stack; its total is the sum of its parts."""

    name: str
    parts: tuple[BarPart, ...]

    @property
    def total(self) -> float:
        return sum(part.value for part in self.parts)


_ROW = 42.0
"""Pixels of a row of bars or ranges, its name above it."""


def bars_figure(
    name: str,
    title: str,
    axis: str,
    bars: Sequence[Bar],
    width: float,
    show: Callable[[float], str],
) -> Picture:
    """Quantities that add up, as stacked bars from zero, totals at their ends."""
    drawn = {part.name for bar in bars for part in bar.parts if part.value > 0}
    legend = {part.name: part.colour for bar in bars for part in bar.parts if part.name in drawn}
    entries = [Named(name, colour) for name, colour in legend.items()]
    top = legend_height(entries, width) + 4
    height = top + _ROW * len(bars) + 46
    ends = max((text_width(show(bar.total)) for bar in bars), default=0.0) + 12
    scale = linear(0.0, max((bar.total for bar in bars), default=0.0) or 1.0, 5)

    def draw(canvas: Canvas) -> None:
        from matplotlib.patches import Rectangle

        axes = _rows_axes(canvas, [bar.name for bar in bars], top, ends, scale)
        for row, bar in enumerate(bars):
            x = 0.0
            for part in bar.parts:
                if part.value > 0:
                    box = Rectangle((x, row + 0.42), part.value, 0.46, linewidth=0)
                    box.set(facecolor=canvas.paint(part.colour), zorder=3)
                    share = numbers.percent(part.value / bar.total)
                    canvas.tipped(box, f"{bar.name} · {part.name}: {show(part.value)} ({share})")
                    axes.add_patch(box)
                    x += part.value
            place = {"xytext": (6, 0), "textcoords": "offset points", "annotation_clip": False}
            ink = {"color": canvas.paint("ink"), "fontsize": SMALL, "va": "center"}
            axes.annotate(show(bar.total), (x, row + 0.66), **place, **ink)
        canvas.text(width, 4, axis, ha="right")
        canvas.legend(entries)

    told = (
        f"{bar.name}: {show(bar.total)} of which "
        + ", ".join(f"{part.name} {show(part.value)}" for part in bar.parts if part.value > 0)
        for bar in bars
    )
    return Picture(name, title, f"Stacked bars. {'; '.join(told)}.", width, height, draw)


def _rows_axes(canvas: Canvas, names: Sequence[str], top: float, right: float, scale: Scale) -> Any:
    """Axes of rows downwards, a unit each, their names above them."""
    axes = canvas.axes(8, top, right, 42)
    axes.set_ylim(len(names), 0)
    axes.set_yticks([])
    span = scale.high - scale.low
    places = [
        math.log(t / scale.low) / math.log(scale.high / scale.low)
        if scale.log
        else (t - scale.low) / span
        for t in scale.ticks
    ]
    _scaled(axes, "x", scale, tick)
    pixels = canvas.width - 8 - right
    axes.set_xticks(scale.ticks, _sparse(places, [tick(t) for t in scale.ticks], pixels))
    for row, name in enumerate(names):
        y = canvas.height - top - (row + 0.3) * _ROW
        canvas.text(0, y, name, "ink", fontweight="bold")
    return axes


@dataclass(frozen=True, slots=True)
class RangePoint:
    """A mark of a row."""

    value: float
    marker: Marker
    tip: str


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
    scale: Scale,
    legend: Sequence[Named] = (),
    reference: float | None = None,
) -> Picture:
    """Rows of marks on one axis; `reference` is a line across all of them."""
    top = legend_height(legend, width) + 4
    height = top + _ROW * len(rows) + 46
    notes = max((text_width(row.note) for row in rows), default=0.0) + 12

    def draw(canvas: Canvas) -> None:
        axes = _rows_axes(canvas, [row.name for row in rows], top, notes, scale)
        if reference is not None:
            axes.axvline(reference, color=canvas.paint("soft"), linewidth=1.4, clip_on=False)
        for number, row in enumerate(rows):
            y = number + 0.66
            if row.span is not None:
                line(canvas, axes, [(end, y) for end in row.span], (row.span_colour, 3, ()))
            for point in row.points:
                canvas.mark(axes, (point.value, y), point.marker, point.tip, 8)
            at = canvas.height - top - y * _ROW
            canvas.text(width, at, row.note, "ink", ha="right", va="center")
        canvas.text(width, 4, axis, ha="right")
        if legend:
            canvas.legend(legend)

    tips = ("; ".join(point.tip for point in row.points) for row in rows)
    return Picture(name, title, f"{axis}. {'. '.join(tips)}.", width, height, draw)


@dataclass(frozen=True, slots=True)
class Spot:
    """A method's place, with half its 95% interval upwards; spots of a method are joined."""

    name: str
    look: SeriesLook
    x: float
    y: float
    tip: str
    half_width: float | None = None


def spots_figure(
    name: str,
    title: str,
    axes_names: tuple[str, str],
    spots: Sequence[Spot],
    width: float,
    *,
    scales: tuple[Scale, Scale],
    show: Callable[[float], str] = tick,
    reference: tuple[str, float] | None = None,
    best: Sequence[Spot] = (),
    named: Iterable[str] | None = None,
) -> Picture:
    """Quality against cost: up and left is better.

    reference: a cost without a quality, a line from top to bottom. best: what nobody beats, a thin
    line. named: methods with a colour and a place in the legend; all where it is None.
    """
    (x_scale, y_scale), methods = scales, dict.fromkeys(spot.name for spot in spots)
    shown = set(methods) if named is None else set(named)
    look = {spot.name: spot.look for spot in spots}
    entries = [Named(m, look[m].colour, look[m].shape) for m in methods if m in shown]
    if reference is not None:
        entries.append(Named(reference[0], "soft", "cross", dash=(3, 3)))
    top = legend_height(entries, width) + 26
    height = top + 250 + 44

    def draw(canvas: Canvas) -> None:
        left = max(text_width(show(value)) for value in y_scale.ticks or (0,)) + 12
        axes = canvas.axes(left, top, 14, 44)
        _scaled(axes, "y", y_scale, show)
        _scaled(axes, "x", x_scale, tick)
        if reference is not None:
            style = {"linewidth": 1.2, "linestyle": (0, (3, 3))}
            axes.axvline(reference[1], color=canvas.paint("soft"), clip_on=False, **style)
        if len(best) > 1:
            line(canvas, axes, [(spot.x, spot.y) for spot in best], ("soft", 1.0, (2, 3)))
        for method in sorted(methods, key=shown.__contains__):  # those in colour on top
            own = sorted((s for s in spots if s.name == method), key=lambda spot: spot.x)
            colour = look[method].colour if method in shown else "rule"
            if len(own) > 1:
                line(canvas, axes, [(spot.x, spot.y) for spot in own], (colour, 1.2, ()))
            for spot in own:
                if spot.half_width is not None:
                    ends = spot.y - spot.half_width, spot.y + spot.half_width
                    within = [min(max(end, y_scale.low), max(1.0, spot.y)) for end in ends]
                    line(canvas, axes, [(spot.x, end) for end in within], (colour, 1.4, ()))
                canvas.mark(axes, (spot.x, spot.y), Marker(spot.look.shape, colour), spot.tip, 8)
        canvas.text(0, height - top + 12, axes_names[1])
        kind = ", log scale" if x_scale.log else ""
        canvas.text(width - 14, 4, f"{axes_names[0]}{kind}", ha="right")
        canvas.legend(entries)

    told = "; ".join(spot.tip for spot in spots)
    description = f"{axes_names[1]} against {axes_names[0]}. {told}."
    return Picture(name, title, description, width, height, draw)
