"""Numbers and tables for people, progress bars, notes on stderr."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybrid_kv.cli.options import OutputOptions

if TYPE_CHECKING:
    from hybrid_kv.api import Generation
    from hybrid_kv.api.generation import PrefillProgress
    from hybrid_kv.models.exact_steps import ExactWork
    from hybrid_kv.types import Work


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Prints what it is given: nothing in a text is taken for markup, an emoji or a number.

    Args:
        width: columns where nobody looks at a terminal and COLUMNS says nothing.
    """
    plain = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if width is not None and not plain.is_terminal and "COLUMNS" not in os.environ:
        plain.width = width
    return plain


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, int(math.log(count, 1024))) if count >= 1 else 0
    return f"{count / 1024**power:.{1 if power else 0}f} {units[power]}"


def human_seconds(seconds: float) -> str:
    """0.0123 -> '12.3 ms', 75 -> '1 min 15 s'."""
    if math.isnan(seconds):
        return "-"
    if seconds < 1:
        return f"{1e3 * seconds:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return f"{int(seconds // 60)} min {seconds % 60:.0f} s"


def attended_ratio(work: Work) -> float | None:
    """Share of the entries that decoding attended; None where nothing was decoded."""
    return work.attended / work.visible if work.visible else None


def percent(ratio: float | None) -> str:
    """0.0213 -> '2.1%'; '-' for None."""
    return "-" if ratio is None else f"{100 * ratio:.1f}%"


def stats_line(generation: Generation, *, interrupted: bool) -> str:
    """One line on what a generation cost."""
    parts = [f"{generation.prompt_tokens:,} prompt + {len(generation.token_ids):,} new tokens"]
    if generation.token_ids:
        parts.append(f"TTFT {human_seconds(generation.ttft_s)}")
    if generation.tpot_ms:
        parts.append(f"TPOT {human_seconds(generation.tpot_ms / 1e3)}")
    if (lost := generation.prefill) is not None:
        parts.append(f"prefill read {percent(lost.density)} (error {percent(lost.error)})")
    if (exact := generation.exact) is not None:
        parts.append(_exact_words(exact))
    ratio = attended_ratio(generation.work)
    if ratio is not None:
        parts.append(f"attended {percent(ratio)}")
    parts.append(f"host KV {human_bytes(generation.host_kv_bytes)}")
    return ("interrupted: " if interrupted else "") + ", ".join(parts)


def _exact_words(work: ExactWork) -> str:
    """Words on the work of exact decoding; few where nothing was drafted."""
    ties = f" ({work.ties:,} ties)" if work.ties else ""
    passes = f"{work.passes:,} pass{'es' * (work.passes != 1)}{ties}"
    if work.trusted:
        return f"{work.trusted:,} tokens below the largest error, {work.accepted:,} in {passes}"
    if not work.passes:
        return "exact: every step read everything"
    return f"exact: {work.drafted:,} tokens drafted, {work.accepted:,} accepted in {passes}"


def note(text: str, output: OutputOptions) -> None:
    """One line on stderr, unless --quiet."""
    if not output.quiet:
        console(stderr=True).print(text, style="dim", soft_wrap=True)


def shows_progress(output: OutputOptions) -> bool:
    """Whether bars and spinners are wanted: on a terminal, without --quiet."""
    return sys.stderr.isatty() and not output.quiet


@contextmanager
def waiting(label: str, output: OutputOptions) -> Iterator[None]:
    """A spinner on stderr, on a terminal."""
    if not shows_progress(output):
        yield
        return
    with console(stderr=True).status(Text(label)):
        yield


@contextmanager
def prefill_bar(output: OutputOptions) -> Iterator[PrefillProgress | None]:
    """A bar for the prompt (and the index of each layer), gone when the first token comes.

    Yields:
        What to call with (done, total), or None where no bar is wanted.
    """
    if not shows_progress(output):
        yield None
        return
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console(stderr=True), transient=True)
    task = bar.add_task("prefill and index", total=None)

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()

    with bar:
        yield report


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

    Nothing is cut: where the keys and one column are too wide together, cells are folded.
    """
    if not any(column.cells for column in (*keys, *columns)):
        return
    for number, part in enumerate(_parts(console.width, keys, columns)):
        if number:
            console.print()
        shown = [*keys, *part]
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        fits = _width(shown) <= console.width
        for column in shown:
            justify: Literal["left", "right"] = "left" if column.left else "right"
            table.add_column(column.title, justify=justify, no_wrap=fits, overflow="fold")
        for cells in zip(*(column.cells for column in shown), strict=True):
            table.add_row(*cells)
        console.print(table)


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
