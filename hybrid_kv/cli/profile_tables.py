"""A profile for people: latency by context, breakdown, memory and quality, and a repetition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from hybrid_kv.cli.display import human_bytes, human_seconds, percent
from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.report.run import EstimateReport, PhasesMs
from hybrid_kv.report.schema import ProfileReport

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
    console = _console()
    console.print(f"[bold]{title(report)}[/]")
    console.print(_setting(report), style="dim")
    _show(console, "ms per token (TPOT) by context", _latency(report))
    for tokens in _contexts(report):
        rows = [row for row in report.rows if row.context_tokens == tokens]
        where = f"at {short_count(tokens)}"
        _show(console, f"ms per token {where}, by phase", _breakdown(rows))
        _show(console, f"fill, memory, traffic and quality {where}", _costs(rows))
    reasons = [row for row in report.rows if row.reason is not None]
    if reasons:
        console.print()
    for row in reasons:
        where = f"{row.method} at {short_count(row.context_tokens)}: {row.status}"
        console.print(f"{where}: {row.reason}", markup=False)


def print_repetition(old: ProfileReport, new: ProfileReport) -> None:
    """Old and new medians with their quartiles, ratios, and whether they agree."""
    table = _table()
    for name in ("context", "method", "before", "now", "ratio", "agree"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    before = {(row.method, row.context_tokens): row for row in old.rows}
    for row in new.rows:
        first = before.get((row.method, row.context_tokens))
        cells = [_spread(first), _spread(row), "-", "-"]
        if first is not None and first.itl_ms is not None and row.itl_ms is not None:
            same = agree(first.step_ms, row.step_ms)
            cells[2] = f"{row.itl_ms.p50 / first.itl_ms.p50:.2f}"
            cells[3] = "[green]yes[/]" if same else "[red]no[/]"
        table.add_row(short_count(row.context_tokens), row.method, *cells)
    _show(_console(), f"{title(new)}: repeated; ms per step, median (quartiles)", table)


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


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDE)


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


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))


def _show(console: Console, caption: str, table: Table) -> None:
    if table.row_count:
        console.print(f"\n[bold]{caption}[/]")
        console.print(table)


def _contexts(report: ProfileReport) -> list[int]:
    return list(dict.fromkeys(row.context_tokens for row in report.rows))


def _latency(report: ProfileReport) -> Table:
    table = _table()
    table.add_column("method", no_wrap=True)
    for tokens in _contexts(report):
        table.add_column(short_count(tokens), justify="right", no_wrap=True)
    found = {(row.method, row.context_tokens): row for row in report.rows}
    for method in dict.fromkeys(row.method for row in report.rows):
        cells = [_cell(found.get((method, tokens))) for tokens in _contexts(report)]
        table.add_row(method, *cells)
    return table


def _cell(row: ProfileRow | None) -> str:
    if row is None:
        return "-"
    text = "" if row.tpot_ms is None else f"{row.tpot_ms:.1f}"
    if row.status == "ok":
        return text
    return f"[{_MARKS[row.status]}]{(text + ' ' + row.status).strip()}[/]"


def _breakdown(rows: Sequence[ProfileRow]) -> Table:
    """As the paper's: where a step goes, with the lower limit that memory sets."""
    table = _table()
    measured = [row for row in rows if row.tpot_ms is not None]
    phases = {
        name: key for name, key in _PHASES.items() if any(_phase(row, key) for row in measured)
    }
    table.add_column("method", no_wrap=True)
    for name in (*phases, "total", "p50", "p90", "p99", "limit", "plan says", "recorder"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in measured:
        itl = row.itl_ms
        gaps = (None, None, None) if itl is None else (itl.p50, itl.p90, itl.p99)
        planned = sum(row.predicted_ms.values()) if row.predicted_ms else None
        table.add_row(
            row.method,
            *(_ms(_phase(row, key)) for key in phases.values()),
            f"[bold]{_ms(row.tpot_ms)}[/]",
            *(_ms(value) for value in (*gaps, row.limit_ms, planned)),
            _or_dash(row.recorder_ratio, "{:.2%}".format),
        )
    return table


def _ms(value: float | None) -> str:
    return _or_dash(value, "{:.2f}".format)


def _phase(row: ProfileRow, key: str) -> float | None:
    value: float | None = getattr(row.phases_ms, key) if key in PhasesMs.model_fields else None
    return value


def _costs(rows: Sequence[ProfileRow]) -> Table:
    """What a row took before its first step, what it holds, reads and misses."""
    table = _table()
    columns: dict[str, Callable[[ProfileRow], Any]] = {
        "TTFT": lambda row: _or_dash(row.ttft_s, human_seconds),
        "fill": lambda row: _or_dash(row.fill_s, human_seconds),
        "index": lambda row: _or_dash(row.index_build_s, human_seconds),
        "device peak": lambda row: _or_dash(row.memory_bytes.device_peak, human_bytes),
        "resident KV": lambda row: _or_dash(row.resident_kv_bytes, human_bytes),
        "host KV": lambda row: _or_dash(row.memory_bytes.host_kv, human_bytes),
        "host index": lambda row: _or_dash(row.memory_bytes.host_index, human_bytes),
        "process peak": lambda row: _or_dash(row.memory_bytes.host_peak, human_bytes),
        "read per token": lambda row: _or_dash(_read(row), human_bytes),
        "scored": lambda row: percent(row.work.scored_ratio),
        "recall": lambda row: _estimate(None if row.audit is None else row.audit.recall_at_k),
        "missed mass": lambda row: _estimate(None if row.audit is None else row.audit.missed_mass),
    }
    shown = [row for row in rows if row.tpot_ms is not None]
    cells = {name: [str(cell(row)) for row in shown] for name, cell in columns.items()}
    cells = {name: texts for name, texts in cells.items() if set(texts) - {"-"}}
    table.add_column("method", no_wrap=True)
    for name in cells:
        table.add_column(name, justify="right", no_wrap=True)
    for number, row in enumerate(shown):
        table.add_row(row.method, *(texts[number] for texts in cells.values()))
    return table


def _read(row: ProfileRow) -> int | None:
    counts = [count for count in row.bytes_per_token.model_dump().values() if count is not None]
    return sum(counts) if counts else None


def _or_dash(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def _estimate(found: EstimateReport | None) -> str:
    if found is None:
        return "-"
    half = "" if found.half_width is None else f" ± {found.half_width:.3f}"
    return f"{found.mean:.3f}{half}"


def _spread(row: ProfileRow | None) -> str:
    if row is None or row.itl_ms is None:
        return "-"
    first, third = quartiles(row.step_ms)
    return f"{row.itl_ms.p50:.2f} ({first:.2f} to {third:.2f})"
