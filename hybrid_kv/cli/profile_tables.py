"""A profile for people: latency by context, breakdown, memory and quality, and a repetition.

It is written after every row, and taken up again where it ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.text import Text

from hybrid_kv.cli.display import (
    Column,
    TextCell,
    console,
    human_bytes,
    human_seconds,
    note,
    print_columns,
)
from hybrid_kv.cli.files import write_report
from hybrid_kv.cli.options import OutputOptions
from hybrid_kv.errors import ConfigError, WriteError
from hybrid_kv.eval.profiling import Bench, ProfileArguments
from hybrid_kv.models.load import resolve_device
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native.library import pool_here
from hybrid_kv.report import read_report
from hybrid_kv.report.files import STDOUT, is_replaced
from hybrid_kv.report.profile import (
    DEVICE_PEAK,
    FILL,
    GAPS,
    HOST_INDEX,
    HOST_KV,
    INDEX_BUILD,
    LIMIT,
    MASS_ERROR,
    MISSED,
    PLANNED,
    PROCESS_PEAK,
    READ,
    RECALL,
    RECORDER,
    RESIDENT_KV,
    SCORED,
    TTFT,
    ProfileRow,
    Quantity,
    Unit,
)
from hybrid_kv.report.run import EstimateReport, MachineGbps, PhasesMs, environment_on
from hybrid_kv.report.schema import ProfileReport
from hybrid_kv.watch.phases import Phases, cost_of_measuring

if TYPE_CHECKING:
    from hybrid_kv.eval.profiling import Bench

_WIDE = 160
"""Columns where nobody looks at a terminal."""

_PHASES = {
    "search": "search",
    "cold attn": "cold_attention",
    "resident attn": "resident_attention",
    "select": "select",
    "merge": "merge",
    "transfer": "transfer",
    "wait": "wait",
    "model": "model",
    "Python": "python",
    "other": "other",
}

_MARKS = {"failed": "red", "skipped": "yellow", "interrupted": "yellow"}


def print_profile(report: ProfileReport) -> None:
    """All tables on stdout."""
    out = console(width=_WIDE)
    out.print(title(report), style="bold")
    out.print(_setting(report), style="dim")
    _show(out, "ms per token (TPOT) by context", *_latency(report))
    for tokens in _contexts(report):
        rows = [row for row in report.rows if row.context_tokens == tokens]
        measured = [row for row in rows if row.tpot_ms is not None]
        where = f"at {short_count(tokens)}"
        _show(out, f"ms per token {where}, by phase", *_breakdown(measured))
        _show(out, f"fill, memory, traffic and quality {where}", *_costs(measured))
    reasons = [row for row in report.rows if row.reason is not None]
    if reasons:
        out.print()
    for row in reasons:
        where = f"{row.method} at {short_count(row.context_tokens)}: {row.status}"
        out.print(f"{where}: {row.reason}")


def print_repetition(old: ProfileReport, new: ProfileReport) -> None:
    """Old and new medians with their quartiles, ratios, and whether they agree."""
    before = {(row.method, row.context_tokens): row for row in old.rows}
    pairs = [(before.get((row.method, row.context_tokens)), row) for row in new.rows]
    keys = [
        Column("context", [short_count(row.context_tokens) for row in new.rows]),
        Column("method", [row.method for row in new.rows], left=True),
    ]
    columns = [
        Column("before", [_spread(first) for first, _ in pairs]),
        Column("now", [_spread(row) for row in new.rows]),
        Column("ratio", [_ratio(first, row) for first, row in pairs]),
        Column("agree", [_agreement(first, row) for first, row in pairs]),
    ]
    caption = f"{title(new)}: repeated; ms per step, median (quartiles)"
    _show(console(width=_WIDE), caption, keys, columns)


def _ratio(first: ProfileRow | None, row: ProfileRow) -> str:
    if first is None or first.itl_ms is None or row.itl_ms is None:
        return "-"
    return f"{row.itl_ms.p50 / first.itl_ms.p50:.2f}"


def _agreement(first: ProfileRow | None, row: ProfileRow) -> TextCell:
    if first is None or first.itl_ms is None or row.itl_ms is None:
        return "-"
    return Text("yes", "green") if agree(first.step_ms, row.step_ms) else Text("no", "red")


def agree(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether the quartiles of two series of steps overlap."""
    low, high = quartiles(first), quartiles(second)
    return low[0] <= high[1] and high[0] <= low[1]


def quartiles(taken: Sequence[float]) -> tuple[float, float]:
    """The first and the third; of a single value twice that value."""
    if len(taken) == 1:
        return taken[0], taken[0]
    first, _, third = quantiles(taken, n=4, method="inclusive")
    return first, third


def title(report: ProfileReport) -> str:
    """The model, and how far it was cut down."""
    cut = "" if report.shape_layers is None else f" of {report.shape_layers}"
    return f"{report.model}, {report.layers}{cut} layers"


def short_count(count: int) -> str:
    """131072 -> '128K'."""
    return f"{count // 1024}K" if count % 1024 == 0 else f"{count:,}"


def _setting(report: ProfileReport) -> str:
    fill = {
        "prefill": "a prompt of random tokens",
        "synthetic": "made-up KV put in place, no prefill",
    }[report.fill]
    threads = ", ".join(f"{count} of {name}" for name, count in report.threads.items())
    rates = report.bandwidth_gbps
    return (
        f"{report.environment.device}; {fill}; {report.new_tokens} steps after "
        f"{report.warmup_tokens} of warm-up; threads: {threads}; GB/s: device {rates.device:.0f}, "
        f"DRAM {rates.dram:.0f}, random rows {rates.gather:.0f}; measuring one phase takes "
        f"{report.recorder_us:.2f} us"
    )


def _show(out: Console, caption: str, keys: list[Column], columns: list[Column]) -> None:
    if any(column.cells for column in keys):
        out.print(f"\n{caption}", style="bold")
        print_columns(out, keys, columns)


def _contexts(report: ProfileReport) -> list[int]:
    return list(dict.fromkeys(row.context_tokens for row in report.rows))


def _methods(rows: Sequence[ProfileRow]) -> list[Column]:
    return [Column("method", [row.method for row in rows], left=True)]


def _latency(report: ProfileReport) -> tuple[list[Column], list[Column]]:
    found = {(row.method, row.context_tokens): row for row in report.rows}
    methods = list(dict.fromkeys(row.method for row in report.rows))
    columns = [
        Column(short_count(tokens), [_cell(found.get((method, tokens))) for method in methods])
        for tokens in _contexts(report)
    ]
    return [Column("method", methods, left=True)], columns


def _cell(row: ProfileRow | None) -> TextCell:
    if row is None:
        return "-"
    text = "" if row.tpot_ms is None else f"{row.tpot_ms:.1f}"
    return text if row.status == "ok" else Text(f"{text} {row.status}".strip(), _MARKS[row.status])


def _breakdown(rows: Sequence[ProfileRow]) -> tuple[list[Column], list[Column]]:
    """As the paper's: where a step goes, with the lower limit that memory sets."""
    phases = {name: key for name, key in _PHASES.items() if any(_phase(row, key) for row in rows)}
    columns = [
        *(Column(name, [_ms(_phase(row, key)) for row in rows]) for name, key in phases.items()),
        Column("total", [Text(_ms(row.tpot_ms), "bold") for row in rows]),
        *(_column(quantity, rows) for quantity in (*GAPS, LIMIT, PLANNED, RECORDER)),
    ]
    return _methods(rows), columns


def _ms(value: float | None) -> str:
    return _or_dash(value, "{:.2f}".format)


def _phase(row: ProfileRow, key: str) -> float | None:
    value: float | None = getattr(row.phases_ms, key) if key in PhasesMs.model_fields else None
    return value


_COSTS = (
    *(TTFT, FILL, INDEX_BUILD),
    *(DEVICE_PEAK, RESIDENT_KV, HOST_KV, HOST_INDEX, PROCESS_PEAK),
    *(READ, SCORED, RECALL, MISSED, MASS_ERROR),
)


def _costs(rows: Sequence[ProfileRow]) -> tuple[list[Column], list[Column]]:
    """Cells of a row's costs: before its first step, held, read and missed."""
    columns = [_column(quantity, rows) for quantity in _COSTS]
    return _methods(rows), [column for column in columns if set(column.cells) - {"-"}]


def _column(quantity: Quantity, rows: Sequence[ProfileRow]) -> Column:
    show = _SHOWN[quantity.unit]
    return Column(quantity.title, [_or_dash(quantity.of(row), show) for row in rows])


def _or_dash(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def _estimate(found: EstimateReport) -> str:
    half = "" if found.half_width is None else f" ± {found.half_width:.3f}"
    return f"{found.mean:z.3f}{half}"


_SHOWN: Mapping[Unit, Callable[[Any], str]] = {
    "ms": "{:.2f}".format,
    "seconds": human_seconds,
    "bytes": human_bytes,
    "share": "{:.2%}".format,
    "count": "{:,.1f}".format,
    "estimate": _estimate,
}


def _spread(row: ProfileRow | None) -> str:
    if row is None or row.itl_ms is None:
        return "-"
    first, third = quartiles(row.step_ms)
    return f"{row.itl_ms.p50:.2f} ({first:.2f} to {third:.2f})"


def describe_profile(
    bench: Bench, rows: Sequence[ProfileRow], *, interrupted: bool
) -> ProfileReport:
    """The report of the rows so far."""
    asked = bench.asked
    return ProfileReport(
        environment=environment_on(bench.model.device),
        arguments=asked.model_dump(mode="json"),
        model=asked.model,
        layers=bench.num_layers,
        shape_layers=bench.shape_layers,
        fill=asked.fill,
        new_tokens=asked.new_tokens,
        warmup_tokens=asked.warmup_tokens,
        threads=threads_here(),
        bandwidth_gbps=MachineGbps(**dataclasses.asdict(bench.rates)),
        recorder_us=1e6 * cost_of_measuring(Phases()),
        rows=tuple(rows),
        interrupted=interrupted,
    )


def read_profile(path: Path) -> tuple[ProfileReport, ProfileArguments]:
    """A profile that was written before, with what it takes to repeat it.

    Raises:
        ConfigError: the file is damaged, of another schema, or of another verb.
    """
    report = read_report(path)
    if not isinstance(report, ProfileReport):
        raise ConfigError(
            f"report '{path}' must be one of profile, got one of {report.command}; give a file "
            "that `hybrid-kv profile --json` wrote"
        )
    return report, ProfileArguments.of(report.arguments, f"report '{path}'")


def threads_here() -> dict[str, int]:
    """Threads of torch and of the engine."""
    pool = pool_here() if engine_state().isa is not None else None
    return {"torch": torch.get_num_threads(), "engine": 1 if pool is None else pool.threads}


RowPlace = tuple[str, int]
"""A method and a context."""

_MOST_TOLD = 5


def find_earlier(asked: ProfileArguments, output: OutputOptions) -> ProfileReport | None:
    """Report that --json holds of the same profile, to be continued; None where there is no file
    yet.

    Raises:
        ConfigError: there is no file to continue, or one of other settings or another environment.
    """
    if output.json is None or output.json == STDOUT or not is_replaced(output.json):
        raise ConfigError(
            f"--resume needs --json FILE, the report to continue, got {output.json or 'none'}"
        )
    path = Path(output.json)
    if not path.exists():
        return None
    report, before = read_profile(path)
    found = list(_differences(asked, before, report))
    if found:
        more = f" and {len(found) - _MOST_TOLD} more" if len(found) > _MOST_TOLD else ""
        raise ConfigError(
            f"--resume needs a report of the same settings and environment, '{path}' differs in "
            f"{'; '.join(found[:_MOST_TOLD])}{more}; give the same again, or choose another file"
        )
    return report


def rows_of(report: ProfileReport | None) -> dict[RowPlace, ProfileRow]:
    """The rows that need not be measured again."""
    rows = () if report is None else report.rows
    return {_place(row): row for row in rows if row.status == "ok"}


def lacking(asked: ProfileArguments, known: Mapping[RowPlace, ProfileRow]) -> int:
    """Number of rows that are still to be measured."""
    return sum(place not in known for place in _places(asked))


class Record:
    """All rows so far, and the file that has them.

    A file that cannot be written ends no measurement: the next row tries again.
    """

    def __init__(
        self, bench: Bench, output: OutputOptions, known: Mapping[RowPlace, ProfileRow]
    ) -> None:
        self._bench, self._output = bench, output
        self._rows = dict(known)
        self._warned = False
        for row in known.values():
            bench.note_build(row)

    def add(self, row: ProfileRow) -> None:
        """Takes one more row and writes all of them."""
        self._rows[_place(row)] = row
        if self._output.json is None or not is_replaced(self._output.json):
            return
        try:
            write_report(self.report(interrupted=True), self._output)
        except WriteError as error:
            if not self._warned:
                note(f"{error}; measuring goes on", self._output)
            self._warned = True

    def report(self, *, interrupted: bool) -> ProfileReport:
        """The report of all rows, in the order in which they are asked for."""
        rows = [self._rows[place] for place in _places(self._bench.asked) if place in self._rows]
        return describe_profile(self._bench, rows, interrupted=interrupted)


def _place(row: ProfileRow) -> RowPlace:
    return row.method, row.context_tokens


def _places(asked: ProfileArguments) -> Iterator[RowPlace]:
    return ((method, tokens) for tokens in asked.contexts for method in asked.methods)


def _differences(
    asked: ProfileArguments, before: ProfileArguments, report: ProfileReport
) -> Iterator[str]:
    """Settings that the report has otherwise; further methods and contexts may be asked for."""
    here, there = asked.model_dump(mode="json"), before.model_dump(mode="json")
    yield from _unequal("", there, here, {"contexts", "methods"})
    for row in report.rows:
        if _place(row) not in set(_places(asked)):
            yield f"a row of {row.method} at {row.context_tokens}, which is not asked for"
    environment = environment_on(resolve_device(asked.device))
    yield from _unequal("", report.environment.model_dump(), environment.model_dump(), set())
    yield from _unequal("threads of ", report.threads, threads_here(), set())
    configs = asked.configs()
    for row in rows_of(report).values():
        if row.method in configs:
            now = configs[row.method].flat()
            yield from _unequal(f"{row.method}'s ", row.config, now, set())
            del configs[row.method]  # at all contexts the same


def _unequal(
    prefix: str, there: Mapping[str, Any], here: Mapping[str, Any], free: set[str]
) -> Iterator[str]:
    for key in dict.fromkeys((*there, *here)):
        old, new = there.get(key), here.get(key)
        if key in free or old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _unequal(f"{prefix}{key}.", old, new, set())
        else:
            yield f"{prefix}{key} (there {old}, now {new})"
