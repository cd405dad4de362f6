"""Tables for terminals of any width: split by columns, never cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

_GAP = 2
"""Blanks between two columns."""

TextCell = str | Text
"""Text is shown as it is; brackets have no meaning."""


@dataclass(frozen=True, slots=True)
class Column:
    """A title and a cell for every row; numbers stand at the right."""

    title: str
    cells: Sequence[TextCell]
    left: bool = False

    @property
    def width(self) -> int:
        """Of the longest line."""
        texts = (self.title, *map(str, self.cells))
        return max((cell_len(line) for text in texts for line in text.splitlines()), default=0)


def print_columns(console: Console, keys: Sequence[Column], columns: Sequence[Column]) -> None:
    """Prints the columns in as many tables as the width takes, each with the keys at its left.

    A column that is wider than the console is printed whole all the same: the terminal folds it.
    """
    if not any(column.cells for column in (*keys, *columns)):
        return
    for number, part in enumerate(_parts(console.width, keys, columns)):
        if number:
            console.print()
        shown = [*keys, *part]
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        for column in shown:
            justify = "left" if column.left else "right"
            table.add_column(column.title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for cells in zip(*(column.cells for column in shown), strict=True):
            table.add_row(*cells)
        console.print(table, width=max(console.width, _width(shown)), crop=False)


def facts_table(*styles: str) -> Table:
    """Names at the left, in these styles and never broken; sentences that wrap at the right."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, _GAP, 0, 0))
    for style in styles:
        table.add_column(style=style, no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    return table


def _parts(width: int, keys: Sequence[Column], columns: Sequence[Column]) -> Iterator[list[Column]]:
    part: list[Column] = []
    for column in columns:
        if part and _width([*keys, *part, column]) > width:
            yield part
            part = []
        part.append(column)
    yield part


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width + _GAP for column in columns) - _GAP
