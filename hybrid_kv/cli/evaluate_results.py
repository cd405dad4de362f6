"""Results that an evaluation leaves in its folder: tables, a report and a page."""

from __future__ import annotations

from pathlib import Path

from hybrid_kv.cli.files import write_report
from hybrid_kv.cli.options import OutputOptions
from hybrid_kv.contest.arguments import EvalArguments
from hybrid_kv.contest.evaluation import CellSource, rows_of
from hybrid_kv.contest.folder import ResultsFolder
from hybrid_kv.report import Environment
from hybrid_kv.report.evaluation import to_csv
from hybrid_kv.report.files import write_file
from hybrid_kv.report.html.evaluation_page import render_evaluation
from hybrid_kv.report.schema import EvalReport, to_json


def report_of(
    arguments: EvalArguments,
    contest: CellSource,
    folder: ResultsFolder,
    environment: Environment,
    *,
    interrupted: bool,
) -> EvalReport:
    """The report of what was asked for, as far as the folder has it."""
    found = (folder.cells[key] for key in contest.wanted() if key in folder.cells)
    return EvalReport(
        environment=environment,
        arguments=arguments.model_dump(mode="json"),
        model=arguments.model,
        rows=(*rows_of(found), *contest.refused()),
        interrupted=interrupted,
    )


def write_results(report: EvalReport, folder: Path, output: OutputOptions) -> None:
    """Puts the tables, the report and the page into the folder, and the report where --json says.

    Raises:
        WriteError: one of them cannot be written; an older one is still there.
    """
    write_file(folder / "results.csv", to_csv(report.rows), "table")
    write_file(folder / "results.json", to_json(report) + "\n", "report")
    write_file(folder / "index.html", render_evaluation(report), "page")
    write_report(report, output)
