"""Scores by where the answer stands and by length: a small map for each method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_kv.report.evaluation import DepthScore
from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.figures.frame import SMALL
from hybrid_kv.report.html.scene import Box, Scene, Text, text_width

_ROW, _MAP = 15.0, 156.0
"""Height of a row, and width of a map with its margins, in pixels; wider where names are."""
_STEPS = 9


@dataclass(frozen=True, slots=True)
class DepthMap:
    """A method's scores by context."""

    name: str
    columns: tuple[tuple[int, tuple[DepthScore, ...]], ...]


def depths_figure(name: str, title: str, maps: Sequence[DepthMap], width: float) -> Scene:
    """The beginning of the context above, its end below; the darker, the more is right."""
    scene = Scene(name, title, _describe(maps), width, 0)
    _legend(scene)
    parts = sorted({score.low for one in maps for _, scores in one.columns for score in scores})
    names = max((text_width(one.name, SMALL, bold=True) for one in maps), default=0)
    each = min(max(_MAP, names + 14), max(width, _MAP))
    across = max(1, int(width // each))
    high = 46 + _ROW * len(parts)
    for number, one in enumerate(maps):
        left, top = each * (number % across), 34 + high * (number // across)
        scene.add(Text(left, top + 10, one.name, "ink", SMALL, bold=True))
        wide = (each - 14) / len(one.columns)
        for column, (context, scores) in enumerate(one.columns):
            x = left + column * wide
            for score in scores:
                y = top + 16 + _ROW * parts.index(score.low)
                colour = f"h{round((_STEPS - 1) * score.score)}"
                scene.add(Box(x, y, wide - 1, _ROW - 1, colour, _tip(one.name, context, score)))
            text = numbers.tokens(context)
            y = top + 28 + _ROW * len(parts)
            scene.add(Text(x + wide / 2, y, text, "soft", SMALL, "middle"))
    scene.height = 34 + high * -(-len(maps) // across)
    return scene


def _legend(scene: Scene) -> None:
    scene.add(Text(0, 12, "0", "soft", SMALL))
    for step in range(_STEPS):
        scene.add(Box(12 + 16 * step, 2, 15, 12, f"h{step}"))
    scene.add(Text(16 + 16 * _STEPS, 12, "1", "soft", SMALL))


def _tip(name: str, context: int, score: DepthScore) -> str:
    place = f"{100 * score.low:.0f} to {100 * score.high:.0f}% of {numbers.tokens(context)}"
    return f"{name}, {place}: {score.score:.2f} of {score.questions} questions"


def _describe(maps: Sequence[DepthMap]) -> str:
    parts = [
        _tip(one.name, context, score)
        for one in maps
        for context, scores in one.columns
        for score in scores
    ]
    return "Score by depth and length. " + "; ".join(parts) + "."
