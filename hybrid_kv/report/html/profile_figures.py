"""The figures of a profile, and of single runs: from rows to scenes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.entries import (
    MEMORY,
    Entry,
    by_name,
    cut_short,
    phase_name,
    phases,
    tiers,
)
from hybrid_kv.report.html.figures.bars import Bar, BarPart, bars_figure
from hybrid_kv.report.html.figures.heat import heat_figure
from hybrid_kv.report.html.figures.lines import LinePoint, Series, lines_figure
from hybrid_kv.report.html.figures.points import Spot, points_figure
from hybrid_kv.report.html.figures.ranges import RangePoint, RangeRow, ranges_figure
from hybrid_kv.report.html.figures.scales import Scale, fitted
from hybrid_kv.report.html.scene import Scene
from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.report.run import EstimateReport

Quality = Literal["recall", "attended"]


def tpot_figure(entries: Sequence[Entry], width: float) -> Scene:
    """Mean time per token by context, with whiskers from the median to the 99th percentile."""
    series = []
    for name, group in by_name(entries).items():
        samples = tuple(_tpot_sample(entry) for entry in group)
        series.append(Series(name, group[0].look, samples))
    title = "Time per output token (TPOT)"
    return lines_figure("tpot", title, "ms per token", series, width, numbers.short)


def _tpot_sample(entry: Entry) -> LinePoint:
    row, gaps = entry.row, entry.row.itl_ms
    assert row.tpot_ms is not None
    spread = (
        "" if gaps is None else f", p50 {numbers.short(gaps.p50)}, p99 {numbers.short(gaps.p99)}"
    )
    cut = ", interrupted" if cut_short(row) else ""
    tip = f"{entry.place}: {numbers.milliseconds(row.tpot_ms)} per token{spread}{cut}"
    low, high = (None, None) if gaps is None else (gaps.p50, gaps.p99)
    return LinePoint(row.context_tokens, row.tpot_ms, tip, low, high, cut_short(row))


def ttft_figure(entries: Sequence[Entry], width: float) -> Scene:
    """Time to the first token by context."""
    series = []
    for name, group in by_name(entries).items():
        samples = tuple(
            LinePoint(
                entry.row.context_tokens,
                entry.row.ttft_s,
                f"{entry.place}: first token after {numbers.seconds(entry.row.ttft_s)}",
                hollow=cut_short(entry.row),
            )
            for entry in group
            if entry.row.ttft_s is not None
        )
        series.append(Series(name, group[0].look, samples))
    title = "Time to first token (TTFT)"
    kept = [one for one in series if one.samples]
    return lines_figure("ttft", title, "seconds", kept, width, numbers.short)


def phases_figure(entries: Sequence[Entry], where: str, width: float) -> Scene:
    """Where a decode step goes."""
    bars = []
    for entry in entries:
        found = phases(entry.row)
        parts = (
            BarPart(phase_name(phase, found), f"p_{phase}", value) for phase, value in found.items()
        )
        bars.append(Bar(entry.name, tuple(parts)))
    name, title = f"phases-{where}", f"Where a decode step goes, {where}"
    return bars_figure(name, title, "ms per token", bars, width, numbers.short)


def memory_figure(entries: Sequence[Entry], where: str, width: float) -> Scene:
    """Bytes by tier, in GiB."""
    bars = []
    for entry in entries:
        found = tiers(entry.row.memory_bytes)
        parts = (BarPart(*MEMORY[tier], count / 2**30) for tier, count in found.items())
        bars.append(Bar(entry.name, tuple(parts)))
    name, title = f"memory-{where}", f"Memory by tier, {where}"
    return bars_figure(name, title, "GiB", bars, width, lambda gib: numbers.size(gib * 2**30))


def qualities(entries: Sequence[Entry]) -> list[Quality]:
    """What the audits of these rows can be drawn for."""
    kinds: tuple[Quality, ...] = ("attended", "recall")
    return [kind for kind in kinds if any(_estimate(entry, kind) for entry in entries)]


def quality_figure(entries: Sequence[Entry], quality: Quality, where: str, width: float) -> Scene:
    """What the search found against time per token, of rows that were audited for it."""
    found = ((entry, _estimate(entry, quality)) for entry in entries)
    spots = [_spot(entry, estimate, quality) for entry, estimate in found if estimate]
    title, axis = {
        "recall": ("Recall against time", "recall@k of the exact best cold entries"),
        "attended": ("Attended mass against time", "softmax mass attended, 1 − missed mass"),
    }[quality]
    full = next((e for e in entries if e.row.method == "full" and e.row.audit is None), None)
    reference = None
    if full is not None and full.row.tpot_ms is not None:
        reference = (f"full, {numbers.milliseconds(full.row.tpot_ms)}", full.row.tpot_ms)
    name = f"{quality}-{where}"
    return points_figure(name, f"{title}, {where}", axis, spots, width, reference)


def _spot(entry: Entry, estimate: EstimateReport, quality: Quality) -> Spot:
    assert entry.row.tpot_ms is not None
    shown = f"{numbers.percent(estimate.mean)}{plus_minus(estimate)}"
    word = "recall" if quality == "recall" else "mass attended"
    tip = f"{entry.place}: {word} {shown} at {numbers.milliseconds(entry.row.tpot_ms)}"
    time, half = entry.row.tpot_ms, estimate.half_width
    return Spot(entry.name, entry.look, time, estimate.mean, half, tip)


def _estimate(entry: Entry, quality: Quality) -> EstimateReport | None:
    audit = entry.row.audit
    if audit is None or entry.row.tpot_ms is None:
        return None
    if quality == "recall":
        return audit.recall_at_k
    missed = audit.missed_mass
    if missed is None:
        return None
    return EstimateReport(mean=1 - missed.mean, half_width=missed.half_width)


def plus_minus(estimate: EstimateReport) -> str:
    """' ± 1.2%', or nothing from one look."""
    return "" if estimate.half_width is None else f" ± {numbers.percent(estimate.half_width)}"


def heads_figure(entry: Entry, width: float) -> Scene:
    """Missed mass by layer and KV head of one row."""
    audit = entry.row.audit
    heads = () if audit is None else audit.heads
    where = numbers.tokens(entry.row.context_tokens)
    name = f"heads-{entry.name}-{where}"
    return heat_figure(name, f"Missed mass of {entry.name}, {where}", heads, width)


LIMIT, PREDICTED = "time of the bytes alone", "predicted by plan"


def limit_figure(entries: Sequence[Entry], where: str, width: float) -> Scene:
    """What was measured, between what the bytes alone take and what `plan` says."""
    rows = [_limit_row(entry) for entry in entries if isinstance(entry.row, ProfileRow)]
    values = [point.value for row in rows for point in row.points]

    def scale(start: float, end: float) -> Scale:
        return fitted(values, start, end)

    kind = ", log scale" if scale(0, 1).log else ""
    return ranges_figure(
        f"limit-{where}",
        f"Measured, predicted, and the limit of bandwidth, {where}",
        f"ms per token{kind}",
        rows,
        width,
        scale=scale,
        show=numbers.tick,
        legend=(
            RangePoint(0, "up", "soft", LIMIT),
            RangePoint(0, "diamond", "soft", PREDICTED, hollow=True),
            RangePoint(0, "circle", "accent", "measured"),
        ),
    )


def _limit_row(entry: Entry) -> RangeRow:
    row = entry.row
    assert isinstance(row, ProfileRow)
    known: list[RangePoint] = []
    if row.limit_ms is not None:
        tip = f"{entry.place}: {LIMIT} {numbers.milliseconds(row.limit_ms)}"
        known.append(RangePoint(row.limit_ms, "up", "soft", tip))
    predicted = row.planned_ms
    if predicted is not None:
        tip = f"{entry.place}: {PREDICTED} {numbers.milliseconds(predicted)}"
        known.append(RangePoint(predicted, "diamond", "soft", tip, hollow=True))
    note = ""
    if row.tpot_ms is not None:
        tip = f"{entry.place}: measured {numbers.milliseconds(row.tpot_ms)}"
        known.append(RangePoint(row.tpot_ms, "circle", "accent", tip))
        note = times(row.tpot_ms, row.limit_ms)
    ends = [point.value for point in known]
    span = (min(ends), max(ends)) if len(ends) > 1 else None
    return RangeRow(entry.name, tuple(known), span, note=note)


def times(value: float | None, base: float | None) -> str:
    """How many times the base a value is, or nothing where one is unknown."""
    return numbers.ratio(value / base) if value is not None and base else ""
