"""`hybrid-kv plan`: where every byte goes and what a token costs, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_kv.cli.options import LayersOption, ModelArgument, ModelOptions, OutputOptions, count

if TYPE_CHECKING:
    from rich.text import Text

    from hybrid_kv.cli.tables import Column
    from hybrid_kv.planning.planner import Option, Plan
    from hybrid_kv.report.schema import PlanReport

_MACHINE = "Machine"


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """What to plan for, where that is not this machine."""

    card: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A GPU by its specification, such as rtx-4090.",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    device_memory: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="BYTES",
            help="GPU memory, such as 24GiB. [dim]default: what it has[/]",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    host_memory: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="BYTES",
            help="Host memory, such as 64GiB. [dim]default: what is free now[/]",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    weight_bits: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="16, 8 or 4: linear layers as weight-only quantisation stores them.",
            rich_help_panel=_MACHINE,
        ),
    ] = 16


def plan(
    model: ModelArgument,
    *,
    context: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Tokens, prompt and answer together.")
    ] = 2**17,
    beside: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.json",
            help="A profile of this model, whose measured times are shown beside the prediction.",
        ),
    ] = None,
    machine: MachineOptions,
    layers: LayersOption,
    options: ModelOptions,
    output: OutputOptions,
) -> None:
    """Say whether a context fits, where its bytes go, and what a token will take."""
    from hybrid_kv.api.planning import plan as make_plan
    from hybrid_kv.cli.documents import check_target, write_report
    from hybrid_kv.cli.running import silence_transformers
    from hybrid_kv.cli.settings import build_config

    check_target(output)
    config = build_config(options)
    silence_transformers(output)
    made = make_plan(
        model,
        context,
        config=config,
        device=options.device,
        card=machine.card,
        device_bytes=machine.device_memory,
        host_bytes=machine.host_memory,
        dtype=options.dtype,
        layers=layers.layers,
        weight_bits=machine.weight_bits,
    )
    measured = {} if beside is None else _measured(beside, made, config.method)
    if not output.json_only:
        _print(made, measured)
    if output.json is not None:
        write_report(_report(made, config.flat(), measured), output)


def _measured(file: Path, made: Plan, method: str) -> dict[str, float]:
    """Milliseconds per token by mode, of the rows of a profile that are what was planned.

    Raises:
        ConfigError: the file is no profile, or none of this model and context.
    """
    from hybrid_kv.errors import ConfigError
    from hybrid_kv.report import read_report
    from hybrid_kv.report.schema import ProfileReport

    run, facts = read_report(file), made.facts
    if not isinstance(run, ProfileReport):
        raise ConfigError(
            f"--beside takes what the verb profile has written, got a run of '{run.command}' in "
            f"'{file}'"
        )
    planned, there = (facts.name, len(facts.layers)), (run.model, run.layers)
    if planned != there:
        raise ConfigError(
            f"--beside must be a profile of {planned[0]} with {planned[1]} layers, got "
            f"{there[0]} with {there[1]}; give the same model and --layers"
        )
    modes = {"full": "dense", method: "hybrid"}
    found = {
        modes[row.method]: row.tpot_ms
        for row in run.rows
        if row.method in modes and row.context_tokens == made.context_tokens and row.tpot_ms
    }
    if not found:
        contexts = sorted({row.context_tokens for row in run.rows if row.tpot_ms})
        raise ConfigError(
            f"'{file}' has measured neither full nor {method} at {made.context_tokens} tokens; it "
            f"has the contexts {', '.join(map(str, contexts)) or 'of no row'}"
        )
    return found


def _report(made: Plan, config: dict[str, Any], measured: dict[str, float]) -> PlanReport:
    from hybrid_kv.report import probe_environment
    from hybrid_kv.report.run import MachineGbps
    from hybrid_kv.report.schema import PlannedOption, PlanReport

    facts, machine, chosen = made.facts, made.machine, made.recommended
    rates = machine.rates
    return PlanReport(
        environment=probe_environment(machine.device),
        config=config,
        model=facts.name,
        context_tokens=made.context_tokens,
        device_bytes=machine.device_bytes,
        host_bytes=machine.host_bytes,
        weight_bytes=facts.weight_bytes,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        bandwidth_gbps=MachineGbps(
            device=rates.device,
            dram=rates.dram,
            gather=rates.gather,
            h2d=rates.h2d,
            d2h=rates.d2h,
        ),
        rates_assumed=machine.assumed,
        options=tuple(
            PlannedOption(
                mode=option.mode,
                fits=option.fits,
                why=option.why,
                device_bytes=dict(option.device_bytes),
                host_bytes=dict(option.host_bytes),
                ms_per_token=dict(option.ms),
                tpot_ms=option.tpot_ms,
                measured_tpot_ms=measured.get(option.mode),
                settings=dict(option.settings),
                max_context_tokens=option.max_context_tokens,
                select=option.select,
            )
            for option in made.options
        ),
        recommended=None if chosen is None else chosen.mode,
        advice=made.advice,
    )


def _print(made: Plan, measured: dict[str, float]) -> None:
    from rich.text import Text

    from hybrid_kv.cli.display import console, human_bytes
    from hybrid_kv.cli.tables import Column, print_columns

    out, machine, facts = console(), made.machine, made.facts
    memory = f"{human_bytes(machine.host_bytes)} of host memory"
    if machine.device_bytes is not None:
        memory = f"{human_bytes(machine.device_bytes)} on the device, {memory}"
    where = f", {made.context_tokens:,} tokens, {machine.device}: {memory}"
    out.print(Text.assemble((facts.name, "bold"), where))
    out.print(
        f"weights {human_bytes(facts.weight_bytes)}, KV {human_bytes(facts.kv_bytes_per_token)} a "
        f"token; bandwidths in GB/s: {_rates(made)}",
        style="dim",
    )
    columns = [
        Column("device", [_parts(option.device_bytes, human_bytes) for option in made.options]),
        Column("host", [_parts(option.host_bytes, human_bytes) for option in made.options]),
        Column(
            "ms per token",
            [_parts(option.ms, lambda ms: f"{ms:.1f}", "not modelled") for option in made.options],
        ),
        *([_measured_column(made, measured)] if measured else []),
        Column("longest", [f"{o.max_context_tokens // 1024:,}k" for o in made.options]),
    ]
    print_columns(out, [Column("", [_verdict(option) for option in made.options], True)], columns)
    out.print(made.advice, style="bold")
    chosen = made.recommended
    if chosen is not None and chosen.settings:
        given = " ".join(f"--set {name}={value}" for name, value in chosen.settings.items())
        out.print(f"with {given}")
    if chosen is not None and chosen.select:
        out.print(f"{chosen.select} (computed; nothing of it was measured on a GPU)")


def _verdict(option: Option) -> Text:
    from rich.text import Text

    fits = ("fits", "green") if option.fits else ("too big", "red")
    return Text.assemble((option.mode, "bold"), "\n", fits)


def _measured_column(made: Plan, measured: dict[str, float]) -> Column:
    from rich.text import Text

    from hybrid_kv.cli.tables import Column

    times = [measured.get(option.mode) for option in made.options]
    return Column("measured", [Text("-" if ms is None else f"{ms:.1f}", "bold") for ms in times])


def _rates(made: Plan) -> str:
    rates = made.machine.rates
    known = {"device": rates.device, "DRAM": rates.dram, "random rows": rates.gather}
    known |= {name: rate for name, rate in (("h2d", rates.h2d), ("d2h", rates.d2h)) if rate}
    source = "from the card's specification" if made.machine.assumed else "measured now"
    return ", ".join(f"{name} {rate:.0f}" for name, rate in known.items()) + f" ({source})"


def _parts(values: Any, show: Any, nothing: str = "-") -> Text:
    """One part a line, the sum in the last."""
    from rich.text import Text

    kept = {name: value for name, value in values.items() if value}
    if not kept:
        return Text(nothing)
    lines = "".join(f"{show(value)} {name}\n" for name, value in kept.items())
    return Text.assemble(lines, (show(sum(kept.values())), "bold"))
