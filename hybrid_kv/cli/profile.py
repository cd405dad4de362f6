"""`hybrid-kv profile`: where the time of a token goes, by context and method."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_kv.cli import INTERRUPTED, known_names
from hybrid_kv.cli.display import console, waiting
from hybrid_kv.cli.options import (
    ConfigFile,
    Dequantize,
    Device,
    Dtype,
    ExactProducts,
    LayersOption,
    OutputOptions,
    Plugins,
    Settings,
    Weights,
    count,
    each_of,
)

if TYPE_CHECKING:
    from hybrid_kv.eval.profiling import ProfileArguments
    from hybrid_kv.eval.profiling.bench import Kept, RowTold
    from hybrid_kv.report.profile import ProfileRow
    from hybrid_kv.report.schema import ProfileReport
    from hybrid_kv.watch.recorder import TraceSpan

_SWEEP = "Sweep"


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Choice of methods, contexts and steps to measure."""

    context: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Prompt tokens. [dim]default: 4k,8k,16k,32k,64k,128k[/]",
            rich_help_panel=_SWEEP,
        ),
    ] = None
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="[dim]default: full,flat,ivf,hnsw,quest,graph,hybrid; graph is "
            "retrieval_attention[/]",
            rich_help_panel=_SWEEP,
        ),
    ] = None
    fill: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="prefill computes a random prompt, synthetic puts made-up KV in place, which "
            "takes no prefill. [dim]default: prefill[/]",
            rich_help_panel=_SWEEP,
        ),
    ] = None
    new_tokens: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="N",
            help="Decode steps that are measured. [dim]default: 32[/]",
            rich_help_panel=_SWEEP,
        ),
    ] = None
    warmup: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Steps before them. [dim]default: 4[/]",
            rich_help_panel=_SWEEP,
        ),
    ] = None
    audit_every: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Steps from one look of the audit to the next, in a pass of its own; 0 for none. "
            "[dim]default: 2[/]",
            rich_help_panel=_SWEEP,
        ),
    ] = None
    row_limit: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="A row that would take longer is skipped, or measured shorter; 0 for no limit. "
            "[dim]default: 120 with --fill synthetic, else none[/]",
            rich_help_panel=_SWEEP,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Of weights, prompts and made-up KV. [dim]default: 0[/]",
            rich_help_panel=_SWEEP,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class ProfileModelOptions:
    """Choice of the model to measure, and settings of the methods."""

    plugins: Plugins = None
    settings: Settings = None
    config: ConfigFile = None
    device: Device = None
    dtype: Dtype = None
    weights: Weights = None
    dequantize: Dequantize = None
    exact_products: ExactProducts = None


def profile(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            autocompletion=known_names.models,
            help="A folder, a .gguf file, a hub id, 'needle', 'smollm2', or 'random:SHAPE'; none "
            "with --repeat.",
        ),
    ] = None,
    *,
    asked: SweepOptions,
    options: ProfileModelOptions,
    cut: LayersOption,
    repeat: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.json", help="Run that profile again and compare.", rich_help_panel=_SWEEP
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the report that --json names: rows that it has are not measured again.",
            rich_help_panel=_SWEEP,
        ),
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write a Chrome trace of a few steps of each row.",
            rich_help_panel="Output",
        ),
    ] = None,
    output: OutputOptions,
) -> None:
    """Measure where the time of a token goes, by context and method."""
    from hybrid_kv.cli.files import write_report
    from hybrid_kv.cli.model_run import silence_transformers
    from hybrid_kv.cli.profile_tables import find_earlier, lacking, read_profile, rows_of
    from hybrid_kv.report.files import check_files

    reads = [] if repeat is None else [repeat]
    check_files({"--json": output.json, "--trace": trace}, reads)
    before: ProfileReport | None = None
    if repeat is None:
        arguments = _arguments(model, asked, options, cut)
    else:
        _refuse_beside_repeat(model, asked, options, cut)
        before, arguments = read_profile(repeat)
    earlier = find_earlier(arguments, output) if resume else None
    known = rows_of(earlier)
    _refuse_trace_of_known(trace, known)
    silence_transformers(output)
    traced: list[tuple[ProfileRow, Sequence[TraceSpan]]] = []
    if earlier is not None and not lacking(arguments, known):
        report = earlier
    else:
        keep: Kept | None = None if trace is None else lambda *pair: traced.append(pair)
        report = _measure(arguments, earlier, output, keep)
    with ExitStack() as each:  # whatever becomes of the others; the tables are the last
        each.callback(_print, report, before, output)
        if trace is not None:
            each.callback(_write_trace, trace, traced, report)
        write_report(report, output)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(row.status == "failed" for row in report.rows):
        raise typer.Exit(1)


def _measure(
    arguments: ProfileArguments,
    earlier: ProfileReport | None,
    output: OutputOptions,
    keep: Kept | None,
) -> ProfileReport:
    """Measures what is lacking; the file gets each row when it is there."""
    from hybrid_kv.cli.model_run import checked, ended_by_ctrl_c, told_in_a_line
    from hybrid_kv.cli.profile_tables import Record, lacking, rows_of
    from hybrid_kv.eval.profiling import open_bench, sweep
    from hybrid_kv.planning.rates import Rates

    known = rows_of(earlier)
    rates = None if earlier is None else Rates(**dict(earlier.bandwidth_gbps))
    label = f"loading {arguments.model}, measuring the machine"
    with waiting(label, output), told_in_a_line(output):
        bench = open_bench(arguments, rates)
    record, ended = Record(bench, output, known), False
    try:
        with (
            _progress(lacking(arguments, known), output) as tell,
            ended_by_ctrl_c(output, bench.model) as check,
        ):
            for row in sweep(bench, checked(tell, check), keep=keep, known=known):
                record.add(row)
                ended = row.status == "interrupted"
                check()
    except KeyboardInterrupt:  # between two rows
        ended = True
    return record.report(interrupted=ended)


def _print(report: ProfileReport, before: ProfileReport | None, output: OutputOptions) -> None:
    from hybrid_kv.cli.profile_tables import print_profile, print_repetition

    if output.json_only:
        return
    print_profile(report)
    if before is not None:
        print_repetition(before, report)


def _refuse_trace_of_known(trace: str | None, known: Collection[object]) -> None:
    from hybrid_kv.errors import ConfigError

    if trace == "-":
        raise ConfigError("--trace must name a file, got '-'; stdout has the tables")
    if trace is not None and known:
        raise ConfigError(
            "--trace needs spans, which rows that were measured before have left none of; leave it "
            "out, or leave out --resume"
        )


def _arguments(
    model: str | None, asked: SweepOptions, options: ProfileModelOptions, cut: LayersOption
) -> ProfileArguments:
    from hybrid_kv.cli.files import parse_settings, read_settings
    from hybrid_kv.errors import ConfigError
    from hybrid_kv.eval.profiling import ProfileArguments
    from hybrid_kv.eval.profiling.arguments import SYNTHETIC_LIMIT_S

    if model is None:
        raise ConfigError("MODEL is missing; name one, or a profile to --repeat")
    stored = read_settings(options.config) if options.config is not None else {}
    limit = asked.row_limit
    if limit is None and asked.fill == "synthetic":
        limit = SYNTHETIC_LIMIT_S
    given = {
        "model": model,
        "contexts": None if asked.context is None else each_of("--context", asked.context, count),
        "methods": None if asked.methods is None else each_of("--methods", asked.methods, str),
        "fill": asked.fill,
        "layers": cut.layers,
        "new_tokens": asked.new_tokens,
        "warmup_tokens": asked.warmup,
        "audit_every": asked.audit_every,
        "row_limit_s": limit or None,
        "settings": {**stored, **parse_settings(options.settings or ())},
        "device": options.device,
        "dtype": options.dtype,
        "weights": options.weights,
        "dequantize": options.dequantize,
        "exact_products": options.exact_products,
        "seed": asked.seed,
    }
    return ProfileArguments.of({key: value for key, value in given.items() if value is not None})


def _refuse_beside_repeat(model: str | None, *groups: Any) -> None:
    """Raises ConfigError for what would change the profile that is repeated."""
    from hybrid_kv.errors import ConfigError

    given = ["MODEL"] if model is not None else []
    for group in groups:
        names = (field.name for field in fields(group))
        given += [name for name in names if getattr(group, name) is not None]
    if given:
        shown = ", ".join(given[:1] if model is not None else _as_options(given))
        raise ConfigError(
            f"--repeat takes everything from its file, got {shown} as well; leave it out, or leave "
            "out --repeat"
        )


def _as_options(names: list[str]) -> list[str]:
    return ["--set" if name == "settings" else f"--{name.replace('_', '-')}" for name in names]


@contextmanager
def _progress(total: int, output: OutputOptions) -> Iterator[RowTold | None]:
    """A bar over the rows, on a terminal.

    It is drawn when it is told something and by no thread, so that it takes nothing from a step.
    """
    if not sys.stderr.isatty() or output.quiet:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from hybrid_kv.cli.profile_tables import short_count

    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TextColumn("{task.description}", markup=False),
    )
    bar = Progress(*columns, console=console(stderr=True), transient=True, auto_refresh=False)
    task, seen = bar.add_task("", total=total), list[Any]()

    def tell(row: ProfileRow, what: str, done: int, whole: int) -> None:
        if not any(row is other for other in seen):
            seen.append(row)
        part = f" {100 * done // whole}%" if done else ""
        text = f"{row.method} at {short_count(row.context_tokens)}: {what}{part}"
        bar.update(task, completed=len(seen) - 1, description=text)
        bar.refresh()

    with bar:
        yield tell


def _write_trace(
    name: str, traced: list[tuple[ProfileRow, Sequence[TraceSpan]]], report: ProfileReport
) -> None:
    from hybrid_kv.cli.profile_tables import short_count, title
    from hybrid_kv.eval.profiling import chrome_trace
    from hybrid_kv.report.files import write_file

    parts = [(f"{row.method}, {short_count(row.context_tokens)}", spans) for row, spans in traced]
    trace = chrome_trace(parts, {"model": title(report), "fill": report.fill})
    write_file(name, json.dumps(trace), "trace")
