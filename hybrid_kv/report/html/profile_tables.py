"""The tables of a profile: what its figures show, in numbers, a click from each row's settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.elements import Child, Html, el, join
from hybrid_kv.report.html.entries import (
    MEMORY,
    PHASES,
    Entry,
    by_name,
    cut_short,
    phase_name,
    phases,
    tiers,
)
from hybrid_kv.report.html.profile_figures import plus_minus, times
from hybrid_kv.report.html.widgets import lines, table
from hybrid_kv.report.profile import BytesPerToken, ProfileRow
from hybrid_kv.report.quantities import (
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
    MeasuredRun,
    Quantity,
    Unit,
)
from hybrid_kv.report.run import AuditedHead, EstimateReport

Value = Callable[[MeasuredRun], str | None]


def context_table(title: str, entries: Sequence[Entry], prefix: str, value: Value) -> Html:
    """Methods down, contexts across, as RetrievalAttention's table of latencies (its Table 4).

    Each number leads to the settings of its row; one that was not measured says why.
    """
    contexts = sorted({entry.row.context_tokens for entry in entries})
    rows = []
    for name, group in by_name(entries).items():
        cells = {e.row.context_tokens: _linked(e, prefix, value(e.row)) for e in group}
        rows.append([name, *(cells.get(context, numbers.NOTHING) for context in contexts)])
    return table(title, ["method", *map(numbers.tokens, contexts)], rows)


def _linked(entry: Entry, prefix: str, text: str | None) -> Html:
    status = entry.row.status if isinstance(entry.row, ProfileRow) else "ok"
    mark = "†" if cut_short(entry.row) and text is not None else ""
    link = f"#{prefix}row-{entry.anchor}"
    shown = (numbers.NOTHING if status == "ok" else status) if text is None else f"{text}{mark}"
    return el("a", shown, href=link, class_="quiet" if text is None else None)


def quantities_table(
    title: str,
    entries: Sequence[Entry],
    quantities: Sequence[Quantity],
    more: Mapping[str, Callable[[Entry], Child]] = MappingProxyType({}),
) -> Html:
    """A line for every row, a column for every quantity, and further columns by their heading."""
    rows: list[list[Child]] = [
        [
            entry.name,
            *(shown(quantity, entry.row) for quantity in quantities),
            *(cell(entry) for cell in more.values()),
        ]
        for entry in entries
    ]
    return table(title, ["method", *map(heading, quantities), *more], rows)


def heading(quantity: Quantity) -> str:
    """The title, with the unit where its numbers have none."""
    return f"{quantity.title}, ms" if quantity.unit == "ms" else quantity.title


def shown(quantity: Quantity, row: MeasuredRun) -> str:
    """A value of a row as the page writes it."""
    return _SHOWN[quantity.unit](quantity.of(row))


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


def gaps_table(title: str, entries: Sequence[Entry]) -> Html:
    """Mean and percentiles of the gaps between tokens, and what the recorder took of them."""
    return quantities_table(title, entries, (TPOT, *GAPS, RECORDER), {"steps": _steps})


def _steps(entry: Entry) -> str:
    return str(len(entry.row.step_ms)) if isinstance(entry.row, ProfileRow) else numbers.NOTHING


def start_table(title: str, entries: Sequence[Entry]) -> Html:
    """What happens before the first token: prefill, index builds, or filling."""
    return quantities_table(title, entries, START)


def phases_table(title: str, entries: Sequence[Entry]) -> Html:
    """Milliseconds and shares: phases down, in the groups of RetrievalAttention's Table 5, methods
    across, because ten phases are wider than a page.
    """
    found = {entry.name: phases(entry.row) for entry in entries}
    totals = {name: sum(times.values()) for name, times in found.items()}
    seen = {phase for times in found.values() for phase, value in times.items() if value}
    rows: list[list[Child]] = [
        ["sum (of TPOT)", *(_against(totals[e.name], e.row.tpot_ms) for e in entries)]
    ]
    for group, members in PHASES.items():
        for phase in members:
            if phase in seen:
                label = lines([phase_name(phase, seen), el("small", group)])
                shares = (_share(found[e.name].get(phase), totals[e.name]) for e in entries)
                rows.append([label, *shares])
    return table(title, ["phase, ms", *(entry.name for entry in entries)], rows)


def _share(value: float | None, total: float) -> Html:
    if value is None or not total:
        return el("span", numbers.NOTHING, class_="quiet")
    if not value:
        return el("span", "0", class_="quiet")
    return lines([numbers.short(value), el("small", numbers.percent(value / total))])


def _against(total: float, tpot_ms: float | None) -> Html:
    if not total or not tpot_ms:
        return el("span", numbers.NOTHING, class_="quiet")
    return lines([numbers.short(total), el("small", numbers.percent(total / tpot_ms))])


def quality_table(title: str, entries: Sequence[Entry]) -> Html:
    """What the audit found, and what was read for it."""
    audit = (RECALL, MISSED, MASS_ERROR, OUTPUT_ERROR, LOOKS)
    return quantities_table(title, entries, (TPOT, *audit, ATTENDED, SCORED))


def memory_table(title: str, entries: Sequence[Entry]) -> Html:
    """Bytes by tier, their sum, and the peak of the process."""
    rows = []
    for entry in entries:
        memory, found = entry.row.memory_bytes, tiers(entry.row.memory_bytes)
        sizes = [numbers.size(found.get(tier)) for tier in MEMORY]
        total = numbers.size(sum(found.values())) if found else numbers.NOTHING
        rows.append([entry.name, *sizes, total, numbers.size(memory.host_peak)])
    names = [name for name, _ in MEMORY.values()]
    return table(title, ["method", *names, "sum", "process, peak"], rows)


def limit_table(title: str, entries: Sequence[Entry]) -> Html:
    """Measured against the bytes' own time and against the plan."""
    profiled = [entry for entry in entries if isinstance(entry.row, ProfileRow)]
    more = {
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


def _by_tier(entry: Entry) -> Child:
    predicted = entry.row.predicted_ms if isinstance(entry.row, ProfileRow) else {}
    parts = ", ".join(f"{tier} {numbers.short(ms)}" for tier, ms in predicted.items())
    return el("small", parts) if parts else numbers.NOTHING


def bytes_table(title: str, entries: Sequence[Entry]) -> Html:
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
    return table(title, ["method", *(kind.replace("_", " ") for kind in kinds), "sum"], cells)


def worst_heads_table(heads: Sequence[AuditedHead], most: int = 10) -> Html:
    """The heads that missed most."""
    worst = sorted(heads, key=lambda head: head.missed_mass, reverse=True)[:most]
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
    head_ = ["layer · head", "missed", "mass error", "recall@k", "error", "looks"]
    return table(f"The {len(worst)} worst heads", head_, rows)


def settings_table(title: str, settings: dict[str, object]) -> Html:
    """Names and values of a configuration, each value as JSON has it."""
    return table(
        title, ["setting", "value"], [[k, plain(v)] for k, v in settings.items()], words=True
    )


def plain(value: object) -> Html:
    """A value of a JSON document as people read it: text without quotes, lists with commas."""
    if isinstance(value, str):
        return join(value)
    if isinstance(value, list | tuple) and not any(isinstance(v, dict | list) for v in value):
        return join(", ".join(map(str, value)) or "none")
    return join(json.dumps(value, default=str, ensure_ascii=False))
