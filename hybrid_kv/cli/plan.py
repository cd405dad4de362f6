"""`hybrid-kv plan`: where every byte goes, what the prompt and a token cost, before loading."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_kv.cli.options import LayersOption, ModelArgument, ModelOptions, OutputOptions, count

if TYPE_CHECKING:
    from rich.text import Text

    from hybrid_kv.cli.display import Column
    from hybrid_kv.planning.designs import DesignStep, ExactPlan
    from hybrid_kv.planning.plan import Option, Plan
    from hybrid_kv.report.profile import ProfileRow
    from hybrid_kv.report.schema import PlanReport

_MACHINE = "Machine"
_ACCEPTED = (0.95, 0.987, 0.995)  # SmolLM2 accepts .987 with 82 keys, .995 with 205


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """Machine to plan for, where that is not this one."""

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
    cores: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="With --card: what a step takes by design, with so many cores.",
            rich_help_panel=_MACHINE,
        ),
    ] = None


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
    """Say whether a context fits, where its bytes go, and what its prompt and a token will take."""
    from hybrid_kv.api.planning import plan as make_plan
    from hybrid_kv.cli.files import build_config, check_target, write_report
    from hybrid_kv.cli.model_run import silence_transformers
    from hybrid_kv.errors import ConfigError

    check_target(output)
    if machine.cores is not None and machine.card is None:
        raise ConfigError(
            f"--cores {machine.cores} says what searches beside a GPU, got no --card; name the "
            "GPU, such as --card rtx-4090"
        )
    if options.exact_products:
        raise ConfigError(
            "--exact-products changes nothing that is planned: neither bytes nor what a step waits "
            "for; a prompt is planned without it, so leave it out"
        )
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
        weights=options.weights,
        dequantize=bool(options.dequantize),
    )
    measured = {} if beside is None else _measured(beside, made, config.method)
    designs = () if machine.cores is None else _designs(made, machine.card, machine.cores)
    exact = _exact(designs)
    if not output.json_only:
        _print(made, measured)
        _print_designs(designs)
        _print_exact(exact)
    if output.json is not None:
        write_report(_report(made, config.flat(), measured, designs, exact), output)


def _designs(made: Plan, card: str | None, cores: int) -> tuple[DesignStep, ...]:
    from hybrid_kv.planning.designs import DESKTOP_GBPS, Designs, Host
    from hybrid_kv.planning.rates import CARDS

    host = Host(cores, *DESKTOP_GBPS)
    named = CARDS[card or made.machine.device]
    codes = next((one.code_bytes for one in made.options if one.code_bytes), None)
    where = made.facts, made.context_tokens, named, made.machine.rates, host
    return Designs(*where, code_bytes=codes).all()


def _exact(designs: tuple[DesignStep, ...]) -> tuple[ExactPlan, ...]:
    from hybrid_kv.planning.designs import exact_plans

    return exact_plans(designs, _ACCEPTED)


def _measured(file: Path, made: Plan, method: str) -> dict[str, ProfileRow]:
    """Rows of a profile that are what was planned, by mode.

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
        modes[row.method]: row
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


def _report(
    made: Plan,
    config: dict[str, Any],
    measured: dict[str, ProfileRow],
    designs: tuple[DesignStep, ...],
    exact: tuple[ExactPlan, ...],
) -> PlanReport:
    from hybrid_kv.report import probe_environment
    from hybrid_kv.report.run import MachineGbps
    from hybrid_kv.report.schema import (
        PlannedDesign,
        PlannedExact,
        PlannedOption,
        PlanReport,
        PromptGflops,
    )

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
        weights=dict(facts.weights),
        kv_bytes_per_token=facts.kv_bytes_per_token,
        bandwidth_gbps=MachineGbps(
            device=rates.device,
            dram=rates.dram,
            gather=rates.gather,
            h2d=rates.h2d,
            d2h=rates.d2h,
        ),
        rates_assumed=machine.assumed,
        prompt_rates=None if machine.prompt is None else PromptGflops(**asdict(machine.prompt)),
        options=tuple(
            PlannedOption(
                mode=option.mode,
                fits=option.fits,
                why=option.why,
                device_bytes=dict(option.device_bytes),
                host_bytes=dict(option.host_bytes),
                ms_per_token=dict(option.ms),
                tpot_ms=option.tpot_ms,
                first_token_s=dict(option.first_token),
                ttft_s=option.ttft_s,
                measured_tpot_ms=getattr(measured.get(option.mode), "tpot_ms", None),
                measured_ttft_s=getattr(measured.get(option.mode), "ttft_s", None),
                settings=dict(option.settings),
                max_context_tokens=option.max_context_tokens,
                select=option.select,
            )
            for option in made.options
        ),
        recommended=None if chosen is None else chosen.mode,
        advice=made.advice,
        designs=tuple(
            PlannedDesign(
                design=step.design,
                tpot_ms=step.ms,
                ms_per_token={part.name: part.ms for part in step.parts if not part.hidden},
                hidden_ms_per_token={part.name: part.ms for part in step.parts if part.hidden},
                measured_parts=tuple(part.name for part in step.parts if part.measured),
                launches=step.launches,
                waits=step.waits,
                host_core_ms=step.host_core_ms,
                device_read_bytes=step.device_read_bytes,
                host_read_bytes=step.host_read_bytes,
                bus_bytes=step.bus_bytes,
                device_bytes=step.device_bytes,
                host_bytes=step.host_bytes,
                why_not=step.why_not,
            )
            for step in designs
        ),
        exact=tuple(
            PlannedExact(
                design=one.design,
                accepted=one.accepted,
                drafts=one.drafts,
                tpot_ms=one.ms,
                beside_drafts=one.beside_drafts,
                beside_tpot_ms=one.beside_ms,
            )
            for one in exact
        ),
    )


def _print(made: Plan, measured: dict[str, ProfileRow]) -> None:
    from rich.text import Text

    from hybrid_kv.cli.display import Column, console, human_bytes, print_columns

    out, machine, facts = console(), made.machine, made.facts
    memory = f"{human_bytes(machine.host_bytes)} of host memory"
    if machine.device_bytes is not None:
        memory = f"{human_bytes(machine.device_bytes)} on the device, {memory}"
    where = f", {made.context_tokens:,} tokens, {machine.device}: {memory}"
    out.print(Text.assemble((facts.name, "bold"), where))
    layouts = ", ".join(f"{human_bytes(size)} {name}" for name, size in facts.weights.items())
    out.print(
        f"weights {human_bytes(facts.weight_bytes)} ({layouts}), KV "
        f"{human_bytes(facts.kv_bytes_per_token)} a token; bandwidths in GB/s: {_rates(made)}"
        f"{_prompt_rates(made)}",
        style="dim",
    )
    columns = [
        Column("device", [_parts(option.device_bytes, human_bytes) for option in made.options]),
        Column("host", [_parts(option.host_bytes, human_bytes) for option in made.options]),
        Column(
            "ms per token",
            [_parts(option.ms, lambda ms: f"{ms:.1f}", "not modelled") for option in made.options],
        ),
        Column(
            "s to the first token",
            [_parts(option.first_token, _short, "not modelled") for option in made.options],
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


def _print_designs(designs: tuple[DesignStep, ...]) -> None:
    from rich.text import Text

    from hybrid_kv.cli.display import Column, console, human_bytes, print_columns

    if not designs:
        return
    out = console()
    out.print()
    out.print(
        "A step by design. The device's and the bus's parts are computed from specifications, the "
        "host's from costs measured on one core (*) and an assumed bandwidth; hidden parts in "
        "brackets",
        style="dim",
    )
    names = [Text(f"{step.design}\n{step.why_not}".strip(), "bold") for step in designs]
    columns = [
        Column("ms per token", [_design_parts(step) for step in designs]),
        Column("launches", [f"{step.launches:,}" for step in designs]),
        Column("waits", [f"{step.waits:,}" for step in designs]),
        Column("host core-ms", [f"{step.host_core_ms:.0f}" for step in designs]),
        Column("over the bus", [human_bytes(step.bus_bytes) for step in designs]),
        Column("on the host", [human_bytes(step.host_bytes) for step in designs]),
    ]
    print_columns(out, [Column("", names, True)], columns)


def _print_exact(exact: tuple[ExactPlan, ...]) -> None:
    from rich.text import Text

    from hybrid_kv.cli.display import Column, console, print_columns

    if not exact:
        return
    out = console()
    out.print()
    out.print(
        "A token of an exact answer in ms, and drafts of a pass, by the share of drafts that full "
        "attention chooses too; in brackets were a pass to run beside the next drafts, which is "
        "not built. Computed",
        style="dim",
    )
    names = list(dict.fromkeys(one.design for one in exact))
    columns = [
        Column(
            f"{share:.1%}",
            [
                f"{one.ms:.1f}, {one.drafts}\n({one.beside_ms:.1f}, {one.beside_drafts})"
                for one in exact
                if one.accepted == share
            ],
        )
        for share in _ACCEPTED
    ]
    print_columns(out, [Column("", [Text(name, "bold") for name in names], True)], columns)


def _design_parts(step: DesignStep) -> Text:
    from rich.text import Text

    if step.why_not:
        return Text("cannot run")
    lines = [
        f"({part.ms:.1f}) {part.name}" if part.hidden else f"{part.ms:.1f} {part.name}"
        for part in step.parts
    ]
    marks = ["*" if part.measured else "" for part in step.parts]
    joined = "".join(f"{line}{mark}\n" for line, mark in zip(lines, marks, strict=True))
    return Text.assemble(joined, (f"{step.ms:.1f}", "bold"))


def _verdict(option: Option) -> Text:
    from rich.text import Text

    fits = ("fits", "green") if option.fits else ("too big", "red")
    return Text.assemble((option.mode, "bold"), "\n", fits)


def _measured_column(made: Plan, measured: dict[str, ProfileRow]) -> Column:
    from rich.text import Text

    from hybrid_kv.cli.display import Column

    rows = [measured.get(option.mode) for option in made.options]
    return Column("measured", [Text(_times(row), "bold") for row in rows])


def _times(row: ProfileRow | None) -> str:
    if row is None:
        return "-"
    first = "" if row.ttft_s is None else f"\n{_short(row.ttft_s)} s to the first"
    return f"{row.tpot_ms:.1f} ms{first}"


def _short(value: float) -> str:
    """Three digits, no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _rates(made: Plan) -> str:
    rates = made.machine.rates
    known = {"device": rates.device, "DRAM": rates.dram, "random rows": rates.gather}
    known |= {name: rate for name, rate in (("h2d", rates.h2d), ("d2h", rates.d2h)) if rate}
    source = "from the card's specification" if made.machine.assumed else "measured now"
    return ", ".join(f"{name} {rate:.0f}" for name, rate in known.items()) + f" ({source})"


def _prompt_rates(made: Plan) -> str:
    """Rates on which the time to the first token rests, with a separator before them."""
    from hybrid_kv.planning.traffic import (
        ATTAINED_ATTENTION,
        ATTAINED_PRODUCTS,
        SPARSE_DENSITY,
    )

    prompt = made.machine.prompt
    if prompt is None:
        return ""
    shares = f"{ATTAINED_PRODUCTS:.0%} and {ATTAINED_ATTENTION:.0%} of the card's specification"
    how = shares if prompt.assumed else "measured now"
    is_sparse = any("sparse attention" in option.first_token for option in made.options)
    read = f", sparse prefill reading {SPARSE_DENSITY:.0%} (assumed)" if is_sparse else ""
    return (
        f"; a prompt's products {_short(prompt.products / 1e3)}, attention "
        f"{_short(prompt.attention / 1e3)} TFLOP/s ({how}){read}"
    )


def _parts(values: Any, show: Any, nothing: str = "-") -> Text:
    """One part a line, the sum in the last."""
    from rich.text import Text

    kept = {name: value for name, value in values.items() if value}
    if not kept:
        return Text(nothing)
    lines = "".join(f"{show(value)} {name}\n" for name, value in kept.items())
    return Text.assemble(lines, (show(sum(kept.values())), "bold"))
