"""`hybrid-kv report`: runs as a page to look at, and their figures as files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybrid_kv.cli.options import OutputOptions

if TYPE_CHECKING:
    from hybrid_kv.report.html.sources import Source
    from hybrid_kv.report.schema import PageReport

_PAGE = "What to write"


@dataclass(frozen=True, slots=True)
class PageOptions:
    """Where the page and the figures go; at least one must be given."""

    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="One page that needs no network and no script.",
            rich_help_panel=_PAGE,
        ),
    ] = None
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Each figure as SVG.", rich_help_panel=_PAGE),
    ] = None
    png: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Each figure as PNG, 300 dpi at 17 cm. [dim]needs the extra report[/]",
            rich_help_panel=_PAGE,
        ),
    ] = None


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN.json...",
            help="What profile, generate, chat or demo wrote with --json. Further profiles are "
            "compared with the first.",
        ),
    ],
    *,
    page: PageOptions,
    output: OutputOptions,
) -> None:
    """Draw runs: latency, phases, recall, memory, limits; compare profiles."""
    from hybrid_kv.cli.display import note
    from hybrid_kv.cli.documents import check_target, write_report
    from hybrid_kv.report import read_report
    from hybrid_kv.report.html.export import export
    from hybrid_kv.report.html.page import render
    from hybrid_kv.report.html.raster import check_raster
    from hybrid_kv.report.html.sources import drawable

    check_target(output)
    _check_paths(runs, page)
    if page.png is not None:
        check_raster()
    sources = [drawable(read_report(path), str(path)) for path in runs]
    written: list[Path] = []
    if page.html is not None:
        _write(page.html, render(sources))
        written.append(page.html)
    if page.svg is not None:
        written += export(sources, page.svg, "svg")
    if page.png is not None:
        written += export(sources, page.png, "png")
    if output.json is not None:
        write_report(_document(sources, written), output)
    for line in _summary(page, written):
        note(line, output)


def _check_paths(runs: list[Path], page: PageOptions) -> None:
    """Raises ConfigError for what cannot be read or written, before anything is drawn."""
    from hybrid_kv.errors import ConfigError

    seen: set[Path] = set()
    for path in runs:
        if path.resolve() in seen:
            raise ConfigError(f"each run must be given once, got '{path}' twice; leave one out")
        seen.add(path.resolve())
    if page.html is None and page.svg is None and page.png is None:
        raise ConfigError(
            "report needs something to write, got none of --html FILE, --svg FOLDER and --png "
            "FOLDER; give at least one"
        )
    if page.html is not None:
        _check_file(page.html, seen)
    for name, folder in (("--svg", page.svg), ("--png", page.png)):
        if folder is not None:
            _check_folder(name, folder)


def _check_file(path: Path, runs: set[Path]) -> None:
    from hybrid_kv.errors import ConfigError

    if path.resolve() in runs:
        raise ConfigError(f"--html must not overwrite a run, got '{path}'; choose another file")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--html must name a file in an existing folder, got '{path}'")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"--html must name a file that can be written, got '{path}'")


def _check_folder(name: str, folder: Path) -> None:
    from hybrid_kv.errors import ConfigError

    base = folder if folder.exists() else folder.absolute().parent
    if not base.is_dir():
        raise ConfigError(f"{name} must name a folder, or a new one in an existing, got '{folder}'")
    if not os.access(base, os.W_OK):
        raise ConfigError(f"{name} must name a folder that can be written, got '{folder}'")


def _write(path: Path, text: str) -> None:
    from hybrid_kv.errors import ConfigError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"page '{path}' cannot be written: {error.strerror}; choose another file"
        ) from None


def _summary(page: PageOptions, written: list[Path]) -> list[str]:
    from hybrid_kv.cli.display import human_bytes

    lines = []
    if page.html is not None:
        lines.append(f"{page.html}: {human_bytes(page.html.stat().st_size)}")
    for folder in (page.svg, page.png):
        if folder is not None:
            number = sum(path.parent == folder for path in written)
            lines.append(f"{folder}: {number} figures")
    return lines


def _document(sources: list[Source], written: list[Path]) -> PageReport:
    from hybrid_kv.report import probe_environment
    from hybrid_kv.report.html.compare import ratios_of
    from hybrid_kv.report.html.sources import comparisons
    from hybrid_kv.report.schema import PageReport

    return PageReport(
        environment=probe_environment(),
        runs=tuple(source.name for source in sources),
        written=tuple(str(path) for path in written),
        ratios=tuple(ratio for one in comparisons(sources) for ratio in ratios_of(one)),
    )
