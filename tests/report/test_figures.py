"""Figures: values land where they belong, nothing is cut, colours can be read."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.canvas import COLOURS, Canvas, Marker, Picture, drawn, to_inline
from hybrid_kv.report.html.figures import (
    Bar,
    BarPart,
    LinePoint,
    Series,
    Spot,
    bars_figure,
    fitted,
    linear,
    lines_figure,
    spots_figure,
)
from hybrid_kv.report.html.page_entries import METHOD_SLOTS, Entry, entries_of, looks, phases
from hybrid_kv.report.html.pictures import (
    limit_figure,
    memory_figure,
    phases_figure,
    quality_figure,
    tpot_figure,
)
from hybrid_kv.report.html.tables import EDGES, heat_table
from hybrid_kv.report.run import AuditedHead, AuditReport, PhasesMs
from tests.report import profiles

WIDTHS = (640.0, 380.0)
positive = st.floats(1e-4, 1e7)


@given(st.lists(positive, min_size=1, max_size=9))
def test_all_values_lie_on_a_fitted_scale(values: list[float]) -> None:
    scale = fitted(values)
    assert all(scale.low <= value <= scale.high for value in values)


@given(st.lists(positive, min_size=1, max_size=9), st.integers(3, 9))
def test_ticks_are_few_distinct_and_inside(values: list[float], most: int) -> None:
    scale = fitted(values, most=most)
    assert all(a < b for a, b in pairwise(scale.ticks))
    assert all(scale.low * 0.999 <= one <= scale.high * 1.001 for one in scale.ticks)
    assert 1 <= len(scale.ticks) <= most + 1


@pytest.mark.parametrize(("values", "log"), [((1.0, 7.0), False), ((1.0, 9.0), True)])
def test_a_wide_range_gets_a_logarithmic_axis(values: tuple[float, ...], log: bool) -> None:
    assert fitted(values).log is log


def canvas_of(picture: Picture) -> Canvas:
    return drawn(picture, lambda name: COLOURS[name][0])


def entries(*contexts: int) -> list[Entry]:
    rows = profiles.profile(contexts or (4096, 32768)).rows
    return [entry for entry in entries_of(rows) if entry.row.tpot_ms is not None]


def pictures(width: float) -> list[Picture]:
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
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for picture in pictures(width):
        figure = canvas_of(picture).figure
        renderer = FigureCanvasAgg(figure).get_renderer()
        box = figure.get_tightbbox(renderer)  # in inches, of 72 pixels
        assert box.x0 >= -2 / 72, picture.name
        assert box.x1 <= (width + 2) / 72, picture.name
        assert box.y0 >= -2 / 72, picture.name
        assert box.y1 <= (picture.height + 2) / 72, picture.name


@pytest.mark.parametrize("width", WIDTHS)
def test_every_method_is_named_in_every_figure(width: float) -> None:
    searched = {"flat", "ivf", "quest", "retrieval_attention", "hybrid"}  # at 32K hnsw failed
    for picture in pictures(width):
        text = to_inline(picture, "a")
        assert all(f">{name}</text>" in text for name in searched), picture.name


def test_names_and_legends_do_not_touch() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for picture in pictures(380.0):
        figure = canvas_of(picture).figure
        renderer = FigureCanvasAgg(figure).get_renderer()
        legends = [legend.get_window_extent(renderer) for legend in figure.legends]
        texts = [text.get_window_extent(renderer) for text in figure.texts if text.get_text()]
        for box in legends:
            assert not any(box.overlaps(text) for text in texts), picture.name
            assert not any(box.overlaps(axes.get_window_extent(renderer)) for axes in figure.axes)


def test_bars_are_as_long_as_their_values() -> None:
    parts = (BarPart("a", "s1", 300.0), BarPart("b", "s2", 0.0), BarPart("c", "s3", 100.0))
    canvas = canvas_of(bars_figure("n", "t", "ms", [Bar("one", parts)], 640.0, numbers.short))
    first, second = canvas.figure.axes[0].patches
    assert canvas.tips == ["one · a: 300 (75.0%)", "one · c: 100 (25.0%)"]
    assert (first.get_x(), first.get_width()) == (0.0, 300.0)
    assert (second.get_x(), second.get_width()) == (300.0, 100.0)


def test_phases_do_not_count_anything_twice() -> None:
    row = profiles.row(
        "flat", 4096, phases_ms=PhasesMs(search=5.0, other=9.0, model=6.0, python=2.0)
    )
    assert phases(row) == {"search": 5.0, "model": 6.0, "python": 2.0, "other": 1.0}
    row = profiles.row("flat", 4096, phases_ms=PhasesMs(search=5.0, other=9.0))
    assert phases(row) == {"search": 5.0, "other": 9.0}
    row = profiles.row("flat", 4096, phases_ms=PhasesMs(search=5.0, wait=-1e-9))
    assert phases(row) == {"search": 5.0, "wait": 0.0}  # the rest of a subtraction


def heads(places: dict[tuple[int, int], float]) -> Entry:
    found = tuple(
        AuditedHead(
            layer=layer,
            kv_head=head,
            looks=1,
            recall_at_k=None,
            missed_mass=share,
            output_error=0.0,
        )
        for (layer, head), share in places.items()
    )
    row = profiles.row("flat", 4096, audit=AuditReport(looks=len(found), heads=found))
    return entries_of([row])[0]


def test_the_heat_map_begins_a_colour_at_its_edge() -> None:
    shares = (0.0, EDGES[0] / 2, EDGES[0], EDGES[-1], 1.0)
    table = heat_table(heads({(0, i): share for i, share in enumerate(shares)}))
    ((_, *cells),) = table.rows
    assert [cell.kind for cell in cells] == ["h0", "h0", "h1", "h8", "h8"]  # type: ignore[union-attr]


def test_rows_of_a_heat_map_are_named_and_empty_is_not_zero() -> None:
    table = heat_table(heads({(3, 0): 0.0, (7, 1): 0.5}))
    assert table.head == ["layer", "0", "1"]
    assert [row[0] for row in table.rows] == ["3", "7"]
    (_, zero, empty), (_, _, half) = table.rows
    assert (zero.text, empty.text, half.text) == ("0", "–", "50")  # type: ignore[union-attr]
    assert (zero.kind, empty.kind) == ("h0", "none")  # type: ignore[union-attr]
    assert "not looked at" in empty.tip  # type: ignore[union-attr]


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
    """WCAG 2.2: 4.5 for text, 3 for graphics."""
    paper = COLOURS["paper"][theme]
    for name in ("ink", "soft", "accent", "good", "bad"):
        assert contrast(COLOURS[name][theme], paper) >= 4.5, name
    for slot in range(8):
        assert contrast(COLOURS[f"s{slot}"][theme], paper) >= 3.0, slot
    assert contrast(COLOURS["loud"][theme], COLOURS["loudpaper"][theme]) >= 4.5
    for step in range(9):
        text = "hi" if step >= 5 else "lo"  # as the style sheet has it
        assert contrast(COLOURS[text][theme], COLOURS[f"h{step}"][theme]) >= 4.5, step


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
        (numbers.percent(-0.021), "−2.1%"),
        (numbers.percent(-1e-9), "0.0%"),
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


def test_a_line_goes_through_its_values_and_hollow_is_what_was_cut_short() -> None:
    look = looks(["flat"])["flat"]
    points = (LinePoint(1024, 9.0, "first"), LinePoint(4096, 20.0, "second", 15.0, 30.0, True))
    canvas = canvas_of(lines_figure("n", "t", "ms", [Series("flat", look, points)], 640, str))
    (axes,) = canvas.figure.axes
    joined, first, whisker, second = axes.lines
    assert joined.get_xydata().tolist() == [[1024, 9], [4096, 20]]
    assert whisker.get_xydata().tolist() == [[4096, 15], [4096, 30]]
    assert canvas.tips == ["first", "second"]
    assert first.get_markerfacecolor() == COLOURS[look.colour][0]
    assert second.get_markerfacecolor() == COLOURS["paper"][0]


def test_every_mark_has_its_tip_and_colours_are_the_pages() -> None:
    look = looks(["a", "b"])
    spots = [Spot(name, look[name], x, 0.5, f"<{name}>") for x, name in ((1, "a"), (2, "b"))]
    scales = (fitted([1, 2]), linear(0, 1))
    text = to_inline(spots_figure("n", "t", ("x", "y"), spots, 380, scales=scales), "i")
    assert [text.count(f"<title>&lt;{name}&gt;</title>") for name in "ab"] == [1, 1]
    assert f"var(--{look['a'].colour})" in text
    assert "#c0fe" not in text


def test_a_text_is_drawn_as_it_is() -> None:
    def draw(canvas: Canvas) -> None:
        canvas.text(1, 1, r"a $b_{1$ \c <&> 1.23456")
        canvas.mark(canvas.axes(9, 9, 9, 9), (0.5, 0.5), Marker("cross", "s1"))

    text = to_inline(Picture("n", "t", "d", 200, 100, draw), "i")
    assert r">a $b_{1$ \c &lt;&amp;&gt; 1.23456</text>" in text


def test_a_figure_is_the_same_each_time() -> None:
    made: list[Any] = [to_inline(tpot_figure(entries(), 380.0), "x") for _ in range(2)]
    assert made[0] == made[1]
