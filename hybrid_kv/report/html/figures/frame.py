"""What figures share: axes with a thin grid, swatches, and labels that keep apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hybrid_kv.report.html.figures.scales import Scale
from hybrid_kv.report.html.scene import Box, Line, Scene, Text, text_width

SMALL = 11.0
"""Size of ticks and notes, in pixels."""

Show = Callable[[float], str]


def horizontal_grid(scene: Scene, scale: Scale, left: float, right: float, show: Show) -> None:
    """Grid lines of a vertical axis, with their values left of them."""
    for tick in scale.ticks():
        y = scale(tick)
        scene.add(
            Line(((left, y), (right, y)), "grid"),
            Text(left - 8, y + 4, show(tick), "soft", SMALL, "end"),
        )


def vertical_grid(
    scene: Scene, scale: Scale, top: float, bottom: float, show: Show, most: int = 7
) -> None:
    """Grid lines of a horizontal axis; of the values below, those that would touch are left out."""
    free = -1e9
    for tick in scale.ticks(most):
        x, half = scale(tick), text_width(show(tick), SMALL) / 2
        scene.add(Line(((x, top), (x, bottom)), "grid"))
        if x - half > free:
            scene.add(Text(max(x, half), bottom + 16, show(tick), "soft", SMALL, "middle"))
            free = x + half + 6


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones, in their order, `gap` apart, inside where there is room."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [wanted[i] for i in order]
    for i, place in enumerate(places):
        places[i] = max(place, low if i == 0 else places[i - 1] + gap)
    for i in reversed(range(len(places))):
        ceiling = high if i == len(places) - 1 else places[i + 1] - gap
        places[i] = min(places[i], ceiling)
    result = [0.0] * len(wanted)
    for place, i in zip(places, order, strict=True):
        result[i] = place
    return result


def swatches(
    scene: Scene, entries: Iterable[tuple[str, str]], left: float, top: float, right: float
) -> float:
    """A legend of colour and name, wrapped into lines; returns where it ends."""
    x, y = left, top
    for colour, name in entries:
        wide = 15 + text_width(name, SMALL) + 14
        if x > left and x + wide - 14 > right:
            x, y = left, y + 18
        scene.add(Box(x, y, 10, 10, colour), Text(x + 15, y + 9, name, "soft", SMALL))
        x += wide
    return y + 18
