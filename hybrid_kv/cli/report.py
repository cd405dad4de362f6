"""`hybrid-kv report`: runs as a page to look at, and their figures as files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybrid_kv.cli.options import OutputOptions

if TYPE_CHECKING:
    from hybrid_kv.report.html.sources import Source
    from hybrid_kv.report.schema import EvalReport, PageReport, Report

_PAGE = "What to write"


@dataclass(frozen=True, slots=True)
class PageOptions:
    """Paths of the page and of the figures; at least one must be given."""

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
            help="Each figure as PNG, 300 dpi at 17 cm.",
            rich_help_panel=_PAGE,
        ),
    ] = None


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN.json...",
            help="What profile, generate, chat or demo wrote with --json; further profiles are "
            "compared with the first. Or the results.json of one eval.",
        ),
    ],
    *,
    page: PageOptions,
    output: OutputOptions,
) -> None:
    """Draw runs: latency, phases, recall, memory, limits; compare profiles."""
    from hybrid_kv.cli.display import human_bytes, note
    from hybrid_kv.cli.files import write_report
    from hybrid_kv.report import read_report
    from hybrid_kv.report.files import write_file
    from hybrid_kv.report.html.evaluation_page import render_evaluation
    from hybrid_kv.report.html.page import Format, export, render
    from hybrid_kv.report.html.sources import drawable

    _check_paths(runs, page, output)
    reports = [read_report(path) for path in runs]
    evaluation = _evaluation(reports, runs, page)
    sources = (
        []
        if evaluation is not None
        else [drawable(one, str(path)) for one, path in zip(reports, runs, strict=True)]
    )
    written: list[Path] = []
    lines: list[str] = []
    if page.html is not None:
        text = render(sources) if evaluation is None else render_evaluation(evaluation)
        write_file(page.html, text, "page")
        lines.append(f"{page.html}: {human_bytes(len(text.encode()))}")
        written.append(page.html)
    formats: dict[Format, Path | None] = {"svg": page.svg, "png": page.png}
    for kind, folder in formats.items():
        if folder is not None:
            figures = export(sources, folder, kind)
            lines.append(f"{folder}: {len(figures)} figures")
            written += figures
    if output.json is not None:
        write_report(_document([*map(str, runs)], sources, written), output)
    for line in lines:
        note(line, output)


def _check_paths(runs: list[Path], page: PageOptions, output: OutputOptions) -> None:
    """Raises ConfigError for what cannot be read or written, before anything is drawn."""
    from hybrid_kv.errors import ConfigError
    from hybrid_kv.report.files import check_files, check_folder

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
    check_files({"--html": page.html, "--json": output.json}, runs)
    for name, folder in (("--svg", page.svg), ("--png", page.png)):
        if folder is not None:
            check_folder(name, folder)


def _evaluation(reports: list[Report], runs: list[Path], page: PageOptions) -> EvalReport | None:
    """The evaluation among what was given, which is drawn alone and as a page."""
    from hybrid_kv.errors import ConfigError
    from hybrid_kv.report.schema import EvalReport

    for report, path in zip(reports, runs, strict=True):
        if isinstance(report, EvalReport):
            if len(reports) > 1 or page.html is None or page.svg or page.png:
                raise ConfigError(
                    f"an evaluation is drawn alone and with --html, got '{path}' of eval beside "
                    "other runs or other files to write; leave these out"
                )
            return report
    return None


def _document(runs: list[str], sources: list[Source], written: list[Path]) -> PageReport:
    from hybrid_kv.report import probe_environment
    from hybrid_kv.report.html.compare import ratios_of
    from hybrid_kv.report.html.sources import comparisons
    from hybrid_kv.report.schema import PageReport

    return PageReport(
        environment=probe_environment(),
        runs=tuple(runs),
        written=tuple(str(path) for path in written),
        ratios=tuple(ratio for one in comparisons(sources) for ratio in ratios_of(one)),
    )
