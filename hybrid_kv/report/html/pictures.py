"""The figures of a profile, of single runs and of a comparison: from rows to pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.canvas import Canvas, Marker, Named, Picture
from hybrid_kv.report.html.figures import (
    Bar,
    BarPart,
    LinePoint,
    RangePoint,
    RangeRow,
    Series,
    Spot,
    bars_figure,
    fitted,
    linear,
    lines_figure,
    ranges_figure,
    spots_figure,
)
from hybrid_kv.report.html.page_entries import (
    MEMORY,
    Entry,
    by_name,
    cut_short,
    phase_name,
    phases,
    tiers,
)
from hybrid_kv.report.html.tables import heat_step, heat_tip, plus_minus, times
from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.report.run import EstimateReport

Quality = Literal["recall", "attended"]


def tpot_figure(entries: Sequence[Entry], width: float) -> Picture:
    """Mean time per token by context, with whiskers from the median to the 99th percentile."""
    series = [
        Series(name, group[0].look, tuple(map(_tpot_sample, group)))
        for name, group in by_name(entries).items()
    ]
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


def ttft_figure(entries: Sequence[Entry], width: float) -> Picture:
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


def phases_figure(entries: Sequence[Entry], where: str, width: float) -> Picture:
    """Figure of a decode step's time by phase."""
    bars = []
    for entry in entries:
        found = phases(entry.row)
        parts = (
            BarPart(phase_name(phase, found), f"p_{phase}", value) for phase, value in found.items()
        )
        bars.append(Bar(entry.name, tuple(parts)))
    name, title = f"phases-{where}", f"Where a decode step goes, {where}"
    return bars_figure(name, title, "ms per token", bars, width, numbers.short)


def memory_figure(entries: Sequence[Entry], where: str, width: float) -> Picture:
    """Bytes by tier, in GiB."""
    bars = []
    for entry in entries:
        found = tiers(entry.row.memory_bytes)
        parts = (BarPart(*MEMORY[tier], count / 2**30) for tier, count in found.items())
        bars.append(Bar(entry.name, tuple(parts)))
    name, title = f"memory-{where}", f"Memory by tier, {where}"
    return bars_figure(name, title, "GiB", bars, width, lambda gib: numbers.size(gib * 2**30))


def qualities(entries: Sequence[Entry]) -> list[Quality]:
    """Qualities that the audits of these rows can be drawn for."""
    kinds: tuple[Quality, ...] = ("attended", "recall")
    return [kind for kind in kinds if any(_estimate(entry, kind) for entry in entries)]


def quality_figure(entries: Sequence[Entry], quality: Quality, where: str, width: float) -> Picture:
    """Figure of what the search found against time per token, of rows that were audited for it."""
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
    spent = [spot.x for spot in spots] + ([reference[1]] if reference else [])
    least = min(spot.y - (spot.half_width or 0.0) for spot in spots)
    floor = max(0.0, 1 - 1.15 * max(0.01, 1 - max(0.0, least)))
    return spots_figure(
        f"{quality}-{where}",
        f"{title}, {where}",
        ("time per token, ms", axis),
        spots,
        width,
        scales=(
            fitted(spent, log=max(spent) > 3 * min(spent)),
            linear(floor, 1.0 + 0.04 * (1 - floor), 5),
        ),
        show=lambda share: f"{100 * share:.4g}%",
        reference=reference,
    )


def _spot(entry: Entry, estimate: EstimateReport, quality: Quality) -> Spot:
    assert entry.row.tpot_ms is not None
    shown = f"{numbers.percent(estimate.mean)}{plus_minus(estimate)}"
    word = "recall" if quality == "recall" else "mass attended"
    tip = f"{entry.place}: {word} {shown} at {numbers.milliseconds(entry.row.tpot_ms)}"
    time, half = entry.row.tpot_ms, estimate.half_width
    return Spot(entry.name, entry.look, time, estimate.mean, tip, half)


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


def heads_figure(entry: Entry, width: float) -> Picture:
    """Missed mass by layer and KV head of one row, for a file; pages have it as a table."""
    heads = entry.row.audit.heads if entry.row.audit else ()
    cells = {
        (head.layer, head.kv_head): (heat_step(head.missed_mass), heat_tip(head)) for head in heads
    }
    where = numbers.tokens(entry.row.context_tokens)
    title = f"Missed mass of {entry.name}, {where}"
    return heat_figure(f"heads-{entry.name}-{where}", title, cells, width)


def heat_figure(
    name: str, title: str, cells: dict[tuple[int, int], tuple[int, str]], width: float
) -> Picture:
    """A heat map for a file: rows downwards and columns by number, each with a step and a tip."""
    rows, columns = sorted({row for row, _ in cells}), sorted({column for _, column in cells})
    high = min(22.0, max(9.0, 520 / max(1, len(rows))))
    height = 40 + high * len(rows)

    def draw(canvas: Canvas) -> None:
        from matplotlib.patches import Rectangle

        axes = canvas.axes(44, 24, 4, 14)
        axes.grid(False)
        axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
        axes.set_xticks([i + 0.5 for i in range(len(columns))], [f"{c}" for c in columns])
        every = max(1, -(-14 // int(high)))
        places = range(0, len(rows), every)
        axes.set_yticks([i + 0.5 for i in places], [f"{rows[i]}" for i in places])
        axes.xaxis.tick_top()
        for (row, column), (step, tip) in cells.items():
            corner = (columns.index(column), rows.index(row))
            box = Rectangle(corner, 0.95, 0.95, linewidth=0, facecolor=canvas.paint(f"h{step}"))
            canvas.tipped(box, tip)
            axes.add_patch(box)

    told = "; ".join(tip for _, tip in cells.values())
    return Picture(
        name, title, f"Rows downwards, columns to the right. {told}.", width, height, draw
    )


LIMIT, PREDICTED = "time of the bytes alone", "predicted by plan"


def limit_figure(entries: Sequence[Entry], where: str, width: float) -> Picture:
    """Figure of measured times, between what the bytes alone take and what `plan` says."""
    rows = [_limit_row(entry) for entry in entries if isinstance(entry.row, ProfileRow)]
    scale = fitted(point.value for row in rows for point in row.points)
    return ranges_figure(
        f"limit-{where}",
        f"Measured, predicted, and the limit of bandwidth, {where}",
        f"ms per token{', log scale' if scale.log else ''}",
        rows,
        width,
        scale=scale,
        legend=(
            Named(LIMIT, "soft", "up"),
            Named(PREDICTED, "soft", "diamond", hollow=True),
            Named("measured", "accent", "circle"),
        ),
    )


def _limit_row(entry: Entry) -> RangeRow:
    row = entry.row
    assert isinstance(row, ProfileRow)
    known = [
        RangePoint(value, marker, f"{entry.place}: {what} {numbers.milliseconds(value)}")
        for value, marker, what in (
            (row.limit_ms, Marker("up", "soft"), LIMIT),
            (row.planned_ms, Marker("diamond", "soft", hollow=True), PREDICTED),
            (row.tpot_ms, Marker("circle", "accent"), "measured"),
        )
        if value is not None
    ]
    ends = [point.value for point in known]
    span = (min(ends), max(ends)) if len(ends) > 1 else None
    return RangeRow(entry.name, tuple(known), span, note=times(row.tpot_ms, row.limit_ms))
