"""Parts of a page: figures in two widths, tables in boxes that scroll, tabs that need no script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hybrid_kv.report.html.elements import Child, Html, el, join
from hybrid_kv.report.html.scene import Scene
from hybrid_kv.report.html.svg import to_inline

WIDE, HALF, NARROW = 840.0, 410.0, 350.0
"""Widths in pixels: of a page, of two figures side by side, and of a page on a small screen."""

Draw = Callable[[float], Scene]


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of a page; `ident` is its anchor."""

    ident: str
    title: str
    body: Html


def figure(draw: Draw, ident: str, caption: Child = None, wide: float = WIDE) -> Html:
    """A figure, drawn once for wide and once for narrow screens where these differ."""
    scene = draw(wide)
    title = el("figcaption", el("b", scene.title), el("span", caption) if caption else None)
    if wide == NARROW:
        return el("figure", title, to_inline(scene, ident))
    return el(
        "figure",
        title,
        el("div", to_inline(scene, f"{ident}-w"), class_="wide"),
        el("div", to_inline(draw(NARROW), f"{ident}-n"), class_="narrow"),
    )


@dataclass(frozen=True, slots=True)
class StyledCell:
    """A cell with a class."""

    content: Child
    class_: str | None = None


def table(
    title: str,
    head: Sequence[str | StyledCell],
    rows: Iterable[Sequence[Child | StyledCell]],
    *,
    words: bool = False,
) -> Html:
    """A table whose first column names its rows; numbers to the right, or `words` to the left."""
    body = (
        el("tr", el("th", _content(first), scope="row"), *map(_data, rest)) for first, *rest in rows
    )
    return el(
        "div",
        el(
            "table",
            el("caption", title),
            el("thead", el("tr", *map(_heading, head))),
            el("tbody", *body),
            class_="words" if words else None,
        ),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=title,
    )


def _heading(cell: str | StyledCell) -> Html:
    return el("th", _content(cell), class_=_class(cell), scope="col")


def _data(cell: Child | StyledCell) -> Html:
    return el("td", _content(cell), class_=_class(cell))


def _class(cell: Child | StyledCell) -> str | None:
    return cell.class_ if isinstance(cell, StyledCell) else None


def _content(cell: Child | StyledCell) -> Child:
    return cell.content if isinstance(cell, StyledCell) else cell


def tabs(
    ident: str,
    legend: str,
    panels: Sequence[tuple[str, Html]],
    *,
    chosen: int | None = None,
    short: Sequence[str] | None = None,
    picker: Callable[[Sequence[Html]], Html] | None = None,
) -> Html:
    """One of several panels at a time, by radio buttons and CSS alone; the last one unless chosen.

    short: what stands on the buttons where their names would be said twice. picker: arranges the
    buttons; they stand in a row without it. On paper all panels are shown.
    """
    if len(panels) == 1:
        return el("div", el("h3", f"{legend} {panels[0][0]}"), panels[0][1])
    at = len(panels) - 1 if chosen is None else chosen
    names = [label for label, _ in panels]
    faces = enumerate(zip(names, short or names, strict=True))
    buttons = [_button(ident, i, name, face, i == at) for i, (name, face) in faces]
    bar = join(*buttons) if picker is None else picker(buttons)
    shown = (
        el("div", el("h3", f"{legend} {label}", class_="printed"), body, class_=f"panel p{i}")
        for i, (label, body) in enumerate(panels)
    )
    return el(
        "div",
        el("fieldset", el("legend", legend), bar, class_="bar"),
        *shown,
        class_="tabs",
    )


def _button(ident: str, number: int, name: str, face: str, checked: bool) -> Html:
    radio = el(
        "input",
        type="radio",
        name=ident,
        class_=f"t{number}",
        checked="checked" if checked else None,
        aria_label=name,
    )
    return el("label", radio, el("span", face), class_="tab")


def tab_rules(most: int) -> str:
    """CSS that shows the chosen one of up to `most` panels."""
    return "".join(f".tabs:has(.t{i}:checked)>.p{i}{{display:block}}" for i in range(most))


def facts(pairs: Mapping[str, Child]) -> Html:
    """Names and values in a grid; None values are left out."""
    return el(
        "dl",
        *(
            el("div", el("dt", name), el("dd", value))
            for name, value in pairs.items()
            if value is not None
        ),
        class_="facts",
    )


def disclosure(summary: Child, *body: Child, ident: str | None = None) -> Html:
    """What opens on a click, and by itself where a link leads to `ident`."""
    return el("details", el("summary", summary), el("div", *body, id=ident))


def note(*children: Child) -> Html:
    """A paragraph in small print."""
    return el("p", *children, class_="note")


def lines(values: Iterable[Child]) -> Html:
    """Values one above the other."""
    return join(*(el("div", value) for value in values))
