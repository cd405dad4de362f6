"""`hybrid-kv doctor`: what this machine can run, and why not the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hybrid_kv.cli import known_names
from hybrid_kv.cli.options import OutputOptions, count

if TYPE_CHECKING:
    from hybrid_kv.report.schema import DoctorReport


def doctor(
    *,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            autocompletion=known_names.models,
            help="Whose keys and values the figures are for.",
        ),
    ] = "random:llama-3-8b",
    context: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Tokens that they are for.")
    ] = 2**17,
    measured: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Measure bandwidths, in about a second."),
    ] = True,
    output: OutputOptions,
) -> None:
    """Show versions, devices, memory, back ends, and what this machine's bandwidths mean.

    Exit code 1 if something needed is missing.
    """
    from hybrid_kv.cli.examination import examine
    from hybrid_kv.cli.files import check_target, write_report

    check_target(output)
    report = examine()
    lacking = any(check.state == "missing" for check in report.checks)
    if measured and not lacking:
        report = _with_measurements(report, model, context)
    if not output.json_only:
        _print(report)
    write_report(report, output)
    if lacking:
        raise typer.Exit(1)


def _with_measurements(report: DoctorReport, model: str, context: int) -> DoctorReport:
    from hybrid_kv.cli.examination import measure
    from hybrid_kv.report.run import MachineGbps

    rates, lines = measure(model, context)
    gbps = MachineGbps(
        device=rates.device, dram=rates.dram, gather=rates.gather, h2d=rates.h2d, d2h=rates.d2h
    )
    return report.model_copy(
        update={
            "model": model,
            "context_tokens": context,
            "bandwidth_gbps": gbps,
            "checks": (*report.checks, *lines),
        }
    )


def _print(report: DoctorReport) -> None:
    from rich.text import Text

    from hybrid_kv.cli.display import console, facts_table, human_bytes

    out, machine = console(), report.environment
    cpu = machine.cpu
    table = facts_table("bold")
    table.add_row("machine", machine.platform)
    features = " ".join(cpu.features) or "no vector extensions known"
    table.add_row("cpu", f"{cpu.model}, {cpu.cores} cores, {cpu.threads} threads; {features}")
    free = human_bytes(report.ram_free_bytes)
    limit = f" {report.ram_limit}" if report.ram_limit else ""
    table.add_row("memory", f"{human_bytes(machine.ram_bytes)}, {free} free{limit}")
    for device in report.devices:
        table.add_row("device", device)
    out.print(table)
    out.print()
    colours = {"ok": "green", "absent": "yellow", "missing": "red"}
    checks = facts_table("", "bold")
    for check in report.checks:
        checks.add_row(Text(check.state, colours[check.state]), check.name, check.detail)
    out.print(checks)
