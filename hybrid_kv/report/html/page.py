"""Run documents as one HTML file that needs nothing else, and their figures as files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from hybrid_kv.errors import WriteError
from hybrid_kv.report.files import write_file
from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.canvas import Picture, to_file, to_png
from hybrid_kv.report.html.compare import (
    compare_sections,
    pairs_by_context,
    pairs_of,
    ratio_figure,
)
from hybrid_kv.report.html.page_blocks import PagePart, shell
from hybrid_kv.report.html.page_entries import Entry, by_context, entries_of, measured, tiers
from hybrid_kv.report.html.pictures import (
    heads_figure,
    limit_figure,
    memory_figure,
    phases_figure,
    qualities,
    quality_figure,
    tpot_figure,
    ttft_figure,
)
from hybrid_kv.report.html.profile_page import profile_head, profile_sections
from hybrid_kv.report.html.sources import (
    Drawable,
    Source,
    comparisons,
    run_entries,
    run_head,
    run_sections,
    runs_of,
)
from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.report.schema import ProfileReport


def render(sources: Sequence[Source]) -> str:
    """The page: profiles after the first are compared with it, then each document is told.

    Raises:
        ConfigError: two profiles have no method at a context in common.
    """
    compared = [*comparisons(sources)]
    parts = []
    for one in compared:
        title = f"{one.names[1]} against {one.names[0]}"
        shown = "" if len(sources) == 2 else title
        parts.append(PagePart(title, [], compare_sections(one, f"c{one.number}-"), shown))
    for number, source in enumerate(sources, 1):
        parts.append(_document(source, f"r{number}-", main=len(sources) == 1))
    kicker, heading = _title(sources[0].report)
    if len(sources) == 2 and compared:
        kicker, heading = "comparison", " against ".join(reversed(compared[0].names))
    elif len(sources) > 1:
        kicker, heading = "report", " · ".join(source.name for source in sources)
    title = " · ".join(source.name for source in sources)
    return shell(f"{title} – hybrid-kv", f"hybrid-kv {kicker}", heading, parts)


def _document(source: Source, prefix: str, main: bool) -> PagePart:
    report = source.report
    if isinstance(report, ProfileReport):
        top = profile_head(report, source.name)
        sections = profile_sections(report, source.name, prefix)
    else:
        top, sections = run_head(report, source.name), run_sections(report, prefix)
    kind, title = _title(report)
    if main:
        return PagePart(source.name, top, sections)
    return PagePart(source.name, top, sections, title, kind, source.name)


def _title(report: Drawable) -> tuple[str, str]:
    model = report.model if isinstance(report, ProfileReport) else runs_of(report)[0].model
    return report.command, model


PRINTED = 640.0
"""Pixels at natural size: 17 cm in print, the text width of most papers."""

Format = Literal["svg", "png"]


def export(sources: Sequence[Source], folder: Path, kind: Format) -> list[Path]:
    """Writes each figure into the folder, which is made where it is not there.

    Raises:
        WriteError: the folder or a file in it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(
            f"folder '{folder}' cannot be made: {error.strerror}; choose another"
        ) from error
    draw: Callable[[Picture], str | bytes] = to_png if kind == "png" else to_file
    written = []
    for picture in pictures(sources):
        path = folder / f"{_file_name(picture.name)}.{kind}"
        write_file(path, draw(picture), "figure")
        written.append(path)
    return written


def pictures(sources: Sequence[Source]) -> Iterator[Picture]:
    """All figures; where there are several documents, their number leads the name."""
    several = len(sources) > 1
    for number, source in enumerate(sources, 1):
        report = source.report
        drawn = (
            _profile(entries_of(report.rows))
            if isinstance(report, ProfileReport)
            else _runs(run_entries(report))
        )
        for picture in drawn:
            if several:
                picture.name = f"run{number}-{picture.name}"
            yield picture
    for one in comparisons(sources):
        for where, group in pairs_by_context(pairs_of(one)).items():
            picture = ratio_figure(group, where, PRINTED)
            picture.name = f"profile{one.number}-over-profile1-{picture.name}"
            yield picture


def _profile(entries: list[Entry]) -> Iterator[Picture]:
    known = measured(entries)
    starts = [entry for entry in known if entry.row.ttft_s is not None]
    if known:
        yield tpot_figure(known, PRINTED)
    if starts:
        yield ttft_figure(starts, PRINTED)
    for context, group in by_context(known).items():
        where = numbers.tokens(context)
        yield from _steps(group, where)
        for quality in qualities(group):
            yield quality_figure(group, quality, where, PRINTED)
        limited = [e for e in group if isinstance(e.row, ProfileRow) and e.row.limit_ms]
        if limited:
            yield limit_figure(limited, where, PRINTED)
    yield from _heads(entries)


def _runs(entries: list[Entry]) -> Iterator[Picture]:
    yield from _steps(entries, "per token")
    yield from _heads(entries)


def _steps(entries: list[Entry], where: str) -> Iterator[Picture]:
    drawn: tuple[tuple[Callable[[list[Entry], str, float], Picture], list[Entry]], ...] = (
        (phases_figure, [e for e in entries if any(v is not None for _, v in e.row.phases_ms)]),
        (memory_figure, [e for e in entries if tiers(e.row.memory_bytes)]),
    )
    for draw, kept in drawn:
        if kept:
            yield draw(kept, where, PRINTED)


def _heads(entries: list[Entry]) -> Iterator[Picture]:
    for entry in entries:
        if entry.row.audit and entry.row.audit.heads:
            yield heads_figure(entry, 360)


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")
