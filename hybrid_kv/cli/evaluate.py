"""`hybrid-kv eval`: methods against each other, on the same prompts and at one budget."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from hybrid_kv.cli import INTERRUPTED, known_names
from hybrid_kv.cli.options import (
    ConfigFile,
    Dequantize,
    Device,
    Dtype,
    ExactProducts,
    ModelArgument,
    OutputOptions,
    Plugins,
    Settings,
    Weights,
    count,
    each_of,
)

if TYPE_CHECKING:
    from torch import nn

    from hybrid_kv.contest.arguments import EvalArguments
    from hybrid_kv.contest.evaluation import CellSource, Told
    from hybrid_kv.contest.folder import ResultsFolder
    from hybrid_kv.report import Environment
    from hybrid_kv.report.evaluation import Cell
    from hybrid_kv.report.schema import EvalReport

_ASKED = "What is compared"


@dataclass(frozen=True, slots=True)
class ContestOptions:
    """Choice of methods, tasks, contexts and budgets."""

    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            autocompletion=known_names.tasks,
            help="ruler, all, perplexity, or names such as key_value and multi_key_1; settings "
            "follow, key_value:records=32. [dim]default: key_value,multi_query,passkey[/]",
            rich_help_panel=_ASKED,
        ),
    ] = None
    context: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Tokens of context and question. [dim]default: 4k[/]",
            rich_help_panel=_ASKED,
        ),
    ] = None
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Names, or all; settings follow, quest:dense_layers=2, and a value with a comma "
            "stands in quotes. Full attention always takes part. "
            "[dim]default: hybrid,quest,streaming_llm[/]",
            rich_help_panel=_ASKED,
        ),
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="N%,...",
            help="Entries that a query head may attend in a step: a share of the context, or "
            "tokens. [dim]default: 5%[/]",
            rich_help_panel=_ASKED,
        ),
    ] = None
    question: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN",
            help="It comes after the eviction, before it, or both. [dim]default: after[/]",
            rich_help_panel=_ASKED,
        ),
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="N",
            help="Contexts of each task and length. [dim]default: 4[/]",
            rich_help_panel=_ASKED,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Of all prompts. [dim]default: 0[/]", rich_help_panel=_ASKED
        ),
    ] = None
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="What perplexity reads on in. [dim]default: Python's language reference[/]",
            rich_help_panel=_ASKED,
        ),
    ] = None
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Ask without the model's chat template.", rich_help_panel=_ASKED
        ),
    ] = False
    skip_refused: Annotated[
        bool,
        typer.Option(
            "--skip-refused",
            help="Name budgets that are too small for a method, and measure the others.",
            rich_help_panel=_ASKED,
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class ContestModelOptions:
    """Choice of the model, and settings of all methods."""

    plugins: Plugins = None
    settings: Settings = None
    config: ConfigFile = None
    device: Device = None
    dtype: Dtype = None
    weights: Weights = None
    dequantize: Dequantize = None
    exact_products: ExactProducts = None


def evaluate(
    model: ModelArgument,
    *,
    asked: ContestOptions,
    options: ContestModelOptions,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Where results go; one that is there is continued. [dim]default: tables are "
            "printed, and nothing is kept[/]",
            rich_help_panel="Output",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Measure on all nodes of a Ray cluster: HOST:PORT of its head, or auto.",
            rich_help_panel=_ASKED,
        ),
    ] = None,
    output: OutputOptions,
) -> None:
    """Compare methods on tasks: scores, tokens attended, bytes, time, at one budget."""
    from hybrid_kv.cli.files import check_target

    check_target(output)
    arguments = _arguments(model, asked, options)
    with TemporaryDirectory(prefix="hybrid-kv-eval-") as unkept:
        path = folder or Path(unkept)
        if ray is None:
            report = _run(arguments, path, output)
        else:
            report = _run_on_cluster(ray, arguments, options.plugins or (), path, output)
    _print(report, folder, output)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(row.error is not None and not row.refused for row in report.rows):
        raise typer.Exit(1)


def _arguments(model: str, asked: ContestOptions, options: ContestModelOptions) -> EvalArguments:
    from hybrid_kv.cli.files import parse_settings, read_settings
    from hybrid_kv.config import budget_tokens
    from hybrid_kv.contest.arguments import EvalArguments

    each_of("--budget", asked.budget or "", lambda text: budget_tokens(text, 1))
    stored = read_settings(options.config) if options.config is not None else {}
    given = {
        "model": model,
        "tasks": _each(asked.tasks),
        "contexts": None if asked.context is None else each_of("--context", asked.context, count),
        "methods": _each(asked.methods),
        "budgets": _each(asked.budget),
        "question": asked.question,
        "samples": asked.samples,
        "seed": asked.seed,
        "text": asked.text,
        "raw": asked.raw,
        "skip_refused": asked.skip_refused,
        "settings": {**stored, **parse_settings(options.settings or ())},
        "device": options.device,
        "dtype": options.dtype,
        "weights": options.weights,
        "dequantize": options.dequantize,
        "exact_products": options.exact_products,
    }
    return EvalArguments.of({key: value for key, value in given.items() if value is not None})


def _each(text: str | None) -> tuple[str, ...] | None:
    from hybrid_kv.contest.arguments import split_outside_quotes

    if text is None:
        return None
    return tuple(part.strip() for part in split_outside_quotes(text, ",") if part.strip())


def _run(arguments: EvalArguments, path: Path, output: OutputOptions) -> EvalReport:
    """Measures here."""
    from hybrid_kv.cli.files import environment_of
    from hybrid_kv.cli.model_run import opened
    from hybrid_kv.cli.options import ModelOptions
    from hybrid_kv.config import HybridConfig
    from hybrid_kv.contest.evaluation import Evaluation
    from hybrid_kv.contest.folder import ResultsFolder

    place = ModelOptions(
        device=arguments.device,
        dtype=arguments.dtype,
        weights=arguments.weights,
        dequantize=arguments.dequantize,
        exact_products=arguments.exact_products,
    )
    identity = {**arguments.identity(), **arguments.on_machine()}
    with (
        ResultsFolder(path, identity) as folder,
        opened(arguments.model, place, HybridConfig(method="full"), output) as llm,
    ):
        contest = Evaluation(llm, arguments)
        interrupted = _measured(contest, folder, output, llm.model)
        return _written(arguments, contest, folder, environment_of(llm), output, interrupted)


def _run_on_cluster(
    address: str,
    arguments: EvalArguments,
    plugins: Sequence[str],
    path: Path,
    output: OutputOptions,
) -> EvalReport:
    """Measures on the nodes of a cluster."""
    from hybrid_kv.cli.display import note, waiting
    from hybrid_kv.contest.folder import ResultsFolder
    from hybrid_kv.ray.evaluation import ClusterEvaluation

    with (
        ClusterEvaluation(address, arguments, plugins, lambda text: note(text, output)) as contest,
        ResultsFolder(path, {**arguments.identity(), **contest.machine}) as folder,
    ):
        with waiting(f"loading {arguments.model} on {contest.num_nodes} nodes", output):
            contest.load()
        interrupted = _measured(contest, folder, output)
        contest.close()  # stdout is the report's again
        return _written(arguments, contest, folder, contest.environment, output, interrupted)


def _measured(
    contest: CellSource,
    folder: ResultsFolder,
    output: OutputOptions,
    model: nn.Module | None = None,
) -> bool:
    """Whether the user ended it."""
    from hybrid_kv.cli.model_run import checked, ended_by_ctrl_c

    try:
        with _progress(output) as tell, ended_by_ctrl_c(output, model) as check:
            contest.run(folder, checked(tell, check))
    except KeyboardInterrupt:
        return True
    return False


def _written(
    arguments: EvalArguments,
    contest: CellSource,
    folder: ResultsFolder,
    environment: Environment,
    output: OutputOptions,
    interrupted: bool,
) -> EvalReport:
    """The report of what was measured, as far as the folder has it.

    Puts the tables, the report and the page into the folder, and the report where --json says.

    Raises:
        WriteError: one of them cannot be written; an older one is still there.
    """
    from hybrid_kv.cli.files import write_report
    from hybrid_kv.contest.evaluation import rows_of
    from hybrid_kv.report.evaluation import to_csv
    from hybrid_kv.report.files import write_file
    from hybrid_kv.report.html.evaluation_page import render_evaluation
    from hybrid_kv.report.schema import EvalReport, to_json

    found = (folder.cells[key] for key in contest.wanted() if key in folder.cells)
    report = EvalReport(
        environment=environment,
        arguments=arguments.model_dump(mode="json"),
        model=arguments.model,
        rows=(*rows_of(found), *contest.refused()),
        interrupted=interrupted,
    )
    write_file(folder.path / "results.csv", to_csv(report.rows), "table")
    write_file(folder.path / "results.json", to_json(report) + "\n", "report")
    write_file(folder.path / "index.html", render_evaluation(report), "page")
    write_report(report, output)
    return report


def _print(report: EvalReport, folder: Path | None, output: OutputOptions) -> None:
    from hybrid_kv.cli.display import Column, console, note, print_columns
    from hybrid_kv.report.evaluation import sheets

    if output.json_only:
        return
    out = console(width=200)
    for sheet in sheets(report.rows):
        out.print(sheet.title, style="bold")
        cells = [sheet.cells(line) for line in sheet.lines]
        columns = [Column(t, [row[i] for row in cells]) for i, t in enumerate(sheet.head())]
        keys = [Column(column.title, column.cells, left=True) for column in columns[:2]]
        print_columns(out, keys, columns[2:])
        out.print()
    for reason in dict.fromkeys(row.error for row in report.rows if row.refused):
        note(f"left out: {reason}", output)
    for row in report.rows:
        if row.error is not None and not row.refused:
            note(f"{row.method} {row.budget or ''} on {row.task}: {row.error}", output)
    if folder is not None:
        note(f"{folder}: results.csv, results.json, index.html", output)
    else:
        note("nothing was kept; --output FOLDER keeps results, and goes on with them", output)


@contextmanager
def _progress(output: OutputOptions) -> Iterator[Told | None]:
    """A bar with the time left, on a terminal; else a line for each context."""
    from hybrid_kv.cli.display import console, human_seconds, note
    from hybrid_kv.report.evaluation import short_count

    if output.quiet:
        yield None
        return
    if not sys.stderr.isatty():
        seen: set[tuple[str, int, int]] = set()

        def line(cell: Cell, done: int, total: int, left_s: float) -> None:
            place = cell.task, cell.context_tokens, cell.sample
            if place not in seen or done == total:
                seen.add(place)
                what = f"{cell.task} at {short_count(cell.context_tokens)}"
                left = f", {human_seconds(left_s)} left" if done < total else ""
                note(f"{done} of {total}: {what}, context {cell.sample + 1}{left}", output)

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}", markup=False))
    bar = Progress(*columns, console=console(stderr=True), transient=True, auto_refresh=False)
    task = bar.add_task("the first context", total=None)

    def drawn(cell: Cell, done: int, total: int, left_s: float) -> None:
        what = f"{cell.task} at {short_count(cell.context_tokens)}, {cell.method}"
        left = f"{human_seconds(left_s)} left, {what}"
        bar.update(task, completed=done, total=total, description=left)
        bar.refresh()

    with bar:
        yield drawn
