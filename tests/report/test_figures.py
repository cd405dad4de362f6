"""Figures: values land where they belong, labels keep apart, colours can be read."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.entries import Entry, entries_of, phases
from hybrid_kv.report.html.figures.bars import Bar, BarPart, bars_figure
from hybrid_kv.report.html.figures.frame import spread
from hybrid_kv.report.html.figures.heat import EDGES, heat_figure
from hybrid_kv.report.html.figures.lines import LinePoint, Series, lines_figure
from hybrid_kv.report.html.figures.points import place
from hybrid_kv.report.html.figures.scales import Scale, fitted
from hybrid_kv.report.html.palette import COLOURS, METHOD_SLOTS, looks
from hybrid_kv.report.html.profile_figures import (
    limit_figure,
    memory_figure,
    phases_figure,
    quality_figure,
    tpot_figure,
)
from hybrid_kv.report.html.scene import Box, Dot, Scene, Text, text_width
from hybrid_kv.report.run import AuditedHead, PhasesMs
from tests.report import profiles

WIDTHS = (840.0, 350.0)
positive = st.floats(1e-4, 1e7)


@given(st.lists(positive, min_size=1, max_size=9))
def test_all_values_lie_on_a_fitted_scale(values: list[float]) -> None:
    scale = fitted(values, 300.0, 20.0)
    for value in values:
        assert scale.low <= value <= scale.high
        assert 20.0 <= scale(value) <= 300.0


@given(st.lists(positive, min_size=1, max_size=9), st.integers(3, 9))
def test_ticks_are_few_distinct_and_inside(values: list[float], most: int) -> None:
    scale = fitted(values, 0.0, 100.0)
    ticks = scale.ticks(most)
    assert all(a < b for a, b in pairwise(ticks))
    assert all(scale.low * 0.999 <= tick <= scale.high * 1.001 for tick in ticks)
    if not scale.log:
        assert 2 <= len(ticks) <= most + 1


@pytest.mark.parametrize(("values", "log"), [((1.0, 7.0), False), ((1.0, 9.0), True)])
def test_a_wide_range_gets_a_logarithmic_axis(values: tuple[float, ...], log: bool) -> None:
    assert fitted(values, 0, 1).log is log


def test_a_logarithmic_scale_keeps_ratios() -> None:
    scale = Scale(1.0, 16.0, 0.0, 100.0, log=True)
    assert [scale(value) for value in (1, 2, 4, 8, 16)] == pytest.approx([0, 25, 50, 75, 100])


@given(st.lists(st.floats(0, 300), min_size=1, max_size=15))
def test_labels_keep_apart_and_in_order(wanted: list[float]) -> None:
    places = spread(wanted, 16.0, 0.0, 300.0)
    ordered = sorted(places)
    if 16.0 * (len(wanted) - 1) <= 300.0:
        assert -1e-6 <= ordered[0] <= ordered[-1] <= 300.0 + 1e-6
    assert all(b - a >= 16.0 - 1e-6 for a, b in pairwise(ordered))
    assert [places[i] for i in sorted(range(len(wanted)), key=wanted.__getitem__)] == ordered


def test_a_label_avoids_what_is_taken() -> None:
    right = (10.0, 90.0, 200.0, 110.0)
    box = place(60.0, 100.0, 100.0, [(95.0, 95.0, 105.0, 105.0), right], (0.0, 0.0, 300.0, 200.0))
    assert box[3] <= right[1] or box[1] >= right[3] or box[2] <= right[0] or box[0] >= right[2]


def entries(*contexts: int) -> list[Entry]:
    rows = profiles.profile(contexts or (4096, 32768)).rows
    return [entry for entry in entries_of(rows) if entry.row.tpot_ms is not None]


def scenes(width: float) -> list[Scene]:
    one = [entry for entry in entries() if entry.row.context_tokens == 32768]
    return [
        tpot_figure(entries(), width),
        phases_figure(one, "32K", width),
        memory_figure(one, "32K", width),
        quality_figure(one, "attended", "32K", width),
        quality_figure(one, "recall", "32K", width),
        limit_figure(one, "32K", width),
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_drawn_outside_of_a_figure(width: float) -> None:
    for scene in scenes(width):
        for mark in scene.marks:
            left, right = span(mark)
            assert left >= -1, (scene.name, mark)
            assert right <= width + 1, (scene.name, mark)


def span(mark: Any) -> tuple[float, float]:
    if isinstance(mark, Text):
        wide = text_width(mark.text, mark.size, bold=mark.bold)
        left = mark.x - {"start": 0.0, "middle": wide / 2, "end": wide}[mark.anchor]
        return left, left + wide
    if isinstance(mark, Box):
        return mark.x, mark.x + mark.width
    if isinstance(mark, Dot):
        return mark.x, mark.x
    xs = [x for x, _ in mark.points]
    return min(xs), max(xs)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_method_is_named_in_every_figure(width: float) -> None:
    searched = {"flat", "ivf", "quest", "retrieval_attention", "hybrid"}  # at 32K hnsw failed
    for scene in scenes(width):
        names = {mark.text for mark in scene.marks if isinstance(mark, Text)}
        assert searched <= names, scene.name


def test_bars_are_as_long_as_their_values() -> None:
    parts = (BarPart("a", "s1", 300.0), BarPart("b", "s2", 0.0), BarPart("c", "s3", 100.0))
    scene = bars_figure("n", "t", "ms", [Bar("one", parts)], 700.0, numbers.short)
    drawn = [mark for mark in scene.marks if isinstance(mark, Box) and mark.tip]
    assert [box.tip for box in drawn] == ["one · a: 300 (75.0%)", "one · c: 100 (25.0%)"]
    first, second = drawn
    assert (first.width + 1) / (second.width + 1) == pytest.approx(3.0)
    (tick,) = (mark.x for mark in scene.marks if isinstance(mark, Text) and mark.text == "300")
    assert second.x == pytest.approx(first.x + first.width + 1) == pytest.approx(tick)


def test_phases_do_not_count_anything_twice() -> None:
    row = profiles.row(
        "flat", 4096, phases_ms=PhasesMs(search=5.0, other=9.0, model=6.0, python=2.0)
    )
    assert phases(row) == {"search": 5.0, "model": 6.0, "python": 2.0, "other": 1.0}
    row = profiles.row("flat", 4096, phases_ms=PhasesMs(search=5.0, other=9.0))
    assert phases(row) == {"search": 5.0, "other": 9.0}
    row = profiles.row("flat", 4096, phases_ms=PhasesMs(search=5.0, wait=-1e-9))
    assert phases(row) == {"search": 5.0, "wait": 0.0}  # the rest of a subtraction


def test_the_heat_map_begins_a_colour_at_its_edge() -> None:
    shares = (0.0, EDGES[0] / 2, EDGES[0], EDGES[-1], 1.0)
    heads = [
        AuditedHead(
            layer=0, kv_head=i, looks=1, recall_at_k=None, missed_mass=share, output_error=0.0
        )
        for i, share in enumerate(shares)
    ]
    scene = heat_figure("n", "t", heads)
    cells = [mark for mark in scene.marks if isinstance(mark, Box) and mark.tip]
    assert [cell.colour for cell in cells] == ["h0", "h0", "h1", "h8", "h8"]


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_lines_can_be_read(theme: int) -> None:
    """WCAG 2.2: 4.5 for text, 3 for graphics; method names are bold text of their colour."""
    paper = COLOURS["paper"][theme]
    for name in ("ink", "soft", "accent", "good", "bad"):
        assert contrast(COLOURS[name][theme], paper) >= 4.5, name
    for slot in range(8):
        assert contrast(COLOURS[f"s{slot}"][theme], paper) >= 3.0, slot
    assert contrast(COLOURS["loud"][theme], COLOURS["loudpaper"][theme]) >= 4.5


def test_methods_are_told_apart_without_colour() -> None:
    found = looks(name for name in METHOD_SLOTS if name != "graph").values()
    assert len({(look.shape, look.dash) for look in found}) == len(METHOD_SLOTS) - 1
    assert len({look.colour for look in found}) == len(METHOD_SLOTS) - 1


def test_a_known_method_keeps_its_look_whatever_stands_beside_it() -> None:
    assert looks(["mine", "hybrid"])["hybrid"] == looks(["hybrid"])["hybrid"]
    assert looks(["mine", "hybrid"])["mine"] != looks(["hybrid"])["hybrid"]


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (numbers.short(0.0123), "0.0123"),
        (numbers.short(1234.5), "1,234"),
        (numbers.short(None), "–"),
        (numbers.seconds(0.0123), "12.3 ms"),
        (numbers.seconds(61.0), "61.0 s"),
        (numbers.percent(0.00123), "0.12%"),
        (numbers.percent(0.123), "12.3%"),
        (numbers.tokens(131072), "128K"),
        (numbers.tokens(1 << 20), "1M"),
        (numbers.tokens(1000), "1,000"),
        (numbers.size(1536), "1.5 KiB"),
        (numbers.tick(70.0), "70"),
        (numbers.tick(0.25), "0.25"),
        (numbers.ratio(19.93), "19.9×"),
    ],
)
def test_numbers_are_short(shown: str, text: str) -> None:
    assert shown == text


def test_the_name_of_a_line_stands_where_it_ends() -> None:
    """Names stood at the longest context, as if it had not been skipped there."""
    look = looks(["short", "long"])
    series = [
        Series("long", look["long"], tuple(LinePoint(n, 9.0, "") for n in (1024, 4096, 16384))),
        Series("short", look["short"], (LinePoint(1024, 20.0, ""), LinePoint(4096, 30.0, ""))),
    ]
    scene = lines_figure("n", "t", "ms", series, 840, str)
    dots = sorted(mark.x for mark in scene.marks if isinstance(mark, Dot))
    at = {mark.text: mark.x for mark in scene.marks if isinstance(mark, Text)}
    assert dots[-1] < at["long"]
    assert at["short"] == dots[-2]  # at its own end, before what was skipped
