"""Two profiles side by side: ratios by method and context, and what differs between the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

from hybrid_kv.errors import ConfigError
from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.canvas import Marker, Picture
from hybrid_kv.report.html.figures import RangePoint, RangeRow, fitted, linear, ranges_figure
from hybrid_kv.report.html.page_blocks import (
    WIDTH,
    Abreast,
    Details,
    Figure,
    PageBlock,
    Panel,
    Section,
    Strong,
    StyledCell,
    Table,
    Tabs,
    Words,
    note,
)
from hybrid_kv.report.html.page_entries import Entry, by_context, entries_of, measured, tiers
from hybrid_kv.report.html.sources import ComparedProfiles
from hybrid_kv.report.html.tables import plain
from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.report.schema import ProfileReport, RatioReport

RESAMPLES: Final = 2000
LEAST_STEPS: Final = 8
"""Fewer steps than this, and no interval is given."""

METHOD: Final = (
    "Ratio of the medians of the measured steps, second over first. The interval is the middle 95% "
    f"of {RESAMPLES:,} ratios from circular block bootstrap samples of both runs’ steps (blocks of "
    "the cube root of their number, because neighbouring steps are alike; fixed seed). With fewer "
    f"than {LEAST_STEPS} steps there is none. It covers how steps vary within these two runs, not "
    "how two runs on another day would differ; and of twenty rows that do not differ at all, about "
    "one is coloured by chance."
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Second over first; low and high bound the 95% interval, None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> int:
        """-1: surely less, 1: surely more, 0: the interval holds 1 or there is none."""
        if self.low is None or self.high is None:
            return 0
        return 1 if self.low > 1 else -1 if self.high < 1 else 0


def ratio_of_medians(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """The ratio of two runs' step times, with its interval where both have steps enough.

    Raises:
        ValueError: one of them is empty or its median is zero.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if not a.size or not b.size or not np.median(a):
        raise ValueError("a ratio needs steps of both runs that took time")
    value = float(np.median(b) / np.median(a))
    if min(a.size, b.size) < LEAST_STEPS:
        return Ratio(value)
    rng = np.random.default_rng(0)
    ratios = _medians(b, rng) / _medians(a, rng)
    low, high = np.quantile(ratios, [0.025, 0.975]).tolist()
    return Ratio(value, low, high)


def _medians(steps: npt.NDArray[np.float64], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Medians of block bootstrap samples, [RESAMPLES]."""
    block = max(1, round(steps.size ** (1 / 3)))
    blocks = -(-steps.size // block)
    starts = rng.integers(steps.size, size=(RESAMPLES, blocks, 1))
    places = (starts + np.arange(block)).reshape(RESAMPLES, -1)[:, : steps.size] % steps.size
    medians: npt.NDArray[np.float64] = np.median(steps[places], axis=1)
    return medians


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
    """Rows that both have measured, in the first one's order.

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
    panels = []
    for where, group in pairs_by_context(pairs).items():
        caption = "Coloured where the interval excludes 1."
        drawn = Figure(ratio_figure(group, where, WIDTH), f"{prefix}ratio-{where}", caption)
        panels.append(Panel(where, [Abreast([drawn])]))
    ratios: list[PageBlock] = [
        *_summary(pairs, names),
        _matrix("TPOT: ratio of medians, 95% interval", pairs, lambda pair: _interval(pair.tpot)),
        Tabs(f"{prefix}ratio", "Context", panels),
        Details(
            "Time to first token, and memory",
            [
                _matrix("TTFT: ratio", pairs, lambda pair: _once(pair, _ttft)),
                _matrix("Memory, all tiers: ratio", pairs, lambda pair: _once(pair, _stored)),
                note("Measured once in each run: these ratios have no interval, and no colour."),
            ],
        ),
        note(METHOD),
    ]
    found = differences(one.first, one.second)
    body: PageBlock = (
        Table("Facts and settings", ["what", *names], found, words=True)
        if found
        else note("Machine, versions, arguments and settings are the same.")
    )
    return [
        Section(f"{prefix}ratios", "Time and memory, second run over first", ratios),
        Section(f"{prefix}differences", "What differs between the runs", [body]),
    ]


def pairs_by_context(pairs: list[Pair]) -> dict[str, list[Pair]]:
    """Pairs by the name of their context, shortest first."""
    contexts = by_context(pair.first for pair in pairs)
    return {
        numbers.tokens(context): [p for p in pairs if p.first.row.context_tokens == context]
        for context in contexts
    }


def _summary(pairs: list[Pair], names: tuple[str, str]) -> list[PageBlock]:
    """Sentence on how many rows became faster, and the median of by how much."""
    ratios = [pair.tpot for pair in pairs]
    count = Counter(ratio.verdict for ratio in ratios)
    middle = numbers.ratio(median(ratio.value for ratio in ratios))
    lead = (
        f"Of {len(pairs)} rows that both runs have, {names[1]} is ",
        Strong(f"faster in {count[-1]}, slower in {count[1]}"),
        f", and {count[0]} are undecided. The median ratio of TPOT is {middle}.",
    )
    how = (
        f"Below 1, {names[1]} needs less than {names[0]}. ▼ and ▲, in colour: the interval "
        "excludes 1."
    )
    return [Words(lead, "lead"), note(how)]


def _matrix(title: str, pairs: list[Pair], cell: Callable[[Pair], StyledCell]) -> Table:
    """Methods down, contexts across."""
    contexts = sorted({pair.first.row.context_tokens for pair in pairs})
    cells = {(pair.first.name, pair.first.row.context_tokens): cell(pair) for pair in pairs}
    rows = [
        [name, *(cells.get((name, context), numbers.NOTHING) for context in contexts)]
        for name in dict.fromkeys(pair.first.name for pair in pairs)
    ]
    return Table(title, ["method", *map(numbers.tokens, contexts)], rows)


def _interval(ratio: Ratio) -> StyledCell:
    mark = {-1: "▼ ", 0: "", 1: "▲ "}[ratio.verdict]
    known = ratio.low is not None and ratio.high is not None
    spread = f"{ratio.low:.3f} – {ratio.high:.3f}" if known else "no interval"
    kind = {-1: "good", 0: "", 1: "bad"}[ratio.verdict]
    return StyledCell(f"{mark}{numbers.ratio(ratio.value)}", spread, kind)


def _once(pair: Pair, value: Callable[[ProfileRow], float | None]) -> StyledCell:
    first, second = map(value, pair.rows)
    return StyledCell(numbers.ratio(second / first) if first and second else numbers.NOTHING)


def _ttft(row: ProfileRow) -> float | None:
    return row.ttft_s


def _stored(row: ProfileRow) -> float | None:
    return sum(tiers(row.memory_bytes).values())


def ratio_figure(pairs: list[Pair], where: str, width: float) -> Picture:
    """TPOT of one context, second over first, one line per method."""
    rows = []
    for pair in pairs:
        ratio = pair.tpot
        tip = f"{pair.first.place}: TPOT {_words(ratio)}, {_WORDS[ratio.verdict]}"
        colour = _COLOURS[ratio.verdict]
        point = RangePoint(ratio.value, Marker("circle", colour, not ratio.verdict), tip)
        span = None if ratio.low is None or ratio.high is None else (ratio.low, ratio.high)
        rows.append(RangeRow(pair.first.name, (point,), span, colour, numbers.ratio(ratio.value)))
    ends = [end for row in rows for end in (*(row.span or ()), row.points[0].value)]
    low, high = min(0.95, *ends), max(1.05, *ends)
    return ranges_figure(
        f"ratio-{where}",
        f"TPOT, second run over first, {where}",
        "ratio of median step times, 95% interval",
        rows,
        width,
        scale=fitted(ends, log=True) if high / low > 4 else linear(low / 1.02, high * 1.02, 5),
        reference=1.0,
    )


def _words(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return numbers.ratio(ratio.value)
    return f"{numbers.ratio(ratio.value)} [{ratio.low:.3f}, {ratio.high:.3f}]"


def differences(first: ProfileReport, second: ProfileReport) -> list[list[str]]:
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
        [key, *(plain(flat.get(key, absent)) for flat in facts)]
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
