"""Blocks of a page as data; the templates make markup of them, and escape all text.

Every block has a `block`, the name of the macro that draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, ClassVar, Literal

from hybrid_kv.report.html.canvas import COLOURS, Picture, to_inline

if TYPE_CHECKING:
    from jinja2 import Environment

WIDTH = 380.0
"""Pixels of a figure on a page: a small screen holds one, a large one two or three abreast."""


@dataclass(frozen=True, slots=True)
class Strong:
    """Bold text inside of words."""

    text: str


@dataclass(frozen=True, slots=True)
class Words:
    """A paragraph; loud: what must be read first."""

    parts: tuple[str | Strong, ...]
    kind: Literal["", "lead", "note", "loud", "code"] = ""
    block: ClassVar = "words"

    @property
    def text(self) -> str:
        """The words without markup."""
        return "".join(part.text if isinstance(part, Strong) else part for part in self.parts)


def note(*parts: str) -> Words:
    """Small print."""
    return Words(parts, "note")


def loud(title: str, text: str) -> Words:
    """A warning."""
    return Words((Strong(title), f" {text}"), "loud")


@dataclass(frozen=True, slots=True)
class StyledCell:
    """A cell: its text, small print under it, and what sets it apart.

    kind: a class of the style sheet. tip: what the pointer shows.
    """

    text: str
    small: str = ""
    kind: str = ""
    href: str = ""
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first column names its rows; numbers to the right, or `words` to the left.

    heat: a map of coloured cells, as wide as its place.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str | StyledCell]]
    words: bool = False
    heat: bool = False
    block: ClassVar = "table"

    @property
    def layout(self) -> str:
        """Layout by the room it takes: wide tables become a block a row on a narrow page."""
        if self.heat:
            names = (row[0] if isinstance(row[0], str) else row[0].text for row in self.rows)
            return "heat named" if any(len(name) > 4 for name in names) else "heat"
        count = len(self.head)
        size = "small" if count <= 3 else "wide" if count > 8 else "middle"
        return f"{size} words" if self.words else size


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture with a caption; `ident` is unique in the page."""

    picture: Picture
    ident: str
    caption: str = ""
    block: ClassVar = "figure"

    @property
    def svg(self) -> str:
        """The drawing; its text is escaped."""
        return to_inline(self.picture, self.ident)


@dataclass(frozen=True, slots=True)
class Abreast:
    """Blocks side by side where there is room, one below the other where there is none."""

    blocks: Sequence[PageBlock]
    block: ClassVar = "row"


@dataclass(frozen=True, slots=True)
class FactList:
    """Names and values in a grid; None values are left out."""

    pairs: Mapping[str, str | None]
    block: ClassVar = "facts"


@dataclass(frozen=True, slots=True)
class Details:
    """Block that opens on a click, and by itself where a link leads to `ident`."""

    summary: str
    blocks: Sequence[PageBlock]
    ident: str = ""
    block: ClassVar = "details"


@dataclass(frozen=True, slots=True)
class Pre:
    """Text as it was written."""

    text: str
    block: ClassVar = "pre"


@dataclass(frozen=True, slots=True)
class Panel:
    """One of several; `short` stands on its button, in the line of its `group`."""

    name: str
    blocks: Sequence[PageBlock]
    short: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class Tabs:
    """One of several panels at a time, by radio buttons and CSS alone; on paper all are shown.

    chosen: what is shown first, the last one where it is None.
    """

    ident: str
    legend: str
    panels: Sequence[Panel]
    chosen: int | None = None
    block: ClassVar = "tabs"

    @property
    def first(self) -> int:
        """The number of the panel that is shown first."""
        return len(self.panels) - 1 if self.chosen is None else self.chosen

    @property
    def groups(self) -> dict[str, list[int]]:
        """Numbers of the panels by group."""
        found: dict[str, list[int]] = {}
        for number, panel in enumerate(self.panels):
            found.setdefault(panel.group, []).append(number)
        return found


PageBlock = Words | Table | Figure | Abreast | FactList | Details | Pre | Tabs


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of a page; `ident` is its anchor."""

    ident: str
    title: str
    blocks: Sequence[PageBlock]


@dataclass(frozen=True, slots=True)
class PagePart:
    """A document's or a comparison's place in the page, under its name in the contents.

    title, kind, file: its heading, empty where the page's own says it.
    """

    name: str
    top: Sequence[PageBlock]
    sections: Sequence[Section]
    title: str = ""
    kind: str = ""
    file: str = ""


def shell(title: str, kicker: str, heading: str, parts: Sequence[PagePart]) -> str:
    """A whole page: one file that needs no network, no fonts and no images."""
    return (
        _templates()
        .get_template("page.html")
        .render(
            title=title,
            kicker=kicker,
            heading=heading,
            parts=parts,
            style=_style(parts),
            script=_asset("page.js"),
        )
    )


def _style(parts: Sequence[PagePart]) -> str:
    most = max((len(tabs.panels) for tabs in _tabs(parts)), default=0)
    shown = "".join(f".tabs:has(.t{i}:checked)>.p{i}{{display:block}}" for i in range(most))
    light, dark = (
        "".join(f"--{name}:{pair[theme]};" for name, pair in COLOURS.items()) for theme in (0, 1)
    )
    return (
        f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}"
        f"@media print{{:root{{{light}}}}}{_asset('page.css')}{shown}"
    )


def _tabs(parts: Sequence[PagePart]) -> Iterator[Tabs]:
    for part in parts:
        for section in part.sections:
            yield from _within(section.blocks)


def _within(blocks: Sequence[PageBlock]) -> Iterator[Tabs]:
    for block in blocks:
        if isinstance(block, Tabs):
            yield block
            for panel in block.panels:
                yield from _within(panel.blocks)
        elif isinstance(block, Abreast | Details):
            yield from _within(block.blocks)


def _asset(name: str) -> str:
    return (files("hybrid_kv.report.html") / "templates" / name).read_text(encoding="utf-8")


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    found = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.tests["words"] = lambda value: isinstance(value, str)
    return found
