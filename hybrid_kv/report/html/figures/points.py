"""Quality against time: one point per method with its confidence bar, named beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.figures.frame import SMALL, horizontal_grid, vertical_grid
from hybrid_kv.report.html.figures.scales import Scale, fitted
from hybrid_kv.report.html.palette import SeriesLook
from hybrid_kv.report.html.scene import Dot, Line, Scene, Text, text_width

Rectangle = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Spot:
    """A method's time per token in ms and a share in [0, 1], with half its 95% interval."""

    name: str
    look: SeriesLook
    tpot_ms: float
    share: float
    half_width: float | None
    tip: str


def points_figure(
    name: str,
    title: str,
    axis: str,
    spots: Sequence[Spot],
    width: float,
    reference_ms: tuple[str, float] | None = None,
) -> Scene:
    """Up and left is better; `reference_ms` is a time that has no share, drawn as a line."""
    height = 320.0
    scene = Scene(name, title, _describe(axis, spots), width, height)
    left, right, top, bottom = 52.0, width - 12.0, 28.0, height - 42.0
    times = [spot.tpot_ms for spot in spots] + ([reference_ms[1]] if reference_ms else [])
    x_scale = fitted(times, left + 6, right - 6, log=max(times) > 3 * min(times))
    lows = [spot.share - (spot.half_width or 0.0) for spot in spots]
    low = max(0.0, min(lows, default=0.0))
    floor = max(0.0, 1 - fitted([max(0.01, 1 - low)], 0, 1).high)
    y_scale = Scale(floor, 1.0 + 0.04 * (1 - floor), bottom, top)
    horizontal_grid(scene, y_scale, left, right, _share)
    vertical_grid(scene, x_scale, top, bottom, numbers.tick, most=6)
    scene.add(
        Text(0, 14, axis, "soft", SMALL),
        Text(right, bottom + 36, _time_axis(x_scale), "soft", SMALL, "end"),
        Line(((left, bottom), (right, bottom)), "rule"),
    )
    taken: list[Rectangle] = []
    if reference_ms is not None:
        taken.append(_reference(scene, reference_ms, x_scale, top, bottom))
    for spot in spots:
        x, y, half = x_scale(spot.tpot_ms), y_scale(spot.share), spot.half_width
        taken.append((x - 7, y - 7, x + 7, y + 7))
        if half is not None:
            ends = y_scale(min(1.0, spot.share + half)), y_scale(max(0.0, spot.share - half))
            _whisker(scene, x, ends, spot.look.colour)
            taken.append((x - 3, ends[0], x + 3, ends[1]))
    for spot in spots:
        x, y = x_scale(spot.tpot_ms), y_scale(spot.share)
        scene.add(Dot(x, y, spot.look.shape, spot.look.colour, 10, tip=spot.tip))
        box = place(text_width(spot.name, bold=True), x, y, taken, (left, top - 8, right, bottom))
        taken.append(box)
        scene.add(Text(box[0], box[3] - 4, spot.name, spot.look.colour, 12, bold=True))
    return scene


def place(
    wide: float, x: float, y: float, taken: Sequence[Rectangle], room: Rectangle
) -> Rectangle:
    """A box for a label near (x, y) that covers as little as possible of what is taken."""
    spots = [(10.0, -8.0), (-10.0 - wide, -8.0), (-wide / 2, -26.0), (-wide / 2, 10.0)]
    spots += [(8.0, dy) for dy in (-22.0, 8.0, -36.0, 22.0)]
    spots += [(-8.0 - wide, dy) for dy in (-22.0, 8.0, -36.0, 22.0)]
    boxes = [(x + dx, y + dy, x + dx + wide, y + dy + 16) for dx, dy in spots]

    def cost(box: Rectangle) -> float:
        outside = max(0.0, room[0] - box[0], box[2] - room[2], room[1] - box[1], box[3] - room[3])
        return 1e3 * outside + sum(_overlap(box, other) for other in taken)

    return min(boxes, key=cost)


def _overlap(a: Rectangle, b: Rectangle) -> float:
    wide = min(a[2], b[2]) - max(a[0], b[0])
    high = min(a[3], b[3]) - max(a[1], b[1])
    return max(0.0, wide) * max(0.0, high)


def _whisker(scene: Scene, x: float, ends: tuple[float, float], colour: str) -> None:
    scene.add(Line(((x, ends[0]), (x, ends[1])), colour, 1.4))
    scene.add(*(Line(((x - 4, y), (x + 4, y)), colour, 1.4) for y in ends))


def _reference(
    scene: Scene, reference: tuple[str, float], scale: Scale, top: float, bottom: float
) -> Rectangle:
    name, value = reference
    x, wide = scale(value), text_width(name, SMALL)
    at = x - 5 if x - wide > scale.start else x + 5 + wide
    scene.add(
        Line(((x, top), (x, bottom)), "soft", 1.2, (3, 3)),
        Text(at, bottom - 7, name, "soft", SMALL, "end"),
    )
    return (at - wide, bottom - 20, at, bottom - 3)


def _time_axis(scale: Scale) -> str:
    return f"time per token, ms{', log scale' if scale.log else ''}"


def _share(value: float) -> str:
    return f"{100 * value:.4g}%"


def _describe(axis: str, spots: Sequence[Spot]) -> str:
    return f"{axis} against time per token. " + "; ".join(spot.tip for spot in spots) + "."
