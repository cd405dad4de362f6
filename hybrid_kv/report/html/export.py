"""Every figure of a document as a file of its own, for papers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from hybrid_kv.errors import WriteError
from hybrid_kv.report.files import write_file
from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.compare import pairs_of, ratio_figure
from hybrid_kv.report.html.entries import Entry, by_context, entries_of, measured, tiers
from hybrid_kv.report.html.profile_figures import (
    heads_figure,
    limit_figure,
    memory_figure,
    phases_figure,
    qualities,
    quality_figure,
    tpot_figure,
    ttft_figure,
)
from hybrid_kv.report.html.raster import to_png
from hybrid_kv.report.html.runs import run_entries
from hybrid_kv.report.html.scene import Scene
from hybrid_kv.report.html.sources import Source, comparisons
from hybrid_kv.report.html.svg import to_file
from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.report.schema import ProfileReport

WIDTH = 640.0
"""Pixels at natural size: 17 cm in print, the text width of most papers."""

Format = Literal["svg", "png"]


def export(sources: Sequence[Source], folder: Path, kind: Format) -> list[Path]:
    """Writes each figure into the folder, which is made where it is not there.

    Raises:
        WriteError: the folder or a file in it cannot be written.
        BackendUnavailable: "png" without Matplotlib.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(
            f"folder '{folder}' cannot be made: {error.strerror}; choose another"
        ) from error
    draw = to_png if kind == "png" else to_file
    written = []
    for scene in scenes(sources):
        path = folder / f"{_file_name(scene.name)}.{kind}"
        write_file(path, draw(scene), "figure")
        written.append(path)
    return written


def scenes(sources: Sequence[Source]) -> Iterator[Scene]:
    """All figures; where there are several documents, their number leads the name."""
    several = len(sources) > 1
    for number, source in enumerate(sources, 1):
        report = source.report
        drawn = (
            _profile(entries_of(report.rows))
            if isinstance(report, ProfileReport)
            else _runs(run_entries(report))
        )
        for scene in drawn:
            if several:
                scene.name = f"run{number}-{scene.name}"
            yield scene
    for one in comparisons(sources):
        pairs = pairs_of(one)
        for context in by_context(pair.first for pair in pairs):
            group = [pair for pair in pairs if pair.first.row.context_tokens == context]
            scene = ratio_figure(group, numbers.tokens(context), WIDTH)
            scene.name = f"profile{one.number}-over-profile1-{scene.name}"
            yield scene


def _profile(entries: list[Entry]) -> Iterator[Scene]:
    known = measured(entries)
    starts = [entry for entry in known if entry.row.ttft_s is not None]
    if known:
        yield tpot_figure(known, WIDTH)
    if starts:
        yield ttft_figure(starts, WIDTH)
    for context, group in by_context(known).items():
        where = numbers.tokens(context)
        yield from _steps(group, where)
        for quality in qualities(group):
            yield quality_figure(group, quality, where, WIDTH)
        limited = [e for e in group if isinstance(e.row, ProfileRow) and e.row.limit_ms]
        if limited:
            yield limit_figure(limited, where, WIDTH)
    yield from _heads(entries)


def _runs(entries: list[Entry]) -> Iterator[Scene]:
    yield from _steps(entries, "per token")
    yield from _heads(entries)


def _steps(entries: list[Entry], where: str) -> Iterator[Scene]:
    drawn: tuple[tuple[Callable[[list[Entry], str, float], Scene], list[Entry]], ...] = (
        (phases_figure, [e for e in entries if any(v is not None for _, v in e.row.phases_ms)]),
        (memory_figure, [e for e in entries if tiers(e.row.memory_bytes)]),
    )
    for draw, kept in drawn:
        if kept:
            yield draw(kept, where, WIDTH)


def _heads(entries: list[Entry]) -> Iterator[Scene]:
    for entry in entries:
        if entry.row.audit and entry.row.audit.heads:
            yield heads_figure(entry, 360)


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")
