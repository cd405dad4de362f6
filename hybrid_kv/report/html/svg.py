"""A scene as SVG: inside a page, or as a file of its own."""

from __future__ import annotations

import re
from html import escape as _escape

from hybrid_kv.report.html.elements import Html
from hybrid_kv.report.html.palette import COLOURS
from hybrid_kv.report.html.scene import Box, Dot, Line, Mark, Point, Scene, Text, marker_points

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def to_inline(scene: Scene, ident: str) -> Html:
    """An <svg> for a page whose style sheet has the colours; `ident` is unique in the page."""
    box = f"0 0 {_n(scene.width)} {_n(scene.height)}"
    return Html(
        f'<svg viewBox="{box}" width="{_n(scene.width)}" height="{_n(scene.height)}" role="img" '
        f'aria-labelledby="{ident}-t {ident}-d">'
        f'<title id="{ident}-t">{escape(scene.title)}</title>'
        f'<desc id="{ident}-d">{escape(scene.description)}</desc>'
        f"{''.join(map(_draw, scene.marks))}</svg>"
    )


MARGIN = 12.0
"""Empty pixels around a figure in a file of its own."""


def to_file(scene: Scene) -> str:
    """A document in light colours, for papers."""
    wide, high = _n(scene.width + 2 * MARGIN), _n(scene.height + 2 * MARGIN)
    corner = _n(-MARGIN)
    style = "".join(
        f".f-{name}{{fill:{light}}}.k-{name}{{stroke:{light}}}"
        for name, (light, _) in COLOURS.items()
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        f'viewBox="{corner} {corner} {wide} {high}">'
        f"<title>{escape(scene.title)}</title><desc>{escape(scene.description)}</desc>"
        f"<style>text{{font-family:{FONT}}}{style}</style>"
        f'<rect x="{corner}" y="{corner}" width="{wide}" height="{high}" class="f-paper"/>'
        f"{''.join(map(_draw, scene.marks))}</svg>\n"
    )


def _draw(mark: Mark) -> str:
    match mark:
        case Line():
            dash = f' stroke-dasharray="{" ".join(map(_n, mark.dash))}"' if mark.dash else ""
            return (
                f'<path d="{_path(mark.points)}" fill="none" class="k-{mark.colour}" '
                f'stroke-width="{_n(mark.width)}" stroke-linejoin="round"{dash}/>'
            )
        case Box():
            shape = (
                f'x="{_n(mark.x)}" y="{_n(mark.y)}" width="{_n(mark.width)}" '
                f'height="{_n(mark.height)}" class="f-{mark.colour}"'
            )
            return f"<rect {shape}>{_tip(mark.tip)}</rect>" if mark.tip else f"<rect {shape}/>"
        case Dot():
            return _marker(mark)
        case Text():
            anchor = "" if mark.anchor == "start" else f' text-anchor="{mark.anchor}"'
            weight = ' font-weight="600"' if mark.bold else ""
            return (
                f'<text x="{_n(mark.x)}" y="{_n(mark.y)}" font-size="{_n(mark.size)}" '
                f'class="f-{mark.colour}"{anchor}{weight}>{escape(mark.text)}</text>'
            )


def _marker(dot: Dot) -> str:
    fill = "paper" if dot.hollow else dot.colour
    paint = f'class="f-{fill} k-{dot.colour}" stroke-width="1.6"'
    if dot.shape == "circle":
        shape = f'<circle cx="{_n(dot.x)}" cy="{_n(dot.y)}" r="{_n(dot.size / 2)}" {paint}/>'
    elif dot.shape == "cross":
        a, b, c, d = marker_points(dot)
        path = _path((a, b)) + _path((c, d))
        shape = f'<path d="{path}" class="k-{dot.colour}" stroke-width="2" fill="none"/>'
    else:
        shape = f'<path d="{_path(marker_points(dot))}Z" {paint} stroke-linejoin="round"/>'
    if not dot.tip:
        return shape
    reach = f'<circle cx="{_n(dot.x)}" cy="{_n(dot.y)}" r="11" fill="transparent"/>'
    return f"<g>{_tip(dot.tip)}{shape}{reach}</g>"


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _path(points: tuple[Point, ...]) -> str:
    (x, y), *rest = points
    return f"M{_n(x)} {_n(y)}" + "".join(f"L{_n(x)} {_n(y)}" for x, y in rest)


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


_NO_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


def escape(text: str) -> str:
    """Text for XML, which has no place for control characters, escaped or not."""
    return _escape(_NO_XML.sub("\N{REPLACEMENT CHARACTER}", text))
