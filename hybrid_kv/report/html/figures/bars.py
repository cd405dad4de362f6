"""Quantities that add up, as stacked bars: one bar per row, parts in the legend's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.figures.frame import SMALL, Show, swatches, vertical_grid
from hybrid_kv.report.html.figures.scales import Scale
from hybrid_kv.report.html.scene import Box, Line, Scene, Text, text_width


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
    note: str = ""

    @property
    def total(self) -> float:
        return sum(part.value for part in self.parts)


def bars_figure(
    name: str, title: str, axis: str, bars: Sequence[Bar], width: float, show: Show
) -> Scene:
    """Bars from zero, totals at their ends; names beside them, or above where it is narrow."""
    scene = Scene(name, title, _describe(bars, show), width, 0)
    drawn = {part.name for bar in bars for part in bar.parts if part.value > 0}
    legend = {part.name: part.colour for bar in bars for part in bar.parts}
    entries = [(colour, name) for name, colour in legend.items() if name in drawn]
    top = swatches(scene, entries, 0, 2, width) + 8
    above = width < 600
    names = 0.0 if above else max((text_width(bar.name, bold=True) for bar in bars), default=0) + 14
    totals = [f"{show(bar.total)}{bar.note}" for bar in bars]
    ends = max((text_width(total) for total in totals), default=0) + 12
    step, thick = (44.0, 18.0) if above else (36.0, 22.0)
    bottom = top + step * len(bars)
    most = max((bar.total for bar in bars), default=0.0) or 1.0
    scale = Scale(0.0, most, names, width - ends)
    vertical_grid(scene, scale, top, bottom, numbers.tick)
    scene.add(Text(width, bottom + 34, axis, "soft", SMALL, "end"))
    for row, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        y = top + row * step + (20 if above else (step - thick) / 2)
        x = scale(0)
        for part in bar.parts:
            x = _part(scene, bar, part, x, y, thick, (scale.end - scale.start) / scale.high, show)
        scene.add(Text(x + 7, y + thick / 2 + 4, total, "ink", 12))
        if above:
            scene.add(Text(0, y - 5, bar.name, "ink", 12, bold=True))
        else:
            scene.add(Text(names - 12, y + thick / 2 + 4, bar.name, "ink", 12, "end", bold=True))
    scene.add(Line(((names, top), (names, bottom)), "rule"))
    scene.height = bottom + 42
    return scene


def _part(
    scene: Scene,
    bar: Bar,
    part: BarPart,
    x: float,
    y: float,
    thick: float,
    pixels: float,
    show: Show,
) -> float:
    wide = part.value * pixels
    if wide <= 0:
        return x
    share = numbers.percent(part.value / bar.total)
    gap = 1.0 if wide > 3 else 0.0
    tip = f"{bar.name} · {part.name}: {show(part.value)} ({share})"
    scene.add(Box(x, y, wide - gap, thick, part.colour, tip))
    return x + wide


def _describe(bars: Sequence[Bar], show: Show) -> str:
    rows = []
    for bar in bars:
        parts = ", ".join(f"{part.name} {show(part.value)}" for part in bar.parts if part.value > 0)
        rows.append(f"{bar.name}: {show(bar.total)} of which {parts}")
    return "Stacked bars. " + "; ".join(rows) + "."
