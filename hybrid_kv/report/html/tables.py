"""The tables of a profile: what its figures show, in numbers, a click from each row's settings."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.page_blocks import StyledCell, Table
from hybrid_kv.report.html.page_entries import (
    MEMORY,
    PHASES,
    Entry,
    by_name,
    cut_short,
    phase_name,
    phases,
    tiers,
)
from hybrid_kv.report.profile import (
    ATTENDED,
    GAPS,
    LIMIT,
    LOOKS,
    MASS_ERROR,
    MISSED,
    OUTPUT_ERROR,
    PLANNED,
    READ,
    RECALL,
    RECORDER,
    SCORED,
    START,
    TPOT,
    BytesPerToken,
    MeasuredRun,
    ProfileRow,
    Quantity,
    Unit,
)
from hybrid_kv.report.run import AuditedHead, Environment, EstimateReport

Value = Callable[[MeasuredRun], str | None]


def context_table(title: str, entries: Sequence[Entry], prefix: str, value: Value) -> Table:
    """Methods down, contexts across, as RetrievalAttention's table of latencies (its Table 4).

    Each number leads to the settings of its row; one that was not measured says why.
    """
    contexts = sorted({entry.row.context_tokens for entry in entries})
    rows = []
    for name, group in by_name(entries).items():
        cells = {e.row.context_tokens: _linked(e, prefix, value(e.row)) for e in group}
        rows.append([name, *(cells.get(context, numbers.NOTHING) for context in contexts)])
    return Table(title, ["method", *map(numbers.tokens, contexts)], rows)


def _linked(entry: Entry, prefix: str, text: str | None) -> StyledCell:
    status = entry.row.status if isinstance(entry.row, ProfileRow) else "ok"
    mark = "†" if cut_short(entry.row) and text is not None else ""
    link = f"#{prefix}row-{entry.anchor}"
    shown = (numbers.NOTHING if status == "ok" else status) if text is None else f"{text}{mark}"
    return StyledCell(shown, href=link, kind="quiet" if text is None else "")


def quantities_table(
    title: str,
    entries: Sequence[Entry],
    quantities: Sequence[Quantity],
    more: Mapping[str, Callable[[Entry], str | StyledCell]] = MappingProxyType({}),
) -> Table:
    """A line for every row, a column for every quantity, and further columns by their heading."""
    rows: list[list[str | StyledCell]] = [
        [
            entry.name,
            *(shown(quantity, entry.row) for quantity in quantities),
            *(found(entry) for found in more.values()),
        ]
        for entry in entries
    ]
    return Table(title, ["method", *map(heading, quantities), *more], rows)


def heading(quantity: Quantity) -> str:
    """The title, with the unit where its numbers have none."""
    return f"{quantity.title}, ms" if quantity.unit == "ms" else quantity.title


def shown(quantity: Quantity, row: MeasuredRun) -> str:
    """A value of a row as the page writes it."""
    return _SHOWN[quantity.unit](quantity.of(row))


def plus_minus(estimate: EstimateReport) -> str:
    """' ± 1.2%', or nothing from one look."""
    return "" if estimate.half_width is None else f" ± {numbers.percent(estimate.half_width)}"


def times(value: float | None, base: float | None) -> str:
    """Ratio of a value to the base, or nothing where one is unknown."""
    return numbers.ratio(value / base) if value is not None and base else ""


def _estimate(estimate: EstimateReport | None) -> str:
    if estimate is None:
        return numbers.NOTHING
    return f"{numbers.percent(estimate.mean)}{plus_minus(estimate)}"


_SHOWN: Mapping[Unit, Callable[[Any], str]] = {
    "ms": numbers.short,
    "seconds": numbers.seconds,
    "bytes": numbers.size,
    "share": numbers.percent,
    "count": numbers.count,
    "estimate": _estimate,
}


def gaps_table(title: str, entries: Sequence[Entry]) -> Table:
    """Mean and percentiles of the gaps between tokens, and what the recorder took of them."""
    return quantities_table(title, entries, (TPOT, *GAPS, RECORDER), {"steps": _steps})


def _steps(entry: Entry) -> str:
    return str(len(entry.row.step_ms)) if isinstance(entry.row, ProfileRow) else numbers.NOTHING


def start_table(title: str, entries: Sequence[Entry]) -> Table:
    """Table of the time before the first token: prefill, index builds, or filling."""
    return quantities_table(title, entries, START)


_ABREAST = 8
"""Methods in one table that has them across; more take another."""


def phases_tables(title: str, entries: Sequence[Entry]) -> list[Table]:
    """Milliseconds and shares: phases down, in the groups of RetrievalAttention's Table 5, methods
    across, because ten phases are wider than a page.
    """
    starts = range(0, len(entries), _ABREAST)
    return [_phases_table(title, entries[start : start + _ABREAST]) for start in starts]


def _phases_table(title: str, entries: Sequence[Entry]) -> Table:
    found = {entry.name: phases(entry.row) for entry in entries}
    totals = {name: sum(times.values()) for name, times in found.items()}
    seen = {phase for times in found.values() for phase, value in times.items() if value}
    rows: list[list[str | StyledCell]] = [
        ["sum (of TPOT)", *(_against(totals[e.name], e.row.tpot_ms) for e in entries)]
    ]
    for group, members in PHASES.items():
        for phase in members:
            if phase in seen:
                shares = (_share(found[e.name].get(phase), totals[e.name]) for e in entries)
                rows.append([StyledCell(phase_name(phase, seen), group), *shares])
    return Table(title, ["phase, ms", *(entry.name for entry in entries)], rows)


def _share(value: float | None, total: float) -> StyledCell:
    if value is None or not total:
        return StyledCell(numbers.NOTHING, kind="quiet")
    if not value:
        return StyledCell("0", kind="quiet")
    return StyledCell(numbers.short(value), numbers.percent(value / total))


def _against(total: float, tpot_ms: float | None) -> StyledCell:
    if not total or not tpot_ms:
        return StyledCell(numbers.NOTHING, kind="quiet")
    return StyledCell(numbers.short(total), numbers.percent(total / tpot_ms))


def quality_table(title: str, entries: Sequence[Entry]) -> Table:
    """Table of what the audit found, and what was read for it."""
    audit = (RECALL, MISSED, MASS_ERROR, OUTPUT_ERROR, LOOKS)
    return quantities_table(title, entries, (TPOT, *audit, ATTENDED, SCORED))


def memory_table(title: str, entries: Sequence[Entry]) -> Table:
    """Bytes by tier, their sum, and the peak of the process."""
    rows = []
    for entry in entries:
        memory, found = entry.row.memory_bytes, tiers(entry.row.memory_bytes)
        sizes = [numbers.size(found.get(tier)) for tier in MEMORY]
        total = numbers.size(sum(found.values())) if found else numbers.NOTHING
        rows.append([entry.name, *sizes, total, numbers.size(memory.host_peak)])
    names = [name for name, _ in MEMORY.values()]
    return Table(title, ["method", *names, "sum", "process, peak"], rows)


def limit_table(title: str, entries: Sequence[Entry]) -> Table:
    """Measured against the bytes' own time and against the plan."""
    profiled = [entry for entry in entries if isinstance(entry.row, ProfileRow)]
    more: dict[str, Callable[[Entry], str | StyledCell]] = {
        "over limit": lambda entry: _times(entry.row, LIMIT),
        "cache over its limit": lambda entry: _times_of_cache(entry.row),
        "over prediction": lambda entry: _times(entry.row, PLANNED),
        "prediction by tier, ms": _by_tier,
    }
    return quantities_table(title, profiled, (TPOT, LIMIT, PLANNED), more)


def _times_of_cache(row: MeasuredRun) -> str:
    if not isinstance(row, ProfileRow):
        return numbers.NOTHING
    return times(row.cache_ms, row.cache_limit_ms) or numbers.NOTHING


def _times(row: MeasuredRun, base: Quantity) -> str:
    return times(row.tpot_ms, base.of(row)) or numbers.NOTHING


def _by_tier(entry: Entry) -> str | StyledCell:
    predicted = entry.row.predicted_ms if isinstance(entry.row, ProfileRow) else {}
    parts = ", ".join(f"{tier} {numbers.short(ms)}" for tier, ms in predicted.items())
    return StyledCell(parts, kind="listed") if parts else numbers.NOTHING


def bytes_table(title: str, entries: Sequence[Entry]) -> Table:
    """Bytes that a decode step reads, by purpose."""
    rows = [(entry.name, entry.row) for entry in entries if isinstance(entry.row, ProfileRow)]
    kinds = [
        kind
        for kind in BytesPerToken.model_fields
        if any(getattr(row.bytes_per_token, kind) for _, row in rows)
    ]
    cells = [
        [
            name,
            *(numbers.size(getattr(row.bytes_per_token, kind)) for kind in kinds),
            shown(READ, row),
        ]
        for name, row in rows
    ]
    return Table(title, ["method", *(kind.replace("_", " ") for kind in kinds), "sum"], cells)


def worst_heads_table(heads: Sequence[AuditedHead]) -> Table:
    """The heads that missed most."""
    worst = sorted(heads, key=lambda head: head.missed_mass, reverse=True)[:10]
    rows = [
        [
            f"{head.layer} · {head.kv_head}",
            numbers.percent(head.missed_mass),
            numbers.NOTHING if head.mass_error is None else numbers.percent(head.mass_error),
            numbers.percent(head.recall_at_k),
            numbers.percent(head.output_error),
            str(head.looks),
        ]
        for head in worst
    ]
    names = ["layer · head", "missed", "mass error", "recall@k", "error", "looks"]
    return Table(f"The {len(worst)} worst heads", names, rows)


def machine(environment: Environment) -> dict[str, str | None]:
    """Processor, memory, device and versions, as facts."""
    cpu = environment.cpu
    versions = (f"{name} {version}" for name, version in environment.versions.items() if version)
    return {
        "Device": environment.device or "none",
        "Processor": f"{cpu.model}, {cpu.cores} cores, {cpu.threads} threads",
        "Instructions": ", ".join(cpu.features) or None,
        "Host memory": numbers.size(environment.ram_bytes),
        "System": environment.platform,
        "Versions": ", ".join(versions),
    }


EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Where one colour ends and the next begins: h0 is below the first, h8 above the last."""


def heat_table(entry: Entry) -> Table:
    """Missed mass of a row: layers downwards, KV heads to the right, by colour and in words."""
    heads = entry.row.audit.heads if entry.row.audit else ()
    cells = {(head.layer, head.kv_head): head for head in heads}
    columns = range(max((head.kv_head for head in heads), default=0) + 1)
    rows: list[list[str | StyledCell]] = []
    for layer in sorted({head.layer for head in heads}):
        found = (cells.get((layer, column)) for column in columns)
        rows.append([str(layer), *map(_heat_cell, found)])
    title = f"Missed mass of {entry.place}, %: layers down, KV heads across"
    return Table(title, ["layer", *map(str, columns)], rows, heat=True)


def _heat_cell(head: AuditedHead | None) -> StyledCell:
    if head is None:
        return StyledCell(numbers.NOTHING, kind="none", tip="was not looked at")
    share = 100 * max(0.0, head.missed_mass)
    return StyledCell(f"{share:.2g}", kind=f"h{heat_step(head.missed_mass)}", tip=heat_tip(head))


def heat_step(missed: float) -> int:
    """The number of a share's colour, the same for every row and run."""
    return bisect_right(EDGES, missed)


def heat_tip(head: AuditedHead) -> str:
    """Words on what a head missed."""
    recall = "" if head.recall_at_k is None else f", recall {numbers.percent(head.recall_at_k)}"
    return (
        f"layer {head.layer}, KV head {head.kv_head}: missed mass "
        f"{numbers.percent(head.missed_mass)}{recall}, looks {head.looks}"
    )


def settings_table(title: str, settings: Mapping[str, object]) -> Table:
    """Names and values of a configuration, each value as JSON has it."""
    rows = [[name, plain(value)] for name, value in settings.items()]
    return Table(title, ["setting", "value"], rows, words=True)


def plain(value: object) -> str:
    """A value of a JSON document as people read it: text without quotes, lists with commas."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and not any(isinstance(v, dict | list) for v in value):
        return ", ".join(map(str, value)) or "none"
    return json.dumps(value, default=str, ensure_ascii=False)
