"""Two profiles side by side: ratios by method and context, and what differs between the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

from hybrid_kv.errors import ConfigError
from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.elements import Html, el, join
from hybrid_kv.report.html.entries import Entry, by_context, entries_of, measured, tiers
from hybrid_kv.report.html.figures.ranges import RangePoint, RangeRow, ranges_figure
from hybrid_kv.report.html.figures.scales import Scale
from hybrid_kv.report.html.profile_tables import plain
from hybrid_kv.report.html.ratios import METHOD, Ratio, ratio_of_medians
from hybrid_kv.report.html.scene import Scene
from hybrid_kv.report.html.sources import ComparedProfiles
from hybrid_kv.report.html.widgets import (
    Section,
    StyledCell,
    disclosure,
    figure,
    lines,
    note,
    table,
    tabs,
)
from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.report.schema import ProfileReport, RatioReport

_COLOURS = {-1: "good", 0: "soft", 1: "bad"}
_WORDS = {-1: "less", 0: "no difference shown", 1: "more"}


@dataclass(frozen=True, slots=True)
class Pair:
    """A method at a context that both runs have measured."""

    first: Entry
    second: Entry

    @property
    def rows(self) -> tuple[ProfileRow, ProfileRow]:
        first, second = self.first.row, self.second.row
        assert isinstance(first, ProfileRow)
        assert isinstance(second, ProfileRow)
        return first, second

    @property
    def tpot(self) -> Ratio:
        """Of the steps where both have them, else of the means, without an interval."""
        first, second = self.rows
        if first.step_ms and second.step_ms:
            return ratio_of_medians(first.step_ms, second.step_ms)
        assert first.tpot_ms
        assert second.tpot_ms
        return Ratio(second.tpot_ms / first.tpot_ms)


def pairs_of(one: ComparedProfiles) -> list[Pair]:
    """What both have measured, in the first one's order.

    Raises:
        ConfigError: they share no method at a context.
    """
    others = {
        (entry.name, entry.row.context_tokens): entry
        for entry in entries_of(one.second.rows)
        if entry.row.tpot_ms is not None
    }
    pairs = [
        Pair(entry, others[entry.name, entry.row.context_tokens])
        for entry in measured(entries_of(one.first.rows))
        if (entry.name, entry.row.context_tokens) in others
    ]
    if not pairs:
        raise ConfigError(
            f"profiles that are compared must share a method at a context, got '{one.names[0]}' "
            f"and '{one.names[1]}' with nothing in common; make a report of each"
        )
    return pairs


def ratios_of(one: ComparedProfiles) -> list[RatioReport]:
    """The ratios of TPOT as a document has them."""
    return [
        RatioReport(
            method=pair.first.name,
            context_tokens=pair.first.row.context_tokens,
            first=one.names[0],
            second=one.names[1],
            tpot_ratio=pair.tpot.value,
            low=pair.tpot.low,
            high=pair.tpot.high,
        )
        for pair in pairs_of(one)
    ]


def compare_sections(one: ComparedProfiles, prefix: str) -> list[Section]:
    """The ratios, then what differs between the runs beside their figures."""
    pairs, names = pairs_of(one), one.names
    groups = by_context([pair.first for pair in pairs])
    panels = []
    for context in groups:
        where = numbers.tokens(context)
        group = [pair for pair in pairs if pair.first.row.context_tokens == context]
        draw = partial(ratio_figure, group, where)
        panels.append(
            (
                where,
                figure(draw, f"{prefix}ratio-{where}", "Coloured where the interval excludes 1."),
            )
        )
    ratios = join(
        _summary(pairs, names),
        _matrix("TPOT: ratio of medians, 95% interval", pairs, lambda pair: _interval(pair.tpot)),
        tabs(f"{prefix}ratio", "Context", panels),
        disclosure(
            "Time to first token, and memory",
            _matrix("TTFT: ratio", pairs, lambda pair: _once(pair, _ttft)),
            _matrix("Memory, all tiers: ratio", pairs, lambda pair: _once(pair, _stored)),
            note("Measured once in each run: these ratios have no interval, and no colour."),
        ),
        note(METHOD),
    )
    found = differences(one.first, one.second)
    body = (
        table("Facts and settings", ["what", *names], found, words=True)
        if found
        else note("Machine, versions, arguments and settings are the same.")
    )
    return [
        Section(f"{prefix}ratios", "Time and memory, second run over first", ratios),
        Section(f"{prefix}differences", "What differs between the runs", body),
    ]


def _summary(pairs: list[Pair], names: tuple[str, str]) -> Html:
    """How many rows became faster, and by how much in the middle."""
    ratios = [pair.tpot for pair in pairs]
    count = Counter(ratio.verdict for ratio in ratios)
    middle = numbers.ratio(median(ratio.value for ratio in ratios))
    return join(
        el(
            "p",
            "Of ",
            f"{len(pairs)} rows that both runs have, {names[1]} is ",
            el("b", f"faster in {count[-1]}, slower in {count[1]}"),
            f", and {count[0]} are undecided. The median ratio of TPOT is {middle}.",
            class_="lead",
        ),
        note(
            f"Below 1, {names[1]} needs less than {names[0]}. ▼ and ▲, in colour: the interval "
            "excludes 1."
        ),
    )


def _matrix(title: str, pairs: list[Pair], cell: Callable[[Pair], StyledCell]) -> Html:
    """Methods down, contexts across."""
    contexts = sorted({pair.first.row.context_tokens for pair in pairs})
    cells = {(pair.first.name, pair.first.row.context_tokens): cell(pair) for pair in pairs}
    rows = [
        [name, *(cells.get((name, context), numbers.NOTHING) for context in contexts)]
        for name in dict.fromkeys(pair.first.name for pair in pairs)
    ]
    return table(title, ["method", *map(numbers.tokens, contexts)], rows)


def _interval(ratio: Ratio) -> StyledCell:
    mark = {-1: "▼ ", 0: "", 1: "▲ "}[ratio.verdict]
    known = ratio.low is not None and ratio.high is not None
    spread = f"{ratio.low:.3f} – {ratio.high:.3f}" if known else "no interval"
    content = lines([f"{mark}{numbers.ratio(ratio.value)}", el("small", spread)])
    return StyledCell(content, {-1: "good", 0: None, 1: "bad"}[ratio.verdict])


def _once(pair: Pair, value: Callable[[ProfileRow], float | None]) -> StyledCell:
    first, second = map(value, pair.rows)
    return StyledCell(numbers.ratio(second / first) if first and second else numbers.NOTHING)


def _ttft(row: ProfileRow) -> float | None:
    return row.ttft_s


def _stored(row: ProfileRow) -> float | None:
    return sum(tiers(row.memory_bytes).values())


def ratio_figure(pairs: list[Pair], where: str, width: float) -> Scene:
    """TPOT of one context, second over first, one line per method."""
    rows = []
    for pair in pairs:
        ratio = pair.tpot
        tip = f"{pair.first.place}: TPOT {_words(ratio)}, {_WORDS[ratio.verdict]}"
        colour = _COLOURS[ratio.verdict]
        point = RangePoint(ratio.value, "circle", colour, tip, hollow=not ratio.verdict)
        span = None if ratio.low is None or ratio.high is None else (ratio.low, ratio.high)
        rows.append(RangeRow(pair.first.name, (point,), span, colour, numbers.ratio(ratio.value)))
    ends = [end for row in rows for end in (*(row.span or ()), row.points[0].value)]
    low, high = min(0.95, *ends), max(1.05, *ends)

    def scale(start: float, end: float) -> Scale:
        return Scale(low / 1.02, high * 1.02, start, end, log=high / low > 4)

    return ranges_figure(
        f"ratio-{where}",
        f"TPOT, second run over first, {where}",
        "ratio of median step times, 95% interval",
        rows,
        width,
        scale=scale,
        show=lambda value: f"{value:g}",
        reference=1.0,
    )


def _words(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return numbers.ratio(ratio.value)
    return f"{numbers.ratio(ratio.value)} [{ratio.low:.3f}, {ratio.high:.3f}]"


def differences(first: ProfileReport, second: ProfileReport) -> list[list[Html]]:
    """Settings and facts of the runs that are not the same: name, first, second."""
    facts = [_flat(_about(report)) for report in (first, second)]
    rows = [entries_of(report.rows) for report in (first, second)]
    settings = [{e.place: _flat(dict(e.row.config)) for e in entries} for entries in rows]
    for place in settings[0]:
        if place in settings[1]:
            for flat, own in zip(facts, settings, strict=True):
                flat.update({f"{place}: {key}": value for key, value in own[place].items()})
    keys = dict.fromkeys((*facts[0], *facts[1]))
    absent = "–"
    return [
        [join(key), *(plain(flat.get(key, absent)) for flat in facts)]
        for key in keys
        if facts[0].get(key, absent) != facts[1].get(key, absent)
    ]


def _about(report: ProfileReport) -> dict[str, object]:
    return report.model_dump(exclude={"rows", "interrupted", "schema_", "command"})


def _flat(values: Mapping[str, object], before: str = "") -> dict[str, object]:
    """Nested keys joined by dots."""
    found: dict[str, object] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            found |= _flat(value, f"{name}.")
        else:
            found[name] = value
    return found
